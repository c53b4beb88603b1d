"""The plan of a run and ``actcalc memory`` have one peak, and no named policy beats the plan."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actcalc.answers.memory import memory_run
from actcalc.io.runs import load_run
from actcalc.plan.named import Rivals
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.specs.run import Run

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2, "sp": True, "dp": 4, "zero": 3},
    {"dp": 2, "zero": 1},
    {"pp": 4},
    {"pp": 2, "vpp": 3},
    {"pp": 4, "schedule": "gpipe", "tp": 2},
    {"pp": 2, "schedule": "zb-h1"},
    {"pp": 3, "schedule": "zb-v", "dp": 2, "zero": 2},
    {"pp": 3, "schedule": "dualpipe-v"},
    {"pp": 2, "schedule": "dualpipe"},
    {"pp": 4, "layers_per_stage": (2, 4, 4, 2)},
)
TRAININGS: tuple[dict[str, Any], ...] = ({}, {"lora_rank": 8}, {"optimizer": "sgd"})
MODELS = ("gpt3-175b", "llama-3-8b", "deepseek-v3", "opt-1.3b")
NAMES = ("none", "selective", "full", "sqrt", "uniform:2", "block:1", "every:2", "attention+mlp")


def runs() -> list[Run]:
    rng = random.Random(1)
    found = []
    for index, layout in enumerate(LAYOUTS):
        for training in TRAININGS[: 1 + index % 3]:
            found.append(
                load_run(
                    MODELS[index % len(MODELS)],
                    layout=layout,
                    model={"layers": 12},
                    workload={"seq": rng.choice([256, 2048]), "micro_batch": rng.choice([1, 2])},
                    training=training,
                    framework="megatron",
                    device=rng.choice([None, "h100-80gb"]),
                )
            )
    return found


@pytest.mark.parametrize("run", runs(), ids=lambda run: f"{run.model.name}-{run.layout.pipeline}")
def test_named_policies_have_the_peak_of_memory(run: Run) -> None:
    """To the byte on every stage; and no named policy that fits beats the plan."""
    planner = RunPlanner(run, PlanSettings())
    rivals = Rivals(planner)
    highest = []
    for name in NAMES:
        policy = planner.staged.policy(name)
        stages = memory_run(replace(run, policies=(name,))).stages
        for stage, figure in zip(planner.stages, stages, strict=True):
            assert planner.laid(stage, policy).peak == figure.total_bytes
        highest.append(max(figure.total_bytes for figure in stages))
    for budget in sorted({*highest, min(highest) - 1, (min(highest) + max(highest)) // 2}):
        plans = planner.plan(budget)
        fits = [rivals.single(name, budget) for name in NAMES]
        known = [fit.cost for fit in fits if fit.cost is not None]
        if not all(plan.feasible for plan in plans):
            assert not known
            continue
        assert all((plan.peak_bytes or 0) <= budget for plan in plans)
        cost = planner.total(plan.cost for plan in plans)
        assert cost <= min(known, default=cost)
        pair = rivals.best_pair(budget)
        assert pair is None or cost <= (pair.cost or 0)


@pytest.mark.parametrize("model", ["gemma-2-9b", "llama-3-8b", "gpt2"])
@pytest.mark.parametrize("precision", ["bf16", "amp-bf16"])
def test_a_mask_is_held_for_what_re_runs_alone(model: str, precision: str) -> None:
    """The memory of every policy is enough for a plan, also where masks and copies lie beside."""
    run = load_run(
        model,
        model={"layers": 4},
        workload={"seq": 1024, "attention": "eager", "precision": precision},
        framework="transformers",
    )
    planner = RunPlanner(run, PlanSettings())
    names = ["none", "selective", "mlp", "core_attn+mlp", "op", "full", "sqrt"]
    names += ["block:1", "every:2"] if precision == "bf16" else []
    rivals = Rivals(planner)
    found = {}
    for name in names:
        found[name] = memory_run(replace(run, policies=(name,))).peak_bytes
        assert planner.laid(planner.stages[0], planner.staged.policy(name)).peak == found[name]
        (plan,) = planner.plan(found[name])
        assert plan.feasible
        assert (plan.peak_bytes or 0) <= found[name]
        assert plan.cost is not None
        assert plan.cost <= (rivals.single(name, found[name]).cost or 0)
    assert len(set(found.values())) > 1


@pytest.mark.parametrize("training", [{"freeze": 4}, {"lora_rank": 8}])
def test_layers_without_backward_are_planned_with_the_others(training: dict[str, Any]) -> None:
    hybrid = "lora_rank" in training
    run = load_run(
        "nemotron-3-nano-30b-a3b" if hybrid else "llama-3-8b",
        model={"layers": 8},
        workload={"seq": 512},
        training=training,
        framework="megatron" if hybrid else "transformers",
    )
    planner = RunPlanner(run, PlanSettings())
    assert any(kind.graph.gradient != "passes" for kind in planner.staged.kinds)
    labels = [kind.label for kind in planner.staged.kinds]
    assert len(set(labels)) == len(labels)
    for name in ("none", "selective", "full"):
        found = memory_run(replace(run, policies=(name,))).peak_bytes
        assert planner.laid(planner.stages[0], planner.staged.policy(name)).peak == found
        (plan,) = planner.plan(found)
        assert plan.feasible
        assert (plan.peak_bytes or 0) <= found


def test_the_optimizer_step_can_be_the_peak() -> None:
    run = load_run(
        "llama-3-8b",
        model={"layers": 2},
        workload={"seq": 128},
        training={"optimizer": "adamw", "fused_optimizer": False},
    )
    report = memory_run(replace(run, policies=("full",)))
    assert report.peak_at == "in the optimizer step"
    planner = RunPlanner(run, PlanSettings())
    (stage,) = planner.stages
    assert planner.laid(stage, planner.full).peak == report.stages[0].total_bytes


def test_command_line_and_memory_agree(cli: Callable[..., Any]) -> None:
    """Every rival's peak in ``plan --json`` is the highest total of ``memory --policy``."""
    run = ["llama-3-8b", "--layers", "8", "--pp", "2", "--vpp", "2", "--framework", "megatron"]
    document = json.loads(cli("plan", *run, "--memory", "2TB", "--json").out)
    assert document["memory_model"] == "timeline"
    names = [rival["name"] for rival in document["rivals"] if " and " not in rival["name"]]
    assert {"none", "selective", "full", "sqrt"} <= set(names)
    for rival in document["rivals"]:
        if rival["name"] in names:
            memory = json.loads(cli("memory", *run, "--policy", rival["name"], "--json").out)
            assert rival["peak_bytes"] == max(s["total_bytes"] for s in memory["stages"])


def test_what_fits_without_re_run_needs_none(cli: Callable[..., Any]) -> None:
    run = ["llama-3-8b", "--seq", "2048", "--device", "h100-80gb"]
    plan = json.loads(cli("plan", *run, "--memory", "70GB", "--json").out)
    memory = json.loads(cli("memory", *run, "--policy", "none", "--json").out)
    assert plan["cost_seconds"] == 0
    assert plan["peak_bytes"] == memory["stages"][0]["total_bytes"] < 70 * 10**9


@pytest.mark.parametrize(
    "args",
    [
        "opt-1.3b --layers 12 --seq 256 --micro-batch 1 --attention eager --tp 1 --pp 3 "
        "--framework megatron --schedule dualpipe-v --dp 2 --zero 2 --memory 3774714112B",
        "opt-1.3b --layers 12 --seq 256 --micro-batch 1 --attention eager --tp 1 --pp 3 "
        "--framework megatron --schedule zb-v --dp 2 --zero 2 --memory 3774714112B",
        "opt-1.3b --layers 12 --seq 256 --micro-batch 1 --attention eager --tp 1 --pp 3 "
        "--framework megatron --vpp 2 --dp 2 --zero 2 --memory 3774714112B",
        "gpt2-medium --layers 4 --seq 1024 --micro-batch 1 --attention flash --no-dropout "
        "--memory 2169356288B",
    ],
)
@pytest.mark.parametrize("model", ["timeline", "stored+working", "stored"])
def test_no_optimum_is_beaten_in_its_own_table(
    cli: Callable[..., Any], args: str, model: str
) -> None:
    plan = json.loads(cli("plan", *args.split(), "--memory-model", model, "--json").out)
    rivals = [rival for rival in plan["rivals"] if rival["cost_flops"] is not None]
    if model == "timeline":
        assert plan["feasible"]
        assert plan["optimal"]
        assert rivals
    for rival in rivals:
        assert rival["cost_flops"] >= plan["cost_flops"]
        assert rival["peak_bytes"] <= plan["memory_bytes"]
