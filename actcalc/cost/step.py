"""Seconds of one optimizer step: chunks through the pipeline, gradients over replicas, optimizer.

The pipeline is not a formula but a run of its schedule (:mod:`actcalc.cost.pipeline`): each
stage's own durations, the embedding on the first and the head on the last, so that an uneven last
stage slows the step as it does in practice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from actcalc.cost.collective import collective_seconds, send_seconds
from actcalc.cost.optime import beside
from actcalc.cost.optimizer import optimizer_time
from actcalc.cost.rates import Rates
from actcalc.cost.replicas import (
    logged_seconds,
    reduced_bytes,
    reduces_each,
    reduction,
    scattered_seconds,
    tied_seconds,
)
from actcalc.cost.roofline import NOTHING, LayerTime, Roofline
from actcalc.errors import SpecError
from actcalc.layers.core.algebra import added, most
from actcalc.layers.core.either import nothing, real
from actcalc.layers.core.graph import Collective, Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.states import (
    Parameters,
    alike,
    packed_bytes,
    packs,
    parameters_of,
    rank_parameters,
    recipe,
    replicas,
)
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.run import Run
from actcalc.specs.training import Training


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
    """Forward of one micro-batch through the busiest stage: the device's own seconds."""
    backward: float
    """Its backward, re-run included, without waiting for the host."""
    rerun: float
    """Of that backward: forward work done again."""
    stage: int
    """The busiest stage."""
    host: float
    """Seconds of the pipeline in which that stage's device waits for its host."""
    exchange: float
    """Seconds of it in which that stage waits for tokens to reach their experts and return."""


def check_timed(training: Training) -> None:
    """Refuse what a step's time here leaves out: activations that go to the host and back."""
    if training.offload == "activations" or training.offload_modules:
        raise SpecError(
            "offloaded activations are not timed here: their transfers depend on what runs beside "
            "them",
            "`actcalc plan --offload` times them; `actcalc explain offload` shows a layer's waits",
        )


def step_time(
    policy: Policy,
    roofline: Roofline,
    *,
    count: int | None = None,
    more: Sequence[Sequence[LayerTime]] | None = None,
) -> StepTime:
    """Time one step under ``policy``; ``count`` micro-batches per replica, else the run's own.

    ``more`` is what each stage's chunks do beside that (what a plan runs again, layer by layer).
    Raises ``SpecError`` for a schedule that cannot run so many.
    """
    staged, rates, training = roofline.staged, roofline.rates, roofline.training
    batches = count or staged.microbatches
    each = _chunk_times(policy, roofline)
    if more is not None:
        pairs = zip(each, more, strict=True)
        each = [[a + b for a, b in zip(*stage, strict=True)] for stage in pairs]
    times = [[chunk.paced() for chunk in stage] for stage in each]
    steady, bubble = _pipeline(staged, times, handover(staged.graph, rates), batches)
    whole = [sum(stage, NOTHING) for stage in times]
    stage = max(range(len(whole)), key=lambda index: (whole[index].forward, whole[index].backward))
    busiest = whole[stage]
    pipeline, alone = steady + busiest.lead, sum(each[stage], NOTHING)
    # Stages with the same layers take the same time: each kind is timed once.
    held = dict.fromkeys(tuple(staged.graphs(index)) for index in range(staged.run.layout.pp))
    owned = [rank_parameters(staged.graph, Counter(graphs), training) for graphs in held]
    # the busiest rank: parameters of all replicas, and routed experts
    trained = max((parameters.reduced for parameters in owned), key=sum)
    gradients = _gradients(staged, trained, rates, busiest, batches)
    optimizer = max(
        optimizer_time(staged.graph, graphs, training, rates, parameters).total
        for graphs, parameters in zip(held, owned, strict=True)
    )
    return StepTime(
        total=pipeline + gradients + optimizer,
        pipeline=pipeline,
        bubble_ratio=bubble,
        gradients=gradients,
        optimizer=optimizer,
        microbatches=batches,
        forward=alone.forward,
        backward=alone.backward,
        rerun=busiest.rerun,
        stage=stage,
        host=batches * (busiest.stalled - busiest.lead) + busiest.lead,
        exchange=batches * busiest.exchange,
    )


def _chunk_times(policy: Policy, roofline: Roofline) -> list[list[LayerTime]]:
    staged = roofline.staged
    model, stages, rates = staged.graph, staged.under(policy), roofline.rates
    result = []
    for stage, sides in zip(staged.places, staged.ends, strict=True):
        row = []
        for chunk, (first, last) in zip(stage, sides, strict=True):
            total = NOTHING
            for graph, chosen, amount in stages.tally(chunk):
                shards = _shards(roofline, graph)
                one = sharded(roofline.layer(graph, chosen), shards, rates)
                total = total + one * amount
            if first:
                total = total + roofline.ends(model.embedding)
                total = total + _unhidden(roofline, stages.graph(0))
            if last:
                total = total + roofline.ends(model.head) + _forwards(roofline)
                if model.mtp:
                    total = total + roofline.ends(model.mtp.graph) * model.mtp.count
            row.append(total)
        result.append(row)
    return result


def _forwards(roofline: Roofline) -> LayerTime:
    """Forward passes without gradients that an objective adds to a micro-batch.

    Those of a reference model, or of the base without adapters, and KTO's of mismatched pairs.
    """
    training, model = roofline.training, roofline.model
    row = OBJECTIVES[training.objective]
    count = row.plain_forwards
    if training.reference_runs:
        count += row.reference_forwards
    if not count:
        return NOTHING
    once = added(
        roofline.layer(graph, NONE).forward * amount for graph, amount in model.graphs(mtp=False)
    )
    return LayerTime(count * once, 0.0, 0.0, 0.0)


class Shards(NamedTuple):
    """Seconds of one graph's collectives under ZeRO-3, of its weights' way from host memory, and of
    kernels that these need; 0 without."""

    gather: float
    scatter: float
    fetch: float = 0.0
    unpack: float = 0.0
    """Of kernels that copy weights out of what was gathered."""
    divide: float = 0.0
    """Of the kernel that divides their gradient before it is reduced."""
    alone: bool = False
    """Nothing runs beside a gather."""


def _shards(roofline: Roofline, graph: Graph) -> Shards:
    model, training = roofline.model, roofline.training
    if model.context.layout.zero < 3 and training.offload != "weights":
        return Shards(0.0, 0.0)
    found = shards_of(model, training, parameters_of(model, graph, training), roofline.rates)
    if model.context.layout.zero < 3 or model.context.framework.sharded_units != "listed":
        return found
    listed = _listed(roofline, graph)
    return found._replace(gather=found.gather + listed, scatter=found.scatter + listed)


def shards_of(
    model: ModelGraph, training: Training, parameters: Parameters, rates: Rates
) -> Shards:
    """Seconds of the collectives and kernels of one graph's parameters, of one run or of many."""
    context = model.context
    layout = context.layout
    found = [0.0, 0.0]
    unpack = divide = 0.0
    rules = recipe(model, training)
    units = context.framework.sharded_units
    alone = not training.prefetch or units == "listed"
    fetch = _fetch(model, training, parameters, rates)
    if layout.zero < 3:
        return Shards(0.0, 0.0, fetch, alone=alone)
    reduced = reduced_bytes(training, rules)
    for group, expert, _ in parameters.groups():
        ranks = replicas(layout, training, expert=expert)
        stride = layout.ep * layout.expert_tp if expert else layout.tp
        found[0] = found[0] + collective_seconds(
            Collective.ALL_GATHER, group.parameters * rules.gathered, ranks, stride, rates
        )
        every = alike(layout, expert=expert)
        scattered = scattered_seconds(group.trained * reduced, every, ranks, stride, rates)
        found[1] = found[1] + scattered
        several = ranks > 1  # each of these reads and writes everything
        unpack = unpack + several * (2 * rules.gathered * group.parameters / rates.memory)
        divide = divide + several * (2 * reduced * group.trained / rates.memory)
    return Shards(
        found[0],
        found[1],
        fetch,
        unpack if units == "apart" else 0.0,
        divide if units == "flat" else 0.0,
        alone,
    )


# Host seconds of one gather of DeepSpeed 0.3 for each rank: 130 us before its launch and 250 of it,
# over 8 ranks (deepspeedai/DeepSpeed issue 1069, on A100), all in loops over ranks.
_LISTED_SECONDS = 380e-6 / 8
# Weights of fewer elements stay whole (stage3_param_persistence_threshold).
_PERSISTENT = 100_000


def _listed(roofline: Roofline, graph: Graph) -> float:
    """Seconds of the host for gathering one graph's weights one by one, into lists.

    Each has a tensor for every rank, which a loop cuts out and another copies (DeepSpeed 0.3
    runtime/zero/partition_parameters.py _allgather_param, _reduce_scatter_gradient; torch
    ProcessGroupNCCL.cpp allgather).
    """
    model, training = roofline.model, roofline.training
    layout = model.context.layout
    total = 0.0
    for weight in graph.weights:
        elements = real(weight.parameters.value(model.sizes))
        if elements > _PERSISTENT:
            total += replicas(layout, training, expert=weight.expert)
    return total * _LISTED_SECONDS * roofline.rates.shares.host_pace


def _fetch(model: ModelGraph, training: Training, parameters: Parameters, rates: Rates) -> float:
    """Seconds in which one graph's offloaded weights come from host memory, in forward or backward.

    All of them, or a rank's own shard under ZeRO-3 (Rajbhandari et al. 2021, ZeRO-Infinity, section
    6.1; torch FSDP CPUOffloadPolicy).
    """
    if training.offload != "weights":
        return 0.0
    layout, rules = model.context.layout, recipe(model, training)
    size = 0.0
    for group, expert in ((parameters.dense, False), (parameters.expert, True)):
        own = rules.weight * (group.parameters - group.packed * packs(training))
        ranks = replicas(layout, training, expert=expert) if layout.zero == 3 else 1
        size += (own + packed_bytes(group, training)) / ranks
    return size / rates.host


def sharded(time: LayerTime, shards: Shards, rates: Rates) -> LayerTime:
    """A layer whose weights are sharded over replicas (ZeRO-3, FSDP).

    Weights are gathered before its forward and again before its backward, gradients scattered
    after it, each beside the neighbouring layers' work (FSDP prefetches one layer). Without
    prefetch the layer waits for its weights. Weights in host memory come the same way. DeepSpeed
    0.3 waits for the device before each gather, so that none runs beside anything.
    """
    gather, scatter, fetch, unpack, divide, alone = shards
    if nothing(gather) and nothing(fetch):
        return time
    # a frozen layer that no gradient passes has no backward to gather for
    passed = time.backward > 0
    forward = time.forward + unpack
    backward = time.backward + passed * (unpack + divide)
    share = rates.shares.communication_multiprocessors
    again, fetched = passed * gather, passed * fetch
    if alone:
        return replace(
            time,
            forward=fetch + gather + forward,
            backward=fetched + again + beside(backward, scatter, share),
        )
    return replace(
        time,
        forward=most(fetch, beside(forward, gather, share)),
        backward=most(fetched, beside(backward, again + scatter, share)),
    )


def _unhidden(roofline: Roofline, first: Graph) -> LayerTime:
    model = roofline.model
    ends = [_shards(roofline, graph) for graph in outermost(model)]
    return unhidden(_shards(roofline, first), ends)


def outermost(model: ModelGraph) -> tuple[Graph, ...]:
    """The graphs of the outermost unit: embedding and head, or one where their table is tied."""
    tables = {weight.scope for weight in model.embedding.weights}
    tied = any(weight.scope in tables for weight in model.head.weights if weight.scope)
    return (model.embedding,) if tied else (model.embedding, model.head)


def unhidden(inner: Shards, ends: Sequence[Shards]) -> LayerTime:
    """What has no work to run beside under ZeRO-3, once per micro-batch.

    The outermost unit (embedding, head and last norm) and the first layer are gathered before
    anything can run; their gradients are scattered when nothing is left to run (torch FSDP's root
    unit; fully_shard alike).
    """
    gather = inner.gather + inner.fetch
    gather = gather + added(end.gather + end.fetch + end.unpack for end in ends)
    scatter = inner.scatter + added(end.scatter + end.divide for end in ends)
    return LayerTime(gather, 0.0, scatter, 0.0)


def handover(model: ModelGraph, rates: Rates, stride: int | None = None) -> float:
    """Seconds of handing one micro-batch's activations to the next stage.

    That is ``stride`` devices away: tp · cp · dp, unless given.

    Tensor-parallel ranks send a part each: what sequence parallelism split, or, without it, a
    slice that the receiver gathers inside its node (Narayanan et al. 2021, section 4.1).
    """
    layout = model.context.layout
    if layout.pp == 1:
        return 0.0
    graph = model.runs[0].graph
    size = real(model.tensor_bytes[graph][graph.input])
    part = size if layout.sp else size / layout.tp
    away = layout.tp * layout.cp * layout.dp if stride is None else stride
    seconds = send_seconds(part, away, rates)
    if not layout.sp:
        seconds += collective_seconds(Collective.ALL_GATHER, size, layout.tp, 1, rates)
    return seconds


def _pipeline(
    staged: StagedRun, times: list[list[LayerTime]], send: float, count: int
) -> tuple[float, float]:
    layout = staged.run.layout
    if layout.pp == 1:
        chunk = times[0][0]
        return count * (chunk.later_forward + chunk.backward), 0.0
    from actcalc.cost.pipeline import makespan

    hidden = layout.vpp > 1 and hides_messages(staged.run)

    def occupied(seconds: float) -> float:
        return most(seconds, send) if hidden else seconds + send

    run = makespan(
        layout.pipeline,
        layout.pp,
        count,
        layout.vpp,
        forward_seconds=[[occupied(chunk.later_forward) for chunk in stage] for stage in times],
        backward_seconds=[[occupied(chunk.backward) for chunk in stage] for stage in times],
        weight_seconds=[[chunk.weight_gradient for chunk in stage] for stage in times],
        group=layout.microbatch_group,
    )
    return run.total_seconds, run.bubble_ratio


def hides_messages(run: Run) -> bool:
    """Whether an interleaved pipeline sends and receives beside the next chunk's work.

    Else a message occupies the stage that waits for it. Megatron-Core's interleaved schedule alone
    hides it (training/arguments.py: overlap_p2p_comm is on unless --no-overlap-p2p-communication,
    and set off without interleaving).
    """
    return run.framework.overlaps_messages and run.training.overlapped_messages


def _gradients(
    staged: StagedRun, parameters: tuple[int, int], rates: Rates, busiest: LayerTime, batches: int
) -> float:
    """Exposed seconds of what ranks do together: gradients, sharded weights, metrics.

    ZeRO-3 has reduced and gathered layer by layer.
    """
    run, layout = staged.run, staged.run.layout
    after = logged_seconds(run.training, run.framework, rates, layout.devices)
    if layout.pp > 1:
        away = (layout.pp - 1) * layout.tp * layout.cp * layout.dp
        after += tied_seconds(staged.graph, run.training, rates, away)
    if layout.zero == 3:
        return float(after)
    exchange = reduction(staged.graph, run.training, parameters, rates)
    overlaps = run.framework.overlaps_reduction
    each = batches if reduces_each(staged.graph, run.training) else 0
    return float(after + exchange.exposed(run.training, busiest, rates, each, overlaps=overlaps))
