"""Model types with an encoder that `families` does not hold: sequence to sequence, and senses."""

from __future__ import annotations

from dataclasses import replace

from actcalc.io.hub.family import Family, Keys

_NO_GROUPS: dict[str, Keys] = {"kv_heads": ()}


def _code(name: str) -> str:
    return f"transformers 5.24, modeling_{name}.py"


BART = Family(
    code=_code("bart"),
    facts={
        "position": "learned",
        "embedding_norm": True,
        "norm_placement": "post",
        "final_norm": False,
    },
    keys={
        **_NO_GROUPS,
        "layers": ("encoder_layers",),
        "heads": ("encoder_attention_heads",),
        "ffn": ("encoder_ffn_dim",),
    },
    rates={
        "hidden_dropout": (("dropout",), 0.1),
        "attention_dropout": (("attention_dropout",), 0.0),
        "embedding_dropout": (("dropout",), 0.1),
        "activation_dropout": (("activation_dropout",), 0.0),
    },
    activation=("activation_function", "gelu"),
    tied=True,
    windows="none",
    defaults={"positions": 1024},
    adjust=("two_more_positions", "encoder_decoder"),
)
MBART = replace(
    BART,
    code=_code("mbart"),
    facts={**BART.facts, "norm_placement": "pre", "final_norm": True},
)
WHISPER = replace(
    BART,
    code=_code("whisper"),
    facts={"position": "learned", "key_bias": False},
    keys={**BART.keys, "positions": ("max_source_positions",)},
    rates={name: (keys, 0.0) for name, (keys, _) in BART.rates.items()},
    defaults={"positions": 1500},
    adjust=("encoder_decoder", "whisper"),
)

ENCODERS: dict[str, Family] = {
    "bart": BART,
    "mbart": MBART,
    "whisper": WHISPER,
}
"""Rows of the table of model types (``families.FAMILIES``)."""
