"""Where a policy's slow-down comes from: op by op in a layer, and part by part in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actcalc.cost.flops import op_flops
from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import OpTime, Roofline
from actcalc.cost.step import StepTime, chunk_layers, step_time
from actcalc.errors import SpecError
from actcalc.layers.context import whole
from actcalc.layers.graph import Graph
from actcalc.layers.model import ModelGraph, model_graph
from actcalc.memory.placement import placement
from actcalc.policy.rules import NONE, Policy, parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.specs.run import Run

GATHER = "gather of the kept input"
_PRODUCTS = ("linear", "core")


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """One op of a layer: its time forward, backward and again, in seconds on one rank."""

    op: str
    """Its name."""
    kind: str
    """What it is: linear, core, norm, ..."""
    forward_seconds: float
    """Forward, with the collectives that nothing hides."""
    backward_seconds: float
    """Backward, without recomputation."""
    rerun_seconds: float
    """What running it again adds to backward (mean over the layers of a stage)."""
    exposed_seconds: float
    """Of forward: collectives that nothing hides."""
    hidden_seconds: float
    """Collectives that run beside a product in backward."""
    rerun_layer_ratio: float
    """``rerun_seconds`` over the layer's forward and backward without recomputation."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The slow-down with only some of a layer's costs counted."""

    counted: str
    """What is counted."""
    ratio: float
    """What runs again over forward and backward together."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of what a policy adds to a step."""

    part: str
    """What it is."""
    seconds: float
    """Seconds it adds; below 0 where it takes away."""


@dataclass(frozen=True, kw_only=True)
class PolicyOverhead:
    """One layer and one step under a policy beside the same without recomputation."""

    policy: str
    """The policy."""
    rows: tuple[OverheadRow, ...]
    """The layer's ops, in order."""
    forward_seconds: float
    """One layer's forward, one micro-batch, one rank."""
    backward_seconds: float
    """Its backward without recomputation."""
    rerun_seconds: float
    """What the policy adds to it: the sum of the rows."""
    layer_ratio: float
    """That over forward and backward together."""
    rungs: tuple[Rung, ...]
    """The ratio by FLOPs, by matrix products' time, with the other kernels, with collectives."""
    step_seconds: float
    """One optimizer step under the policy."""
    plain_step_seconds: float
    """One optimizer step without recomputation."""
    parts: tuple[StepPart, ...]
    """What makes up the difference of the two."""
    slowdown_ratio: float
    """The difference over the step without recomputation."""
    reason: str
    """The rungs in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Where the slow-down of one or several policies comes from, on one device."""

    device: str
    """The device."""
    microbatches: int
    """Micro-batches of one step."""
    stage_layers: int
    """Layers of the busiest pipeline stage."""
    policies: tuple[PolicyOverhead, ...]
    """One entry per policy."""
    reasons: tuple[str, ...]
    """What makes time differ from FLOPs in this layer, whatever the policy."""


def overhead(
    run: Run,
    policies: Sequence[str] = ("full",),
    efficiency: Mapping[str, float] | None = None,
) -> Overhead:
    """Time of ``policies`` op by op in a layer of the most frequent kind, and in a step.

    Layer times are means over the first stage, as in a comparison with a device. Raises
    ``SpecError`` without a device, for an unknown policy, or a step that cannot run.
    """
    if run.device is None:
        raise SpecError("an overhead in time needs a device", "add --device, e.g. a100-80gb")
    model = model_graph(run.model, run.layout, run.workload, run.framework)
    rates = rates_of(run.device, run.workload.precision, efficiency, devices=run.layout.devices)
    roofline = Roofline(model, rates, run.training)
    boundary = model.context.kernel("full_input")
    plain = step_time(model, NONE, roofline)
    layers = chunk_layers(run)
    chosen = [
        parse_policy(
            name,
            layers=layers,
            full_boundary="replicated" if boundary == "replicated" else "own",
        )
        for name in policies
    ]
    stage = placement(run.model.depth, run.layout)[plain.stage]
    return Overhead(
        device=run.device.name,
        microbatches=plain.microbatches,
        stage_layers=sum(len(chunk) for chunk in stage),
        policies=tuple(_policy(run, model, roofline, policy, plain) for policy in chosen),
        reasons=_reasons(roofline, _main(model)),
    )


def _main(model: ModelGraph) -> Graph:
    """The most frequent kind of layer (the later one on a tie)."""
    return max(reversed(model.kinds), key=lambda kind: kind.count).graph


def _policy(
    run: Run, model: ModelGraph, roofline: Roofline, policy: Policy, plain: StepTime
) -> PolicyOverhead:
    layer = _main(model)
    times = roofline.ops(layer)
    base = roofline.layer(layer, NONE)
    together = base.forward + base.backward
    found = _again(run, model, roofline, layer, policy)
    rows = [_row(time, found.get(time.name, 0.0), together) for time in times]
    if found.get(GATHER):
        rows.append(_gather(found[GATHER], together))
    added = sum(row.rerun_seconds for row in rows)
    step = step_time(model, policy, roofline)
    weights = {time.name: _weight(time, found) for time in times}
    rungs = _rungs(model, layer, times, weights, found.get(GATHER, 0.0))
    return PolicyOverhead(
        policy=policy.name,
        rows=tuple(rows),
        forward_seconds=base.forward,
        backward_seconds=base.backward,
        rerun_seconds=added,
        layer_ratio=added / together,
        rungs=rungs,
        step_seconds=step.total,
        plain_step_seconds=plain.total,
        parts=_parts(plain, step),
        slowdown_ratio=step.total / plain.total - 1,
        reason=_reason(rungs),
    )


def _again(
    run: Run, model: ModelGraph, roofline: Roofline, layer: Graph, policy: Policy
) -> dict[str, float]:
    """Re-run seconds of each op, mean over the first stage's layers of this kind."""
    stages = StagePolicy(model, policy)
    found: dict[str, float] = {}
    count = 0
    chunks = placement(run.model.depth, run.layout)[0]
    policies = [
        stages.layer_policy(index, chunk)
        for chunk in chunks
        for index in chunk
        if stages.graph(index) is layer
    ] or [policy]
    for one in policies:
        count += 1
        for time in roofline.rerun(layer, one):
            found[time.name] = found.get(time.name, 0.0) + time.forward_seconds
        gathered = roofline.regathered(layer, one)
        if gathered:
            found[GATHER] = found.get(GATHER, 0.0) + gathered
    return {name: seconds / count for name, seconds in found.items()}


def _row(time: OpTime, again: float, together: float) -> OverheadRow:
    return OverheadRow(
        op=time.name,
        kind=time.kind,
        forward_seconds=time.forward_seconds,
        backward_seconds=time.backward_seconds,
        rerun_seconds=again,
        exposed_seconds=time.forward_comm,
        hidden_seconds=time.backward_hidden,
        rerun_layer_ratio=again / together,
    )


def _gather(seconds: float, together: float) -> OverheadRow:
    return OverheadRow(
        op=GATHER,
        kind="gather",
        forward_seconds=0.0,
        backward_seconds=0.0,
        rerun_seconds=seconds,
        exposed_seconds=0.0,
        hidden_seconds=0.0,
        rerun_layer_ratio=seconds / together,
    )


def _weight(time: OpTime, found: Mapping[str, float]) -> float:
    """Share of the layers that run the op again."""
    return found.get(time.name, 0.0) / time.forward_seconds if time.forward_seconds else 0.0


def _rungs(
    model: ModelGraph,
    layer: Graph,
    times: Sequence[OpTime],
    weights: Mapping[str, float],
    gather: float,
) -> tuple[Rung, ...]:
    """The same ratio with more and more of the costs counted."""
    sizes = whole(dict(model.sizes))
    flops = {op.name: float(op_flops([op]).value(sizes)) for op in layer.ops}
    forward = sum(flops.values())
    again = sum(flops[name] * share for name, share in weights.items())
    products = [time for time in times if time.kind in _PRODUCTS]

    def counted(text: str, chosen: Sequence[OpTime]) -> Rung:
        rerun = sum(time.forward * weights[time.name] for time in chosen)
        total = sum(time.forward + time.backward_compute for time in chosen)
        return Rung(counted=text, ratio=rerun / total)

    rerun = sum(time.forward_seconds * weights[time.name] for time in times) + gather
    total = sum(time.forward_seconds + time.backward_seconds for time in times)
    return (
        Rung(counted="FLOPs", ratio=again / (3 * forward)),
        counted("time of matrix products", products),
        counted("and of all other kernels", times),
        Rung(counted="and of collectives", ratio=rerun / total),
    )


def _parts(plain: StepTime, step: StepTime) -> tuple[StepPart, ...]:
    """The difference of two steps, split by cause; the parts add up to it."""
    count = plain.microbatches
    rerun = count * (step.rerun - plain.rerun)
    beside = count * (step.backward - plain.backward) - rerun
    pipeline = step.pipeline - plain.pipeline - rerun - beside
    return (
        StepPart(part="ops that run again", seconds=rerun),
        StepPart(part="weight gathers it hides", seconds=beside),
        StepPart(part="waiting in the pipeline", seconds=pipeline),
        StepPart(part="gradient reduction", seconds=step.gradients - plain.gradients),
        StepPart(part="optimizer", seconds=step.optimizer - plain.optimizer),
    )


def _reason(rungs: Sequence[Rung]) -> str:
    flops, products, kernels, all_in = (_percent(rung.ratio) for rung in rungs)
    if not rungs[-1].ratio:
        return "It runs nothing again."
    return (
        f"Of a layer's forward and backward {flops} run again by FLOPs (all scores counted), "
        f"{products} by the time of "
        f"matrix products, {kernels} with all other kernels, {all_in} with collectives."
    )


def _reasons(roofline: Roofline, layer: Graph) -> tuple[str, ...]:
    """What makes time differ from FLOPs in this layer, whatever the policy."""
    times = roofline.ops(layer)
    forward = sum(time.forward_seconds for time in times)
    backward = sum(time.backward_seconds for time in times)
    ratio = backward / forward
    word = "though it has" if ratio < 1.9 else "and has about"
    lines = [
        f"Backward takes {ratio:.2f} times as long as forward, {word} twice the FLOPs.",
        "The step's share is smaller than the layer's: embedding, head, loss and optimizer never "
        "run again.",
    ]
    exposed = sum(time.forward_comm for time in times)
    hidden = sum(time.backward_hidden for time in times)
    if exposed or hidden:
        alone = sum(time.backward_compute for time in times) / sum(t.forward for t in times)
        lines.append(
            f"Without collectives it would be {alone:.2f} times: forward waits {_ms(exposed)} for "
            f"them, and so does a re-run of it; backward does {_ms(hidden)} of its own beside the "
            "products of dX and dW."
        )
    return tuple(lines)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
