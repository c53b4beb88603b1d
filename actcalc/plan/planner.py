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
from typing import TYPE_CHECKING, Any, Literal

from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.plan.offload import Transfer, module_offload_options, offload_options
from actcalc.plan.options import (
    NANO,
    Costs,
    costs_of,
    module_chain,
    module_options,
    plan_layer,
)
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.solve.heuristics import greedy, sqrt
from actcalc.solve.knapsack import OptionSet
from actcalc.solve.problem import PeakModel, PlanLayer, Problem
from actcalc.solve.rest import Rest, most_of
from actcalc.solve.stack import (
    LayerGroup,
    Plan,
    PlanGroup,
    assemble,
    infeasible,
    layer_options,
    smallest_budget,
    solve_groups,
    solve_shared,
)
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.cost.roofline import Roofline

MemoryModel = Literal["stored", "stored+working", "timeline"]
Semantics = Literal["minimal", "module"]
Method = Literal["optimal", "sqrt", "greedy"]


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How a plan is made.

    ``offload`` lets kept tensors leave for host memory, where the run's device has a known link.
    ``rests`` is, per pipeline stage, what lives in memory beside the layers' activations
    (empty: nothing does, the budget is for them alone).
    """

    memory_model: MemoryModel = "stored+working"
    semantics: Semantics = "minimal"
    method: Method = "optimal"
    same_on_all_stages: bool = False
    offload: bool = False
    rests: tuple[Rest, ...] = ()


@dataclass(frozen=True, eq=False)
class Stage:
    """One pipeline stage: its runs of equal layers in forward order, and what else it holds."""

    index: int
    groups: tuple[LayerGroup, ...]
    graphs: tuple[Graph, ...]
    """The graph of each group."""
    in_flight: tuple[int, ...]
    """Micro-batches each of its chunks holds."""
    rest: Rest
    segments: int
    """Longest segment of layers that may re-run as one."""

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return sum(group.count for group in self.groups)

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """Kinds and counts of its layers, in order."""
        return tuple((group.name, group.count) for group in self.groups)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for stages with equal plans."""
        flights = tuple(group.inflight for group in self.groups)
        return (self.shape, flights, self.rest)


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
        options: Callable[[RunPlanner, Graph], OptionSet] | None = None,
    ) -> None:
        self.run = run
        self.staged = StagedRun(run)
        self._special = options
        self.settings = settings or PlanSettings()
        self.model: ModelGraph = self.staged.graph
        self.costs: Costs = costs_of(self.staged)
        self.full = self.staged.full
        self.chunks = self.staged.places
        self.flights = [self.staged.held(stage) for stage in range(run.layout.pp)]
        self._names = {id(kind.graph): kind.label for kind in self.staged.kinds}
        self._layers: dict[int, PlanLayer] = {}
        self._found: dict[int, OptionSet] = {}
        self._check()
        self.stages = tuple(self._stage(index) for index in range(run.layout.pp))

    def _check(self) -> None:
        settings = self.settings
        many = any(len(stage) > 1 for stage in self.chunks)
        if settings.memory_model == "timeline" and many:
            raise SpecError(
                "the timeline memory model follows one chunk of layers a stage; "
                f"schedule {self.run.layout.pipeline} has {len(self.chunks[0])}",
                "use --memory-model stored+working",
            )
        if settings.method != "optimal":
            if settings.semantics == "module":
                raise SpecError(
                    f"--method {settings.method} chooses single ops, not modules",
                    "drop --semantics module",
                )
            if many:
                raise SpecError(
                    f"--method {settings.method} plans one chunk of layers a stage; schedule "
                    f"{self.run.layout.pipeline} has {len(self.chunks[0])}",
                    "use --method optimal",
                )
            if settings.same_on_all_stages:
                raise SpecError(
                    f"--method {settings.method} plans each stage by itself",
                    "drop --same-on-all-stages, or use --method optimal",
                )
        if settings.offload:
            self._check_offload()
        if settings.rests and len(settings.rests) != self.run.layout.pp:
            raise SpecError(
                f"{len(settings.rests)} stages of memory for pp {self.run.layout.pp}",
                "give the bytes of every stage",
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

    @property
    def peak_model(self) -> PeakModel:
        """The planner's name of the memory model; whole segments are part of ``module``."""
        model = self.settings.memory_model
        segmented = self.settings.semantics == "module" and model == "stored+working"
        segmented = segmented and self._special is None and not self.settings.offload
        return "stored+working+segments" if segmented and self._one_chunk else model

    @property
    def _one_chunk(self) -> bool:
        return all(len(stage) == 1 for stage in self.chunks)

    def _stage(self, index: int) -> Stage:
        graphs = self.staged.layers
        chunks, flights = self.chunks[index], self.flights[index]
        groups: list[LayerGroup] = []
        owners: list[Graph] = []
        for chunk, flight in zip(chunks, flights, strict=True):
            for _, run in groupby((graphs[layer] for layer in chunk), key=id):
                members = list(run)
                groups.append(self._group(members[0], len(members), max(1, flight)))
                owners.append(members[0])
        longest = max((len(chunk) for chunk in chunks), default=1)
        segmented = self.peak_model == "stored+working+segments"
        rests = self.settings.rests
        return Stage(
            index=index,
            groups=tuple(groups),
            graphs=tuple(owners),
            in_flight=tuple(flights),
            rest=rests[index] if rests else Rest(),
            segments=max(1, longest) if segmented else 1,
        )

    def _group(self, graph: Graph, count: int, flight: int) -> LayerGroup:
        name = self._names[id(graph)]
        if self._special is not None:
            return LayerGroup(name, self._replaced(graph), count, inflight=flight)
        if self.settings.offload:
            return LayerGroup(name, self._offloading(graph), count, inflight=flight)
        if self.settings.semantics == "minimal":
            options = layer_options(self.layer(graph))
            return LayerGroup(name, options, count, inflight=flight)
        options, chain = self._modules[id(graph)]
        segmented = self.peak_model == "stored+working+segments"
        return LayerGroup(name, options, count, chain=chain if segmented else None, inflight=flight)

    def _replaced(self, graph: Graph) -> OptionSet:
        assert self._special is not None
        if id(graph) not in self._found:
            self._found[id(graph)] = self._special(self, graph)
        return self._found[id(graph)]

    def _offloading(self, graph: Graph) -> OptionSet:
        if id(graph) not in self._found:
            transfer = self.transfer(graph)
            self._found[id(graph)] = (
                offload_options(self.layer(graph), transfer)
                if self.settings.semantics == "minimal"
                else module_offload_options(self.model, graph, self.costs, self.full, transfer)
            )
        return self._found[id(graph)]

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

    @cached_property
    def _modules(self) -> Mapping[int, tuple[Any, Any]]:
        return {
            id(run.graph): (
                module_options(self.model, run.graph, self.costs, self.full),
                module_chain(self.model, run.graph, self.costs, self.full),
            )
            for run in self.staged.kinds
        }

    def layer(self, graph: Graph) -> PlanLayer:
        """One kind of layer as a problem of its own, op by op."""
        if id(graph) not in self._layers:
            chains = self.settings.method == "sqrt"
            self._layers[id(graph)] = plan_layer(self.model, graph, self.costs, input_stored=chains)
        return self._layers[id(graph)]

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
        if not stage.groups:
            empty = Plan(
                feasible=stage.rest.peak(0, 0) <= budget,
                optimal=stage.rest.peak(0, 0) <= budget,
                cost=0,
                lower_bound=0,
                stored_bytes=0,
                peak_bytes=stage.rest.peak(0, 0),
                groups=(),
                peak_model=self.peak_model,
                budget_bytes=budget,
                smallest_budget_bytes=stage.rest.peak(0, 0),
            )
            return empty if empty.feasible else replace(empty, cost=None, lower_bound=None)
        if self.settings.method == "greedy":
            return greedy(self.problem(stage, budget))
        if self.settings.method == "sqrt":
            chains = {self._names[key]: chain for key, (_, chain) in self._modules.items()}
            return sqrt(self.problem(stage, budget), chains)
        return solve_groups(
            stage.groups,
            inflight=max(stage.in_flight),
            const_bytes=stage.rest,
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=stage.segments,
        )

    def problem(self, stage: Stage, budget: int) -> Problem:
        """One stage as a planning problem (one chunk, op by op)."""
        return Problem(
            layer_types={self._names[id(graph)]: self.layer(graph) for graph in stage.graphs},
            stack=stage.shape,
            inflight=max(1, stage.in_flight[0]),
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
            rest=stage.rest,
        )

    @cached_property
    def smallest(self) -> int:
        """The least memory of a GPU, in bytes, for which every stage has a plan.

        Of the exact method; ``--same-on-all-stages`` may need a little more.
        """
        return max(self.smallest_of(stage) for stage in self.stages)

    def smallest_of(self, stage: Stage) -> int:
        """The least memory in bytes with a plan for one stage."""
        if not stage.groups:
            return stage.rest.peak(0, 0)
        return smallest_budget(
            stage.groups,
            inflight=max(stage.in_flight),
            const_bytes=stage.rest,
            peak_model=self.peak_model,
            max_segment=stage.segments,
        )

    @cached_property
    def free(self) -> int:
        """The least memory in bytes found with the cheapest plan of every stage."""
        return max(plan.peak_bytes or 0 for plan in self.plan(2**59))

    # --- one plan for all stages -----------------------------------------------------------------

    def _same(self, budget: int) -> tuple[Plan, ...]:
        """One plan for all stages: each stage's optimum is a bound, and a candidate."""
        first = self.stages[0]
        if any(stage.shape != first.shape for stage in self.stages):
            raise SpecError(
                "stages with different layers cannot share one plan: "
                + "; ".join(dict.fromkeys(_shape_text(stage) for stage in self.stages)),
                "drop --same-on-all-stages, or choose --pp so that the stages are alike",
            )
        if self._one_chunk and self.peak_model != "timeline":
            return self._together(budget)
        relaxed = {stage.key: self._solve(stage, budget) for stage in self.stages}
        missing = [plan for plan in relaxed.values() if not plan.feasible]
        if missing:
            least = max(plan.smallest_budget_bytes or 0 for plan in missing)
            return tuple(infeasible(self.peak_model, budget, least) for _ in self.stages)
        bound = max(plan.cost or 0 for plan in relaxed.values())
        for plan in sorted(relaxed.values(), key=lambda p: -(p.cost or 0)):
            spread = self._everywhere(plan, budget, bound)
            if all(one.feasible for one in spread):
                return spread
        heavy = replace(
            first,
            groups=tuple(
                replace(group, inflight=max(s.groups[i].inflight or 1 for s in self.stages))
                for i, group in enumerate(first.groups)
            ),
            rest=most_of([stage.rest for stage in self.stages]),
        )
        plan = self._solve(heavy, budget)
        if not plan.feasible:
            return tuple(
                infeasible(self.peak_model, budget, plan.smallest_budget_bytes or 0)
                for _ in self.stages
            )
        return self._everywhere(plan, budget, bound)

    def _together(self, budget: int) -> tuple[Plan, ...]:
        """The cheapest plan that fits every stage, where layers weigh alike within each."""
        plan = solve_shared(
            [replace(group, inflight=None) for group in self.stages[0].groups],
            [(stage.rest, max(1, stage.in_flight[0])) for stage in self.stages],
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=self.stages[0].segments,
        )
        if not plan.feasible:
            return tuple(plan for _ in self.stages)
        return self._everywhere(plan, budget, plan.cost or 0)

    def _everywhere(self, plan: Plan, budget: int, bound: int) -> tuple[Plan, ...]:
        made: dict[tuple[Any, ...], Plan] = {}
        for stage in self.stages:
            if stage.key not in made:
                made[stage.key] = assemble(
                    units_of(plan.groups, stage),
                    const_bytes=stage.rest,
                    budget_bytes=budget,
                    peak_model=self.peak_model,
                    lower_bound=bound,
                    certificate=plan.certificate,
                )
        return tuple(made[stage.key] for stage in self.stages)


def units_of(groups: Sequence[PlanGroup], stage: Stage) -> list[tuple[PlanGroup, int]]:
    """A plan's single layers and segments, each with its micro-batches in flight on ``stage``."""
    flights = [group.inflight or 1 for group in stage.groups for _ in range(group.count)]
    units: list[tuple[PlanGroup, int]] = []
    at = 0
    for group in groups:
        unit = replace(group, count=group.segment, segments=1)
        for _ in range(group.segments):
            units.append((unit, flights[at]))
            at += group.segment
    return units


def _shape_text(stage: Stage) -> str:
    return " + ".join(f"{count} {name}" for name, count in stage.shape)
