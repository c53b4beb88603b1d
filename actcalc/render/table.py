"""Sheets drawn with Rich, on the terminal or exported as SVG or HTML."""

from __future__ import annotations

import io
import os
import re
import sys

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actcalc.render.sheet import Sheet

_STYLES = {"plain": "", "strong": "bold", "dim": "dim"}


class _Console(Console):
    """A console that leaves a broken pipe to its caller, which knows the exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """A console that never interprets markup and reads NO_COLOR, COLUMNS and the terminal."""
    told = os.environ.get("COLUMNS", "")
    few = told.isdigit() and int(told[:9]) < _NARROWEST
    width = 80 if few and not sys.stdout.isatty() else None
    environ = {**os.environ, "COLUMNS": ""} if few else None
    return _Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, width=width, _environ=environ
    )


_NARROWEST = 20
"""Columns below which COLUMNS says nothing of a terminal (0, as some shells set it)."""


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
        target.print(_table(sheet, target.width), crop=False)
    below = Text("\n".join(sheet.below))
    for note in sheet.notes:
        below.append(("\n" if below else "") + f"note: {note}", style="dim")
    if below:
        target.print(below)


def _table(sheet: Sheet, width: int) -> Table:
    """The sheet's table; names wrap so that it fits ``width``, numbers are never cut."""
    cells = [sheet.shown(row) for row in sheet.rows]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    columns = sheet.shown_columns
    if not any(column.wrap for column in columns):
        names = [column.align == "left" for column in columns]
        titles = [column.title for column in columns]
        limits, needed = _limits([titles, *cells], names, width)
        cells = [
            [_broken(cell, limit) if name else cell
             for cell, limit, name in zip(row, limits, names, strict=True)]
            for row in cells
        ]  # fmt: skip
        table.width = needed if needed > width else None
    for column in columns:
        table.add_column(
            Text(column.title),
            justify=column.align,
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
        )
    for row, shown in zip(sheet.rows, cells, strict=True):
        table.add_row(*(Text(cell) for cell in shown), style=_STYLES[row.style])
        if row.rule_after:
            table.add_section()
    return table


def _limits(rows: list[list[str]], names: list[bool], width: int) -> tuple[list[int], int]:
    """Width of each column, those of ``names`` as narrow as needed, and of the whole table."""
    widths = [
        max((cell_len(line) for cell in column for line in cell.split("\n")), default=0)
        for column in zip(*rows, strict=True)
    ]
    least = [
        max(cell_len(piece.rstrip()) for text in column for piece in ["", *_pieces(text)])
        for column in zip(*rows, strict=True)
    ]
    edges = 2 * len(widths)
    while sum(widths) + edges > width:
        can = [i for i, name in enumerate(names) if name and widths[i] > least[i]]
        if not can:
            break
        widths[max(can, key=lambda i: widths[i])] -= 1
    return widths, sum(widths) + edges


def _pieces(text: str) -> list[str]:
    """What ``text`` may be broken into: names with the joint after them."""
    return re.findall(r"[^-+,/:\s]*[-+,/:\s]|[^-+,/:\s]+", text)


def _broken(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``, broken after a joint of names where there is one."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def export_text(sheets: list[Sheet]) -> str:
    """The sheets as plain text of a fixed width."""
    out = io.StringIO()
    target = Console(
        file=out, highlight=False, markup=False, width=110, no_color=True,
        force_jupyter=False, force_terminal=False,
    )  # fmt: skip
    print_sheets(sheets, target)
    return out.getvalue()
