"""Where a slow-down comes from, op by op: the parts add up, and the reason is said."""

from __future__ import annotations

import pytest

from actcalc.cost.overhead import overhead, overhead_lines
from actcalc.errors import SpecError
from actcalc.policy.rules import parse_policy
from actcalc.specs.run import load_run


def run_of(**changes):
    return load_run("gpt-22b", layout={"tp": 8}, device="a100-80gb", **changes)


@pytest.mark.parametrize("name", ["none", "selective", "full", "ffn", "attention"])
def test_parts_add_up(name):
    found = overhead(run_of(), parse_policy(name, layers=48))
    assert sum(row.forward_seconds for row in found.rows) == pytest.approx(found.forward_seconds)
    assert sum(row.backward_seconds for row in found.rows) == pytest.approx(found.backward_seconds)
    assert sum(row.rerun_seconds for row in found.rows) == pytest.approx(found.rerun_seconds)


def test_full_costs_more_time_than_flops():
    found = overhead(run_of(), parse_policy("full", layers=48))
    assert found.flops_ratio == pytest.approx(1 / 3)
    assert 0.36 < found.time_ratio < 0.42
    assert found.hidden_seconds > 0
    assert found.exposed_seconds > 0
    alone = load_run("gpt-22b", device="a100-80gb")
    single = overhead(alone, parse_policy("full", layers=48))
    assert single.exposed_seconds == single.hidden_seconds == 0
    assert single.time_ratio < found.time_ratio


def test_lines():
    text = "\n".join(overhead_lines(run_of(), "full"))
    assert "FLOPs say 33.3%" in text
    assert "fc1" in text
    assert "beside the products" in text


def test_needs_a_device():
    with pytest.raises(SpecError):
        overhead_lines(load_run("gpt-22b"), "full")
