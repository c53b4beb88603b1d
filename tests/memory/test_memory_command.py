"""``actcalc memory``: its JSON, its table, its exit code, its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
LLAMA = (
    "memory", "llama-3.1-405b", "--tp", 8, "--sp", "--pp", 16, "--dp", 8, "--zero", 1,
    "--device", "h100-80gb",
)  # fmt: skip
KEYS = {
    "stage", "layers", "parameters", "weights_bytes", "gradients_bytes", "optimizer_bytes",
    "in_flight", "activations_bytes", "transient_bytes", "buffers_bytes", "overhead_bytes",
    "total_bytes", "static_bytes", "fits",
}  # fmt: skip


def test_json_has_every_stage_with_every_key(cli: Cli) -> None:
    found = cli(*LLAMA, "--layers-per-stage", "7,8x14,7", "--json")
    document = found.json
    assert document["schema"] == "actcalc/memory/1"
    assert [s["layers"] for s in document["stages"]] == [7, *[8] * 14, 7]
    assert all(set(stage) >= KEYS for stage in document["stages"])
    assert document["peak_bytes"] == max(s["peak_bytes"] for s in document["stages"])
    assert document["parameters"] == 405_853_388_800
    assert sum(s["stage_parameters"] for s in document["stages"]) == 405_853_388_800


def test_exit_code_says_whether_it_fits(cli: Cli) -> None:
    tight = cli(*LLAMA, "--layers-per-stage", "7,8x14,7")
    assert tight.code == 1
    assert "Does not fit NVIDIA H100" in tight.out
    roomy = cli(*LLAMA, "--layers-per-stage", "7,8x14,7", "--policy", "full")
    assert roomy.code == 0
    assert "Fits NVIDIA H100" in roomy.out
    assert cli("memory", "llama-3.1-405b").code == 0


def test_an_uneven_depth_is_refused_with_the_split_that_works(cli: Cli) -> None:
    refused = cli(*LLAMA)
    assert refused.code == 2
    assert "--layers-per-stage 7,8x14,7" in refused.err


def test_the_table_fits_80_columns_with_one_row_per_stage(cli: Cli) -> None:
    out = cli(*LLAMA, "--layers-per-stage", "7,8x14,7", columns=80).out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    rows = [line for line in out.splitlines() if line[:4].strip().isdigit()]
    assert len(rows) == 16


def test_equal_stages_are_folded(cli: Cli) -> None:
    out = cli("memory", "gpt3-175b", "--tp", 8, "--pp", 8, "--schedule", "gpipe").out
    assert " 1-6 " in out


def test_two_runs_side_by_side(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: llama-3-8b\ntraining: {optimizer: adam8bit}\nworkload: {seq: 4096}\n")
    out = cli("memory", "llama-3-8b", run).out
    assert "difference" in out
    both = cli("memory", "llama-3-8b", run, "--json").json["runs"]
    assert both[0]["stages"][0]["optimizer_bytes"] > 1.9 * both[1]["stages"][0]["optimizer_bytes"]
    assert cli("memory", "gpt2", "gpt2", "gpt2").code == 2


def test_megatron_arguments_are_recognised_and_can_be_forced(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    arguments = {
        "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024,
        "max-position-embeddings": 1024, "micro-batch-size": 4, "vocab-size": 50257, "bf16": True,
        "tensor-model-parallel-size": 2, "world-size": 8, "use-distributed-optimizer": True,
    }  # fmt: skip
    path.write_text(json.dumps(arguments))
    known = cli("memory", path, "--json")
    assert known.code == 0
    assert known.json["layout"]["dp"] == 4
    assert known.json["layout"]["zero"] == 1
    forced = cli("memory", path, "--from", "megatron", "--json")
    assert forced.json["stages"] == known.json["stages"]
    assert cli("memory", path, "--from", "elsewhere").code == 2


@pytest.mark.parametrize("quantity", ["micro-batch", "seq"])
def test_the_largest_that_fits_fits_and_the_next_does_not(cli: Cli, quantity: str) -> None:
    base = ("memory", "llama-3-8b", "--policy", "full", "--device", "h100-80gb")
    limit = cli(*base, "--max", quantity, "--json").json["limits"][0]
    step = 1 if quantity == "micro-batch" else 64
    assert limit["largest"] > 0
    assert cli(*base, f"--{quantity}", limit["largest"]).code == 0
    assert cli(*base, f"--{quantity}", limit["largest"] + step).code == 1


def test_max_without_a_device_and_unknown_quantities_are_refused(cli: Cli) -> None:
    assert cli("memory", "llama-3-8b", "--max", "micro-batch").code == 2
    refused = cli("memory", "llama-3-8b", "--device", "h100-80gb", "--max", "layers")
    assert refused.code == 2
    assert "micro-batch" in refused.err


@pytest.mark.parametrize(
    ("flag", "value"), [("--optimizer", "adm"), ("--recipe", "x"), ("--offload", "disk")]
)
def test_unknown_choices_are_refused(cli: Cli, flag: str, value: str) -> None:
    refused = cli("memory", "llama-3-8b", flag, value)
    assert refused.code == 2
    assert value in refused.err


def test_other_formats(cli: Cli) -> None:
    base = ("memory", "gpt3-175b", "--tp", 8, "--pp", 2)
    assert cli(*base, "--format", "csv").out.splitlines()[0].startswith("stage,layers,in_flight")
    assert cli(*base, "--format", "markdown").out.count("| ---:") > 3
