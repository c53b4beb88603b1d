"""Options of a framework by dotted name: typed look-ups, and which were never asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from actcalc.errors import SpecError, shorten

MOST_TOLD = 24
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "")
LeftOut = tuple[tuple[str, str, tuple[Any, ...]], ...]
"""Options that move memory or time and are not modelled: name, what they do, idle values."""


class Settings:
    """A nested mapping as options with dotted names; "None" and null count as absent."""

    def __init__(self, data: Mapping[str, Any], where: str, *, hyphens: bool = False) -> None:
        self.where = where
        self.flat = dict(_flat(data, ""))
        if hyphens:
            self.flat = {key.replace("-", "_"): value for key, value in self.flat.items()}
        self.asked: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value under the first of ``names`` that has one; None without any."""
        self.asked.update(names)
        values = (self.flat.get(name) for name in names)
        return next((value for value in values if value is not None), None)

    def has(self, *names: str) -> bool:
        """Whether one of ``names`` has a value."""
        return self.get(*names) is not None

    def text(self, *names: str, default: str = "") -> str:
        """The value as text."""
        value = self.get(*names)
        return default if value is None else str(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A switch; ``SpecError`` for a word that is none."""
        value = self.get(*names)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        word = str(value).strip().lower()
        if word not in (*_TRUE, *_FALSE):
            raise self.wrong(names, value, "not true or false", "write true or false")
        return word in _TRUE

    def number(self, *names: str, default: int = 0, least: int = 0) -> int:
        """A whole number of at least ``least``; ``SpecError`` for anything else."""
        value = self.get(*names)
        if value is None:
            return default
        try:
            real = float(str(value).replace("_", ""))
            number = int(real)
        except (ValueError, OverflowError):
            raise self.wrong(names, value, "not a whole number", "give a number") from None
        if number != real or isinstance(value, bool):
            raise self.wrong(names, value, "not a whole number", "give a number")
        if number < least:
            raise self.wrong(names, value, "too small", f"give a number of at least {least}")
        return number

    def words(self, *names: str) -> tuple[str, ...]:
        """A list, or words of a text, with commas or blanks between them."""
        value = self.get(*names)
        if value is None:
            return ()
        if isinstance(value, list | tuple):
            return tuple(str(word) for word in value)
        return tuple(str(value).strip("[]()").replace(",", " ").replace("'", "").split())

    def section(self, name: str) -> dict[str, Any]:
        """Options under ``name``, without it; all of them count as asked for."""
        prefix = f"{name}."
        found = {k[len(prefix) :]: v for k, v in self.flat.items() if k.startswith(prefix)}
        self.asked.update(prefix + key for key in found)
        return found

    def wrong(self, names: tuple[str, ...], value: Any, what: str, hint: str) -> SpecError:
        """The error that says which option holds a value of no use."""
        name = next((each for each in names if self.flat.get(each) is not None), names[0])
        return SpecError(f"{self.where}: {name} is {shorten(value)}, {what}", hint)

    def notes(self, idle: str, left_out: LeftOut = ()) -> tuple[str, ...]:
        """What is said of options that were not read: those not modelled, those not understood.

        ``idle`` matches the names known to change neither memory nor time.
        """
        told: list[str] = []
        for name, what, values in left_out:
            value = self.flat.get(name)
            if value not in (None, False, "", "false", "False", *values) and value != []:
                told.append(f"{name} is not modelled; it {what}.")
        known = self.asked | {name for name, _, _ in left_out}
        pattern = re.compile(rf"(?:{idle})")
        rest = [
            name
            for name, value in self.flat.items()
            if value is not None and name not in known and not pattern.fullmatch(name)
        ]
        return (*told, *not_understood(rest, known))


def not_understood(names: list[str], known: set[str]) -> tuple[str, ...]:
    """One note that lists options nobody knows, each with the known one that it resembles."""
    if not names:
        return ()
    close = {n: difflib.get_close_matches(n, known, n=1, cutoff=0.85) for n in names[:MOST_TOLD]}
    told = [f"{n} (is it {c[0]}?)" if (c := close[n]) else n for n in sorted(close)]
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return (f"Options not understood, and so not counted: {', '.join(told)}{more}.",)


def _flat(data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, None if value in ("None", "null") else value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as a nested mapping: what a command line gives as a file would hold it."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        target = result
        for step in path:
            inner = target.get(step)
            target[step] = inner if isinstance(inner, dict) else {}
            target = target[step]
        target[last] = value
    return result
