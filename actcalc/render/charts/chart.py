"""One chart as data, and what all charts look like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actcalc.errors import visible

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDE = 720
"""Pixels of a chart for a page or a print; labels and legend are inside."""
NARROW = 350
"""Pixels of a chart for a telephone."""

# Okabe and Ito 2008, "Color Universal Design", told apart by colour-blind readers; the blue is
# lighter than theirs, so that it stands out from a dark page too.
BLUE, ORANGE, GREEN, PINK = "#3d8fd1", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW, GREY = "#7cc4f0", "#d55e00", "#d9cb2d", "#8c8c8c"
COLOURS = (BLUE, GREEN, SKY, PINK, YELLOW, VERMILION, GREY)
"""For categories without a colour of their own; orange is for what is pointed out."""

_INK = "currentColor"  # of the page around, so that a chart follows a dark one
_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
_AXIS = {
    "labelColor": _INK,
    "titleColor": _INK,
    "domainColor": _INK,
    "tickColor": _INK,
    "gridColor": _INK,
    "gridOpacity": 0.15,
    "domainOpacity": 0.5,
    "tickOpacity": 0.5,
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "labelLimit": 220,
}
CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": _FONT,
    "axis": _AXIS,
    "legend": {
        "labelColor": _INK,
        "titleColor": _INK,
        "labelFontSize": 12,
        "orient": "bottom",
        "title": None,
        "labelLimit": 260,
    },
    "title": {
        "color": _INK,
        "subtitleColor": _INK,
        "anchor": "start",
        "fontSize": 15,
        "subtitleFontSize": 12,
        "offset": 12,
    },
    "text": {"color": _INK, "fontSize": 12},
    "rule": {"color": _INK},
    "view": {"stroke": None},
}
"""Vega-Lite configuration that all charts share."""


@dataclass(frozen=True, eq=False, repr=False)
class Chart:
    """A picture of an answer: what it shows, in words and as a specification without a width."""

    name: str
    """As given to --plot."""
    title: str
    """What it shows, in one line."""
    about: str
    """The same figures in a sentence, for those who do not see it."""
    body: Mapping[str, Any]
    """Data, marks and encodings in Vega-Lite; width, title and looks are added."""
    lines: tuple[str, ...] = ()
    """What to know about it, under the title."""

    def spec(self, width: int = WIDE, *, titled: bool = True) -> dict[str, Any]:
        """The whole Vega-Lite specification, ``width`` pixels wide, with or without its title."""
        body = _visible(copy.deepcopy(dict(self.body)))
        head: dict[str, Any] = {"$schema": SCHEMA, "description": f"{self.title}. {self.about}"}
        if titled:
            limit = {"limit": width - 20}
            lines = [part for line in self.lines for part in _wrapped(line, width)]
            head["title"] = {"text": _wrapped(self.title, width, 8), "subtitle": lines, **limit}
        fit = {"type": "fit-x", "contains": "padding"}
        config = {**CONFIG, **body.pop("config", {})}
        columns = max(1, width // 170) if width > NARROW else 1
        config["legend"] = {**config["legend"], "columns": columns}
        return {**head, "width": width, "autosize": fit, "config": config, **body}


def _visible(node: Any) -> Any:
    """The same data with nothing in its texts that a picture's file may not hold."""
    if isinstance(node, str):
        return visible(node)
    if isinstance(node, dict):
        return {key: _visible(value) for key, value in node.items()}
    return [_visible(each) for each in node] if isinstance(node, list) else node


Charts = Mapping[str, Callable[[], Chart]]
"""Charts of an answer by name, the usual one first; made when they are asked for."""


def _wrapped(text: str, width: int, pixels: float = 6.2) -> list[str]:
    """A line broken so that it fits ``width``, at ``pixels`` a letter."""
    import textwrap

    return textwrap.wrap(text, max(20, int((width - 20) / pixels))) or [""]


def scale_of(names: Sequence[str], own: Mapping[str, str]) -> dict[str, Any]:
    """A colour scale: ``own`` colours where names have one, the others in order."""
    rest = iter(colour for colour in COLOURS * 4 if colour not in own.values())
    return {"domain": list(names), "range": [own.get(name) or next(rest) for name in names]}


def quantity(field: str, title: str, **more: Any) -> dict[str, Any]:
    """An encoding of a number with its axis' title."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def category(field: str, **more: Any) -> dict[str, Any]:
    """An encoding of names in the order of the data, without a title."""
    return {"field": field, "type": "nominal", "sort": None, "title": None, **more}
