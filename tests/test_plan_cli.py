"""``actcalc plan`` from outside: exit codes, JSON keys, errors, text that can be pasted."""

from __future__ import annotations

import csv
import io
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
    run = [*GPT3, "--memory-model", "stored+working"]
    code, found = document(cli, *run, "--memory", "500MB")
    assert code == 1
    assert found["feasible"] is found["optimal"] is False
    assert found["cost_seconds"] is found["lower_bound"] is None
    assert found["smallest_memory_bytes"] == 956_301_312
    code, out, _ = cli(*run, "--memory", "500MB")
    assert code == 1
    assert "956 MB" in out


@pytest.mark.parametrize(
    "extra",
    [["--memory", "-1"], ["--memory", "0"], ["--memory", "70 potatoes"], ["--memory", "90GB"],
     ["--memory", "6GB", "--memory-model", "magic"], ["--memory", "6GB", "--method", "luck"],
     ["--memory", "6GB", "--semantics", "x"], ["--memory", "6GB", "--emit", "jax"],
     ["--memory", "80GiB"], ["--memory", "6GB", "--policy", "nonsense"],
     ["--memory", "70"], ["--memory", "6GB", "--loss", "fused"],
     ["--memory", "6GB", "--optimizer", "adam8bit"], ["--memory", "6GB", "--recipe", "mixed"],
     ["--memory", "6GB", "--offload-states", "optimizer"], ["--memory", "6GB", "--shards", "2"],
     ["--memory", "6GB", "--points", "5"], ["--memory", "6GB", "--frontier", "--points", "1"],
     ["--memory", "6GB", "--method", "greedy", "--semantics", "module"],
     ["--memory", "6GB", "--method", "greedy", "--memory-model", "timeline"]],
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


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a CSV answer, which are an empty line apart."""
    return [list(csv.DictReader(io.StringIO(part))) for part in text.split("\n\n")]


LLAMA = ["plan", "llama-3-8b", "--time-limit", "120"]


def test_csv_carries_an_infeasible_answer(cli: Cli, tmp_path: Path) -> None:
    args = [*LLAMA, "--memory", "40GB"]
    code, found = document(cli, *args)
    assert code == 1
    code, out, _ = cli(*args, "--format", "csv")
    assert code == 1
    stages, changes = tables(out)
    assert [row["feasible"] for row in stages] == ["False"]
    assert int(stages[0]["smallest_memory_bytes"]) == found["smallest_memory_bytes"]
    # a cell that begins like a formula is guarded
    assert [
        (row["change"].removeprefix("'"), int(row["smallest_memory_bytes"])) for row in changes
    ] == [(one["change"], one["smallest_memory_bytes"]) for one in found["changes"]]
    assert {row["fits"] for row in changes} == {"True", "False"}
    path = tmp_path / "answer.svg"
    assert cli(*args, "-o", str(path)).code == 1
    assert "llama-3-8b: memory of" in path.read_text(encoding="utf-8")
    for form in ("markdown", "table"):
        code, text, _ = cli(*args, "--format", form)
        assert code == 1
        assert "Does not fit: no plan needs less than 64.6 GB" in text
        assert "--optimizer adam8bit" in text


def test_the_columns_of_csv_do_not_depend_on_the_run(cli: Cli) -> None:
    header = None
    for extra in (
        ["--memory", "200GB"],
        ["--memory", "20GB"],
        ["--memory", "200GB", "--device", "h200", "--memory", "100GB"],
        ["--memory", "100GB", "--device", "h200", "--offload"],
        ["--memory", "40GB", "--tp", "2", "--sp", "--pp", "4"],
        ["--memory", "30GB", "--activations-only", "--semantics", "module"],
    ):
        out = cli(*LLAMA, *extra, "--format", "csv").out
        header = header or out.splitlines()[0]
        assert out.splitlines()[0] == header
    names = (header or "").split(",")
    assert {"stage", "stored_bytes", "cost_seconds", "cost_flops", "feasible"} <= set(names)
    assert "cost" not in names


def test_csv_has_every_stage(cli: Cli) -> None:
    args = [*LLAMA, "--memory", "100GB", "--tp", "2", "--sp", "--pp", "4"]
    _, found = document(cli, *args)
    (rows, *_) = tables(cli(*args, "--format", "csv").out)
    layers = [
        (str(stage["stage"]), str(one["count"]), str(one["stored_bytes"]))
        for stage in found["stages"]
        for one in stage["layers"]
    ]
    assert [(row["stage"], row["count"], row["stored_bytes"]) for row in rows] == layers
    assert {row["stage"] for row in rows} == {"0", "1", "2", "3"}
    # People read equal stages in one line, and none of the columns for machines.
    shown = cli(*args).out
    assert "smallest" not in shown
    assert "feasible" not in shown


def test_emit_is_never_half_an_answer(cli: Cli, tmp_path: Path) -> None:
    base = [*GPT3, "--memory", "12GB", "--emit", "torch"]
    for extra in (["--frontier"], ["--format", "csv"], ["--format", "markdown"]):
        code, out, err = cli(*base, *extra)
        assert (code, out) == (2, "")
        assert "--emit torch" in err
    _, found = document(cli, *base, "--frontier", "--points", "3")
    assert len(found["frontier"]) == 3
    assert found["emitted"]["text"]
    for name in ("plan.py", "plan.sh", "plan.toml", "plan.txt", "plan"):
        path = tmp_path / name
        assert cli(*base, "-o", str(path)).code == 0
        assert path.read_text() == found["emitted"]["text"]
    path = tmp_path / "plan.json"
    assert cli(*base, "-o", str(path)).code == 0
    assert json.loads(path.read_text())["emitted"]["text"] == found["emitted"]["text"]
    # Without --emit an ending still has to name a format.
    assert cli(*GPT3, "--memory", "12GB", "-o", str(tmp_path / "x.py")).code == 2


def test_training_changes_the_rest_of_the_gpu(cli: Cli) -> None:
    args = [*LLAMA, "--memory", "120GB"]

    def rest(*extra: str) -> int:
        code, found = document(cli, *args, *extra)
        assert code == 0
        bytes_: int = found["stages"][0]["rest_bytes"]
        return bytes_

    plain = rest()
    for flags in (["--optimizer", "adam8bit"], ["--optimizer", "sgd"], ["--lora-rank", "16"],
                  ["--offload-states", "optimizer"]):  # fmt: skip
        assert rest(*flags) < plain, flags
    assert rest("--recipe", "mixed", "--memory", "200GB") > plain
    assert rest("--offload-states", "optimizer") == rest("--set", "offload=optimizer")
    small = ["plan", "gpt2", "--micro-batch", "32", "--memory", "60GB"]
    _, full = document(cli, *small)
    _, fused = document(cli, *small, "--loss", "fused")
    assert fused["stages"][0]["rest_bytes"] < full["stages"][0]["rest_bytes"]
    shown = cli(*args, "--optimizer", "adam8bit", "--loss", "fused").out
    assert "adam8bit  pure states: weight 2, gradient 2, master 0, moments 2.03 B" in shown
    assert "fused cross-entropy" in shown
    assert "LoRA r 8 on mlp" in cli(*args, "--lora-rank", "8", "--lora-targets", "mlp").out
    assert "states:" not in cli(*args, "--activations-only").out
    code, _, err = cli(*args, "--offload-states", "activations")
    assert code == 2
    assert "--offload" in err


def test_what_to_change_acts_on_the_larger_part(cli: Cli) -> None:
    """States are sharded, shrunk or moved; each figure is that of a plan with the change."""
    _, found = document(cli, *LLAMA, "--memory", "40GB")
    changes = {one["change"]: one["smallest_memory_bytes"] for one in found["changes"]}
    wanted = {"--optimizer adam8bit", "--lora-rank 16", "--offload-states optimizer",
              "--dp 8 --zero 3"}  # fmt: skip
    assert wanted <= set(changes)
    assert list(changes.values()) == sorted(changes.values())
    assert all(size < found["smallest_memory_bytes"] for size in changes.values())
    for change in ("--optimizer adam8bit", "--dp 8 --zero 2"):
        _, again = document(cli, *LLAMA, *change.split(), "--memory", "10GB")
        assert again["smallest_memory_bytes"] == changes[change]
        code, _ = document(cli, *LLAMA, *change.split(), "--memory", f"{changes[change]}B")
        assert code == 0
    shown = cli(*LLAMA, "--memory", "40GB").out
    assert "States are the larger part" in shown
    assert "--lora-rank trains adapters alone" in shown
    # Where activations are the larger part, nothing is said of states.
    shown = cli("plan", "gpt2", "--seq", "1024", "--micro-batch", "64", "--memory", "6GB").out
    assert "States are the larger part" not in shown
    # Activations alone: states are no part of the budget.
    _, found = document(cli, *GPT3, "--memory", "500MB")
    assert not any("optimizer" in one["change"] for one in found["changes"])


def test_a_problem_with_a_missing_key_is_still_one(cli: Cli, tmp_path: Path) -> None:
    instances = json.loads(INSTANCES.read_text())["instances"]
    data = {k: v for k, v in instances[0].items() if k != "oracle"}
    path = tmp_path / "problem.json"
    for key in ("layer_types", "stack", "budget_bytes"):
        path.write_text(json.dumps({k: v for k, v in data.items() if k != key}))
        code, _, err = cli("plan", str(path))
        assert code == 2
        assert f"lacks '{key}'" in err
    path.write_text(json.dumps({**data, "budget_bytes": 1}))
    code, out, _ = cli("plan", str(path), "--format", "csv")
    assert code == 1
    (rows,) = tables(out)
    assert rows[0]["feasible"] == "False"
    assert int(rows[0]["smallest_memory_bytes"]) > 1
    # A model's config may list layer_types as well.
    path.write_text(json.dumps({"model_type": "nothing-known", "layer_types": ["full_attention"]}))
    code, _, err = cli("plan", str(path), "--memory", "6GB")
    assert code == 2
    assert "planning problem" not in err


def test_costs_of_segments_are_labelled(cli: Cli, tmp_path: Path) -> None:
    instances = json.loads(INSTANCES.read_text())["instances"]
    data = next(one for one in instances if one["id"] == "I13_segments_17000")
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({k: v for k, v in data.items() if k != "oracle"}))
    _, found = document(cli, "plan", str(path))
    groups = found["groups"]
    assert any(group["segment"] > 1 for group in groups)
    total = sum(group["cost"] * group["count"] // group["segment"] for group in groups)
    assert total == found["cost"]
    assert "a segment" in cli("plan", str(path)).out
    (rows,) = tables(cli("plan", str(path), "--format", "csv").out)
    assert [int(row["cost"]) for row in rows] == [group["cost"] for group in groups]


def test_reads_at_80_columns(cli: Cli) -> None:
    for extra in ([], ["--semantics", "module"], ["--pp", "8"], ["--frontier"]):
        code, out, _ = cli(*GPT3, "--memory", "8GB", *extra)
        assert code == 0
        assert max(len(line) for line in out.splitlines()) <= 80
        assert "…" not in out


def test_rows_fold_and_rests_add_up(cli: Cli) -> None:
    """A hybrid's kinds are rows, not its layers; peak, stored and rest belong to one moment."""
    run = ["plan", "nemotron-h-56b", "--tp", "8", "--sp", "--dp", "8", "--zero", "1"]
    device = ["--device", "h100-80gb"]
    assert len(cli(*run, *device).out.splitlines()) < 60
    _, found = document(cli, *run, *device)
    (stage,) = found["stages"]
    assert sum(one["count"] for one in stage["layers"]) == 118
    assert stage["rest_bytes"] + stage["stored_bytes"] == found["peak_bytes"]
    whole = {rival["name"] for rival in found["rivals"] if set(rival["counts"]) in ({0}, {118})}
    assert not whole


def test_the_busiest_stage_is_named(cli: Cli) -> None:
    run = ["plan", "gpt3-175b", "--tp", "8", "--sp", "--pp", "8", "--activations-only"]
    shown = cli(*run, "--device", "a100-80gb", "--memory", "8GB")
    assert "Stage 0 re-runs most" in shown.out
    _, found = document(cli, *run, "--device", "a100-80gb", "--memory", "8GB")
    costs = [stage["cost_seconds"] for stage in found["stages"]]
    assert costs[0] == max(costs) > costs[-1]
    forward = sum(stage["forward_cost"] for stage in found["stages"])
    assert forward == pytest.approx(found["forward_cost"])
