"""Comparison methods: equal segments (sqrt n) and greedy. Same result type, rarely optimal.

Both carry a proven lower bound, so that what they leave on the table is known; ``optimal`` is set
only where that bound meets their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from actcalc.solve.beside import beside_of
from actcalc.solve.frontier import LayerOption, layer_option
from actcalc.solve.layers import LayerGroup, layer_chain, layer_options
from actcalc.solve.plans import Plan, PlanGroup, assemble, infeasible, plan_group
from actcalc.solve.problem import PlanLayer, Problem
from actcalc.solve.segments import ChainPath, Position, Step
from actcalc.solve.stack import solve
from actcalc.solve.stage import Held, line, peak


def sqrt(problem: Problem) -> Plan:
    """The best plan of equal segments: every k layers store one input and are re-run whole.

    All k cost the same; the k of the lowest peak is taken among those that fit, counting the
    working set in every peak model (else one segment of all layers would always win). Near
    sqrt(n) that is where stored and working bytes balance (Chen et al. 2016, section 4). Segments
    may cross layer kinds, the last one may be shorter, and what forbidden ops make stays stored.
    In the peak model with segments k is at most ``max_segment``.
    """
    groups = [
        LayerGroup(
            kind,
            layer_options(problem.layer_types[kind]),
            count,
            chain=layer_chain(problem.layer_types[kind]),
        )
        for kind, count in problem.stack
    ]
    owner = [g for g in groups for _ in range(g.count)]
    bounded = problem.peak_model == "stored+working+segments"
    longest = min(len(owner), problem.max_segment) if bounded else len(owner)
    if bounded:
        bound = solve(problem).lower_bound
    else:
        # Chains are outside the space of the other models, so their optimum is no bound here;
        # stored bytes alone are a lower bound on the peak in each of them.
        path = ChainPath([Position(g.options, problem.inflight, g.chain) for g in owner], longest)
        bound = path.stored_bound(problem.budget_bytes - beside_of(problem).head)
    found: list[tuple[int, Plan]] = []
    for k in range(1, longest + 1):
        units = [
            plan_group(owner[at : at + k], Step(min(k, len(owner) - at), None))
            for at in range(0, len(owner), k)
        ]
        stored = problem.inflight * sum(u.stored_bytes for u in units)
        high = beside_of(problem).peak(stored, max(u.working_bytes for u in units))
        found.append((high, _plan(problem, units, bound)))
    fitting = [pair for pair in found if pair[1].feasible]
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    return min((plan for _, plan in found), key=lambda plan: plan.smallest_budget_bytes or 0)


def greedy(problem: Problem) -> Plan:
    """Most bytes freed per cost first, applied layer by layer, until it fits.

    In each layer kind, starting from no re-run, the next step is the op that frees most stored
    bytes per cost, alone or with the ops that make its unsaved inputs. The kinds' steps are taken
    by falling ratio, each in one layer after another from the start of the stack, and the first
    plan that fits is returned. Chains are not used.
    """
    kinds = [kind for kind, count in problem.stack for _ in range(count)]
    ladders = {kind: _ladder(problem.layer_types[kind]) for kind in set(kinds)}
    highest = _peaks(problem)
    level = [ladders[kind][0].option for kind in kinds]
    lowest = highest(level)
    taken = dict.fromkeys(ladders, 0)
    while lowest > problem.budget_bytes:
        ready = [k for k in sorted(ladders) if taken[k] + 1 < len(ladders[k])]
        if not ready:
            return infeasible(problem.peak_model, problem.budget_bytes, lowest)
        kind = max(ready, key=lambda k: ladders[k][taken[k] + 1].ratio)
        taken[kind] += 1
        for at in (i for i, k in enumerate(kinds) if k == kind):
            level[at] = ladders[kind][taken[kind]].option
            now = highest(level)
            lowest = min(lowest, now)
            if now <= problem.budget_bytes:
                break
    units = [_unit(kind, option) for kind, option in zip(kinds, level, strict=True)]
    return _plan(problem, units, solve(problem).lower_bound)


@dataclass(frozen=True, slots=True)
class _Rung:
    option: LayerOption
    ratio: Fraction


def _ladder(layer: PlanLayer) -> list[_Rung]:
    again = 0
    ladder = [_Rung(layer_option(layer, 0), Fraction(0))]
    while True:
        now = ladder[-1].option
        best: tuple[Fraction, int, LayerOption] | None = None
        for op in range(len(layer.ops)):
            for more in {1 << op, _with_makers(layer, op)}:
                if not more & ~again or _forbidden(layer, more):
                    continue
                option = layer_option(layer, again | more)
                freed = now.stored - option.stored
                # A step for free is better than any other: rank it by what it frees.
                paid = option.cost - now.cost
                ratio = Fraction(freed, paid) if paid else Fraction(freed << 64)
                if freed > 0 and (best is None or ratio > best[0]):
                    best = (ratio, again | more, option)
        if best is None:
            return ladder
        again = best[1]
        ladder.append(_Rung(best[2], best[0]))


def _with_makers(layer: PlanLayer, op: int) -> int:
    mask, waiting = 1 << op, [op]
    while waiting:
        for tensor in layer.ops[waiting.pop()].inputs:
            if tensor == layer.input or tensor in layer.saved_for_backward:
                continue
            maker = layer.producer[tensor]
            if not mask >> maker & 1:
                mask |= 1 << maker
                waiting.append(maker)
    return mask


def _forbidden(layer: PlanLayer, mask: int) -> bool:
    return any(
        mask >> i & 1 and op.name in layer.forbid_recompute for i, op in enumerate(layer.ops)
    )


def _peaks(problem: Problem) -> Callable[[list[LayerOption]], int]:
    m, model, beside = problem.inflight, problem.peak_model, beside_of(problem)

    def highest(options: list[LayerOption]) -> int:
        if model == "timeline":
            held = [Held(o.stored, o.stored, o.stored + o.working) for o in options]
            found: int = peak(line(m, beside.head), [held])
            return found
        stored = m * sum(o.stored for o in options)
        return beside.peak(stored, None if model == "stored" else max(o.working for o in options))

    return highest


def _unit(kind: str, option: LayerOption) -> PlanGroup:
    return PlanGroup(
        layer_type=kind,
        count=1,
        recompute=option.recompute,
        kept=option.kept,
        stored_bytes=option.stored,
        working_bytes=option.working,
        cost=option.cost,
        segments=1,
    )


def _plan(problem: Problem, units: list[PlanGroup], bound: int | None) -> Plan:
    return assemble(
        [(unit, problem.inflight) for unit in units],
        const_bytes=beside_of(problem),
        budget_bytes=problem.budget_bytes,
        peak_model=problem.peak_model,
        lower_bound=bound,
    )
