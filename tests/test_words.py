"""Everyday words stand for options: on the command line, in help and in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from actcalc.cli.words import WORDS, plainly
from actcalc.errors import SpecError

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("row", WORDS, ids=lambda row: row.words[0])
def test_every_word_is_in_the_docs_and_stands_for_options_of_memory(row, cli):
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    words = ", ".join(f"`{word}`" for word in row.words)
    assert f"| {words} | `{row.text}` |" in page
    shown = cli("memory", "--help").out
    for part in row.means:
        assert not part.startswith("--") or part in shown
    assert row.words[0] in shown
    assert not any(word in shown.split("Other words")[0].split() for word in row.words)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("--gpu h100-80gb", "--device h100-80gb"),
        ("--flash --batch-size 4", "--attention flash --micro-batch 4"),
        ("--dtype bfloat16", "--precision bf16"),
        ("--dtype=torch.float16", "--precision fp16"),
        ("--gradient-checkpointing --liger", "--policy full --loss fused"),
        ("--fsdp --dp 8", "--zero 3 --recipe fsdp --dp 8"),
        ("--deepspeed 2", "--zero 2 --recipe mixed"),
        ("--optim paged_adamw_8bit", "--optimizer adam8bit"),
        ("--gradient-accumulation-steps 4", "--grad-accum 4"),
    ],
)
def test_a_word_is_its_options(said, meant):
    assert plainly(["memory", "x", *said.split()]) == ["memory", "x", *meant.split()]


def test_answers_are_those_of_the_options(cli):
    said = cli("memory", "gpt2", "--gpu", "h100-80gb", "--flash", "--batch-size", "2", "--json")
    meant = cli("memory", "gpt2", "--device", "h100-80gb", "--attention", "flash",
                "--micro-batch", "2", "--json")  # fmt: skip
    assert said.json == meant.json


@pytest.mark.parametrize("words", [["--gpu"], ["--flash=1"], ["--deepspeed", "--json"]])
def test_a_word_without_its_value_is_refused(words):
    with pytest.raises(SpecError, match="value") as refused:
        plainly(words)
    assert refused.value.hint.startswith("it is --")


def test_accumulation_is_a_batch(cli):
    run = ["memory", "gpt2", "--framework", "transformers", "--dp", "4", "--micro-batch", "2"]
    steps = cli(*run, "--grad-accum", "8", "--json").json
    assert steps["workload"]["global_batch"] == 64
    both = cli(*run, "--grad-accum", "8", "--global-batch", "64")
    assert both.code == 2
    assert "the same thing twice" in both.err
    assert cli(*run, "--grad-accum", "0").code == 2


def test_qlora_is_adapters_over_four_bits(cli):
    run = ["memory", "llama-3.2-1b", "--framework", "transformers", "--json"]
    short = cli(*run, "--qlora").json
    assert short["stages"] == cli(*run, "--lora-rank", "16", "--base-bits", "4").json["stages"]
    assert cli(*run, "--qlora", "--lora-rank", "64").json["training"]["lora_rank"] == 64


@pytest.mark.parametrize("rate", ["--tokens-per-second", "--tflops", "--hfu", "--mfu"])
def test_a_step_s_time_follows_from_any_rate(rate, cli):
    run = ["mfu", "llama-3-8b", "--framework", "transformers", "--device", "h100-80gb", "--dp", "8",
           "--global-batch", "64", "--policy", "full", "--json"]  # fmt: skip
    first = cli(*run, "--step-time", "9").json
    value = {
        "--tokens-per-second": first["tokens_per_second"],
        "--tflops": first["model_flops_per_second_per_gpu"] / 1e12,
        "--hfu": first["hfu_ratio"],
        "--mfu": first["mfu_ratio"],
    }[rate]
    again = cli(*run, rate, repr(value)).json
    assert again["step_seconds"] == pytest.approx(9, rel=1e-9)
    assert cli(*run, rate, repr(value), "--step-time", "9").code == 2
    assert cli(*run, rate, "0").code == 2
