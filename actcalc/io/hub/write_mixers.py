"""The inverse of reading what mixes tokens: linear attention, state-space mixers, indexers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Model = Any
"""A ``specs.Model``: specs stand above this package, which reads their fields by name."""

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _gated_delta(model: Model) -> dict[str, Any]:
    linear = model.linear
    if linear is None:
        return {}
    return {
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv,
    }


def _gated_delta_olmo(model: Model) -> dict[str, Any]:
    linear = model.linear
    config = _gated_delta(model)
    if linear is not None:
        config["linear_allow_neg_eigval"] = linear.doubled
    if model.position == "rotary":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    return config


def _kimi_delta(model: Model) -> dict[str, Any]:
    linear = model.linear
    if linear is None:
        return {}
    return {
        "linear_num_heads": linear.value_heads,
        "linear_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.conv,
    }


def _kimi_groups(model: Model) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    return {"num_expert_group": moe.groups, "topk_group": moe.topk_groups}


def _indexer(model: Model) -> dict[str, Any]:
    found = model.indexer
    if found is None:
        return {}
    return {
        "index_n_heads": found.heads,
        "index_head_dim": found.head_dim,
        "index_topk": found.topk,
    }


def _mamba1(model: Model) -> dict[str, Any]:
    mamba = model.mamba
    if mamba is None:
        return {}
    return {
        "state_size": mamba.state,
        "conv_kernel": mamba.conv,
        "time_step_rank": mamba.rank,
        "intermediate_size": mamba.heads,
        "use_bias": mamba.bias,
        "use_conv_bias": mamba.conv_bias,
        **_alone(model),
    }


def _alone(model: Model) -> dict[str, Any]:
    """What a model of mixers alone says, and keys of attention that it has not."""
    return {
        "residual_in_fp32": model.fp32_stream,
        "num_attention_heads": ...,
        "num_key_value_heads": ...,
    }


def _mamba2(model: Model) -> dict[str, Any]:
    mamba = model.mamba
    if mamba is None:
        return {}
    heads = mamba.heads_of(model.hidden)
    return {
        "state_size": mamba.state,
        "head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "num_heads": heads,
        "conv_kernel": mamba.conv,
        "chunk_size": mamba.chunk,
        "expand": heads * mamba.head_dim // model.hidden,
        "use_bias": mamba.bias,
        "use_conv_bias": mamba.conv_bias,
        "intermediate_size": ...,
        **_alone(model),
    }


def _mamba_jamba(model: Model) -> dict[str, Any]:
    """Attention and experts come in periods, each at an offset."""
    mamba = model.mamba
    if mamba is None:
        return {}
    mixers = [word == "full" for word in model.attention_pattern]
    experts = [word == "moe" for word in model.mlp_pattern] or [True] * model.layers
    return {
        "mamba_d_state": mamba.state,
        "mamba_d_conv": mamba.conv,
        "mamba_expand": mamba.heads // model.hidden,
        "mamba_dt_rank": mamba.rank,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "layer_types": ...,
        "sliding_window": ...,
        **_period("attn_layer", mixers),
        **_period("expert_layer", experts),
    }


def _period(name: str, chosen: list[bool]) -> dict[str, Any]:
    places = [index for index, each in enumerate(chosen) if each]
    if not places:
        return {f"{name}_period": len(chosen) + 1, f"{name}_offset": len(chosen)}
    step = places[1] - places[0] if len(places) > 1 else len(chosen)
    return {f"{name}_period": max(step, places[0] + 1), f"{name}_offset": places[0]}


def _mamba_bamba(model: Model) -> dict[str, Any]:
    mamba = model.mamba
    if mamba is None:
        return {}
    return {
        "mamba_d_state": mamba.state,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_n_heads": mamba.heads,
        "mamba_d_conv": mamba.conv,
        "mamba_chunk_size": mamba.chunk,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
    }


def _falcon_h1(model: Model) -> dict[str, Any]:
    mamba = model.mamba
    if mamba is None:
        return {}
    return {
        **_mamba_bamba(model),
        "mamba_n_heads": mamba.heads_of(model.hidden),
        "mamba_d_ssm": mamba.heads_of(model.hidden) * mamba.head_dim,
        "mamba_rms_norm": mamba.norm,
        "projectors_bias": mamba.bias,
        "layer_types": ...,
        "sliding_window": ...,
    }


def _zamba2(model: Model) -> dict[str, Any]:
    mamba, shared = model.mamba, model.shared
    if mamba is None or shared is None:
        return {}
    heads = mamba.heads_of(model.hidden)
    return {
        "use_mem_rope": model.position == "rotary",
        "num_mem_blocks": shared.blocks,
        "adapter_rank": shared.rank,
        "use_shared_attention_adapter": shared.in_attention,
        "mamba_d_state": mamba.state,
        "mamba_expand": heads * mamba.head_dim // model.hidden,
        "mamba_ngroups": mamba.groups,
        "n_mamba_heads": heads,
        "mamba_d_conv": mamba.conv,
        "chunk_size": mamba.chunk,
        "layers_block_type": [
            "hybrid" if word == "shared+mamba" else "mamba" for word in model.attention_pattern
        ],
        "head_dim": ...,
        "layer_types": ...,
        "sliding_window": ...,
    }


def _granite_hybrid(model: Model) -> dict[str, Any]:
    config: dict[str, Any] = {
        "position_embedding_type": "rope" if model.position == "rotary" else "nope"
    }
    if model.moe is None:
        config |= {"num_local_experts": 0, "shared_intermediate_size": model.ffn}
    return config


def _lettered(model: Model) -> dict[str, Any]:
    mamba = model.mamba
    if mamba is None:
        return {}
    config = {
        "layers_block_type": [_LETTERS[letter] for letter in model.pattern],
        "num_hidden_layers": ...,
        "sliding_window": ...,
        "ssm_state_size": mamba.state,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "mamba_num_heads": mamba.heads,
        "conv_kernel": mamba.conv,
        "chunk_size": mamba.chunk,
        "use_bias": mamba.bias,
        "use_conv_bias": mamba.conv_bias,
    }
    if model.moe and model.moe.latent:
        config["moe_latent_size"] = model.moe.latent
    if model.mtp_layers:
        config["num_nextn_predict_layers"] = model.mtp_layers
        config["mtp_layers_block_type"] = [_LETTERS[letter] for letter in model.mtp_pattern]
    return config


def _compression(model: Model) -> dict[str, Any]:
    spec = model.compression
    if spec is None:
        return {}
    return {
        "q_lora_rank": spec.q_lora,
        "compress_rates": {
            "compressed_sparse_attention": spec.sparse_rate,
            "heavily_compressed_attention": spec.heavy_rate,
        },
        "o_groups": spec.groups,
        "o_lora_rank": spec.group_rank,
        "index_n_heads": spec.index_heads,
        "index_head_dim": spec.index_dim,
        "index_topk": spec.index_topk,
        "hc_mult": model.streams,
        "hc_sinkhorn_iters": model.sinkhorn_iterations,
        "qk_rope_head_dim": model.rotary_dim or model.head_dim,
        "partial_rotary_factor": ...,
    }


def _mimo_v2(model: Model) -> dict[str, Any]:
    return {
        "v_head_dim": model.value_dim or model.head_dim,
        "attention_value_scale": 0.707 if model.values_scaled else None,
    }


UNADJUST_MIXERS: Mapping[str, Callable[[Model], dict[str, Any]]] = {
    "gated_delta": _gated_delta,
    "gated_delta_olmo": _gated_delta_olmo,
    "kimi_delta": _kimi_delta,
    "kimi_groups": _kimi_groups,
    "qwen3_5_predicts": lambda model: {"mtp_num_hidden_layers": model.mtp_layers},
    "indexer": _indexer,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "mamba_jamba": _mamba_jamba,
    "mamba_bamba": _mamba_bamba,
    "falcon_h1": _falcon_h1,
    "lightning": lambda model: {"block_size": model.linear.block} if model.linear else {},
    "short_conv": lambda model: (
        {"conv_L_cache": model.linear.conv, "conv_bias": model.linear.bias} if model.linear else {}
    ),
    "wkv": lambda model: (
        {"attention_hidden_size": model.linear.value_dim, "context_length": model.linear.block}
        if model.linear
        else {}
    ),
    "rounded_ffn": lambda model: {"block_auto_adjust_ff_dim": False, "block_ff_dim": model.ffn},
    "tied_embedding": lambda model: {"tie_embedding": model.tied},
    "expert_bias": lambda model: {
        "tie_embedding": model.tied,
        "use_expert_bias": bool(model.moe and model.moe.correction_bias),
    },
    "zamba2": _zamba2,
    "granite_hybrid": _granite_hybrid,
    "lettered": _lettered,
    "compression": _compression,
    "mimo_v2": _mimo_v2,
}
"""The inverse of each exception in ``mixers.MIXERS`` that reads keys; ``...`` leaves a key out."""
