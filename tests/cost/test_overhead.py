"""Where a slow-down comes from: the parts add up to what a comparison prints."""

from __future__ import annotations

import csv
import io
import json

import pytest

from actcalc.answers.compare import compare_run
from actcalc.answers.explain.overhead import overhead
from actcalc.answers.explain.terms import explain_term
from actcalc.errors import SpecError
from actcalc.io.runs import load_run

POLICIES = ("none", "selective", "full", "full-sharded", "ffn", "block:3", "every:2", "norm")


def run_of(name="gpt-22b", **changes):
    return load_run(name, **{"layout": {"tp": 8}, "device": "a100-80gb", **changes})


CASES = {
    "gpt": run_of(),
    "pipeline": run_of(layout={"tp": 8, "pp": 4, "sp": True}, workload={"global_batch": 8}),
    "sharded": run_of("llama-3-8b", layout={"dp": 8, "zero": 3}),
    "moe": run_of("deepseek-v3", layout={"tp": 2, "sp": True, "ep": 4}, framework="megatron"),
    "context": run_of("llama-3-8b", layout={"cp": 4}, framework="megatron"),
}


@pytest.mark.parametrize("run", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_add_up_to_the_comparison(run, policy):
    (found,) = overhead(run, [policy]).policies
    plain, figure = compare_run(_with(run, ("none", policy))).policies
    assert sum(row.rerun_seconds for row in found.rows) == pytest.approx(found.rerun_seconds)
    assert sum(row.forward_seconds for row in found.rows) == pytest.approx(found.forward_seconds)
    assert found.forward_seconds == pytest.approx(figure.layer_forward_seconds)
    assert found.backward_seconds == pytest.approx(plain.layer_backward_seconds)
    added = figure.layer_backward_seconds - plain.layer_backward_seconds
    assert found.rerun_seconds == pytest.approx(added, abs=1e-12)
    assert found.step_seconds == figure.step_seconds
    assert found.slowdown_ratio == pytest.approx(figure.slowdown_ratio)
    parts = sum(part.seconds for part in found.parts)
    assert parts == pytest.approx(figure.step_seconds - plain.step_seconds, abs=1e-9)
    assert found.rungs[-1].ratio == pytest.approx(found.layer_ratio)


def _with(run, policies):
    from dataclasses import replace

    return replace(run, policies=policies)


MIXED = {
    "hybrid": run_of("nemotron-h-56b", layout={"tp": 8, "sp": True}, device="h100-80gb"),
    "split": run_of(
        "nemotron-h-56b",
        layout={"tp": 8, "sp": True, "pp": 2},
        workload={"global_batch": 4},
        device="h100-80gb",
    ),
    "dense first": CASES["moe"],
}


@pytest.mark.parametrize("run", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("policy", ["selective", "full", "block:3", "moe_act"])
def test_every_kind_of_layer_adds_up_to_the_step(run, policy):
    if policy == "moe_act" and "deepseek" not in run.model.name:
        policy = "attention"
    found = overhead(run, [policy])
    (one,) = found.policies
    assert sum(layer.count for layer in one.layers) == found.stage_layers
    assert len({layer.layer for layer in one.layers}) == len(one.layers) > 1
    again = sum(layer.count * layer.rerun_seconds for layer in one.layers)
    parts = {part.part: part.seconds for part in one.parts}
    assert found.microbatches * again == pytest.approx(parts["ops that run again"])
    assert again > 0
    assert "nothing" not in one.reason
    for layer in one.layers:
        assert layer.rungs[-1].ratio == pytest.approx(layer.layer_ratio)
        assert bool(layer.rerun_seconds) == (f" {layer.layer} layers" in one.reason)


def test_tables_of_each_kind_are_labelled(cli):
    args = ("explain", "overhead", "nemotron-h-56b", "--tp", "8", "--sp", "--device", "h100-80gb")
    selective = cli(*args, "--policy", "selective").out
    assert selective.count("selective: one of ") == 1
    assert "attention layers, one micro-batch" in selective
    assert "Nothing runs again in the other layers: " in selective
    assert cli(*args, "--policy", "full").out.count(" layers, one micro-batch, one rank") == 3


def test_csv_holds_json_keys_and_raw_values(cli):
    args = ("explain", "overhead", "deepseek-v3", "--tp", 2, "--sp", "--ep", 4, "--policy", "full",
            "--device", "h100-80gb", "--framework", "megatron")  # fmt: skip
    every = cli(*args, "--format", "csv").out.split("\n\n")
    tables = [table for table in every if table.startswith("policy,")]
    ops, rungs, step = (list(csv.DictReader(io.StringIO(table))) for table in tables[:3])
    (one,) = cli(*args, "--json").json["overhead"]["policies"]
    expected = [
        (one["policy"], layer["layer"], row["op"], row["rerun_seconds"])
        for layer in one["layers"]
        for row in layer["rows"]
        if row["forward_seconds"] or row["backward_seconds"] or row["rerun_seconds"]
    ]
    found = [
        (r["policy"], r["layer"], r["op"].replace(" ", "_"), float(r["rerun_seconds"])) for r in ops
    ]
    assert found == [(a, b, c.replace(" ", "_"), d) for a, b, c, d in expected]
    assert [float(row["ratio"]) for row in rungs] == [
        rung["ratio"] for layer in one["layers"] for rung in layer["rungs"]
    ]
    assert float(step[0]["slowdown_ratio"]) == one["slowdown_ratio"]
    assert float(step[0]["plain_step_seconds"]) == one["plain_step_seconds"]


def test_full_costs_more_time_than_flops_because_of_collectives():
    (found,) = overhead(run_of(), ["full"]).policies
    flops, products, kernels, collectives = (rung.ratio for rung in found.rungs)
    assert flops == pytest.approx(1 / 3)
    assert products < kernels < collectives
    assert collectives - kernels > kernels - flops
    assert 0.36 < collectives < 0.42
    (alone,) = overhead(load_run("gpt-22b", device="a100-80gb"), ["full"]).policies
    assert alone.rungs[2].ratio == pytest.approx(alone.rungs[3].ratio)


def test_efficiency_moves_it():
    slow = overhead(run_of(), ["full"], {"communication": 0.1}).policies[0]
    assert slow.layer_ratio > overhead(run_of(), ["full"]).policies[0].layer_ratio


def test_needs_a_device():
    with pytest.raises(SpecError):
        overhead(load_run("gpt-22b"), ["full"])


def test_explanation():
    result = explain_term("overhead", run_of(policies=("full",)))
    assert [one.policy for one in result.overhead.policies] == ["full"]
    assert "33.3 %" in " ".join(result.lines)


def test_command(cli):
    default = cli("explain", "overhead", "--json")
    named = cli(
        "explain", "overhead", "gpt-22b", "--tp", "8", "--micro-batch", "4",
        "--device", "a100-80gb", "--json",
    )  # fmt: skip
    one, other = json.loads(default.out), json.loads(named.out)
    assert one["overhead"] == other["overhead"]
    assert "No --device given" in " ".join(one["lines"])
    assert "No --device given" not in " ".join(other["lines"])


def test_table_names_ops_at_80_columns(cli):
    outcome = cli("explain", "overhead", "--policy", "full")
    assert outcome.code == 0
    assert "fc1" in outcome.out
    assert "of collectives" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_efficiency_needs_a_time(cli):
    for words in (
        ("explain", "34", "--efficiency", "gemm=0.5"),
        ("gpt-22b", "--efficiency", "a100"),
    ):
        outcome = cli(*words)
        assert outcome.code == 2
        assert "--efficiency" in outcome.err


def test_offloaded_activations_are_refused():
    run = run_of(training={"offload": "activations"})
    with pytest.raises(SpecError, match="offloaded activations"):
        overhead(run, ["full"])


def test_what_a_host_is_late_with_is_a_part_of_its_own(cli):
    """Launches of what runs again, where they and not the kernels set the pace."""
    asked = ("explain", "overhead", "gpt2", "--framework", "megatron", "--device", "b200", "--seq",
             128, "--micro-batch", 1, "--global-batch", 4, "--policy", "full")  # fmt: skip
    (one,) = cli(*asked, "--json").json["overhead"]["policies"]
    parts = {part["part"]: part["seconds"] for part in one["parts"]}
    assert parts["waiting for the host"] > 5 * parts["ops that run again"] > 0
    assert parts["weight gathers it hides"] == 0
    grown = one["step_seconds"] - one["plain_step_seconds"]
    assert sum(parts.values()) == pytest.approx(grown)


def test_ops_that_fill_a_wait_for_the_host_cost_what_they_take_beyond_it(cli):
    """No part is negative: what runs again takes the place of the wait."""
    run = ("qwen3.5-35b-a3b", "--efficiency", "gemm=0.5", "--zero", 3, "--layers", 4)
    policies = cli("explain", "overhead", *run, "--json").json["overhead"]["policies"]
    seconds = [part["seconds"] for one in policies for part in one["parts"]]
    assert min(seconds) >= 0 < max(seconds)
