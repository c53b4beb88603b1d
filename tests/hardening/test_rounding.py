"""What rounding leaves of a difference is no figure: it is 0."""

from __future__ import annotations

import csv
import io
import json

import pytest

from actcalc.cost.rounding import difference, growth
from tests.fuzz.asking import ROUNDING, leaves


def test_a_difference_that_is_rounding_is_none():
    assert difference(0.1 + 0.2, 0.3) == 0.0
    assert growth(0.1 + 0.2, 0.3) == 0.0
    assert difference(1e-16, 0.0, of=1.0) == 0.0
    assert difference(1e-16, 0.0) == 1e-16
    assert difference(3.0, 1.0) == 2.0
    assert growth(3.0, 2.0) == 0.5


def rounded(document):
    """The figures of a document that are what rounding left."""
    return {
        (key, value)
        for key, value in leaves(document)
        if isinstance(value, float)
        and any(key.endswith(unit) and 0 < abs(value) < least for unit, least in ROUNDING.items())
    }


@pytest.mark.parametrize(
    "line",
    [
        "gpt3-175b --tp 8 --sp --pp 8 --device a100-80gb",
        "gpt3-175b --tp 8 --sp --pp 4 --schedule zb-v --device h100-80gb",
        "llama-3-8b --dp 8 --zero 3 --device h100-80gb",
        "advise llama-3-8b --device a100-80gb",
        "advise llama-3-8b --device b200 --dp 8 --zero 1",
        "plan gpt3-175b --tp 8 --sp --pp 8 --device a100-80gb",
    ],
)
def test_no_answer_has_rounding_for_a_figure(line, cli):
    assert not rounded(json.loads(cli(*line.split(), "--json").out))


def test_an_explanation_has_none_either(cli):
    """The table, op by op: what re-runs whole takes its forward's time to the last digit."""
    found = cli("explain", "overhead", "--format", "csv").out
    parts = [list(csv.DictReader(io.StringIO(part))) for part in found.split("\n\n")[1:]]
    for row in [row for part in parts for row in part]:
        figures = {k: float(v) for k, v in row.items() if k.endswith(("_seconds", "_ratio"))}
        assert not rounded(figures)
    again = [row for row in parts[0] if row["policy"] == "full"]
    assert again
    assert all(row["rerun_seconds"] == row["forward_seconds"] for row in again)
