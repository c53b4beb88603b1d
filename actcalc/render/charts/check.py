"""Predicted against measured: figures of one log, and published cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from actcalc.answers.check import Check
from actcalc.render.charts.chart import BLUE, GREY, VERMILION, Chart, category, quantity, scale_of
from actcalc.render.check import name_of
from actcalc.render.units import percent


def check_chart(result: Check) -> Chart:
    """How far each prediction lies from its measurement, on the range that is stated for it."""
    rows: list[dict[str, Any]] = [
        {
            "name": name_of(figure),
            "low": 100 * figure.low_ratio,
            "high": 100 * (figure.high_ratio if figure.high_ratio is not None else _OPEN),
            "difference": 100 * figure.difference_ratio,
            "within": "in the stated range" if figure.within else "outside",
            "about": f"{name_of(figure)}: predicted {signed(figure.difference_ratio)}",
        }
        for figure in result.figures
    ]
    y = category("name", axis={"labelLimit": 260, "domain": False, "ticks": False})
    x = quantity("low", "predicted over measured, less one, %")
    band = {
        "mark": {"type": "bar", "height": 12, "color": GREY, "opacity": 0.35},
        "encoding": {"x": x, "x2": {"field": "high"}, "y": y},
    }
    zero = {
        "data": {"values": [{"zero": 0}]},
        "mark": {"type": "rule", "opacity": 0.6},
        "encoding": {"x": quantity("zero", "")},
    }
    colours = {"in the stated range": BLUE, "outside": VERMILION}
    points = {
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {
            "x": quantity("difference", ""),
            "y": y,
            "color": category("within", scale=scale_of(list(colours), colours)),
            "shape": category("within", legend=None),
            "description": {"field": "about"},
        },
    }
    return Chart(
        name="check",
        title=f"{result.title}: predicted beside {result.log}",
        about="; ".join(row["about"] for row in rows),
        body={
            "data": {"values": rows},
            "layer": [band, zero, points],
            "height": 34 * len(rows),
        },
        lines=("Grey is the range that is stated for such a figure.",),
    )


_OPEN = 0.5  # where a range has no upper end, so much of it is drawn


def signed(ratio: float) -> str:
    """A difference with its sign: ``+1.2 %``."""
    return f"{'+' if ratio >= 0 else '-'}{percent(abs(ratio))}"


class Pair(NamedTuple):
    """A measurement beside its prediction, in one unit."""

    name: str
    group: str
    """What was measured, and by whom."""
    measured: float
    predicted: float


def accuracy_chart(pairs: Sequence[Pair], what: str, unit: str) -> Chart:
    """Published measurements against predictions, on logarithmic axes, with the line of equals."""
    rows: list[dict[str, Any]] = [
        {
            **pair._asdict(),
            "about": f"{pair.name}: measured {pair.measured:.3g} {unit}, predicted "
            f"{pair.predicted:.3g} ({signed(pair.predicted / pair.measured - 1)})",
        }
        for pair in pairs
    ]
    ends = [value for pair in pairs for value in (pair.measured, pair.predicted)]
    low, high = min(ends) * 0.8, max(ends) * 1.25
    scale = {"type": "log", "domain": [low, high], "nice": False}
    groups = list(dict.fromkeys(pair.group for pair in pairs))
    diagonal = {
        "data": {"values": [{"m": low, "p": low}, {"m": high, "p": high}]},
        "mark": {"type": "line", "strokeDash": [5, 4], "color": "currentColor", "opacity": 0.6},
        "encoding": {
            "x": quantity("m", f"measured, {unit}", scale=scale),
            "y": quantity("p", f"predicted, {unit}", scale=scale),
        },
    }
    points = {
        "data": {"values": rows},
        "mark": {"type": "point", "size": 40, "strokeWidth": 1.4, "opacity": 1},
        "encoding": {
            "x": quantity("measured", ""),
            "y": quantity("predicted", ""),
            "color": category("group", scale=scale_of(groups, {})),
            "shape": category("group", scale={"domain": groups}),
            "description": {"field": "about"},
        },
    }
    return Chart(
        name="accuracy",
        title=f"{what}: predicted against measured, {len(pairs)} runs",
        about="Points on the dashed line are predicted exactly",
        body={"layer": [diagonal, points], "height": 420},
        lines=("On the dashed line both are equal; both axes are logarithmic.",),
    )
