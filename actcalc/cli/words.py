"""Everyday words for options: what trainers call them, and the options that they are here.

A row is put in place of its word before a command line is parsed, so that errors and answers speak
of the options themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from actcalc.errors import SpecError

_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip


class Word(NamedTuple):
    """One word and what it stands for."""

    words: tuple[str, ...]
    """As it is typed; the first is the usual one."""
    means: tuple[str, ...]
    """The options that it is; ``{}`` is its value."""
    value: Callable[[str], str] | None = None
    """Reads its value; None where it takes none."""

    @property
    def text(self) -> str:
        """What it stands for, as it is typed."""
        return " ".join(self.means).replace("{}", "N" if self.value is str else "TYPE")


def _type(value: str) -> str:
    plain = value.removeprefix("torch.")
    return _TYPES.get(plain, plain)


def _optimizer(value: str) -> str:
    from actcalc.specs.optimizers import meant

    return meant(value) or value


WORDS: tuple[Word, ...] = (
    Word(("--batch-size", "--per-device-train-batch-size"), ("--micro-batch", "{}"), str),
    Word(("--seq-len", "--max-length", "--max-seq-length"), ("--seq", "{}"), str),
    Word(("--gpu",), ("--device", "{}"), str),
    Word(("--dtype", "--torch-dtype"), ("--precision", "{}"), _type),
    Word(("--flash", "--flash-attn", "--flash-attention"), ("--attention", "flash")),
    Word(("--gradient-checkpointing", "--activation-checkpointing"), ("--policy", "full")),
    Word(("--liger", "--use-liger-kernel"), ("--loss", "fused")),
    Word(("--fsdp",), ("--zero", "3", "--recipe", "fsdp")),
    Word(("--deepspeed",), ("--zero", "{}", "--recipe", "mixed"), str),
    Word(("--optim",), ("--optimizer", "{}"), _optimizer),
    Word(("--load-in-4bit",), ("--base-bits", "4")),
    Word(("--load-in-8bit",), ("--base-bits", "8")),
    Word(("--lora-r",), ("--lora-rank", "{}"), str),
    Word(("--gradient-accumulation-steps",), ("--grad-accum", "{}"), str),
)
"""Every word; none of them is an option of a command."""
_ROWS = {word: row for row in WORDS for word in row.words}


def meant(word: str) -> str:
    """The option that an everyday word stands for first; any other word is itself."""
    row = _ROWS.get(word)
    return row.means[0] if row else word


def plainly(args: Sequence[str]) -> list[str]:
    """The arguments with the options that everyday words stand for.

    Raises ``SpecError`` for a word without the value that it takes.
    """
    found: list[str] = []
    rest = list(args)
    while rest:
        word, equals, text = rest.pop(0).partition("=")
        row = _ROWS.get(word)
        if row is None:
            found.append(word + equals + text)
        elif row.value is None:
            if equals:
                raise SpecError(f"{word} takes no value", f"it is {row.text}")
            found += row.means
        else:
            if not equals and (not rest or rest[0].startswith("--")):
                raise SpecError(f"{word} is given no value", f"it is {row.text}")
            value = row.value(text if equals else rest.pop(0))
            found += [value if part == "{}" else part for part in row.means]
    return found
