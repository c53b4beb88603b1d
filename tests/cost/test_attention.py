"""Fused attention by length: kernels timed by themselves, which no constant of a step judges."""

from __future__ import annotations

from statistics import mean

import pytest

from actcalc.cost.attention import MASKED, UNMASKED, masked, unmasked
from actcalc.cost.kernels import Kernels, OpTimer
from actcalc.cost.rates import rates_of
from actcalc.io.devices import load_device
from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun

# Kernel (FA: FlashAttention), share of the scores that is asked for, direction, and TFLOP/s by
# length (of the products below the diagonal where it is causal). Where they are from stands in
# actcalc/cost/attention.py.
MEASURED = [
    ("FA-2, B200", 1.0, "forward", {512: 308.4, 1024: 359.3, 2048: 381.0, 16384: 379.4}),
    ("FA-2, B200", 1.0, "backward", {512: 243.1, 1024: 280.6, 2048: 301.6, 16384: 334.0}),
    ("FA-2, H100", 1.0, "forward", {512: 252.5, 1024: 294.8, 2048: 308.1, 4096: 312.0}),
    ("FA-2, H100", 1.0, "backward", {512: 189.9, 1024: 238.8, 2048: 263.7, 8192: 299.2}),
    ("FA-2, A5000", 1.0, "forward", {512: 84.1, 1024: 81.0, 2048: 81.3, 8192: 81.9}),
    ("FA-2, A5000", 1.0, "backward", {512: 52.9, 1024: 62.5, 2048: 70.1, 8192: 77.4}),
    ("Triton, A100", 1.0, "forward", {1024: 122.5, 2048: 136.6, 4096: 143.0, 16384: 146.8}),
    ("Triton, A100", 1.0, "backward", {1024: 72.0, 2048: 84.2, 4096: 91.3, 16384: 95.3}),
    ("Triton, A100", 0.5, "forward", {1024: 86.9, 2048: 108.9, 4096: 125.6, 16384: 144.5}),
    ("Triton, A100", 0.5, "backward", {1024: 49.4, 2048: 63.6, 4096: 73.8, 16384: 83.5}),
    ("FA-2, H100", 0.5, "forward", {1024: 197.9, 2048: 259.2}),
    ("cuDNN, B200", 0.5, "forward", {1024: 627.0, 2048: 826.0, 4096: 977.0, 16384: 1115.0}),
]  # fmt: skip


def relative(share, direction, seq):
    """Speed at a length over that of a very long sequence."""
    work = unmasked(seq) if share == 1.0 else masked(share, seq)
    return share / getattr(work, direction)


@pytest.mark.parametrize(
    ("share", "direction", "speeds"),
    [row[1:] for row in MEASURED],
    ids=[f"{row[0]} {row[2]} {row[1]}" for row in MEASURED],
)
def test_speed_by_length_is_that_of_kernels_by_themselves(share, direction, speeds):
    longest = max(speeds)
    for seq, speed in speeds.items():
        expected = relative(share, direction, seq) / relative(share, direction, longest)
        assert expected == pytest.approx(speed / speeds[longest], rel=0.2)


def test_the_constants_are_the_mean_of_the_kernels():
    """Further keys that the shortest and the longest length of each kernel ask for."""

    def further(share, speeds):
        short, long = min(speeds), max(speeds)
        ratio = speeds[long] / speeds[short]
        return share * (ratio - 1) / (1 / short - ratio / long)

    def of(share, way):
        return mean(further(s, speeds) for _, s, w, speeds in MEASURED if (s, w) == (share, way))

    assert of(1.0, "forward") == pytest.approx(UNMASKED.forward, rel=0.05)
    assert of(1.0, "backward") == pytest.approx(UNMASKED.backward, rel=0.05)
    masked = [further(share, speeds) for _, share, _, speeds in MEASURED if share < 1.0]
    assert mean(masked) == pytest.approx(MASKED.forward, rel=0.05)
    assert MASKED.forward == MASKED.backward


def test_flash_attention_on_an_h100_is_as_fast_as_measured():
    """Dao-AILab/flash-attention pull request 1791: causal, 8192 tokens, 2 x 16 heads of 128."""
    run = load_run(
        "llama-3-8b",
        framework="torchtitan",
        device="h100-80gb",
        model={"heads": 16, "kv_heads": 16, "head_dim": 128, "hidden": 2048},
        workload={"seq": 8192, "micro_batch": 2, "attention": "sdpa"},
    )
    staged = StagedRun(run)
    timer = OpTimer(
        Kernels(staged, rates_of(load_device("h100-80gb"), "bf16")), staged.kinds[0].graph
    )
    core = next(time for time in timer.times() if time.kind == "core")
    assert core.forward == pytest.approx(1.935e-3, rel=0.02)
    assert core.input_gradient == pytest.approx(4.788e-3, rel=0.02)
