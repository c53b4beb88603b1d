"""Published planning problems with proven optimal costs, and how their plans look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actcalc.solve import even_budgets, parse_problem, problem_groups, solve, trade_off
from tests.plan.planner_oracle import check_plan

DATA = json.loads((Path(__file__).parents[1] / "data" / "planner_instances.json").read_text())
INSTANCES = {i["id"]: i for i in DATA["instances"]}


@pytest.mark.parametrize("name", INSTANCES)
def test_optimal_cost(name: str) -> None:
    data = INSTANCES[name]
    plan = solve(parse_problem(data))
    assert plan.cost == data["optimal_cost"]
    assert plan.feasible == plan.optimal == (data["optimal_cost"] is not None)
    if plan.feasible:
        assert plan.lower_bound == plan.cost
        assert plan.certificate is not None
        assert plan.certificate.relaxation_bound <= plan.lower_bound
        check_plan({"max_segment": 1, **data}, plan)


@pytest.mark.parametrize("name", [n for n, i in INSTANCES.items() if "segments" in n])
def test_segments_are_what_helps(name: str) -> None:
    data = {**INSTANCES[name], "peak_model": "stored+working"}
    assert solve(parse_problem(data)).cost == INSTANCES[name]["optimal_cost_without_segments"]


def test_infeasible_says_what_would_do() -> None:
    data = INSTANCES["I10_infeasible"]
    plan = solve(parse_problem(data))
    assert (plan.cost, plan.lower_bound, plan.peak_bytes, plan.groups) == (None, None, None, ())
    assert plan.smallest_budget_bytes is not None
    enough = {**data, "budget_bytes": plan.smallest_budget_bytes}
    assert solve(parse_problem(enough)).peak_bytes == plan.smallest_budget_bytes


def test_gpt3_frontier() -> None:
    """The whole-stack curve of GPT-3 (tensor parallel 8, sequence parallel, 96 layers)."""
    problem = parse_problem(INSTANCES["I02_gpt3_96_4p8GB"])
    groups = problem_groups(problem)
    setting: dict[str, Any] = {"inflight": 1, "const_bytes": 0, "peak_model": "stored"}
    budgets = even_budgets(groups, 50, **setting)
    # Without re-run 34 s b h + 5 a s^2 b over t = 8: 358,612,992 B a layer (Korthikanti 2022).
    assert budgets[0] == 96 * 2048 * 12288 * 2 // 8
    assert budgets[-1] == 96 * 358_612_992
    points = trade_off(groups, [*budgets, budgets[0] - 1], **setting)
    costs = [p.cost for p in points]
    assert costs[0] is None
    assert costs[-1] == 0
    known = [c for c in costs if c is not None]
    assert len(known) == 50
    assert known == sorted(known, reverse=True)
    assert all(p.plan.peak_bytes is None or p.plan.peak_bytes <= p.budget_bytes for p in points)
