"""A policy's slow-down as tables: op by op in a layer, part by part in a step."""

from __future__ import annotations

from dataclasses import replace

from actcalc.answers.explain.overhead import LayerOverhead, Overhead, PolicyOverhead
from actcalc.render.sheet import Column, Row, Sheet, rows_of, share_column
from actcalc.render.units import digits


def overhead_sheets(found: Overhead) -> list[Sheet]:
    """For each policy the layers that run anything again, then one table of the step under all."""
    layers = [(one, layer) for one in found.policies for layer in one.layers]
    return [
        *(_layer(one, layer) for one, layer in layers),
        _rungs(layers),
        _step(found),
    ]


def _ms(seconds: float) -> str:
    return digits(1e3 * seconds)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _layer(one: PolicyOverhead, layer: LayerOverhead) -> Sheet:
    """One kind of layer; for machines alone where the policy re-runs another kind and not this."""
    shown = layer in _telling(one)
    columns = (
        Column("policy", "policy", shown=False, get=lambda row: one.policy),
        Column("layer", "layer", shown=False, get=lambda row: layer.layer),
        Column("count", "count", shown=False, get=lambda row: layer.count),
        Column("op", "op", _words, align="left", shown=shown),
        Column("forward_seconds", "forward\nms", _shown, shown=shown),
        Column("exposed_seconds", "of it waits\nms", _shown, shown=shown),
        Column("backward_seconds", "backward\nms", _shown, shown=shown),
        Column("rerun_seconds", "again\nms", _shown, shown=shown),
        share_column("rerun_layer_ratio", "of layer", shown=shown),
    )
    timed = [
        row
        for row in layer.rows
        if row.forward_seconds or row.backward_seconds or row.rerun_seconds
    ]
    rows = rows_of(columns, timed)
    which = f"one of {layer.count} {layer.layer} layers" if len(one.layers) > 1 else "one layer"
    return Sheet(
        title=f"{one.policy}: {which}, one micro-batch, one rank" if shown else "",
        columns=columns,
        rows=(
            *rows[:-1],
            *(replace(row, rule_after=True) for row in rows[-1:]),
            *_below_the_ops(layer),
        ),
        records=tuple(row.values for row in rows),
        below=_rest(one) if shown and layer is _telling(one)[-1] else (),
    )


def _below_the_ops(layer: LayerOverhead) -> tuple[Row, ...]:
    """The layer's sums, and its ratio as each convention counts it."""
    sums = (
        layer.forward_seconds,
        sum(row.exposed_seconds for row in layer.rows),
        layer.backward_seconds,
        layer.rerun_seconds,
        layer.layer_ratio,
    )
    nothing = (None,) * 3
    rungs = (
        Row((*nothing, f"by {rung.counted}" if not index else rung.counted, *("",) * 4, rung.ratio))
        for index, rung in enumerate(layer.rungs)
    )
    return (Row((*nothing, "layer", *sums), "strong", rule_after=True), *rungs)


def _telling(one: PolicyOverhead) -> list[LayerOverhead]:
    """The kinds of layer that run anything again; all of them where none does."""
    return [layer for layer in one.layers if layer.rerun_seconds] or list(one.layers)


def _rest(one: PolicyOverhead) -> tuple[str, ...]:
    """Which layers have no table: those that run nothing again."""
    shown = _telling(one)
    rest = [f"{layer.count} {layer.layer}" for layer in one.layers if layer not in shown]
    return (f"Nothing runs again in the other layers: {', '.join(rest)}.",) if rest else ()


def _rungs(layers: list[tuple[PolicyOverhead, LayerOverhead]]) -> Sheet:
    """The ratios of every layer, for machines: people read them below its table."""
    return Sheet(
        title="",
        columns=tuple(
            Column(key, key, shown=False) for key in ("policy", "layer", "counted", "ratio")
        ),
        rows=tuple(
            Row((one.policy, layer.layer, rung.counted, rung.ratio))
            for one, layer in layers
            for rung in layer.rungs
        ),
    )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else _ms(value)


def _step(found: Overhead) -> Sheet:
    names = [part.part for part in found.policies[0].parts]
    shown = [
        any(one.parts[index].seconds for one in found.policies) for index, _ in enumerate(names)
    ]
    first = found.policies[0].plain_step_seconds
    rows = tuple(
        Row(
            (
                one.policy,
                *(part.seconds for part in one.parts),
                one.plain_step_seconds,
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
            *(
                Column(_key(name), f"{name}\ns", digits, shown=some)
                for name, some in zip(names, shown, strict=True)
            ),
            Column("plain_step_seconds", "without\ns", digits, shown=False),
            Column("step_seconds", "step\ns", digits),
            share_column("slowdown_ratio", "slow-down"),
        ),
        rows=rows,
        below=(
            *_sums(found),
            f"layers on the busiest stage: {found.stage_layers}, micro-batches: "
            f"{found.microbatches}; the slow-down is what compare --device prints.",
        ),
    )


def _key(name: str) -> str:
    return name.replace(" ", "_") + "_seconds"


def _sums(found: Overhead) -> tuple[str, ...]:
    """How the tables of several kinds of layer make up a step's ops that run again."""
    lines = []
    for one in found.policies:
        again = [layer for layer in one.layers if layer.rerun_seconds]
        if len(one.layers) > 1 and again:
            terms = " + ".join(f"{layer.count} x {_ms(layer.rerun_seconds)} ms" for layer in again)
            total = found.microbatches * sum(layer.count * layer.rerun_seconds for layer in again)
            many = f"{found.microbatches} x ({terms})" if found.microbatches > 1 else terms
            lines.append(f"{one.policy}: {many} = {digits(total)} s run again.")
    return tuple(lines)
