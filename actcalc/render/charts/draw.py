"""Charts drawn: Vega-Lite through vl-convert (extra ``actcalc[charts]``) to SVG and PNG."""

from __future__ import annotations

import json
import re
from typing import Any

from actcalc.errors import MissingExtraError, install
from actcalc.render.charts.chart import WIDE, Chart

_VERSION = "6.4"
# On a dark page, and in a dark viewer, ink is light: SVG's currentColor is what is given here.
_DARK = (
    "<style>svg{color:#1c1e21;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e6e6;background:#16181c}}</style>"
)


def converter() -> Any:
    """The module that draws; ``MissingExtraError`` with what to install where it is missing."""
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "drawing a chart needs vl-convert-python, which is not installed",
            f"{install('charts')}; -o chart.vl.json needs nothing more",
        ) from error
    return vl_convert


def svg(chart: Chart, width: int = WIDE, *, titled: bool = True) -> str:
    """The chart as SVG; every mark's values are a title that browsers show under the pointer."""
    made: str = converter().vegalite_to_svg(chart.spec(width, titled=titled), _VERSION)
    return _hover(made)


def svg_file(chart: Chart) -> str:
    """The chart as an SVG file: light or dark as its viewer is."""
    made = svg(chart)
    at = made.index(">", made.index("<svg")) + 1
    return made[:at] + _DARK + made[at:] + "\n"


def png(chart: Chart) -> bytes:
    """The chart as PNG on white, at twice its size."""
    spec = json.loads(json.dumps(chart.spec()).replace("currentColor", "#1c1e21"))
    spec["config"]["background"] = "#ffffff"
    made: bytes = converter().vegalite_to_png(spec, _VERSION, scale=2)
    return made


def vega_lite(chart: Chart) -> str:
    """The chart's specification as a file."""
    return json.dumps(chart.spec(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


_MARK = re.compile(r'<(path|text|g|rect|circle|line)\b([^>]*?aria-label="([^"]*)"[^>]*?)(/?)>')


def _hover(text: str) -> str:
    """Marks with their description as a ``title`` child, beside the label that is read aloud."""

    def titled(found: re.Match[str]) -> str:
        tag, attributes, label, closed = found.groups()
        if 'role="graphics-symbol"' not in attributes:
            return found[0]
        end = f"</{tag}>" if closed else ""
        return f"<{tag}{attributes}><title>{label}</title>{end}"

    return _MARK.sub(titled, text)
