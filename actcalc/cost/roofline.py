"""Seconds of every op of a layer, forward and backward, and of the layer under a policy.

Each op is a kernel (or two, or a chain of them): matrix products by their shape
(:mod:`actcalc.cost.gemm`), fused attention by the products it does, everything else by the bytes
it moves. Collectives of tensor parallelism are exposed unless the framework hides them: in
backward the input gradient's all-reduce (or reduce-scatter) runs beside the weight gradient's
product, and the gather of a column-parallel input beside the input gradient's (Megatron-Core
tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; Korthikanti et al.
2022, section 4.2.2). A collective that runs beside a product takes its channels' share of the
multiprocessors from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from actcalc.cost.collective import collective_seconds, group_of
from actcalc.cost.exchange import exchanged
from actcalc.cost.host import Host, Spent
from actcalc.cost.kernels import Kernels, OpTimer
from actcalc.cost.optime import OpTime
from actcalc.cost.rates import Rates, rates_of
from actcalc.errors import SpecError
from actcalc.layers.core.algebra import added, least, most
from actcalc.layers.core.either import real
from actcalc.layers.core.graph import Collective, Graph
from actcalc.layers.model import ModelGraph
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.training import Training


@dataclass(frozen=True)
class LayerTime:
    """One layer under one policy on one rank for one micro-batch, in seconds."""

    forward: float
    rerun: float
    """Forward work done again during backward; part of ``backward``."""
    backward: float
    """Re-run included."""
    weight_gradient: float
    """Part of ``backward`` that a schedule may put off (weight gradients)."""
    host_forward: float = 0.0
    """Seconds of the host for its forward; not part of ``forward``."""
    host_backward: float = 0.0
    """Seconds of the host for its backward, re-run included."""
    exchange: float = 0.0
    """Of forward and backward: the exposed exchange between expert-parallel ranks."""
    stalled: float = 0.0
    """Seconds of forward in which the device waits whatever comes before or after: the host itself
    waited for it and could not run ahead."""
    lead: float = 0.0
    """Of forward: seconds that only the first micro-batch of a step waits."""

    def __add__(self, other: LayerTime) -> LayerTime:
        return LayerTime(
            self.forward + other.forward,
            self.rerun + other.rerun,
            self.backward + other.backward,
            self.weight_gradient + other.weight_gradient,
            self.host_forward + other.host_forward,
            self.host_backward + other.host_backward,
            self.exchange + other.exchange,
            self.stalled + other.stalled,
            self.lead + other.lead,
        )

    def __mul__(self, count: Any) -> LayerTime:
        return LayerTime(*(count * seconds for seconds in vars(self).values()))

    @property
    def later_forward(self) -> float:
        """Forward in a micro-batch that is not the first of its step."""
        return self.forward - self.lead

    def paced(self) -> LayerTime:
        """The same with what the device waits for the host, in the first micro-batch of a step.

        A step begins with no launch in the queue: its losses and the norm of its gradients were
        read. What the host needs longer for a forward is then waited for in it; backward begins
        when both are through, and is over when the device has run what the host has launched.
        Where backward keeps the device longer, the host gets ahead of it, and the next forward
        begins with launches in the queue: ``lead`` seconds of the wait are not waited again, until
        a forward and a backward take the longer of what device and host need for both.
        """
        device = self.forward + self.stalled
        waits = most(0.0, self.host_forward - device)
        forward = device + waits
        late = most(0.0, self.host_forward + self.host_backward - (forward + self.backward))
        ahead = most(0.0, self.backward - self.host_backward)
        return replace(
            self,
            forward=forward,
            backward=self.backward + late,
            stalled=self.stalled + waits + late,
            lead=least(waits, ahead),
        )


NOTHING = LayerTime(0.0, 0.0, 0.0, 0.0)


class Roofline:
    """Times of a model's graphs on a device; each op is timed once."""

    def __init__(self, staged: StagedRun, rates: Rates) -> None:
        self.staged = staged
        self.model: ModelGraph = staged.graph
        self.rates = rates
        self.training: Training = staged.run.training
        self._ops: dict[Graph, tuple[OpTime, ...]] = {}
        self._layers: dict[tuple[Graph, Policy], LayerTime] = {}
        self._plain: dict[Graph, LayerTime] = {}
        self._spent: dict[Graph, dict[str, Spent]] = {}
        self._kernels = Kernels(staged, rates)
        self._host = Host(staged, rates)

    def ops(self, graph: Graph) -> tuple[OpTime, ...]:
        """Seconds of each op of ``graph``, in order."""
        if graph not in self._ops:
            self._ops[graph] = OpTimer(self._kernels, graph).times()
        return self._ops[graph]

    def layer(self, graph: Graph, policy: Policy) -> LayerTime:
        """Seconds of one layer under ``policy``."""
        key = (graph, policy)
        if key not in self._layers:
            self._layers[key] = self._layer(graph, policy)
        return self._layers[key]

    def rerun(self, graph: Graph, policy: Policy) -> tuple[OpTime, ...]:
        """The ops that ``policy`` runs again."""
        again = {op.name for op in self.staged.under(policy).outcome(graph).rerun}
        return tuple(time for time in self.ops(graph) if time.name in again)

    def passes(self, graph: Graph, policy: Policy) -> tuple[OpTime, ...]:
        """The same, with what forward passes before the last one run (``Policy.passes``)."""
        return (*self.ops(graph) * (policy.passes - 1), *self.rerun(graph, policy))

    def _layer(self, graph: Graph, policy: Policy) -> LayerTime:
        once = self._once(graph)
        if self.staged.under(policy).outcome(graph).detached:
            return replace(
                once, backward=0.0, weight_gradient=0.0, host_backward=0.0,
                exchange=exchanged(self.ops(graph))[0],
            )  # fmt: skip
        rerun, spent = self.passes(graph, policy), self.spent(graph)
        again = added(time.forward_seconds for time in rerun) + self.regathered(graph, policy)
        return replace(
            once,
            rerun=again,
            backward=again + once.backward,
            host_backward=once.host_backward + added(spent[time.name].forward for time in rerun),
            exchange=once.exchange + exchanged(rerun)[0],
        )

    def _once(self, graph: Graph) -> LayerTime:
        """Seconds of one layer that runs nothing again (cached)."""
        if graph not in self._plain:
            times, spent = self.ops(graph), self.spent(graph).values()
            forward = added(time.forward_seconds for time in times)
            host = added(one.forward for one in spent)
            self._plain[graph] = LayerTime(
                forward=forward,
                rerun=0.0,
                backward=added(time.backward_seconds for time in times),
                weight_gradient=added(time.weight_gradient for time in times),
                host_forward=host,
                host_backward=added(one.backward for one in spent),
                exchange=added(exchanged(times)),
                stalled=most(0.0, host - forward) if self._host.waits(graph) else 0.0,
            )
        return self._plain[graph]

    def spent(self, graph: Graph) -> dict[str, Spent]:
        """Seconds of the host for each op of ``graph``, by name (cached)."""
        if graph not in self._spent:
            self._spent[graph] = {
                op.name: self._host.spent(graph, op, time)
                for op, time in zip(graph.ops, self.ops(graph), strict=True)
            }
        return self._spent[graph]

    def regathered(self, graph: Graph, policy: Policy) -> float:
        """Gathering an input that was kept in parts (Megatron's distribute_saved_activations)."""
        layout = self.model.context.layout
        if policy.boundary != "split" or layout.tp == 1 or layout.sp:
            return 0.0
        size = real(self.model.tensor_bytes[graph][graph.input])
        group = group_of("tp", self.model.sizes)
        return collective_seconds(Collective.ALL_GATHER, size, *group, self.rates)

    def ends(self, graph: Graph) -> LayerTime:
        """Seconds of embedding or head, which are never re-run."""
        return self.layer(graph, NONE)


def roofline_of(staged: StagedRun, efficiency: Mapping[str, float] | None = None) -> Roofline:
    """The times of a run's graphs on its device; ``efficiency`` overrides shares of its peaks.

    Raises ``SpecError`` without a device, or where it has no peak for the run's precision.
    """
    run = staged.run
    if run.device is None:
        raise SpecError("times need a device", "add --device")
    rates = rates_of(run.device, run.workload.arithmetic, efficiency, devices=run.layout.devices)
    return Roofline(staged, rates)
