"""The memory of every pipeline stage at its highest moment, as one result."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actcalc.layers.adapters import adapted
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.memory.buffers import Buffer, buffers
from actcalc.memory.parts import (
    Moments,
    Part,
    Peak,
    Timeline,
    chunk_moments,
    first_gradients,
)
from actcalc.memory.states import (
    NO_PARAMETERS,
    Parameters,
    Recipe,
    States,
    moments_of,
    parameters_of,
    recipe,
    replicas,
    states,
)
from actcalc.policy.rules import Policy, parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.run.placement import Chunks, Ends, ends, microbatches, placement, plain_moments
from actcalc.specs.check import check_sharding
from actcalc.specs.result import Result
from actcalc.specs.run import Run

_SEGMENT = 2**21  # c10/cuda/CUDACachingAllocator.h kSmallBuffer, kRoundLarge: segments in 2 MiB


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BufferFigure:
    """One buffer of a stage."""

    name: str
    """What it is called."""
    bytes: int
    """Its size."""
    resident: bool
    """It stays between steps."""
    allocated: bool
    """The framework's allocator holds it; false for what driver and libraries take beside it."""
    about: str
    """What it is for."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StageFigure:
    """One pipeline stage: bytes on one of its ranks at the highest moment of a step."""

    stage: int
    """Number of the stage, from 0."""
    layers: int
    """Transformer layers on it."""
    embedding: bool
    """It holds the embedding."""
    head: bool
    """It holds output head and loss."""
    parameters: int
    """Parameters on one rank, before ZeRO shards them."""
    stage_parameters: int
    """Parameters of the stage over all its tensor- and expert-parallel ranks."""
    weights_bytes: int
    """Weights."""
    gradients_bytes: int
    """Gradients that exist at the highest moment."""
    gradients_full_bytes: int
    """All gradients, as they are when backward has ended."""
    optimizer_bytes: int
    """Optimizer states, fp32 master weights included."""
    bytes_per_parameter: float
    """Weights, all gradients and optimizer states over the parameters on the rank."""
    in_flight: int
    """Chunk activations held at once, at most: each of one micro-batch on one of the stage's
    chunks, of which there are vpp (2 under zb-v, dualpipe and dualpipe-v)."""
    activations_bytes: int
    """Stored activations of all micro-batches in flight: the most that is held, or, where backward
    has freed some of it by the highest moment, what is left then (0 in the optimizer step)."""
    layers_activations_bytes: int
    """What transformer layers store of all micro-batches in flight, at most."""
    transient_bytes: int
    """What the highest moment holds beyond all that is listed here: working set and re-run, or the
    temporaries of the optimizer step."""
    gradients_absent_bytes: int
    """Gradients that do not exist yet at that moment, which the total is without:
    gradients_full_bytes less gradients_bytes."""
    buffers_bytes: int
    """Workspaces, gathered weights, buckets inside the framework's allocator."""
    overhead_bytes: int
    """Device context and communicators, outside the allocator (with a device)."""
    buffers: tuple[BufferFigure, ...]
    """Both, line by line."""
    static_bytes: int
    """What stays between steps in the allocator: weights, optimizer states and workspaces; where
    gradients keep their buffers from step to step (recipe.persistent) those too, with the fp32
    copies of 16-bit ones, which the next step drops first."""
    last_rank_spare_bytes: int
    """What the stage's last rank holds less than these figures, which are of the fullest: 0 unless
    the optimizer gives whole weights to ranks."""
    peak_bytes: int
    """The highest moment in the framework's allocator (torch's max_memory_allocated): weights,
    gradients, optimizer, activations, transient and buffers, without overhead_bytes."""
    reserved_at_least_bytes: int
    """The least that PyTorch's allocator has taken from the device at that moment: the peak in
    whole segments of 2 MiB. What fragmentation leaves unused comes on top and is not derivable."""
    total_bytes: int
    """The highest moment with what lies outside the allocator, peak_bytes + overhead_bytes: the
    sum of weights_bytes, gradients_bytes, optimizer_bytes, activations_bytes, transient_bytes,
    buffers_bytes and overhead_bytes. What has to fit the device."""
    peak_at: str
    """When it is, in words."""
    fits: bool | None
    """It fits the device (null without one)."""
    margin_bytes: int | None
    """Device memory less the total (null without a device)."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryReport(Result):
    """The whole GPU, per pipeline stage."""

    schema_name: ClassVar[str] = "actcalc/memory/1"

    model: dict[str, Any]
    """The model's fields."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    training: dict[str, Any]
    """Optimizer, number formats, offload, adapters."""
    device: dict[str, Any] | None
    """The device's fields, or null."""
    framework: str
    """The framework profile that chose the kernels."""
    policy: str
    """The recompute policy."""
    recipe: dict[str, Any]
    """Bytes per parameter of each copy; ``moments`` is all optimizer moments together over the
    trained parameters, scales of 8-bit ones and factored statistics included."""
    schedule: str
    """The pipeline schedule."""
    microbatches: int
    """Micro-batches each replica runs in a step."""
    parameters: int
    """Parameters of the whole model."""
    stages: tuple[StageFigure, ...]
    """One entry per pipeline stage."""
    peak_bytes: int
    """The largest peak_bytes of any stage: what the framework's allocator holds, without what the
    driver and libraries take beside it (a stage's total_bytes has both, and decides ``fits``)."""
    peak_stage: int
    """The stage it is on (the one with the largest total)."""
    peak_at: str
    """When, in words."""
    fits: bool | None
    """Every stage fits the device (null without one)."""
    limits: tuple[LimitFigure, ...]
    """Largest micro-batch or longest sequence per policy, where asked for."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LimitFigure:
    """The largest value of one quantity that still fits the device."""

    policy: str
    """The recompute policy."""
    quantity: str
    """micro-batch or seq."""
    largest: int
    """The largest value that fits; 0 if not even the smallest does."""
    total_bytes: int
    """What the fullest stage needs at that value."""
    tokens: int
    """Tokens of one micro-batch at that value."""


class Evaluation:
    """One run under one policy; everything that several answers need is computed once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.graph: ModelGraph = adapted(
            model_graph(run.model, run.layout, run.workload, run.framework), run.training
        )
        self.places: tuple[Chunks, ...] = placement(run.model.depth, run.layout)
        self.count = microbatches(run.layout, run.workload)
        self.policy = self.named((run.policies or ("none",))[0])
        self.rules: Recipe = recipe(self.graph, run.training)
        self.timeline = Timeline(StagePolicy(self.graph, self.policy), run.training)
        self.ends: tuple[tuple[Ends, ...], ...] = ends(run.layout)
        self._chunks: dict[tuple[int, int, Ends, bool], tuple[Part, ...]] = {}

    def named(self, name: str) -> Policy:
        """The policy called ``name``, for the run's longest chunk of layers."""
        longest = max(len(chunk) for stage in self.places for chunk in stage)
        boundary = self.graph.context.kernel("full_input")
        return parse_policy(
            name,
            layers=max(1, longest),
            full_boundary="replicated" if boundary == "replicated" else "own",
        )

    def under(self, policy: Policy) -> Evaluation:
        """The same run under another policy; what does not depend on it is shared."""
        other = copy(self)
        other.policy = policy
        other.timeline = Timeline(StagePolicy(self.graph, policy), self.run.training)
        other._chunks = {}
        return other

    def parts(self, stage: int) -> tuple[tuple[Part, ...], ...]:
        """Parts of each chunk of a stage (cached by where it lies and how long it is)."""
        ahead = self.ahead(stage)
        return tuple(
            self._parts(chunk, held, ahead=ahead)
            for chunk, held in zip(self.places[stage], self.ends[stage], strict=True)
        )

    def _parts(self, chunk: range, held: Ends, *, ahead: bool) -> tuple[Part, ...]:
        key = (chunk.start, chunk.stop, held, ahead)
        if key not in self._chunks:
            self._chunks[key] = self.timeline.parts(chunk, held, ahead=ahead)
        return self._chunks[key]

    def ahead(self, stage: int) -> bool:
        """Whether a stage's offloaded groups come back a layer ahead of their backward.

        They do once the last layer of the first backward has stayed: each of its modules that ends
        brings a group back, and so on from layer to layer. That layer is looked for in the last of
        the stage's chunks; where it has none, every reload finds its group already asked for
        (fine_grained_activation_offload.py as first published, at commit 696a38e0:
        is_first_last_layer, bulk_reload_group). Later versions look in all chunks
        (post_warmup_callback at 008df8ac); published peaks of such a run lie a GB below what they
        would hold.
        """
        if len(self.places[stage][-1]):
            return True
        return bool(self.graph.mtp) and self.ends[stage][-1][1]

    def host_bytes(self, stage: int) -> int:
        """Bytes of offloaded modules that a GPU of the stage has in host memory, at most."""
        chunks = [sum(part.host * part.count for part in each) for each in self.parts(stage)]
        if not any(chunks):
            return 0
        held = (activations for _, _, activations, _ in self.moments(stage))
        return max(sum(n * size for n, size in zip(each, chunks, strict=True)) for each in held)

    def holds(self, stage: int) -> Ends:
        """Whether a stage holds the embedding, and whether it holds the head."""
        held = self.ends[stage]
        return any(first for first, _ in held), any(last for _, last in held)

    def parameters(self, stage: int) -> Parameters:
        """Parameters of a stage on one rank; a tied table that lives twice on it counted once."""
        seen: set[str] = set()
        total = NO_PARAMETERS
        chunks = self.places[stage]
        first, last = self.holds(stage)
        graphs = [self.graph.embedding] if first else []
        if last:
            graphs.append(self.graph.head)
            if self.graph.mtp:
                graphs += [self.graph.mtp.graph] * self.graph.mtp.count
        for graph in graphs:
            total = total + parameters_of(self.graph, graph, self.run.training, seen)
        for chunk in chunks:
            for layer in chunk:
                total = total + self.timeline.layer_parameters(layer, seen)
        return total

    def beside(self, stage: int) -> tuple[States, int, tuple[Buffer, ...]]:
        """States of a stage, what its last rank holds less of them, and buffers and overheads."""
        run = self.run
        _, last = self.holds(stage)
        parts = [part for chunk in self.parts(stage) for part in chunk]
        held = states(self.graph, run.training, self.parameters(stage))
        if run.training.step_in_backward:
            held = self._stepped(held, parts)
        held, last_rank = self._whole_weights(stage, held)
        found = buffers(self.graph, run.training, self.rules, run.device, parts, held, head=last)
        return held, last_rank, tuple(found)

    def figure(self, stage: int) -> StageFigure:
        """One stage at its highest moment."""
        run, chunks = self.run, self.places[stage]
        first, last = self.holds(stage)
        count = self.parameters(stage)
        held, last_rank, found = self.beside(stage)
        peak, most, in_flight, layers_stored = self._peak(stage, held)
        shared = self.shared(chunks)
        inside = sum(buffer.bytes for buffer in found if buffer.inside)
        outside = sum(buffer.bytes for buffer in found if not buffer.inside)
        resident = sum(b.bytes for b in found if b.inside and b.resident)
        allocated = held.total + inside + shared + peak.bytes - peak.gradients_absent
        usable = run.device.usable_bytes if run.device else None
        total = allocated + outside
        optimizer = self.optimizer_step(held) + held.total + inside
        where, activations = peak.where, most + shared
        transient, absent = peak.bytes - most, peak.gradients_absent
        if optimizer > allocated:
            allocated, where, absent = optimizer, "in the optimizer step", 0
            total = allocated + outside
            activations, transient = 0, allocated - held.total - inside
        if transient < 0:
            # backward has freed part of what was stored before the highest moment came
            activations, transient = activations + transient, 0
        whole_count = self._whole(stage)
        return StageFigure(
            stage=stage,
            layers=sum(len(chunk) for chunk in chunks),
            embedding=first,
            head=last,
            parameters=count.total,
            stage_parameters=whole_count,
            weights_bytes=held.weights,
            gradients_bytes=held.gradients - absent,
            gradients_full_bytes=held.gradients,
            optimizer_bytes=held.optimizer,
            bytes_per_parameter=held.total / count.total if count.total else 0.0,
            in_flight=in_flight,
            activations_bytes=activations,
            layers_activations_bytes=layers_stored,
            transient_bytes=transient,
            gradients_absent_bytes=absent,
            buffers_bytes=inside,
            overhead_bytes=outside,
            buffers=tuple(_buffer(buffer) for buffer in found),
            static_bytes=held.weights + held.optimizer + resident + self._kept_gradients(held),
            last_rank_spare_bytes=last_rank,
            peak_bytes=allocated,
            reserved_at_least_bytes=-(-allocated // _SEGMENT) * _SEGMENT,
            total_bytes=total,
            peak_at=where,
            fits=None if usable is None else total <= usable,
            margin_bytes=None if usable is None else usable - total,
        )

    def _whole_weights(self, stage: int, held: States) -> tuple[States, int]:
        """States of the fullest rank where whole weights are given to ranks, less the last's."""
        if self.run.training.whole_weights == "none" or self.run.layout.zero != 1:
            return held, 0
        from actcalc.memory.layerwise import pieces, shares

        graphs = self._graphs(stage)
        every = shares(self.graph, self.run.training, self.rules, pieces(self.graph, graphs))
        most = max(every, key=lambda share: share.optimizer)
        padding = most.padding
        full = replace(
            held,
            weights=held.weights + padding * self.rules.weight,
            gradients=held.gradients + padding * self.rules.gradient,
            optimizer=most.optimizer,
            master=most.master,
        )
        return full, most.optimizer - every[-1].optimizer

    def _graphs(self, stage: int) -> list[Graph]:
        """Every graph of a stage in model order."""
        chunks = self.places[stage]
        first, last = self.holds(stage)
        graphs = [self.graph.embedding] if first else []
        graphs += [self.timeline.stages.graph(layer) for chunk in chunks for layer in chunk]
        if last:
            if self.graph.mtp:
                graphs += [self.graph.mtp.graph] * self.graph.mtp.count
            graphs.append(self.graph.head)
        return graphs

    def _stepped(self, held: States, parts: Sequence[Part]) -> States:
        """States whose gradients are those of one part at a time, and never all of them."""
        largest = max(
            (states(self.graph, self.run.training, p.parameters).gradients // max(1, p.layers)
             for p in parts),
            default=0,
        )  # fmt: skip
        return replace(held, gradients=min(held.gradients, largest))

    def _kept_gradients(self, held: States) -> int:
        """Gradients that stay from one step to the next, fp32 copies of 16-bit ones included.

        ``zero_grad`` of torch drops gradients before the next step begins; Megatron's buffers stay,
        and its copies until its own ``zero_grad`` at the beginning of the next step.
        """
        return held.gradients + held.step_gradients if self.rules.persistent else 0

    def optimizer_step(self, held: States) -> int:
        """Temporaries of the optimizer step: one more moment where it is not fused."""
        temporary = 0 if self.run.training.fused_optimizer else held.largest_state
        return temporary + held.step_gradients

    def shared(self, chunks: Chunks) -> int:
        """Tensors that exist once for all layers of the stage (masks, rotary tables)."""
        names: dict[str, int] = {}
        for chunk in chunks:
            for layer in {chunk.start, chunk.stop - 1} if len(chunk) else ():
                graph = self.timeline.stages.graph(layer)
                for name in graph.shared:
                    if name in graph.saved:
                        names[name] = int(graph.tensors[name].bytes.value(self.graph.sizes))
        return sum(names.values())

    def _whole(self, stage: int) -> int:
        sizes = whole(dict(self.graph.sizes))
        graphs = self._graphs(stage)
        seen: set[str] = set()
        counts: dict[int, int] = {}
        total = 0
        for graph in graphs:
            if id(graph) not in counts:
                plain = (weight for weight in graph.weights if not weight.scope)
                counts[id(graph)] = sum(int(w.parameters.value(sizes)) for w in plain)
                for weight in graph.weights:
                    if weight.scope and weight.scope not in seen:
                        seen.add(weight.scope)
                        total += int(weight.parameters.value(sizes))
            total += counts[id(graph)]
        return total

    def gradient(self, stage: int, held: States) -> tuple[float, bool]:
        """Bytes of one parameter's gradient on a rank, and whether all exist through the step."""
        count = self.parameters(stage)
        trained = count.dense.trained + count.expert.trained
        stepped = self.run.training.step_in_backward
        persistent = self.rules.persistent or self.count > 1 or stepped
        return held.gradients / trained if trained else 0.0, persistent

    @property
    def moments_bytes_per_parameter(self) -> float:
        """All optimizer moments of the run over its trained parameters, before ZeRO."""
        every = [self.parameters(stage) for stage in range(self.run.layout.pp)]
        groups = [group for each in every for group in (each.dense, each.expert)]
        trained = sum(group.trained for group in groups)
        size = sum(moments_of(group, self.rules, self.run.training)[0] for group in groups)
        return size / trained if trained else 0.0

    def gradients_made(self, stage: int) -> tuple[Sequence[tuple[int, int]], ...]:
        """For each chunk of a stage what its parts' backward is the first to make a gradient of.

        See :func:`actcalc.memory.parts.first_gradients`.
        """
        chunks, parts = self.places[stage], self.parts(stage)
        ordered = sorted(range(len(chunks)), key=lambda index: chunks[index].start)
        every = first_gradients([part for index in ordered for part in parts[index]])
        found: dict[int, Sequence[tuple[int, int]]] = {}
        start = 0
        for index in ordered:
            stop = start + len(parts[index])
            found[index] = every[start:stop]
            start = stop
        return tuple(found[index] for index in range(len(chunks)))

    def _peak(self, stage: int, held: States) -> tuple[Peak, int, int, int]:
        """The highest moment, the most stored bytes, chunks in flight, and the layers' part."""
        gradient, persistent = self.gradient(stage, held)
        parts = self.parts(stage)
        moments = [
            chunk_moments(chunk, gradient, persistent=persistent, made=made)
            for chunk, made in zip(parts, self.gradients_made(stage), strict=True)
        ]
        layers = [
            sum(part.stored * part.count for part in chunk if part.first >= 0) for chunk in parts
        ]
        absent_forward = 0 if persistent else held.gradients
        best = Peak(-1, 0, held.gradients, "")
        most, flight, stored_layers = 0, 0, 0
        for kind, chunk, activations, stashes in self.moments(stage):
            counts = [a + w for a, w in zip(activations, stashes, strict=True)]
            stored = sum(n * m.stored for n, m in zip(counts, moments, strict=True))
            if stored > most:
                most = stored
                stored_layers = sum(n * size for n, size in zip(counts, layers, strict=True))
            flight = max(flight, sum(counts))
            best = _higher(best, kind, moments[chunk], stored, absent_forward)
        return best, most, flight, stored_layers

    def moments(self, stage: int) -> Sequence[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
        """Kinds of work of a stage (F, B, I, W), each with its chunk and what is held meanwhile.

        Held are activations and, between input and weight gradient, stashes: of each chunk so many
        micro-batches.
        """
        layout = self.run.layout
        if layout.pp == 1:
            ones, none = (1,) * layout.vpp, (0,) * layout.vpp
            return [(kind, chunk, ones, none) for chunk in range(layout.vpp) for kind in "FB"]
        if layout.pipeline in ("1f1b", "gpipe") and layout.vpp == 1:
            plain = plain_moments(layout.pipeline, layout.pp, self.count, stage)
            return [(kind, 0, (held,), (0,)) for kind, held in plain]
        from actcalc.run.schedule import moments

        found = moments(
            layout.pipeline, layout.pp, self.count, layout.vpp,
            stage=stage, group=layout.microbatch_group,
        )  # fmt: skip
        return [(m.kind, m.chunk, m.held.activations, m.held.stashes) for m in found]


def _higher(best: Peak, kind: str, chunk: Moments, stored: int, absent_forward: int) -> Peak:
    if kind == "F":
        extra, where, absent = chunk.forward, chunk.forward_at, absent_forward
    elif kind == "W":
        extra, where, absent = 0, "between backward and weight gradients", 0
    else:
        extra, where, absent = chunk.backward, chunk.backward_at, chunk.backward_absent
    now = stored + extra
    if now - absent > best.bytes - best.gradients_absent:
        return Peak(now, stored, absent, where)
    return best


def _buffer(buffer: Buffer) -> BufferFigure:
    return BufferFigure(
        name=buffer.name,
        bytes=buffer.bytes,
        resident=buffer.resident,
        allocated=buffer.inside,
        about=buffer.about,
    )


def memory_run(run: Run, *, limits: Sequence[str] = ()) -> MemoryReport:
    """The memory of every stage of a run; raises ``SpecError`` for what it cannot mean.

    ``limits`` names quantities (``micro-batch``, ``seq``) to push as far as the device allows,
    for each policy of the run.
    """
    from actcalc.memory.limits import find_limits

    check_sharding(run.layout, run.training)
    work = Evaluation(run)
    figures = tuple(work.figure(stage) for stage in range(run.layout.pp))
    top = max(figures, key=lambda figure: figure.total_bytes)
    return MemoryReport(
        model=run.model.model_dump(),
        layout=run.layout.model_dump(),
        workload=run.workload.model_dump(),
        training=run.training.model_dump(),
        device=run.device.model_dump() if run.device else None,
        framework=run.framework.name,
        policy=work.policy.name,
        recipe={**vars(work.rules), "moments": work.moments_bytes_per_parameter},
        schedule=run.layout.pipeline if run.layout.pp > 1 else "none",
        microbatches=work.count,
        parameters=int(parameters(work.graph, whole(dict(work.graph.sizes)))),
        stages=figures,
        peak_bytes=max(figure.peak_bytes for figure in figures),
        peak_stage=top.stage,
        peak_at=top.peak_at,
        fits=None if run.device is None else all(figure.fits for figure in figures),
        limits=find_limits(run, limits) if limits else (),
        notes=_notes(work, figures, limits),
    )


def _notes(
    work: Evaluation, figures: Sequence[StageFigure], limits: Sequence[str]
) -> tuple[str, ...]:
    run, notes = work.run, list(work.run.warnings)
    notes += [note for kind in work.graph.kinds for note in kind.graph.notes]
    training = run.training
    if run.device is None:
        notes.append(
            "Device context and communicators lie outside the allocator and are not counted "
            "without --device."
        )
    else:
        if run.device.compute_capability is None and run.device.context_bytes is None:
            notes.append(f"Nothing is known of the runtime's own memory on {run.device.title}.")
        notes.append("Reserved memory is the peak in segments of 2 MiB, plus fragmentation.")
    if run.layout.zero and replicas(run.layout, training, expert=False) == 1:
        notes.append(f"ZeRO {run.layout.zero} shards over one rank: it changes nothing here.")
    notes += _absent_gradients(figures)
    notes += _offloaded(work)
    if any(figure.last_rank_spare_bytes for figure in figures):
        notes.append(
            "The optimizer gives whole weights to ranks: figures are of the fullest rank; "
            "last_rank_spare_bytes says how much less the last one holds."
        )
    if run.layout.pp > 1 and work.graph.context.framework.kernels.get("ends") == "megatron":
        notes.append(
            "Pipeline messages: a received input counts as the first layer's, a received gradient "
            "as the last layer's; outputs are dropped once sent."
        )
    if run.layout.pp > 1 and run.workload.global_batch is None:
        notes.append(
            f"No global batch given: {work.count} micro-batches per step, enough to fill the "
            "pipeline."
        )
    if len(run.policies) > 1:
        notes.append(f"The stages are those of policy {work.policy.name}, the first named.")
    if "micro-batch" in limits and run.workload.global_batch is not None:
        notes.append(
            f"--max micro-batch keeps the number of micro-batches per step, {work.count}: the "
            f"global batch grows with the micro-batch from {run.workload.global_batch}."
        )
    return tuple(dict.fromkeys(notes))


def _offloaded(work: Evaluation) -> list[str]:
    """How much offloaded modules have in host memory, and which versions hold more here."""
    training = work.run.training
    if training.offload_layers:
        return [
            f"{training.offload_layers} offloaded layers have up to {work.host_bytes(0):,} B in "
            "host memory for each GPU."
        ]
    if not training.offload_modules:
        return []
    stages = range(work.run.layout.pp)
    most = max(stages, key=work.host_bytes)
    host = work.host_bytes(most)
    if not host:
        return [
            "offload_modules moves nothing: no tensor of these modules has "
            f"{training.offload_elements:,} elements, or no layer has such modules."
        ]
    notes = [
        f"Offloaded modules have up to {host:,} B in host memory for each GPU of stage {most}: "
        "every op's own copy of what it saved."
    ]
    if any(work.host_bytes(stage) and not work.ahead(stage) for stage in stages):
        layer = max(p.host for stage in stages for chunk in work.parts(stage) for p in chunk)
        notes.append(
            "The last chunk of a stage has no layers: there a tensor comes back when backward asks "
            "for it, as in Megatron's first versions. Newer ones look for the last layer in all "
            f"chunks and may bring groups back ahead: up to {layer:,} B more for each layer."
        )
    return notes


def _absent_gradients(figures: Sequence[StageFigure]) -> list[str]:
    """Which gradients the stages' totals are without, and why."""
    lacking = [figure for figure in figures if figure.gradients_absent_bytes]
    if not lacking:
        return []
    why = "one micro-batch per step, gradients dropped between steps"
    if any(figure.gradients_bytes for figure in lacking):
        return [
            f"At the highest moment part of the gradients is not made yet ({why}): the total has "
            "those that exist."
        ]
    return [f"At the highest moment no gradient is made yet ({why}): the total has none."]


def with_device(run: Run, device: Any) -> Run:
    """The run on another device."""
    return replace(run, device=device)
