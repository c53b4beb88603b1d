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


MEGATRON = {
    "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024,
    "max-position-embeddings": 1024, "micro-batch-size": 4, "vocab-size": 50257, "bf16": True,
    "tensor-model-parallel-size": 2, "world-size": 32,
}  # fmt: skip


def test_other_degrees_over_megatron_s_arguments_keep_the_number_of_gpus(
    cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(MEGATRON))
    wide = cli("memory", path, "--tp", 4, "--pp", 4, "--json").json
    assert [wide["layout"][name] for name in ("tp", "pp", "dp")] == [4, 4, 2]
    assert any("dp is taken as 2: the 32 devices of args" in note for note in wide["notes"])
    assert cli("memory", path, "--json").json["layout"]["dp"] == 16
    asked = cli("memory", path, "--tp", 4, "--dp", 16, "--json").json
    assert asked["layout"]["dp"] == 16
    refused = cli("memory", path, "--pp", 3)
    assert refused.code == 2
    assert "tp 2 x pp 3 x cp 1 = 6 does not divide the 32 devices" in refused.err


def test_megatron_s_names_with_underscores_are_recognised(cli: Cli, tmp_path: Path) -> None:
    path, plain = tmp_path / "under.json", tmp_path / "plain.json"
    path.write_text(json.dumps({key.replace("-", "_"): v for key, v in MEGATRON.items()}))
    plain.write_text(json.dumps(MEGATRON))
    assert (
        cli("memory", path, "--json").json["stages"]
        == (cli("memory", plain, "--json").json["stages"])
    )


def test_max_says_that_the_global_batch_grows(cli: Cli) -> None:
    base = ("memory", "llama-3-8b", "--policy", "full", "--device", "h200", "--max", "micro-batch")
    told = "--max micro-batch keeps the number of micro-batches per step, 8"
    assert told in " ".join(cli(*base, "--global-batch", 8).out.split())
    assert "global batch grows" not in cli(*base).out
    compared = ("compare", "llama-3-8b", "--device", "h200")
    assert "the global batch grows from 8." in cli(*compared, "--global-batch", 8).out
    assert "global batch grows" not in cli(*compared).out


def test_two_runs_say_which_of_them_fits_and_how_far_each_can_go(cli: Cli) -> None:
    found = cli(
        "memory", "llama-3-8b", "gpt2", "--device", "rtx-4090", "--max", "seq", columns=80
    )  # fmt: skip
    assert found.code == 1
    out = " ".join(found.out.split())
    assert out.startswith("The fullest GPU needs: llama-3-8b 115 GB, gpt2 14.3 GB. Fits: gpt2.")
    assert "llama-3-8b: the most that fits the device" in out
    assert "gpt2: the most that fits the device" in out


@pytest.mark.parametrize(
    ("method", "policy"), [("block", "block:9"), ("uniform", "uniform:9")]
)  # fmt: skip
def test_megatron_s_recompute_triple_is_one_policy(cli: Cli, method: str, policy: str) -> None:
    triple = ("--policy", "full", "--recompute-method", method, "--recompute-num-layers", 9)
    base = ("gpt3-175b", "--tp", 8, "--pp", 8)
    memory = cli("memory", *base, *triple, "--json").json
    assert memory["policy"] == policy
    assert memory["stages"] == cli("memory", *base, "--policy", policy, "--json").json["stages"]
    timed = ("--device", "h100-80gb", "--global-batch", 64)
    assert cli("mfu", *base, *triple, *timed, "--json").json["policy"] == policy
    rows = cli("compare", *base, *triple, "--json").json["policies"]
    assert [row["policy"] for row in rows] == [policy]
    alone = cli("compare", *base, *triple[2:], "--policy", "none", "--json").json["policies"]
    assert [row["policy"] for row in alone] == ["none", policy]


@pytest.mark.parametrize("command", ["memory", "mfu"])
def test_shards_must_divide_the_replicas_and_something_must_be_sharded(
    cli: Cli, command: str
) -> None:
    base = (command, "llama-3-8b", "--dp", 8, "--device", "h200", "--global-batch", 8)
    odd = cli(*base, "--zero", 3, "--shards", 3)
    assert odd.code == 2
    assert "shards 3 does not divide dp 8" in odd.err
    assert "--shards 4" in odd.err
    idle = cli(*base, "--shards", 2)
    assert idle.code == 2
    assert "zero is 0" in idle.err
    assert cli(*base, "--zero", 3, "--shards", 4).code == 0


def test_shards_are_checked_against_replicas_that_gpus_give(cli: Cli) -> None:
    base = ("mfu", "llama-3-8b", "--zero", 3, "--device", "h200", "--gpus", 8)
    assert cli(*base, "--global-batch", 8, "--shards", 4).code == 0
    assert "does not divide dp 8" in cli(*base, "--global-batch", 8, "--shards", 3).err


@pytest.mark.parametrize(
    ("optimizer", "charged"),
    [("adamw", "moments 4 B"), ("adam8bit", "moments 2.03 B"), ("adafactor", "moments 0.00"),
     ("lion", "moments 2 B"), ("sgd", "master 0 B")],
)  # fmt: skip
def test_the_header_says_the_moments_that_are_charged(
    cli: Cli, optimizer: str, charged: str
) -> None:
    base = ("memory", "llama-3-8b", "--optimizer", optimizer)
    assert charged in cli(*base).out
    document = cli(*base, "--json").json
    (stage,) = document["stages"]
    assert stage["optimizer_bytes"] == pytest.approx(
        document["recipe"]["moments"] * stage["parameters"]
    )


@pytest.mark.parametrize("framework", ["transformers"])
def test_fp8_is_refused_where_there_is_no_recipe_for_it(cli: Cli, framework: str) -> None:
    refused = cli("memory", "llama-3-8b", "--precision", "fp8", "--framework", framework)
    assert refused.code == 2
    assert f"the {framework} profile has no fp8 recipe" in refused.err
    assert "--framework megatron" in refused.err
    assert cli("memory", "llama-3-8b", "--precision", "fp8", "--framework", "megatron").code == 0


def test_offloading_twice_loses_nothing(cli: Cli) -> None:
    base = ("memory", "llama-3-8b")
    both = cli(*base, "--offload", "weights", "--offload", "optimizer", "--json").json
    assert both["training"]["offload"] == "weights"
    refused = cli(*base, "--offload", "activations", "--offload", "optimizer")
    assert refused.code == 2
    assert "activations and optimizer" in refused.err


def test_dropout_that_a_model_does_not_have_is_said_to_change_nothing(cli: Cli) -> None:
    out = " ".join(cli("memory", "llama-3-8b", "--dropout").out.split())
    assert "--dropout changes nothing: every dropout rate of llama-3-8b is 0" in out
    assert "changes nothing" not in cli("memory", "llama-3-8b").out
    assert "changes nothing" not in cli("memory", "gpt3-175b", "--dropout").out


def test_the_header_says_that_fp8_copies_are_charged(cli: Cli) -> None:
    base = ("memory", "llama-3-8b", "--framework", "megatron")
    copied = cli(*base, "--precision", "fp8")
    assert "weight 2 + 2 in fp8, gradient 4" in copied.out
    assert "in fp8" not in cli(*base).out
    own = cli(*base, "--precision", "fp8", "--set", "fp8_weights=true")
    assert "in fp8" not in own.out


def test_two_frameworks_side_by_side_are_named(cli: Cli) -> None:
    out = cli("memory", "llama-3-8b", "--framework", "transformers,torchtitan", columns=80).out
    assert "\ntorchtitan: peak" in out
    assert max(map(len, out.splitlines())) <= 80
