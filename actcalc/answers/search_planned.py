"""The best layouts of a search with their recomputation planned, ranked anew."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from actcalc.answers.command_words import run_words
from actcalc.answers.search import FoundLayout, Search, answer, layout_of
from actcalc.cost.roofline import roofline_of
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings, default_model
from actcalc.plan.timed import planned_step
from actcalc.search.best import Indices, different, ordered
from actcalc.search.find import Found
from actcalc.search.space import Space
from actcalc.solve.clock import limited
from actcalc.specs.run import Run

_SECONDS = 5.0
"""How long one layout's plan is looked for."""
_WIDER = 3
"""Times as many layouts are refined as are listed: planned, others may be the fastest."""
NOTE = (
    "Planned: each layer re-runs what is cheapest in its stage's memory, op by op, as `actcalc "
    "plan` does. Refined were the {count} fastest layouts and micro-batches by named policies."
)


class _Refined(NamedTuple):
    row: int
    layout: FoundLayout


def planned(
    found: Found,
    space: Space,
    most: int,
    efficiency: Mapping[str, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Up to ``most`` layouts of different degrees, each under its cheapest plan that fits.

    A layout whose plan is no faster keeps the named policy that was found.
    """
    plain = answer(found, space, "different", most, efficiency)
    order = ordered(found)
    fastest = _candidates(found, order)[: _WIDER * most]
    rows = list(dict.fromkeys([*different(found, order)[:most].tolist(), *fastest]))
    refined, complete = list[_Refined](), True
    try:
        for number, row in enumerate(rows):
            if progress is not None:
                progress(number, len(rows))
            refined.append(_Refined(row, _planned(found, row, efficiency)))
    except KeyboardInterrupt:
        complete = False
    refined.sort(key=lambda one: (one.layout.step_seconds, one.layout.peak_bytes))
    best: dict[tuple[int, ...], FoundLayout] = {}
    for one in refined:
        layout = one.layout.layout
        best.setdefault(tuple(layout[name] for name in ("tp", "cp", "ep", "pp")), one.layout)
    return replace(
        plain,
        planned=True,
        complete=plain.complete and complete,
        results=tuple(best.values())[:most],
        notes=(*plain.notes, NOTE.format(count=len(refined))),
    )


def _candidates(found: Found, order: Indices) -> list[int]:
    """Of every layout and micro-batch the first row: the fastest policy with a name that fits."""
    rows = found.rows.take(order)
    keys = zip(*(column.tolist() for column in (rows.cut, rows.lane, rows.dp, rows.zero)),
               strict=True)  # fmt: skip
    seen: dict[tuple[int, ...], int] = {}
    for row, key in zip(order.tolist(), keys, strict=True):
        seen.setdefault(key, row)
    return list(seen.values())


def _planned(found: Found, row: int, efficiency: Mapping[str, float] | None) -> FoundLayout:
    known = layout_of(found, row)
    run = replace(found.one(row), policies=())
    settings = PlanSettings(
        memory_model=default_model("optimal", offload=False, activations_only=False)
    )
    planner = RunPlanner(run, settings)
    with limited(_SECONDS):
        plans = planner.plan(run.budget_bytes or 0)
    if not all(plan.feasible for plan in plans):
        return known
    seconds = planned_step(planner, plans, roofline_of(planner.staged, efficiency)).total
    if seconds >= known.step_seconds:
        return known
    faster = known.step_seconds / seconds
    return replace(
        known,
        policy="planned",
        peak_bytes=max(plan.peak_bytes or 0 for plan in plans),
        step_seconds=seconds,
        tokens_per_second_per_gpu=known.tokens_per_second_per_gpu * faster,
        mfu_ratio=known.mfu_ratio * faster,
        named_policy=known.policy,
        named_step_seconds=known.step_seconds,
        plan_command=_command(run),
    )


def _command(run: Run) -> str:
    return "actcalc plan " + shlex.join(run_words(run))
