"""A sweep is one run of mfu for each combination; what cannot be is a row that says so."""

from __future__ import annotations

import pytest

from tests.agreement.asking import ask

RUN = "gpt-22b --framework megatron --device a100-80gb --global-batch 32"


def test_a_row_is_what_mfu_says():
    found = ask(
        *f"sweep {RUN} --vary tp=4,8 --vary sp=yes --vary zero=1,2 --gpus 32 --tokens 300e9 "
        "--price-per-gpu-hour 2 --watts-per-gpu 800 --policy full".split()
    )
    assert [row["values"] for row in found["rows"]] == [
        {"tp": tp, "sp": True, "zero": zero} for tp in (4, 8) for zero in (1, 2)
    ]
    for row in found["rows"]:
        tp, zero = row["values"]["tp"], row["values"]["zero"]
        one = ask(
            *f"mfu {RUN} --tp {tp} --sp --zero {zero} --gpus 32 --tokens 300e9 "
            "--price-per-gpu-hour 2 --policy full".split()
        )
        assert row["fits"] is one["fits"] is True
        assert row["peak_bytes"] == one["device_bytes"]
        assert row["step_seconds"] == one["step_seconds"]
        assert row["mfu_ratio"] == one["mfu_ratio"]
        assert row["tokens_per_day"] == pytest.approx(86400 * one["tokens_per_second"])
        for key in ("days", "gpu_hours", "price"):
            assert row[key] == one["training"][key]
        assert row["energy_kwh"] == pytest.approx(0.8 * row["gpu_hours"])
    speeds = [row["tokens_per_second_per_gpu"] for row in found["rows"]]
    (best,) = [index for index, row in enumerate(found["rows"]) if row["best"]]
    assert best == speeds.index(max(speeds))


def test_what_cannot_be_is_a_row_that_says_so():
    line = "sweep llama-3-8b --device h100-80gb --vary tp=2,3 --vary seq=8k,512k"
    found = ask(*line.split())
    fit, long, illegal, _ = found["rows"]
    assert fit["fits"] is True or fit["peak_bytes"] > 0
    assert long["fits"] is False
    assert long["peak_bytes"] > 80e9
    assert long["step_seconds"] is None
    assert illegal["fits"] is None
    assert "tp 3 does not divide heads 32" in illegal["problem"]


def test_rows_end_with_the_time(monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("actcalc.answers.sweep.monotonic", lambda: next(clock))
    line = "sweep gpt2 --device a100-80gb --vary seq=128,256,512,1024 --time-limit 8"
    found = ask(*line.split())
    assert found["complete"] is False
    assert [row["values"]["seq"] for row in found["rows"]] == [128, 256]
    assert "The first 2 of 4 rows, which took 8 s (--time-limit for more)." in found["notes"]


def test_rows_of_a_group_stand_together():
    line = "sweep gpt2 --device a100-80gb --vary seq=512,1024 --vary policy=none,full"
    found = ask(*line.split(), "--group-by", "policy")
    assert [row["values"]["policy"] for row in found["rows"]] == ["none", "none", "full", "full"]
    assert [row["best"] for row in found["rows"]].count(True) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sweep gpt2", "varies something"),
        ("sweep gpt2 --vary seq", "names no values"),
        ("sweep gpt2 --vary tpp=1", "no such flag or field"),
        ("sweep gpt2 --vary tp=x", "no such value"),
        ("sweep gpt2 --vary tp=1 --group-by seq", "it is not varied"),
        ("sweep gpt2 --vary tp=1 --vary tp=2", "twice"),
        ("sweep gpt2 --vary tp=1 --watts-per-gpu 300", "of a training run"),
        ("search gpt2 --device a100-80gb --global-batch 8", "how many GPUs"),
        ("search gpt2 --gpus 8 --global-batch 8", "--device"),
        ("search gpt2 --gpus 8 --device a100-80gb", "no global batch"),
        ("search gpt2 --gpus 8 --device a100-80gb --global-batch 8 --tp a", "no choice of numbers"),
        ("search gpt2 --gpus 8 --device a100-80gb --global-batch 8 --pareto x", "no pair"),
        ("search gpt2 --gpus 8 --device a100-80gb --global-batch 8 --schedule x", "schedule"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, line, said):
    outcome = cli(*line.split())
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert said in outcome.err
    assert "Traceback" not in outcome.err
