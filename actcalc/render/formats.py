"""Output formats, one row each: their names, the endings of their files, and who writes them.

Help, hints and the reading of ``-o`` come from these rows; every column must be given. To add a
format is to add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from actcalc.render.plain import ascii_text
from actcalc.render.sheet import Sheet
from actcalc.specs.row import Row

if TYPE_CHECKING:
    from actcalc.render.charts.chart import Chart, Charts


class Parts(NamedTuple):
    """An answer as its formats read it; each part is made when a format asks for it."""

    sheets: Callable[[], list[Sheet]]
    """Makes the tables."""
    document: Callable[[], dict[str, Any]]
    """Makes the JSON."""
    charts: Charts
    """Makes each of the charts, the usual one first; empty where there are none."""

    def chart(self) -> Chart:
        """The first chart."""
        return next(iter(self.charts.values()))()


class Format(Row):
    """One format. What writes it is imported when it is called, and makes only what it needs."""

    name: str
    """As given to --format."""
    endings: tuple[str, ...]
    """Endings of files that hold it, the usual one first."""
    drawn: bool
    """Whether it holds one chart, and nothing else."""
    write: Callable[[Parts], str | bytes]
    """The whole answer as text, or as bytes where the format is no text."""
    brief: bool
    """Whether it leaves out details (-v has them); pages and what machines read are whole."""
    escape: Callable[[str], str]
    """Its text in ASCII, for a stream that is not UTF-8."""


def _table(parts: Parts) -> str:
    from actcalc.render.table import export_text

    return export_text(parts.sheets())


def _json(parts: Parts) -> str:
    import json

    text = json.dumps(parts.document(), indent=2, ensure_ascii=False, allow_nan=False)
    return unseen(text) + "\n"


def unseen(text: str) -> str:
    """JSON whose strings have escapes for all that cannot be seen: the same document."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else json_escape(each) for each in text
    )


def json_escape(each: str) -> str:
    """A character as JSON escapes it, in two halves where it needs them."""
    code = ord(each)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def _csv(parts: Parts) -> str:
    from actcalc.render.text import csv

    return csv(parts.sheets())


def _markdown(parts: Parts) -> str:
    from actcalc.render.text import markdown

    return markdown(parts.sheets())


def _parquet(parts: Parts) -> bytes:
    from actcalc.render.parquet import parquet

    return parquet(parts.sheets())


def _svg(parts: Parts) -> str:
    from actcalc.render.charts.draw import svg_file

    return svg_file(parts.chart())


def _png(parts: Parts) -> bytes:
    from actcalc.render.charts.draw import png

    return png(parts.chart())


def _html(parts: Parts) -> str:
    from actcalc.render.page import answer_page

    return answer_page(parts.sheets(), [make() for make in parts.charts.values()])


def _vega_lite(parts: Parts) -> str:
    from actcalc.render.charts.draw import vega_lite

    return vega_lite(parts.chart())


def _json_escapes(text: str) -> str:
    import json

    return "".join(sign if sign.isascii() else json.dumps(sign)[1:-1] for sign in text)


def _xml_escapes(text: str) -> str:
    return text.encode("ascii", "xmlcharrefreplace").decode()


_ROWS = (
    Format(name="table", endings=(".txt",), drawn=False, write=_table,
           brief=True, escape=ascii_text),
    Format(name="json", endings=(".json",), drawn=False, write=_json,
           brief=False, escape=_json_escapes),
    Format(name="csv", endings=(".csv",), drawn=False, write=_csv,
           brief=False, escape=ascii_text),
    Format(name="markdown", endings=(".md", ".markdown"), drawn=False, write=_markdown,
           brief=True, escape=ascii_text),
    Format(name="parquet", endings=(".parquet",), drawn=False, write=_parquet,
           brief=False, escape=ascii_text),
    Format(name="svg", endings=(".svg",), drawn=True, write=_svg,
           brief=True, escape=_xml_escapes),
    Format(name="png", endings=(".png",), drawn=True, write=_png,
           brief=True, escape=ascii_text),
    Format(name="vl.json", endings=(".vl.json",), drawn=True, write=_vega_lite,
           brief=False, escape=_json_escapes),
    Format(name="html", endings=(".html", ".htm"), drawn=False, write=_html,
           brief=False, escape=_xml_escapes),
)  # fmt: skip

FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}
"""Every format by its name; the first is that of the terminal."""

ENDINGS: Mapping[str, str] = {ending: row.name for row in _ROWS for ending in row.endings}
"""The format that a file's ending names."""


def named_by(path: str) -> str | None:
    """The format that the longest fitting ending of a file's name says; None if none does."""
    fitting = [ending for ending in ENDINGS if path.lower().endswith(ending)]
    return ENDINGS[max(fitting, key=len)] if fitting else None
