"""From layer graphs to planning problems, and whole models planned within a budget."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from actcalc.answers.plan import plan_run
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.runs import load_run
from actcalc.plan.budget import parse_bytes
from actcalc.plan.emit.targets import emitted, megatron_flags, megatron_policies
from actcalc.plan.named import Rivals
from actcalc.plan.options import (
    ARRIVAL,
    costs_of,
    module_policies,
    plan_layer,
    policy_option,
    wrapped_modules,
)
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.policy.rules import NONE, parse_policy
from actcalc.run.staged import StagedRun
from actcalc.solve import OptionSet, knapsack, layer_options
from actcalc.solve.frontier import layer_option
from actcalc.specs.run import Run
from tests.sweeps import sampled

GPT3 = {"tp": 8, "sp": True}
MODELS = ("gpt3-175b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b", "bert-large")


def module_options(model: Any, graph: Any, costs: Any, full: Any) -> OptionSet:
    every = module_policies(model, graph, full)
    return OptionSet.of([policy_option(model, graph, costs, policy) for policy in every])


def gpt3(device: str | None = "a100-80gb", **layout: Any) -> Run:
    return load_run("gpt3-175b", layout={**GPT3, **layout}, device=device)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", [None, "h100-80gb"])
def test_nothing_rerun_is_the_policy_none(name: str, device: str | None) -> None:
    """Without re-run a layer of the problem stores exactly what the comparison says."""
    run = load_run(name, device=device)
    staged = StagedRun(run)
    model, costs = staged.graph, costs_of(staged)
    for kind in model.kinds:
        layer = plan_layer(model, kind.graph, costs)
        nothing = layer_option(layer, 0)
        none = policy_option(model, kind.graph, costs, NONE)
        assert nothing.stored == none.stored
        assert (nothing.working, nothing.cost) == (none.working, none.cost) == (0, 0)
        forbidden = {op.name for op in kind.graph.ops if not op.rerunnable}
        assert layer.forbid_recompute - {ARRIVAL} == forbidden


@pytest.mark.parametrize("name", MODELS)
def test_minimal_is_never_worse_than_modules(name: str) -> None:
    """For every module policy some choice of single ops stores no more and costs no more."""
    run = load_run(name, device="h100-80gb")
    staged = StagedRun(run)
    model, costs = staged.graph, costs_of(staged)
    for kind in model.kinds:
        if any(not op.rerunnable for op in kind.graph.ops):
            continue  # wrapping a module re-runs its router too; single ops may not
        minimal = layer_options(plan_layer(model, kind.graph, costs))
        best = list(zip(minimal.stored, minimal.cost, strict=True))
        wrapped = module_options(model, kind.graph, costs, staged.full)
        for stored, cost in zip(wrapped.stored, wrapped.cost, strict=True):
            assert any(k <= stored and c <= cost for k, c in best)


def test_module_options_are_the_policies() -> None:
    """An exhaustive look at GPT-3: no combination of modules is missed."""
    run = gpt3()
    staged = StagedRun(run)
    model, costs = staged.graph, costs_of(staged)
    graph = model.runs[0].graph
    options = module_options(model, graph, costs, staged.full)
    names = wrapped_modules(model, graph)
    assert set(names) == {"core_attn", "attention", "mlp", "layernorm"}
    points = list(zip(options.stored, options.working, options.cost, strict=True))
    for size in range(len(names) + 1):
        for chosen in combinations(names, size):
            name = "+".join(chosen) or "none"
            one = policy_option(model, graph, costs, parse_policy(name))
            assert any(
                k <= one.stored and k + w <= one.stored + one.working and c <= one.cost
                for k, w, c in points
            )


def test_flops_count_first_and_bytes_break_ties() -> None:
    """Without a device FLOPs decide, and nothing that is free in FLOPs is re-run in vain."""
    planner = RunPlanner(gpt3(None), PlanSettings(activations_only=True, memory_model="stored"))
    (plan,) = planner.plan(96 * 358_612_992)
    assert (plan.cost, plan.groups[0].recompute) == (0, ())
    (plan,) = planner.plan(96 * 200_000_000)
    assert planner.costs.value(plan.cost or 0) == 0
    assert plan.groups[0].recompute != ()
    graph = planner.model.runs[0].graph
    flops = {op.name: int(op.flops.value(planner.model.sizes)) for op in graph.ops}
    assert all(flops[name] == 0 for group in plan.groups for name in group.recompute)


def test_gpt3_frontier_and_named_policies() -> None:
    """34.43 GB without re-run; below, cheaper than any named policy with the same memory."""
    planner = RunPlanner(gpt3(), PlanSettings(activations_only=True, memory_model="stored"))
    rivals = Rivals(planner)
    assert planner.free == 96 * 358_612_992
    selective = rivals.single("selective", 96 * 106_954_752)
    assert selective.peak_bytes == 96 * 106_954_752  # 10.27 GB
    (at_selective,) = planner.plan(selective.peak_bytes)
    assert at_selective.optimal
    assert selective.cost is not None
    assert at_selective.cost is not None
    assert at_selective.cost < selective.cost
    (at_16,) = planner.plan(16_000_000_000)
    assert at_16.cost is not None
    assert at_16.cost <= 0.5 * selective.cost
    single = rivals.best_of([*rivals.names, "sqrt"], 6_000_000_000)
    pair = rivals.best_pair(6_000_000_000)
    (at_6,) = planner.plan(6_000_000_000)
    assert at_6.cost is not None
    assert single is not None
    assert pair is not None
    assert at_6.cost < (pair.cost or 0) < (single.cost or 0)


@pytest.mark.parametrize("memory_model", ["stored", "stored+working", "timeline"])
@pytest.mark.parametrize("semantics", ["minimal", "module"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt3-175b", {"tp": 8, "sp": True, "pp": 4}), ("mixtral-8x7b", {"pp": 2, "ep": 2, "dp": 2})],
)
def test_budgets_are_kept_and_costs_fall(
    name: str, layout: dict[str, Any], semantics: Any, memory_model: Any
) -> None:
    run = load_run(name, layout=layout, device="h100-80gb")
    planner = RunPlanner(
        run, PlanSettings(activations_only=True, memory_model=memory_model, semantics=semantics)
    )
    low, high = planner.smallest, planner.free
    last: int | None = None
    for i in range(9):
        budget = low + (high - low) * i // 8
        plans = planner.plan(budget)
        assert all(plan.optimal for plan in plans)
        assert all(plan.peak_bytes is not None and plan.peak_bytes <= budget for plan in plans)
        cost = sum(plan.cost or 0 for plan in plans)
        assert last is None or cost <= last
        last = cost
    assert last == 0
    assert not all(plan.feasible for plan in planner.plan(low - 1))


def test_later_stages_recompute_less() -> None:
    """1F1B: stage r of p holds p - r micro-batches."""
    planner = RunPlanner(gpt3(pp=8), PlanSettings(activations_only=True))
    plans = planner.plan(14_000_000_000)
    assert [stage.in_flight for stage in planner.stages] == [(8 - i,) for i in range(8)]
    costs = [plan.cost or 0 for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 < costs[0]


def test_one_plan_for_all_stages() -> None:
    planner = RunPlanner(gpt3(pp=8), PlanSettings(activations_only=True, same_on_all_stages=True))
    free = RunPlanner(gpt3(pp=8), PlanSettings(activations_only=True))
    plans = planner.plan(14_000_000_000)
    assert len({plan.groups for plan in plans}) == 1
    assert all(plan.optimal for plan in plans)
    first = free.plan(14_000_000_000)
    assert plans[0].cost == first[0].cost
    assert sum(plan.cost or 0 for plan in plans) > sum(plan.cost or 0 for plan in first)
    uneven = gpt3(pp=2, layers_per_stage=(40, 56))
    with pytest.raises(SpecError, match="different layers"):
        RunPlanner(uneven, PlanSettings(activations_only=True, same_on_all_stages=True)).plan(
            10**10
        )


def test_rivals_agree_with_every_mix_tried_one_by_one() -> None:
    """The best mix of two, against policies laid out layer by layer."""
    run = load_run("gpt3-175b", layout={**GPT3, "pp": 2}, device="a100-80gb", model={"layers": 8})
    for memory_model in ("stored", "stored+working", "timeline"):
        planner = RunPlanner(run, PlanSettings(activations_only=True, memory_model=memory_model))
        rivals = Rivals(planner)
        low = rivals.single("full", 10**12).peak_bytes or 0
        for budget in (low, low + 10**8, low + 5 * 10**8, low + 2 * 10**9):
            best = rivals.best_pair(budget)
            found = []
            for first in rivals.names:
                for second in rivals.names:
                    total = 0
                    for stage in planner.stages:
                        fits = [
                            cost
                            for n in range(stage.layers + 1)
                            for cost, peak in [_mixed(rivals, stage, first, second, n)]
                            if peak <= budget
                        ]
                        total += min(fits, default=10**18)
                    found.append(total)
            assert best is not None
            assert best.cost == min(found)


def _mixed(rivals: Rivals, stage: Any, first: str, second: str, count: int) -> tuple[int, int]:
    (graphs,), m, planner = stage.graphs, stage.in_flight[0], rivals.planner
    names = [first] * count + [second] * (stage.layers - count)
    pairs = [planner.ways.named(graphs[0], rivals.policy(name)) for name in names]
    cost = sum(option.cost for option, _ in pairs)
    stored = [option.stored for option, _ in pairs]
    model = planner.settings.memory_model
    if model == "stored":
        return cost, m * sum(stored)
    if model == "stored+working":
        return cost, m * sum(stored) + max(option.working for option, _ in pairs)
    peaks = [
        (m - 1) * sum(stored) + sum(stored[:at]) + max(way.forward, way.backward)
        for at, (_, way) in enumerate(pairs)
    ]
    return cost, max(peaks)


@pytest.mark.parametrize(
    ("name", "layout", "workload", "framework"),
    [
        ("llama-3-8b", {"tp": 4, "sp": True, "pp": 2}, {}, None),
        ("llama-3.1-8b", {"zero": 3, "dp": 8}, {"seq": 32768}, None),
        ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8, "vpp": 2}, {}, "megatron"),
        pytest.param(
            "deepseek-v3",
            {"ep": 8, "dp": 8, "zero": 1},
            {},
            "megatron",
            marks=pytest.mark.sweep,
        ),
        ("gpt2", {}, {"micro_batch": 8}, "transformers"),
    ],
)
def test_the_rest_of_the_gpu_is_that_of_memory(
    name: str, layout: Any, workload: Any, framework: str | None
) -> None:
    """Layers and the rest together are what `memory` says, and the memory models are nested."""
    from dataclasses import replace

    from actcalc.answers.memory import memory_run

    run = load_run(name, layout=layout, workload=workload, framework=framework, device="h100-80gb")
    totals = {
        policy: [stage.total_bytes for stage in memory_run(replace(run, policies=(policy,))).stages]
        for policy in ("none", "full")
    }
    models: tuple[Any, ...] = ("stored", "timeline", "stored+working")
    planners = []
    for model in models:
        planners.append(RunPlanner(run, PlanSettings(memory_model=model)))
        for policy, expected in totals.items():
            named = planners[-1].staged.policy(policy)
            for stage, total in zip(planners[-1].stages, expected, strict=True):
                peak = planners[-1].laid(stage, named).peak
                assert peak == total or (peak > total) == (model == "stored+working")
                assert model != "timeline" or peak == total
    smallest = [planner.smallest for planner in planners]
    assert smallest == sorted(smallest)
    for share in (1.0, 1.1, 1.5):
        budget = int(smallest[-1] * share)
        costs = [sum(plan.cost or 0 for plan in each.plan(budget)) for each in planners]
        assert costs == sorted(costs)
    result = plan_run(run, int(1.1 * smallest[-1]), planners[-1].settings)
    assert result.feasible
    assert not result.activations_only


@pytest.mark.parametrize(
    ("text", "size"),
    [("70GiB", 70 * 2**30), ("6GB", 6 * 10**9), ("500 MB", 5 * 10**8), ("1e9", 10**9),
     ("123B", 123), ("0.5kB", 500), ("1048576", 2**20), ("10.27GB", 10_270_000_000),
     ("2tib", 2 * 2**40)],
)  # fmt: skip
def test_budgets_in_words(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "-1", "0", "0GB", "70 potatoes", "GiB", "1e99", "nan", "inf", "-6GB", "1,5GB", "6 G B",
     "99999999TB", "6iB", "0x10", "70", "80.5", "1048575", "1" * 400, "٣GB"],
)  # fmt: skip
def test_bad_budgets_are_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_bytes(text)
    assert caught.value.hint


def test_infeasible_says_what_would_do() -> None:
    run = load_run("gpt2", device="a100-40gb", framework="transformers")
    result = plan_run(run, 10_000)
    assert not result.feasible
    assert result.cost_seconds is None
    least = result.smallest_memory_bytes
    assert least is not None
    assert plan_run(run, least).feasible
    assert not plan_run(run, least - 1).feasible
    assert result.changes
    assert all(change.smallest_memory_bytes < least for change in result.changes)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed", "transformers", "torch"])
def test_emitted_plans_fit_and_are_never_below_the_optimum(target: str) -> None:
    planner = RunPlanner(gpt3(pp=4), PlanSettings(activations_only=True))
    for budget in (10 * 10**9, 20 * 10**9, 80 * 10**9):
        found = emitted(target, planner, budget)
        assert found.feasible
        assert found.peak_bytes is not None
        assert found.peak_bytes <= budget
        ratio = found.cost_per_optimum_cost_ratio
        assert ratio is None or ratio >= 1
        assert found.text.startswith("# gpt3-175b")
    assert found.cost_seconds == 0
    assert not emitted(target, planner, 10**6).feasible


def test_megatron_flags() -> None:
    names = megatron_policies(RunPlanner(gpt3(pp=8), PlanSettings(activations_only=True)))
    assert {"none", "core_attn", "core_attn+mlp+layernorm", "uniform:12", "block:1"} <= set(names)
    assert megatron_flags("block:3").split() == [
        "--recompute-granularity", "full", "\\", "--recompute-method", "block", "\\",
        "--recompute-num-layers", "3",
    ]  # fmt: skip
    assert megatron_flags("core_attn+mlp").endswith("--recompute-modules core_attn mlp")


@pytest.mark.parametrize(
    "name", sampled(["gpt3-175b", "gpt-oss-20b", "deepseek-v3"], ("gpt3-175b",))
)
def test_both_searches_find_the_same_optimum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By single deviations, and in two halves of the layers."""
    run = load_run(name, model={"layers": 6}, device="h100-80gb")
    found = {}
    for few, many in ((0, 10**9), (10**9, 0), (0, 0)):
        monkeypatch.setattr(knapsack, "FEW_LAYERS", few)
        monkeypatch.setattr(knapsack, "MANY_STATES", many)
        planner = RunPlanner(run, PlanSettings(activations_only=True))
        low, high = planner.smallest, planner.free
        budgets = [low + (high - low) * i // 6 for i in range(7)]
        found[few, many] = [[plan.cost for plan in planner.plan(b)] for b in budgets]
    first, *others = found.values()
    assert all(other == first for other in others)


MANY_WAYS = {"deepseek-v4-flash", "gemma-3n-e2b", "gemma-3n-e4b"}


@pytest.mark.parametrize("name", presets.names("models"))
def test_every_preset_can_be_planned(name: str) -> None:
    run = load_run(name)
    planner = RunPlanner(run, PlanSettings(activations_only=True, memory_model="stored"))
    middle = (planner.smallest + planner.free) // 2
    plans = planner.plan(middle)
    assert all(plan.feasible for plan in plans)
    # thousands of ways a layer: the time limit comes before the proof
    assert name in MANY_WAYS or all(plan.optimal for plan in plans)
