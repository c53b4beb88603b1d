"""A planner of equal layers measured from a module of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, permutations
from typing import TYPE_CHECKING

from actcalc.errors import SpecError
from actcalc.plan.measured.ops import MeasuredOps, measured_ops, plan_layer_of
from actcalc.plan.options import Costs, ModuleChoice
from actcalc.plan.settings import PlanSettings
from actcalc.solve.heuristics import greedy, sqrt
from actcalc.solve.layers import LayerGroup, layer_options
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.plans import Plan
from actcalc.solve.problem import MAX_LAYERS, PeakModel, Problem
from actcalc.solve.segments import Chain
from actcalc.solve.stack import smallest_budget, solve_groups

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

_DEPTH = 2
"""Modules nested deeper are not wrapped by plans of whole modules."""
_MOST_MODULES = 10
"""Modules that plans of whole modules choose from; of more, those that free most."""


class LayerPlanner:
    """Plans the recomputation of ``count`` equal measured layers for any memory budget.

    ``options`` replaces the ways to run a layer that the semantics has, by those of a target that
    can execute others. Raises ``SpecError`` for settings that exclude each other, and for a file
    without ops.
    """

    def __init__(
        self,
        layer: MeasuredLayer,
        count: int = 1,
        settings: PlanSettings | None = None,
        options: Callable[[MeasuredOps], OptionSet] | None = None,
    ) -> None:
        if not 1 <= count <= MAX_LAYERS:
            raise SpecError(f"layers is {count}", f"give 1 to {MAX_LAYERS}")
        self.settings = settings or PlanSettings()
        if self.settings.method != "optimal" and self.settings.semantics == "module":
            raise SpecError(
                f"--method {self.settings.method} chooses single ops, not modules",
                "drop --semantics module",
            )
        self.layer, self.count = layer, count
        self.ops = measured_ops(layer, count)
        self.special = options

    @property
    def costs(self) -> Costs:
        """What its whole numbers of cost stand for."""
        return self.ops.rates

    @property
    def peak_model(self) -> PeakModel:
        """The planner's name of the memory model; segments of layers are part of ``module``."""
        model = self.settings.memory_model
        segmented = self.settings.semantics == "module" and model == "stored+working"
        return "stored+working+segments" if segmented and self.special is None else model

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers with their options."""
        chain = None
        if self.special is not None:
            options = self.special(self.ops)
        elif self.settings.semantics == "minimal":
            options = layer_options(plan_layer_of(self.ops))
        else:
            options = OptionSet.of([module_option(self.ops, chosen) for chosen in self.modules])
            full = module_option(self.ops, ("",))
            if self.peak_model == "stored+working+segments":
                chain = Chain(full.stored, 0, full.working, full.cost, full.payload.recompute, ())
        return (LayerGroup(self.layer.name, options, self.count, chain=chain),)

    @cached_property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """Every set of wrapped modules that plans of whole modules choose from."""
        paths = [run.path for run in self.layer.modules if run.path.count(".") < _DEPTH]
        freed = {path: self._freed(path) for path in paths if path}
        useful = [path for path, bytes_freed in freed.items() if bytes_freed > 0]
        if len(useful) > _MOST_MODULES:
            most = sorted(useful, key=lambda path: -freed[path])[:_MOST_MODULES]
            useful = [path for path in useful if path in most]
        chosen = [s for n in range(len(useful) + 1) for s in combinations(useful, n)]
        return (*(s for s in chosen if not _nested(s)), ("",))

    def _freed(self, path: str) -> int:
        """Bytes saved inside a module that are none of its inputs: what wrapping it can free."""
        run = next(run for run in self.layer.modules if run.path == path)
        return sum(
            storage.bytes
            for storage in self.layer.storages
            if storage.id not in run.inputs
            and any(_inside(saver.module, path) for saver in storage.saved_by)
        )

    def plan(self, budget: int) -> Plan:
        """The plan within ``budget`` bytes for the activations."""
        if self.settings.method != "optimal":
            method = sqrt if self.settings.method == "sqrt" else greedy
            return method(self._problem(budget))
        return solve_groups(
            self.groups,
            inflight=1,
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
            max_segment=self.count,
        )

    def _problem(self, budget: int) -> Problem:
        layer = plan_layer_of(self.ops, input_stored=self.settings.method == "sqrt")
        return Problem(
            layer_types={self.layer.name: layer},
            stack=((self.layer.name, self.count),),
            inflight=1,
            const_bytes=0,
            budget_bytes=budget,
            peak_model=self.peak_model,
        )

    @cached_property
    def smallest(self) -> int:
        """The least memory in bytes with a plan, by the exact method."""
        return smallest_budget(
            self.groups,
            inflight=1,
            const_bytes=0,
            peak_model=self.peak_model,
            max_segment=self.count,
        )

    @cached_property
    def free(self) -> int:
        """The least memory in bytes found with the cheapest plan."""
        return self.plan(2**59).peak_bytes or 0


def _inside(path: str, module: str) -> bool:
    from actcalc.measure.layer import inside

    return inside(path, module)


def _nested(paths: Sequence[str]) -> bool:
    return any(_inside(one, other) for one, other in permutations(paths, 2))


def module_option(ops: MeasuredOps, modules: tuple[str, ...]) -> Option:
    """One layer with these modules wrapped in checkpoints, each re-run whole ("": all of it)."""
    stored = ops.layer.stored(modules)
    kept = {storage.id for storage in stored}
    again = [
        index
        for index, op in enumerate(ops.layer.ops)
        if any(_inside(op.module, path) for path in modules)
    ]
    name = "+".join(modules) if any(modules) else "full" if modules else "none"
    return Option(
        sum(storage.bytes for storage in stored),
        ops.bytes_of(ops.saved - kept),
        sum(ops.costs[index] for index in again),
        ModuleChoice(name, tuple(ops.names[index] for index in again), ()),
    )
