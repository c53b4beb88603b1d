"""Output formats, one row each: their names, the endings of their files, and who writes them.

Help, hints and the reading of ``-o`` come from these rows; every column must be given. To add a
format is to add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actcalc.render.sheet import Sheet
from actcalc.specs.row import Row

Sheets = Callable[[], list[Sheet]]
"""Makes the tables of an answer."""
Document = Callable[[], dict[str, Any]]
"""Makes the JSON of an answer."""


class Format(Row):
    """One format. What writes it is imported when it is called, and makes only what it needs."""

    name: str
    """As given to --format."""
    endings: tuple[str, ...]
    """Endings of files that hold it, the usual one first."""
    write: Callable[[Sheets, Document], str | bytes]
    """The whole answer as text, or as bytes where the format is no text."""


def _table(sheets: Sheets, document: Document) -> str:
    from actcalc.render.table import export_text

    return export_text(sheets())


def _json(sheets: Sheets, document: Document) -> str:
    import json

    return json.dumps(document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _csv(sheets: Sheets, document: Document) -> str:
    from actcalc.render.text import csv

    return csv(sheets())


def _markdown(sheets: Sheets, document: Document) -> str:
    from actcalc.render.text import markdown

    return markdown(sheets())


def _svg(sheets: Sheets, document: Document) -> str:
    from actcalc.render.table import export_svg

    return export_svg(sheets())


def _html(sheets: Sheets, document: Document) -> str:
    from actcalc.render.table import export_html

    return export_html(sheets())


_ROWS = (
    Format(name="table", endings=(".txt",), write=_table),
    Format(name="json", endings=(".json",), write=_json),
    Format(name="csv", endings=(".csv",), write=_csv),
    Format(name="markdown", endings=(".md", ".markdown"), write=_markdown),
    Format(name="svg", endings=(".svg",), write=_svg),
    Format(name="html", endings=(".html", ".htm"), write=_html),
)

FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
"""Every format by its name; the first is that of the terminal."""

ENDINGS: Mapping[str, str] = {ending: row.name for row in _ROWS for ending in row.endings}
"""The format that a file's ending names."""
