"""Each predicted time comes with what published runs of its kind say of it."""

from __future__ import annotations

import json

import pytest

from actcalc.answers.judged import judged
from actcalc.cli.app import run as run_cli
from actcalc.io.runs import load_run

RUN = ("--framework", "megatron", "--global-batch", "64")
COMMANDS = {
    "mfu": ("mfu", "llama-3-8b", "--gpus", "8", "--dp", "8", "--zero", "3"),
    "compare": ("compare", "llama-3-8b", "--dp", "8", "--zero", "3"),
    "search": ("search", "llama-3-8b", "--gpus", "8"),
    "advise": ("advise", "llama-3-8b", "--dp", "8", "--zero", "3"),
}


def said(capsys, command, device):
    run_cli([*COMMANDS[command], *RUN, "--device", device, "--json"])
    return json.loads(capsys.readouterr().out)


def notes(answer):
    return " ".join(answer["notes"])


@pytest.mark.parametrize("command", ["mfu", "compare", "search"])
def test_published_runs_are_named(capsys, command):
    found = judged(load_run("llama-3-8b", device="h100-80gb"))
    assert found.runs >= 10
    assert found.words in notes(said(capsys, command, "h100-80gb"))


@pytest.mark.parametrize("command", ["mfu", "compare", "search"])
def test_a_kind_that_none_judges_says_so(capsys, command):
    assert "No published run of this kind (mi300x dense)" in notes(said(capsys, command, "mi300x"))


@pytest.mark.parametrize(("device", "some"), [("h100-80gb", True), ("mi300x", False)])
def test_advise_has_the_range(capsys, device, some):
    time = said(capsys, "advise", device)["time"]
    assert (time["judged_runs"] > 0) is some
    low, middle, high = (time[f"{name}seconds"] for name in ("low_", "step_", "high_"))
    assert (low < middle < high) is some
    run_cli([*COMMANDS["advise"], *RUN, "--device", device])
    shown = " ".join(capsys.readouterr().out.split())
    assert ("published)" in shown) is some
    assert ("no published run of its kind judges it" in shown) is not some
