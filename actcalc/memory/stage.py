"""The memory of a pipeline stage under one policy: states, buffers, parts, highest moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from actcalc.layers.core.algebra import added
from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.memory.around import Both, Sharding, Units, chunks_around, sharding_like
from actcalc.memory.buffers import Buffer, buffers, sent_outputs
from actcalc.memory.figures import BufferFigure, StageFigure
from actcalc.memory.gradients import Gradients
from actcalc.memory.objectives import beside_training, reference_part
from actcalc.memory.parts import Part, Timeline
from actcalc.memory.peaks import chunk_moments, made_by_chunk
from actcalc.memory.states import (
    Parameters,
    States,
    in_units,
    moments_of,
    rank_parameters,
    recipe,
    replicas,
    states,
)
from actcalc.memory.table import Row, Table
from actcalc.memory.update import StepMoment, step_moments
from actcalc.policy.rules import Policy, rerun_ops
from actcalc.run.placement import Chunks, Ends
from actcalc.run.staged import StagedRun
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.recipes import Recipe
from actcalc.specs.run import Run

_SEGMENT = 2**21  # c10/cuda/CUDACachingAllocator.h kSmallBuffer, kRoundLarge: segments in 2 MiB


class StageMemory:
    """The memory of a run's stages under one policy; what several answers need is computed once."""

    def __init__(self, staged: StagedRun, policy: Policy, like: StageMemory | None = None) -> None:
        """``like`` is the same run's under another policy, whose graphs are measured already."""
        self.staged = staged
        self.run: Run = staged.run
        self.graph: ModelGraph = staged.graph
        self.places: tuple[Chunks, ...] = staged.places
        self.ends: tuple[tuple[Ends, ...], ...] = staged.ends
        self.policy: Policy = policy
        self.rules: Recipe = recipe(self.graph, staged.run.training)
        self.sharding = sharding_of(staged, self.rules)
        self.timeline: Timeline = Timeline(
            staged.under(policy), staged.run.training, self._weight_gradients(),
            like=None if like is None else like.timeline,
        )  # fmt: skip
        self._chunks: dict[tuple[int, int, Ends, bool], tuple[Part, ...]] = {}
        self._parameters: dict[int, Parameters] = like._parameters if like else {}
        self._figures: dict[int, StageFigure] = {}

    @classmethod
    def of(cls, run: Run) -> StageMemory:
        """The stages of a run under the first policy that it names."""
        return memory_of(StagedRun(run))

    @property
    def figures(self) -> tuple[StageFigure, ...]:
        """Every stage at its highest moment."""
        for stage in range(self.run.layout.pp):
            if stage not in self._figures:
                self._figures[stage] = self.figure(stage)
        return tuple(self._figures.values())

    @property
    def top(self) -> StageFigure:
        """The fullest stage (the first of equals)."""
        return max(self.figures, key=lambda figure: figure.total_bytes)

    def parts(self, stage: int) -> tuple[tuple[Part, ...], ...]:
        """Parts of each chunk of a stage (cached by where it lies and how long it is)."""
        ahead = self.ahead(stage)
        return tuple(
            self._parts(chunk, held, ahead=ahead)
            for chunk, held in zip(self.places[stage], self.ends[stage], strict=True)
        )

    def _weight_gradients(self) -> Gradients:
        """How gradients of weights come to be, where autograd makes them."""
        layout, rules = self.run.layout, self.rules
        tied = frozenset[str]()
        if layout.pp == 1:
            ends = (self.graph.embedding, self.graph.head)
            first, last = ({w.scope for w in graph.weights if w.scope} for graph in ends)
            tied = frozenset(first & last)
        if self.sharding is not None and rules.units:
            return Gradients(rules.gathered, rules.gathered, tied)
        summed = rules.reduced
        if self.run.training.step_in_backward:
            return Gradients(summed, 0, tied)
        ranks = replicas(layout, self.run.training, expert=False) if layout.zero >= 2 else 1
        kept = 0.0 if self.persistent else rules.gradient / ranks
        return Gradients(summed, kept, tied)

    @property
    def _references(self) -> bool:
        """Whether a reference runs while activations are kept."""
        training = self.run.training
        return training.reference_runs and OBJECTIVES[training.objective].beside

    def _parts(self, chunk: range, held: Ends, *, ahead: bool) -> tuple[Part, ...]:
        key = (chunk.start, chunk.stop, held, ahead)
        if key not in self._chunks:
            parts = self.timeline.parts(chunk, held, ahead=ahead)
            if held[1] and self._references:
                parts = (*parts, reference_part(self.timeline, self.staged.base))
            if self.sharding is not None and self.rules.units:
                parts = Units(parts, self.sharding).reducing()
            self._chunks[key] = parts
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
        return max(
            sum(n * size for n, size in zip(work.held, chunks, strict=True))
            for work in self.staged.work(stage)
        )

    def parameters(self, stage: int) -> Parameters:
        """Parameters of a stage on one rank; a tied table that lives twice on it counted once."""
        if stage not in self._parameters:
            self._parameters[stage] = self.parameters_of(Counter(self.staged.graphs(stage)))
        return self._parameters[stage]

    def parameters_of(self, graphs: Mapping[Graph, int]) -> Parameters:
        """Parameters of so many of each graph on one rank, a tied table counted once."""
        return rank_parameters(self.graph, graphs, self.run.training)

    def beside(self, stage: int) -> tuple[States, int, tuple[Buffer, ...]]:
        """States of a stage, what its last rank holds less of them, and buffers and overheads."""
        run = self.run
        _, last = self.staged.holds(stage)
        parts = [part for chunk in self.parts(stage) for part in chunk]
        held = states(self.graph, run.training, self.parameters(stage))
        if run.training.step_in_backward:
            held = self._stepped(held, parts)
        held, last_rank = self._whole_weights(stage, held)
        found = buffers(
            self.graph, run.training, self.rules, run.device, parts, held,
            head=last, gathers=self.sharding is not None,
        )  # fmt: skip
        sent = sent_outputs(self.staged, stage)
        return held, last_rank, (*found, *beside_training(self.staged, self.rules), *sent)

    def table(self, stage: int) -> Table:
        """The moments of a stage."""
        held, _, found = self.beside(stage)
        return self._table(stage, held, found)

    def _table(self, stage: int, held: States, found: tuple[Buffer, ...]) -> Table:
        at_once = self.rules.states_at_start
        return Table(
            held=held,
            buffers=found,
            works=tuple(self.staged.work(stage)),
            chunks=[
                chunk_moments(parts, around)
                for parts, around in zip(self.parts(stage), self.around(stage, held), strict=True)
            ],
            shared=self.shared(self.places[stage]),
            steps=self.optimizer_step(stage, held),
            kept=self._kept_gradients(held),
            made_at_first=0 if at_once else held.optimizer - held.master,
        )

    def figure(self, stage: int, *, timeline: bool = False) -> StageFigure:
        """One stage at its highest moment; with every moment of a step for a ``timeline``."""
        run, chunks = self.run, self.places[stage]
        first, last = self.staged.holds(stage)
        count = self.parameters(stage)
        held, last_rank, found = self.beside(stage)
        table = self._table(stage, held, found)
        peak = table.peak()
        most, in_flight, layers_stored = self._stored(stage, table)
        stays = self.sharding is not None and self.sharding.stays
        weights = peak.weights + (peak.gathered if stays else 0)
        moving = self._moving(peak) if self.sharding is not None else []
        found = (*(b for b in found if b.inside), *moving, *(b for b in found if not b.inside))
        inside = sum(buffer.bytes for buffer in found if buffer.inside)
        outside = sum(buffer.bytes for buffer in found if not buffer.inside)
        resident = sum(b.bytes for b in found if b.inside and b.resident)
        usable = run.budget_bytes
        total = peak.total + outside
        held_bytes = peak.total - weights - peak.gradients - peak.optimizer - inside
        # backward may have freed part of what was stored before the highest moment came
        activations = min(most + table.shared if peak.activations else 0, held_bytes)
        return StageFigure(
            stage=stage,
            layers=sum(len(chunk) for chunk in chunks),
            embedding=first,
            head=last,
            parameters=count.total,
            stage_parameters=self._whole(stage),
            weights_bytes=weights,
            gradients_bytes=peak.gradients,
            gradients_full_bytes=held.gradients,
            optimizer_bytes=held.optimizer,
            bytes_per_parameter=held.total / count.total if count.total else 0.0,
            in_flight=in_flight,
            activations_bytes=activations,
            layers_activations_bytes=layers_stored,
            transient_bytes=held_bytes - activations,
            gradients_absent_bytes=held.gradients - peak.gradients,
            buffers_bytes=inside,
            overhead_bytes=outside,
            buffers=tuple(_buffer(buffer) for buffer in found),
            static_bytes=held.weights + held.optimizer + resident + self._kept_gradients(held),
            last_rank_spare_bytes=last_rank,
            peak_bytes=peak.total,
            reserved_at_least_bytes=-(-peak.total // _SEGMENT) * _SEGMENT,
            reserved_bytes=None,
            reserved_expandable_bytes=None,
            total_bytes=total,
            peak_at=peak.at,
            fits=None if usable is None else total <= usable,
            margin_bytes=None if usable is None else usable - total,
            moments=tuple(table.figures()) if timeline else (),
        )

    def _moving(self, peak: Row) -> list[Buffer]:
        """What sharded weights and gradients need at the peak, as lines of buffers."""
        assert self.sharding is not None
        about = "of the units at work at the peak"
        gathered = 0 if self.sharding.stays else peak.gathered
        lines = (
            Buffer("gathered weights", gathered, False, True, about),
            Buffer("unreduced gradients", peak.unreduced, False, True, about),
        )
        return [line for line in lines if line.bytes]

    def _whole_weights(self, stage: int, held: States) -> tuple[States, int]:
        """States of the fullest rank where whole weights are given to ranks, less the last's."""
        if self.run.training.zero_redundancy:
            return self._fullest(stage, held), 0
        if self.run.training.whole_weights == "none" or self.run.layout.zero != 1:
            return held, 0
        from actcalc.memory.layerwise import pieces, shares

        graphs = list(self.staged.graphs(stage))
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

    def _fullest(self, stage: int, held: States) -> States:
        """States of the fullest rank under torch's ZeroRedundancyOptimizer."""
        from actcalc.memory.layerwise import largest_first, pieces

        ranks = replicas(self.run.layout, self.run.training, expert=False, states=True)
        sizes = [one.elements for one in pieces(self.graph, self.staged.graphs(stage))]
        share = largest_first(sizes, ranks) * ranks / sum(sizes)
        return replace(
            held,
            optimizer=round(held.optimizer * share),
            master=round(held.master * share),
            largest_state=round(held.largest_state * share),
        )

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

    def optimizer_step(self, stage: int, held: States) -> tuple[StepMoment, ...]:
        """The moments of the optimizer step."""
        largest = max((p.largest for chunk in self.parts(stage) for p in chunk), default=0)
        return step_moments(self.run.layout, self.run.training, self.rules, held, largest)

    def shared(self, chunks: Chunks) -> int:
        """Tensors that exist once for all layers of the stage (masks, rotary tables).

        What re-runs holds all it is given, saved by an op or not.
        """
        names: dict[str, int] = {}
        for chunk in chunks:
            for graph, policy, _ in self.timeline.stages.tally(chunk):
                names.update(self.shared_by(graph, policy))
        return sum(names.values())

    def shared_by(self, graph: Graph, policy: Policy) -> dict[str, int]:
        """Bytes of what one layer holds under ``policy`` of the tensors that all are given."""
        again = self.given(graph) & read(rerun_ops(policy, graph))
        sizes = self.graph.tensor_bytes[graph]
        return {name: sizes[name] for name in again | (graph.shared & set(graph.saved))}

    def given(self, graph: Graph) -> frozenset[str]:
        """What every layer is given and no op of this one saves (a mask): what re-runs holds it."""
        if not self.run.framework.op_by_op:
            return frozenset()
        return frozenset((graph.shared & read(graph.ops)) - set(graph.saved))

    @property
    def casts(self) -> bool:
        """Whether forward keeps autocast's copies of the weights of layers that re-run."""
        return self.run.framework.op_by_op and self.graph.context.autocast

    @property
    def varies(self) -> bool:
        """Whether what lies beside layers depends on which of them re-run."""
        return self.casts or any(self.given(run.graph) for run in self.staged.kinds)

    def _whole(self, stage: int) -> int:
        """Parameters of a stage over all its ranks."""
        sizes, seen, total = self.staged.whole_sizes, set[str](), 0
        for graph, count in Counter(self.staged.graphs(stage)).items():
            for weight in graph.weights:
                if weight.added or weight.scope in seen:
                    continue
                size = int(weight.parameters.value(sizes))
                total += size if weight.scope else size * count
                if weight.scope:
                    seen.add(weight.scope)
        return total

    def gradient(self, stage: int, held: States) -> tuple[float, bool]:
        """Bytes of one parameter's gradient on a rank, and whether all exist through the step."""
        trained = self.parameters(stage).trained
        return held.gradients / trained if trained else 0.0, self.persistent

    @property
    def persistent(self) -> bool:
        """Whether all gradients exist through the step, at its fullest micro-batch."""
        stepped = self.run.training.step_in_backward
        return self.rules.persistent or self.staged.microbatches > 1 or stepped

    @property
    def moments_bytes_per_parameter(self) -> float:
        """All optimizer moments of the run over its trained parameters, before ZeRO."""
        every = [self.parameters(stage) for stage in range(self.run.layout.pp)]
        groups = [group for each in every for group in each]
        trained = sum(group.trained for group in groups)
        size = added(moments_of(group, self.rules, self.run.training)[0] for group in groups)
        return size / trained if trained else 0.0

    def gradients_made(self, stage: int) -> tuple[Sequence[tuple[int, int]], ...]:
        """For each chunk of a stage what its parts' backward is the first to make a gradient of.

        See :func:`actcalc.memory.parts.first_gradients`.
        """
        chunks = self.places[stage]
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].start)
        return made_by_chunk(self.parts(stage), order)

    def around(self, stage: int, held: States) -> list[list[Both]]:
        """For each chunk of a stage what is around every part of it."""
        gradient, persistent = self.gradient(stage, held)
        rule = self.timeline.options.gradients
        return chunks_around(
            self.parts(stage), self.gradients_made(stage), gradient, held.gradients, self.sharding,
            persistent=persistent, waiting=rule.summed if rule.tied else 0,
        )  # fmt: skip

    def _stored(self, stage: int, table: Table) -> tuple[int, int, int]:
        """The most stored bytes, the most chunk activations in flight, and the layers' part."""
        layers = [
            sum(part.stored * part.count for part in chunk if part.first >= 0)
            for chunk in self.parts(stage)
        ]
        works = table.works
        return (
            max(table.every_stored, default=0),
            max((sum(work.held) for work in works), default=0),
            max(
                (sum(n * s for n, s in zip(work.held, layers, strict=True)) for work in works),
                default=0,
            ),
        )


def read(ops: Iterable[Op]) -> set[str]:
    """Names of the tensors that some ops take."""
    return {name for op in ops for name in op.inputs}


def sharding_of(staged: StagedRun, rules: Recipe) -> Sharding | None:
    """How a run shards weights in units (fully_shard), if it does."""
    run = staged.run
    layout, training = run.layout, run.training
    ranks = replicas(layout, training, expert=False)
    by_module = run.framework.op_by_op and layout.zero == 3 and not rules.units
    if ranks == 1 or not (by_module or in_units(staged.graph, rules)):
        return None
    return sharding_like(
        rules, training, ranks, root=run.framework.ends_in_root, zero=layout.zero,
        piped=layout.pp > 1, experts=layout.ep > 1,
    )  # fmt: skip


def _buffer(buffer: Buffer) -> BufferFigure:
    return BufferFigure(
        name=buffer.name,
        bytes=buffer.bytes,
        resident=buffer.resident,
        allocated=buffer.inside,
        about=buffer.about,
    )


def memory_of(staged: StagedRun, policy: Policy | None = None) -> StageMemory:
    """The memory of a run's stages under a policy (by default its first), worked out once."""
    policy = policy or staged.first_policy
    known: dict[Policy, StageMemory] = staged.memories
    if policy not in known:
        like = next(iter(known.values()), None)
        known[policy] = StageMemory(staged, policy, like)
    return known[policy]


def total_bytes(staged: StagedRun, policy: Policy) -> int:
    """What the fullest stage of a run needs under a policy."""
    return memory_of(staged, policy).top.total_bytes
