"""Sheets as CSV (raw numbers, machine keys) and as Markdown (as shown to people)."""

from __future__ import annotations

import csv as csv_module
import io

from actcalc.render.sheet import Sheet


def csv(sheets: list[Sheet]) -> str:
    """Raw values under their keys; tables of the same columns become one, others are kept apart."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    header: tuple[str, ...] = ()
    for sheet in sheets:
        keys = tuple(column.key for column in sheet.columns)
        if not keys:
            continue
        if keys != header:
            if header:
                out.write("\n")
            writer.writerow(keys)
            header = keys
        for row in sheet.rows:
            if row.style == "plain":
                writer.writerow(["" if value is None else value for value in row.values])
    return out.getvalue()


def markdown(sheets: list[Sheet]) -> str:
    """Each sheet as a Markdown table with its lines above and below."""
    parts: list[str] = []
    for sheet in sheets:
        lines = [f"**{sheet.title}**", ""] if sheet.title else []
        for line in sheet.above:
            lines += [_escape(line), ""]
        if sheet.columns:
            titles = [_escape(column.title.replace("\n", " ")) for column in sheet.columns]
            rules = ["---:" if column.align == "right" else ":---" for column in sheet.columns]
            lines += [_row(titles), _row(rules)]
            for row in sheet.rows:
                cells = [
                    "" if value is None else _escape(column.show(value))
                    for column, value in zip(sheet.columns, row.values, strict=True)
                ]
                lines.append(
                    _row([f"**{c}**" if c and row.style == "strong" else c for c in cells])
                )
            lines.append("")
        for line in sheet.below:
            lines += [_escape(line), ""]
        for note in sheet.notes:
            lines += [f"> {_escape(note)}", ""]
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
