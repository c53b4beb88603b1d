"""A table as data: columns, raw rows, lines above and below. Every text format reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from actcalc.errors import visible
from actcalc.render.units import amount, digits, flops_scale, percent, scale, seconds_scale

_SPELLED = {
    "grads": "gradients", "optim": "optimizer", "activ": "activations", "trans": "transient",
    "fwd": "forward", "bwd": "backward",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Column:
    """One column: key for machines, title (with unit) for people, how a raw value is shown.

    Where a terminal is too narrow, columns of the highest ``rank`` are left out first; those of 0
    stay. ``style`` is the colour of a raw value (``red``), where colour is on.

    ``get`` takes the raw value from the thing of a row; without it that is its attribute ``key``.
    One that is not ``shown`` is for machines alone: it keeps the columns of a CSV table the same
    where people need not read what is empty or the same in every row.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    wrap: bool = False
    shown: bool = True
    rank: int = 0
    style: Callable[[Any], str] | None = None
    get: Callable[[Any], Any] | None = None

    @property
    def words(self) -> str:
        """The title in one line, for pages: what a terminal has no room for is spelled out."""
        words = self.title.replace("-\n", "-").split()
        return " ".join(_SPELLED.get(word, word) for word in words)

    def of(self, thing: Any) -> Any:
        """The raw value that a thing has in this column."""
        return getattr(thing, self.key) if self.get is None else self.get(thing)


@dataclass(frozen=True, eq=False, repr=False)
class Row:
    """Raw values in column order; ``style`` is plain, strong (a subtotal) or dim."""

    values: tuple[Any, ...]
    style: Literal["plain", "strong", "dim"] = "plain"
    rule_after: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Sheet:
    """One table with the lines that belong to it.

    ``answer`` is the whole answer in one sentence, which people read first; ``fits`` colours it.
    ``advice`` is what to do about it.
    ``details`` are lines for those who ask for all (-v), as is a whole sheet that is a ``detail``.

    ``records`` are the rows for machines, where people are shown others (merged or shortened);
    None: the plain rows are. ``keys`` are their keys, where they are not those of the columns;
    ``types`` those of keys whose values may all be absent.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    records: tuple[tuple[Any, ...], ...] | None = None
    keys: tuple[str, ...] | None = None
    types: Mapping[str, type] = field(default_factory=dict)
    answer: str = ""
    fits: bool | None = None
    advice: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    detail: bool = False

    def __post_init__(self) -> None:
        """Write out what no line may hold: names come from files and paths of the user."""
        for name, value in (
            ("title", visible(self.title)),
            ("answer", visible(self.answer)),
            ("advice", tuple(map(visible, self.advice))),
            ("above", tuple(map(visible, self.above))),
            ("below", tuple(map(visible, self.below))),
            ("notes", tuple(map(visible, self.notes))),
            ("details", tuple(map(visible, self.details))),
            ("rows", tuple(replace(row, values=_visible(row.values)) for row in self.rows)),
            ("records", None if self.records is None else tuple(map(_visible, self.records))),
        ):
            object.__setattr__(self, name, value)

    @property
    def visible(self) -> bool:
        """Whether there is anything to show to people."""
        return bool(self.lines) or any(column.shown for column in self.columns)

    @property
    def lines(self) -> tuple[str, ...]:
        """Every line of text that it has, in order."""
        rest = (*self.above, *self.below, *self.details, *self.notes)
        return tuple(line for line in (self.answer, *self.advice, self.title, *rest) if line)

    def shown(self, row: Row) -> list[str]:
        """A row's cells as people read them, without what is for machines alone."""
        return [
            "" if value is None else visible(column.show(value))
            for column, value in zip(self.columns, row.values, strict=True)
            if column.shown
        ]

    @property
    def shown_columns(self) -> tuple[Column, ...]:
        """The columns that people see."""
        return tuple(column for column in self.columns if column.shown)


def _visible(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(visible(each) if isinstance(each, str) else each for each in values)


def rows_of(columns: Sequence[Column], things: Iterable[Any]) -> tuple[Row, ...]:
    """A row for each thing: what every column takes of it."""
    return tuple(Row(tuple(column.of(thing) for column in columns)) for thing in things)


def brief(sheets: Iterable[Sheet]) -> list[Sheet]:
    """The sheets without their details: what people read who did not ask for all."""
    return [replace(sheet, details=()) for sheet in sheets if not sheet.detail]


def fits_column(key: str, *, get: Callable[[Any], Any] | None = None, shown: bool = True) -> Column:
    """A column that says yes or no, the no in red."""
    return Column(
        key, "fits\n ", lambda fits: "yes" if fits else "no", align="left", shown=shown, get=get,
        style=lambda fits: "red" if fits is False else "",
    )  # fmt: skip


SPARE = 9
"""The rank of a column for terminals with room to spare: elsewhere nobody is told it is missing."""


def ranked(rank: int, column: Column) -> Column:
    """The column with a rank: 1 is left out last, where a terminal is narrow."""
    return replace(column, rank=rank)


def bytes_column(key: str, title: str, values: Sequence[float], units: str) -> Column:
    """A column of byte counts in the one unit that suits its largest value, named in the title."""
    divisor, unit = scale(max((abs(v) for v in values), default=0), units)
    return Column(key, f"{title}\n{unit}", lambda value: amount(value, divisor, units))


def sizes_column(key: str, title: str, things: Sequence[Any], units: str) -> Column:
    """A column of byte counts that the rows' things have as their attribute ``key``."""
    return bytes_column(key, title, [getattr(thing, key) or 0 for thing in things], units)


def flops_column(key: str, title: str, things: Sequence[Any]) -> Column:
    """A column of FLOPs that the rows' things have as ``key``, in the one unit that suits."""
    divisor, unit = flops_scale(max((getattr(thing, key) or 0 for thing in things), default=0))
    return Column(key, f"{title}\n{unit}", lambda value: digits(value / divisor))


def seconds_column(key: str, title: str, things: Sequence[Any]) -> Column:
    """A column of seconds that the rows' things have as ``key``, in the one unit that suits."""
    divisor, unit = seconds_scale(max((getattr(thing, key) or 0 for thing in things), default=0))
    return Column(key, f"{title}\n{unit}", lambda value: digits(value / divisor))


def share_column(
    key: str, title: str, *, shown: bool = True, get: Callable[[Any], Any] | None = None
) -> Column:
    """A column of ratios shown in per cent."""
    return Column(key, title, percent, shown=shown, get=get)
