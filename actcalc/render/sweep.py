"""A sweep as a table: varied values first, then what each combination needs and gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from actcalc.answers.sweep import Sweep, SweepRow
from actcalc.render.sheet import Column, Row, Sheet, share_column, sizes_column
from actcalc.render.units import count, digits

_FOR_PEOPLE = "verdict"
_TYPES = {
    name: next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    for name, hint in get_type_hints(SweepRow).items()
    if name != "values"
}
"""Types of a row's figures, which may all be absent."""


def sweep_sheets(result: Sweep, units: str) -> list[Sheet]:
    """The rows, groups apart; the best of each stands out."""
    columns = _columns(result, units)
    rows = [
        Row(
            tuple(column.of(row) for column in columns),
            rule_after=_ends_group(result, index),
        )
        for index, row in enumerate(result.rows)
    ]
    shown = [
        replace(row, style="strong" if one.best and len(result.rows) > 1 else "plain")
        for row, one in zip(rows, result.rows, strict=True)
    ]
    grouped = f", by {result.group_by}" if result.group_by else ""
    return [
        Sheet(
            answer=_answer(result),
            title=f"{result.title}: {len(result.rows)} combinations{grouped}",
            columns=columns,
            rows=tuple(shown),
            below=_below(result),
            notes=(*_problems(result), *result.notes),
            records=tuple(
                tuple(
                    value
                    for value, column in zip(row.values, columns, strict=True)
                    if column.key != _FOR_PEOPLE
                )
                for row in rows
            ),
            keys=tuple(column.key for column in columns if column.key != _FOR_PEOPLE),
            types=_TYPES,
        )
    ]


def _answer(result: Sweep) -> str:
    """How many combinations fit, and the fastest of them; in one sentence."""
    rows = result.rows
    runs = [row for row in rows if row.problem is None]
    if not any(row.fits is not None for row in runs):
        return f"{len(runs)} of {len(rows)} combinations are runs."
    fitting = [row for row in runs if row.fits]
    said = f"{len(fitting)} of {len(rows)} combinations fit"
    fastest = max(fitting, key=lambda row: row.tokens_per_second_per_gpu or 0, default=None)
    if fastest is None or len(rows) == 1:
        return said + "."
    words = ", ".join(f"{name} {value}" for name, value in fastest.values.items())
    return f"{said}, the fastest per GPU with {words}."


def _ends_group(result: Sweep, index: int) -> bool:
    rows, key = result.rows, result.group_by
    return (
        key is not None
        and index + 1 < len(rows)
        and rows[index].values[key] != rows[index + 1].values[key]
    )


def _problems(result: Sweep) -> tuple[str, ...]:
    """Why some combinations are no runs, each reason once, with how many it holds for."""
    counts = Counter(row.problem for row in result.rows if row.problem is not None)
    return tuple(
        f"no run: {problem}" + (f" ({times} combinations)" if times > 1 else "")
        for problem, times in counts.items()
    )


def _below(result: Sweep) -> tuple[str, ...]:
    lines = []
    if result.tokens is not None:
        lines.append(f"A training run is {count(result.tokens)} tokens.")
    if any(row.best for row in result.rows) and len(result.rows) > 1:
        each = "of each group " if result.group_by else ""
        lines.append(f"Best {each}by tokens per second and GPU: yes*.")
    return tuple(lines)


def _columns(result: Sweep, units: str) -> tuple[Column, ...]:
    rows, several = result.rows, len(result.rows) > 1
    names = sorted(result.varied, key=lambda name: name != result.group_by)

    def value(name: str) -> Column:
        left = any(isinstance(each, str) for each in result.varied[name])
        return Column(
            name, name, align="left" if left else "right", get=lambda row: row.values[name]
        )

    def figure(key: str, title: str, show: Any = digits) -> Column:
        return Column(key, title, show, shown=any(getattr(row, key) is not None for row in rows))

    return (
        *(value(name) for name in names),
        _where_known(sizes_column("peak_bytes", "fullest GPU", rows, units), rows),
        Column("fits", "fits", shown=False),
        Column(_FOR_PEOPLE, "fits", align="left", get=lambda row: _verdict(row, several)),
        figure("gpus", "GPUs", str),
        figure("step_seconds", "step\ns"),
        figure("tokens_per_second_per_gpu", "tokens/s\nper GPU"),
        figure("tokens_per_day", "tokens\nper day", count),
        share_column("mfu_ratio", "MFU\n ", shown=any(row.mfu_ratio for row in rows)),
        figure("days", "days"),
        figure("gpu_hours", "GPU-\nhours", count),
        figure("price", "price", count),
        figure("energy_kwh", "energy\nkWh", count),
        Column("best", "best", shown=False),
        Column("problem", "problem", shown=False),
    )  # fmt: skip


def _where_known(column: Column, rows: tuple[SweepRow, ...]) -> Column:
    """The column, for machines alone where no row has a value in it."""
    return replace(column, shown=any(getattr(row, column.key) is not None for row in rows))


def _verdict(row: SweepRow, several: bool) -> str:
    """Whether a row fits, in a word."""
    if row.problem is not None:
        return "-"
    if row.fits is None:
        return ""
    if not row.fits:
        return "no"
    return "yes*" if row.best and several else "yes"
