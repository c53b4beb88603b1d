"""A model's pipeline stages as planning problems, solved for a memory budget.

Every stage is planned by itself: its layers by kind, the micro-batches it holds, and what else
lives in its memory. Build a :class:`RunPlanner` once and ask it for many budgets; what is derived
from the layers is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.plan.stages import Laid, Stage, Unit, units_of
from actcalc.policy.rules import NONE
from actcalc.solve.clock import spent
from actcalc.solve.fit import Solved, least_peak, solve_stage
from actcalc.solve.heuristics import greedy
from actcalc.solve.plans import (
    Certificate,
    Plan,
    assemble,
    infeasible,
    plan_of,
)
from actcalc.solve.stack import smallest_budget, solve_groups, solve_shared
from actcalc.solve.stage import Way, layers_at_peak

if TYPE_CHECKING:
    pass

from actcalc.plan.laying import RunStages


class RunPlanner(RunStages):
    """Plans a run's recomputation for any memory budget."""

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
        plan = self._best(stage, budget)
        if self.settings.method != "sqrt":
            return plan
        laid = self.laid(stage, self.staged.policy("sqrt"))
        return self._made(stage, budget, laid, plan.lower_bound, plan.certificate)

    def _best(self, stage: Stage, budget: int) -> Plan:
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
        found, without = self._cheapest(stages, budget)
        cost = None if found is None else found.cost
        best = self._named(stages, budget, cost, proven=found is None or found.bound >= found.cost)
        bound = None if found is None else found.bound
        if any(self.ways.options(run.graph).loose for stage in stages for run in stage.runs):
            bound = 0  # ways to run a layer were left out
        if best is not None:
            bound = 0 if self.memory.casts else bound
            return tuple(
                self._made(stage, budget, laid, bound, None)
                for stage, laid in zip(stages, best, strict=True)
            )
        if found is None or found.choice is None:
            least = self._least(stages)
            return tuple(infeasible(self.peak_model, budget, least) for _ in stages)
        layers = self.stage_problem(stages, without).layers
        chunks = [
            tuple(self._chosen(g, w.ways[i]) for g, w, i in zip(graphs, row, picks, strict=True))
            for graphs, row, picks in zip(stages[0].graphs, layers, found.choice, strict=True)
        ]
        certificate = Certificate(_METHOD, min(found.relaxed, found.cost), found.states)
        every = [self.laid_out(stage, chunks, self.gpu(stage, without)) for stage in stages]
        return tuple(
            self._made(stage, budget, laid, bound, certificate)
            for stage, laid in zip(stages, every, strict=True)
        )

    def _cheapest(
        self, stages: Sequence[Stage], budget: int
    ) -> tuple[Solved | None, frozenset[str]]:
        """The cheapest choice, and the tensors that it does without; None where nothing fits."""
        best: Solved | None = None
        without, bounds = frozenset[str](), list[int]()
        for each in self.spared:
            below = None if best is None else best.cost
            found = solve_stage(self.stage_problem(stages, each), budget, below=below)
            if found is None:
                continue
            bounds.append(found.bound)
            if found.choice is not None:
                best, without = found, each
        return (None if best is None else best._replace(bound=min(bounds))), without

    def _chosen(self, graph: Graph, way: Way) -> Unit:
        return self.unit(graph, self.ways.option(graph, way), way)

    def _named(
        self, stages: Sequence[Stage], budget: int, cost: int | None, *, proven: bool = True
    ) -> list[Laid] | None:
        """The cheapest named policy that fits, if it costs less than ``cost`` (None: anything).

        What decides for one layer at a time is among the ways to run a layer: it is looked at
        here only where nothing is ``proven`` of those, or where autocast's copies lie beside. What
        re-runs segments of layers costs as much as re-running every layer whole.
        """
        if self._special is not None:
            return None
        longest = max(len(graphs) for stage in stages for graphs in stage.graphs)
        whole = self.laid(stages[0], self.full).cost
        policies = [] if proven and not self.memory.casts else list(self.singles)
        if cost is None or whole < cost:
            policies += [self.staged.policy(name) for name in _segmented(longest)]
        fitting: list[list[Laid]] = []
        for index, policy in enumerate(policies):
            if index and spent():
                break
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

    def total(self, costs: Iterable[int | None]) -> int:
        """Cost of one micro-batch over all stages; it passes one of a chunk's copies (DualPipe)."""
        return sum(cost or 0 for cost in costs) // self.staged.copies

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
            problems = [self.stage_problem(stages, each) for each in self.spared]
            found = min(least_peak(problem)[0] for problem in problems)
            known[key] = min(found, self._least_named(stages))
        least: int = known[key]
        return least

    def _least_named(self, stages: Sequence[Stage]) -> int:
        """The lowest peak of a policy that is not counted among the ways to run a layer."""
        if self._special is not None:
            return 2**60
        longest = max(len(graphs) for stage in stages for graphs in stage.graphs)
        policies = [self.staged.policy(name) for name in _segmented(longest)]
        policies += self.singles if self.memory.casts else ()
        least = 2**60
        for policy in policies:
            if least < 2**60 and spent():
                break
            least = min(least, max(self.laid(stage, policy).peak for stage in stages))
        return least

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


def _segmented(longest: int) -> list[str]:
    """Policies of whole segments: every length up to 128, and of more layers a row of lengths."""
    lengths = list(range(2, min(longest, 128) + 1))
    while lengths and lengths[-1] < longest:
        lengths.append(min(longest, lengths[-1] * 3 // 2))
    return ["sqrt", *(f"uniform:{n}" for n in lengths)]


_METHOD = "one moment at a time, and a search from the last layer"


def _shape_text(stage: Stage) -> str:
    return " + ".join(f"{count} {name}" for name, count, _ in stage.shape)
