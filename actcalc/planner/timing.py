"""What each policy of a comparison costs in time on a device, by the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actcalc.cost.rates import Rates, rates_of
from actcalc.cost.roofline import LayerTime, Roofline
from actcalc.cost.step import step_time
from actcalc.errors import SpecError
from actcalc.layers.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.placement import placement
from actcalc.policy.rules import NONE, Policy
from actcalc.policy.stage import StagePolicy
from actcalc.specs.run import Run


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
    roofline = Roofline(
        graph, rates_of(run.device, run.workload.precision, efficiency, devices=run.layout.devices)
    )
    base = step_time(graph, NONE, roofline).total
    return tuple(_timed(run, graph, main, policy, roofline, base) for policy in policies)


def _timed(
    run: Run, graph: ModelGraph, main: Graph, policy: Policy, roofline: Roofline, base: float
) -> PolicyTime:
    layer = _layer(run, graph, main, policy, roofline)
    step = step_time(graph, policy, roofline)
    sequences = step.microbatches * run.workload.micro_batch * run.layout.dp
    return PolicyTime(
        layer_forward_seconds=layer[0],
        layer_backward_seconds=layer[1],
        step_seconds=step.total,
        slowdown_ratio=step.total / base - 1,
        tokens_per_second_per_gpu=sequences * run.workload.seq / step.total / run.layout.devices,
    )


def _layer(
    run: Run, graph: ModelGraph, main: Graph, policy: Policy, roofline: Roofline
) -> tuple[float, float]:
    """Forward and backward of one layer; the mean over a stage where the policy skips some."""
    stage = StagePolicy(graph, policy)
    times: list[LayerTime] = []
    for chunk in placement(run.model.layers, run.layout)[0]:
        for layer in chunk:
            found = stage.graph(layer)
            if found is main:
                times.append(roofline.layer(found, stage.layer_policy(layer, chunk)))
    if not times:
        times = [roofline.layer(main, policy)]
    forward = sum(time.forward for time in times) / len(times)
    return forward, sum(time.backward for time in times) / len(times)


def assumed(rates: Rates) -> str:
    """One sentence on the efficiencies behind the times."""
    shares = rates.shares
    return (
        f"Times: roofline with {shares.gemm * shares.sustained_clock:.0%} of peak in matrix "
        f"products, {shares.memory:.0%} of memory and {shares.communication:.0%} of link "
        "bandwidth."
    )
