"""The inverse of reading a configuration: a model's fields as a ``config.json`` of its type.

Written from the same table that reading uses, key by key, and handed out only if reading it back
gives the same fields: what a configuration cannot say is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hf import read_config
from actcalc.io.hub.adjust import POST_NORM
from actcalc.io.hub.families import ALIASES, FAMILIES
from actcalc.io.hub.family import ACTIVATIONS, SIZES, Experts, Family
from actcalc.io.hub.gemma import UNADJUST_GEMMAS
from actcalc.io.hub.read import language_model
from actcalc.io.hub.senses import UNADJUST_SENSES
from actcalc.io.hub.values import Values
from actcalc.io.hub.write_mixers import UNADJUST_MIXERS

Model = Any
"""A ``specs.Model``: specs stand above this package, which reads their fields by name."""

_HINT = "give its config.json, or the folder that holds it"
_CLIP = 8.0
"""A bound for clamped projections where a model only says that there is one."""
_AUX = 0.001
"""A load-balancing loss's weight where a model only says that there is one."""
_KINDS = {
    "full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention",
}  # fmt: skip
_ROPE_BASE = 10_000.0
"""Base of the rotary angles where a type has no default; it changes no size."""


def write_config(model: Model) -> dict[str, Any]:
    """A configuration that describes ``model`` and nothing else.

    Raises ``SpecError`` where the model's family is no model type of the hub, or where the
    configuration, read back, does not give exactly the same fields.
    """
    name = ALIASES.get(model.family, model.family)
    if name not in FAMILIES:
        raise SpecError(
            f"measure needs a config.json for this model: {model.family!r} is no model type "
            "of the hub",
            _HINT,
        )
    if FAMILIES[name].blocks:
        raise SpecError(
            f"measure has no class for {name}: transformers does not hold its code",
            "measure one layer of its code: actcalc measure --module FILE.py:FUNCTION",
        )
    config = {key: value for key, value in _written(FAMILIES[name], model).items() if key}
    config = {"model_type": name, **config}
    different = differences(config, model)
    if different:
        raise SpecError(
            f"measure needs a config.json for this model: one of type {name} cannot say "
            + ", ".join(different),
            _HINT,
        )
    return config


def differences(config: Mapping[str, Any], model: Model) -> tuple[str, ...]:
    """Names of the fields in which the model that ``config`` describes differs from ``model``."""
    fields = {**read_config(config).fields, "name": model.name}
    found = type(model).model_validate(fields).model_dump()
    return tuple(key for key, value in model.model_dump().items() if found[key] != value)


def with_changes(config: Mapping[str, Any], old: Model, new: Model) -> dict[str, Any]:
    """``config``, which describes ``old``, changed to describe ``new``.

    Raises ``SpecError`` where its type has no keys for the changes.
    """
    result = dict(config)
    if old != new:
        before, after = write_config(old), write_config(new)
        changed = {key: value for key, value in after.items() if before.get(key, ...) != value}
        inner, nested = language_model(Values(config))
        if nested:
            raise SpecError(
                "--set cannot change the text model inside this config.json", "edit the file"
            )
        result |= {_spelling(inner, key): value for key, value in changed.items()}
        different = differences(result, new)
        if different:
            raise SpecError(
                f"this config.json cannot say {', '.join(different)}", "edit the file itself"
            )
    return result


def _spelling(values: Values, key: str) -> str:
    """The file's own spelling of a size's ``key``."""
    for keys in SIZES.values():
        if key in keys:
            return values.first(keys) or key
    return key


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with every dropout rate of its type set to 0.

    Raises ``SpecError`` where a rate remains.
    """
    result = dict(config)
    inner, nested = language_model(Values(config))
    level = dict(inner.data)
    model_type = inner.text("model_type") or ""
    family = FAMILIES.get(ALIASES.get(model_type, model_type))
    rates = [keys for keys, _ in family.rates.values()] if family else [("attention_dropout",)]
    for keys in rates:
        given = [key for key in keys if key in level] or [keys[0]]
        level |= dict.fromkeys(given, 0.0)
    section = level.get("attn_config")
    if isinstance(section, Mapping) and "attn_pdrop" in section:
        level["attn_config"] = {**section, "attn_pdrop": 0}
    if nested:
        *parents, last = inner.path.split(".")
        target = result
        for parent in parents:
            target[parent] = dict(target[parent])
            target = target[parent]
        target[last] = level
    else:
        result = level
    fields = read_config(result).fields
    left = [key for key, value in fields.items() if key.endswith("_dropout") and value]
    if left:
        raise SpecError(
            f"--no-dropout cannot reach {', '.join(left)} in this configuration",
            "set the rates in config.json to 0",
        )
    return result


def _written(family: Family, model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in _sizes(family, model).items():
        keys = family.keys.get(name) or SIZES[name]
        if family.keys.get(name, SIZES[name]):
            config[keys[0]] = value
    for name, (key, _) in family.flags.items():
        config[key] = getattr(model, name)
    for name, (rates, _) in family.rates.items():
        config[rates[0]] = getattr(model, name)
    config[family.activation[0]] = _activation(family, model)
    if "tied" not in family.facts:
        config["tie_word_embeddings"] = model.tied
    if model.position == "rotary" and model.mla is None:
        config |= _rotary(family, model)
    config |= _windows(family, model)
    if family.no_rope == "every_4":
        still = set(model.no_rope_layers)
        config["no_rope_layers"] = [int(i not in still) for i in range(model.layers)]
    if model.mla:
        mla = model.mla
        config |= {
            "q_lora_rank": mla.q_lora or None,
            "kv_lora_rank": mla.kv_lora,
            "qk_nope_head_dim": mla.nope_dim,
            "qk_rope_head_dim": mla.rope_dim,
            "v_head_dim": mla.v_dim,
        }
    if family.experts and model.moe:
        config |= _experts(family.experts, model)
    for name in family.adjust:
        if name in UNADJUST:
            config |= UNADJUST[name](model)
    return {key: value for key, value in config.items() if value is not ...}


def _sizes(family: Family, model: Model) -> dict[str, int]:
    sizes = {
        "hidden": model.hidden,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.ffn,
        "vocab": model.vocab,
        "positions": model.max_positions,
    }
    usual = model.head_dim * model.heads == model.hidden and "head_dim" not in family.defaults
    if not usual and model.mla is None:
        sizes["head_dim"] = model.head_dim
    return {name: value for name, value in sizes.items() if value}


def _activation(family: Family, model: Model) -> str:
    default = family.activation[1]
    if ACTIVATIONS.get(default, default) == model.activation:
        return default
    names = (name for name, kind in ACTIVATIONS.items() if kind == model.activation)
    return next(names, model.activation)


def _rotary(family: Family, model: Model) -> dict[str, Any]:
    share = (model.rotary_dim or model.head_dim) / model.head_dim
    if share == family.rotary or {"rotary_dim", "rotary_dim_64"} & set(family.adjust):
        return {}
    return {"partial_rotary_factor": share}


def _windows(family: Family, model: Model) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    config: dict[str, Any] = {family.window_keys[0]: model.window or None}
    if family.windows == "gpt_neo":
        kinds = ["local" if kind == "sliding" else "global" for kind in _attention(model)]
        return {**config, "attention_types": [[kinds, 1]]}
    if family.windows.startswith("qwen") or family.windows == "listed":
        config["use_sliding_window"] = bool(model.window)
    if model.attention_pattern:
        words = {**{kind: word for word, kind in family.mixers.items()}, **_KINDS}
        config["layer_types"] = [words[kind] for kind in model.attention_pattern]
    return config


def _attention(model: Model) -> tuple[str, ...]:
    return tuple(model.kind(index).attention for index in range(model.layers))


def _experts(experts: Experts, model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    deepseek = "n_shared_experts" in experts.shared_count
    config: dict[str, Any] = {
        "n_routed_experts" if deepseek else experts.count[0]: moe.experts,
        experts.topk[0]: moe.topk,
        experts.width[0]: moe.ffn,
    }
    if experts.shared_width:
        config[experts.shared_width[0]] = moe.shared_ffn
    for key in experts.shared_count:
        config[key] = moe.shared_ffn // moe.ffn
    if moe.aux_loss != experts.aux:
        config[experts.aux_key] = _AUX if moe.aux_loss else 0.0
    if experts.normalize[0]:
        config[experts.normalize[0]] = moe.normalize_topk
    return config | _placement(experts.layers, model)


def _placement(rule: str, model: Model) -> dict[str, Any]:
    """Which layers have experts, in the keys of the type's rule."""
    kinds = [model.kind(index).mlp for index in range(model.layers)]
    dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    leading = next((i for i, kind in enumerate(kinds) if kind == "moe"), model.layers)
    if rule == "qwen":
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if rule in ("first_dense", "listed_first_dense", "listed_first_3_dense"):
        return {"first_k_dense_replace": leading}
    if rule in ("num_dense", "num_dense_2"):
        return {"num_dense_layers": leading}
    if rule == "interval":
        return {
            "moe_layer_interval": 1,
            "moe_layer_start_index": leading,
            "moe_layer_end_index": model.layers - 1,
        }
    if rule == "interleave":
        return {"moe_layers": [index for index in range(model.layers) if index not in dense]}
    return {}


def _flag(key: str, holds: Callable[[Model], bool]) -> Callable[[Model], dict[str, Any]]:
    return lambda model: {key: holds(model)}


def _normalised(model: Model) -> bool:
    return bool(model.qk_norm != "none")


def _in_parallel(model: Model) -> bool:
    return bool(model.parallel != "none")


def _softcaps(model: Model) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _rotary_dim(model: Model) -> dict[str, Any]:
    return {"rotary_dim": model.rotary_dim or None}


def _clip_qkv(model: Model) -> dict[str, Any]:
    return {"clip_qkv": _CLIP if model.clip_qkv else None}


def _falcon(model: Model) -> dict[str, Any]:
    new = model.parallel == "two_norms" or model.kv_heads not in (1, model.heads)
    config: dict[str, Any] = {
        "new_decoder_architecture": new,
        "parallel_attn": _in_parallel(model),
        "alibi": model.position == "alibi",
        "num_kv_heads": model.kv_heads,
        "num_key_value_heads": ...,
    }
    if new:
        config["num_ln_in_parallel_attn"] = 2 if model.parallel == "two_norms" else 1
    else:
        config["multi_query"] = model.kv_heads == 1
    return config


def _opt(model: Model) -> dict[str, Any]:
    before = model.norm_placement == "pre"
    return {
        "max_position_embeddings": model.max_positions - 2,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not model.final_norm,
        "word_embed_proj_dim": model.embedding_dim or model.hidden,
    }


def _mpt(model: Model) -> dict[str, Any]:
    kinds = {model.heads: "multihead_attention", 1: "multiquery_attention"}
    attention = {
        "alibi": model.position == "alibi",
        "rope": model.position == "rotary",
        "attn_type": kinds.get(model.kv_heads, "grouped_query_attention"),
        "qk_ln": model.qk_norm == "full",
        "attn_pdrop": model.attention_dropout or 0,
        **_clip_qkv(model),
    }
    if model.kv_heads not in kinds:
        attention["kv_n_heads"] = model.kv_heads
    return {
        "attn_config": attention,
        "expansion_ratio": model.ffn // model.hidden,
        "d_model": model.hidden,
        "hidden_size": ...,
        "num_key_value_heads": ...,
    }


def _dbrx(model: Model) -> dict[str, Any]:
    moe = model.moe
    attention = {
        "kv_n_heads": model.kv_heads,
        "attn_pdrop": model.attention_dropout,
        "rope_theta": _ROPE_BASE,
    }
    config: dict[str, Any] = {"attn_config": attention | _clip_qkv(model)}
    # Its class derives the experts' width from d_model before it hears of other spellings.
    config |= {"d_model": model.hidden, "hidden_size": ..., "num_key_value_heads": ...}
    if moe:
        config["ffn_config"] = {
            "ffn_act_fn": {"name": model.activation},
            "ffn_hidden_size": moe.ffn,
            "moe_num_experts": moe.experts,
            "moe_top_k": moe.topk,
            "moe_loss_weight": 0.01 if moe.aux_loss else 0.0,
        }
    return config


def _expert_groups(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    config: dict[str, Any] = {"n_group": moe.groups, "topk_group": moe.topk_groups}
    if model.family == "deepseek_v2":
        # Its code heeds the groups only when told to (modeling_deepseek_v2.py, topk_method).
        config["topk_method"] = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return config


def _prediction_modules(model: Model) -> dict[str, Any]:
    return {
        "use_mtp": model.mtp_layers > 0,
        "num_mtp_modules": model.mtp_layers,
        "mtp_transformer_layers": 1,
    }


def _t5(model: Model) -> dict[str, Any]:
    named = "relu" if model.activation == "relu" else "gelu"
    if model.activation not in ("relu", "gelu", "gelu_new"):
        named = model.activation
    return {
        "feed_forward_proj": f"gated-{named}" if model.gated else named,
        "relative_attention_num_buckets": model.relative_buckets,
        "num_layers": model.encoder_layers,
        "num_decoder_layers": model.layers,
        "d_ff": model.ffn,
        "intermediate_size": ...,
        "num_hidden_layers": ...,
        "num_key_value_heads": ...,
    }


UNADJUST: dict[str, Callable[[Model], dict[str, Any]]] = {
    **UNADJUST_MIXERS,
    **UNADJUST_SENSES,
    **UNADJUST_GEMMAS,
    "softcaps": _softcaps,
    "softcaps_gemma2": _softcaps,
    "rotary_dim_64": _rotary_dim,
    "rotary_dim": _rotary_dim,
    "parallel_residual": _flag("use_parallel_residual", _in_parallel),
    "stablelm": _flag("use_parallel_residual", _in_parallel),
    "qk_layernorm": _flag("qk_layernorm", _normalised),
    "persimmon_qk_norm": _flag("qk_layernorm", _normalised),
    "stablelm_qk_norm": _flag("qk_layernorm", _normalised),
    "use_qk_norm": _flag("use_qk_norm", _normalised),
    "cohere_qk_norm": _flag("use_qk_norm", _normalised),
    "llama4_qk_norm": _flag("use_qk_norm", _normalised),
    "clip_qkv": _clip_qkv,
    "hunyuan_experts": lambda model: {"head_dim": model.head_dim},
    "bloom": _flag(POST_NORM, lambda model: bool(model.norm_placement == "normed_stream")),
    "multi_query": lambda model: {
        "multi_query": model.kv_heads == 1, "num_key_value_heads": ...
    },
    "falcon": _falcon,
    "opt": _opt,
    "two_more_positions": lambda model: {"max_position_embeddings": model.max_positions - 2},
    "mpt": _mpt,
    "dbrx": _dbrx,
    "expert_groups": _expert_groups,
    "prediction_layers": lambda model: {"num_nextn_predict_layers": model.mtp_layers},
    "prediction_modules": _prediction_modules,
    "token_types": lambda model: {
        "type_vocab_size": model.token_types, "is_decoder": model.causal
    },
    "embedding_size": lambda model: {"embedding_size": model.embedding_dim or model.hidden},
    "t5": _t5,
    "t5_gated": _t5,
}  # fmt: skip
"""The inverse of each exception in ``adjust.ADJUST`` that reads keys; ``...`` leaves a key out."""

__all__ = ["differences", "with_changes", "without_dropout", "write_config"]
