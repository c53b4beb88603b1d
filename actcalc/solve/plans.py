"""Plans: what to re-run and keep in every layer, what that costs, and why none costs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from actcalc.solve.beside import Beside
from actcalc.solve.frontier import LayerOption
from actcalc.solve.layers import LayerGroup
from actcalc.solve.options import Option
from actcalc.solve.problem import PeakModel
from actcalc.solve.segments import Step
from actcalc.solve.stage import Held, line, peak


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
    ``stored_bytes`` counts every micro-batch in flight, ``peak_bytes`` also all else.
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
    rest_bytes: int | None = None
    """What of ``peak_bytes`` is not the layers'."""

    @property
    def gap_ratio(self) -> float | None:
        """The share of the cost that is not proven; None where no plan fits."""
        return gap_of(self.cost, self.lower_bound)


def gap_of(cost: int | None, bound: int | None) -> float | None:
    """The share of a cost that is above what is proven; None without a plan."""
    if cost is None or bound is None:
        return None
    return (cost - bound) / cost if cost else 0.0


class TradeOff(NamedTuple):
    """One point of the whole-stack trade-off: a budget and the cheapest plan within it."""

    budget_bytes: int
    plan: Plan

    @property
    def cost(self) -> int | None:
        """Cost of the plan; None if nothing fits."""
        return self.plan.cost


def assemble(
    units: Sequence[tuple[PlanGroup, int]],
    *,
    const_bytes: int | Beside,
    budget_bytes: int,
    peak_model: PeakModel,
    lower_bound: int | None,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan made of single layers and chains, each with its micro-batches in flight.

    ``units`` are in stack order. The plan is optimal if its cost equals ``lower_bound``; where it
    does not fit it is infeasible, and ``smallest_budget_bytes`` is its own peak.
    """
    held = sum(u.stored_bytes * m for u, m in units)
    beside = Beside.of(const_bytes)
    working = [u.working_bytes for u, _ in units]
    if peak_model == "timeline":
        own = [Held(u.stored_bytes, u.stored_bytes, u.stored_bytes + u.working_bytes)
               for u, _ in units]  # fmt: skip
        high = peak(line(units[0][1], beside.head), [own])
    elif peak_model == "stored":
        high = beside.peak(held, None)
    else:
        high = beside.peak(held, max(working) + max(u.moved_bytes for u, _ in units))
    if high > budget_bytes:
        return infeasible(peak_model, budget_bytes, high)
    plan = plan_of(
        [unit for unit, _ in units], held, high, budget_bytes, peak_model, lower_bound, certificate
    )
    at_work = peak_model != "stored" and high > max(beside.floor, beside.head + held)
    rest = beside.work if at_work else beside.head if high > beside.floor else beside.floor
    return replace(plan, rest_bytes=rest)


def plan_of(
    units: Sequence[PlanGroup],
    stored_bytes: int,
    peak_bytes: int,
    budget_bytes: int,
    peak_model: PeakModel,
    lower_bound: int | None,
    certificate: Certificate | None,
) -> Plan:
    """A plan that fits, of single layers and chains in stack order."""
    runs = [(unit, sum(1 for _ in same)) for unit, same in groupby(units)]
    cost = sum(u.cost for u in units)
    return Plan(
        feasible=True,
        optimal=cost == lower_bound,
        cost=cost,
        lower_bound=lower_bound,
        stored_bytes=stored_bytes,
        peak_bytes=peak_bytes,
        groups=tuple(replace(u, count=u.count * n, segments=n) for u, n in runs),
        peak_model=peak_model,
        budget_bytes=budget_bytes,
        certificate=certificate,
    )


def option_group(name: str, source: Option | LayerOption) -> PlanGroup:
    """One layer that runs as ``source`` says, as a group of the plan."""
    exact = isinstance(source, LayerOption)
    return PlanGroup(
        layer_type=name,
        count=1,
        recompute=source.recompute if isinstance(source, LayerOption) else (),
        kept=source.kept if isinstance(source, LayerOption) else (),
        stored_bytes=source.stored,
        working_bytes=source.working,
        cost=source.cost,
        segments=1,
        payload=None if exact or not isinstance(source, Option) else source.payload,
        offloaded=source.offloaded if isinstance(source, LayerOption) else (),
        moved_bytes=source.moved,
    )


def plan_group(members: Sequence[LayerGroup], unit: Step) -> PlanGroup:
    """One single layer, or one chain of ``members``, as a group of the plan."""
    first = members[0]
    if unit.option is not None:
        options = first.options
        group = option_group(first.name, options.source(unit.option))
        return replace(
            group,
            stored_bytes=options.stored[unit.option],
            working_bytes=options.working[unit.option],
            cost=options.cost[unit.option],
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
