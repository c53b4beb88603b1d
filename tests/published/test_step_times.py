"""Step times of published runs: the median error, and a reason for every outlier."""

from __future__ import annotations

import re
from statistics import median

import pytest

from tests.published.step_times import ROWS, judged, outcomes

OUTLIER = 0.25
# Facts of the source, and what they most likely cost: none of these runs could be taken apart.
REASONS = {
    r"bloom/": (
        "Megatron-DeepSpeed of early 2022: the input gradient's all-reduce is not overlapped, "
        "nodes are joined by Omni-Path (50 GB/s a node, not 200), and the first series has heads "
        "450 or 150 wide, which do not align with tensor cores"
    ),
    r"llmfoundry/\d+/(7b|3b|1b|13b|760m)-T2048-\d+xh100_80gb": (
        "no recomputation and a step of about a second: FSDP's first gathers, an optimizer that "
        "is not fused and host time stay exposed"
    ),
    r"llmfoundry/\d+/30b-T8192": (
        "states alone take 60 of 80 GB: the allocator runs at its limit; attention kernel unstated"
    ),
    r"llmfoundry/\d+/70b-T2048-64xa100_40gb": (
        "micro-batch 2 for each gather of 130 GB of weights: the gathers are not hidden"
    ),
    r"internevo/flops/ckptFalse/(512|1024)/2x2": (
        "two micro-batches per reduction of gradients over 512 and more GPUs, whose network is "
        "not stated; with four of them the error is half"
    ),
    r"narayanan21/T2/ZeRO-3": (
        "DeepSpeed ZeRO-3 of 2021, which the paper shows bound by the network: gathers not hidden"
    ),
    r"mds-1.3B": "V100: no measured efficiency of this device is at hand, defaults are used",
}


@pytest.fixture(scope="module")
def found():
    return outcomes()


def test_enough_runs_are_judged(found):
    assert len(found) >= 100
    assert {outcome.row["device"] for outcome in found} >= {
        "a100-80gb",
        "a100-40gb",
        "h100-80gb",
        "gb200",
    }
    assert sum(not judged(row) for row in ROWS) < len(ROWS) / 3


def test_median_error(found):
    assert median(abs(outcome.error) for outcome in found) <= 0.15


def test_every_outlier_has_one_reason(found):
    for outcome in found:
        if abs(outcome.error) > OUTLIER:
            name = outcome.row["id"]
            reasons = [key for key in REASONS if re.match(key, name)]
            assert len(reasons) == 1, f"{name}: {outcome.error:+.0%}"


@pytest.mark.parametrize("key", REASONS)
def test_every_reason_is_needed(found, key):
    assert any(re.match(key, o.row["id"]) and abs(o.error) > OUTLIER for o in found)
