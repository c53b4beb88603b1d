"""One run, built once: its graphs, the places of its layers, its micro-batches, its policies.

Every command, the planner and the cost rules read a :class:`StagedRun`; nobody else builds a graph,
cuts a model into chunks, counts micro-batches or parses a policy's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from actcalc.errors import SpecError
from actcalc.layers.adapters import adapted
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import LayerRun, ModelGraph, model_graph, parameters
from actcalc.policy.rules import NONE, Policy, parse_policy
from actcalc.policy.stage import StagePolicy
from actcalc.run.placement import (
    Chunks,
    Ends,
    ends,
    microbatches,
    placement,
    plain_order,
    plain_work,
)
from actcalc.specs.model import Model
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.recompute import ALIASES, MODULES
from actcalc.specs.run import Run
from actcalc.specs.workload import Workload

if TYPE_CHECKING:
    from actcalc.run.schedule import Moment

USUAL = ("none", "selective", "full", "full-sharded", "ffn", "attention", "norm", "sqrt")
"""Policies that are compared where none is named; a model's own modules come before the last."""


class Work(NamedTuple):
    """One kind of work of a stage, with what it holds meanwhile."""

    kind: str
    """F forward, B whole backward, I input gradient alone, W weight gradient alone."""
    chunk: int
    """Index of the chunk worked on, from 0."""
    held: tuple[int, ...]
    """Of each chunk so many micro-batches: activations, and inputs that wait for their weight
    gradient."""


class StagedRun:
    """A run as it is laid out: what every answer about it is read from.

    Raises ``SpecError`` for layers that have no place in the pipeline.
    """

    def __init__(self, run: Run) -> None:
        self.asked: Run = run
        """The run as it was given: what says ``auto`` there is decided in ``run``."""
        run, workload = _resolved(run)
        self.run: Run = run
        model, step = _of_example(run, workload)
        self.base: ModelGraph = model_graph(model, run.layout, step, run.framework)
        """The graphs before fine-tuning: a reference model runs them."""
        self.graph: ModelGraph = adapted(
            self.base, run.training, autocast=workload is not run.workload
        )
        self.places: tuple[Chunks, ...] = placement(run.model.depth, run.layout)
        self.ends: tuple[tuple[Ends, ...], ...] = ends(run.layout)
        self.microbatches: int = microbatches(run.layout, run.workload)
        self._work: dict[int, tuple[Work, ...]] = {}
        self._policies: dict[str, Policy] = {}
        self._stages: dict[Policy, StagePolicy] = {}
        self.memories: dict[Policy, Any] = {}
        """Its stages' memory by policy, once asked for (:func:`actcalc.memory.stage.memory_of`)."""

    @classmethod
    def of(cls, run: Run | StagedRun) -> StagedRun:
        """A run laid out, which it may be already."""
        return run if isinstance(run, StagedRun) else cls(run)

    def naming(self, *policies: str) -> StagedRun:
        """The same run, its graphs and what is known of them, with other policies named."""
        found = copy(self)
        found.asked = replace(self.asked, policies=policies)
        found.run = replace(self.run, policies=policies)
        return found

    def changed(self, **parts: Any) -> StagedRun:
        """The run with other specs (``layout=...``, ``training=...``), laid out anew."""
        return StagedRun(replace(self.run, **parts))

    def at(self, sizes: Mapping[str, Any]) -> StagedRun:
        """The run with its graphs evaluated at other sizes, or at arrays of many runs' sizes.

        It is for what a layer needs: places, micro-batches and FLOPs stay those of this run.
        """
        found = copy(self)
        found.graph = replace(self.graph, sizes=sizes)
        found._stages, found.memories = {}, {}
        return found

    # --- micro-batches ----------------------------------------------------------------------------

    @property
    def global_batch(self) -> int:
        """Sequences of one step, over all replicas."""
        work = self.run.workload
        return work.global_batch or self.microbatches * work.micro_batch * self.run.layout.dp

    @property
    def microbatches_note(self) -> str:
        """Which number of micro-batches was taken, where no global batch says it; else empty."""
        if self.run.layout.pp == 1 or self.run.workload.global_batch is not None:
            return ""
        return (
            f"No global batch given: {self.microbatches} micro-batches per step, enough to fill "
            "the pipeline."
        )

    def held(self, stage: int) -> tuple[int, ...]:
        """For each chunk of a stage: micro-batches held at its fullest moment (first of equals)."""
        return max((work.held for work in self.work(stage)), key=sum)

    def work(self, stage: int) -> Sequence[Work]:
        """The kinds of work of a stage in one step, each with what is held meanwhile."""
        if stage not in self._work:
            self._work[stage] = tuple(self._worked(stage))
        return self._work[stage]

    def _worked(self, stage: int) -> Sequence[Work]:
        layout = self.run.layout
        if layout.pp == 1:
            return [Work(kind, 0, (1,)) for kind in "FB"]
        if layout.pipeline in ("1f1b", "gpipe") and layout.vpp == 1:
            plain = plain_work(layout.pipeline, layout.pp, self.microbatches, stage)
            return [Work(kind, 0, (count,)) for kind, count in plain]
        from actcalc.run.schedule import moments

        found = moments(
            layout.pipeline, layout.pp, self.microbatches, layout.vpp,
            stage=stage, group=layout.microbatch_group,
        )  # fmt: skip
        return [_work(one) for one in found]

    def work_in_order(self, stage: int) -> tuple[tuple[Work, ...], int]:
        """All work of a stage in one step, in order, and of how many micro-batches it is.

        Those are fewer than a step has where the middle of the schedule only repeats itself.
        """
        layout = self.run.layout
        if layout.pp == 1:
            return (Work("F", 0, (1,)), Work("B", 0, (1,))), 1
        if layout.pipeline in ("1f1b", "gpipe") and layout.vpp == 1:
            long = layout.pipeline == "1f1b" and self.microbatches > 2 * layout.pp
            shown = 2 * layout.pp if long else self.microbatches
            order = plain_order(layout.pipeline, layout.pp, shown, stage)
            return tuple(Work(kind, 0, (held,)) for kind, held in order), shown
        from actcalc.run.schedule import sequence

        found = sequence(
            layout.pipeline, layout.pp, self.microbatches, layout.vpp,
            stage=stage, group=layout.microbatch_group,
        )  # fmt: skip
        return tuple(_work(one) for one in found.moments), found.microbatches

    # --- graphs -----------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[LayerRun, ...]:
        """Each kind of layer once, with its total count."""
        return self.graph.kinds

    @cached_property
    def main(self) -> LayerRun:
        """The most frequent kind of layer (the later one on a tie), a trained one if there is."""
        passing = [kind for kind in self.kinds if kind.graph.gradient == "passes"]
        return max(reversed(passing or self.kinds), key=lambda kind: kind.count)

    @cached_property
    def whole_sizes(self) -> Mapping[str, int]:
        """Sizes with every degree 1: FLOPs and parameters over all ranks are evaluated there."""
        return whole(dict(self.graph.sizes))

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, prediction layers left out."""
        return int(parameters(self.graph, self.whole_sizes))

    @property
    def layers(self) -> tuple[Graph, ...]:
        """The graph of each layer, in model order."""
        return self.graph.layers

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """Each chunk of layers once, in model order (DualPipe keeps every one on two stages)."""
        found = {(chunk.start, chunk.stop): chunk for stage in self.places for chunk in stage}
        return tuple(found[key] for key in sorted(found))

    @property
    def copies(self) -> int:
        """Stages that hold each chunk: 2 under DualPipe, one for either direction, else 1."""
        held = sum(len(chunk) for stage in self.places for chunk in stage)
        return held // max(1, len(self.layers))

    def holds(self, stage: int) -> Ends:
        """Whether a stage holds the embedding, and whether it holds the head."""
        sides = self.ends[stage]
        return any(first for first, _ in sides), any(last for _, last in sides)

    def graphs(self, stage: int) -> Iterator[Graph]:
        """Every graph of a stage in model order: embedding, layers, prediction layers, head."""
        first, last = self.holds(stage)
        if first:
            yield self.graph.embedding
        for chunk in self.places[stage]:
            yield from self.layers[chunk.start : chunk.stop]
        if last:
            if self.graph.mtp:
                yield from [self.graph.mtp.graph] * self.graph.mtp.count
            yield self.graph.head

    # --- policies ---------------------------------------------------------------------------------

    @cached_property
    def longest(self) -> int:
        """Layers of the longest chunk: segments and blocks of layers are cut from chunks."""
        return max((len(chunk) for stage in self.places for chunk in stage), default=0)

    @cached_property
    def full(self) -> Policy:
        """Re-running whole layers, with their input kept as the framework keeps it."""
        return self.policy("full")

    @cached_property
    def usual_policies(self) -> tuple[str, ...]:
        """Names of the policies that mean something for this model."""
        tags = {tag for run in self.kinds for op in run.graph.ops for tag in op.modules}
        usual = {ALIASES.get(name, name) for name in USUAL}
        extra = tuple(n for n, row in MODULES.items() if n not in usual and row.tag in tags)
        sharded = self.graph.context.tp
        chosen = [
            name
            for name in USUAL
            if (name != "full-sharded" or sharded) and (name != "ffn" or "mlp" in tags)
        ]
        return (*chosen[:-1], *extra, chosen[-1])

    def policy(self, name: str) -> Policy:
        """The policy called ``name`` on this run.

        Raises ``SpecError`` for an unknown one, or for more layers than a chunk has.
        """
        if name not in self._policies:
            found = parse_policy(name, full_boundary=self.run.framework.full_input)
            if found.count > max(1, self.longest):
                raise SpecError(
                    f"policy {name!r}: {found.count} is not between 1 and the {self.longest} "
                    "layers of a pipeline chunk",
                    f"use 1 to {self.longest}",
                )
            self._policies[name] = found
        return self._policies[name]

    @property
    def only_policy(self) -> Policy:
        """The run's one policy (``none`` if it names none); ``SpecError`` if it names several."""
        names = self.run.policies
        if len(names) > 1:
            raise SpecError(
                f"a step ran one policy, not {len(names)}: {', '.join(names)}", "give one --policy"
            )
        return self.policy(names[0]) if names else NONE

    @property
    def first_policy(self) -> Policy:
        """The first policy that the run names (``none`` if it names none)."""
        return self.policy(self.run.policies[0]) if self.run.policies else NONE

    def stored_bytes(self, stage: int, policy: Policy) -> int:
        """Bytes that a stage's layers keep of all micro-batches in flight, at most."""
        sizes = [self.under(policy).stored_bytes(chunk) for chunk in self.places[stage]]
        return max(
            sum(n * size for n, size in zip(work.held, sizes, strict=True))
            for work in self.work(stage)
        )

    def under(self, policy: Policy) -> StagePolicy:
        """The run's layers under one policy (kept, so that each is evaluated once)."""
        if policy not in self._stages:
            self._stages[policy] = StagePolicy(self.graph, policy)
        return self._stages[policy]


def _work(one: Moment) -> Work:
    """A schedule's moment, with what waits for its weight gradient counted as held."""
    held = zip(one.held.activations, one.held.stashes, strict=True)
    return Work(one.kind, one.chunk, tuple(a + w for a, w in held))


def _of_example(run: Run, workload: Workload) -> tuple[Model, Workload]:
    """The model with its objective's head, and the work with all sequences of its examples.

    A micro-batch of pairs is twice as many sequences, which go through the model together.
    """
    row = OBJECTIVES[run.training.objective]
    model = run.model
    if row.head == "score":
        model = model.model_copy(update={"head": "score", "tied": False})
    if row.sequences > 1:
        many = workload.micro_batch * row.sequences
        workload = workload.model_copy(update={"micro_batch": many, "global_batch": None})
    return model, workload


def _resolved(run: Run) -> tuple[Run, Workload]:
    """The run with its adapters' type, and the work of its layers.

    Under autocast a frozen base is loaded in 16 bits and runs in them; what autocast changes is how
    fp32 adapters over it run (transformers from_pretrained dtype; PEFT autocast_adapter_dtype).
    """
    training, precision = run.training, run.workload.precision
    if OBJECTIVES[training.objective].head == "log-probabilities" and training.loss == "auto":
        training = training.model_copy(update={"loss": "tiled"})
        run = replace(run, training=training)
    if not training.lora_rank:
        return run, run.workload
    autocast = precision.startswith("amp-")
    if training.lora_dtype == "auto":
        chosen = "fp32" if autocast else "base"
        run = replace(run, training=training.model_copy(update={"lora_dtype": chosen}))
    if not autocast:
        return run, run.workload
    plain = precision.removeprefix("amp-")
    return run, run.workload.model_copy(update={"precision": plain})
