"""Whole steps of fine-tuning, traced with the code of transformers, PEFT and TRL.

``tests/data/tuned_steps.json`` says how they were made. Nothing in the package was fitted to them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agreement.asking import answer
from tests.conftest import DATA

TRACED = json.loads((DATA / "tuned_steps.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in TRACED["cases"]}
FIRST_NORM = 4 * 2048
"""Bytes of a token that the first norm keeps here, and not there: nothing before it is trained."""


@pytest.mark.parametrize("name", CASES)
def test_a_tuned_step(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TRACED["configs"][case["model"]]), encoding="utf-8")
    words = [str(config) if word == "CONFIG" else word for word in case["command"]]
    (stage,) = json.loads(answer(words))["stages"]
    beside = sum(b["bytes"] for b in stage["buffers"] if b["name"] == "cuBLAS workspace")
    resident = stage["static_bytes"] - beside
    peak = stage["peak_bytes"] - beside
    assert abs(resident / case["resident_bytes"] - 1) <= 0.0001
    over = peak - case["peak_bytes"]
    pairs = 2 if "dpo" in name else 1
    first = FIRST_NORM * case["seq"] * case["batch"] * pairs
    assert min(abs(over), abs(over - first)) <= 0.001 * case["peak_bytes"]
