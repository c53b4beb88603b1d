"""Which linear layers get adapters: groups, names of projections, or a pattern of module paths.

Names are those of models and of PEFT's ``target_modules``, which takes a module whose path ends
with one of them, or a pattern that a whole path matches (huggingface/peft tuners/tuners_utils.py
check_target_module_exists). Each is one of our ops, or several.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from actcalc.errors import SpecError

if TYPE_CHECKING:
    from actcalc.specs.model import Model

TARGET_GROUPS = ("attention", "mlp", "all")
"""Groups of linear layers that adapters may be put on; all leaves out the head."""
_ALL = ("all", "all-linear", "all_linear")

_OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo", "output_proj", "linear_proj", "out_lin")

WORDS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "wq", "q_lin"),
    "k": ("k_proj", "key", "wk", "k_lin"),
    "v": ("v_proj", "value", "wv", "v_lin"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "wqkv", "Wqkv", "linear_qkv", "in_proj"),
    "out": _OUT,
    "out_proj": _OUT,
    "q_down": ("q_a_proj", "linear_q_down_proj"),
    "q_up": ("q_b_proj", "q_proj", "linear_q_up_proj"),
    "kv_down": ("kv_a_proj_with_mqa", "linear_kv_down_proj"),
    "kv_up": ("kv_b_proj", "linear_kv_up_proj"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "gate_up": ("gate_up_proj",),
    "fc1": ("fc1", "c_fc", "dense_h_to_4h", "up_proj", "wi", "linear_fc1", "lin1"),
    "fc2": ("fc2", "c_proj", "dense_4h_to_h", "down_proj", "w2", "linear_fc2", "lin2"),
    "head": ("lm_head", "output", "embed_out"),
}  # fmt: skip
"""For each op the names that models have for its module."""
_BLOCKS = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "ffn": ("mlp", "feed_forward", "ffn"),
}
_LAYERS = ("model.layers", "transformer.h", "model.language_model.layers", "layers")
_PLAIN = re.compile(r"[\w.-]+")


class Targets:
    """Which projections get adapters, as one text says; raises ``SpecError`` for no pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        words = [word.strip() for word in text.replace(",", "+").split("+") if word.strip()]
        self.pattern: re.Pattern[str] | None = None
        self.words: tuple[str, ...] = ()
        if all(_PLAIN.fullmatch(word) for word in words):
            self.words = tuple(words)
            return
        try:
            self.pattern = re.compile(text)
        except re.error as error:
            raise SpecError(
                f"lora_targets {text!r} is neither names nor a pattern: {error}",
                r"write names as q+v, or a pattern of whole paths: '.*\.(q|v)_proj'",
            ) from None

    def hits(self, layer: int, op: str, group: str) -> bool:
        """Whether the projection ``op`` of a layer (-1: of the head) gets an adapter."""
        if self.pattern is not None:
            return any(self.pattern.fullmatch(path) for path in _paths(layer, op, group))
        if layer < 0:
            return any(_last(word) in _named(op) for word in self.words)
        return any(self._hit(word, layer, op, group) for word in self.words)

    def _hit(self, word: str, layer: int, op: str, group: str) -> bool:
        if word in _ALL:
            return True
        if word in TARGET_GROUPS:
            return (word == "attention") == (group == "attention")
        if _last(word) not in _named(op):
            return False
        *path, _ = word.split(".")
        numbers = [int(part) for part in path if part.isdigit()]
        blocks = [part for part in path if part in _BLOCKS["attention"] + _BLOCKS["ffn"]]
        return (not numbers or layer in numbers) and all(b in _BLOCKS[group] for b in blocks)

    @cached_property
    def foreign(self) -> tuple[str, ...]:
        """Words that are no projection's name in any model that is known."""
        known = {name for op in WORDS for name in _named(op)}
        return tuple(w for w in self.words if w not in (*_ALL, *TARGET_GROUPS)
                     and _last(w) not in known)  # fmt: skip


def projections(model: Model) -> tuple[tuple[str, str], ...]:
    """Projections of a model's dense layers as PyTorch modules: each op with its group."""
    attention = ["qkv"] if model.packed_qkv else ["q", "k", "v"]
    if model.mla:
        attention = ["q_down", "q_up", "kv_down", "kv_up"]
    gated = ["gate_up"] if model.packed_gate else ["gate", "up"]
    mlp = [*(gated if model.gated else ["fc1"]), "fc2"]
    return tuple((op, "attention") for op in [*attention, "out"]) + tuple((op, "ffn") for op in mlp)


def module_names(model: Model, text: str) -> tuple[str, ...]:
    """The names that PEFT's ``target_modules`` lists for what ``text`` says, of a model like Llama.

    ``all-linear`` stays one word, and a pattern itself.
    """
    targets = Targets(text)
    if targets.pattern is not None:
        return (text,)
    head = [WORDS["head"][0]] if targets.hits(-1, "head", "head") else []
    if any(word in _ALL for word in targets.words):
        return ("all-linear", *head)
    return (*(WORDS[op][0] for op, group in projections(model) if targets.hits(0, op, group)),
            *head)  # fmt: skip


def _last(word: str) -> str:
    return word.rsplit(".", 1)[-1]


def _named(op: str) -> tuple[str, ...]:
    return (op, *WORDS.get(op.removeprefix("shared_"), ()))


def _paths(layer: int, op: str, group: str) -> list[str]:
    """Paths of modules that models have for one projection."""
    names = WORDS.get(op.removeprefix("shared_"), (op,))
    if layer < 0:
        return list(names)
    return [
        f"{layers}.{layer}.{block}.{name}"
        for layers, block, name in product(_LAYERS, _BLOCKS.get(group, ()), names)
    ]
