"""Exceptions by name for what mixes tokens: linear attention, state-space mixers, indexers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hub.family import MEASURE_HINT
from actcalc.io.hub.reading import Reading
from actcalc.specs.base import MAX_LAYERS

MIXERS: dict[str, Callable[[Reading], None]] = {}
"""Rules by name."""


def _adjust(name: str) -> Callable[[Callable[[Reading], None]], Callable[[Reading], None]]:
    def register(rule: Callable[[Reading], None]) -> Callable[[Reading], None]:
        MIXERS[name] = rule
        return rule

    return register


_DELTA_KEYS = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv": ("linear_conv_kernel_dim", 4),
}


def _linear(reading: Reading, defaults: Mapping[str, int], **more: Any) -> None:
    """Set the linear attention from its usual keys, or what the library takes without them."""
    sizes = {
        name: reading.values.size((key,)) or defaults.get(name, default)
        for name, (key, default) in _DELTA_KEYS.items()
    }
    reading.fields["linear"] = {**sizes, **more}


@_adjust("gated_delta")
def _gated_delta(reading: Reading) -> None:
    _linear(reading, {})


@_adjust("gated_delta_olmo")
def _gated_delta_olmo(reading: Reading) -> None:
    """Heads as many as attention's, keys of three quarters of the width, values twice as wide.

    Without ``rope_parameters`` its attention has no positions.
    """
    fields, values = reading.fields, reading.values
    heads = fields["heads"]
    keys = values.size(("linear_num_key_heads",)) or heads
    width = values.size(("linear_key_head_dim",)) or int(0.75 * fields["hidden"] / keys)
    _linear(
        reading,
        {"key_heads": heads, "value_heads": heads, "key_dim": width, "value_dim": 2 * width},
        doubled=values.flag("linear_allow_neg_eigval", True),
    )
    if not values.has("rope_parameters"):
        fields["position"] = "none"


@_adjust("indexer")
def _indexer(reading: Reading) -> None:
    sizes = (("heads", "index_n_heads", 64), ("head_dim", "index_head_dim", 128),
             ("topk", "index_topk", 2048))  # fmt: skip
    if reading.model_type == "glm_moe_dsa":
        sizes = (("heads", "index_n_heads", 32), *sizes[1:])
    reading.fields["indexer"] = {
        name: reading.values.size((key,)) or default for name, key, default in sizes
    }


@_adjust("shared_picks")
def _shared_picks(reading: Reading) -> None:
    """Layers may reuse the keys that a layer before them picked: refused, for they have no indexer.

    ``index_topk_freq`` above 1, ``index_topk_pattern`` and ``indexer_types`` say so.
    """
    values = reading.values
    every = values.size(("index_topk_freq",)) or 1
    listed = str(values.data.get("index_topk_pattern") or "")
    kinds = values.items("indexer_types") or []
    if every > 1 or "S" in listed or "shared" in kinds:
        raise SpecError(
            "glm_moe_dsa with layers that share picked keys (index_topk_freq, indexer_types) "
            "is not described",
            MEASURE_HINT,
        )


@_adjust("kimi_delta")
def _kimi_delta(reading: Reading) -> None:
    """Checkpoints keep its sizes under ``linear_attn_config``."""
    sizes = (("linear_num_heads", "num_heads", 32), ("linear_head_dim", "head_dim", 128),
             ("linear_conv_kernel_dim", "short_conv_kernel_size", 4))  # fmt: skip
    section = reading.values.section("linear_attn_config")
    heads, width, conv = (
        section.size((inner,)) or reading.values.size((outer,)) or default
        for outer, inner, default in sizes
    )
    reading.fields["linear"] = {
        "rule": "kimi_delta", "key_heads": heads, "value_heads": heads, "key_dim": width,
        "value_dim": width, "conv": conv,
    }  # fmt: skip


@_adjust("kimi_groups")
def _kimi_groups(reading: Reading) -> None:
    moe = reading.fields.get("moe")
    if moe:
        moe["groups"] = reading.values.size(("num_expert_group", "n_group")) or 1
        moe["topk_groups"] = reading.values.size(("topk_group",)) or 1


@_adjust("qwen3_5_predicts")
def _qwen3_5_predicts(reading: Reading) -> None:
    key = "mtp_num_hidden_layers"
    if reading.values.has(key):
        reading.fields["mtp_layers"] = reading.values.integer(key, 0, MAX_LAYERS)


def _expanded(reading: Reading, key: str = "expand") -> int:
    return int(reading.fields["hidden"] * (reading.values.number(key) or 2))


def _first_mamba(reading: Reading, prefix: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Sizes of a Mamba of the first version; a rank of a sixteenth of the width by default."""
    values, hidden = reading.values, reading.fields["hidden"]
    rank = names["rank"]
    inner = values.size((names["inner"],)) if "inner" in names else None
    automatic = not values.has(rank) or values.data[rank] == "auto"
    return {
        "version": 1,
        "heads": inner or _expanded(reading, f"{prefix}expand"),
        "head_dim": 1,
        "groups": 1,
        "state": values.size((names["state"],)) or 16,
        "conv": values.size((names["conv"],)) or 4,
        "rank": -(-hidden // 16) if automatic else values.integer(rank, 1),
        "bias": values.flag(names["bias"], False),
        "conv_bias": values.flag(names["conv_bias"], True),
    }


@_adjust("mamba1")
def _mamba1(reading: Reading) -> None:
    names = {
        "inner": "intermediate_size", "state": "state_size", "conv": "conv_kernel",
        "rank": "time_step_rank", "bias": "use_bias", "conv_bias": "use_conv_bias",
    }  # fmt: skip
    fields = reading.fields
    fields["mamba"] = _first_mamba(reading, "", names)
    _only_mamba(reading)


def _only_mamba(reading: Reading) -> None:
    fields = reading.fields
    fields["pattern"] = "M" * reading.layers
    fields["fp32_stream"] = reading.values.flag("residual_in_fp32", True)
    fields.pop("kv_heads", None)


@_adjust("mamba_jamba")
def _mamba_jamba(reading: Reading) -> None:
    names = {
        "state": "mamba_d_state", "conv": "mamba_d_conv", "rank": "mamba_dt_rank",
        "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
    }  # fmt: skip
    reading.fields["mamba"] = _first_mamba(reading, "mamba_", names)


@_adjust("mamba2")
def _mamba2(reading: Reading) -> None:
    values = reading.values
    reading.fields["mamba"] = {
        "state": values.size(("state_size",)) or 128,
        "head_dim": values.size(("head_dim",)) or 64,
        "groups": values.size(("n_groups",)) or 8,
        "heads": values.size(("num_heads",)) or 128,
        "conv": values.size(("conv_kernel",)) or 4,
        "chunk": values.size(("chunk_size",)) or 256,
        "bias": values.flag("use_bias", False),
        "conv_bias": values.flag("use_conv_bias", True),
    }
    _only_mamba(reading)


@_adjust("mamba_bamba")
def _mamba_bamba(reading: Reading) -> None:
    values = reading.values
    heads = values.size(("mamba_n_heads",)) or 128
    width = values.data.get("mamba_d_head")
    automatic = width in (None, "auto")
    reading.fields["mamba"] = {
        "state": values.size(("mamba_d_state",)) or 256,
        "head_dim": (
            _expanded(reading, "mamba_expand") // heads
            if automatic
            else values.integer("mamba_d_head", 1)
        ),
        "groups": values.size(("mamba_n_groups",)) or 1,
        "heads": heads,
        "conv": values.size(("mamba_d_conv",)) or 4,
        "chunk": values.size(("mamba_chunk_size",)) or 256,
        "bias": values.flag("mamba_proj_bias", False),
        "conv_bias": values.flag("mamba_conv_bias", True),
    }


@_adjust("falcon_h1")
def _falcon_h1(reading: Reading) -> None:
    """A mixer as wide as ``mamba_d_ssm``, whose gated norm may be left out."""
    values = reading.values
    _mamba_bamba(reading)
    mamba = reading.fields["mamba"]
    expanded = values.named("mamba_d_ssm") and not values.has("mamba_d_ssm")
    width = _expanded(reading, "mamba_expand") if expanded else values.size(("mamba_d_ssm",))
    width = width or 1024
    if values.data.get("mamba_d_head") in (None, "auto"):
        mamba["head_dim"] = width // mamba["heads"]
    mamba["norm"] = values.flag("mamba_rms_norm", False)
    if mamba["heads"] * mamba["head_dim"] != width:
        raise values.wrong(
            "mamba_d_ssm", f"not {mamba['heads']} heads of {mamba['head_dim']}",
            "set mamba_n_heads and mamba_d_head to its factors",
        )  # fmt: skip
    if values.flag("projectors_bias", False) != mamba["bias"]:
        raise values.wrong("projectors_bias", "not mamba_proj_bias", "set both alike")


@_adjust("lightning")
def _lightning(reading: Reading) -> None:
    """Lightning attention has a key and a value for each of attention's heads."""
    fields, values = reading.fields, reading.values
    width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    fields["linear"] = {
        "rule": "lightning", "key_heads": fields["heads"], "value_heads": fields["heads"],
        "key_dim": width, "value_dim": width, "block": values.size(("block_size",)) or 256,
    }  # fmt: skip
    if values.number("router_jitter_noise") > 0:
        raise values.wrong("router_jitter_noise", "noise on inputs is not described", "set it to 0")


@_adjust("short_conv")
def _short_conv(reading: Reading) -> None:
    """A short convolution over all of the width, where a layer has no attention."""
    fields, values = reading.fields, reading.values
    fields["linear"] = {
        "rule": "short_conv", "key_heads": 1, "value_heads": 1, "key_dim": fields["hidden"],
        "value_dim": fields["hidden"], "conv": values.size(("conv_L_cache",)) or 3,
        "bias": values.flag("conv_bias", False),
    }  # fmt: skip


@_adjust("wkv")
def _wkv(reading: Reading) -> None:
    """RWKV's time mix in every layer, over as many tokens as its kernel is made for."""
    fields, values = reading.fields, reading.values
    width = values.size(("attention_hidden_size",)) or fields["hidden"]
    fields["attention_pattern"] = ("linear",) * reading.layers
    fields["linear"] = {
        "rule": "wkv", "key_heads": 1, "value_heads": 1, "key_dim": width, "value_dim": width,
        "block": reading.size("positions"),
    }  # fmt: skip


@_adjust("rounded_ffn")
def _rounded_ffn(reading: Reading) -> None:
    """Two thirds of the width that is stated, times a factor, rounded up (Lfm2MLP)."""
    fields, values = reading.fields, reading.values
    if not values.flag("block_auto_adjust_ff_dim", True) or "ffn" not in fields:
        return
    wide = int(2 * fields["ffn"] / 3)
    key = "block_ffn_dim_multiplier"
    if values.has(key) or not values.named(key):
        multiple = values.size(("block_multiple_of",)) or 256
        wide = int(values.number(key, 1.0) * wide)
        wide = -(-wide // multiple) * multiple
    fields["ffn"] = wide


@_adjust("tied_embedding")
def _tied_embedding(reading: Reading) -> None:
    fields, values = reading.fields, reading.values
    fields["tied"] = values.flag("tie_embedding", fields["tied"])


@_adjust("expert_bias")
def _expert_bias(reading: Reading) -> None:
    """The bias that balances experts may be left out."""
    _tied_embedding(reading)
    if reading.fields.get("moe"):
        reading.fields["moe"]["correction_bias"] = reading.values.flag("use_expert_bias", True)


@_adjust("zamba2")
def _zamba2(reading: Reading) -> None:
    """Attention of twice the hidden width in blocks that layers share; mixers are as wide."""
    values, fields = reading.values, reading.fields
    hidden = fields["hidden"]
    fields["head_dim"] = 2 * hidden // fields["heads"]
    fields["position"] = "rotary" if values.flag("use_mem_rope", False) else "none"
    fields["mlp_pattern"] = ("none",) * reading.layers
    fields["shared"] = {
        "blocks": values.size(("num_mem_blocks",)) or 1,
        "rank": values.size(("adapter_rank",)) or 128,
        "in_attention": values.flag("use_shared_attention_adapter", False),
    }
    heads = values.size(("n_mamba_heads",)) or 8
    fields["mamba"] = {
        "state": values.size(("mamba_d_state",)) or 64,
        "head_dim": _expanded(reading, "mamba_expand") // heads,
        "groups": values.size(("mamba_ngroups",)) or 1,
        "heads": heads,
        "conv": values.size(("mamba_d_conv",)) or 4,
        "chunk": values.size(("chunk_size",)) or 256,
        "bias": values.flag("add_bias_linear", False),
    }


@_adjust("granite_hybrid")
def _granite_hybrid(reading: Reading) -> None:
    """Without experts only the shared feed-forward is left; rotary position if it is asked for."""
    fields, values = reading.fields, reading.values
    if not fields.get("moe"):
        fields["ffn"] = values.size(("shared_intermediate_size",)) or 1024
    if values.text("position_embedding_type") != "rope":
        fields["position"] = "none"


_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*",
            "mlp": "-", "moe": "E"}  # fmt: skip


@_adjust("lettered")
def _lettered(reading: Reading) -> None:
    """Nemotron-H: a letter, or a word, for every layer, which is one part alone."""
    fields, values = reading.fields, reading.values
    key = values.first(("layers_block_type", "layer_types"))
    pattern = values.text("hybrid_override_pattern")
    if key and pattern is None:
        words = [str(word) for word in values.items(key) or []]
        if any(word not in _LETTERS for word in words):
            raise values.wrong(key, "not kinds of layers", "write " + ", ".join(_LETTERS))
        pattern = "".join(_LETTERS[word] for word in words)
    if not pattern:
        reading.missing.append("hybrid_override_pattern")
        return
    if len(pattern) != reading.layers or set(pattern) - set("M*-E"):
        raise values.wrong(
            "hybrid_override_pattern",
            f"not {reading.layers} letters of M, *, - and E",
            "write one letter per layer",
        )
    fields["pattern"] = pattern
    fields.pop("attention_pattern", None)
    fields["mamba"] = {
        "state": values.size(("ssm_state_size",)) or 128,
        "head_dim": values.size(("mamba_head_dim",)) or 64,
        "groups": values.size(("n_groups", "mamba_n_groups")) or 8,
        "heads": values.size(("mamba_num_heads",)) or 128,
        "conv": values.size(("conv_kernel", "mamba_d_conv")) or 4,
        "chunk": values.size(("chunk_size", "mamba_chunk_size")) or 128,
        "bias": values.flag("use_bias", False),
        "conv_bias": values.flag("use_conv_bias", True),
    }
    if "E" not in pattern:
        fields.pop("moe", None)
    elif fields.get("moe") and values.has("moe_latent_size"):
        fields["moe"]["latent"] = values.integer("moe_latent_size", 1)
    inside = values.text("mtp_hybrid_override_pattern") or "".join(
        _LETTERS.get(str(word), "") for word in values.items("mtp_layers_block_type") or []
    )
    count = (
        values.integer("num_nextn_predict_layers")
        if inside and values.has("num_nextn_predict_layers")
        else 0
    )
    if inside and count:
        fields |= {"mtp_layers": count, "mtp_pattern": inside}


@_adjust("compression")
def _compression(reading: Reading) -> None:
    """DeepSeek-V4: what its configuration leaves out are the library's own values."""
    fields, values = reading.fields, reading.values
    rates = values.section("compress_rates")
    fields["compression"] = {
        "q_lora": values.size(("q_lora_rank",)) or 1024,
        "sparse_rate": rates.size(("compressed_sparse_attention",))
        or values.size(("compress_rate_csa",))
        or 4,
        "heavy_rate": rates.size(("heavily_compressed_attention",))
        or values.size(("compress_rate_hca",))
        or 128,
        "groups": values.size(("o_groups",)) or 8,
        "group_rank": values.size(("o_lora_rank",)) or 1024,
        "index_heads": values.size(("index_n_heads",)) or 64,
        "index_dim": values.size(("index_head_dim",)) or 128,
        "index_topk": values.size(("index_topk",)) or 512,
    }
    fields["streams"] = values.size(("hc_mult",)) or 4
    fields["sinkhorn_iterations"] = values.size(("hc_sinkhorn_iters",)) or 20
    share = values.number("partial_rotary_factor", 0)
    rotated = values.size(("qk_rope_head_dim",)) or 64
    fields["rotary_dim"] = int(fields["head_dim"] * share) if share else rotated
    scoring = values.text("scoring_func") or "sqrtsoftplus"
    if scoring != "sqrtsoftplus":
        raise values.wrong("scoring_func", "only sqrtsoftplus is described", "leave it out")
