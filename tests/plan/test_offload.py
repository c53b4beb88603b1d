"""Offload: the frontier and the search against trying everything, and what copies cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from actcalc.answers.plan import plan_command
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.plan.offload import SMALLEST_SHARE, Transfer, movable
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.solve import (
    LayerGroup,
    Option,
    OptionSet,
    layer_frontier,
    parse_problem,
    smallest_budget,
    solve_groups,
)
from actcalc.solve.beside import Beside, Room
from actcalc.solve.frontier import layer_option
from actcalc.specs.run import Run
from tests.plan.planner_oracle import random_layer

PLAIN = PlanSettings(memory_model="stored+working", activations_only=True)
FREE = Transfer(host_rate=10**15, memory_rate=10**15, forward=0, backward=0)


Cli = Callable[..., Any]


def run_of(name: str = "gpt3-175b", device: str = "h100-80gb", **layout: Any) -> Run:
    return load_run(name, layout={"tp": 8, "sp": True, **layout}, device=device)


@pytest.mark.parametrize("seed", range(60))
def test_frontier_is_the_enumerated_one(seed: int) -> None:
    """Every re-run set times every set of moved tensors, undominated in four figures."""
    rng = random.Random(seed)
    data = {
        "layer_types": {"kind": random_layer(rng, 4)},
        "stack": [["kind", 1]],
        "inflight": 1,
        "const_bytes": 0,
        "budget_bytes": 5,
        "peak_model": "stored",
    }
    layer = parse_problem(data).layer_types["kind"]
    may = frozenset(name for name in layer.tensors if rng.random() < 0.6)
    points = set()
    for again, away in product(range(1 << len(layer.ops)), range(1 << len(layer.tensors))):
        ops = {op.name for i, op in enumerate(layer.ops) if again >> i & 1}
        moved = {name for i, name in enumerate(layer.tensors) if away >> i & 1}
        if not ops & layer.forbid_recompute and moved <= may:
            o = layer_option(layer, again, away)
            points.add((o.stored, o.stored + o.working, o.cost, o.moved))
    best = {
        p
        for p in points
        if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)
    }
    frontier = layer_frontier(layer, may)
    assert {(o.stored, o.stored + o.working, o.cost, o.moved) for o in frontier} == best
    columns = (frontier.stored, frontier.working, frontier.cost, frontier.moved)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    assert {(k, k + w, c, x) for k, w, c, x in rows} == best


@pytest.mark.parametrize("seed", range(80))
def test_search_is_exact(seed: int) -> None:
    """Stored in flight, the largest working set and the largest set on its way, all options."""
    rng = random.Random(seed)
    sets = [
        OptionSet.of(
            [
                Option(rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 20), None, x)
                for x in rng.choices(range(6), k=4)
            ]
        )
        for _ in range(2)
    ]
    runs = [(rng.randrange(2), rng.randint(1, 2), rng.choice([None, 1, 3])) for _ in range(3)]
    groups = [LayerGroup(f"k{i}", sets[i], n, inflight=m) for i, n, m in runs]
    layers = [(sets[i], m or 2) for i, n, m in runs for _ in range(n)]
    best: dict[int, int] = {}
    for chosen in product(*(range(len(options)) for options, _ in layers)):
        picked = [(o, i, m) for (o, m), i in zip(layers, chosen, strict=True)]
        held = sum(m * o.stored[i] for o, i, m in picked)
        works = max(o.working[i] for o, i, _ in picked)
        moved = max(o.moved[i] for o, i, _ in picked)
        cost = sum(o.cost[i] for o, i, _ in picked)
        peak = 5 + held + works + moved
        best[peak] = min(cost, best.get(peak, cost))
    setting: dict[str, Any] = {"inflight": 2, "const_bytes": 5, "peak_model": "stored+working"}
    assert smallest_budget(groups, **setting) == min(best)
    for budget in range(min(best) - 1, max(best) + 2, 2):
        expected = min((c for peak, c in best.items() if peak <= budget), default=None)
        plan = solve_groups(groups, budget_bytes=budget, **setting)
        assert plan.cost == expected
        assert plan.optimal == (expected is not None)


def test_copies_hide_behind_compute() -> None:
    transfer = Transfer(host_rate=10**9, memory_rate=10**12, forward=100, backward=200)
    assert transfer.waits(100, 0) == (0, 0, 0)
    assert transfer.waits(150, 0) == (50, 0, 0)
    assert transfer.waits(250, 0) == (150, 50, 0)
    # A re-run is more to hide behind; every byte is read and written in device memory.
    assert transfer.waits(250, 50) == (150, 0, 0)
    assert transfer.waits(5000, 0) == (4900, 4800, 10)


@pytest.mark.parametrize("semantics", ["minimal", "module"])
@pytest.mark.parametrize("memory_model", ["stored", "stored+working"])
def test_never_worse_than_without(semantics: Any, memory_model: Any) -> None:
    settings = PlanSettings(semantics=semantics, memory_model=memory_model, activations_only=True)
    for name, device in (("gpt3-175b", "h100-80gb"), ("llama-3-8b", "rtx-4090")):
        run = run_of(name, device, pp=4)
        plain = RunPlanner(run, settings)
        both = RunPlanner(run, replace(settings, offload=True))
        assert both.smallest <= plain.smallest
        for share in (0, 1, 5, 20):
            budget = plain.smallest + (plain.free - plain.smallest) * share // 20
            less, more = both.plan(budget), plain.plan(budget)
            assert all(plan.optimal for plan in less)
            pairs = list(zip(less, more, strict=True))
            if semantics == "minimal" or memory_model == "stored":
                assert all((a.cost or 0) <= (b.cost or 0) for a, b in pairs)
            assert all((plan.peak_bytes or 0) <= budget for plan in less)
        assert all(not g.moved_bytes for plan in both.plan(2**50) for g in plan.groups)


def test_never_worse_than_without_on_the_whole_gpu() -> None:
    """What else a GPU holds is counted for offload apart, and never against plans without."""
    run = load_run("llama-3-8b", device="h100-80gb")
    planners = []
    for offload in (False, True):
        settings = PlanSettings(memory_model="stored+working", offload=offload)
        planners.append(RunPlanner(run, settings))
    plain, both = planners
    assert both.smallest <= plain.smallest
    for share in (0, 1, 3, 10, 20):
        budget = plain.smallest + (plain.free - plain.smallest) * share // 20
        (less,), (more,) = both.plan(budget), plain.plan(budget)
        assert less.cost is not None
        assert more.cost is not None
        assert less.cost <= more.cost
        assert less.peak_bytes is not None
        assert less.peak_bytes <= budget


def test_a_slow_link_is_not_used() -> None:
    run = run_of()
    assert run.device is not None
    slow = run.device.model_copy(update={"host_copy_bandwidth_bytes_per_second": 1e6})
    plain = RunPlanner(run, PLAIN)
    both = RunPlanner(replace(run, device=slow), replace(PLAIN, offload=True))
    budget = 2 * plain.smallest
    assert [p.cost for p in both.plan(budget)] == [p.cost for p in plain.plan(budget)]


def test_small_tensors_stay() -> None:
    planner = RunPlanner(run_of(), replace(PLAIN, offload=True))
    (run,) = planner.model.kinds
    layer = planner.layer(run.graph)
    names = movable(layer)
    assert "probs" in names
    for name in layer.saved_for_backward | {layer.input}:
        large = layer.tensors[name] * SMALLEST_SHARE >= layer.total_saved_bytes
        assert (name in names) == large


def test_the_result_names_what_moves() -> None:
    result = plan_command(
        [run_of()],
        "8GB",
        memory_model="stored+working",
        activations_only=True,
        semantics="minimal",
        method="optimal",
        points=0,
        same_on_all_stages=False,
        offload=True,
        emit=None,
    )
    document = result.document()
    (stage,) = document["stages"]
    moved = sum(row["count"] * row["offloaded_bytes"] for row in stage["layers"])
    assert document["offload"] is True
    assert stage["host_bytes"] == moved > 0
    for row in stage["layers"]:
        assert bool(row["offloaded"]) == bool(row["offloaded_bytes"])
        assert not set(row["offloaded"]) & set(row["kept"])
    held = sum(row["count"] * row["stored_bytes"] for row in stage["layers"])
    works = max(row["working_bytes"] for row in stage["layers"])
    on_the_way = max(row["offloaded_bytes"] for row in stage["layers"])
    assert document["peak_bytes"] == held + works + on_the_way
    bare = next(r for r in document["rivals"] if r["name"] == "cheapest plan without offload")
    assert bare["cost_seconds"] > document["cost_seconds"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--memory", "8GB"], "needs a device"),
        (["--device", "trainium-2"], "no known rate of copies"),
        (["--device", "h100-80gb", "--memory-model", "timeline"], "not planned with"),
        (["--device", "h100-80gb", "--method", "greedy"], "not planned with"),
        (["--device", "h100-80gb", "--emit", "torch"], "no target express"),
    ],
)
def test_what_it_cannot_do_is_refused(cli: Cli, extra: list[str], words: str) -> None:
    result = cli(
        "plan", "gpt3-175b", "--tp", "8", "--sp", "--activations-only", "--offload", *extra
    )
    assert result.code == 2
    assert words in result.err


def test_a_problem_of_ones_own_has_no_times(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "problem.json"
    file.write_text('{"layer_types": {}}')
    result = cli("plan", str(file), "--offload")
    assert result.code == 2
    assert "--offload would have no effect" in result.err


@pytest.mark.parametrize("seed", range(40))
def test_one_plan_for_several_gpus(seed: int) -> None:
    """What may be stored is the least that any of them leaves, for each working set."""
    from actcalc.solve.stack import solve_shared

    rng = random.Random(seed)
    rows = [(rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 20)) for _ in range(4)]
    options = OptionSet.of([Option(*row) for row in rows])
    holders = [(rng.randint(0, 9), rng.randint(1, 4)) for _ in range(3)]
    count = rng.randint(1, 4)
    best: dict[int, int] = {}
    for chosen in product(range(len(options)), repeat=count):
        held = sum(options.stored[i] for i in chosen)
        works = max(options.working[i] for i in chosen)
        peak = max(other + m * held + works for other, m in holders)
        assert peak == Room(tuple((Beside.of(other), m) for other, m in holders)).peak(held, works)
        cost = sum(options.cost[i] for i in chosen)
        best[peak] = min(cost, best.get(peak, cost))
    for budget in range(min(best) - 1, max(best) + 2, 3):
        plan = solve_shared(
            [LayerGroup("kind", options, count)],
            holders,
            budget_bytes=budget,
            peak_model="stored+working",
        )
        assert plan.cost == min((c for peak, c in best.items() if peak <= budget), default=None)
        if plan.cost is None:
            assert plan.smallest_budget_bytes == min(best)


def test_offload_is_refused_where_order_counts() -> None:
    options = OptionSet.of([Option(1, 1, 1, None, 1)])
    with pytest.raises(SpecError, match="not planned in the memory model"):
        solve_groups(
            [LayerGroup("kind", options, 2)],
            inflight=1,
            const_bytes=0,
            budget_bytes=9,
            peak_model="timeline",
        )
