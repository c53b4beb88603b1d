"""Recomputation by micro-batch: as many as fit keep everything, the others re-run.

A pipeline stage holds several micro-batches at once, and later stages hold fewer, so that memory is
left there which a policy for all micro-batches does not use (Korthikanti et al. 2022, appendix on
micro-batches; Megatron-Core pipeline_parallel/schedules.py,
num_microbatches_with_partial_activation_checkpoints).
"""

from __future__ import annotations

from dataclasses import dataclass

from actcalc.errors import SpecError
from actcalc.memory.stage import memory_of
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun


@dataclass(frozen=True, kw_only=True)
class StageMix:
    """What one stage does with the micro-batches that it holds."""

    stage: int
    """The stage."""
    in_flight: int
    """Micro-batches held at its fullest moment."""
    whole: int
    """How many of them keep everything."""
    peak_bytes: int
    """What the GPU needs then, at most."""
    more_bytes: int
    """What one micro-batch that keeps everything takes more than one that does not."""

    @property
    def rerun_ratio(self) -> float:
        """Share of micro-batches that run again."""
        return 1 - self.whole / self.in_flight


def by_microbatch(staged: StagedRun, policy: Policy, budget: int) -> tuple[StageMix, ...]:
    """The most micro-batches of every stage that can keep everything within ``budget`` bytes.

    The others follow ``policy``. A micro-batch that keeps everything adds at most what its layers
    keep more of it, whatever the moment. Raises ``SpecError`` where the stages have several chunks,
    or ``policy`` alone does not fit.
    """
    if any(len(chunks) > 1 for chunks in staged.places):
        raise SpecError(
            "micro-batches are planned one by one for stages of one chunk",
            "drop --vpp, or use --schedule 1f1b",
        )
    base, plain = memory_of(staged, policy), memory_of(staged, NONE)
    found = []
    for stage, (chunk,) in enumerate(staged.places):
        held = staged.held(stage)[0]
        low, high = base.figure(stage).total_bytes, plain.figure(stage).total_bytes
        more = staged.under(NONE).stored_bytes(chunk) - staged.under(policy).stored_bytes(chunk)
        more = max(0, more)
        if min(low, high) > budget:
            raise SpecError(
                f"stage {stage} needs {low:,} bytes under {policy.name}, of {budget:,}",
                "name a larger device, or a policy that keeps less",
            )
        count = held
        if high > budget:
            count = min(held - 1, (budget - low) // more if more else 0)
        peak = high if count == held else low + count * more
        found.append(
            StageMix(stage=stage, in_flight=held, whole=count, peak_bytes=peak, more_bytes=more)
        )
    return tuple(found)
