"""Where a policy's slow-down comes from, op by op, for one layer on a device."""

from __future__ import annotations

from dataclasses import dataclass

from actcalc.cost.flops import op_flops
from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import OpTime, Roofline
from actcalc.cost.step import chunk_layers
from actcalc.errors import SpecError
from actcalc.layers.context import whole
from actcalc.layers.graph import Graph
from actcalc.layers.model import ModelGraph, model_graph
from actcalc.policy.rules import NONE, Policy, parse_policy
from actcalc.specs.run import Run


@dataclass(frozen=True)
class OverheadRow:
    """One op of a layer: its time forward, backward and again, in seconds on one rank."""

    op: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    rerun_seconds: float
    """What running it again adds to backward; 0 if the policy does not."""
    exposed_seconds: float
    """Of forward: collectives that nothing hides."""
    hidden_seconds: float
    """Collectives that run beside a product in backward."""


@dataclass(frozen=True)
class Overhead:
    """One layer under one policy beside the same layer without recomputation."""

    rows: tuple[OverheadRow, ...]
    forward_seconds: float
    backward_seconds: float
    """Without recomputation."""
    rerun_seconds: float
    """What the policy adds to backward."""
    time_ratio: float
    """Added over forward and backward together."""
    flops_ratio: float
    """Re-run FLOPs over the layer's forward and backward FLOPs."""
    backward_per_forward_ratio: float
    """Backward time over forward time, without recomputation."""
    exposed_seconds: float
    """Collectives in forward that nothing hides."""
    hidden_seconds: float
    """Collectives in backward that run beside products."""


def overhead(run: Run, policy: Policy, *, graph: ModelGraph | None = None) -> Overhead:
    """Time of the model's most frequent kind of layer under ``policy``, op by op.

    Raises ``SpecError`` without a device.
    """
    if run.device is None:
        raise SpecError("an overhead in time needs a device", "add --device, e.g. a100-80gb")
    model = graph or model_graph(run.model, run.layout, run.workload, run.framework)
    rates = rates_of(run.device, run.workload.precision, devices=run.layout.devices)
    roofline = Roofline(model, rates)
    layer = max(model.kinds, key=lambda kind: kind.count).graph
    times = roofline.ops(layer)
    again = {time.name for time in roofline.rerun(layer, policy)}
    base, chosen = roofline.layer(layer, NONE), roofline.layer(layer, policy)
    return Overhead(
        rows=tuple(_row(time, time.name in again) for time in times),
        forward_seconds=base.forward,
        backward_seconds=base.backward,
        rerun_seconds=chosen.rerun,
        time_ratio=chosen.rerun / (base.forward + base.backward),
        flops_ratio=_flops_ratio(model, layer, again),
        backward_per_forward_ratio=base.backward / base.forward,
        exposed_seconds=sum(time.forward_comm for time in times),
        hidden_seconds=sum(time.backward_hidden for time in times),
    )


def _row(time: OpTime, again: bool) -> OverheadRow:
    return OverheadRow(
        op=time.name,
        kind=time.kind,
        forward_seconds=time.forward_seconds,
        backward_seconds=time.backward_seconds,
        rerun_seconds=time.forward_seconds if again else 0.0,
        exposed_seconds=time.forward_comm,
        hidden_seconds=time.backward_hidden,
    )


def _flops_ratio(model: ModelGraph, layer: Graph, again: set[str]) -> float:
    sizes = whole(dict(model.sizes))
    forward = int(op_flops(layer.ops).value(sizes))
    rerun = int(op_flops(op for op in layer.ops if op.name in again).value(sizes))
    return rerun / (3 * forward)


def overhead_lines(run: Run, policy: str = "full") -> tuple[str, ...]:
    """Where the slow-down of the policy called ``policy`` comes from, in a few lines.

    Raises ``SpecError`` without a device, or for an unknown policy.
    """
    model = model_graph(run.model, run.layout, run.workload, run.framework)
    boundary = model.context.kernel("full_input")
    chosen = parse_policy(
        policy,
        layers=chunk_layers(run),
        full_boundary="replicated" if boundary == "replicated" else "own",
    )
    found = overhead(run, chosen, graph=model)
    device = run.device.name if run.device else ""
    plain = found.forward_seconds + found.backward_seconds
    lines = [
        f"One layer on {device}, one micro-batch, one rank: forward {_ms(found.forward_seconds)}, "
        f"backward {_ms(found.backward_seconds)}, together {_ms(plain)}.",
        f"{policy} adds {_ms(found.rerun_seconds)}: {found.time_ratio:.1%} of the time, where "
        f"FLOPs say {found.flops_ratio:.1%}.",
    ]
    lines += [
        f"{row.op.replace('_', ' ')}: {_ms(row.forward_seconds)} forward, "
        f"{_ms(row.backward_seconds)} backward"
        + (f", {_ms(row.rerun_seconds)} again" if row.rerun_seconds else "")
        for row in found.rows
        if row.forward_seconds or row.backward_seconds
    ]
    lines += _reasons(found, chosen)
    return tuple(lines)


def _reasons(found: Overhead, policy: Policy) -> list[str]:
    lines = [
        f"Backward takes {found.backward_per_forward_ratio:.2f} times as long as forward, though "
        "it has twice the FLOPs."
    ]
    if found.exposed_seconds or found.hidden_seconds:
        lines.append(
            f"Forward waits {_ms(found.exposed_seconds)} for collectives; backward runs "
            f"{_ms(found.hidden_seconds)} of its own beside the products of dX and dW."
        )
    if policy.whole and found.rerun_seconds:
        share = found.forward_seconds / (found.forward_seconds + found.backward_seconds)
        lines.append(
            "One more forward is a third of the FLOPs, but forward / (forward + backward) = "
            f"{share:.1%} of the time: its collectives are exposed again, and backward is short "
            "because it hides its own."
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
