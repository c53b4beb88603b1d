"""Charts of a comparison: what one layer keeps by policy, and when it is computed again."""

from __future__ import annotations

from typing import Any

from actcalc.answers.layer_picture import LayerPicture, Part, PolicyPicture
from actcalc.render.charts.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    Chart,
    category,
    quantity,
    scale_of,
)
from actcalc.render.units import digits, flops, percent, size

_ROW = 30  # pixels of a policy
_LABELLED = 0.04  # of the widest bar: a part narrower than that has no room for its number


def layer_chart(picture: LayerPicture, units: str) -> Chart:
    """Activations of one layer by policy, stacked by module, the s x s part marked."""
    rows, labels, ends = [], [], []
    widest = max(sum(part.units for part in one.parts) for one in picture.policies)
    for one in picture.policies:
        at, whole = 0.0, sum(part.bytes for part in one.parts)
        for part in one.parts:
            rows.append(_part_row(one, part, at, units))
            at += part.units
        inner = _labels(one, widest)
        labels += inner
        of = " a segment" if one.segmented else ""
        number = "" if inner else f"{_number(at)}: "  # of a bar that has no room for it
        ends.append({"policy": one.policy, "at": at, "text": number + size(whole, units) + of})
    names = list(dict.fromkeys(row["part"] for row in rows))
    name = {"y": category("policy", axis={"domain": False, "ticks": False})}
    axis = f"kept by one layer, in units of {picture.unit} = {size(picture.unit_bytes, units)}"
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.72}},
        "encoding": {
            **name,
            "x": quantity("start", axis, scale=_room(widest), axis={"grid": False}),
            "x2": {"field": "end"},
            "color": category("part", scale=scale_of(names, _own(names))),
            "description": {"field": "about"},
        },
    }
    inside = {
        "data": {"values": labels},
        "mark": {"type": "text", "color": "#000000", "fontWeight": "bold"},
        "encoding": {**name, "x": quantity("at", axis), "text": {"field": "text"}},
    }
    kind = "layer" if picture.count == picture.model["layers"] else f"{picture.layer} layer"
    return Chart(
        name="layer",
        title=f"{picture.title}: activations that one {kind} keeps for backward",
        about="; ".join(f"{end['policy']} {end['text']}" for end in ends),
        body={"layer": [bars, inside, _behind(ends, axis)], "height": _ROW * len(picture.policies)},
        lines=(
            "Per GPU and micro-batch. Numbers in the bars: bytes in units of "
            f"{picture.unit}, of what grows with s and of what grows with s².",
        ),
    )


def _room(widest: float) -> dict[str, Any]:
    """A scale with room for a word behind the widest bar."""
    return {"domain": [0, widest * 1.22], "nice": False}


_COLOURS = {"layer input": BLUE, "attention": GREEN, "norm": SKY, "ffn": PINK}
"""Of the modules that most layers have, so that they look alike whichever model is drawn."""


def _own(names: list[str]) -> dict[str, str]:
    own = {name: ORANGE for name in names if name.endswith("s × s")}
    return own | {name: colour for name, colour in _COLOURS.items() if name in names}


def _part_row(one: PolicyPicture, part: Part, at: float, units: str) -> dict[str, Any]:
    name = f"{part.module}, s × s" if part.quadratic else part.module
    return {
        "policy": one.policy,
        "part": name,
        "start": at,
        "end": at + part.units,
        "bytes": part.bytes,
        "about": f"{one.policy}, {name}: {size(part.bytes, units)} "
        f"({', '.join(tensor.replace('_', ' ') for tensor in part.tensors)})",
    }


def _labels(one: PolicyPicture, widest: float) -> list[dict[str, Any]]:
    """The units of what grows with s and of what grows with its square, in the middle of each."""
    found, at = [], 0.0
    for quadratic in (False, True):
        length = sum(part.units for part in one.parts if part.quadratic is quadratic)
        if length > _LABELLED * widest:
            found.append({"policy": one.policy, "at": at + length / 2, "text": _number(length)})
        at += length
    return found


def _number(units: float) -> str:
    return digits(units).removesuffix(".0").removesuffix(".00")


def timeline_chart(picture: LayerPicture) -> Chart:
    """Forward, re-run and backward of a few layers, policy by policy."""
    timed = picture.measure == "seconds"
    divisor, unit = (1e-3, "ms") if timed else _flops_unit(picture)
    rows = [row for one in picture.policies for row in _work_rows(one, divisor, timed=timed)]
    ends = [_again(one, divisor) for one in picture.policies]
    widest = max(end["at"] for end in ends)
    axis = f"{unit} {'of one rank' if timed else 'over all ranks'}, one micro-batch"
    name = {"y": category("policy", axis={"domain": False, "ticks": False})}
    colours = {"forward": BLUE, "re-run": ORANGE, "backward": GREY}
    bars = {
        "data": {"values": rows},
        "mark": {
            "type": "bar",
            "height": {"band": 0.72},
            "stroke": "#ffffff",
            "strokeWidth": 0.7,
        },
        "encoding": {
            **name,
            "x": quantity("start", axis, scale=_room(widest), axis={"grid": False}),
            "x2": {"field": "end"},
            "color": category("kind", scale=scale_of(list(colours), colours)),
            "description": {"field": "about"},
        },
    }
    inside = {
        "data": {"values": [row for row in rows if row["end"] - row["start"] > 0.06 * widest]},
        "mark": {"type": "text", "color": "#000000"},
        "encoding": {**name, "x": quantity("middle", axis), "text": {"field": "text"}},
    }
    many = "one layer" if picture.drawn == 1 else f"{picture.drawn} layers"
    where = f" on {picture.device['name']}" if picture.device else ""
    return Chart(
        name="timeline",
        title=f"{picture.title}: the work of {many} by policy{where}",
        about="; ".join(f"{end['policy']} {end['text'] or 're-runs nothing'}" for end in ends),
        body={"layer": [bars, inside, _behind(ends, axis)], "height": _ROW * len(picture.policies)},
        lines=(
            f"Drawn are {many} of {picture.count} in a chunk of their own. F forward, B backward; "
            "at the right what is computed again, over forward and backward.",
        ),
    )


def _behind(ends: list[dict[str, Any]], axis: str) -> dict[str, Any]:
    """A word behind each bar."""
    return {
        "data": {"values": ends},
        "mark": {"type": "text", "align": "left", "dx": 5},
        "encoding": {
            "y": category("policy", axis={"domain": False, "ticks": False}),
            "x": quantity("at", axis),
            "text": {"field": "text"},
        },
    }


def _work_rows(one: PolicyPicture, divisor: float, *, timed: bool) -> list[dict[str, Any]]:
    rows = []
    for work in one.work:
        amount = work.end - work.start
        shown = f"{digits(amount / divisor)} ms" if timed else flops(amount)
        rows.append(
            {
                "policy": one.policy,
                "kind": work.kind,
                "layer": work.layer,
                "start": work.start / divisor,
                "end": work.end / divisor,
                "middle": (work.start + work.end) / 2 / divisor,
                "text": f"{'B' if work.kind == 'backward' else 'F'}{work.layer}",
                "about": f"{one.policy}: {work.kind} of layer {work.layer}, {shown}",
            }
        )
    return rows


def _again(one: PolicyPicture, divisor: float) -> dict[str, Any]:
    """The end of a policy's time line, and what it computes again over the rest."""
    again = sum(work.end - work.start for work in one.work if work.kind == "re-run")
    total = max((work.end for work in one.work), default=0.0)
    share = again / (total - again) if total > again else 0.0
    text = f"+{percent(share)}" if again else ""
    return {"policy": one.policy, "at": total / divisor, "text": text}


def _flops_unit(picture: LayerPicture) -> tuple[float, str]:
    most = max(work.end for one in picture.policies for work in one.work)
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if most >= 10**power:
            return 10.0**power, f"{letter}FLOP"
    return 1.0, "FLOP"
