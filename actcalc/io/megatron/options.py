"""Megatron-LM's options by long name, whichever way a mapping writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from actcalc.errors import SpecError, shorten, suggestion
from actcalc.io.megatron.names import NEGATED, RENAMED
from actcalc.io.megatron.older import renewed
from actcalc.specs.base import MAX_LAYERS, MAX_SLICES


class Options:
    """Options by long name, with or without leading dashes, hyphens or underscores."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = by_option(data)
        self.read: set[str] = set()

    def _value(self, name: str) -> Any:
        self.read.add(name)
        return self.data.get(name)

    def has(self, name: str) -> bool:
        """Whether the option is given at all."""
        return self._value(name) is not None

    def flag(self, name: str) -> bool:
        """Whether a switch is on; ``SpecError`` for a value that says neither."""
        value = self._value(name)
        if isinstance(value, bool) or value is None:
            return value is True
        word = str(value).strip().lower()
        if word not in _ON and word not in _OFF:
            raise SpecError(f"{name} is {shorten(value)}, neither on nor off", "use true or false")
        return word in _ON

    def text(self, name: str, default: str = "", choices: Sequence[str] = ()) -> str:
        """The option as text; as one of ``choices``, in whatever case, where they are given.

        Raises ``SpecError`` for a word that is none of them.
        """
        value = self._value(name)
        if value is None or (choices and value is False):
            return default
        word = str(value)
        if not choices:
            return word
        known = {each.lower(): each for each in choices}
        if word.strip().lower() not in known:
            raise SpecError(
                f"{name} is {shorten(value)}, which is no choice of Megatron's",
                suggestion(word, choices) or "use one of " + ", ".join(choices),
            )
        return known[word.strip().lower()]

    def number(self, name: str, default: int, least: int = 0) -> int:
        """The option as a whole number of at least ``least``; ``SpecError`` for anything else."""
        value = self._value(name)
        if value is None:
            return default
        try:
            number = int(str(value)[:40], 10)
        except ValueError:
            raise SpecError(
                f"{name} is {shorten(value)}, not a whole number", "give a number"
            ) from None
        least, most = max(least, int(name in _SIZES)), _MOST.get(name, 2**40)
        if number < least or number > most:
            bound = f"at least {least}" if number < least else f"at most {most}"
            raise SpecError(f"{name} is {number}", f"give a number of {bound}")
        return number

    def real(self, name: str, default: float) -> float:
        """The option as a finite number."""
        value = self._value(name)
        try:
            number = default if value is None else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= 1e12:
            raise SpecError(f"{name} is {shorten(value)}, not a number", "give a number")
        return number

    def words(self, name: str) -> tuple[str, ...]:
        """A list, written as a list or as words in brackets."""
        value = self._value(name)
        if value is None:
            return ()
        if isinstance(value, list | tuple):
            return tuple(str(word) for word in value)
        return tuple(str(value).strip("[]").replace(",", " ").split())


_ON = ("true", "1", "yes", "on", "")
_OFF = ("false", "0", "no", "off", "none", "null")
_SIZES = {
    "vocab-size", "kv-channels", "ffn-hidden-size", "num-query-groups", "moe-ffn-hidden-size",
    "make-vocab-size-divisible-by", "expert-model-parallel-size", "hidden-size",
    "num-distributed-optimizer-instances",
}  # fmt: skip
"""Sizes of which none means the default, and 0 nothing."""
_MOST = {
    **dict.fromkeys(
        ("num-layers", "encoder-num-layers", "decoder-num-layers", "mtp-num-layers"), MAX_LAYERS
    ),
    **dict.fromkeys(
        ("pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"), MAX_SLICES
    ),
}
"""The largest values of options by which lists are made."""


def plain(key: object) -> str:
    """An option's long name without leading dashes, hyphens for underscores."""
    return str(key).lstrip("-").replace("_", "-")


def by_option(data: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the long name of their option, whichever way the mapping names them.

    Next to options as a command line has them these are the fields of the parsed arguments:
    ``add_bias_linear: false`` is ``disable-bias-linear``. An option given by its own name wins.
    """
    found = renewed({plain(key): _value(value) for key, value in data.items()})
    for field, option in RENAMED.items():
        value = found.pop(field, None)
        if value is not None and found.get(option) is None:
            found[option] = value
    for field, option in NEGATED.items():
        value = found.pop(field, None)
        if isinstance(value, bool) and found.get(option) is None:
            found[option] = not value
    return found


_WRITTEN = {"None": None, "null": None, "True": True, "False": False}


def _value(value: Any) -> Any:
    # What str() makes of a field: "None" has no value, "none" is a choice of some options.
    return _WRITTEN.get(value, value) if isinstance(value, str) else value
