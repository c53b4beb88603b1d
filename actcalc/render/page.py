"""A page of an answer: real tables, its lines and its charts, in one file that loads nothing.

Nothing on it runs: the content-security policy allows the one style sheet it carries and nothing
else. Values of charts are titles of their marks, which browsers show and screen readers read.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec

from actcalc import __version__
from actcalc.errors import visible
from actcalc.render.charts.chart import NARROW, WIDE, Chart
from actcalc.render.sheet import Sheet

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5a6069; --page: #fff; --line: #d5d9de;
  --band: #f4f6f8; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a4abb5; --page: #16181c;
  --line: #383d45; --band: #1f2329; --link: #7cc4f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: .2rem 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .4rem; }
p { margin: .35rem 0; overflow-wrap: anywhere; }
.answer { font-size: 1.15rem; margin: .6rem 0 1rem; }
.soft, .note, figcaption { color: var(--soft); font-size: .92rem; }
.note::before { content: "Note: "; }
.wide-table { overflow-x: auto; margin: .7rem 0; }
.wide-table:focus-visible, a:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .94rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
td { white-space: nowrap; }
thead th { border-bottom: 2px solid var(--line); font-weight: 600; vertical-align: bottom; }
th.left, td.left { text-align: left; }
tbody th { font-weight: 500; }
tr.strong td, tr.strong th { font-weight: 700; }
tr.dim td, tr.dim th { color: var(--soft); }
td.wrap { min-width: 12rem; max-width: 26rem; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure svg { display: block; max-width: 100%; height: auto; }
figure .small { display: none; }
pre, code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9rem; }
pre { background: var(--band); padding: .7rem .9rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
nav { margin: 1rem 0; }
details { margin: .6rem 0; } summary { cursor: pointer; }
a { color: var(--link); }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .6rem; }
@media (max-width: 760px) { figure .large { display: none; } figure .small { display: block; }
  th, td { padding: .3rem .5rem; } body { font-size: 15px; } }
@media print { nav { display: none; }
  :root { --ink: #000; --soft: #333; --page: #fff; --line: #999; --band: #f2f2f2;
  --link: #000; } body { max-width: none; padding: 0; font-size: 10.5pt; }
  figure, tr, .keep { break-inside: avoid; } h2, h3 { break-after: avoid; }
  figure .large { display: block; } figure .small { display: none; }
  .wide-table { overflow: visible; } thead { display: table-header-group; } }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
MISSING = "Charts are left out: the extra actcalc[charts] draws them."


def page(title: str, body: str) -> str:
    """A whole page around ``body``, which is HTML already; ``title`` is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="actcalc {__version__}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}"
        f'<footer class="soft"><p>actcalc {__version__}: analytic memory and FLOPs of transformer '
        "training.</p></footer>\n</body>\n</html>\n"
    )


def answer_page(sheets: Sequence[Sheet], charts: Sequence[Chart]) -> str:
    """The tables of an answer, the first one's title on top, and its charts below them."""
    seen = [sheet for sheet in sheets if sheet.visible]
    title = next((sheet.title for sheet in seen if sheet.title), "actcalc")
    first, *others = seen or [Sheet(title=title, columns=(), rows=())]
    body = [f"<main>\n<h1>{text(title)}</h1>\n", section(first, heading=False)]
    body += [section(sheet) for sheet in others]
    body.append(pictures(charts))
    return page(title, "".join(body) + "</main>\n")


def section(sheet: Sheet, *, heading: bool = True, level: int = 2) -> str:
    """One sheet: its title, the lines above, the table, the lines below, the notes."""
    title = f"<h{level}>{text(sheet.title)}</h{level}>\n"
    parts = [title] if heading and sheet.title else []
    parts += [f'<p class="answer">{text(sheet.answer)}</p>\n'] if sheet.answer else []
    parts += [f"<p>{text(line)}</p>\n" for line in sheet.advice]
    parts += [f'<p class="soft">{text(line)}</p>\n' for line in sheet.above]
    if sheet.shown_columns:
        parts.append(table(sheet))
    parts += [f"<p>{text(line)}</p>\n" for line in (*sheet.below, *sheet.details)]
    parts += [f'<p class="note">{text(note)}</p>\n' for note in sheet.notes]
    return "<section>\n" + "".join(parts) + "</section>\n"


def table(sheet: Sheet) -> str:
    """The sheet's table; the first column heads its rows where it holds names."""
    columns = sheet.shown_columns
    head = "".join(
        f'<th scope="col"{_side(column.align)}>{text(column.words)}</th>' for column in columns
    )
    rows = []
    for row in sheet.rows:
        cells = []
        for at, (column, shown) in enumerate(zip(columns, sheet.shown(row), strict=True)):
            if at == 0 and column.align == "left":
                cells.append(f'<th scope="row" class="left">{text(shown)}</th>')
            else:
                cells.append(f"<td{_side(column.align, wrap=column.wrap)}>{text(shown)}</td>")
        style = f' class="{row.style}"' if row.style != "plain" else ""
        rows.append(f"<tr{style}>{''.join(cells)}</tr>\n")
    name = text(sheet.title or "table")
    return (
        f'<div class="wide-table" role="region" aria-label="{name}" tabindex="0">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n</div>\n"
    )


def _side(align: str, *, wrap: bool = False) -> str:
    names = (["left"] if align == "left" else []) + (["wrap"] if wrap else [])
    return f' class="{" ".join(names)}"' if names else ""


def pictures(charts: Sequence[Chart], *, level: int = 2) -> str:
    """Each chart as a figure, drawn twice: for a page, and for a telephone."""
    if not charts:
        return ""
    if find_spec("vl_convert") is None:
        return f'<p class="note">{text(MISSING)}</p>\n'
    return "".join(_figure(chart, level) for chart in charts)


def _figure(chart: Chart, level: int) -> str:
    from actcalc.render.charts.draw import svg

    lines = "".join(f"<br>{text(line)}" for line in chart.lines)
    drawn = [
        f'<div class="{name}">{_inline(svg(chart, width, titled=False), f"{chart.name}-{name}")}'
        "</div>\n"
        for name, width in (("large", WIDE), ("small", NARROW))
    ]
    return (
        f"<figure>\n<h{level}>{text(chart.title)}</h{level}>\n{''.join(drawn)}"
        f"<figcaption>{text(chart.about)}.{lines}</figcaption>\n</figure>\n"
    )


def _inline(drawn: str, name: str) -> str:
    """An SVG for a page: without its prologue, with identifiers of its own."""
    found = drawn[drawn.index("<svg") :]
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", found)


def text(value: str) -> str:
    """Text as HTML, safe inside elements and quoted attributes."""
    return escape(visible(value), quote=True)
