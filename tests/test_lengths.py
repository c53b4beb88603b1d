"""Lengths of sequences: peaks follow the longest, steps the mean of what is padded."""

from __future__ import annotations

import itertools

import pytest

from actcalc.errors import SpecError
from actcalc.specs.lengths import parse_lengths

LENGTHS = "512:70,2048:25,8192:5"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_mean_of_the_longest_of_a_batch(batch):
    """Every possible batch, with its probability."""
    found = parse_lengths(LENGTHS)
    mean = 0.0
    for drawn in itertools.product(found.shares, repeat=batch):
        chance = 1.0
        for _, share in drawn:
            chance *= share
        mean += chance * max(length for length, _ in drawn)
    assert found.padded(batch) == pytest.approx(mean)
    assert found.mean == pytest.approx(0.7 * 512 + 0.25 * 2048 + 0.05 * 8192)


def test_forms():
    assert parse_lengths("30,10,10").shares == (
        (10, pytest.approx(2 / 3)),
        (30, pytest.approx(1 / 3)),
    )
    assert parse_lengths("7:.5").longest == 7
    assert parse_lengths(LENGTHS).cut(1024).shares[-1] == (1024, pytest.approx(0.3))
    for text in ("", "x", "0", "5:0", "5:-1", "1e9:1", ",".join("5" for _ in range(2000))):
        with pytest.raises(SpecError, match="lengths is"):
            parse_lengths(text)


def test_the_peak_is_the_longest_s(cli):
    common = [
        "qwen2.5-7b",
        "--framework",
        "transformers",
        "--attention",
        "flash",
        "--micro-batch",
        4,
    ]
    found = cli("memory", *common, "--lengths", LENGTHS, "--json").json
    plain = cli("memory", *common, "--seq", 8192, "--json").json
    assert found["peak_bytes"] == plain["peak_bytes"]
    assert any("2,819 on average, and 55 % of that is padding" in note for note in found["notes"])
    cut = cli("memory", *common, "--lengths", LENGTHS, "--seq", 1024, "--json").json
    assert cut["workload"]["seq"] == 1024
    assert cut["peak_bytes"] < plain["peak_bytes"]


def test_padding_is_a_mask_for_attention(cli):
    """transformers hands one to sdpa, which then leaves its flash kernel."""
    common = [
        "gpt2",
        "--framework",
        "transformers",
        "--micro-batch",
        4,
        "--attention",
        "sdpa",
        "--json",
    ]
    masked = cli("memory", *common, "--lengths", "256:1,1024:1").json
    plain = cli("memory", *common, "--seq", 1024).json
    said = cli("memory", *common, "--seq", 1024, "--set", "padding_mask=true").json
    assert masked["workload"]["padding_mask"]
    assert masked["peak_bytes"] == said["peak_bytes"] > plain["peak_bytes"]
    assert not cli("memory", *common, "--lengths", "1024").json["workload"]["padding_mask"]


def test_steps_are_of_the_mean(cli):
    """Utilisation counts the mean, and still says what the longest needs."""
    common = ["qwen2.5-7b", "--framework", "transformers", "--attention", "flash",
              "--micro-batch", 4, "--device", "h200", "--step-time", 1, "--gpus", 1,
              "--json"]  # fmt: skip
    found = cli("mfu", *common, "--lengths", LENGTHS).json
    mean = cli("mfu", *common, "--seq", 2819).json
    longest = cli("mfu", *common, "--seq", 8192).json
    assert found["model_flops"] == mean["model_flops"]
    assert found["device_bytes"] == longest["device_bytes"]


def test_packed_sequences_fill_seq(cli):
    common = ["qwen2.5-7b", "--framework", "transformers", "--attention", "flash", "--json"]
    packed = cli("memory", *common, "--lengths", LENGTHS, "--packed", "--seq", 4096).json
    assert packed["peak_bytes"] == cli("memory", *common, "--seq", 4096).json["peak_bytes"]
    assert "are packed into 4,096: nothing is padded" in " ".join(packed["notes"])
    refused = cli("memory", "gpt2", "--packed")
    assert refused.code == 2
    assert "--lengths" in refused.err
