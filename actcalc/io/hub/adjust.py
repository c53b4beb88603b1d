"""Exceptions by name: what one model type does that no column of the table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actcalc.io.hub.blocks import BLOCKS
from actcalc.io.hub.family import ACTIVATIONS
from actcalc.io.hub.gemma import GEMMAS
from actcalc.io.hub.mixers import MIXERS
from actcalc.io.hub.reading import Reading
from actcalc.io.hub.senses import SENSES
from actcalc.specs.base import MAX_LAYERS

POST_NORM = "apply_residual_connection_post_layernorm"


def _adjust(name: str) -> Callable[[Callable[[Reading], None]], Callable[[Reading], None]]:
    def register(rule: Callable[[Reading], None]) -> Callable[[Reading], None]:
        ADJUST[name] = rule
        return rule

    return register


ADJUST: dict[str, Callable[[Reading], None]] = {**MIXERS, **BLOCKS, **SENSES, **GEMMAS}
"""Exceptions by name: what one type does that no table column says."""


@_adjust("softcaps")
def _softcaps(reading: Reading) -> None:
    for name, key in (
        ("attention_softcap", "attn_logit_softcapping"),
        ("logit_softcap", "final_logit_softcapping"),
    ):
        reading.fields[name] = reading.values.number(key)


@_adjust("softcaps_gemma2")
def _softcaps_gemma2(reading: Reading) -> None:
    """Gemma 2 caps by default (50 and 30); null turns a cap off."""
    for name, key, default in (
        ("attention_softcap", "attn_logit_softcapping", 50.0),
        ("logit_softcap", "final_logit_softcapping", 30.0),
    ):
        off = reading.values.named(key) and not reading.values.has(key)
        reading.fields[name] = 0.0 if off else reading.values.number(key, default)


@_adjust("rotary_dim_64")
def _rotary_dim_64(reading: Reading) -> None:
    """GPT-J and CodeGen rotate 64 of a head's width by default; null rotates all of it."""
    if reading.values.has("rotary_dim") or not reading.values.named("rotary_dim"):
        reading.fields["rotary_dim"] = reading.values.size(("rotary_dim",)) or 64


@_adjust("rotary_dim")
def _rotary_dim(reading: Reading) -> None:
    found = reading.values.size(("rotary_dim",))
    if found:
        reading.fields["rotary_dim"] = found


@_adjust("parallel_residual")
def _parallel_residual(reading: Reading) -> None:
    if reading.values.flag("use_parallel_residual", True):
        reading.fields["parallel"] = "two_norms"


@_adjust("qk_layernorm")
def _qk_layernorm(reading: Reading) -> None:
    if reading.values.flag("qk_layernorm", False):
        reading.fields["qk_norm"] = "head"


@_adjust("persimmon_qk_norm")
def _persimmon_qk_norm(reading: Reading) -> None:
    if reading.values.flag("qk_layernorm", True):
        reading.fields["qk_norm"] = "head"


@_adjust("use_qk_norm")
def _use_qk_norm(reading: Reading) -> None:
    if reading.values.flag("use_qk_norm", False):
        reading.fields["qk_norm"] = "head"


def _own_norm_per_head(reading: Reading, key: str) -> None:
    if reading.values.flag(key, False):
        reading.fields["qk_norm"] = "heads"


@_adjust("cohere_qk_norm")
def _cohere_qk_norm(reading: Reading) -> None:
    _own_norm_per_head(reading, "use_qk_norm")


@_adjust("stablelm_qk_norm")
def _stablelm_qk_norm(reading: Reading) -> None:
    _own_norm_per_head(reading, "qk_layernorm")
    if reading.fields.get("qk_norm"):
        reading.warnings.append("qk_layernorm: its norms have no bias, yet biases are counted")


@_adjust("llama4_qk_norm")
def _llama4_qk_norm(reading: Reading) -> None:
    if reading.values.flag("use_qk_norm", True):
        reading.fields["qk_norm"] = "unweighted"


@_adjust("stablelm")
def _stablelm(reading: Reading) -> None:
    if reading.values.flag("use_parallel_residual", False):
        reading.fields["parallel"] = "one_norm"


@_adjust("clip_qkv")
def _clip_qkv(reading: Reading) -> None:
    reading.fields["clip_qkv"] = reading.values.number("clip_qkv") > 0


@_adjust("multi_query")
def _multi_query(reading: Reading) -> None:
    if reading.values.flag("multi_query", True):
        reading.fields["kv_heads"] = 1


@_adjust("internlm3")
def _internlm3(reading: Reading) -> None:
    """Checkpoints spell attention_bias and mlp_bias as qkv_bias and bias."""
    fields, values = reading.fields, reading.values
    for name, key in (("qkv_bias", "qkv_bias"), ("out_bias", "qkv_bias"), ("mlp_bias", "bias")):
        fields[name] = values.flag(key, bool(fields[name]))


@_adjust("falcon")
def _falcon(reading: Reading) -> None:
    """Key/value heads and norms of the new architecture (40B) and the first (7B, RW)."""
    values, fields = reading.values, reading.fields
    new = values.flag("new_decoder_architecture", False)
    if not new:
        fields["kv_heads"] = (
            1 if values.flag("multi_query", True) else fields.get("kv_heads", fields["heads"])
        )
    norms = values.size(("num_ln_in_parallel_attn",)) or 2
    if new:
        fields["parallel"] = "two_norms" if norms == 2 else "one_norm"
    elif values.flag("parallel_attn", True):
        fields["parallel"] = "one_norm"
    fields["position"] = "alibi" if values.flag("alibi", False) else "rotary"


@_adjust("opt")
def _opt(reading: Reading) -> None:
    """Positions start at 2; post-norm has no final norm; the embedding may be narrower."""
    values, fields = reading.values, reading.fields
    fields["max_positions"] += 2
    if not values.flag("do_layer_norm_before", True):
        fields["norm_placement"] = "post"
        fields["final_norm"] = False
    elif values.flag("_remove_final_layer_norm", False):
        fields["final_norm"] = False
    width = values.size(("word_embed_proj_dim",))
    if width is not None and width != fields["hidden"]:
        fields["embedding_dim"] = width
    if values.number("layerdrop") > 0:
        reading.warnings.append("layerdrop is ignored: every layer is counted")


@_adjust("two_more_positions")
def _two_more_positions(reading: Reading) -> None:
    reading.fields["max_positions"] += 2


@_adjust("bloom")
def _bloom(reading: Reading) -> None:
    if reading.values.flag(POST_NORM, False):
        reading.fields["norm_placement"] = "normed_stream"


@_adjust("mpt")
def _mpt(reading: Reading) -> None:
    """ALiBi wins over a learned table; dropouts all come from the attention's own section."""
    values, fields = reading.values, reading.fields
    attention = values.section("attn_config")
    ratio = values.size(("expansion_ratio",), 1024) or 4
    fields["ffn"] = ratio * fields["hidden"]
    if attention.flag("alibi", True):
        fields["position"] = "alibi"
    elif attention.flag("rope", False):
        fields["position"] = "rotary"
    else:
        fields["position"] = "learned"
        positions = reading.size("positions")
        if positions is None:
            reading.missing.append("max_seq_len")
        fields["max_positions"] = positions or 0
    kind = attention.text("attn_type") or "multihead_attention"
    heads = {"multihead_attention": fields["heads"], "multiquery_attention": 1}
    grouped = attention.size(("kv_n_heads",))
    if kind not in heads and (kind != "grouped_query_attention" or grouped is None):
        raise attention.wrong("attn_type", "not a kind of attention described", "use YAML")
    fields["kv_heads"] = heads.get(kind) or grouped
    if attention.flag("qk_ln", False):
        fields["qk_norm"] = "full"
    fields["clip_qkv"] = attention.number("clip_qkv") > 0
    rate = attention.rate(("attn_pdrop",), 0.0)
    fields["hidden_dropout"] = fields["attention_dropout"] = rate


@_adjust("dbrx")
def _dbrx(reading: Reading) -> None:
    values, fields = reading.values, reading.fields
    attention, ffn = values.section("attn_config"), values.section("ffn_config")
    fields["kv_heads"] = attention.size(("kv_n_heads",)) or 1
    fields["clip_qkv"] = attention.number("clip_qkv") > 0
    fields["attention_dropout"] = attention.rate(("attn_pdrop",), 0.0)
    moe: dict[str, Any] = {"router": "softmax"}
    sizes = {"experts": "moe_num_experts", "topk": "moe_top_k", "ffn": "ffn_hidden_size"}
    for name, key in sizes.items():
        found = ffn.size((key,))
        if found is None:
            reading.missing.append(ffn.label(key))
        else:
            moe[name] = found
    moe["aux_loss"] = ffn.number("moe_loss_weight", 0.01) > 0
    named = ffn.section("ffn_act_fn").text("name") or "silu"
    if named not in ACTIVATIONS:
        raise ffn.section("ffn_act_fn").wrong("name", "no such activation", "use silu")
    fields["activation"] = ACTIVATIONS[named]
    fields["moe"] = moe
    fields["ffn"] = moe.get("ffn", 0)


@_adjust("chatglm")
def _chatglm(reading: Reading) -> None:
    values, fields = reading.values, reading.fields
    if not values.flag("multi_query_attention", False):
        fields["kv_heads"] = fields["heads"]
    if not values.flag("rmsnorm", True):
        fields["norm"] = "layernorm"
    if values.flag(POST_NORM, False):
        fields["norm_placement"] = "normed_stream"
    if values.flag("add_bias_linear", False):
        fields["qkv_bias"] = True


@_adjust("qwen1")
def _qwen1(reading: Reading) -> None:
    """``intermediate_size`` counts gate and up together: each is half as wide."""
    values, fields = reading.values, reading.fields
    whole = fields.get("ffn")
    if whole is not None:
        if whole % 2:
            raise values.wrong("intermediate_size", "not even", "gate and up are half of it each")
        fields["ffn"] = whole // 2
    bias = not values.flag("no_bias", True)
    fields["out_bias"] = fields["mlp_bias"] = bias


@_adjust("baichuan")
def _baichuan(reading: Reading) -> None:
    """The 13B has no rotary table but ALiBi; its configuration has no position limit but
    ``model_max_length`` only.
    """
    if not reading.values.has("max_position_embeddings"):
        reading.fields["position"] = "alibi"


@_adjust("hunyuan_experts")
def _hunyuan_experts(reading: Reading) -> None:
    """A shared feed-forward runs beside the experts, always as wide as one."""
    moe = reading.fields.get("moe")
    if moe:
        moe["shared_ffn"] = moe["ffn"]


@_adjust("no_expert_bias")
def _no_expert_bias(reading: Reading) -> None:
    if reading.values.flag("use_bias", False):
        raise reading.values.wrong("use_bias", "experts with biases are not described", "use YAML")


@_adjust("expert_groups")
def _expert_groups(reading: Reading) -> None:
    moe, values = reading.fields.get("moe"), reading.values
    if moe:
        moe["groups"] = values.size(("n_group",)) or 1
        moe["topk_groups"] = values.size(("topk_group",)) or 1


@_adjust("prediction_layers")
def _prediction_layers(reading: Reading) -> None:
    key = "num_nextn_predict_layers"
    if reading.values.has(key):
        reading.fields["mtp_layers"] = reading.values.integer(key, 0, MAX_LAYERS)


@_adjust("prediction_modules")
def _prediction_modules(reading: Reading) -> None:
    values = reading.values
    if values.flag("use_mtp", False) and values.has("num_mtp_modules"):
        each = values.size(("mtp_transformer_layers",), 1000) or 1
        reading.fields["mtp_layers"] = values.integer("num_mtp_modules", 0, 1000) * each


@_adjust("token_types")
def _token_types(reading: Reading) -> None:
    values = reading.values
    key = "type_vocab_size"
    reading.fields["token_types"] = values.integer(key) if values.has(key) else 2
    kind = values.text("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise values.wrong("position_embedding_type", "only absolute is described", "use YAML")
    reading.fields["causal"] = values.flag("is_decoder", False)
    if values.flag("add_cross_attention", False):
        raise values.wrong("add_cross_attention", "no encoder is described", "set it to false")


@_adjust("ernie_task")
def _ernie_task(reading: Reading) -> None:
    if reading.values.flag("use_task_id", False):
        raise reading.values.wrong("use_task_id", "task embeddings are not described", "use YAML")


@_adjust("encoder_head")
def _encoder_head(reading: Reading) -> None:
    for name in reading.outer.items("architectures") or []:
        if isinstance(name, str) and not name.endswith(("ForMaskedLM", "ForPreTraining")):
            reading.warnings.append(f"architectures names {name[:60]}: a masked-LM head is assumed")


@_adjust("distilbert")
def _distilbert(reading: Reading) -> None:
    """Its attention output has no dropout, which one rate for both branches cannot say."""
    if reading.fields["hidden_dropout"] > 0:
        reading.warnings.append("dropout: a mask after attention is counted, yet the code has none")
    if reading.values.flag("sinusoidal_pos_embds", False):
        reading.warnings.append("sinusoidal_pos_embds: the position table is fixed, yet counted")


@_adjust("embedding_size")
def _embedding_size(reading: Reading) -> None:
    width = reading.values.size(("embedding_size",)) or 128
    if width != reading.fields["hidden"]:
        reading.fields["embedding_dim"] = width


def _read_t5(reading: Reading, default: str) -> None:
    """``feed_forward_proj`` names activation and gate; null decoder layers mean as many again."""
    values, fields = reading.values, reading.fields
    named = values.text("feed_forward_proj") or default
    gate, _, rest = named.rpartition("-")
    name = "gelu_new" if named == "gated-gelu" else rest
    if gate not in ("", "gated") or name not in ACTIVATIONS:
        raise values.wrong("feed_forward_proj", "not NAME or gated-NAME", "e.g. gated-gelu")
    fields["activation"] = ACTIVATIONS[name]
    fields["gated"] = gate == "gated"
    fields["tied"] = True
    key = "relative_attention_num_buckets"
    fields["relative_buckets"] = values.size((key,)) or 32
    names = [str(name) for name in reading.outer.items("architectures") or []]
    encoder_only = bool(names) and all(name.endswith("EncoderModel") for name in names)
    if encoder_only:
        fields["causal"] = False
        fields["head"] = "none"
        return
    fields["encoder_layers"] = fields["layers"]
    decoder = values.size(("num_decoder_layers",), MAX_LAYERS)
    if decoder is None and values.named("num_decoder_layers"):
        reading.warnings.append(
            f"num_decoder_layers is null: as many as num_layers ({fields['layers']}), "
            "as the library does"
        )
    fields["layers"] = decoder or fields["layers"]


@_adjust("t5")
def _t5(reading: Reading) -> None:
    _read_t5(reading, "relu")


@_adjust("t5_gated")
def _t5_gated(reading: Reading) -> None:
    _read_t5(reading, "gated-gelu")
