"""A table in a terminal that is too narrow for it.

Names wrap first, then the least important columns are left out, and a table that still does not
fit becomes a record a row: a line for each of its figures. A number is never cut.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len

from actcalc.render.sheet import SPARE, Column, Sheet

_LEAST_TEXT = 8
"""Columns that a text which wraps needs at least, to be read."""
_MOST_WORD = 24
"""Columns for the longest word of such a text; one that is longer is folded."""


def narrowed(sheet: Sheet, width: int) -> tuple[Sheet | None, tuple[str, ...]]:
    """The sheet with as many columns as ``width`` takes, and a note of those that are left out.

    None where even the columns that must stay are too many: then :func:`as_records` shows it.
    """
    chosen = sheet
    while _needs(chosen) > width:
        rank = max(column.rank for column in chosen.shown_columns)
        if rank == 0:
            return None, ()
        index = max(i for i, c in enumerate(chosen.columns) if c.shown and c.rank == rank)
        columns = list(chosen.columns)
        columns[index] = replace(columns[index], shown=False)
        chosen = replace(chosen, columns=tuple(columns))
    gone = [_label(one) for one, now in zip(sheet.columns, chosen.columns, strict=True)
            if one.shown and not now.shown and one.rank < SPARE]  # fmt: skip
    note = f"Left out at this width: {', '.join(gone)}."
    return chosen, (note,) if gone else ()


def as_records(sheet: Sheet, width: int) -> list[str]:
    """Each row as lines: its name, then a label and a value for every cell that has one."""
    first, *rest = sheet.shown_columns
    named = first.align == "left"
    labelled = rest if named else [first, *rest]
    labels = [_label(column) for column in labelled]
    widest = max(map(cell_len, labels), default=0)
    lines: list[str] = []
    for row in sheet.rows:
        cells = sheet.shown(row)
        if named:
            name = cells.pop(0)
            bare = not name[:1].isdigit()
            lines += [*([""] if lines else []), name if bare else f"{_label(first)} {name}"]
        for label, cell in zip(labels, cells, strict=True):
            if cell:
                lead = f"  {label}{' ' * (widest - cell_len(label))}  "
                hang = "    " if cell_len(lead) > width // 2 else " " * cell_len(lead)
                lines += (
                    textwrap.wrap(lead + " ".join(cell.split()), width, subsequent_indent=hang)
                    if cell_len(lead) + cell_len(cell) > width
                    else [lead + cell]
                )
    return lines


def _label(column: Column) -> str:
    return " ".join(column.title.split()) or column.key.replace("_", " ")


def _needs(sheet: Sheet) -> int:
    """The least width of the sheet's table, its names wrapped."""
    columns = sheet.shown_columns
    if not columns:
        return 0
    rows = [[column.title for column in columns], *(sheet.shown(row) for row in sheet.rows)]
    total = 2 * len(columns)
    texts_wrap = any(column.wrap for column in columns)
    for column, texts in zip(columns, zip(*rows, strict=True), strict=True):
        lines = [line for text in texts for line in text.split("\n")]
        longest = max(map(cell_len, lines), default=0)
        if column.rank == SPARE:
            pass
        elif column.wrap:
            words = [word for text in texts for word in text.split()]
            word = min(_MOST_WORD, max(map(cell_len, words), default=0))
            longest = min(longest, max(_LEAST_TEXT, word))
        elif column.align == "left" and not texts_wrap:
            longest = max((_longest_piece(text) for text in texts), default=0)
        total += longest
    return total


def _longest_piece(text: str) -> int:
    return max((cell_len(piece.rstrip()) for piece in _pieces(text)), default=0)


def fitting(
    rows: Sequence[Sequence[str]], names: Sequence[bool], width: int
) -> tuple[list[int], int]:
    """Width of each column, those of ``names`` as narrow as needed, and of the whole table."""
    widths = [
        max((cell_len(line) for cell in column for line in cell.split("\n")), default=0)
        for column in zip(*rows, strict=True)
    ]
    least = [max(map(_longest_piece, column)) for column in zip(*rows, strict=True)]
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


def breaks_into(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``, broken after a joint of names where there is one."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
