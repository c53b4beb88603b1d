"""A search as a Pareto plot: memory of the fullest GPU against the time of a step."""

from __future__ import annotations

from typing import Any

from actcalc.answers.search import FoundLayout, Search
from actcalc.errors import SpecError
from actcalc.render.charts.chart import BLUE, ORANGE, VERMILION, Chart, quantity
from actcalc.render.room import room, usable_bytes
from actcalc.render.units import digits, scale, size

_SHOWN = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero")


def pareto_chart(front: Search, others: Search, units: str) -> Chart:
    """The layouts that nothing tops in both as a line, the best of other degrees as points.

    Raises ``SpecError`` where no layout fits: there is nothing to draw.
    """
    if not front.results:
        raise SpecError("no layout fits, so there is nothing to draw", "see the table")
    limit = int(usable_bytes(front.device) * (1 - front.headroom_ratio))
    sizes = [one.peak_bytes for one in (*front.results, *others.results)]
    divisor, unit = scale(max(*sizes, limit), units)
    line = [_point(one, divisor, units) for one in front.results]
    points = [_point(one, divisor, units) for one in others.results]
    best, leanest = line[0], min(line, key=lambda point: point["memory"])
    lean = [] if best is leanest else [leanest]
    x = quantity(
        "memory", f"fullest GPU, {unit}",
        scale={"domain": [0, 1.02 * limit / divisor], "nice": False},
    )  # fmt: skip
    y = quantity("time", "time of a step, s, predicted", scale={"zero": False, "padding": 20})
    at = {"x": x, "y": y, "description": {"field": "about"}}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": points},
            "mark": {"type": "point", "size": 24, "color": BLUE, "opacity": 0.6},
            "encoding": at,
        },
        {
            "data": {"values": sorted(line, key=lambda point: point["memory"])},
            "mark": {"type": "line", "color": ORANGE, "interpolate": "step-after",
                     "point": {"filled": True, "size": 60, "color": ORANGE, "shape": "diamond"}},
            "encoding": at,
        },
        _named([best], {"align": "right", "dx": -8, "dy": 14}, x, y),
        _named(lean, {"align": "left", "dx": 8, "dy": -8}, x, y),
        _limit(front, limit / divisor, units, x),
    ]  # fmt: skip
    return Chart(
        name="pareto",
        title=f"{front.title}: memory against time of layouts on {front.gpus} x "
        f"{front.device['name']}",
        about=f"Fastest {best['about']}; leanest {leanest['about']}",
        body={"layer": layers, "height": 360},
        lines=(
            f"Of {front.feasible:,} layouts that fit: the line is those that none tops in both, "
            "circles the best of other degrees. Dashed: "
            f"{room(front.device, front.headroom_ratio, units)}.",
        ),
    )


def _point(one: FoundLayout, divisor: float, units: str) -> dict[str, Any]:
    degrees = [f"{name} {one.layout[name]}" for name in _SHOWN if (one.layout[name] or 1) > 1]
    name = " ".join([*degrees, f"b {one.micro_batch}", one.policy])
    return {
        "name": name,
        "memory": one.peak_bytes / divisor,
        "time": one.step_seconds,
        "about": f"{name}: {size(one.peak_bytes, units)}, {digits(one.step_seconds)} s",
    }


def _named(
    points: list[dict[str, Any]], place: dict[str, Any], x: dict[str, Any], y: dict[str, Any]
) -> dict[str, Any]:
    """The names of points, beside them."""
    return {
        "data": {"values": points},
        "mark": {"type": "text", **place},
        "encoding": {"x": x, "y": y, "text": {"field": "name"}},
    }


def _limit(result: Search, limit: float, units: str, x: dict[str, Any]) -> dict[str, Any]:
    """A dashed line at what a layout may take."""
    about = f"{result.device['name']}: {room(result.device, result.headroom_ratio, units)}"
    return {
        "data": {"values": [{"memory": limit, "about": about}]},
        "mark": {"type": "rule", "strokeDash": [6, 4], "color": VERMILION},
        "encoding": {"x": x, "description": {"field": "about"}},
    }
