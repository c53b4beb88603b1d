"""Where a policy's slow-down comes from: op by op in a layer, and part by part in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actcalc.cost.optime import OpTime
from actcalc.cost.roofline import Roofline, roofline_of
from actcalc.cost.rounding import difference, growth
from actcalc.cost.step import StepTime, check_timed, step_time
from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import LayerRun
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
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
class LayerOverhead:
    """One kind of layer of the busiest stage under a policy, for one micro-batch on one rank."""

    layer: str
    """The kind of layer."""
    count: int
    """How many of it the busiest stage has."""
    rows: tuple[OverheadRow, ...]
    """The layer's ops, in order."""
    forward_seconds: float
    """One layer's forward."""
    backward_seconds: float
    """Its backward without recomputation."""
    rerun_seconds: float
    """What the policy adds to it, mean over these layers: the sum of the rows."""
    layer_ratio: float
    """That over forward and backward together."""
    rungs: tuple[Rung, ...]
    """The ratio by FLOPs, by matrix products' time, with the other kernels, with collectives."""


@dataclass(frozen=True, kw_only=True)
class PolicyOverhead:
    """Layers and one step under a policy beside the same without recomputation.

    Figures of one layer are of the most frequent kind; ``layers`` has every kind.
    """

    policy: str
    """The policy."""
    layers: tuple[LayerOverhead, ...]
    """Each kind of layer of the busiest stage: counts times ``rerun_seconds`` times micro-batches
    add up to the step's ops that run again."""
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
    """The rungs in one sentence, for each kind of layer that runs anything again."""


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
    """Time of ``policies`` op by op in each kind of layer of the busiest stage, and in a step.

    Figures of the most frequent kind are means over the first stage, as in a comparison with a
    device. Raises
    ``SpecError`` without a device, for an unknown policy, or a step that cannot run.
    """
    if run.device is None:
        raise SpecError("an overhead in time needs a device", "add --device, e.g. a100-80gb")
    check_timed(run.training)
    staged = StagedRun(run)
    roofline = roofline_of(staged, efficiency)
    plain = step_time(NONE, roofline)
    chosen = [staged.policy(name) for name in policies]
    stage = staged.places[plain.stage]
    return Overhead(
        device=run.device.name,
        microbatches=plain.microbatches,
        stage_layers=sum(len(chunk) for chunk in stage),
        policies=tuple(_policy(roofline, policy, plain) for policy in chosen),
        reasons=_reasons(roofline, staged.main.graph, several=len(staged.kinds) > 1),
    )


def _policy(roofline: Roofline, policy: Policy, plain: StepTime) -> PolicyOverhead:
    staged = roofline.staged
    step = step_time(policy, roofline)
    main = _layer(roofline, policy, staged.main, staged.places[0])
    busiest = staged.places[step.stage]
    layers = [_layer(roofline, policy, kind, busiest) for kind in staged.kinds]
    held = tuple(layer for layer in layers if layer.count)
    return PolicyOverhead(
        policy=policy.name,
        layers=held,
        rows=main.rows,
        forward_seconds=main.forward_seconds,
        backward_seconds=main.backward_seconds,
        rerun_seconds=main.rerun_seconds,
        layer_ratio=main.layer_ratio,
        rungs=main.rungs,
        step_seconds=step.total,
        plain_step_seconds=plain.total,
        parts=_parts(plain, step),
        slowdown_ratio=growth(step.total, plain.total),
        reason=_reason(held),
    )


def _layer(
    roofline: Roofline, policy: Policy, kind: LayerRun, chunks: Sequence[range]
) -> LayerOverhead:
    """One kind of layer; what it runs again is the mean over those in ``chunks``."""
    times = roofline.ops(kind.graph)
    base = roofline.layer(kind.graph, NONE)
    together = base.forward + base.backward
    held = [
        chosen
        for chunk in chunks
        for graph, chosen, count in roofline.staged.under(policy).tally(chunk)
        if graph is kind.graph
        for _ in range(count)
    ]
    found = _again(roofline, kind.graph, held or [policy])
    rows = [_row(time, found.get(time.name, 0.0), together) for time in times]
    if found.get(GATHER):
        rows.append(_gather(found[GATHER], together))
    added = sum(row.rerun_seconds for row in rows)
    weights = {time.name: _weight(time, found) for time in times}
    return LayerOverhead(
        layer=kind.label,
        count=len(held),
        rows=tuple(rows),
        forward_seconds=base.forward,
        backward_seconds=base.backward,
        rerun_seconds=added,
        layer_ratio=added / together,
        rungs=_rungs(roofline, kind.graph, times, weights, found.get(GATHER, 0.0)),
    )


def _again(roofline: Roofline, layer: Graph, policies: Sequence[Policy]) -> dict[str, float]:
    """Re-run seconds of each op, mean over layers that have these policies."""
    times: Counter[tuple[str, float]] = Counter()
    for one in policies:
        times.update((time.name, time.forward_seconds) for time in roofline.passes(layer, one))
        gathered = roofline.regathered(layer, one)
        if gathered:
            times[GATHER, gathered] += 1
    found: dict[str, float] = {}
    for (name, seconds), count in times.items():
        # the share first: what every layer runs again takes its forward's time to the last digit
        found[name] = found.get(name, 0.0) + seconds * (count / len(policies))
    return found


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
    roofline: Roofline,
    layer: Graph,
    times: Sequence[OpTime],
    weights: Mapping[str, float],
    gather: float,
) -> tuple[Rung, ...]:
    """The same ratio with more and more of the costs counted."""
    flops = roofline.model.op_flops[layer]
    forward = sum(flops.values())
    again = sum(flops[name] * share for name, share in weights.items())
    products = [time for time in times if time.kind in _PRODUCTS]

    def counted(text: str, chosen: Sequence[OpTime]) -> Rung:
        rerun = sum(time.forward * weights[time.name] for time in chosen)
        total = sum(time.forward + time.backward_compute for time in chosen)
        return Rung(counted=text, ratio=rerun / total if total else 0.0)

    rerun = sum(time.forward_seconds * weights[time.name] for time in times) + gather
    total = sum(time.forward_seconds + time.backward_seconds for time in times)
    return (
        Rung(counted="FLOPs", ratio=again / (3 * forward) if forward else 0.0),
        counted("time of matrix products", products),
        counted("and of all other kernels", times),
        Rung(counted="and of collectives", ratio=rerun / total),
    )


def _parts(plain: StepTime, step: StepTime) -> tuple[StepPart, ...]:
    """The difference of two steps, split by cause; the parts add up to it.

    Ops that run again while the GPU would have waited for the host cost what they take beyond that.
    """
    count = plain.microbatches
    rerun = count * difference(step.rerun, plain.rerun)
    longer = count * difference(step.backward, plain.backward)
    beside = difference(longer, rerun, of=step.pipeline)
    launches = difference(step.host, plain.host, of=step.pipeline)
    named = rerun + beside + launches
    pipeline = difference(step.pipeline - plain.pipeline, named, of=step.pipeline)
    filled = min(0.0, launches)
    rerun, launches = difference(rerun, -filled, of=step.pipeline), launches - filled
    return (
        StepPart(part="ops that run again", seconds=rerun),
        StepPart(part="weight gathers it hides", seconds=beside),
        StepPart(part="waiting for the host", seconds=launches),
        StepPart(part="waiting in the pipeline", seconds=pipeline),
        StepPart(part="gradient reduction", seconds=difference(step.gradients, plain.gradients)),
        StepPart(part="optimizer", seconds=difference(step.optimizer, plain.optimizer)),
    )


def _reason(layers: Sequence[LayerOverhead]) -> str:
    again = [layer for layer in layers if layer.rerun_seconds]
    if not again:
        return "It runs nothing again."
    sentences = []
    for layer in again:
        name = "a layer" if len(layers) == 1 else f"each of {layer.count} {layer.layer} layers"
        flops, products, kernels, all_in = (_percent(rung.ratio) for rung in layer.rungs)
        sentences.append(
            f"Of {name}'{'' if len(layers) > 1 else 's'} forward and backward {flops} run again by "
            f"FLOPs (all scores counted), {products} by the time of matrix products, {kernels} "
            f"with all other kernels, {all_in} with collectives."
        )
    return " ".join(sentences)


def _reasons(roofline: Roofline, layer: Graph, *, several: bool) -> tuple[str, ...]:
    """What makes time differ from FLOPs in this layer, whatever the policy."""
    which = "Backward of the most frequent kind of layer" if several else "Backward"
    times = roofline.ops(layer)
    forward = sum(time.forward_seconds for time in times)
    backward = sum(time.backward_seconds for time in times)
    ratio = backward / forward
    word = "though it has" if ratio < 1.9 else "and has about"
    lines = [
        f"{which} takes {ratio:.2f} times as long as forward, {word} twice the FLOPs.",
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
