"""The cheapest plan for a whole stack that fits a budget, proven.

Peak models (K, W as in :mod:`actcalc.solve.problem`; m = micro-batches in flight):

- ``stored``: const + sum m K
- ``stored+working``: const + sum m K + max W
- ``timeline``: for every layer l, const + sum over all (m - 1) K + sum_{j <= l} K_j + W_l. Backward
  runs last layer first, so the layers after l are already freed for the oldest micro-batch.
- where tensors are offloaded (:mod:`actcalc.plan.offload`), ``stored+working`` also counts the
  largest bytes any layer moves, for the layer whose copies are under way.
- ``stored+working+segments``: as ``stored+working``, and consecutive layers may form a chain that
  stores the input of its first layer alone, is re-run whole, and works with everything it re-makes
  (Chen et al. 2016, section 4). See :class:`Chain`.

Each is a multiple-choice knapsack with something on top: ``stored`` is one knapsack; with a working
set, intervals of its largest allowed value are searched best-first, a relaxed knapsack bounding
each; ``timeline`` is relaxed to its last layer and, where that plan does not hold, decided by
dynamic programming from the last layer backward; segments are a shortest path with a resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from actcalc.errors import SpecError
from actcalc.solve.beside import Beside, beside_of
from actcalc.solve.chained import chain_path, chained, uniform_parts
from actcalc.solve.clock import give_up, limited, spent
from actcalc.solve.fit import least_peak, solve_stage
from actcalc.solve.knapsack import Mix
from actcalc.solve.layers import Answer, LayerGroup, Stack, problem_groups
from actcalc.solve.options import Menu, OptionSet
from actcalc.solve.order import menu as menu_of_pairs
from actcalc.solve.plans import (
    Certificate,
    Plan,
    PlanGroup,
    TradeOff,
    assemble,
    infeasible,
    plan_group,
)
from actcalc.solve.problem import LIMIT, PeakModel, Problem, check_int
from actcalc.solve.segments import Step
from actcalc.solve.stage import StageProblem, Way, Ways, line
from actcalc.solve.unordered import least_of, moved_levels, offloading, unordered


def solve(problem: Problem, *, same: Iterable[str] = (), seconds: float | None = None) -> Plan:
    """The cheapest plan of ``problem``, with a proof; or the smallest budget that has one.

    ``same`` names layer kinds whose layers must all take the same option. After ``seconds`` (None:
    however long it takes) it is the best plan found, with the bound that is proven by then.
    """
    with limited(seconds):
        return solve_groups(
            problem_groups(problem, same=same),
            inflight=problem.inflight,
            const_bytes=beside_of(problem),
            budget_bytes=problem.budget_bytes,
            peak_model=problem.peak_model,
            max_segment=problem.max_segment,
        )


def solve_groups(
    groups: Sequence[LayerGroup],
    *,
    inflight: int,
    const_bytes: int | Beside,
    budget_bytes: int,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> Plan:
    """The cheapest choice of one option per layer that fits, for any option sets.

    The general entry: options may be a layer's exact frontier or a handful of named policies.
    ``groups`` are in forward order, which matters to ``timeline`` and to chains. ``const_bytes`` is
    everything else in memory: one number, or a :class:`actcalc.solve.beside.Beside` that tells the
    moments of a step apart.

    Raises:
        SpecError: a number out of range, no groups, or sums too large for 64-bit integers.
    """
    stack = Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
    return _solve(stack, check_int(budget_bytes, "budget_bytes"))


def solve_shared(
    groups: Sequence[LayerGroup],
    holders: Sequence[tuple[int | Beside, int]],
    *,
    budget_bytes: int,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> Plan:
    """The cheapest choice for ``groups`` that fits every GPU that follows it.

    ``holders`` are (constant bytes, micro-batches in flight) of each GPU. All hold the same plan:
    what may be stored is the least of what each leaves, for every size of the working set. Bytes of
    the plan are of one micro-batch.

    Raises:
        SpecError: as :func:`solve_groups`; or the peak model follows the order of layers.
    """
    if peak_model == "timeline":
        raise SpecError(
            "one plan for several GPUs is solved for stored bytes and working sets",
            hint="use the memory model stored+working",
        )
    Stack.of(groups, max(m for _, m in holders), 0, peak_model, max_segment)
    stack = replace(
        Stack.of(groups, 1, 0, peak_model, max_segment),
        holders=tuple((Beside.of(other), m) for other, m in holders),
    )
    return _solve(stack, check_int(budget_bytes, "budget_bytes"))


def smallest_budget(
    groups: Sequence[LayerGroup],
    *,
    inflight: int,
    const_bytes: int | Beside,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> int:
    """The least budget in bytes for which :func:`solve_groups` finds a plan.

    Raises:
        SpecError: as :func:`solve_groups`.
    """
    return _smallest(Stack.of(groups, inflight, const_bytes, peak_model, max_segment))


def trade_off(
    groups: Sequence[LayerGroup],
    budgets: Iterable[int],
    *,
    inflight: int,
    const_bytes: int | Beside,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> list[TradeOff]:
    """The exact optimum at each budget, in rising order of budgets: cost never rises.

    Raises:
        SpecError: as :func:`solve_groups`.
    """
    stack = Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
    points: list[TradeOff] = []
    least: int | None = None
    for budget in sorted(check_int(b, "budget_bytes") for b in budgets):
        if least is None:
            least = _smallest(stack)
        plan = infeasible(peak_model, budget, least) if budget < least else _solve(stack, budget)
        points.append(TradeOff(budget, plan))
    return points


def even_budgets(
    groups: Sequence[LayerGroup],
    count: int,
    *,
    inflight: int,
    const_bytes: int | Beside,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> list[int]:
    """``count`` evenly spaced budgets, from the smallest with a plan to the first that costs least.

    Raises:
        SpecError: as :func:`solve_groups`, or ``count`` is below 1.
    """
    check_int(count, "number of budgets", low=1, high=1_000_000)
    stack = Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
    low = _smallest(stack)
    free = _solve(stack, LIMIT - 1).peak_bytes
    high = max(low, free if free is not None else low)
    if count == 1:
        return [high]
    return [low + (high - low) * i // (count - 1) for i in range(count)]


def _solve(stack: Stack, budget: int) -> Plan:
    if stack.moves and stack.model not in ("stored", "stored+working"):
        raise SpecError(
            f"offload is not planned in the memory model {stack.model}", hint="use stored+working"
        )
    with limited() as effort:
        answer = _answered(stack, budget)
    if answer is None:
        return infeasible(stack.model, budget, _smallest(stack))
    lower = answer.cost if answer.lower is None else answer.lower
    if not effort.complete:
        lower = min(lower, answer.bound)
    if any(g.options.loose for g in stack.groups):
        lower = min(lower, _loose_bound(stack, budget))
        answer = answer._replace(bound=min(answer.bound, lower))
    owner = [g for g in stack.groups for _ in range(g.count)]
    units: list[tuple[PlanGroup, int]] = []
    made: dict[tuple[Any, ...], PlanGroup] = {}
    at = 0
    for step in answer.units:
        members = owner[at : at + step.layers]
        at += step.layers
        key = (step, *(g.name for g in members))
        if key not in made:
            made[key] = plan_group(members, step)
        units.append((made[key], stack.weight(members[0])))
    return assemble(
        units,
        const_bytes=stack.beside if len(stack.holders) == 1 else 0,
        budget_bytes=budget,
        peak_model=stack.model,
        lower_bound=lower,
        certificate=Certificate(answer.method, min(answer.bound, answer.cost), answer.states),
    )


def _answered(stack: Stack, budget: int) -> Answer | None:
    """The cheapest plan found; None if none fits."""
    room = stack.room(budget)
    if room(0) < 0:
        return None
    if stack.model == "timeline":
        return _timeline(stack, budget)
    if stack.model == "stored+working+segments":
        return chained(stack, room)
    if stack.model == "stored+working" and stack.moves:
        return offloading(stack, budget)
    return unordered(stack, room, working=stack.model == "stored+working")


def _loose_bound(stack: Stack, budget: int) -> int:
    """What no plan beats where ways to run a layer were left out.

    The parts of a layer are chosen each by itself, and only stored bytes count; of a layer with all
    its ways their own frontier is the part. Chains of layers store less: of them nothing is known.
    """
    if stack.model == "stored+working+segments":
        return 0
    parts: list[tuple[Menu, int, int]] = []
    for group in stack.groups:
        columns = group.options.loose or ((group.options.columns[0], group.options.columns[2]),)
        for stored, cost in columns:
            menu = menu_of_pairs(stored, cost, 1)
            parts.append((menu, group.count, 1 if group.same else stack.weight(group)))
    bound = Mix(parts).bound(max(0, stack.room(budget)(0)))
    return 0 if bound is None else bound


def _smallest(stack: Stack) -> int:
    if stack.model == "timeline":
        return min(
            least_peak(stage_problem(stack, _fixed(stack, choice)))[0]
            for _, choice in _fixings(stack)
        )
    if stack.model == "stored+working+segments" and not any(g.same for g in stack.groups):
        return chain_path(stack).least_peak(stack.shared.peak)
    if stack.model == "stored+working+segments":
        parts = uniform_parts(stack)
    else:
        parts = [(options, n, m) for _, options, n, m in stack.merged()]
    if stack.model == "stored":
        return stack.shared.peak(sum(n * m * min(o.stored) for o, n, m in parts), None)
    return min(
        x + least_of([(options.moving(x), n, m) for options, n, m in parts], stack.shared)
        for x in moved_levels([options for options, _, _ in parts])
    )


MAX_FIXINGS = 50_000
"""Most combinations of one-option-per-kind that the timeline model tries."""


def _fixings(stack: Stack) -> list[tuple[int, dict[str, int]]]:
    # Every choice for the kinds that take one option, with a bound on its cost, cheapest first.
    layers: dict[str, int] = {}
    kinds: dict[str, OptionSet] = {}
    free = 0
    for g in stack.groups:
        if g.same:
            kinds[g.name] = g.options
            layers[g.name] = layers.get(g.name, 0) + g.count
        else:
            free += g.count * min(g.options.cost)
    if prod(len(o) for o in kinds.values()) > MAX_FIXINGS:
        raise SpecError(
            "too many combinations of one option per kind "
            f"({' x '.join(str(len(o)) for o in kinds.values())})",
            hint="use the memory model stored+working, or named policies as options",
        )
    found = [
        (
            free + sum(kinds[k].cost[i] * layers[k] for k, i in zip(kinds, choice, strict=True)),
            dict(zip(kinds, choice, strict=True)),
        )
        for choice in product(*(range(len(o)) for o in kinds.values()))
    ]
    return sorted(found, key=lambda f: f[0])


def _fixed(stack: Stack, choice: dict[str, int]) -> tuple[LayerGroup, ...]:
    return tuple(
        replace(g, options=g.options.only(choice[g.name])) if g.same else g for g in stack.groups
    )


def _timeline(stack: Stack, budget: int) -> Answer | None:
    best: Answer | None = None
    relaxed: int | None = None
    for bound, choice in _fixings(stack):
        if best is not None and bound >= best.cost:
            break
        if best is not None and spent():
            give_up()
            relaxed = bound if relaxed is None else min(relaxed, bound)
            break
        problem = stage_problem(stack, _fixed(stack, choice))
        found = solve_stage(problem, budget, below=None if best is None else best.cost)
        if found is None:
            continue
        relaxed = found.relaxed if relaxed is None else min(relaxed, found.relaxed)
        if found.choice is None:
            continue
        picks = [ways.ways[i].payload for ways, i in zip(problem.layers[0], found.choice[0],
                 strict=True)]  # fmt: skip
        owners = (g for g in stack.groups for _ in range(g.count))
        steps = [
            Step(1, choice[g.name] if g.same else i) for g, i in zip(owners, picks, strict=True)
        ]
        best = Answer(found.cost, steps, 0, found.states, _BY_MOMENTS, found.bound)
    return best if best is None or relaxed is None else best._replace(bound=min(relaxed, best.cost))


_BY_MOMENTS = "one moment at a time, and a search from the last layer"


def stage_problem(stack: Stack, groups: Sequence[LayerGroup]) -> StageProblem:
    """The stack as a stage of one chunk, whose layers work in backward alone."""
    weights = {stack.weight(group) for group in groups}
    if len(weights) > 1:
        raise SpecError(
            "the timeline model follows one chunk of layers; these hold different micro-batches",
            hint="use the memory model stored+working",
        )
    layers = tuple(_ways(group) for group in groups for _ in range(group.count))
    return StageProblem((layers,), (line(weights.pop(), stack.beside.head),))


def _ways(group: LayerGroup) -> Ways:
    if "ways" not in group.options.scratch:
        columns = (group.options.stored, group.options.working, group.options.cost)
        group.options.scratch["ways"] = Ways(
            (Way(k, k, k + w, c, i) for i, (k, w, c) in enumerate(zip(*columns, strict=True))),
            grain=group.options.grain,
        )
    found: Ways = group.options.scratch["ways"]
    return found
