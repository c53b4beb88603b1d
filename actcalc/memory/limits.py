"""The largest micro-batch and the longest sequence that fit a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from actcalc.errors import SpecError
from actcalc.run.placement import microbatches
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.memory.report import LimitFigure

QUANTITIES = ("micro-batch", "seq")
_SEQ_STEP = 64  # tokens; kernels pad to it, and no one asks for a finer answer
_MOST = 2**24


def find_limits(run: Run, quantities: Sequence[str]) -> tuple[LimitFigure, ...]:
    """One figure per policy and quantity; raises ``SpecError`` without a device."""
    if run.device is None:
        raise SpecError("--max needs a device to fill", "add --device h100-80gb")
    for quantity in quantities:
        if quantity not in QUANTITIES:
            raise SpecError(f"--max {quantity!r}", "use " + " or ".join(QUANTITIES))
    return tuple(
        _largest(replace(run, policies=(policy,)), policy, quantity)
        for quantity in quantities
        for policy in run.policies or ("none",)
    )


def _largest(run: Run, policy: str, quantity: str) -> LimitFigure:
    from actcalc.memory.report import LimitFigure

    layout = run.layout
    step = 1
    if quantity == "seq":
        step = lcm(layout.cp * (layout.tp if layout.sp else 1), _SEQ_STEP)
    usable = run.device.usable_bytes if run.device else 0

    def needs(times: int) -> int:
        return total_bytes(_with(run, quantity, times * step))

    if needs(1) > usable:
        return LimitFigure(
            policy=policy, quantity=quantity, largest=0, total_bytes=needs(1), tokens=0
        )
    low, high = 1, 2
    while high * step <= _MOST and needs(high) <= usable:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if needs(middle) <= usable:
            low = middle
        else:
            high = middle
    best = _with(run, quantity, low * step)
    return LimitFigure(
        policy=policy,
        quantity=quantity,
        largest=low * step,
        total_bytes=needs(low),
        tokens=best.workload.tokens,
    )


def _with(run: Run, quantity: str, value: int) -> Run:
    """The run with another micro-batch (as many micro-batches as before) or sequence."""
    work = run.workload
    if quantity == "seq":
        return replace(run, workload=work.model_copy(update={"seq": value}))
    changes = {"micro_batch": value}
    if work.global_batch is not None:
        changes["global_batch"] = value * run.layout.dp * microbatches(run.layout, work)
    return replace(run, workload=work.model_copy(update=changes))


def total_bytes(run: Run) -> int:
    """What the fullest stage of a run needs."""
    from actcalc.memory.report import Evaluation

    work = Evaluation(run)
    return max(work.figure(stage).total_bytes for stage in range(run.layout.pp))
