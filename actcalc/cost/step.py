"""Seconds of one optimizer step: chunks through the pipeline, gradients over replicas, optimizer.

The pipeline is not a formula but a run of its schedule (:mod:`actcalc.memory.schedule`): each
stage's own durations, the embedding on the first and the head on the last, so that an uneven last
stage slows the step as it does in practice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actcalc.cost.collective import collective_seconds, send_seconds
from actcalc.cost.rates import Rates
from actcalc.cost.roofline import NOTHING, LayerTime, Roofline, beside
from actcalc.errors import SpecError
from actcalc.layers.graph import Collective, Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.placement import microbatches, placement
from actcalc.policy.rules import Policy, parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.specs.run import Run

# Bytes an Adam step moves per parameter with fp32 gradients and states and 16-bit weights: norm 4,
# clipping 4+4, update 4 (gradient) + 3 · 8 (master weight, two moments), weight copied back 4+2,
# gradient zeroed 4 (apex FusedAdam; Megatron-Core optimizer/optimizer.py, clip_grads.py). fp16 also
# unscales gradients and looks for infinities, 4+4.
_ADAM_BYTES = 50
_UNSCALE_BYTES = 8
_GRADIENT_BYTES = 4  # replicas reduce fp32 gradients (Megatron accumulate_allreduce_grads_in_fp32)


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds."""

    total: float
    """The whole step."""
    pipeline: float
    """From the first forward to the last backward."""
    bubble_ratio: float
    """Idle share of the devices' time in the pipeline."""
    gradients: float
    """Reduction of gradients over replicas that nothing hides (and gathering of weights)."""
    optimizer: float
    """The optimizer's own pass over its states."""
    microbatches: int
    """Micro-batches each replica runs."""
    forward: float
    """Forward of one micro-batch through the busiest stage."""
    backward: float
    """Its backward, re-run included."""


def chunk_layers(run: Run) -> int:
    """Layers of the largest pipeline chunk: what segments of re-run layers are cut from."""
    return max(len(chunk) for stage in placement(run.model.depth, run.layout) for chunk in stage)


def policy_of(run: Run, graph: ModelGraph) -> Policy:
    """The run's one policy (``none`` if it names none); ``SpecError`` if it names several."""
    names = run.policies or ("none",)
    if len(names) > 1:
        raise SpecError(
            f"a step ran one policy, not {len(names)}: {', '.join(names)}", "give one --policy"
        )
    boundary = graph.context.kernel("full_input")
    return parse_policy(
        names[0],
        layers=chunk_layers(run),
        full_boundary="replicated" if boundary == "replicated" else "own",
    )


def step_time(
    model: ModelGraph, policy: Policy, roofline: Roofline, *, count: int | None = None
) -> StepTime:
    """Time one step under ``policy``; ``count`` micro-batches per replica, else the run's own.

    Raises ``SpecError`` for a schedule that cannot run so many.
    """
    layout, rates = model.context.layout, roofline.rates
    batches = count or microbatches(layout, model.context.workload)
    chunks = placement(model.context.model.depth, layout)
    times = _chunk_times(model, policy, roofline, chunks)
    sends = _send(model, rates)
    pipeline, bubble = _pipeline(model, times, sends, batches)
    parameters = _parameters(model, chunks)
    busiest = max(
        (sum(c.forward for c in stage), sum(c.backward for c in stage)) for stage in times
    )
    gradients = _gradients(model, parameters, rates, busiest[1])
    shards = layout.dp * layout.cp if layout.zero else 1
    half = model.context.workload.precision in ("fp16", "amp-fp16")
    moved = (_ADAM_BYTES + half * _UNSCALE_BYTES) * sum(parameters) / shards
    optimizer = moved / rates.memory
    return StepTime(
        total=pipeline + gradients + optimizer,
        pipeline=pipeline,
        bubble_ratio=bubble,
        gradients=gradients,
        optimizer=optimizer,
        microbatches=batches,
        forward=busiest[0],
        backward=busiest[1],
    )


def _chunk_times(
    model: ModelGraph,
    policy: Policy,
    roofline: Roofline,
    chunks: tuple[tuple[range, ...], ...],
) -> list[list[LayerTime]]:
    stages = StagePolicy(model, policy)
    last = max(chunk.stop for stage in chunks for chunk in stage)
    result = []
    for stage in chunks:
        row = []
        for chunk in stage:
            total = NOTHING
            for (graph, chosen), amount in _tally(stages, chunk).items():
                one = _sharded(model, graph, roofline.layer(graph, chosen), roofline.rates)
                total = total + _times(one, amount)
            if chunk.start == 0 and len(chunk):
                total = total + roofline.ends(model.embedding)
            if chunk.stop == last and len(chunk):
                total = total + roofline.ends(model.head)
                if model.mtp:
                    total = total + _times(roofline.ends(model.mtp.graph), model.mtp.count)
            row.append(total)
        result.append(row)
    return result


def _tally(stages: StagePolicy, chunk: range) -> Mapping[tuple[Graph, Policy], int]:
    tally: dict[tuple[Graph, Policy], int] = {}
    for layer in chunk:
        key = (stages.graph(layer), stages.layer_policy(layer, chunk))
        tally[key] = tally.get(key, 0) + 1
    return tally


def _times(time: LayerTime, count: int) -> LayerTime:
    return LayerTime(
        time.forward * count, time.rerun * count, time.backward * count,
        time.weight_gradient * count,
    )  # fmt: skip


def _sharded(model: ModelGraph, graph: Graph, time: LayerTime, rates: Rates) -> LayerTime:
    """A layer whose weights are sharded over replicas (ZeRO-3, FSDP).

    Weights are gathered before its forward and again before its backward, gradients scattered
    after it, each beside the neighbouring layers' work (FSDP prefetches one layer).
    """
    context = model.context
    layout = context.layout
    replicas = layout.dp * layout.cp
    if layout.zero < 3 or replicas == 1:
        return time
    count = float(graph.parameters().value(model.sizes))
    item = context.act.itemsize
    stride = layout.tp
    gather = collective_seconds(Collective.ALL_GATHER, count * item, replicas, stride, rates)
    # Gradients are reduced in fp32 (FSDP's mixed precision with reduce_dtype float32).
    scatter = collective_seconds(
        Collective.REDUCE_SCATTER, count * _GRADIENT_BYTES, replicas, stride, rates
    )
    share = rates.shares.communication_multiprocessors
    return LayerTime(
        forward=beside(time.forward, gather, share),
        rerun=time.rerun,
        backward=beside(time.backward, gather + scatter, share),
        weight_gradient=time.weight_gradient,
    )


def _send(model: ModelGraph, rates: Rates) -> float:
    """Seconds of handing one micro-batch's activations to the next stage.

    Tensor-parallel ranks send a part each: what sequence parallelism split, or, without it, a
    slice that the receiver gathers inside its node (Narayanan et al. 2021, section 4.1).
    """
    layout = model.context.layout
    if layout.pp == 1:
        return 0.0
    graph = model.runs[0].graph
    size = float(graph.tensors[graph.input].bytes.value(model.sizes))
    part = size if layout.sp else size / layout.tp
    stride = layout.tp * layout.cp * layout.dp
    seconds = send_seconds(part, stride, rates)
    if not layout.sp and layout.tp > 1:
        seconds += collective_seconds(Collective.ALL_GATHER, size, layout.tp, 1, rates)
    return seconds


def _pipeline(
    model: ModelGraph, times: list[list[LayerTime]], send: float, count: int
) -> tuple[float, float]:
    layout = model.context.layout
    if layout.pp == 1:
        chunk = times[0][0]
        return count * (chunk.forward + chunk.backward), 0.0
    from actcalc.memory.schedule import makespan

    # Megatron's schedules wait for each send and receive (overlap_p2p_communication is off by
    # default and needs interleaving), so a message occupies the stage that waits for it.
    run = makespan(
        layout.pipeline,
        layout.pp,
        count,
        layout.vpp,
        forward_seconds=[[chunk.forward + send for chunk in stage] for stage in times],
        backward_seconds=[[chunk.backward + send for chunk in stage] for stage in times],
        weight_seconds=[[chunk.weight_gradient for chunk in stage] for stage in times],
    )
    return run.total_seconds, run.bubble_ratio


def _parameters(model: ModelGraph, chunks: tuple[tuple[range, ...], ...]) -> tuple[float, float]:
    """Parameters of the busiest rank: those reduced over all replicas, and routed experts."""
    stages = StagePolicy(model, Policy("none"))
    last = max(chunk.stop for stage in chunks for chunk in stage)
    best = (0.0, 0.0)
    for stage in chunks:
        dense = experts = 0.0
        graphs = [stages.graph(layer) for chunk in stage for layer in chunk]
        if any(chunk.start == 0 and len(chunk) for chunk in stage):
            graphs.append(model.embedding)
        if any(chunk.stop == last and len(chunk) for chunk in stage):
            graphs.append(model.head)
        seen: set[str] = set()
        for graph in graphs:
            for weight in graph.weights:
                if weight.scope and weight.scope in seen:
                    continue
                seen.add(weight.scope)
                size = float(weight.parameters.value(model.sizes))
                if weight.expert:
                    experts += size
                else:
                    dense += size
        best = max(best, (dense, experts), key=sum)
    return best


def _gradients(
    model: ModelGraph, parameters: tuple[float, float], rates: Rates, backward: float
) -> float:
    """Exposed seconds of reducing gradients over replicas.

    ZeRO-3 has done it layer by layer. PyTorch's DDP reduces beside the last backward; Megatron
    reduces after it unless told to overlap (overlap_grad_reduce is off by default).
    """
    layout = model.context.layout
    replicas = layout.dp * layout.cp
    if replicas == 1 or layout.zero == 3:
        return 0.0
    dense, experts = parameters
    seconds = 0.0
    groups = [(dense, replicas, layout.tp)]
    if experts:
        over = max(1, replicas * layout.tp // (layout.ep * (layout.etp or layout.tp)))
        groups.append((experts, over, layout.ep * (layout.etp or layout.tp)))
    for count, size, stride in groups:
        message = count * _GRADIENT_BYTES
        if layout.zero == 0:
            seconds += collective_seconds(Collective.ALL_REDUCE, message, size, stride, rates)
        else:
            seconds += collective_seconds(Collective.REDUCE_SCATTER, message, size, stride, rates)
            seconds += collective_seconds(
                Collective.ALL_GATHER, count * model.context.act.itemsize, size, stride, rates
            )
    hidden = model.context.framework.kernels.get("layer") == "hub"
    return max(0.0, seconds - backward) if hidden else seconds
