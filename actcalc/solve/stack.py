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

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actcalc.errors import SpecError
from actcalc.solve.frontier import LayerOption, layer_frontier
from actcalc.solve.knapsack import Found, Option, OptionSet, Picks, mix_of
from actcalc.solve.levels import Relaxed, search_levels
from actcalc.solve.problem import (
    LIMIT,
    PeakModel,
    PlanLayer,
    Problem,
    check_int,
    check_peak_model,
)
from actcalc.solve.rest import Rest, Room, rest_of
from actcalc.solve.segments import Chain, ChainPath, Position, Step
from actcalc.solve.timeline import least_peak, solve_in_order, timeline_peak


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A run of equal layers of the stack.

    ``same``: every layer of this ``name`` must take the same option (and, with segments, every run
    is either single layers or chains of one length, the last one shorter). ``chain``: how these
    layers behave inside a chain, None if they may not. ``inflight`` overrides the number of
    micro-batches in flight for this run (chunks of an interleaved pipeline).
    """

    name: str
    options: OptionSet
    count: int
    same: bool = False
    chain: Chain | None = None
    inflight: int | None = None


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """Consecutive layers that run alike, in stack order.

    ``count`` counts layers. ``stored_bytes``, ``working_bytes`` and ``cost`` are those of one
    layer and one micro-batch, or of one chain of ``segment`` layers where ``segment > 1``;
    ``segments`` says how many such units there are. ``payload`` is what a ready-made option stood
    for; ``recompute`` and ``kept`` name ops and tensors of a layer graph (the input is not listed).
    ``offloaded`` tensors, ``moved_bytes`` in all, are in host memory between forward and backward.
    """

    layer_type: str
    count: int
    recompute: tuple[str, ...]
    kept: tuple[str, ...]
    stored_bytes: int
    working_bytes: int
    cost: int
    segment: int = 1
    segments: int = 0
    payload: Any = None
    offloaded: tuple[str, ...] = ()
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why ``lower_bound`` holds.

    ``relaxation_bound`` is what the relaxation alone proves (convex hull, and its best multiplier);
    the rest of the gap was closed by exhausting every plan below ``lower_bound``, which took
    looking at ``states`` partial plans.
    """

    method: str
    relaxation_bound: int
    states: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to re-run and keep in every layer, and what it costs.

    ``lower_bound <= cost`` holds for every plan that fits; equal when ``optimal``. Where costs have
    a grain (:class:`actcalc.solve.problem.PlanLayer`) it holds in whole grains.
    ``stored_bytes`` counts every micro-batch in flight, ``peak_bytes`` also the rest.
    When infeasible, everything is None but ``smallest_budget_bytes``, the least budget with a plan
    (None for a comparison method that knows only its own plans).
    """

    feasible: bool
    optimal: bool
    cost: int | None
    lower_bound: int | None
    stored_bytes: int | None
    peak_bytes: int | None
    groups: tuple[PlanGroup, ...]
    peak_model: PeakModel
    budget_bytes: int
    smallest_budget_bytes: int | None = None
    certificate: Certificate | None = None


class TradeOff(NamedTuple):
    """One point of the whole-stack trade-off: a budget and the cheapest plan within it."""

    budget_bytes: int
    plan: Plan

    @property
    def cost(self) -> int | None:
        """Cost of the plan; None if nothing fits."""
        return self.plan.cost


@lru_cache(maxsize=256)
def layer_options(layer: PlanLayer) -> OptionSet:
    """The exact option set of a layer kind, cached.

    Raises:
        SpecError: see :func:`actcalc.solve.frontier.layer_frontier`.
    """
    return OptionSet.from_frontier(layer_frontier(layer))


def layer_chain(layer: PlanLayer) -> Chain:
    """How ``layer`` behaves inside a chain that is re-run whole.

    Every op that may be re-run is; outputs of forbidden ops stay stored where needed, so a chain
    stores the first layer's input plus those.
    """
    every = layer_frontier(layer).everything
    return Chain(
        head_bytes=layer.input_bytes,
        extra_bytes=every.stored - layer.input_bytes,
        working_bytes=every.working,
        cost=every.cost,
        recompute=every.recompute,
        kept=every.kept,
    )


def problem_groups(problem: Problem, *, same: Iterable[str] = ()) -> tuple[LayerGroup, ...]:
    """The stack of ``problem`` as runs with exact options; kinds in ``same`` take one option each.

    Raises:
        SpecError: ``same`` names an unknown kind.
    """
    same = frozenset(same)
    unknown = same - set(problem.layer_types)
    if unknown:
        raise SpecError(
            f"same option asked for unknown layer types {sorted(unknown)}",
            hint=f"known: {sorted(problem.layer_types)}",
        )
    segments = problem.peak_model == "stored+working+segments"
    groups: list[LayerGroup] = []
    for kind, count in problem.stack:
        layer = problem.layer_types[kind]
        chain = layer_chain(layer) if segments else None
        groups.append(LayerGroup(kind, layer_options(layer), count, kind in same, chain))
    return tuple(groups)


def solve(problem: Problem, *, same: Iterable[str] = ()) -> Plan:
    """The cheapest plan of ``problem``, with a proof; or the smallest budget that has one.

    ``same`` names layer kinds whose layers must all take the same option.
    """
    return solve_groups(
        problem_groups(problem, same=same),
        inflight=problem.inflight,
        const_bytes=rest_of(problem),
        budget_bytes=problem.budget_bytes,
        peak_model=problem.peak_model,
        max_segment=problem.max_segment,
    )


def solve_groups(
    groups: Sequence[LayerGroup],
    *,
    inflight: int,
    const_bytes: int | Rest,
    budget_bytes: int,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> Plan:
    """The cheapest choice of one option per layer that fits, for any option sets.

    The general entry: options may be a layer's exact frontier or a handful of named policies.
    ``groups`` are in forward order, which matters to ``timeline`` and to chains. ``const_bytes`` is
    everything else in memory: one number, or a :class:`actcalc.solve.rest.Rest` that tells the
    moments of a step apart.

    Raises:
        SpecError: a number out of range, no groups, or sums too large for 64-bit integers.
    """
    stack = _Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
    return _solve(stack, check_int(budget_bytes, "budget_bytes"))


def solve_shared(
    groups: Sequence[LayerGroup],
    holders: Sequence[tuple[int | Rest, int]],
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
    _Stack.of(groups, max(m for _, m in holders), 0, peak_model, max_segment)
    stack = replace(
        _Stack.of(groups, 1, 0, peak_model, max_segment),
        holders=tuple((Rest.of(other), m) for other, m in holders),
    )
    return _solve(stack, check_int(budget_bytes, "budget_bytes"))


def smallest_budget(
    groups: Sequence[LayerGroup],
    *,
    inflight: int,
    const_bytes: int | Rest,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> int:
    """The least budget in bytes for which :func:`solve_groups` finds a plan.

    Raises:
        SpecError: as :func:`solve_groups`.
    """
    return _smallest(_Stack.of(groups, inflight, const_bytes, peak_model, max_segment))


def trade_off(
    groups: Sequence[LayerGroup],
    budgets: Iterable[int],
    *,
    inflight: int,
    const_bytes: int | Rest,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> list[TradeOff]:
    """The exact optimum at each budget, in rising order of budgets: cost never rises.

    Raises:
        SpecError: as :func:`solve_groups`.
    """
    stack = _Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
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
    const_bytes: int | Rest,
    peak_model: PeakModel,
    max_segment: int = 1,
) -> list[int]:
    """``count`` evenly spaced budgets, from the smallest with a plan to the first that costs least.

    Raises:
        SpecError: as :func:`solve_groups`, or ``count`` is below 1.
    """
    check_int(count, "number of budgets", low=1, high=1_000_000)
    stack = _Stack.of(groups, inflight, const_bytes, peak_model, max_segment)
    low = _smallest(stack)
    free = _solve(stack, LIMIT - 1).peak_bytes
    high = max(low, free if free is not None else low)
    if count == 1:
        return [high]
    return [low + (high - low) * i // (count - 1) for i in range(count)]


@dataclass(frozen=True)
class _Stack:
    groups: tuple[LayerGroup, ...]
    inflight: int
    model: PeakModel
    max_segment: int
    holders: tuple[tuple[Rest, int], ...]

    @property
    def rest(self) -> Rest:
        """What else is in memory, where one GPU follows the plan."""
        return self.holders[0][0]

    def with_chains(self) -> _Stack:
        """The same with the rest that is beside plans with chains."""
        return replace(self, holders=tuple((rest.of_chains(), m) for rest, m in self.holders))

    def staying(self) -> _Stack:
        """The same without offload."""
        groups = tuple(replace(g, options=g.options.moving(0)) for g in self.groups)
        return replace(self, groups=groups)

    def without_chains(self) -> _Stack:
        """The same for plans of single layers."""
        return replace(self, model="stored+working")

    def room(self, budget: int) -> Callable[[int], int]:
        """Bytes that may be stored within ``budget``, by the largest working set."""
        return self.shared.within(budget, working=self.model not in ("stored", "timeline"))

    @property
    def shared(self) -> Room:
        """What the GPUs of this plan leave for stored bytes, weighed as in ``merged``."""
        return Room(self.holders)

    @classmethod
    def of(
        cls,
        groups: Sequence[LayerGroup],
        inflight: int,
        const: int | Rest,
        model: PeakModel,
        max_segment: int,
    ) -> _Stack:
        check_int(inflight, "inflight", low=1, high=1_000_000)
        check_int(max_segment, "max_segment", low=1)
        check_peak_model(model)
        if not groups:
            raise SpecError("no layers to plan", hint="give at least one group of layers")
        held = cost = 0
        sets: dict[str, OptionSet] = {}
        for g in groups:
            check_int(g.count, f"count of {g.name!r}", low=1)
            m = inflight if g.inflight is None else g.inflight
            check_int(m, f"inflight of {g.name!r}", low=1, high=1_000_000)
            held += g.count * (m * max(g.options.stored) + max(g.options.working))
            cost += g.count * max(g.options.cost)
            if sets.setdefault(g.name, g.options) is not g.options:
                raise SpecError(
                    f"two groups called {g.name!r} have different options",
                    hint="pass the same option set, or use two names",
                )
        if held >= LIMIT or cost >= LIMIT:
            raise SpecError(
                f"bytes in flight ({held}) or costs ({cost}) reach 2**60",
                hint="check the sizes, or state costs in a coarser unit",
            )
        return cls(tuple(groups), inflight, model, max_segment, ((Rest.of(const), 1),))

    @property
    def moves(self) -> bool:
        """Whether any layer may offload tensors."""
        return any(g.options.moved_levels[-1] for g in self.groups)

    def weight(self, group: LayerGroup) -> int:
        return self.inflight if group.inflight is None else group.inflight

    def merged(self) -> list[tuple[list[int], OptionSet, int, int]]:
        """(indices of groups, options, layers, weight) where the order of layers is irrelevant."""
        found: dict[tuple[str | int, int, bool], list[int]] = {}
        for i, g in enumerate(self.groups):
            # Kinds with one option set are one kind here: telling them apart only makes ties.
            kind = g.name if g.same else id(g.options)
            found.setdefault((kind, 0 if g.same else self.weight(g), g.same), []).append(i)
        parts: list[tuple[list[int], OptionSet, int, int]] = []
        for (_, weight, same), members in found.items():
            options = self.groups[members[0]].options
            if same:
                # One decision for all: its bytes weigh with every layer's micro-batches.
                layers = sum(self.groups[i].count for i in members)
                total = sum(self.groups[i].count * self.weight(self.groups[i]) for i in members)
                parts.append((members, options.together(layers, total), 1, 1))
            else:
                parts.append((members, options, sum(self.groups[i].count for i in members), weight))
        return parts


class _Answer(NamedTuple):
    cost: int
    units: list[Step]
    bound: int
    states: int
    method: str


def _solve(stack: _Stack, budget: int) -> Plan:
    if stack.moves and stack.model not in ("stored", "stored+working"):
        raise SpecError(
            f"offload is not planned in the memory model {stack.model}", hint="use stored+working"
        )
    room = stack.room(budget)
    answer: _Answer | None = None
    if room(0) >= 0:
        if stack.model == "timeline":
            answer = _timeline(stack, budget)
        elif stack.model == "stored+working+segments":
            answer = _chained(stack, budget)
        elif stack.model == "stored+working" and stack.moves:
            answer = _offloading(stack, budget)
        else:
            answer = _unordered(stack, room, working=stack.model == "stored+working")
    if answer is None:
        return infeasible(stack.model, budget, _smallest(stack))
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
        const_bytes=stack.rest if len(stack.holders) == 1 else 0,
        budget_bytes=budget,
        peak_model=stack.model,
        lower_bound=answer.cost,
        certificate=Certificate(answer.method, min(answer.bound, answer.cost), answer.states),
    )


def assemble(
    units: Sequence[tuple[PlanGroup, int]],
    *,
    const_bytes: int | Rest,
    budget_bytes: int,
    peak_model: PeakModel,
    lower_bound: int | None,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan made of single layers and chains, each with its micro-batches in flight.

    ``units`` are in stack order. The plan is optimal if its cost equals ``lower_bound``; where it
    does not fit it is infeasible, and ``smallest_budget_bytes`` is its own peak.
    """
    weights = [m for _, m in units]
    held = sum(u.stored_bytes * m for u, m in units)
    rest = Rest.of(const_bytes)
    if any(u.segment > 1 or u.moved_bytes for u, _ in units):
        rest = rest.of_chains()
    working = [u.working_bytes for u, _ in units]
    if peak_model == "timeline":
        stored = [u.stored_bytes for u, _ in units]
        sizes = [u.segment for u, _ in units]
        peak = timeline_peak(stored, working, weights, rest, layers=sizes)
    elif peak_model == "stored":
        peak = rest.peak(held, None)
    else:
        peak = rest.peak(held, max(working) + max(u.moved_bytes for u, _ in units))
    if peak > budget_bytes:
        return infeasible(peak_model, budget_bytes, peak)
    runs = [(unit, sum(1 for _ in same)) for unit, same in groupby(u for u, _ in units)]
    cost = sum(u.cost for u, _ in units)
    return Plan(
        feasible=True,
        optimal=cost == lower_bound,
        cost=cost,
        lower_bound=lower_bound,
        stored_bytes=held,
        peak_bytes=peak,
        groups=tuple(replace(u, count=u.count * n, segments=n) for u, n in runs),
        peak_model=peak_model,
        budget_bytes=budget_bytes,
        certificate=certificate,
    )


def plan_group(members: Sequence[LayerGroup], unit: Step) -> PlanGroup:
    """One single layer, or one chain of ``members``, as a group of the plan."""
    first = members[0]
    if unit.option is not None:
        options = first.options
        source = options.source(unit.option)
        exact = isinstance(source, LayerOption)
        return PlanGroup(
            layer_type=first.name,
            count=1,
            recompute=source.recompute if isinstance(source, LayerOption) else (),
            kept=source.kept if isinstance(source, LayerOption) else (),
            stored_bytes=options.stored[unit.option],
            working_bytes=options.working[unit.option],
            cost=options.cost[unit.option],
            segments=1,
            payload=None if exact or not isinstance(source, Option) else source.payload,
            offloaded=source.offloaded if isinstance(source, LayerOption) else (),
            moved_bytes=options.moved[unit.option],
        )
    chains = [g.chain for g in members if g.chain is not None]
    names = [g.name for g in members]
    one_kind = len(set(names)) == 1
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])

    def named(lists: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
        for name, entries in lists:
            yield from entries if one_kind else (f"{name}.{entry}" for entry in entries)

    distinct = {g.name: g.chain for g in members if g.chain is not None}
    return PlanGroup(
        layer_type=names[0] if one_kind else "+".join(f"{n} {name}" for name, n in runs),
        count=len(members),
        recompute=tuple(named((n, c.recompute) for n, c in distinct.items())),
        kept=tuple(named((n, c.kept) for n, c in distinct.items())),
        stored_bytes=chains[0].head_bytes + sum(c.extra_bytes for c in chains),
        working_bytes=sum(c.working_bytes for c in chains) + sum(c.head_bytes for c in chains[1:]),
        cost=sum(c.cost for c in chains),
        segment=len(members),
        segments=1,
    )


def infeasible(peak_model: PeakModel, budget_bytes: int, smallest_bytes: int) -> Plan:
    """The plan that says nothing fits ``budget_bytes``, and what would."""
    return Plan(
        feasible=False,
        optimal=False,
        cost=None,
        lower_bound=None,
        stored_bytes=None,
        peak_bytes=None,
        groups=(),
        peak_model=peak_model,
        budget_bytes=budget_bytes,
        smallest_budget_bytes=smallest_bytes,
    )


def _unordered(stack: _Stack, room: Callable[[int], int], *, working: bool) -> _Answer | None:
    merged = stack.merged()
    parts = [(options, n, m) for _, options, n, m in merged]
    found = best_mix(parts, room, working=working)
    if found is None:
        return None
    solved, bound = found
    units = _spread(stack, merged, solved.picks)
    return _Answer(solved.cost, units, bound, solved.states, "hull bound and core search")


_Merged = list[tuple[list[int], OptionSet, int, int]]


def _spread(stack: _Stack, merged: _Merged, picked: Picks) -> list[Step]:
    """The options picked for merged layers, dealt out to the layers in stack order."""
    chosen: list[list[int]] = [[] for _ in stack.groups]
    for (members, options, _, _), picks in zip(merged, picked, strict=True):
        base = stack.groups[members[0]].options
        if stack.groups[members[0]].same:
            index = options.origin(picks[0][0])
            for i in members:
                chosen[i] = [index] * stack.groups[i].count
            continue
        # Less working memory toward the end of the stack: the order backward would choose.
        layers = sorted(
            (index for index, n in picks for _ in range(n)), key=lambda i: -base.working[i]
        )
        for i in members:
            chosen[i], layers = layers[: stack.groups[i].count], layers[stack.groups[i].count :]
    return [Step(1, i) for per_group in chosen for i in per_group]


def _offloading(stack: _Stack, budget: int) -> _Answer | None:
    """The best plan with offload, or, where the rest beside it is more, without."""
    wide = stack.with_chains()
    found = _moving(wide, budget)
    if wide.holders == stack.holders:
        return found
    stays = stack.staying()
    other = _unordered(stays, stack.room(budget), working=True)
    if other is not None:
        sets = [(g.options, s.options) for g, s in zip(stack.groups, stays.groups, strict=True)
                for _ in range(g.count)]  # fmt: skip
        units = [
            step if own is kept or step.option is None else Step(1, kept.origin(step.option))
            for step, (own, kept) in zip(other.units, sets, strict=True)
        ]
        other = other._replace(units=units)
    return _better(found, other)


def _better(first: _Answer | None, second: _Answer | None) -> _Answer | None:
    """The cheaper of two answers that together are all plans."""
    if first is None or second is None:
        return first or second
    best = min(first, second, key=lambda answer: answer.cost)
    bound = min(first.bound, second.bound)
    return best._replace(bound=bound, states=first.states + second.states)


def _moving(stack: _Stack, budget: int) -> _Answer | None:
    """As ``_unordered`` with a working set, and the most bytes any layer moves as one more level.

    The search over that level is the one over working sets again, around it.
    """
    merged = stack.merged()
    if any(stack.groups[members[0]].same for members, *_ in merged):
        raise SpecError("one option per kind cannot be planned with offload", "drop one of them")
    room = stack.room
    levels = _moved_levels([options for _, options, _, _ in merged])
    states = 0

    def parts(limit: int) -> list[tuple[OptionSet, int, int]]:
        return [(options.moving(limit), n, m) for _, options, n, m in merged]

    def bounded(high: int, left: int) -> int | None:
        return mix_bound(parts(high), room(left), working=True)

    def relaxed(high: int, left: int, below: int | None) -> Relaxed[Picks] | None:
        nonlocal states
        within = parts(high)
        found = best_mix(within, room(left), working=True, cutoff=below)
        if found is None:
            return None
        states += found[0].states
        picks = tuple(
            tuple((i if options is base else options.origin(i), n) for i, n in chosen)
            for (options, _, _), (_, base, _, _), chosen in zip(
                within, merged, found[0].picks, strict=True
            )
        )
        every = [
            (options, m, i, n)
            for (_, options, _, m), chosen in zip(merged, picks, strict=True)
            for i, n in chosen
        ]
        stored = sum(m * n * options.stored[i] for options, m, i, n in every)
        working = max(options.working[i] for options, _, i, _ in every)
        moved = max(options.moved[i] for options, _, i, _ in every)
        return Relaxed(found[0].cost, stack.shared.peak(stored, working), moved, picks)

    grain = max(options.grain for _, options, _, _ in merged)
    searched = search_levels(levels, lambda moved: budget - moved, bounded, relaxed, grain=grain)
    if searched is None:
        return None
    units = _spread(stack, merged, searched.best.plan)
    method = "hull bound and core search for the bytes moved"
    return _Answer(searched.best.cost, units, searched.bound, states, method)


def mix_bound(
    parts: Sequence[tuple[OptionSet, int, int]], room: Callable[[int], int], *, working: bool
) -> int | None:
    """A lower bound on what :func:`best_mix` finds; None if nothing fits."""
    levels = _levels(parts)
    common = math.gcd(*(m for _, _, m in parts))
    mix = mix_of([(options, n, m // common) for options, n, m in parts], levels[-1])
    least = levels[0] if working else 0
    return None if mix is None else mix.bound(room(least) // common)


def best_mix(
    parts: Sequence[tuple[OptionSet, int, int]],
    room: Callable[[int], int],
    *,
    working: bool,
    cutoff: int | None = None,
) -> tuple[Found, int] | None:
    """The cheapest mix with a sum of weights within ``room(largest working set)``, and a bound.

    Without ``working`` no working set counts. None if nothing fits, or nothing below ``cutoff``.

    The largest working set is found by :func:`actcalc.solve.levels.search_levels`.
    """
    levels = _levels(parts)
    # Stages that differ in micro-batches alone share everything derived from their layers.
    common = math.gcd(*(m for _, _, m in parts))
    light = [(options, n, m // common) for options, n, m in parts]
    if not working:
        mix = mix_of(light, levels[-1])
        bound = mix.bound(room(0) // common) if mix is not None else None
        if mix is None or bound is None:
            return None
        found = mix.solve(room(0) // common, cutoff)
        return None if found is None else (found, bound)
    states = 0

    def bounded(high: int, capacity: int) -> int | None:
        mix = mix_of(light, high)
        return None if mix is None else mix.bound(capacity // common)

    def relaxed(high: int, capacity: int, below: int | None) -> Relaxed[Picks] | None:
        nonlocal states
        mix = mix_of(light, high)
        found = None if mix is None else mix.solve(capacity // common, below)
        if found is None:
            return None
        states += found.states
        works = max(
            options.working[i]
            for (options, _, _), picks in zip(parts, found.picks, strict=True)
            for i, _ in picks
        )
        return Relaxed(found.cost, _weight(parts, found.picks), works, found.picks)

    grain = max(options.grain for options, _, _ in parts)
    searched = search_levels(levels, room, bounded, relaxed, cutoff, grain)
    if searched is None:
        return None
    best = searched.best
    return Found(best.cost, best.plan, states), searched.bound


def _weight(parts: Sequence[tuple[OptionSet, int, int]], picks: Picks) -> int:
    return sum(
        m * n * options.stored[i]
        for (options, _, m), chosen in zip(parts, picks, strict=True)
        for i, n in chosen
    )


def _levels(parts: Sequence[tuple[OptionSet, int, int]]) -> list[int]:
    sets = tuple({id(options): options for options, _, _ in parts}.values())
    cache = sets[0].scratch
    key = ("levels", tuple(id(s) for s in sets))
    if key not in cache:
        floor = max(s.levels[0] for s in sets)
        levels = sorted({w for s in sets for w in s.levels if w >= floor})
        # The sets are held beside their ids, so that no id is ever reused.
        cache[key] = (levels, sets)
    found: list[int] = cache[key][0]
    return found


def _smallest(stack: _Stack) -> int:
    if stack.model == "stored+working+segments":
        chains = stack.with_chains()
        if chains.holders != stack.holders:
            return min(_smallest(chains), _smallest(stack.without_chains()))
    if stack.model == "stored+working" and stack.moves:
        wide = stack.with_chains()
        if wide.holders != stack.holders:
            return min(_smallest(wide), _smallest(stack.staying()))
    if stack.model == "timeline":
        return min(
            least_peak(*_positions(_fixed(stack, choice), stack.inflight), stack.rest)
            for _, choice in _fixings(stack)
        )
    if stack.model == "stored+working+segments" and not any(g.same for g in stack.groups):
        return _chain_path(stack).least_peak(stack.shared.peak)
    if stack.model == "stored+working+segments":
        parts = _uniform_parts(stack)
    else:
        parts = [(options, n, m) for _, options, n, m in stack.merged()]
    if stack.model == "stored":
        return stack.shared.peak(sum(n * m * min(o.stored) for o, n, m in parts), None)
    return min(
        x + _least_peak([(options.moving(x), n, m) for options, n, m in parts], stack.shared)
        for x in _moved_levels([options for options, _, _ in parts])
    )


def _moved_levels(sets: Sequence[OptionSet]) -> list[int]:
    # Below the largest of the least some kind has no option at all.
    floor = max(options.moved_levels[0] for options in sets)
    return sorted({x for options in sets for x in options.moved_levels if x >= floor})


def _least_peak(parts: Sequence[tuple[OptionSet, int, int]], shared: Room) -> int:
    """The lowest stored + largest working bytes of any mix, on the fullest GPU."""
    levels = np.array(_levels(parts))
    stored = np.zeros_like(levels)
    for options, n, m in parts:
        stored += n * m * options.least_stored(levels)
    return min(map(shared.peak, stored.tolist(), levels.tolist()))


def _positions(groups: Sequence[LayerGroup], inflight: int) -> tuple[list[OptionSet], list[int]]:
    sets = [g.options for g in groups for _ in range(g.count)]
    weights = [
        inflight if g.inflight is None else g.inflight for g in groups for _ in range(g.count)
    ]
    return sets, weights


MAX_FIXINGS = 50_000
"""Most combinations of one-option-per-kind that the timeline model tries."""


def _fixings(stack: _Stack) -> list[tuple[int, dict[str, int]]]:
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


def _fixed(stack: _Stack, choice: dict[str, int]) -> tuple[LayerGroup, ...]:
    return tuple(
        replace(g, options=g.options.only(choice[g.name])) if g.same else g for g in stack.groups
    )


def _timeline(stack: _Stack, budget: int) -> _Answer | None:
    best: _Answer | None = None
    relaxed: int | None = None
    for bound, choice in _fixings(stack):
        if best is not None and bound >= best.cost:
            break
        groups = _fixed(stack, choice)
        below = None if best is None else best.cost
        answer = _ordered(groups, stack.inflight, budget, below, stack.rest)
        if answer is None:
            continue
        relaxed = answer.bound if relaxed is None else min(relaxed, answer.bound)
        if choice:
            steps = [
                Step(1, choice[g.name] if g.same else s.option)
                for g, s in zip(
                    (g for g in groups for _ in range(g.count)), answer.units, strict=True
                )
            ]
            answer = answer._replace(units=steps)
        best = answer
    return best if best is None or relaxed is None else best._replace(bound=min(relaxed, best.cost))


def _ordered(
    groups: Sequence[LayerGroup], inflight: int, budget: int, cutoff: int | None, rest: Rest
) -> _Answer | None:
    """Timeline: relax to one moment's own constraint, else search in order.

    Of each kind the last layer is tried (at equal bytes of its own, a later layer has more stored
    before it), the first (the rest may grow toward it), and the end of forward.
    """
    line = _Line(*_positions(groups, inflight), budget, rest)
    kinds: dict[tuple[int, int], list[int]] = {}
    for at, (options, m) in enumerate(zip(line.sets, line.weights, strict=True)):
        kinds.setdefault((id(options), m), []).append(at)
    lasts = [places[-1] for places in kinds.values()]
    firsts = [places[0] for places in kinds.values() if rest.layers]
    ends = [*sorted(lasts, reverse=True), *([len(line.sets), *firsts] if rest.layers else [])]
    ends = list(dict.fromkeys(ends))
    bound = 0
    for at in ends:
        found = line.relaxed_to(at, budget, cutoff)
        if found is None:
            return None
        answer, order = found
        bound = max(bound, answer.cost)
        if line.peak(order) <= budget:
            return answer
    # A plan for stored+working also fits the timeline: a first plan to beat.
    every = [(line.sets[s[0]], len(s), line.weights[s[0]]) for s in kinds.values()]
    simple = best_mix(every, line.unordered(), working=True, cutoff=cutoff)
    fallback: _Answer | None = None
    if simple is not None:
        order = _arrange(line.sets, list(kinds.values()), simple[0].picks)
        units = [Step(1, i) for i in order]
        fallback = _Answer(simple[0].cost, units, bound, simple[0].states, _IN_ORDER)
    for at in ends:
        tried = line.tightened(at, cutoff if fallback is None else fallback.cost)
        fallback = fallback if tried is None else tried._replace(bound=bound, method=_IN_ORDER)
    grain = max(options.grain for options in line.sets)
    if fallback is not None:
        cutoff = fallback.cost // grain * grain
    proven = cutoff is not None and cutoff <= bound // grain * grain
    better = None if proven else solve_in_order(line.sets, line.weights, budget, cutoff, rest)
    if better is None:
        return fallback
    cost, picks, states = better
    return _Answer(cost, [Step(1, i) for i in picks], bound, states, _IN_ORDER)


_IN_ORDER = "dynamic programming from the last layer"
_TRIES = 8


@dataclass(frozen=True)
class _Line:
    """A stack in order: options and micro-batches of every layer, the budget, and the rest."""

    sets: Sequence[OptionSet]
    weights: Sequence[int]
    budget: int
    rest: Rest

    @cached_property
    def beside(self) -> tuple[int, ...]:
        return (*self.rest.of_layers(len(self.sets)), self.rest.head)

    def unordered(self) -> Callable[[int], int]:
        """Room of the model without order, with the rest's highest moment for every layer."""
        high = max(*self.beside[:-1], self.rest.tail)
        rest = Rest(self.rest.head, high, floor=self.rest.floor, again=self.rest.again)
        return Room(((rest, 1),)).within(self.budget)

    def peak(self, order: Sequence[int]) -> int:
        pairs = list(zip(self.sets, order, strict=True))
        stored, working = [s.stored[i] for s, i in pairs], [s.working[i] for s, i in pairs]
        return timeline_peak(stored, working, self.weights, self.rest)

    def tightened(self, at: int, cutoff: int | None) -> _Answer | None:
        """A plan that fits, from the relaxation with as much less room as its plan exceeds."""
        room = self.budget
        for _ in range(_TRIES):
            found = self.relaxed_to(at, room, cutoff)
            if found is None:
                return None
            over = self.peak(found[1]) - self.budget
            if over <= 0:
                return found[0]
            room -= over
        return None

    def relaxed_to(
        self, at: int, budget: int, cutoff: int | None
    ) -> tuple[_Answer, list[int]] | None:
        """The optimum when memory is only counted while layer ``at`` runs backward, as an order.

        Layers up to ``at`` weigh m micro-batches then, later ones m - 1. One past the last layer
        stands for the end of forward, where all are stored and none works.
        """
        slots: dict[tuple[int, int], list[int]] = {}
        order = [0] * len(self.sets)
        free = 0
        for i, (options, m) in enumerate(zip(self.sets, self.weights, strict=True)):
            weight = m - (i > at)
            if i == at:
                continue
            if weight:
                slots.setdefault((id(options), weight), []).append(i)
            else:
                order[i] = options.cheapest
                free += options.cost[order[i]]
        parts = [(self.sets[s[0]], len(s), weight) for (_, weight), s in slots.items()]
        last = at == len(self.sets)
        final = None if last else self.sets[at].as_last(self.weights[at], self.rest.again)
        room = budget - self.beside[at]
        if final is not None:
            parts.append((final, 1, 1))
        below = None if cutoff is None else cutoff - free
        found = best_mix(parts, lambda _: room, working=False, cutoff=below)
        if found is None:
            return None
        solved, bound = found
        for places, picks in zip(slots.values(), solved.picks, strict=False):
            for place, i in _falling(self.sets[places[0]], places, picks):
                order[place] = i
        if final is not None:
            order[at] = final.origin(solved.picks[-1][0][0])
        units = [Step(1, i) for i in order]
        method = "one moment's constraint: hull bound and core search"
        return _Answer(solved.cost + free, units, bound + free, solved.states, method), order


def _arrange(sets: Sequence[OptionSet], slots: Sequence[Sequence[int]], picks: Picks) -> list[int]:
    order = [0] * len(sets)
    for places, chosen in zip(slots, picks, strict=True):
        for place, i in _falling(sets[places[0]], places, chosen):
            order[place] = i
    return order


def _falling(
    options: OptionSet, places: Sequence[int], chosen: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    # Within a kind, less working memory toward the end.
    ranked = sorted((i for i, n in chosen for _ in range(n)), key=lambda i: -options.working[i])
    return zip(places, ranked, strict=True)


def _chain_path(stack: _Stack) -> ChainPath:
    first = stack.groups[0].options
    parts = tuple((g.options, g.count, stack.weight(g), g.chain) for g in stack.groups)
    key = ("chains", tuple((id(o), n, m, c) for o, n, m, c in parts), stack.max_segment)
    if key not in first.scratch:
        positions = [Position(o, m, c) for o, n, m, c in parts for _ in range(n)]
        first.scratch[key] = ChainPath(positions, stack.max_segment)
    found: ChainPath = first.scratch[key]
    return found


def _chained(stack: _Stack, budget: int) -> _Answer | None:
    """The best plan with chains, or, where the rest beside those is more, without."""
    chains = stack.with_chains()
    found = _segments(chains, chains.room(budget))
    if chains.holders == stack.holders:
        return found
    plain = stack.without_chains()
    return _better(found, _unordered(plain, plain.room(budget), working=True))


def _segments(stack: _Stack, room: Callable[[int], int]) -> _Answer | None:
    if any(g.same for g in stack.groups):
        return _uniform(stack, room)
    first = stack.groups[0]
    alike = all(
        (g.options, stack.weight(g), g.chain) == (first.options, stack.weight(first), first.chain)
        for g in stack.groups
    )
    if alike:
        return _one_kind(stack, room)
    found = _chain_path(stack).solve(room)
    if found is None:
        return None
    cost, steps, bound, states = found
    return _Answer(cost, steps, bound, states, "constrained shortest path")


def _one_kind(stack: _Stack, room: Callable[[int], int]) -> _Answer | None:
    """Chains in a stack of equal layers: how many layers to chain is all there is to choose.

    A chained layer costs the same in a chain of any length, so t chained layers make as few
    chains as the working set allows, ceil(t / k), of lengths as equal as can be; the other layers
    are a knapsack.
    """
    first = stack.groups[0]
    layers = sum(g.count for g in stack.groups)
    options, chain, m = first.options, first.chain, stack.weight(first)
    longest = min(stack.max_segment, layers) if chain is not None else 0
    chained = chain if chain is not None else Chain(0, 0, 0, 0)
    works = [k * chained.working_bytes + (k - 1) * chained.head_bytes for k in range(longest + 1)]
    counts = np.arange(layers + 1, dtype=np.int64)
    states = 0

    def stored_by(t: int, k: int) -> int:
        return m * (-(-t // k) * chained.head_bytes + t * chained.extra_bytes) if t else 0

    def reach(high: int) -> int:
        k = bisect_right(works, high) - 1 if longest > 1 else 0
        return k if k > 1 else 0

    def bounds(high: int, capacity: int) -> tuple[NDArray[np.float64], int]:
        # Lower bounds for every number of chained layers; rounding may only loosen them.
        k = reach(high)
        t = counts if k else counts[:1]
        left = capacity - m * (-(-t // max(k, 1)) * chained.head_bytes + t * chained.extra_bytes)
        single = layers - t
        menu = options.menu(high)
        costs = np.full(len(t), np.inf)
        if menu is not None:
            corners, values = menu.corners
            some = single > 0
            each = left[some].astype(np.float64) / (single[some] * m)
            value = np.interp(each, corners, values) * single[some]
            value[left[some] < single[some] * m * menu.ks[0]] = np.inf
            costs[some] = value
        if k and left[-1] >= 0:
            costs[-1] = 0.0
        costs += t * float(chained.cost)
        return costs * (1 - 1e-12) - 1e-6, k

    def bounded(high: int, capacity: int) -> int | None:
        least = bounds(high, capacity)[0].min()
        return None if np.isinf(least) else max(0, math.ceil(least))

    def relaxed(high: int, capacity: int, below: int | None) -> Relaxed[_Chained] | None:
        nonlocal states
        least, k = bounds(high, capacity)
        best: Relaxed[_Chained] | None = None
        for t in np.argsort(least, kind="stable").tolist():
            if np.isinf(least[t]) or (below is not None and math.ceil(least[t]) >= below):
                break
            spent, paid = stored_by(t, k), t * chained.cost
            picks: tuple[tuple[int, int], ...] = ()
            cost, held, working = paid, spent, 0
            if t < layers:
                mix = mix_of([(options, layers - t, m)], high)
                left = None if below is None else below - paid
                found = None if mix is None else mix.solve(capacity - spent, left)
                if found is None:
                    continue
                states += found.states
                (picks,) = found.picks
                cost += found.cost
                held += m * sum(n * options.stored[i] for i, n in picks)
                working = max(options.working[i] for i, _ in picks)
            elif below is not None and cost >= below:
                continue
            lengths = _even(t, -(-t // k)) if t else []
            if lengths:
                working = max(working, works[lengths[0]])
            best = Relaxed(cost, held, working, (lengths, picks))
            below = cost
        return best

    levels = sorted({*options.levels, *works[2:]})
    searched = search_levels(levels, room, bounded, relaxed)
    if searched is None:
        return None
    lengths, picks = searched.best.plan
    ranked = sorted((i for i, n in picks for _ in range(n)), key=lambda i: -options.working[i])
    units = [Step(k, None) for k in lengths] + [Step(1, i) for i in ranked]
    method = "hull bound and core search for every number of chained layers"
    return _Answer(searched.best.cost, units, searched.bound, states, method)


_Chained = tuple[list[int], tuple[tuple[int, int], ...]]


def _even(layers: int, chains: int) -> list[int]:
    short, more = divmod(layers, chains)
    return [short + 1] * more + [short] * (chains - more)


def _uniform_parts(stack: _Stack) -> list[tuple[OptionSet, int, int]]:
    if not all(g.same for g in stack.groups):
        raise SpecError(
            "with segments, the same option is asked for some layer kinds only",
            hint="ask it for all kinds or for none",
        )
    names = dict.fromkeys(g.name for g in stack.groups)
    return [(_uniform_options(stack, name), 1, 1) for name in names]


def _uniform_options(stack: _Stack, name: str) -> OptionSet:
    runs = [(g, g.count, stack.weight(g)) for g in stack.groups if g.name == name]
    options, chain = runs[0][0].options, runs[0][0].chain
    weight, layers = sum(n * m for _, n, m in runs), sum(n for _, n, _ in runs)
    found = [
        Option(k * weight, w, c * layers, (1, i))
        for i, (k, w, c) in enumerate(
            zip(options.stored, options.working, options.cost, strict=True)
        )
    ]
    longest = min(stack.max_segment, max(n for _, n, _ in runs))
    for k in range(2, longest + 1) if chain is not None else ():
        assert chain is not None
        heads = sum(-(-n // k) * m for _, n, m in runs)
        found.append(
            Option(
                heads * chain.head_bytes + weight * chain.extra_bytes,
                k * chain.working_bytes + (k - 1) * chain.head_bytes,
                layers * chain.cost,
                (k, None),
            )
        )
    return OptionSet.of(found)


def _uniform(stack: _Stack, room: Callable[[int], int]) -> _Answer | None:
    parts = _uniform_parts(stack)
    found = best_mix(parts, room, working=True)
    if found is None:
        return None
    solved, bound = found
    names = dict.fromkeys(g.name for g in stack.groups)
    chosen: dict[str, tuple[int, int | None]] = {}
    for name, (options, _, _), picks in zip(names, parts, solved.picks, strict=True):
        source = options.source(picks[0][0])
        assert isinstance(source, Option)
        chosen[name] = source.payload
    units: list[Step] = []
    for g in stack.groups:
        k, option = chosen[g.name]
        left = g.count
        while left:
            units.append(Step(min(k, left), option))
            left -= units[-1].layers
    return _Answer(solved.cost, units, bound, solved.states, "hull bound and core search")
