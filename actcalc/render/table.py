"""Sheets drawn with Rich, on the terminal or exported as SVG or HTML."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from actcalc.render.narrow import as_records, breaks_into, fitting, narrowed
from actcalc.render.plain import ascii_text, takes_signs
from actcalc.render.sheet import Column, Row, Sheet

_STYLES = {"plain": "", "strong": "bold", "dim": "dim"}
_VERDICTS = {None: "bold", True: "bold green", False: "bold red"}
_ASCII_HEAD = Box(str(SIMPLE_HEAD).replace("─", "-"), ascii=True)
_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)


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
    """Draw the sheets one below the other, without blanks at the ends of lines."""
    target = target or console()
    if target.record or target.legacy_windows:
        _draw_all(sheets, target)
        return
    with target.capture() as drawn:
        _draw_all(sheets, target)
    target.file.write(_BLANKS.sub(r"\1", drawn.get()))


def _draw_all(sheets: list[Sheet], target: Console) -> None:
    for index, sheet in enumerate(sheet for sheet in sheets if sheet.visible):
        if index:
            target.print()
        _draw(sheet, target)


def _draw(sheet: Sheet, target: Console) -> None:
    signs = _same if takes_signs(target.encoding) else ascii_text
    if sheet.answer:
        target.print(Text(signs(sheet.answer), style=_VERDICTS[sheet.fits]))
    if sheet.advice:
        target.print(Text(signs("\n".join(sheet.advice))))
    if sheet.title:
        target.print(Text(signs(sheet.title), style="" if sheet.answer else "bold"))
    if sheet.above:
        target.print(Text(signs("\n".join(sheet.above))))
    shown, left_out = narrowed(sheet, target.width)
    if shown is not None:
        if shown.shown_columns:
            target.print(_table(shown, target.width, signs), crop=False)
    else:
        target.print(Text(signs("\n".join(["", *as_records(sheet, target.width), ""]))), crop=False)
    below = Text(signs("\n".join((*sheet.below, *sheet.details))))
    for note in (*sheet.notes, *left_out):
        below.append(("\n" if below else "") + f"note: {signs(note)}", style="dim")
    if below:
        target.print(below)


def _same(text: str) -> str:
    return text


def _table(sheet: Sheet, width: int, signs: Callable[[str], str]) -> Table:
    """The sheet's table; names wrap so that it fits ``width``, numbers are never cut."""
    columns = sheet.shown_columns
    titles = [signs(column.title) for column in columns]
    cells = [[signs(cell) for cell in sheet.shown(row)] for row in sheet.rows]
    head = SIMPLE_HEAD if signs is _same else _ASCII_HEAD
    table = Table(box=head, pad_edge=False, padding=(0, 1), collapse_padding=True)
    if not any(column.wrap for column in columns):
        names = [column.align == "left" for column in columns]
        limits, needed = fitting([titles, *cells], names, width)
        cells = [
            [breaks_into(cell, limit) if name else cell
             for cell, limit, name in zip(row, limits, names, strict=True)]
            for row in cells
        ]  # fmt: skip
        titles = [
            breaks_into(title, limit) if name else title
            for title, limit, name in zip(titles, limits, names, strict=True)
        ]
        table.width = needed if needed > width else None
    for column, title in zip(columns, titles, strict=True):
        table.add_column(
            Text(title),
            justify=column.align,
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
        )
    for row, shown in zip(sheet.rows, cells, strict=True):
        styles = _styles(sheet, row)
        table.add_row(*map(Text, shown, styles), style=_STYLES[row.style])
        if row.rule_after:
            table.add_section()
    return table


def _styles(sheet: Sheet, row: Row) -> list[str]:
    """The colour of each shown cell."""

    def style(column: Column, value: object) -> str:
        return column.style(value) if column.style is not None and value is not None else ""

    pairs = zip(sheet.columns, row.values, strict=True)
    return [style(column, value) for column, value in pairs if column.shown]


def export_text(sheets: list[Sheet]) -> str:
    """The sheets as plain text of a fixed width."""
    out = io.StringIO()
    target = Console(
        file=out, highlight=False, markup=False, width=110, no_color=True,
        force_jupyter=False, force_terminal=False,
    )  # fmt: skip
    print_sheets(sheets, target)
    return out.getvalue()
