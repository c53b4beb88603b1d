"""Output formats, one row each: their names, the endings of their files, and who writes them.

Help, hints and the reading of ``-o`` come from these rows; every column must be given. To add a
format is to add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actcalc.render.plain import ascii_text
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
    for_people: bool
    """Whether it leaves out details (-v has them); what machines read is always whole."""
    escape: Callable[[str], str]
    """Its text in ASCII, for a stream that is not UTF-8."""


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


def _json_escapes(text: str) -> str:
    import json

    return "".join(sign if sign.isascii() else json.dumps(sign)[1:-1] for sign in text)


def _xml_escapes(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode()


_ROWS = (
    Format(name="table", endings=(".txt",), write=_table, for_people=True, escape=ascii_text),
    Format(name="json", endings=(".json",), write=_json, for_people=False, escape=_json_escapes),
    Format(name="csv", endings=(".csv",), write=_csv, for_people=False, escape=ascii_text),
    Format(
        name="markdown", endings=(".md", ".markdown"), write=_markdown, for_people=True,
        escape=ascii_text,
    ),
    Format(name="svg", endings=(".svg",), write=_svg, for_people=True, escape=_xml_escapes),
    Format(
        name="html", endings=(".html", ".htm"), write=_html, for_people=True, escape=_xml_escapes
    ),
)  # fmt: skip

FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
"""Every format by its name; the first is that of the terminal."""

ENDINGS: Mapping[str, str] = {ending: row.name for row in _ROWS for ending in row.endings}
"""The format that a file's ending names."""
