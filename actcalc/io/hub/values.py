"""Typed look-ups in a configuration: each says which key held what when a value is no use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError

MAX_SIZE = 2**32
_SHOWN = 60


def shown(value: object) -> str:
    """``value`` as it was written, cut to a length that fits one line."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


class Values:
    """One mapping of a configuration. A key whose value is null counts as missing."""

    def __init__(self, data: Mapping[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def label(self, key: str) -> str:
        """``key`` with the path that leads to it."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether ``key`` has a value."""
        return self.data.get(key) is not None

    def named(self, key: str) -> bool:
        """Whether ``key`` occurs, be it with null."""
        return key in self.data

    def first(self, keys: tuple[str, ...]) -> str | None:
        """The first of ``keys`` that has a value."""
        return next((key for key in keys if self.has(key)), None)

    def wrong(self, key: str, what: str, hint: str) -> SpecError:
        """The error that says ``key`` holds a value of no use."""
        return SpecError(f"{self.label(key)} is {shown(self.data.get(key))}: {what}", hint)

    def integer(self, key: str, least: int = 0, most: int = MAX_SIZE) -> int:
        """A whole number within bounds; ``SpecError`` for anything else, booleans included."""
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "not a whole number", f"give {key} as a whole number")
        if not least <= value <= most:
            raise self.wrong(
                key, f"not between {least} and {most}", f"give {key} a value within those bounds"
            )
        return value

    def size(self, keys: tuple[str, ...], most: int = MAX_SIZE) -> int | None:
        """The positive whole number under the first of ``keys`` present; None without any."""
        key = self.first(keys)
        return None if key is None else self.integer(key, 1, most)

    def number(self, key: str, default: float = 0.0) -> float:
        """A finite number that is not negative."""
        if not self.has(key):
            return default
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "not a number", f"give {key} as a number")
        if abs(value) > 1e9 or not math.isfinite(value) or value < 0:
            raise self.wrong(key, "out of range", f"give {key} a value of 0 or more")
        return float(value)

    def rate(self, keys: tuple[str, ...], default: float) -> float:
        """A dropout probability: from 0 up to, not including, 1."""
        key = self.first(keys)
        if key is None:
            return default
        value = self.number(key)
        if value > 0.999999:
            raise self.wrong(key, "not a probability below 1", f"give {key} a value below 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean (0 and 1 are accepted for false and true)."""
        if not self.has(key):
            return default
        value = self.data[key]
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return bool(value)
        raise self.wrong(key, "neither true nor false", f"give {key} as true or false")

    def text(self, key: str) -> str | None:
        """A string."""
        if not self.has(key):
            return None
        value = self.data[key]
        if not isinstance(value, str):
            raise self.wrong(key, "not text", f"give {key} as text")
        return value

    def items(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list, of ``length`` entries if one is asked for."""
        if not self.has(key):
            return None
        value = self.data[key]
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "not a list", f"give {key} as a list")
        if length is not None and len(value) != length:
            raise SpecError(
                f"{self.label(key)} has {len(value)} entries for {length} layers",
                f"give {key} one entry per layer",
            )
        return list(value)

    def indices(self, key: str) -> frozenset[int]:
        """A list of layer indices; empty if missing."""
        found = self.items(key) or []
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in found):
            raise self.wrong(key, "not a list of layer numbers", "number layers from 0")
        return frozenset(found)

    def section(self, key: str) -> Values:
        """A nested mapping; an empty one if missing."""
        value = self.data.get(key)
        if value is None:
            return Values({}, self.label(key))
        if not isinstance(value, Mapping):
            raise self.wrong(key, "not a mapping", f"put the values under {key}")
        return Values(value, self.label(key))
