"""The planner's chart: memory against what is computed again, with the named policies as points."""

from __future__ import annotations

from typing import Any

from actcalc.answers.plan import RunPlan
from actcalc.plan.figures import PointFigure, RivalFigure
from actcalc.render.charts.chart import BLUE, ORANGE, VERMILION, Chart, quantity
from actcalc.render.plan import amount_of, cost_of
from actcalc.render.units import percent, scale, size


def frontier_chart(result: RunPlan, units: str) -> Chart:
    """The cheapest plan at each memory as a line, named policies as points, the budget marked."""
    named = [one for one in result.named if one.peak_bytes is not None]
    sizes = [point.peak_bytes for point in result.frontier]
    sizes += [one.peak_bytes or 0 for one in named]
    divisor, unit = scale(max(sizes), units)
    line = [_point(result, point, "cheapest plan", divisor, units) for point in result.frontier]
    points = _merged([_point(result, one, one.name, divisor, units) for one in named])
    chosen = [] if not result.feasible else [_point(result, result, "this plan", divisor, units)]
    budget = _drawn_budget(result)
    low, high = min(*sizes, *budget) / divisor, max(sizes) / divisor
    domain = [max(0.0, low - 0.04 * (high - low)), high + 0.24 * (high - low)]
    x = quantity("memory", f"peak memory, {unit} of one GPU", scale={"domain": domain,
                                                                     "nice": False})  # fmt: skip
    y = quantity("share", "computed again, % of a forward pass")
    at = {"x": x, "y": y, "description": {"field": "about"}}
    labels = _labels(points, high - low)
    behind = [label for label in labels if _end(label, high - low) <= domain[1]]
    before = [label for label in labels if label not in behind]  # there is no room behind these
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": line},
            "mark": {"type": "line", "color": BLUE, "interpolate": "step-after",
                     "point": {"filled": True, "size": 28, "color": BLUE}},
            "encoding": at,
        },
        {
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 90, "color": ORANGE,
                     "shape": "diamond", "stroke": "currentColor", "strokeWidth": 0.7},
            "encoding": at,
        },
        *(
            {
                "data": {"values": those},
                "mark": {"type": "text", "align": align, "dx": dx, "dy": -7},
                "encoding": {"x": x, "y": y, "text": {"field": "name"}},
            }
            for those, align, dx in ((behind, "left", 8), (before, "right", -4))
            if those
        ),
        {
            "data": {"values": chosen},
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 130, "color": VERMILION,
                     "shape": "circle"},
            "encoding": at,
        },
        *(layer for memory in budget for layer in _budget(memory, divisor, units, x)),
    ]  # fmt: skip
    what = "the activations of one GPU" if result.activations_only else "one GPU"
    return Chart(
        name="frontier",
        title=f"{result.model['name']}: memory of {what} against what is computed again",
        about="; ".join(row["about"] for row in [*chosen, *points]),
        body={"layer": layers, "height": 340},
        lines=(
            "The line is the cheapest plan at each memory; diamonds are named policies, on it only "
            f"where nothing beats them. {_about_budget(result, units)}",
        ),
    )


def _drawn_budget(result: RunPlan) -> list[int]:
    """The budget, unless it is beyond all that is drawn."""
    needed = max((point.memory_bytes for point in result.frontier), default=0)
    return [result.memory_bytes] if result.memory_bytes <= needed else []


def _about_budget(result: RunPlan, units: str) -> str:
    if not result.feasible:
        return "No plan fits the budget (dashed)."
    if not _drawn_budget(result):
        return f"The circle is the plan at the budget of {size(result.memory_bytes, units)}."
    return "The circle is the plan at the budget (dashed)."


def _point(
    result: RunPlan, figure: PointFigure | RivalFigure | RunPlan, name: str,
    divisor: float, units: str,
) -> dict[str, Any]:  # fmt: skip
    cost, peak = cost_of(result, figure) or 0, figure.peak_bytes or 0
    share = cost / result.forward_cost if result.forward_cost else 0.0
    return {
        "name": name,
        "memory": peak / divisor,
        "share": 100 * share,
        "about": f"{name}: {size(peak, units)}, {amount_of(result)(cost)} again "
        f"({percent(share)} of a forward)",
    }


def _merged(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of the same place as one, with all their names."""
    found: dict[tuple[float, float], dict[str, Any]] = {}
    for point in points:
        key = (point["memory"], point["share"])
        if key in found:
            first = found[key]
            found[key] = {
                **point,
                "name": f"{first['name']}, {point['name']}",
                "about": f"{first['name']}, {point['about']}",
            }
        else:
            found[key] = point
    return list(found.values())


def _labels(points: list[dict[str, Any]], span: float) -> list[dict[str, Any]]:
    """Names of points; where one would lie on the next one's, both stand behind the second."""
    labels: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda point: point["memory"]):
        last = labels[-1] if labels else None
        level = last is not None and abs(point["share"] - last["share"]) < 5
        if last is not None and level and point["memory"] < _end(last, span):
            labels[-1] = {**point, "name": f"{last['name']}, {point['name']}"}
        else:
            labels.append(point)
    return labels


_LETTER = 0.016  # of the width: what a letter takes


def _end(label: dict[str, Any], span: float) -> float:
    """Where a name that begins behind its point ends."""
    return float(label["memory"] + _LETTER * span * (len(label["name"]) + 2))


def _budget(memory: int, divisor: float, units: str, x: dict[str, Any]) -> list[dict[str, Any]]:
    """A dashed line at the budget."""
    about = f"budget {size(memory, units)}"
    data = {"values": [{"memory": memory / divisor, "text": about, "about": about}]}
    rule = {"type": "rule", "strokeDash": [6, 4], "color": VERMILION}
    words = {"type": "text", "align": "left", "baseline": "top", "dx": 5}
    return [
        {"data": data, "mark": rule, "encoding": {"x": x, "description": {"field": "about"}}},
        {
            "data": data,
            "mark": words,
            "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "text"}},
        },
    ]
