"""What is told of one model type of the hub, and the spellings that most types share.

``facts`` are fields of the model that every configuration of a type shares; ``flags``, ``rates``
and ``rules`` are read from the configuration, with the library's own default for a missing key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Experts:
    """Where a type keeps its mixture of experts."""

    router: str = "softmax"
    """Field ``router`` of the mixture."""
    count: Keys = ("num_experts", "num_local_experts", "n_routed_experts")
    """Keys of the number of routed experts."""
    topk: Keys = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
    """Keys of the experts per token."""
    width: Keys = ("moe_intermediate_size",)
    """Keys of one expert's width."""
    shared_width: Keys = ()
    """Keys of the summed width of the experts every token passes."""
    shared_count: Keys = ()
    """Keys of the number of such experts, each as wide as a routed one."""
    shared_default: int = 0
    """Number of such experts the library takes for a missing key."""
    layers: str = "all"
    """Rule that says which layers have experts (a name in ``patterns.MLP_RULES``)."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the mixture that never change."""
    aux_key: str = "router_aux_loss_coef"
    """Key of the load-balancing loss's weight."""
    aux: bool = True
    """Whether there is such a loss when the key is missing."""
    optional: bool = False
    """Without a number of experts every layer is dense; else that number is required."""
    normalize: tuple[str, bool] = ("", True)
    """Key of whether the chosen weights are scaled to sum to one, and the library's default; an
    empty key where the code fixes it."""


@dataclass(frozen=True)
class Family:
    """One model type, or several that share code."""

    code: str
    """Where the facts were read."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Model fields that hold for every configuration."""
    keys: Mapping[str, Keys] = field(default_factory=dict)
    """Keys of a size where the common spellings (``SIZES``) do not hold or come second."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Sizes the library takes for a missing key (kv_heads, head_dim, positions; all if nested)."""
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Boolean model field -> (key, library default)."""
    rates: Mapping[str, tuple[Keys, float]] = field(default_factory=dict)
    """Dropout field -> (keys, library default)."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key of the activation and the library's default; an empty key where the code fixes it."""
    tied: bool = False
    """Library default of ``tie_word_embeddings``."""
    rotary: float = 1.0
    """Library default of the share of a head that is rotated."""
    windows: str = "uniform"
    """Rule for sliding windows (a name in ``patterns.WINDOW_RULES``)."""
    window_keys: Keys = ("sliding_window",)
    """Keys of the window."""
    window_default: int = 0
    """Window the library takes for a missing key."""
    no_rope: str = ""
    """Rule for layers without rotary position (a name in ``patterns.ROPE_RULES``)."""
    experts: Experts | None = None
    """Mixture of experts."""
    latent: bool = False
    """Multi-head latent attention."""
    mixers: Mapping[str, str] = field(default_factory=dict)
    """Words of ``layer_types`` beside attention's that the type has, and the model's word for
    each."""
    eager: bool = False
    """The library has no scaled_dot_product_attention for the type: eager is its default."""
    adjust: Keys = ()
    """Exceptions, by name, applied in order (``read.ADJUST``)."""
    blocks: bool = False
    """Its configuration lists the sizes of every block (``block_configs``)."""
    wide: bool = False
    """A missing feed-forward width means four times hidden."""
    attentionless: bool = False
    """No layer has attention: the type has no number of heads."""
    vision: bool = False
    """Reads patches of an image instead of tokens."""


SIZES: dict[str, Keys] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
"""Spellings of each size, the first one present counts."""

ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_fast",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Names in ``transformers.activations.ACT2FN`` -> the model's field ``activation``."""

MEASURE_HINT = (
    "measure one of its layers: actcalc measure CONFIG --save layer.json (needs actcalc[torch] "
    "and a transformers that knows the type), then actcalc compare and plan layer.json"
)
"""What to do with a configuration that no graph here describes."""


RATE: dict[str, tuple[Keys, float]] = {"attention_dropout": (("attention_dropout",), 0.0)}
"""The usual key of attention's dropout."""
NO_GROUPS: dict[str, Keys] = {"kv_heads": ()}
"""No key says how many heads keys and values have: as many as queries."""


def more(base: Family, code: str, **changes: Any) -> Family:
    """``base`` with ``changes``; mappings are merged, so that only differences are written."""
    merged: dict[str, Any] = {
        name: {**getattr(base, name), **value}
        if isinstance(value, dict) and name != "experts"
        else value
        for name, value in changes.items()
    }
    return replace(base, code=code, **merged)


def code_of(name: str) -> str:
    """Where the library's code of a model is."""
    return f"transformers 5.24, modeling_{name}.py"
