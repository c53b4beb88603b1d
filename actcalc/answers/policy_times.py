"""What each policy of a comparison costs in time on a device, and how far it lets a batch grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import LayerTime, Roofline
from actcalc.cost.step import StepTime, step_time
from actcalc.errors import SpecError
from actcalc.layers.adapters import adapted
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph, model_graph
from actcalc.memory.limits import find_limits, total_bytes
from actcalc.policy.rules import NONE, Policy
from actcalc.policy.stage import StagePolicy
from actcalc.run.placement import microbatches, placement
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.specs.device import Device


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
    run: Run,
    graph: ModelGraph,
    main: Graph,
    policies: Sequence[Policy],
    efficiency: Mapping[str, float] | None = None,
) -> tuple[PolicyTime, ...]:
    """Time each of ``policies`` on the run's device; ``main`` is the graph layer times are of.

    Raises ``SpecError`` without a device, or for a schedule that cannot run the step.
    """
    if run.device is None:
        raise SpecError("times need a device", "add --device")
    roofline = _roofline(run, graph, run.device, efficiency)
    base = step_time(graph, NONE, roofline).total
    return tuple(
        _timed(run, graph, main, policy, roofline, base, run.device, efficiency)
        for policy in policies
    )


def _roofline(
    run: Run, graph: ModelGraph, device: Device, efficiency: Mapping[str, float] | None
) -> Roofline:
    precision, count = run.workload.precision, run.layout.devices
    rates = rates_of(device, precision, efficiency, devices=count)
    return Roofline(graph, rates, run.training)


def _timed(
    run: Run,
    graph: ModelGraph,
    main: Graph,
    policy: Policy,
    roofline: Roofline,
    base: float,
    device: Device,
    efficiency: Mapping[str, float] | None,
) -> PolicyTime:
    forward, backward = _layer(run, graph, main, policy, roofline)
    step = step_time(graph, policy, roofline)
    alone = replace(run, policies=(policy.name,))
    needed = total_bytes(alone)
    (limit,) = find_limits(alone, ("micro-batch",))
    largest: StepTime | None = None
    samples = 0
    if limit.largest:
        count = microbatches(run.layout, run.workload)
        samples = limit.largest * count * run.layout.dp
        work = run.workload.model_copy(
            update={"micro_batch": limit.largest, "global_batch": samples}
        )
        grown = adapted(model_graph(run.model, run.layout, work, run.framework), run.training)
        full = _roofline(run, grown, device, efficiency)
        largest = step_time(grown, policy, full, count=count)
    return PolicyTime(
        layer_forward_seconds=forward,
        layer_backward_seconds=backward,
        step_seconds=step.total,
        slowdown_ratio=step.total / base - 1,
        tokens_per_second_per_gpu=_tokens(
            run, step.microbatches * run.workload.micro_batch * run.layout.dp, step
        ),
        device_bytes=needed,
        fits=needed <= device.usable_bytes,
        largest_micro_batch=limit.largest,
        largest_step_seconds=largest.total if largest else None,
        largest_samples_per_second=samples / largest.total if largest else None,
        largest_tokens_per_second_per_gpu=_tokens(run, samples, largest) if largest else None,
    )


def _tokens(run: Run, sequences: int, step: StepTime) -> float:
    return sequences * run.workload.seq / step.total / run.layout.devices


def _layer(
    run: Run, graph: ModelGraph, main: Graph, policy: Policy, roofline: Roofline
) -> tuple[float, float]:
    """Forward and backward of one layer; the mean over a stage where the policy skips some."""
    stage = StagePolicy(graph, policy)
    times: list[LayerTime] = []
    for chunk in placement(run.model.depth, run.layout)[0]:
        for layer in chunk:
            found = stage.graph(layer)
            if found is main:
                times.append(roofline.layer(found, stage.layer_policy(layer, chunk)))
    if not times:
        times = [roofline.layer(main, policy)]
    forward = sum(time.forward for time in times) / len(times)
    return forward, sum(time.backward for time in times) / len(times)
