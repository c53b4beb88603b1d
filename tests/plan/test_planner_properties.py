"""What holds for every problem, drawn by hypothesis and re-checked by code of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.solve import (
    PEAK_MODELS,
    Plan,
    even_budgets,
    parse_problem,
    problem_groups,
    solve,
    trade_off,
)
from actcalc.solve.layers import Stack
from actcalc.solve.order import Aim, search
from actcalc.solve.stack import stage_problem
from tests.plan.planner_oracle import check_plan, milp_optimum, random_problem


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    model = draw(st.sampled_from(PEAK_MODELS))
    return random_problem(
        rng,
        model,
        layers=draw(st.integers(1, 20)),
        ops=draw(st.integers(1, 9)),
        kinds=draw(st.integers(1, 3)),
    )


def planned(data: dict[str, Any], **changes: Any) -> Plan:
    return solve(parse_problem({**data, **changes}))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_a_plan_holds_what_it_promises(data: dict[str, Any]) -> None:
    plan = planned(data)
    if plan.feasible:
        check_plan(data, plan)
        assert plan.lower_bound is not None
        assert plan.cost is not None
        assert plan.certificate is not None
        assert plan.certificate.relaxation_bound <= plan.lower_bound <= plan.cost


@settings(max_examples=80, deadline=None)
@given(problems())
def test_an_infeasible_budget_names_the_smallest_that_does(data: dict[str, Any]) -> None:
    plan = planned(data, budget_bytes=1)
    if plan.feasible:
        return
    least = plan.smallest_budget_bytes
    assert least is not None
    exact = planned(data, budget_bytes=least)
    check_plan({**data, "budget_bytes": least}, exact)
    assert exact.peak_bytes == least
    if least > 1:
        below = planned(data, budget_bytes=least - 1)
        assert not below.feasible
        assert below.smallest_budget_bytes == least


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 12))
def test_more_memory_never_costs_more(data: dict[str, Any], count: int) -> None:
    problem = parse_problem(data)
    setting: dict[str, Any] = {
        "inflight": problem.inflight,
        "const_bytes": problem.const_bytes,
        "peak_model": problem.peak_model,
        "max_segment": problem.max_segment,
    }
    groups = problem_groups(problem)
    budgets = even_budgets(groups, count, **setting)
    assert budgets == sorted(budgets)
    points = trade_off(groups, budgets, **setting)
    costs = [p.plan.cost for p in points]
    assert None not in costs
    known = [c for c in costs if c is not None]
    assert known == sorted(known, reverse=True)
    # The last budget is one from which more memory buys nothing.
    assert planned(data, budget_bytes=10 * budgets[-1] + 1).cost == known[-1]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_nested_peak_models_are_ordered(data: dict[str, Any]) -> None:
    """Counting more bytes can only cost more; one timeline lies between the other two."""

    def cost(model: str) -> float:
        found = planned(data, peak_model=model).cost
        return float("inf") if found is None else found

    timeline, simple = cost("timeline"), cost("stored+working")
    assert cost("stored") <= timeline <= simple
    if not any("forbid_recompute" in layer for layer in data["layer_types"].values()):
        assert cost("stored+working+segments") <= simple


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 1000))
def test_units_do_not_matter(data: dict[str, Any], scale: int) -> None:
    """Sizes times a constant leave the cost alone; costs times a constant scale it."""
    layers = {
        name: {
            **layer,
            "tensors": {t: b * scale for t, b in layer["tensors"].items()},
            "ops": [{**op, "cost": op["cost"] * 7} for op in layer["ops"]],
        }
        for name, layer in data["layer_types"].items()
    }
    plan = planned(data)
    bigger = planned(
        data,
        layer_types=layers,
        const_bytes=data["const_bytes"] * scale,
        budget_bytes=data["budget_bytes"] * scale + scale - 1,
    )
    assert bigger.cost == (None if plan.cost is None else plan.cost * 7)


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_whole_grains_are_exact(data: dict[str, Any], seed: int) -> None:
    """A tie-break beside each cost changes the plan, never its cost in whole grains."""
    rng = random.Random(seed)
    grain = 1000
    problem = parse_problem(data)
    graded = replace(
        problem,
        layer_types={
            name: replace(
                layer,
                ops=tuple(replace(o, cost=o.cost * grain + rng.randint(0, 5)) for o in layer.ops),
                grain=grain,
            )
            for name, layer in problem.layer_types.items()
        },
    )
    plain, fine = solve(problem), solve(graded)
    assert fine.feasible == plain.feasible
    if plain.cost is not None:
        assert fine.cost is not None
        assert fine.cost // grain == plain.cost
        assert fine.peak_bytes is not None
        assert fine.peak_bytes <= problem.budget_bytes


def test_last_layer_needs_no_rerun_with_one_micro_batch() -> None:
    data = {
        "peak_model": "timeline",
        "inflight": 1,
        "const_bytes": 0,
        "budget_bytes": 13,
        "stack": [["a", 2]],
        "layer_types": {
            "a": {
                "input": "x",
                "tensors": {"x": 1, "y": 9},
                "saved_for_backward": ["y"],
                "ops": [{"name": "f", "inputs": ["x"], "outputs": ["y"], "cost": 5}],
            }
        },
    }
    # 1 + (1 + 9) fits 13 while both kept, 20, do not: only the first layer is re-run.
    plan = solve(parse_problem(data))
    assert [(g.count, g.recompute) for g in plan.groups] == [(1, ("f",)), (1, ())]
    assert (plan.cost, plan.peak_bytes) == (5, 11)


@pytest.mark.parametrize("seed", range(100))
def test_search_in_order_is_exact_by_itself(seed: int) -> None:
    """The search behind stacks whose largest layer is not the last, with and without a cutoff."""
    data = random_problem(random.Random(seed), "timeline", layers=9, kinds=3, ops=6)
    groups = problem_groups(parse_problem(data))
    stack = Stack.of(groups, data["inflight"], data["const_bytes"], "timeline", 1)
    problem = stage_problem(stack, groups)
    expected = milp_optimum(data)
    for slack in (None, 1, 50):
        cutoff = None if slack is None else (expected or 0) + slack
        found = search(problem, Aim(data["budget_bytes"], cutoff))
        assert found.complete
        assert (None if found.choice is None else found.value) == expected
        if found.choice is not None:
            assert problem.peak(found.choice) <= data["budget_bytes"]
            assert problem.cost(found.choice) == found.value
    assert search(problem, Aim(data["budget_bytes"], expected or 0)).choice is None


def test_largest_layer_first() -> None:
    """The last layer's own constraint is not enough here: the first layer's is the one that binds.

    Big layers alone: x 1, y 30 (cost 9); small: x 1, y 2 (cost 1); one micro-batch, small last.
    """

    def kind(size: int, cost: int) -> dict[str, Any]:
        return {
            "input": "x",
            "tensors": {"x": 1, "y": size},
            "saved_for_backward": ["y"],
            "ops": [{"name": "f", "inputs": ["x"], "outputs": ["y"], "cost": cost}],
        }

    for budget in range(30, 100):
        data = {
            "peak_model": "timeline",
            "inflight": 1,
            "const_bytes": 0,
            "budget_bytes": budget,
            "max_segment": 1,
            "stack": [["big", 3], ["small", 3]],
            "layer_types": {"big": kind(30, 9), "small": kind(2, 1)},
        }
        plan = planned(data)
        assert plan.cost == milp_optimum(data)
        if plan.feasible:
            check_plan(data, plan)
