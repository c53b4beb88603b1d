"""Sheets as CSV (raw numbers, machine keys) and as Markdown (as shown to people)."""

from __future__ import annotations

import csv as csv_module
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actcalc.render.sheet import Sheet


def csv(sheets: list[Sheet]) -> str:
    """Raw values under their keys: the main table first, others after an empty line each.

    Tables of the same columns become one, and so do tables of the same rows (compare's figures of
    each policy). Where no sheet has a table, its lines are the rows: an answer is never empty.
    """
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    for index, table in enumerate(tables(sheets)):
        if index:
            out.write("\n")
        writer.writerow(table.keys)
        for row in table.rows:
            writer.writerow([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """A value for a spreadsheet, which would run a text that begins like a formula."""
    if value is None:
        return ""
    if not isinstance(value, str) or not value.startswith(_FORMULAS) or _is_number(value):
        return value
    return "'" + value


_FORMULAS = ("=", "+", "-", "@")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """One table for machines: keys, and the rows under them."""

    keys: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    types: Mapping[str, type] = field(default_factory=dict)
    """Of keys whose values may all be absent."""


def tables(sheets: list[Sheet]) -> list[Table]:
    """The tables of an answer, joined where columns or rows are the same; the main one first."""
    found: list[Table] = []
    for sheet in sheets:
        if not sheet.columns:
            continue
        keys = sheet.keys or tuple(column.key for column in sheet.columns)
        rows = [row.values for row in sheet.rows if row.style == "plain"]
        if sheet.records is not None:
            rows = list(sheet.records)
        if found and found[-1].keys == keys:
            found[-1].rows.extend(rows)
        elif found and _same_rows(found[0], keys, rows):
            wider = [one + other[1:] for one, other in zip(found[0].rows, rows, strict=True)]
            found[0] = Table(found[0].keys + keys[1:], wider)
        else:
            found.append(Table(keys, rows, sheet.types))
    lines = [(line,) for sheet in sheets for line in sheet.lines]
    return found or [Table(("line",), lines)]


def _same_rows(table: Table, keys: tuple[str, ...], rows: list[tuple[Any, ...]]) -> bool:
    """Whether more columns of the same things follow: equal names in the first column."""
    names = [row[0] for row in rows]
    return (
        set(table.keys) & set(keys) == {keys[0]}
        and table.keys[0] == keys[0]
        and names == [row[0] for row in table.rows]
        and len(set(names)) == len(names)
    )


def markdown(sheets: list[Sheet]) -> str:
    """Each sheet as a Markdown table with its lines above and below."""
    parts: list[str] = []
    for sheet in sheets:
        if not sheet.visible:
            continue
        lines = [f"**{_escape(sheet.answer)}**", ""] if sheet.answer else []
        for line in sheet.advice:
            lines += [_escape(line), ""]
        title = _escape(sheet.title)
        lines += [title if sheet.answer else f"**{title}**", ""] if title else []
        for line in sheet.above:
            lines += [_escape(line), ""]
        columns = sheet.shown_columns
        if columns:
            titles = [_escape(column.title.replace("\n", " ")) for column in columns]
            rules = ["---:" if column.align == "right" else ":---" for column in columns]
            lines += [_row(titles), _row(rules)]
            for row in sheet.rows:
                cells = [_escape(cell) for cell in sheet.shown(row)]
                lines.append(
                    _row([f"**{c}**" if c and row.style == "strong" else c for c in cells])
                )
            lines.append("")
        for line in (*sheet.below, *sheet.details):
            lines += [_escape(line), ""]
        for note in sheet.notes:
            lines += [f"> {_escape(note)}", ""]
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    """``text`` as Markdown shows it: no mark-up, no link, no HTML."""
    return _MARKS.sub(r"\\\g<0>", text.replace("<", "&lt;")).replace("\n", " ")


_MARKS = re.compile(r"[\\|*`\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
