"""Seconds that a micro-batch waits for activations on their way to host memory and back.

The copy out runs beside the layer's own forward, the copy back beside its backward with what that
re-runs; what does not fit beside them is waited for. Both directions of the link are free of each
other (PCIe and C2C are full duplex). Every moved byte is read from device memory once and written
to it once: that time is charged in full. (The same as the planner's, for layers instead of tensors;
double buffering layer by layer is what Transformer Engine's cpu_offload.py, Megatron-Core's
fine-grained offloading, and TRL's and torchtune's OffloadActivations do.)
"""

from __future__ import annotations

from actcalc.cost.rates import Rates
from actcalc.cost.roofline import NOTHING, LayerTime, Roofline
from actcalc.layers.core.graph import Graph
from actcalc.policy.offload import away, whole_layer
from actcalc.policy.rules import Policy
from actcalc.policy.stage import StagePolicy


def offload_times(policy: Policy, roofline: Roofline) -> list[list[LayerTime]]:
    """What each stage's chunks wait for under ``policy``, for one micro-batch."""
    staged = roofline.staged
    stages = staged.under(policy)
    return [
        [sum((_layer(stages, roofline, chunk, at) for at in chunk), NOTHING) for chunk in chunks]
        for chunks in staged.places
    ]


def _layer(stages: StagePolicy, roofline: Roofline, chunk: range, at: int) -> LayerTime:
    graph, chosen = stages.graph(at), stages.layer_policy(at, chunk)
    moved = _moved(stages, roofline, graph, chosen, at - chunk.start)
    return waits(moved, roofline.layer(graph, chosen), roofline.rates)


def _moved(
    stages: StagePolicy, roofline: Roofline, graph: Graph, policy: Policy, place: int
) -> int:
    """Bytes of one layer, the so-manieth of its chunk, that go to the host and come back."""
    training, model = roofline.training, roofline.model
    outcome, known = stages.outcome(graph, policy), model.tensor_bytes[graph]
    if training.offload == "activations":
        return stages.layer_bytes(graph, policy).stored
    if training.offload_layers:
        names = whole_layer(outcome, model.sizes) if place < training.offload_layers else ()
        return sum(known[name] for name in names)
    gone = away(outcome, training.offload_modules, training.offload_elements, model.sizes)
    return sum(known[name] for name in gone.copied)


def waits(moved: int, layer: LayerTime, rates: Rates) -> LayerTime:
    """What moving so many bytes adds to a layer: half of the memory's time is forward's."""
    copy, memory = moved / rates.host, moved / rates.memory
    return LayerTime(
        forward=max(0.0, copy - layer.forward) + memory,
        rerun=0.0,
        backward=max(0.0, copy - layer.backward) + memory,
        weight_gradient=0.0,
    )
