"""A model's pipeline stages as planning problems, solved for a memory budget.

Every stage is planned by itself: its layers by kind, the micro-batches it holds, and what else
lives in its memory. Build a :class:`RunPlanner` once and ask it for many budgets; what is derived
from the layers is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from actcalc.answers.compare import default_policies
from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.report import Evaluation
from actcalc.memory.stages import layers_of, moments_of, stage_gpu
from actcalc.plan.offload import Transfer, module_offload_options, offload_options
from actcalc.plan.options import (
    NANO,
    Costs,
    costs_of,
    module_chain,
    plan_layer,
    wrapped_modules,
)
from actcalc.plan.stages import Laid, Layers, Stage, Unit, of_layer, units_of
from actcalc.plan.ways import LayerWays
from actcalc.policy.outcome import LayerOutcome
from actcalc.policy.rules import NONE, Policy, parse_policy
from actcalc.run.placement import held, microbatches
from actcalc.solve.beside import Beside
from actcalc.solve.fit import least_peak, solve_stage
from actcalc.solve.heuristics import greedy, sqrt
from actcalc.solve.layers import LayerGroup
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.plans import (
    Certificate,
    Plan,
    PlanGroup,
    assemble,
    infeasible,
    option_group,
    plan_of,
)
from actcalc.solve.problem import PeakModel, PlanLayer, Problem
from actcalc.solve.segments import Chain
from actcalc.solve.stack import smallest_budget, solve_groups, solve_shared
from actcalc.solve.stage import Ends, Gpu, Held, StageProblem, Way, layers_at_peak, peak
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.cost.roofline import Roofline

MemoryModel = Literal["stored", "stored+working", "timeline"]
Semantics = Literal["minimal", "module"]
Method = Literal["optimal", "sqrt", "greedy"]

T = TypeVar("T", Held, Way)

PER_OP_FRAMEWORK = "torchtitan"
"""The framework that has the policy ``op``, by default (SelectiveAC.Config)."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How a plan is made.

    ``timeline`` counts every moment of a step as ``actcalc memory`` does; ``stored`` leaves out
    what works and is a lower bound of it, ``stored+working`` leaves out the order of layers and is
    an upper bound. ``offload`` lets kept tensors leave for host memory, where the run's device has
    a known link. ``activations_only``: the budget is for the layers' activations alone.
    """

    memory_model: MemoryModel = "timeline"
    semantics: Semantics = "minimal"
    method: Method = "optimal"
    same_on_all_stages: bool = False
    offload: bool = False
    activations_only: bool = False


def default_model(method: str, *, offload: bool) -> MemoryModel:
    """The memory model where none is named: the exact one, for all that it can plan."""
    return "timeline" if method == "optimal" and not offload else "stored+working"


class RunPlanner:
    """Plans a run's recomputation for any memory budget.

    ``options`` replaces the ways to run a layer that the semantics has, by those of a target that
    can execute others. Raises ``SpecError`` for a combination of settings that has no meaning for
    the run.
    """

    def __init__(
        self,
        run: Run,
        settings: PlanSettings | None = None,
        options: Callable[[RunPlanner, Graph], Sequence[tuple[Option, LayerOutcome]]] | None = None,
    ) -> None:
        self.run = run
        self._special = options
        self.settings = settings or PlanSettings()
        self._check()
        self.memory = Evaluation(replace(run, policies=("none",)))
        self.model: ModelGraph = self.memory.graph
        self.costs: Costs = costs_of(self.model, run.device)
        self.full = full_policy(self.model)
        self.chunks = self.memory.places
        self.flights = held(run.layout, microbatches(run.layout, run.workload))
        self._names = _distinct_names(self.model)
        self._check_chunks()
        self._offloading: dict[int, OptionSet] = {}
        self._units: dict[tuple[str, int], tuple[Any, PlanGroup]] = {}
        self._laid: dict[tuple[int, str], Laid] = {}
        self._problems: dict[tuple[Any, ...], StageProblem] = {}
        self.stages = tuple(self._stage(index) for index in range(run.layout.pp))

    def _check(self) -> None:
        settings, training = self.settings, self.run.training
        if settings.method != "optimal":
            if settings.semantics == "module":
                raise SpecError(
                    f"--method {settings.method} chooses single ops, not modules",
                    "drop --semantics module",
                )
            if settings.same_on_all_stages:
                raise SpecError(
                    f"--method {settings.method} plans each stage by itself",
                    "drop --same-on-all-stages, or use --method optimal",
                )
            if settings.memory_model == "timeline":
                raise SpecError(
                    f"--method {settings.method} does not look at single moments",
                    "use --memory-model stored or stored+working",
                )
        if settings.offload:
            self._check_offload()
        moved = training.offload_modules or training.offload_layers
        if not settings.activations_only and (training.offload == "activations" or moved):
            raise SpecError(
                "offloaded activations: plan chooses itself what is stored and where",
                "drop it; plan --offload lets tensors go to the host",
            )

    def _check_chunks(self) -> None:
        if self.settings.method != "optimal" and not self.one_chunk:
            raise SpecError(
                f"--method {self.settings.method} plans one chunk of layers a stage; schedule "
                f"{self.run.layout.pipeline} has {len(self.chunks[0])}",
                "use --method optimal",
            )

    def _check_offload(self) -> None:
        settings, device = self.settings, self.run.device
        if device is None:
            raise SpecError(
                "--offload weighs copies to the host against time, which needs a device",
                "add --device",
            )
        if device.host_copy_rate is None:
            raise SpecError(
                f"{device.title} has no known rate of copies to host memory",
                "drop --offload, or give host_copy_bandwidth_bytes_per_second in a device file",
            )
        for name, value, known in (
            ("--memory-model", settings.memory_model, ("stored", "stored+working")),
            ("--method", settings.method, ("optimal",)),
        ):
            if value not in known:
                raise SpecError(
                    f"--offload is not planned with {name} {value}", f"use {' or '.join(known)}"
                )

    # --- the run as the solver sees it -----------------------------------------------------------

    @property
    def by_moments(self) -> bool:
        """Whether stages are planned moment by moment (else without the order of layers)."""
        return self.settings.memory_model != "stored+working" and not (
            self.settings.offload or self.settings.method != "optimal"
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
        names = [name for name in default_policies(self.model) if name != "sqrt"]
        if self.run.framework.name == PER_OP_FRAMEWORK:
            names.insert(names.index("full"), "op")
        found = [self.memory.named(name) for name in names]
        if self.settings.semantics == "module":
            found = [policy for policy in found if self._wraps(policy)]
        return tuple(found)

    def _wraps(self, policy: Policy) -> bool:
        known = {m for run in self.model.kinds for m in wrapped_modules(self.model, run.graph)}
        return not policy.per_op and set(policy.modules) <= known

    @cached_property
    def ways(self) -> LayerWays:
        """The ways to run each kind of layer."""
        special = self._special
        return LayerWays(
            self.memory.timeline,
            self.costs,
            self.policies,
            full=self.full,
            modules=self.settings.semantics == "module",
            special=None if special is None else lambda graph: special(self, graph),
        )

    def _stage(self, index: int) -> Stage:
        chunks, flights = self.chunks[index], self.flights[index]
        runs: list[Layers] = []
        for number, (chunk, flight) in enumerate(zip(chunks, flights, strict=True)):
            graphs = (self.memory.timeline.stages.graph(layer) for layer in chunk)
            for _, same in groupby(graphs, key=id):
                members = list(same)
                name = self._names[id(members[0])]
                runs.append(Layers(members[0], name, len(members), number, max(1, flight)))
        if self.settings.activations_only:
            gpu = Gpu(moments_of(self.memory, index), tuple(Ends() for _ in chunks))
        else:
            gpu = stage_gpu(self.memory, index)
        return Stage(index, tuple(runs), tuple(flights), gpu)

    def layer(self, graph: Graph) -> PlanLayer:
        """One kind of layer as a problem of its own, op by op."""
        if self.settings.method == "sqrt":
            return plan_layer(self.model, graph, self.costs, input_stored=True)
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
            for run in self.model.kinds
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
        from actcalc.cost.rates import rates_of
        from actcalc.cost.roofline import Roofline

        assert self.run.device is not None
        precision, count = self.run.workload.precision, self.run.layout.devices
        return Roofline(self.model, rates_of(self.run.device, precision, devices=count))

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

    def stage_problem(self, stages: Sequence[Stage]) -> StageProblem:
        """Stages that follow one plan, moment by moment (cached)."""
        key = tuple(stage.index for stage in stages)
        if key not in self._problems:
            stored = self.settings.memory_model == "stored"
            find = self.ways.stored if stored else self.ways.measured
            layers = tuple(tuple(find(g) for g in graphs) for graphs in stages[0].graphs)
            gpus = tuple(dict.fromkeys(stage.gpu for stage in stages))
            self._problems[key] = StageProblem(layers, gpus)
        return self._problems[key]

    # --- named policies --------------------------------------------------------------------------

    def laid(self, stage: Stage, policy: Policy, skip: Callable[[int], bool] | None = None) -> Laid:
        """One stage under one policy; ``skip`` tells by position which layer stores everything."""
        key = (stage.index, policy.name)
        if skip is None and key in self._laid:
            return self._laid[key]
        chunks, at = [], 0
        work = self.memory.under(policy) if policy.whole and policy.segment > 1 else None
        for number, graphs in enumerate(stage.graphs):
            if work is not None:
                chunks.append(self._segments(graphs, policy, layers_of(work, stage.index)[number]))
            else:
                chosen = [
                    NONE if skip is not None and skip(at + i) else of_layer(policy, i)
                    for i in range(len(graphs))
                ]
                pairs = zip(graphs, chosen, strict=True)
                chunks.append(tuple(self.unit(g, *self.ways.named(g, p)) for g, p in pairs))
            at += len(graphs)
        alone = work is None or self.settings.activations_only
        gpu = stage.gpu if work is None or alone else stage_gpu(work, stage.index)
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

    # --- plans -----------------------------------------------------------------------------------

    def plan(self, budget: int) -> tuple[Plan, ...]:
        """The plan of every stage within ``budget`` bytes of each GPU, in order."""
        if self.settings.same_on_all_stages and len(self.stages) > 1:
            return self._same(budget)
        known: dict[tuple[Any, ...], Plan] = {}
        plans: list[Plan] = []
        for stage in self.stages:
            if stage.key not in known:
                known[stage.key] = self._solve(stage, budget)
            plans.append(known[stage.key])
        return tuple(plans)

    def _solve(self, stage: Stage, budget: int) -> Plan:
        if not stage.runs:
            return self._made(stage, budget, self.laid(stage, NONE), 0, None)
        if self.settings.method == "greedy":
            return greedy(self.problem(stage, budget))
        if self.settings.method == "sqrt":
            names = {self._names[key]: chain for key, chain in self._chains.items()}
            return sqrt(self.problem(stage, budget), names)
        if self.by_moments:
            return self._moments([stage], budget)[0]
        plan = self._coarse(stage, budget)
        best = self._named([stage], budget, plan.cost)
        if best is None:
            return plan
        return self._made(stage, budget, best[0], plan.lower_bound, None)

    def _coarse(self, stage: Stage, budget: int) -> Plan:
        longest = max((len(graphs) for graphs in stage.graphs), default=1)
        return solve_groups(
            self.groups(stage),
            inflight=max(stage.in_flight),
            const_bytes=self.beside(stage),
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=max(1, longest),
        )

    def _moments(self, stages: Sequence[Stage], budget: int) -> tuple[Plan, ...]:
        """The cheapest plan that all of ``stages`` follow, counted moment by moment."""
        found = solve_stage(self.stage_problem(stages), budget)
        cost = None if found is None else found.cost
        best = self._named(stages, budget, cost, proven=found is None or found.bound >= found.cost)
        bound = None if found is None else found.bound
        if best is not None:
            return tuple(
                self._made(stage, budget, laid, bound, None)
                for stage, laid in zip(stages, best, strict=True)
            )
        if found is None or found.choice is None:
            least = self._least(stages)
            return tuple(infeasible(self.peak_model, budget, least) for _ in stages)
        chunks = [
            tuple(self._chosen(g, w.ways[i]) for g, w, i in zip(graphs, row, picks, strict=True))
            for graphs, row, picks in zip(
                stages[0].graphs, self.stage_problem(stages).layers, found.choice, strict=True
            )
        ]
        certificate = Certificate(_METHOD, min(found.relaxed, found.cost), found.states)
        return tuple(
            self._made(stage, budget, self.laid_out(stage, chunks, stage.gpu), bound, certificate)
            for stage in stages
        )

    def _chosen(self, graph: Graph, way: Way) -> Unit:
        return self.unit(graph, way.payload, way)

    def _named(
        self, stages: Sequence[Stage], budget: int, cost: int | None, *, proven: bool = True
    ) -> list[Laid] | None:
        """The cheapest named policy that fits, if it costs less than ``cost`` (None: anything).

        What decides for one layer at a time is among the ways to run a layer: only where nothing
        is ``proven`` of those it is looked at here. What re-runs segments of layers costs as much
        as re-running every layer whole.
        """
        if self._special is not None:
            return None
        longest = max(len(graphs) for stage in stages for graphs in stage.graphs)
        whole = self.laid(stages[0], self.full).cost
        policies = [] if proven else list(self.policies)
        if cost is None or whole < cost:
            policies.append(self.memory.named("sqrt"))
            policies += [self.memory.named(f"uniform:{n}") for n in range(2, longest + 1)]
        fitting = []
        for policy in policies:
            every = [self.laid(stage, policy) for stage in stages]
            if max(each.peak for each in every) <= budget:
                fitting.append(every)
        best = min(fitting, key=lambda each: (each[0].cost, each[0].peak), default=None)
        return None if best is None or (cost is not None and best[0].cost >= cost) else best

    def _made(
        self,
        stage: Stage,
        budget: int,
        laid: Laid,
        bound: int | None,
        certificate: Certificate | None,
    ) -> Plan:
        """A stage's plan; no plan costs less than ``bound`` (None: than this one)."""
        if laid.peak > budget:
            return infeasible(self.peak_model, budget, laid.peak)
        chunks = laid.units
        stored = self._stored(stage, chunks)
        if self.settings.memory_model == "stored+working":
            works = (unit.group.working_bytes for chunk in chunks for unit in chunk)
            own = stored + max(works, default=0)
        else:
            seen = [[self.seen(unit.held) for unit in chunk] for chunk in chunks]
            own = layers_at_peak(laid.gpu, seen)
        plan = plan_of(
            [unit.group for chunk in chunks for unit in chunk],
            stored,
            laid.peak,
            budget,
            self.peak_model,
            laid.cost if bound is None else min(bound, laid.cost),
            certificate,
        )
        return replace(plan, rest_bytes=max(0, laid.peak - own))

    # --- the range of budgets --------------------------------------------------------------------

    @cached_property
    def smallest(self) -> int:
        """The least memory of a GPU, in bytes, for which every stage has a plan.

        Of the exact method; ``--same-on-all-stages`` may need a little more.
        """
        return max(self.smallest_of(stage) for stage in self.stages)

    def smallest_of(self, stage: Stage) -> int:
        """The least memory in bytes with a plan for one stage."""
        if not stage.runs:
            return self.laid(stage, NONE).peak
        if self.by_moments:
            return self._least([stage])
        least = smallest_budget(
            self.groups(stage),
            inflight=max(stage.in_flight),
            const_bytes=self.beside(stage),
            peak_model=self.peak_model,
            max_segment=max(1, *(len(graphs) for graphs in stage.graphs)),
        )
        return min(least, self._least_named([stage]))

    def _least(self, stages: Sequence[Stage]) -> int:
        key = ("least", *(stage.index for stage in stages))
        known = self.__dict__.setdefault("_leasts", {})
        if key not in known:
            found = least_peak(self.stage_problem(stages))[0]
            known[key] = min(found, self._least_named(stages))
        least: int = known[key]
        return least

    def _least_named(self, stages: Sequence[Stage]) -> int:
        """The lowest peak of a policy that re-runs segments of layers."""
        if self._special is not None:
            return 2**60
        longest = max(len(graphs) for stage in stages for graphs in stage.graphs)
        names = ("sqrt", *(f"uniform:{n}" for n in range(2, longest + 1)))
        return min(
            max(self.laid(stage, self.memory.named(name)).peak for stage in stages)
            for name in names
        )

    @cached_property
    def free(self) -> int:
        """The least memory in bytes found with the cheapest plan of every stage."""
        return max(plan.peak_bytes or 0 for plan in self.plan(2**59))

    # --- one plan for all stages -----------------------------------------------------------------

    def _same(self, budget: int) -> tuple[Plan, ...]:
        """One plan for all stages."""
        first = self.stages[0]
        if any(stage.shape != first.shape for stage in self.stages):
            raise SpecError(
                "stages with different layers cannot share one plan: "
                + "; ".join(dict.fromkeys(_shape_text(stage) for stage in self.stages)),
                "drop --same-on-all-stages, or choose --pp so that the stages are alike",
            )
        if self.by_moments:
            return self._moments(self.stages, budget)
        # A stage with several chunks is taken to hold of each as much as of the fullest.
        most = [
            max(group.inflight or 1 for group in self.groups(stage)) for stage in self.stages
        ]  # fmt: skip
        plan = solve_shared(
            [replace(group, inflight=None) for group in self.groups(first)],
            [(self.beside(stage), m) for stage, m in zip(self.stages, most, strict=True)],
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=max(1, *(len(graphs) for graphs in first.graphs)),
        )
        if not plan.feasible:
            return tuple(plan for _ in self.stages)
        return tuple(
            assemble(
                units_of(plan.groups, stage),
                const_bytes=self.beside(stage),
                budget_bytes=budget,
                peak_model=self.peak_model,
                lower_bound=plan.cost if self.one_chunk else None,
                certificate=plan.certificate,
            )
            for stage in self.stages
        )


_METHOD = "one moment at a time, and a search from the last layer"


def full_policy(model: ModelGraph) -> Policy:
    """Re-running whole layers, with their input kept as the framework keeps it."""
    gathered = model.context.kernel("full_input") == "replicated"
    return parse_policy("full", layers=1, full_boundary="replicated" if gathered else "own")


def _distinct_names(model: ModelGraph) -> dict[int, str]:
    """A name for each kind of layer; kinds of one label are numbered."""
    labels = [run.kind.label for run in model.kinds]
    names: dict[int, str] = {}
    for index, run in enumerate(model.kinds):
        label = run.kind.label
        place = labels[: index + 1].count(label)
        names[id(run.graph)] = label if labels.count(label) == 1 else f"{label} {place}"
    return names


def _shape_text(stage: Stage) -> str:
    return " + ".join(f"{count} {name}" for name, count, _ in stage.shape)
