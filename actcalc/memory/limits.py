"""The largest micro-batch and the longest sequence that fit a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

from actcalc.errors import SpecError
from actcalc.memory.stage import total_bytes
from actcalc.run.staged import StagedRun

QUANTITIES = ("micro-batch", "seq")
_SEQ_STEP = 64  # tokens; kernels pad to it, and no one asks for a finer answer
_MOST = 2**24
_STRAIGHT = 8  # counts tried along a straight line before the rest is halved


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LimitFigure:
    """The largest value of one quantity that still fits the device."""

    policy: str
    """The recompute policy."""
    quantity: str
    """micro-batch or seq."""
    largest: int
    """The largest value that fits; 0 if not even the smallest does."""
    total_bytes: int
    """What the fullest stage needs at that value."""
    tokens: int
    """Tokens of one micro-batch at that value."""


def find_limits(staged: StagedRun, quantities: Sequence[str]) -> tuple[LimitFigure, ...]:
    """One figure per policy of the run and quantity; raises ``SpecError`` without a device."""
    if staged.run.device is None:
        raise SpecError("--max needs a device to fill", "add --device h100-80gb")
    for quantity in quantities:
        if quantity not in QUANTITIES:
            raise SpecError(f"--max {quantity!r}", "use " + " or ".join(QUANTITIES))
    every = [Resized(staged, quantity) for quantity in quantities]
    return tuple(
        largest(sizes, policy) for sizes in every for policy in staged.run.policies or ("none",)
    )


class Resized:
    """A run with other micro-batches (as many of them as before) or sequences, each built once."""

    def __init__(self, staged: StagedRun, quantity: str) -> None:
        self.staged = staged
        self.quantity = quantity
        self._runs: dict[int, StagedRun] = {}

    def at(self, value: int) -> StagedRun:
        """The run with ``value`` sequences in a micro-batch, or tokens in a sequence."""
        if value not in self._runs:
            work = self.staged.run.workload
            changes = {"seq": value, "completion": min(work.completion, value - 1)}
            if self.quantity == "micro-batch":
                batch = value * self.staged.run.layout.dp * self.staged.microbatches
                changes = {"micro_batch": value, "global_batch": batch}
            self._runs[value] = self.staged.changed(workload=work.model_copy(update=changes))
        return self._runs[value]


def largest(sizes: Resized, policy: str) -> LimitFigure:
    """The largest value of one quantity that fits the run's device under one policy."""
    quantity, layout = sizes.quantity, sizes.staged.run.layout
    step = 1
    if quantity == "seq":
        step = lcm(layout.cp * (layout.tp if layout.sp else 1), _SEQ_STEP)
    usable = sizes.staged.run.budget_bytes or 0

    @cache
    def needs(times: int) -> int:
        other = sizes.at(times * step)
        return total_bytes(other, other.policy(policy))

    if needs(1) > usable:
        return LimitFigure(
            policy=policy, quantity=quantity, largest=0, total_bytes=needs(1), tokens=0
        )
    low = _last_within(needs, usable, _MOST // step)
    return LimitFigure(
        policy=policy,
        quantity=quantity,
        largest=low * step,
        total_bytes=needs(low),
        tokens=sizes.at(low * step).run.workload.tokens,
    )


def _last_within(needs: Callable[[int], int], usable: int, most: int) -> int:
    """The largest count up to ``most`` whose need is within ``usable``; 1 is.

    Memory is all but linear in tokens: the next count to try is where the line through the last
    two meets the limit, a few times; then the rest is halved.
    """
    low, other, high, tries = 1, 2, most + 1, 0
    while high - low > 1:
        guess = (low + high) // 2
        if tries < _STRAIGHT and other <= most:
            slope = (needs(other) - needs(low)) / (other - low)
            guess = low + int(min((usable - needs(low)) / slope, most)) if slope > 0 else most
        guess = min(max(guess, low + 1), high - 1)
        tries += 1
        if needs(guess) <= usable:
            low, other = guess, low
        else:
            high = other = guess
    return low
