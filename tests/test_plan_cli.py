"""``actcalc plan`` from outside: exit codes, JSON keys, errors, text that can be pasted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPT3 = ["plan", "gpt3-175b", "--tp", "8", "--sp", "--activations-only", "--device", "a100-80gb"]
INSTANCES = Path(__file__).parent / "data" / "planner_instances.json"


Cli = Callable[..., Any]


def document(cli: Cli, *args: str) -> tuple[int, dict[str, Any]]:
    outcome = cli(*args, "--json")
    found: dict[str, Any] = outcome.json
    return outcome.code, found


def test_the_contract(cli: Cli) -> None:
    """Keys of the design, and budgets from the leanest to the free one."""
    last: float | None = None
    for budget in ("2GB", "6GB", "16GB", "34.43GB"):
        args = [*GPT3, "--memory", budget, "--memory-model", "stored", "--semantics", "minimal"]
        code, found = document(cli, *args)
        assert code == 0
        assert found["feasible"] is found["optimal"] is True
        assert found["lower_bound"] == found["cost_seconds"]
        assert "cost_flops" not in found
        assert found["stored_bytes"] <= found["memory_bytes"]
        layers = found["stages"][0]["layers"]
        assert sum(one["count"] for one in layers) == 96
        assert all(isinstance(one["recompute"], list) for one in layers)
        assert last is None or found["cost_seconds"] <= last
        last = found["cost_seconds"]
    assert last == 0


def test_infeasible_exits_with_one(cli: Cli) -> None:
    code, found = document(cli, *GPT3, "--memory", "500MB")
    assert code == 1
    assert found["feasible"] is found["optimal"] is False
    assert found["cost_seconds"] is found["lower_bound"] is None
    assert found["smallest_memory_bytes"] == 956_301_312
    code, out, _ = cli(*GPT3, "--memory", "500MB")
    assert code == 1
    assert "956 MB" in out


@pytest.mark.parametrize(
    "extra",
    [["--memory", "-1"], ["--memory", "0"], ["--memory", "70 potatoes"], ["--memory", "90GB"],
     ["--memory", "6GB", "--memory-model", "magic"], ["--memory", "6GB", "--method", "luck"],
     ["--memory", "6GB", "--semantics", "x"], ["--memory", "6GB", "--emit", "jax"],
     ["--memory", "6GB", "--points", "5"], ["--memory", "6GB", "--frontier", "--points", "1"],
     ["--memory", "6GB", "--method", "greedy", "--semantics", "module"],
     ["--memory", "6GB", "--pp", "4", "--vpp", "2", "--memory-model", "timeline"]],
)  # fmt: skip
def test_bad_input(cli: Cli, extra: list[str]) -> None:
    code, out, err = cli(*GPT3, *extra)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "hint: " in err


def test_no_budget_at_all(cli: Cli) -> None:
    code, _, err = cli("plan", "gpt2", "--activations-only")
    assert code == 2
    assert "--memory" in err


def test_the_whole_gpu(cli: Cli) -> None:
    args = ["plan", "llama-3.1-405b", "--tp", "8", "--sp", "--pp", "16", "--layers-per-stage",
            "7,8x14,7", "--dp", "8", "--zero", "1", "--device", "h100-80gb"]  # fmt: skip
    code, found = document(cli, *args)
    assert code == 0
    assert not found["activations_only"]
    assert len(found["stages"]) == 16
    assert all(stage["rest_bytes"] > 0 for stage in found["stages"])
    assert found["peak_bytes"] <= found["memory_bytes"]


def test_methods_and_frontier(cli: Cli) -> None:
    base = [*GPT3, "--memory", "8GB", "--memory-model", "stored"]
    costs = {}
    for method in ("optimal", "greedy", "sqrt"):
        _, found = document(cli, *base, "--method", method)
        costs[method] = found["cost_seconds"]
        assert found["lower_bound"] <= found["cost_seconds"]
    assert costs["optimal"] < costs["greedy"] < costs["sqrt"]
    _, found = document(cli, *base, "--frontier", "--points", "7")
    points = found["frontier"]
    assert len(points) == 7
    assert points[-1]["cost_seconds"] == 0
    assert points[-1]["memory_bytes"] == 96 * 358_612_992
    prices = [point["cost_seconds"] for point in points]
    assert prices == sorted(prices, reverse=True)


def test_rivals_cost_more(cli: Cli) -> None:
    _, found = document(cli, *GPT3, "--memory", "12GB")
    fitting = [r for r in found["rivals"] if r["cost_seconds"] is not None]
    assert {"selective", "full"} <= {r["name"] for r in fitting}
    assert all(r["cost_per_plan_cost_ratio"] >= 1 for r in fitting)


@pytest.mark.parametrize(
    ("target", "words"),
    [("megatron", "--recompute-granularity selective"), ("torch", "def apply(layers"),
     ("torchtitan", "[activation_checkpoint]"), ("deepspeed", "activation_checkpoint_interval"),
     ("transformers", "use_reentrant")],
)  # fmt: skip
def test_paste(cli: Cli, target: str, words: str) -> None:
    code, out, _ = cli(*GPT3, "--memory", "12GB", "--emit", target)
    assert code == 0
    assert words in out
    assert "times the cost of the optimum" in out.splitlines()[0]
    if target == "torch":
        compile(out, "snippet", "exec")
    code, found = document(cli, *GPT3, "--memory", "12GB", "--emit", target)
    assert found["emitted"]["text"] == out


def test_a_problem_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    for instance in json.loads(INSTANCES.read_text())["instances"][:4]:
        path = tmp_path / "problem.json"
        path.write_text(json.dumps({k: v for k, v in instance.items() if k != "oracle"}))
        code, found = document(cli, "plan", str(path))
        assert found["cost"] == instance["optimal_cost"]
        assert code == (0 if found["feasible"] else 1)
        assert found["lower_bound"] == found["cost"]
        code, out, _ = cli("plan", str(path))
        assert out
    code, _, err = cli("plan", str(path), "--memory", "6GB")
    assert code == 2
    assert "--memory" in err
    code, _, err = cli("plan", str(INSTANCES))
    assert code == 2
    path.write_text(json.dumps({"layer_types": 3}))
    code, _, err = cli("plan", str(path))
    assert code == 2
    assert err.startswith("error: ")


def test_reads_at_80_columns(cli: Cli) -> None:
    for extra in ([], ["--semantics", "module"], ["--pp", "8"], ["--frontier"]):
        code, out, _ = cli(*GPT3, "--memory", "8GB", *extra)
        assert code == 0
        assert max(len(line) for line in out.splitlines()) <= 80
        assert "…" not in out
