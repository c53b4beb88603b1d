"""What frameworks around transformers mean by the same words: types, kernels, adapters, states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from actcalc.errors import SpecError, suggestion
from actcalc.specs.optimizers import FRAMEWORKS, OPTIMIZERS

_TYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16",
    "fp16": "fp16", "torch.float16": "fp16", "half": "fp16", "float32": "fp32", "fp32": "fp32",
    "torch.float32": "fp32", "float": "fp32", "32": "fp32", "bf16-mixed": "amp-bf16",
    "16-mixed": "amp-fp16",
}  # fmt: skip
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention_4": "flash",
    "flash_attn": "flash", "flash": "flash", "fa2": "flash", "fa3": "flash", "sdpa": "sdpa",
    "eager": "eager", "disabled": "eager",
}  # fmt: skip
_ATTENTION_WORDS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn",
                    "wq", "wk", "wv", "wo", "output_proj", "out_proj", "dense", "linear_qkv",
                    "linear_proj", "wqkv", "attn")  # fmt: skip
_MLP_WORDS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "w1", "w2",
              "w3", "dense_h_to_4h", "dense_4h_to_h", "c_fc", "linear_fc1", "linear_fc2",
              "mlp")  # fmt: skip
_FUSED = {"qkv_proj", "query_key_value", "c_attn", "wqkv", "linear_qkv", "attn", "gate_up_proj",
          "fc1", "dense_h_to_4h", "c_fc", "linear_fc1", "mlp"}  # fmt: skip
"""Projections that stand for several, so that fewer names are every one."""
_EVERYTHING = ("all", "all-linear", "all_linear")


def element_type(word: str, where: str) -> str:
    """bf16, fp16 or fp32 for a type's name; "" for auto and nothing, ``SpecError`` for others."""
    plain = word.strip().lower()
    if plain in ("", "auto", "none"):
        return ""
    if plain not in _TYPES:
        raise SpecError(f"{where} is {word!r}, no type that is known", "use bf16, fp16 or fp32")
    return _TYPES[plain]


def attention(word: str) -> str | None:
    """eager, sdpa or flash for an implementation's name; None for others."""
    plain = word.strip().lower()
    if plain.startswith("kernels-community/") and "flash" in plain:
        return "flash"
    return _ATTENTION.get(plain)


def optimizer(
    word: str, column: str, where: str
) -> tuple[dict[str, Any], tuple[str, ...], dict[str, SpecError]]:
    """The optimizer that a framework calls ``word``: field, notes, and what is needed instead.

    Paged optimizers keep the same states, in memory that the driver may move to the host.
    """
    plain = word.strip().rsplit(".", 1)[-1]
    bare = re.sub(r"(?i)^paged_?", "", plain)
    paged = bare != plain
    notes = (
        (f"{word} may page its states to the host when memory runs out: they are counted here.",)
        if paged else ()
    )  # fmt: skip
    columns = (column, *(name for name in FRAMEWORKS if name != column))
    for each in columns:
        for name, row in OPTIMIZERS.items():
            if bare.lower() in map(str.lower, getattr(row, each)) or bare.lower() == name:
                return {"training.optimizer": name}, notes, {}
    if bare.lower() in ("adamw_32bit", "adamw_bnb_32bit"):
        return {"training.optimizer": "adamw"}, notes, {}
    if bare.lower() == "lion_8bit":
        bare = "lion with 8-bit moments"
    names = ", ".join(OPTIMIZERS)
    error = SpecError(
        f"{where} is {word}: an optimizer that is not modelled",
        suggestion(bare, list(OPTIMIZERS)) or f"name the nearest with --optimizer: {names}",
    )
    return {}, (), {"training.optimizer": error}


def targets(modules: Sequence[str], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which linear layers get adapters, as a field, and a note where it is not quite that."""
    words = [re.sub(r"[\\^$().*]|model|layers|self_attn|\d", "", word) for word in modules]
    words = [word.strip("|") for each in words for word in each.split("|") if word.strip("|")]
    if not words or any(word in _EVERYTHING for word in words):
        return {"training.lora_targets": "all"}, ()
    in_attention = {word for word in words if word in _ATTENTION_WORDS}
    in_mlp = {word for word in words if word in _MLP_WORDS}
    other = [word for word in words if word not in in_attention | in_mlp]
    every_attention = len(in_attention) >= 4 or bool(in_attention & _FUSED)
    every_mlp = len(in_mlp) >= 3 or bool(in_mlp & _FUSED)
    if in_attention and not in_mlp and not other:
        chosen, whole = "attention", every_attention
    elif in_mlp and not in_attention and not other:
        chosen, whole = "mlp", every_mlp
    else:
        chosen, whole = "all", every_attention and every_mlp
    what = {"attention": "every projection of attention", "mlp": "the whole feed-forward",
            "all": "every linear layer"}[chosen]  # fmt: skip
    note = f"{where}: adapters on {', '.join(words)} are counted as on {what}, which is more."
    return {"training.lora_targets": chosen}, () if whole else (note,)


def precision(*, bf16: bool, fp16: bool, weights: str) -> str | None:
    """Precision of a run under the Trainer: autocast over fp32 weights, or the weights' type.

    ``weights`` is the type they are loaded in ("" where it is not said: the checkpoint's, which
    is taken for the 16-bit type that the run asks for). None where nothing is said.
    """
    if weights.startswith("amp"):
        return weights
    if weights == "fp32":
        return "amp-bf16" if bf16 else "amp-fp16" if fp16 else "fp32"
    if bf16 or fp16:
        return weights or ("bf16" if bf16 else "amp-fp16")
    return weights or None
