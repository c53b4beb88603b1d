"""What the memory that a fitting run leaves free would buy, each change alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actcalc.cost.rounding import growth
from actcalc.errors import SpecError
from actcalc.memory.limits import Resized, largest
from actcalc.plan.advice import Advice
from actcalc.plan.changes import Change
from actcalc.plan.cheapest import POLICY, Cheapest, merged
from actcalc.plan.trials import Need
from actcalc.specs.check import divisors


@dataclass(frozen=True)
class Bought:
    """One use of the spare memory."""

    about: str
    change: Change
    need: Need
    gain: float | None
    """Tokens a second over those of the run as it is, less one; None where no time is known."""


def spare(advice: Advice) -> tuple[Bought, ...]:
    """Less recomputation, a larger micro-batch and longer sequences, where they fit."""
    if not advice.fits:
        return ()
    found: dict[str, Bought] = {}
    for about, change in (*_policies(advice), *_sizes(advice)):
        need = advice.trials.need(change)
        if about in found or need is None or need.total_bytes > advice.budget:
            continue
        seconds = advice.trials.seconds(change)
        gain = growth(advice.seconds, seconds) if advice.seconds and seconds else None
        found[about] = Bought(about, change, need, gain)
    return tuple(found.values())


def _policies(advice: Advice) -> Iterator[tuple[str, Change]]:
    """The cheapest policy that fits, where less is re-run than now."""
    if advice.trials.policy({}) == "none":
        return
    policies = [remedy for remedy in advice.remedies if remedy.axis == POLICY]
    parts = Cheapest(advice.axes, policies, {}).parts()
    change = merged(parts or ())
    now, then = advice.seconds, advice.trials.seconds(change)
    if change and now is not None and then is not None and then < now:
        yield "less recomputation", change


def _sizes(advice: Advice) -> Iterator[tuple[str, Change]]:
    """Micro-batches, the largest first, and the longest sequence."""
    staged = advice.trials.staged
    work, layout = staged.run.workload, staged.run.layout
    policy = advice.trials.policy({})
    try:
        most = largest(Resized(staged, "micro-batch"), policy).largest
        longest = largest(Resized(staged, "seq"), policy).largest
    except SpecError:
        return
    if work.global_batch is None:
        if most > work.micro_batch:
            change = {"workload.micro_batch": most, "workload.global_batch": None}
            yield "larger micro-batch", change
    else:
        sizes = [d for d in divisors(work.global_batch // layout.dp) if work.micro_batch < d]
        for size in reversed(sizes):
            if size <= most:
                yield "larger micro-batch", {"workload.micro_batch": size}
    if longest > work.seq:
        yield "longer sequence", {"workload.seq": longest}
