"""What users see, at 80 columns, without colour; the version is pinned."""

from __future__ import annotations

import pytest

COMMANDS = {
    "main": ("gpt3-175b", "--tp", 8, "--sp"),
    "no-sp": ("gpt3-175b", "--tp", 8),
    "gib": ("gpt3-175b", "--tp", 8, "--sp", "--units", "GiB"),
    "flash": ("gpt3-175b", "--tp", 8, "--sp", "--attention", "flash"),
    "pipeline": ("gpt3-175b", "--tp", 8, "--sp", "--pp", 8),
    "markdown": ("gpt3-175b", "--tp", 8, "--sp", "--format", "markdown"),
    "csv": ("gpt3-175b", "--tp", 8, "--sp", "--format", "csv"),
    "breakdown": ("breakdown", "bert-base"),
    "breakdown-sp": ("breakdown", "gpt3-175b", "--tp", 8, "--sp"),
    "explain-34": ("explain", "34"),
    "explain-selective": ("explain", "selective"),
    "explain-c": ("explain", "c*"),
    "explain-8psi": ("explain", "8psi"),
    "advise": ("advise", "llama-3-8b", "--device", "rtx-4090", "--seq", 4096),
    "advise-fits": (
        "advise",
        "gpt3-175b",
        "--framework",
        "megatron",
        "--tp",
        8,
        "--sp",
        "--pp",
        8,
        "--vpp",
        2,
        "--dp",
        8,
        "--global-batch",
        1536,
        "--device",
        "a100-80gb",
        "--policy",
        "full",
    ),
    "search": ("search", "gpt2", "--gpus", 4, "--device", "a100-80gb", "--global-batch", 16),
    "search-pareto": (
        "search",
        "gpt2",
        "--gpus",
        2,
        "--device",
        "a100-80gb",
        "--global-batch",
        8,
        "--pareto",
        "memory,time",
        "--top",
        3,
    ),
    "sweep": (
        "sweep",
        "gpt2",
        "--device",
        "a100-80gb",
        "--vary",
        "seq=512,1024",
        "--vary",
        "tp=1,5",
        "--tokens",
        "1T",
        "--price-per-gpu-hour",
        2,
        "--group-by",
        "tp",
    ),
    "help": ("--help",),
    "bad-tp": ("gpt3-175b", "--tp", 7),
    "typo": ("gpt3-175",),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_output(name, cli, snapshot, monkeypatch):
    monkeypatch.setattr("actcalc.__version__", "0.0.0")
    outcome = cli(*COMMANDS[name], columns=80)
    assert f"exit {outcome.code}\n{outcome.out}{outcome.err}" == snapshot
