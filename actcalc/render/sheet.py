"""A table as data: columns, raw rows, lines above and below. Every text format reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actcalc.render.units import digits, percent, scale


@dataclass(frozen=True, eq=False, repr=False)
class Column:
    """One column: key for machines, title (with unit) for people, how a raw value is shown."""

    key: str
    title: str
    show: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    wrap: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Row:
    """Raw values in column order; ``style`` is plain, strong (a subtotal) or dim."""

    values: tuple[Any, ...]
    style: Literal["plain", "strong", "dim"] = "plain"
    rule_after: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Sheet:
    """One table with the lines that belong to it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def bytes_column(key: str, title: str, values: Sequence[float], units: str) -> Column:
    """A column of byte counts in the one unit that suits its largest value, named in the title."""
    divisor, unit = scale(max((abs(v) for v in values), default=0), units)
    return Column(key, f"{title}\n{unit}", lambda value: digits(value / divisor))


def share_column(key: str, title: str) -> Column:
    """A column of ratios shown in per cent."""
    return Column(key, title, percent)
