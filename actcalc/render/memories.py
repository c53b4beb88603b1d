"""The memory of several runs side by side: the fullest stage of each, part by part."""

from __future__ import annotations

from collections.abc import Sequence

from actcalc.answers.memory import MemoryReport
from actcalc.memory.figures import StageFigure
from actcalc.render.memory import PARTS, input_lines, limits_sheet
from actcalc.render.names import distinct_names
from actcalc.render.sheet import Column, Row, Sheet, bytes_column
from actcalc.render.units import size


def side_sheets(results: Sequence[MemoryReport], units: str) -> list[Sheet]:
    """A column for each run, and of two what the second has more; what fits, if it was asked."""
    names = _names(results)
    return [
        _beside(names, results, units),
        *_limits(names, results, units),
    ]


def _top(result: MemoryReport) -> StageFigure:
    return result.stages[result.peak_stage]


def _beside(names: Sequence[str], results: Sequence[MemoryReport], units: str) -> Sheet:
    tops = [_top(result) for result in results]
    parts = [(part.title, [part.of(top) for top in tops]) for part in PARTS]
    parts = [(title, values) for title, values in parts if any(values)]
    parts.append(("total", [top.total_bytes for top in tops]))
    if all(top.margin_bytes is not None for top in tops):
        parts.append(("left", [top.margin_bytes or 0 for top in tops]))
    pair = len(results) == 2
    keys = ("first_bytes", "second_bytes") if pair else [f"{name}_bytes" for name in names]
    columns = [Column("part", "part", align="left")]
    columns += [
        bytes_column(key, name, [top.total_bytes], units)
        for key, name, top in zip(keys, names, tops, strict=True)
    ]
    if pair:
        most = [top.total_bytes for top in tops]
        columns.append(bytes_column("difference_bytes", "difference", most, units))
    rows = []
    for title, values in parts:
        more = [values[1] - values[0]] if pair else []
        rows.append(Row((title, *values, *more), "strong" if title == "total" else "plain"))
    return Sheet(
        answer=_answer(names, results, units),
        fits=_fits(results),
        title=f"memory of the fullest GPU, {'two' if pair else len(results)} runs",
        columns=tuple(columns),
        rows=tuple(rows),
        above=_inputs(names, results),
        below=tuple(
            f"{name}: {_peak(result)}" for name, result in zip(names, results, strict=True)
        ),
        notes=_notes(names, results),
    )


def _names(results: Sequence[MemoryReport]) -> list[str]:
    """What tells the runs apart: without their title where all have the same."""
    names = distinct_names(results)
    titles = {result.title for result in results}
    return [name.removeprefix(f"{results[0].title} ") if len(titles) == 1 else name
            for name in names]  # fmt: skip


def _fits(results: Sequence[MemoryReport]) -> bool | None:
    """False where none fits; None where some do, or nothing is known."""
    fits = {result.fits for result in results}
    return fits.pop() if len(fits) == 1 else None


def _answer(names: Sequence[str], results: Sequence[MemoryReport], units: str) -> str:
    pairs = list(zip(names, results, strict=True))
    needs = [f"{name} {size(_top(result).total_bytes, units)}" for name, result in pairs]
    needed = f"The fullest GPU needs: {', '.join(needs)}."
    if any(result.fits is None for result in results):
        return needed
    fitting = [name for name, result in pairs if result.fits]
    return f"{needed} {'Fits: ' + ', '.join(fitting) if fitting else 'None fits'}."


def _peak(result: MemoryReport) -> str:
    where = f"on stage {_top(result).stage}, " if len(result.stages) > 1 else ""
    return f"peak {where}{_top(result).peak_at}."


def _inputs(names: Sequence[str], results: Sequence[MemoryReport]) -> tuple[str, ...]:
    """The inputs of each run; those that all share once."""
    lines = [input_lines(result) for result in results]
    alike = [line for line in lines[0] if all(line in each for each in lines)]
    own = [(name, [line for line in each if line not in alike])
           for name, each in zip(names, lines, strict=True)]  # fmt: skip
    told = [line for name, each in own if each for line in (f"{name}:", *(f"  {x}" for x in each))]
    one_word = all(each in ([], [f"policy {name}"]) for name, each in own)
    return (*(() if one_word else told), *alike)


def _limits(names: Sequence[str], results: Sequence[MemoryReport], units: str) -> list[Sheet]:
    """The largest that fit: one table where the runs differ in their policy alone."""
    every = [limit for result in results for limit in result.limits]
    if not every:
        return []
    if list(names) == [result.policy for result in results]:
        return [limits_sheet(every, units)]
    return [
        limits_sheet(result.limits, units, of=name)
        for name, result in zip(names, results, strict=True)
    ]


def _notes(names: Sequence[str], results: Sequence[MemoryReport]) -> tuple[str, ...]:
    """Notes of the runs, those of some of them with their names."""
    alike = [note for note in results[0].notes if all(note in each.notes for each in results)]
    own = [
        f"{name}: {note}"
        for name, result in zip(names, results, strict=True)
        for note in result.notes
        if note not in alike
    ]
    return (*alike, *own)
