"""A policy's slow-down as tables: op by op in a layer, part by part in a step."""

from __future__ import annotations

from actcalc.cost.overhead import Overhead, PolicyOverhead
from actcalc.render.sheet import Column, Row, Sheet, share_column
from actcalc.render.units import digits


def overhead_sheets(found: Overhead) -> list[Sheet]:
    """For each policy its layer, then one table of the step under all of them."""
    return [*(_layer(one) for one in found.policies), _step(found)]


def _ms(seconds: float) -> str:
    return digits(1e3 * seconds)


def _layer(one: PolicyOverhead) -> Sheet:
    rows = [
        Row(
            (
                row.op.replace("_", " "),
                row.forward_seconds,
                row.exposed_seconds,
                row.backward_seconds,
                row.rerun_seconds,
                row.rerun_layer_ratio,
            )
        )
        for row in one.rows
        if row.forward_seconds or row.backward_seconds or row.rerun_seconds
    ]
    exposed = sum(row.exposed_seconds for row in one.rows)
    total = Row(
        (
            "layer",
            one.forward_seconds,
            exposed,
            one.backward_seconds,
            one.rerun_seconds,
            one.layer_ratio,
        ),
        style="strong",
    )
    rungs = tuple(
        Row((f"by {rung.counted}" if index == 0 else rung.counted, "", "", "", "", rung.ratio))
        for index, rung in enumerate(one.rungs)
    )
    return Sheet(
        title=f"{one.policy}: one layer, one micro-batch, one rank",
        columns=(
            Column("op", "op", align="left"),
            Column("forward_seconds", "forward\nms", _shown),
            Column("exposed_seconds", "of it waits\nms", _shown),
            Column("backward_seconds", "backward\nms", _shown),
            Column("rerun_seconds", "again\nms", _shown),
            share_column("rerun_layer_ratio", "of layer"),
        ),
        rows=(*rows[:-1], *_ruled(rows[-1:]), _last(total), *rungs),
    )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else _ms(value)


def _ruled(rows: list[Row]) -> list[Row]:
    return [Row(row.values, row.style, rule_after=True) for row in rows]


def _last(row: Row) -> Row:
    return Row(row.values, row.style, rule_after=True)


def _step(found: Overhead) -> Sheet:
    names = [part.part for part in found.policies[0].parts]
    shown = [
        index
        for index, _ in enumerate(names)
        if any(abs(one.parts[index].seconds) > 1e-9 * one.step_seconds for one in found.policies)
    ]
    first = found.policies[0].plain_step_seconds
    rows = tuple(
        Row(
            (
                one.policy,
                *(one.parts[index].seconds for index in shown),
                one.step_seconds,
                one.slowdown_ratio,
            )
        )
        for one in found.policies
    )
    return Sheet(
        title=f"one step: {digits(first)} s without recomputation",
        columns=(
            Column("policy", "policy", align="left"),
            *(Column(names[index], f"{names[index]}\ns", digits) for index in shown),
            Column("step_seconds", "step\ns", digits),
            share_column("slowdown_ratio", "slow-down"),
        ),
        rows=rows,
        below=(
            f"layers on the busiest stage: {found.stage_layers}, micro-batches: "
            f"{found.microbatches}; the slow-down is what compare --device prints.",
        ),
    )
