"""The stages of a run as the solver sees them, and any choice laid out on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any, TypeVar

from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.moments import layers_of, moments_of, stage_gpu
from actcalc.memory.stage import StageMemory, memory_of
from actcalc.plan.offload import Transfer, module_offload_options, offload_options
from actcalc.plan.options import (
    NANO,
    Costs,
    costs_of,
    module_chain,
    wrapped_modules,
)
from actcalc.plan.stages import Laid, Layers, Stage, Unit
from actcalc.plan.ways import LayerWays
from actcalc.policy.outcome import LayerOutcome
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
from actcalc.solve.beside import Beside
from actcalc.solve.layers import LayerGroup
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.plans import (
    PlanGroup,
    option_group,
)
from actcalc.solve.problem import PeakModel, PlanLayer, Problem
from actcalc.solve.segments import Chain
from actcalc.solve.stage import Ends, Gpu, Held, StageProblem, Way, peak
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.cost.roofline import Roofline

from actcalc.plan.settings import PlanSettings, check_settings

T = TypeVar("T", Held, Way)


class RunStages:
    """The stages of a run, the ways to run their layers, and what a choice of them holds.

    ``options`` replaces the ways to run a layer that the semantics has, by those of a target that
    can execute others. Raises ``SpecError`` for a combination of settings that has no meaning for
    the run.
    """

    def __init__(
        self,
        run: Run,
        settings: PlanSettings | None = None,
        options: Callable[[RunStages, Graph], Sequence[tuple[Option, LayerOutcome]]] | None = None,
    ) -> None:
        self.run = run
        self._special = options
        self.settings = settings or PlanSettings()
        check_settings(run, self.settings)
        self.staged = StagedRun(run)
        detached = any(kind.graph.gradient != "passes" for kind in self.staged.kinds)
        if detached and (options is not None or not self.by_moments):
            raise SpecError(
                "some layers are frozen and no gradient passes them: such a run is planned moment "
                "by moment, with every way to run the other layers",
                "drop --emit, --offload and --method greedy, and keep --memory-model timeline",
            )
        self.memory = memory_of(self.staged, NONE)
        self.model: ModelGraph = self.staged.graph
        self.costs: Costs = costs_of(self.staged)
        self.full = self.staged.full
        self.chunks = self.staged.places
        self.flights = [self.staged.held(stage) for stage in range(run.layout.pp)]
        self._names = {id(kind.graph): kind.label for kind in self.staged.kinds}
        self._check_chunks()
        self._offloading: dict[int, OptionSet] = {}
        self._units: dict[tuple[str, int], tuple[Any, PlanGroup]] = {}
        self._laid: dict[tuple[int, str], Laid] = {}
        self._problems: dict[tuple[Any, ...], StageProblem] = {}
        self.stages = tuple(self._stage(index) for index in range(run.layout.pp))

    def _check_chunks(self) -> None:
        if self.settings.method == "greedy" and not self.one_chunk:
            raise SpecError(
                f"--method greedy plans one chunk of layers a stage; schedule "
                f"{self.run.layout.pipeline} has {len(self.chunks[0])}",
                "use --method optimal",
            )

    @property
    def by_moments(self) -> bool:
        """Whether stages are planned moment by moment (else without the order of layers)."""
        return self.settings.memory_model != "stored+working" and not (
            self.settings.offload or self.settings.method == "greedy"
        )

    @property
    def peak_model(self) -> PeakModel:
        """The solver's name of the memory model; whole segments are part of ``module``."""
        model = self.settings.memory_model
        segmented = self.settings.semantics == "module" and model == "stored+working"
        segmented = segmented and self._special is None and not self.settings.offload
        return "stored+working+segments" if segmented and self.one_chunk else model

    @property
    def one_chunk(self) -> bool:
        """Whether every stage has a single chunk of layers."""
        return all(len(stage) == 1 for stage in self.chunks)

    @cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Policies that decide for one layer at a time, as ``compare`` lists them.

        Beside a plan of whole modules only those that wrap modules the framework can wrap.
        """
        names = [name for name in self.staged.usual_policies if name != "sqrt"]
        if self.run.framework.per_op_policy:
            names.insert(names.index("full"), "op")
        found = [self.staged.policy(name) for name in names]
        if self.settings.semantics == "module":
            found = [policy for policy in found if self._wraps(policy)]
        return tuple(found)

    @cached_property
    def singles(self) -> tuple[Policy, ...]:
        """Policies that are ways to run a layer: also one that the profile has no option for."""
        if self.settings.semantics == "module" or any(p.per_op for p in self.policies):
            return self.policies
        return (*self.policies, self.staged.policy("op"))

    def _wraps(self, policy: Policy) -> bool:
        known = {m for run in self.staged.kinds for m in wrapped_modules(self.model, run.graph)}
        return not policy.per_op and set(policy.modules) <= known

    @cached_property
    def ways(self) -> LayerWays:
        """The ways to run each kind of layer."""
        special = self._special
        return LayerWays(
            self.memory.timeline,
            self.costs,
            self.singles,
            full=self.full,
            modules=self.settings.semantics == "module",
            special=None if special is None else lambda graph: special(self, graph),
        )

    def _stage(self, index: int) -> Stage:
        chunks, flights = self.chunks[index], self.flights[index]
        runs: list[Layers] = []
        for number, (chunk, flight) in enumerate(zip(chunks, flights, strict=True)):
            graphs = self.staged.layers[chunk.start : chunk.stop]
            for _, same in groupby(graphs, key=id):
                members = list(same)
                name = self._names[id(members[0])]
                runs.append(Layers(members[0], name, len(members), number, max(1, flight)))
        if self.settings.activations_only:
            gpu = Gpu(moments_of(self.memory, index), tuple(Ends() for _ in chunks))
        else:
            gpu = stage_gpu(self._most, index)
        return Stage(index, tuple(runs), tuple(flights), gpu)

    @cached_property
    def _most(self) -> StageMemory:
        """The run whose moments a plan has to keep to.

        Where they depend on which layers re-run, all of them count as re-run: never too little.
        :meth:`spared` has what a plan may do without.
        """
        return memory_of(self.staged, self.full) if self.memory.varies else self.memory

    def layer(self, graph: Graph) -> PlanLayer:
        """One kind of layer as a problem of its own, op by op."""
        return self.ways.layer(graph)

    def beside(self, stage: Stage) -> Beside:
        """What a stage holds beside its layers, where no order is looked at: never less.

        Every part of a chunk is counted as stored while any works, and all gradients exist.
        """
        if self.settings.activations_only:
            return Beside()
        ends = [(*one.before, *one.after) for one in stage.gpu.chunks]
        rest = stage.gpu.base + sum(
            n * sum(part.stored for part in parts)
            for n, parts in zip(stage.most_held, ends, strict=True)
        )
        works = [max(p.forward, p.backward) - p.stored for parts in ends for p in parts]
        excess = [self.ways.excess(run.graph) for run in stage.runs]
        lacks = [n for one in stage.gpu.chunks for n in (*one.absent, *one.absent_forward)]
        rest -= min([0, *lacks])
        return Beside(
            rest + max(works, default=0), rest + max([0, *excess]), stage.gpu.floor
        )  # fmt: skip

    def groups(self, stage: Stage) -> tuple[LayerGroup, ...]:
        """The layers of a stage where no order is looked at."""
        segmented = self.peak_model == "stored+working+segments"
        found = []
        for run in stage.runs:
            chain = self._chains[id(run.graph)] if segmented else None
            weight = self.weights(stage)[run.chunk]
            find = self.offloading if self.settings.offload else self.ways.options
            options = find(run.graph)
            found.append(LayerGroup(run.name, options, run.count, chain=chain, inflight=weight))
        return tuple(found)

    @cached_property
    def _chains(self) -> Mapping[int, Chain]:
        return {
            id(run.graph): module_chain(self.model, run.graph, self.costs, self.full)
            for run in self.staged.kinds
        }

    def offloading(self, graph: Graph) -> OptionSet:
        """The ways to run a layer whose kept tensors may leave for the host."""
        if id(graph) not in self._offloading:
            transfer = self.transfer(graph)
            found = (
                offload_options(self.layer(graph), transfer)
                if self.settings.semantics == "minimal"
                else module_offload_options(self.model, graph, self.costs, self.full, transfer)
            )
            self._offloading[id(graph)] = found.joined(self.ways.of_policies(graph))
        return self._offloading[id(graph)]

    def transfer(self, graph: Graph) -> Transfer:
        """What copies of a layer's tensors hide behind, on the run's device."""
        time = self._roofline.layer(graph, NONE)
        rates = self._roofline.rates
        return Transfer(
            host_rate=int(rates.host),
            memory_rate=int(rates.memory),
            forward=round(NANO * time.forward),
            backward=round(NANO * time.backward),
        )

    @cached_property
    def _roofline(self) -> Roofline:
        from actcalc.cost.roofline import roofline_of

        return roofline_of(self.staged)

    def problem(self, stage: Stage, budget: int) -> Problem:
        """One stage as a planning problem (one chunk, op by op)."""
        return Problem(
            layer_types={run.name: self.layer(run.graph) for run in stage.runs},
            stack=tuple((run.name, run.count) for run in stage.runs),
            inflight=max(1, stage.in_flight[0]),
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
            beside=self.beside(stage),
        )

    def stage_problem(
        self, stages: Sequence[Stage], without: frozenset[str] = frozenset()
    ) -> StageProblem:
        """Stages that follow one plan, moment by moment (cached).

        No layer re-runs what is given one of the tensors ``without``: they are not held.
        """
        key = (*(stage.index for stage in stages), without)
        if key not in self._problems:
            stored = self.settings.memory_model == "stored"
            find = self.ways.stored if stored else self.ways.measured
            layers = tuple(tuple(find(g, without) for g in graphs) for graphs in stages[0].graphs)
            gpus = tuple(dict.fromkeys(self.gpu(stage, without) for stage in stages))
            self._problems[key] = StageProblem(layers, gpus)
        return self._problems[key]

    def gpu(self, stage: Stage, without: frozenset[str]) -> Gpu:
        """What a stage holds beside its layers when it does not hold the tensors ``without``."""
        sizes: dict[str, int] = {}
        for run in stage.runs:
            known = self.model.tensor_bytes[run.graph]
            sizes.update((n, known[n]) for n in self.memory.given(run.graph) & without)
        return replace(stage.gpu, base=stage.gpu.base - sum(sizes.values()))

    @cached_property
    def spared(self) -> tuple[frozenset[str], ...]:
        """Every set of tensors that layers are given and a plan may do without holding."""
        if self.settings.activations_only:
            return (frozenset(),)
        names = sorted({n for run in self.staged.kinds for n in self.memory.given(run.graph)})
        sizes = range(len(names) + 1)
        return tuple(frozenset(each) for size in sizes for each in combinations(names, size))

    # --- any choice laid out ---------------------------------------------------------------------

    def laid(self, stage: Stage, policy: Policy, skip: Callable[[int], bool] | None = None) -> Laid:
        """One stage under one policy; ``skip`` tells by position which layer stores everything."""
        key = (stage.index, policy.name)
        if skip is None and key in self._laid:
            return self._laid[key]
        chunks, at = [], 0
        varies = self.memory.varies and skip is None
        own = memory_of(self.staged, policy) if policy.segmented or varies else None
        work = own if policy.segmented else None
        for number, graphs in enumerate(stage.graphs):
            if work is not None:
                chunks.append(self._segments(graphs, policy, layers_of(work, stage.index)[number]))
            else:
                chosen = [
                    NONE if skip is not None and skip(at + i) else policy.of_layer(i)
                    for i in range(len(graphs))
                ]
                pairs = zip(graphs, chosen, strict=True)
                chunks.append(tuple(self.unit(g, *self.ways.named(g, p)) for g, p in pairs))
            at += len(graphs)
        alone = own is None or self.settings.activations_only
        gpu = stage.gpu if own is None or alone else stage_gpu(own, stage.index)
        found = self.laid_out(stage, chunks, gpu)
        if skip is None:
            self._laid[key] = found
        return found

    def unit(self, graph: Graph, option: Any, way: Way) -> Unit:
        """One layer, run one way."""
        key = (self._names[id(graph)], id(option))
        if key not in self._units:
            # The option is kept beside its id, so that no id is ever reused.
            self._units[key] = option, option_group(key[0], option)
        return Unit(self._units[key][1], Held(*way[:3]))

    def _segments(
        self, graphs: Sequence[Graph], policy: Policy, parts: Sequence[Held]
    ) -> tuple[Unit, ...]:
        """A chunk of layers in segments that re-run together; ``parts`` are memory's."""
        found: list[Unit] = []
        at = 0
        for part in parts:
            members = graphs[at : at + part.layers]
            at += part.layers
            options = [self.ways.named(graph, policy)[0] for graph in members]
            names = [self._names[id(graph)] for graph in members]
            first = option_group(names[0], options[0])
            again = dict.fromkeys(op for o in options for op in o.payload.recompute)
            runs = [(name, sum(1 for _ in same)) for name, same in groupby(names)]
            kinds = "+".join(f"{n} {name}" for name, n in runs)
            group = replace(
                first,
                layer_type=names[0] if len(runs) == 1 else kinds,
                count=len(members),
                segment=len(members),
                recompute=tuple(again),
                stored_bytes=part.stored,
                working_bytes=sum(o.working for o in options) + sum(o.stored for o in options[1:]),
                cost=sum(o.cost for o in options),
            )
            found.append(Unit(group, part))
        return tuple(found)

    def laid_out(self, stage: Stage, chunks: Sequence[Sequence[Unit]], gpu: Gpu) -> Laid:
        """A stage with these units, its cost, and its peak by the memory model."""
        cost = sum(unit.group.cost for chunk in chunks for unit in chunk)
        return Laid(tuple(map(tuple, chunks)), gpu, cost, self._peak(stage, chunks, gpu))

    def _peak(self, stage: Stage, chunks: Sequence[Sequence[Unit]], gpu: Gpu) -> int:
        if self.settings.memory_model != "stored+working":
            found: int = peak(gpu, [[self.seen(unit.held) for unit in chunk] for chunk in chunks])
            return found
        stored = self._stored(stage, chunks)
        works = (unit.group.working_bytes for chunk in chunks for unit in chunk)
        return self.beside(stage).peak(stored, max(works, default=0))

    def _stored(self, stage: Stage, chunks: Sequence[Sequence[Unit]]) -> int:
        """The most bytes that layers store at any moment, all micro-batches in flight."""
        wholes = [sum(unit.group.stored_bytes for unit in chunk) for chunk in chunks]
        if self.settings.memory_model != "stored+working":
            held = (moment.held for moment in stage.gpu.moments)
            return max(sum(n * w for n, w in zip(each, wholes, strict=True)) for each in held)
        return sum(m * whole for m, whole in zip(self.weights(stage), wholes, strict=True))

    def weights(self, stage: Stage) -> tuple[int, ...]:
        """Micro-batches of each chunk that count where no order is looked at."""
        counts = stage.in_flight if self.settings.activations_only else stage.most_held
        return tuple(max(1, n) for n in counts)

    def seen(self, part: T) -> T:
        """A layer as the memory model sees it: ``stored`` looks at nothing that works."""
        if self.settings.memory_model != "stored":
            return part
        return part._replace(forward=part.stored, backward=part.stored)
