"""What each policy of a comparison costs in time on a device, and how far it lets a batch grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from actcalc.cost.roofline import Roofline, roofline_of
from actcalc.cost.rounding import growth
from actcalc.cost.step import StepTime, step_time
from actcalc.layers.core.algebra import added
from actcalc.memory.limits import Resized, largest
from actcalc.memory.stage import total_bytes
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun


@dataclass(frozen=True, kw_only=True)
class PolicyTime:
    """One policy on the run's device."""

    layer_forward_seconds: float
    """One layer's forward, one micro-batch, one rank (mean over a stage where layers differ)."""
    layer_backward_seconds: float
    """Its backward, re-run included."""
    step_seconds: float
    """One optimizer step."""
    slowdown_ratio: float
    """Step time over that of ``none``, less one."""
    tokens_per_second_per_gpu: float
    """Tokens per second over all devices of the layout."""
    device_bytes: int
    """What the fullest device needs in all: states, activations, buffers, context."""
    fits: bool
    """Whether that is within the device's memory."""
    largest_micro_batch: int
    """Sequences in the largest micro-batch that fits; 0 if not even one does."""
    largest_step_seconds: float | None
    """One optimizer step with it, of as many micro-batches; null if none fits."""
    largest_samples_per_second: float | None
    """Sequences per second with it, over all devices."""
    largest_tokens_per_second_per_gpu: float | None
    """Tokens per second and device with it."""


def time_policies(
    staged: StagedRun,
    policies: Sequence[Policy],
    efficiency: Mapping[str, float] | None = None,
) -> tuple[PolicyTime, ...]:
    """Time each of ``policies`` on the run's device; layer times are of its most frequent kind.

    Raises ``SpecError`` without a device, or for a schedule that cannot run the step.
    """
    roofline = roofline_of(staged, efficiency)
    base = step_time(NONE, roofline).total
    sizes = Resized(staged, "micro-batch")
    grown = cache(lambda value: roofline_of(sizes.at(value), efficiency))
    return tuple(_timed(policy, roofline, base, sizes, grown) for policy in policies)


def _timed(
    policy: Policy,
    roofline: Roofline,
    base: float,
    sizes: Resized,
    rooflines: Callable[[int], Roofline],
) -> PolicyTime:
    staged = roofline.staged
    forward, backward = _layer(policy, roofline)
    step = step_time(policy, roofline)
    needed = total_bytes(staged, policy)
    usable = staged.run.budget_bytes or 0
    limit = largest(sizes, policy.name)
    grown: StepTime | None = None
    samples = 0
    if limit.largest:
        other = rooflines(limit.largest)
        samples = other.staged.global_batch
        grown = step_time(other.staged.policy(policy.name), other)
    return PolicyTime(
        layer_forward_seconds=forward,
        layer_backward_seconds=backward,
        step_seconds=step.total,
        slowdown_ratio=growth(step.total, base),
        tokens_per_second_per_gpu=_tokens(staged, staged.global_batch, step),
        device_bytes=needed,
        fits=needed <= usable,
        largest_micro_batch=limit.largest,
        largest_step_seconds=grown.total if grown else None,
        largest_samples_per_second=samples / grown.total if grown else None,
        largest_tokens_per_second_per_gpu=_tokens(staged, samples, grown) if grown else None,
    )


def _tokens(staged: StagedRun, sequences: int, step: StepTime) -> float:
    run = staged.run
    return sequences * run.workload.seq / step.total / run.layout.devices


def _layer(policy: Policy, roofline: Roofline) -> tuple[float, float]:
    """Forward and backward of one layer; the mean over a stage where the policy skips some."""
    staged = roofline.staged
    stage, main = staged.under(policy), staged.main.graph
    times = [
        roofline.layer(graph, chosen)
        for chunk in staged.places[0]
        for graph, chosen, count in stage.tally(chunk)
        if graph is main
        for _ in range(count)
    ] or [roofline.layer(main, policy)]
    forward: float = added(time.forward for time in times) / len(times)
    backward: float = added(time.backward for time in times) / len(times)
    return forward, backward
