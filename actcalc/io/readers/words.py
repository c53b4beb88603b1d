"""What frameworks around transformers mean by the same words: types, kernels, adapters, states."""

from __future__ import annotations

import re
from typing import Any

from actcalc.errors import SpecError, suggestion
from actcalc.io.readers.settings import Settings
from actcalc.specs.optimizers import FRAMEWORKS, OPTIMIZERS
from actcalc.specs.targets import Targets

_TYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16",
    "fp16": "fp16", "torch.float16": "fp16", "half": "fp16", "float32": "fp32", "fp32": "fp32",
    "torch.float32": "fp32", "float": "fp32", "32": "fp32", "bf16-mixed": "amp-bf16",
    "16-mixed": "amp-fp16",
}  # fmt: skip
_ATTENTION = {
    "flash_attention_2": "flash", "flash_attention_3": "flash", "flash_attention_4": "flash",
    "flash_attn": "flash", "flash": "flash", "fa2": "flash", "fa3": "flash", "xformers": "flash",
    "flex_attention": "flash", "flex": "flash", "sage": "flash", "sage_attention": "flash",
    "sdpa": "sdpa",
    "eager": "eager", "disabled": "eager",
}  # fmt: skip
_EVERYTHING = ("all", "all-linear", "all_linear")
_PATTERN = re.compile(r"[\\|*^$(?]")
"""What tells a pattern of module paths from names."""


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


_GALORE_RANK = 128  # transformers trainer.py galore_optim_kwargs


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
    if galore := re.fullmatch(r"galore_(adamw(?:_8bit)?)(_layerwise)?", bare):
        field = {"training.optimizer": "adam8bit" if "8bit" in bare else "adamw",
                 "training.galore_rank": _GALORE_RANK,
                 "training.step_in_backward": bool(galore[2])}  # fmt: skip
        return field, notes, {}
    columns = (column, *(name for name in FRAMEWORKS if name != column))
    for each in columns:
        for name, row in OPTIMIZERS.items():
            if bare.lower() in map(str.lower, getattr(row, each)) or bare.lower() == name:
                return {"training.optimizer": name}, notes, {}
    if bare.lower() in ("adamw_torch_8bit", "ao_adamw_8bit"):
        return {"training.optimizer": "adam8bit"}, notes, {}
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


def targets(s: Settings, *names: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which linear layers get adapters, as a field, and a note on names that are left out.

    The option under ``names`` is a list, words, or a pattern of module paths; without one every
    linear layer is meant. ``SpecError`` where it names no projection at all.
    """
    value = s.get(*names)
    if isinstance(value, str) and _PATTERN.search(value):
        return {"training.lora_targets": value.strip()}, ()
    words = [word.strip("'\"") for word in s.words(*names)]
    if not words or any(word in _EVERYTHING for word in words):
        head = ["lm_head"] if "lm_head" in words else []
        return {"training.lora_targets": "+".join(["all", *head])}, ()
    left = Targets("+".join(words)).foreign
    kept = [word for word in words if word not in left]
    if not kept:
        raise s.wrong(names, value, "which names no projection that is known", "name q_proj, ...")
    notes = (f"{s.where}: adapters on {', '.join(left)} are not counted.",) if left else ()
    return {"training.lora_targets": "+".join(kept)}, notes


_PARTS = (
    (r"(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings?)", "embeddings"),
    (r"(lm_head|output|embed_out|score)", "head"),
    (r".*(norm|ln_f|ln_1|ln_2)", "norms"),
)
"""Names of modules beside adapters that are trained whole."""


def saved_modules(s: Settings, *names: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parts that PEFT's ``modules_to_save`` trains beside adapters, and a note on others."""
    found: list[str] = []
    other: list[str] = []
    for word in s.words(*names):
        last = word.rsplit(".", 1)[-1].strip("'\"")
        part = next((part for form, part in _PARTS if re.fullmatch(form, last)), "")
        (found if part else other).append(part or word)
    notes = (f"{s.where}: {', '.join(other)} trained beside adapters: not counted.",)
    fields = {"training.train": tuple(dict.fromkeys(found))} if found else {}
    return fields, notes if other else ()


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
