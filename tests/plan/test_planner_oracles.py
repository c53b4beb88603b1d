"""Exactness: against exhaustive enumeration, and against MILPs solved by scipy/HiGHS, gap 0."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from actcalc.errors import SpecError
from actcalc.solve import (
    PEAK_MODELS,
    LayerGroup,
    Option,
    OptionSet,
    greedy,
    layer_frontier,
    parse_problem,
    problem_groups,
    smallest_budget,
    solve,
    solve_groups,
    sqrt,
)
from actcalc.solve.frontier import pareto
from tests.plan.planner_oracle import (
    check_plan,
    every_option,
    milp_optimum,
    option_milp,
    random_layer,
    random_problem,
)


def undominated(points: Iterable[tuple[int, int, int]]) -> set[tuple[int, int, int]]:
    """By stored, stored + working and cost, the order in which every peak model agrees."""
    triples = sorted({(k, k + w, c) for k, w, c in points})
    kept: list[tuple[int, int, int]] = []
    for p in triples:
        if not any(all(a <= b for a, b in zip(q, p, strict=True)) for q in kept):
            kept.append(p)
    return {(k, t - k, c) for k, t, c in kept}


@pytest.mark.parametrize("seed", range(120))
def test_layer_frontier_is_the_enumerated_one(seed: int) -> None:
    rng = random.Random(seed)
    layer = random_layer(rng, rng.randint(1, 6), sizes=rng.choice([4, 40]))
    problem = {
        "layer_types": {"a": layer},
        "stack": [["a", 1]],
        "inflight": 1,
        "const_bytes": 0,
        "budget_bytes": 1,
        "peak_model": "stored",
    }
    frontier = layer_frontier(parse_problem(problem).layer_types["a"])
    found = [(o.stored, o.working, o.cost) for o in frontier]
    columns = (frontier.stored, frontier.working, frontier.cost)
    assert found == list(zip(*(c.tolist() for c in columns), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == undominated(every_option(layer))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [3, 10_000])
def test_pareto_on_few_and_on_many_levels(seed: int, spread: int) -> None:
    points = np.random.default_rng(seed).integers(0, spread, size=(400, 3))
    keep = pareto(*points.T)
    rows = [tuple(p) for p in points.tolist()]
    expected = {p for p in rows if not any(q != p and all(np.array(q) <= p) for q in rows)}
    assert len(keep) == len(expected)
    assert {rows[i] for i in keep} == expected


@pytest.mark.parametrize("seed", range(130))
@pytest.mark.parametrize("model", PEAK_MODELS)
def test_solve_equals_milp_on_ops_and_tensors(model: str, seed: int) -> None:
    rng = random.Random(f"{model}{seed}")
    data = random_problem(rng, model, layers=8, ops=7, kinds=rng.randint(1, 3))
    plan = solve(parse_problem(data))
    assert plan.cost == milp_optimum(data)
    if plan.feasible:
        assert plan.optimal
        assert plan.lower_bound == plan.cost
        check_plan(data, plan)


def _random_options(rng: random.Random, big: bool) -> list[Option]:
    size, cost = (5000, 3000) if big else (40, 30)
    return [
        Option(rng.randint(1, size), rng.randint(0, size), rng.randint(0, cost), payload=i)
        for i in range(rng.randint(1, 14))
    ]


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("model", ["stored", "stored+working"])
def test_many_layers_of_ready_made_options_equal_milp(model: Any, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [_random_options(rng, seed % 2 == 0) for _ in range(rng.randint(1, 3))]
    counts = [rng.randint(1, 40) for _ in kinds]
    inflight = rng.choice([1, 1, 2, 7])
    same = [rng.random() < 0.2 for _ in kinds]
    groups = [
        LayerGroup(f"k{i}", OptionSet.of(options), n, same=s)
        for i, (options, n, s) in enumerate(zip(kinds, counts, same, strict=True))
    ]
    low = smallest_budget(groups, inflight=inflight, const_bytes=5, peak_model=model)
    high = inflight * sum(n * max(o.stored for o in k) for k, n in zip(kinds, counts, strict=True))
    budget = low + int(rng.random() ** 2 * max(0, high - low))
    setting: dict[str, Any] = {"inflight": inflight, "const_bytes": 5, "peak_model": model}
    plan = solve_groups(groups, budget_bytes=budget, **setting)
    rows = [[(o.stored, o.working, o.cost) for o in k] for k in kinds]
    working = model != "stored"
    assert plan.cost == option_milp(rows, counts, same, inflight, budget - 5, working=working)
    peak = sum(g.stored_bytes * g.count for g in plan.groups) * inflight + 5
    peak += max(g.working_bytes for g in plan.groups) if working else 0
    assert peak == plan.peak_bytes
    assert peak <= budget
    for g in plan.groups:
        chosen = kinds[int(g.layer_type[1:])][g.payload]
        values = (g.stored_bytes, g.working_bytes, g.cost)
        assert values == (chosen.stored, chosen.working, chosen.cost)
    short = solve_groups(groups, budget_bytes=low - 1, **setting)
    assert not short.feasible
    assert short.smallest_budget_bytes == low


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("model", PEAK_MODELS)
def test_comparison_methods_never_beat_the_optimum(model: str, seed: int) -> None:
    rng = random.Random(f"{model}/{seed}")
    data = random_problem(rng, model, layers=8)
    problem = parse_problem(data)
    best = solve(problem)
    for method in (sqrt, greedy):
        plan = method(problem)
        if not plan.feasible:
            assert plan.smallest_budget_bytes is not None
            assert plan.smallest_budget_bytes > data["budget_bytes"]
            continue
        assert plan.cost is not None
        assert plan.lower_bound is not None
        assert plan.lower_bound <= plan.cost
        assert plan.optimal == (plan.lower_bound == plan.cost)
        # Segments of sqrt are plans of the exact search in the model that has segments only.
        if method is greedy or model == "stored+working+segments":
            assert best.cost is not None
            assert best.cost <= plan.cost
            check_plan(data, plan)


@pytest.mark.parametrize("seed", range(60))
def test_timeline_with_ready_made_options(seed: int) -> None:
    """Order and one option per kind, against trying everything."""
    rng = random.Random(seed)
    sets = [
        OptionSet.of(
            [Option(rng.randint(1, 9), rng.randint(0, 9), rng.randint(0, 9)) for _ in "ab"]
        )
        for _ in range(2)
    ]
    same = [rng.random() < 0.4 for _ in sets]
    inflight = rng.randint(1, 3)
    runs = [(rng.randrange(2), rng.randint(1, 2)) for _ in range(3)]
    groups = [LayerGroup(f"k{i}", sets[i], n, same[i]) for i, n in runs]
    layers = [(i, inflight) for i, n in runs for _ in range(n)]
    best: dict[int, int] = {}

    def walk(chosen: list[int]) -> None:
        if len(chosen) < len(layers):
            kind = layers[len(chosen)][0]
            before = [c for c, (i, _) in zip(chosen, layers, strict=False) if i == kind]
            for option in range(len(sets[kind])):
                if not (same[kind] and before and before[0] != option):
                    walk([*chosen, option])
            return
        k = [sets[i].stored[c] for c, (i, _) in zip(chosen, layers, strict=True)]
        w = [sets[i].working[c] for c, (i, _) in zip(chosen, layers, strict=True)]
        cost = sum(sets[i].cost[c] for c, (i, _) in zip(chosen, layers, strict=True))
        others = sum((m - 1) * b for b, (_, m) in zip(k, layers, strict=True))
        peak = max(others + sum(k[: at + 1]) + w[at] for at in range(len(k)))
        best[peak] = min(cost, best.get(peak, cost))

    walk([])
    setting: dict[str, Any] = {"inflight": inflight, "const_bytes": 0, "peak_model": "timeline"}
    assert smallest_budget(groups, **setting) == min(best)
    for budget in range(min(best) - 1, max(best) + 2, 3):
        expected = [c for peak, c in best.items() if peak <= budget]
        plan = solve_groups(groups, budget_bytes=budget, **setting)
        assert plan.cost == (min(expected) if expected else None)


def test_forbidden_ops_stay_out_of_chains() -> None:
    rng = random.Random(5)
    data = random_problem(rng, "stored+working+segments", layers=8, ops=6, kinds=1)
    layer = data["layer_types"]["kind0"]
    op = next(o for o in layer["ops"] if o["outputs"])
    layer["saved_for_backward"] = list({*layer["saved_for_backward"], op["outputs"][0]})
    layer["forbid_recompute"] = [op["name"]]
    data |= {"stack": [["kind0", 6]], "max_segment": 3, "budget_bytes": 10**6}
    free = problem_groups(parse_problem(data))[0].chain
    assert free is not None
    assert op["name"] not in free.recompute
    assert op["outputs"][0] in free.kept
    assert free.extra_bytes >= layer["tensors"][op["outputs"][0]]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(SpecError, match="stored"):
        OptionSet.of([Option(-1, 0, 0)])
    with pytest.raises(SpecError, match="without options"):
        OptionSet.of([])
    with pytest.raises(SpecError, match="cost"):
        OptionSet.of([Option(1, 0, True)])
