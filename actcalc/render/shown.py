"""Results as a library's user sees them: text, a notebook's HTML, the rows of a data frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from actcalc.render.sheet import Sheet, brief
from actcalc.render.table import export_text
from actcalc.render.text import Table, tables
from actcalc.specs.result import Result

UNITS = "GB"
_DRAWN: Mapping[str, tuple[str, str]] = {
    "actcalc/advise/1": ("advise", "advise_sheets"),
    "actcalc/breakdown/1": ("breakdown", "breakdown_sheets"),
    "actcalc/calibrate/1": ("calibrate", "calibrate_sheets"),
    "actcalc/check/1": ("check", "check_sheets"),
    "actcalc/compare/1": ("compare", "compare_sheets"),
    "actcalc/compare-layer/1": ("measure", "layer_sheets"),
    "actcalc/explain/1": ("explain", "explain_sheets"),
    "actcalc/measure/1": ("measure", "measure_sheets"),
    "actcalc/memory/1": ("memory", "memory_sheets"),
    "actcalc/mfu/1": ("mfu", "mfu_sheets"),
    "actcalc/plan/1": ("plan", "plan_sheets"),
    "actcalc/plan-layer/1": ("plan", "plan_sheets"),
    "actcalc/plan-problem/1": ("plan_problem", "problem_sheets"),
    "actcalc/search/1": ("search", "search_sheets"),
    "actcalc/sweep/1": ("sweep", "sweep_sheets"),
    "actcalc/terms/1": ("explain", "terms_sheets"),
}
"""Module and function that draw each kind of answer, by its schema."""
_UNITLESS = {"explain", "calibrate"}


def sheets_of(result: Result, units: str = UNITS) -> list[Sheet]:
    """The tables of any result."""
    module, function = _DRAWN[result.schema_name]
    draw = getattr(import_module(f"actcalc.render.{module}"), function)
    found: list[Sheet] = draw(result) if module in _UNITLESS else draw(result, units)
    return found


def text(result: Result) -> str:
    """The result as the terminal shows it."""
    if result.schema_name not in _DRAWN:
        return f"{type(result).__name__}(...)"
    return export_text(brief(sheets_of(result))).rstrip("\n")


def html(result: Result) -> str:
    """The result as a notebook shows it: plain tables, which its own style sheet dresses."""
    return "\n".join(_html(sheet) for sheet in brief(sheets_of(result)) if sheet.visible)


def table(result: Result) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Keys and raw rows of its main table, as CSV holds them."""
    first: Table = tables(sheets_of(result))[0]
    return first.keys, first.rows


def _html(sheet: Sheet) -> str:
    parts = [f"<p><strong>{escape(sheet.answer)}</strong></p>"] if sheet.answer else []
    parts += [f"<p>{escape(line)}</p>" for line in sheet.advice]
    title = escape(sheet.title)
    parts += [f"<p>{title if parts else f'<strong>{title}</strong>'}</p>"] if title else []
    parts += [f"<p>{escape(line)}</p>" for line in sheet.above]
    columns = sheet.shown_columns
    if columns:
        heads = "".join(
            f"<th>{escape(column.title).replace(chr(10), '<br>')}</th>" for column in columns
        )
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody>")
        for row in sheet.rows:
            cells = zip(columns, sheet.shown(row), strict=True)
            drawn = "".join(
                f'<td style="text-align:{column.align}">{escape(cell)}</td>'
                for column, cell in cells
            )
            parts.append(f"<tr>{drawn}</tr>")
        parts.append("</tbody></table>")
    parts += [f"<p>{escape(line)}</p>" for line in sheet.below]
    parts += [f"<p><em>note: {escape(note)}</em></p>" for note in sheet.notes]
    return "".join(parts)
