"""One reader for every model type: sizes, facts, flags, rates and rules become model fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hub.adjust import ADJUST
from actcalc.io.hub.families import ALIASES, FAMILIES, LLAMA, NESTS
from actcalc.io.hub.family import ACTIVATIONS, MEASURE_HINT, SIZES, Family, Keys
from actcalc.io.hub.patterns import (
    ROPE_RULES,
    WINDOWED,
    attention_kinds,
    mlp_kinds,
    window_of,
)
from actcalc.io.hub.reading import Reading
from actcalc.io.hub.refused import REFUSED
from actcalc.io.hub.towers import read_tower
from actcalc.io.hub.transformers_types import TRANSFORMERS_TYPES
from actcalc.io.hub.values import Values, shown
from actcalc.specs.base import MAX_LAYERS

DEFAULT_SEQ = 4096
"""Longest sequence assumed where a configuration allows more."""

_LLAMA_KEYS: Keys = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
_NOT_LLAMA: Keys = (
    "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "type_vocab_size",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "patch_size", "is_encoder_decoder",
    "kv_lora_rank", "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts",
    "cross_attention_layers",
)  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read(config: Mapping[str, Any]) -> Reading:
    """Read a configuration; ``SpecError`` where it cannot be described or holds bad values."""
    outer = Values(config)
    values, nested = language_model(outer)
    model_type = values.text("model_type") or outer.text("model_type") or ""
    family, warnings = _family(model_type, values)
    reading = Reading(family, model_type, values, outer, nested, warnings=warnings)
    _sizes(reading)
    _facts(reading)
    towered = read_tower(reading, outer.text("model_type") or "")
    if nested and not towered:
        reading.warnings.append(
            f"only the language model ({values.path}) is read; other parts are left out"
        )
    if family.latent:
        _latent(reading)
    if family.experts:
        _experts(reading)
    for name in family.adjust:
        ADJUST[name](reading)
    if reading.missing:
        raise SpecError(
            f"model_type {shown(model_type)}: missing {', '.join(reading.missing)}",
            "add the missing keys, or describe the model as YAML",
        )
    _rotary(reading)
    _workload(reading)
    _notes(reading)
    return reading


def language_model(outer: Values) -> tuple[Values, bool]:
    """The values that describe the layers: those of ``text_config`` where there is one."""
    for key in NESTS:
        if outer.has(key) and outer.first(SIZES["layers"]) is None:
            inner = outer.section(key)
            deeper = next((name for name in NESTS if inner.has(name)), None)
            return (inner.section(deeper) if deeper else inner), True
    return outer, False


def _family(model_type: str, values: Values) -> tuple[Family, list[str]]:
    name = ALIASES.get(model_type, model_type)
    if name in FAMILIES:
        return FAMILIES[name], []
    if name in TRANSFORMERS_TYPES:
        raise SpecError(
            f"model_type {shown(model_type)} cannot be described: transformers has code of its own "
            "for it, of which no row here says what it does",
            MEASURE_HINT,
        )
    missing = [key for key in _LLAMA_KEYS if not values.has(key)]
    what = f"unknown model_type {shown(model_type)}" if model_type else "model_type is missing"
    if missing:
        raise SpecError(
            f"{what}, and the standard Llama keys are not all there: missing {', '.join(missing)}",
            MEASURE_HINT,
        )
    odd = [key for key in _NOT_LLAMA if values.has(key) and values.data[key] is not False]
    if odd:
        raise SpecError(
            f"{what}, and {', '.join(odd[:3])} say it is not built like Llama", MEASURE_HINT
        )
    note = f"{what}: read as a Llama (pre-norm RMSNorm, rotary, SwiGLU), from its Llama keys"
    return LLAMA, [note]


def _sizes(reading: Reading) -> None:
    family, fields = reading.family, reading.fields
    needed = ["hidden", "layers", "heads"] + ([] if family.vision else ["vocab"])
    if family.attentionless:
        needed.remove("heads")
        fields["heads"] = 1
    for name in needed:
        found = reading.size(name, MAX_LAYERS if name == "layers" else None)
        if found is None and name == "layers":
            found = _listed_layers(reading.values)
        if found is None:
            keys = family.keys.get(name) or SIZES[name]
            reading.missing.append(keys[0])
        else:
            fields[name] = found
    if reading.missing:
        raise SpecError(
            f"model_type {shown(reading.model_type)}: missing {', '.join(reading.missing)}",
            "add the missing keys, or describe the model as YAML",
        )
    if not family.latent:
        for name in () if family.attentionless else ("kv_heads", "head_dim"):
            found = reading.size(name)
            if found is not None:
                fields[name] = found
        fields.setdefault("kv_heads", fields["heads"])
    ffn = reading.size("ffn")
    if ffn is not None:
        fields["ffn"] = ffn
    elif family.wide:
        fields["ffn"] = 4 * fields["hidden"]
    if family.facts.get("position") == "learned" and not family.vision:
        found = reading.size("positions")
        if found is None:
            reading.missing.append(SIZES["positions"][0])
        fields["max_positions"] = found or 0


def _listed_layers(values: Values) -> int | None:
    """Number of layers of a configuration that only lists them, by words or letters."""
    pattern = values.text("hybrid_override_pattern")
    if pattern:
        return len(pattern)
    key = values.first(("layers_block_type", "layer_types"))
    return len(values.items(key) or []) or None if key else None


def _facts(reading: Reading) -> None:
    family, fields, values = reading.family, reading.fields, reading.values
    fields["family"] = ALIASES.get(reading.model_type, reading.model_type) or "llama"
    fields |= family.facts
    for name, (key, default) in family.flags.items():
        fields[name] = values.flag(key, default)
    for name, (keys, rate) in family.rates.items():
        fields[name] = values.rate(keys, rate)
    fields["activation"] = _activation(reading)
    if "tied" not in family.facts:
        fields["tied"] = reading.outer.flag("tie_word_embeddings", family.tied)
        fields["tied"] = values.flag("tie_word_embeddings", fields["tied"])
    window = 0 if family.windows == "none" else window_of(family, values)
    kinds = attention_kinds(family, values, reading.layers, window)
    if kinds:
        if any(kind in WINDOWED for kind in kinds):
            fields["window"] = window
        if len(set(kinds)) > 1 or kinds[0] != "sliding":
            fields["attention_pattern"] = kinds
    if family.no_rope:
        fields["no_rope_layers"] = ROPE_RULES[family.no_rope](values, reading.layers, kinds)
    if family.latent and fields.get("out_bias"):
        reading.warnings.append("attention_bias: biases of the latent projections are as in V3")


def _activation(reading: Reading) -> str:
    key, default = reading.family.activation
    if not key:
        return ACTIVATIONS.get(default, default) or "gelu"
    name = reading.values.text(key)
    if name is None and key == "hidden_activation":
        name = reading.values.text("hidden_act")
    name = name or default
    if name not in ACTIVATIONS:
        raise SpecError(
            f"{reading.values.label(key)} is {shown(name)}: no such activation is described",
            "known: " + ", ".join(sorted(ACTIVATIONS)),
        )
    return ACTIVATIONS[name]


def _rotary(reading: Reading) -> None:
    """Set the width that is rotated when it is only a share of a head."""
    fields, values = reading.fields, reading.values
    if fields.get("position") != "rotary" or fields.get("mla") or "rotary_dim" in fields:
        return
    share = reading.family.rotary
    ropes = values.section("rope_parameters")
    for key in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
        share = values.number(key, share)
    share = ropes.number("partial_rotary_factor", share)
    if not 0 < share <= 1:
        raise SpecError(
            f"partial_rotary_factor is {share:g}: not a share of a head",
            "give a value above 0, at most 1",
        )
    width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    rotated = int(width * share)
    if 0 < rotated < width:
        fields["rotary_dim"] = rotated


def _latent(reading: Reading) -> None:
    values, fields = reading.values, reading.fields
    keys = {
        "kv_lora": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
    }
    mla: dict[str, int] = {
        "q_lora": values.integer("q_lora_rank") if values.has("q_lora_rank") else 0
    }
    for name, key in keys.items():
        found = values.size((key,))
        if found is None:
            reading.missing.append(key)
        else:
            mla[name] = found
    fields["mla"] = mla


def _experts(reading: Reading) -> None:
    experts, values, fields = reading.family.experts, reading.values, reading.fields
    if experts is None:
        return
    key = values.first(experts.count)
    count = 0 if key is None else values.integer(key)
    if not count:
        if not experts.optional:
            reading.missing.append(experts.count[0])
        return
    kinds = mlp_kinds(experts, values, reading.layers)
    topk, width = values.size(experts.topk), values.size(experts.width)
    for found, keys in ((topk, experts.topk), (width, experts.width)):
        if found is None:
            reading.missing.append(keys[0])
    if topk is None or width is None or "moe" not in kinds:
        return
    shared = values.size(experts.shared_width) or 0 if _some(values, experts.shared_width) else 0
    for name in experts.shared_count:
        number = experts.shared_default if not values.named(name) else 0
        shared = (values.integer(name) if values.has(name) else number) * width
    aux = values.number(experts.aux_key) > 0 if values.has(experts.aux_key) else experts.aux
    key, default = experts.normalize
    moe = {
        "experts": count,
        "topk": topk,
        "ffn": width,
        "shared_ffn": shared,
        "router": experts.router,
        "aux_loss": aux,
        "normalize_topk": values.flag(key, default) if key else default,
        **experts.facts,
    }
    if not shared:
        moe.pop("shared_gate", None)
    fields["moe"] = moe
    if len(set(kinds)) > 1:
        fields["mlp_pattern"] = kinds
    else:
        fields.setdefault("ffn", width)


def _some(values: Values, keys: Keys) -> bool:
    """Whether any of ``keys`` has a value other than 0 (0 means no shared expert)."""
    return any(values.has(key) and values.integer(key) > 0 for key in keys)


def _workload(reading: Reading) -> None:
    """Sequence, micro-batch, precision and attention of a usual run of this model."""
    outer, values, fields = reading.outer, reading.values, reading.fields
    if reading.family.vision:
        seq = fields.get("max_positions") or DEFAULT_SEQ
    else:
        longest = reading.size("positions") or (512 if fields["position"] == "relative" else 2048)
        scaled = (
            values.section("rope_scaling"),
            values.section("rope_parameters"),
        )
        for section in scaled:
            longest = section.size(("original_max_position_embeddings",)) or longest
        offered = values.size(("n_positions", "max_position_embeddings", "max_seq_len"))
        seq = min(longest, offered or longest, DEFAULT_SEQ)
    reading.workload = {
        "seq": seq,
        "micro_batch": 1,
        "attention": "eager" if reading.family.eager else "sdpa",
    }
    if fields.get("mel_bins"):
        reading.workload["decoder_seq"] = fields["decoder_positions"]
    for level in (values, outer):
        for key in ("dtype", "torch_dtype"):
            name = level.data.get(key)
            if name is None or name == "auto":
                continue
            known = _DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
            if known is not None:
                reading.workload.setdefault("precision", known)
            elif "precision" not in reading.workload:
                reading.warnings.append(
                    f"{key} is {shown(name)}, which says no precision of training: the usual one "
                    "is taken (--precision)"
                )


def _notes(reading: Reading) -> None:
    """Say what the file holds that the answer does not use."""
    for level in dict.fromkeys((reading.outer, reading.values)):
        if level.has("quantization_config"):
            quantized = level.data["quantization_config"]
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
            name = f" ({method})" if isinstance(method, str) and len(method) < 40 else ""
            reading.warnings.append(
                f"quantization_config{name} is ignored: training at the asked precision is assumed"
            )
        if level.has("auto_map"):
            reading.warnings.append("auto_map is ignored: code beside a configuration is never run")


def known_types() -> tuple[str, ...]:
    """Every ``model_type`` that is read, sorted."""
    return tuple(sorted({*FAMILIES, *ALIASES}))


def refused_types() -> tuple[str, ...]:
    """Every ``model_type`` that is refused with a reason, sorted."""
    return tuple(sorted(REFUSED))
