"""Sheets drawn with Rich, on the terminal or exported as SVG or HTML."""

from __future__ import annotations

import io
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actcalc.render.sheet import Sheet

_STYLES = {"plain": "", "strong": "bold", "dim": "dim"}


class _Console(Console):
    """A console that leaves a broken pipe to its caller, which knows the exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(record: bool = False) -> Console:
    """A console that never interprets markup and reads NO_COLOR, COLUMNS and the terminal."""
    if record:
        return Console(record=True, width=110, file=io.StringIO(), highlight=False, markup=False)
    return _Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def print_sheets(sheets: list[Sheet], target: Console | None = None) -> None:
    """Draw the sheets one below the other."""
    target = target or console()
    for index, sheet in enumerate(sheet for sheet in sheets if sheet.visible):
        if index:
            target.print()
        _draw(sheet, target)


def _draw(sheet: Sheet, target: Console) -> None:
    if sheet.title:
        target.print(Text(sheet.title, style="bold"))
    if sheet.above:
        target.print(Text("\n".join(sheet.above)))
    if sheet.shown_columns:
        target.print(_table(sheet))
    below = Text("\n".join(sheet.below))
    for note in sheet.notes:
        below.append(("\n" if below else "") + f"note: {note}", style="dim")
    if below:
        target.print(below)


def _table(sheet: Sheet) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in sheet.shown_columns:
        table.add_column(
            Text(column.title),
            justify=column.align,
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
        )
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in sheet.shown(row)), style=_STYLES[row.style])
        if row.rule_after:
            table.add_section()
    return table


def export(sheets: list[Sheet], name: str) -> str:
    """The sheets as text, SVG or HTML."""
    if name == "table":
        target = Console(
            file=io.StringIO(), highlight=False, markup=False, width=110, no_color=True
        )
        print_sheets(sheets, target)
        return target.file.getvalue()  # type: ignore[attr-defined, no-any-return]
    target = console(record=True)
    print_sheets(sheets, target)
    title = next((sheet.title for sheet in sheets if sheet.visible), "actcalc")
    return target.export_svg(title=title) if name == "svg" else target.export_html()
