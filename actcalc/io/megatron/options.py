"""Megatron-LM's options by long name, whichever way a mapping writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.megatron.names import NEGATED, RENAMED
from actcalc.io.megatron.older import renewed


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
        """Whether a switch is on."""
        value = self._value(name)
        return value is True or str(value).lower() in ("true", "1", "yes", "")

    def text(self, name: str, default: str = "") -> str:
        """The option as text."""
        value = self._value(name)
        return default if value is None else str(value)

    def number(self, name: str, default: int, least: int = 0) -> int:
        """The option as a whole number of at least ``least``; ``SpecError`` for anything else."""
        value = self._value(name)
        if value is None:
            return default
        try:
            number = int(str(value), 10)
        except ValueError:
            raise SpecError(f"{name} is {value!r}, not a whole number", "give a number") from None
        if number < least:
            raise SpecError(f"{name} is {number}", f"give a number of at least {least}")
        return number

    def real(self, name: str, default: float) -> float:
        """The option as a number."""
        value = self._value(name)
        try:
            return default if value is None else float(value)
        except (TypeError, ValueError):
            raise SpecError(f"{name} is {value!r}, not a number", "give a number") from None

    def words(self, name: str) -> tuple[str, ...]:
        """A list, written as a list or as words in brackets."""
        value = self._value(name)
        if value is None:
            return ()
        if isinstance(value, list | tuple):
            return tuple(str(word) for word in value)
        return tuple(str(value).strip("[]").replace(",", " ").split())


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
