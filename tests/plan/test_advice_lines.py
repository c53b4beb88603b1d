"""What to change stands under every "does not fit", the same for every command."""

from __future__ import annotations

import json
import shlex

import pytest

RUN = ("llama-3-8b", "--device", "rtx-4090", "--seq", 4096)
COMMANDS = {
    "memory": ("memory", *RUN),
    "compare": RUN,
    "mfu": ("mfu", *RUN),
    "plan": ("plan", *RUN),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_cheapest_that_fits_stands_under_does_not_fit(name, cli):
    best = cli("advise", *RUN, "--json").json["combination"]
    done = cli(*COMMANDS[name], columns=300)
    assert done.code == 1
    lines = done.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(("Does not fit", "No plan fit")))
    flags = " ".join(best["changes"])
    if name == "compare":
        flags = flags.replace("--loss ", "--set loss=").replace("--lora-rank ", "--set lora_rank=")
    assert lines[at + 1].startswith(f"Cheapest that fits: {flags}: ")
    assert lines[at + 2].startswith("Or --policy full")
    assert lines[at + 3].startswith("Costs no time: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_said_are_flags_of_the_command(name, cli):
    """With them the same command finds that it fits."""
    out = cli(*COMMANDS[name], columns=300).out
    line = next(line for line in out.splitlines() if line.startswith("Cheapest that fits: "))
    flags = shlex.split(line.removeprefix("Cheapest that fits: ").partition(": ")[0])
    if name == "plan":  # which policy to run is its answer
        flags = flags[: flags.index("--policy")]
    assert cli(*COMMANDS[name], *flags).code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_machines_are_told_by_advise_alone(name, cli):
    for form in ("json", "csv"):
        assert "Cheapest that fits" not in cli(*COMMANDS[name], "--format", form).out


def test_nothing_is_said_where_it_fits(cli):
    for words in (("memory", "gpt2"), ("gpt2",), ("mfu", "gpt2"), ("plan", "gpt2")):
        assert "Cheapest that fits" not in cli(*words, "--device", "a100-80gb").out


def test_a_plan_within_a_budget_of_ones_own_needs_no_device(cli):
    out = cli("plan", "llama-3-8b", "--memory", "30GB", columns=300).out
    assert "Cheapest that fits: --lora-rank 16 --base-bits 4 --policy full" in out
    assert "slower" not in out
    assert "Frees most alone: " in out


def test_a_measured_step_is_not_advised(cli):
    """It ran: what was run fits."""
    done = cli("mfu", *RUN, "--step-time", "3")
    assert "Cheapest that fits" not in done.out


def test_plan_says_how_many_gpus_a_change_takes(cli):
    found = cli("plan", "llama-3-8b", "--memory", "30GB", "--time-limit", 600, "--json").json
    gpus = {one["change"]: one["gpus"] for one in found["changes"]}
    assert gpus["--dp 8 --zero 3"] == 8
    assert gpus["--lora-rank 16"] == 1
    assert json.dumps(found["changes"])
