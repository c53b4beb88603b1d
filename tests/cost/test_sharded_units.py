"""Passes over memory that FSDP adds to a micro-batch, by how its units lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.io.runs import load_run
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun

LAYERS, ENDS = 32 * 218_112_000, 2 * 128_256 * 4096 + 4096
"""Parameters of Llama 3 8B."""


def seconds(units, dp=8, zero=3):
    """Of the micro-batch of one step, and bytes per second of the device's memory."""
    run = load_run(
        "llama-3-8b",
        framework="torchtitan",
        device="h100-80gb",
        layout={"dp": dp, "zero": zero},
        workload={"micro_batch": 2, "global_batch": 2 * dp},
    )
    framework = run.framework.model_copy(update={"sharded_units": units})
    roofline = roofline_of(StagedRun(replace(run, framework=framework)))
    return step_time(NONE, roofline).pipeline, roofline.rates.memory


def test_each_reads_and_writes_every_weight():
    """fully_shard: 16-bit weights in forward and in backward, embedding and head once;
    FullyShardedDataParallel: fp32 gradients once."""
    plain, memory = seconds("buffer")
    copied = seconds("apart")[0] - plain
    divided = seconds("flat")[0] - plain
    assert copied == pytest.approx((2 * LAYERS + ENDS) * 4 / memory, rel=0.001)
    assert divided == pytest.approx((LAYERS + ENDS) * 8 / memory, rel=0.001)


@pytest.mark.parametrize("units", ["apart", "flat"])
def test_nothing_is_copied_where_nothing_is_sharded(units):
    assert seconds(units, zero=2)[0] == seconds("buffer", zero=2)[0]
    assert seconds(units, dp=1)[0] == seconds("buffer", dp=1)[0]


def test_weights_in_lists_cost_the_host_a_loop_over_ranks():
    """DeepSpeed 0.3: 47.5 us a rank for each weight, forward and backward, of which 7 in a layer;
    nothing else runs meanwhile. Norms, of fewer than 100,000 elements, are never split."""
    plain, _ = seconds("buffer")
    assert seconds("listed")[0] - plain > 2 * 32 * 7 * 8 * 47.5e-6
    longer = seconds("listed", dp=16)[0] - seconds("buffer", dp=16)[0]
    assert longer > seconds("listed")[0] - plain
    assert seconds("listed", zero=2)[0] == seconds("buffer", zero=2)[0]
