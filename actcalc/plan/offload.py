"""Offload: a kept tensor may leave for host memory in forward and come back for backward.

**Time.** The copy out runs beside the layer's own forward, the copy back beside one layer's
backward with its re-runs; what does not fit beside them is waited for. Both directions of the link
are free of each other (PCIe and C2C are full duplex). Besides, every moved byte is read from device
memory once and written to it once, at the cost of the kernels that want that memory: its time at
the memory's rate is charged in full.

**Memory.** A moved tensor is not stored, but belongs to the layer's working set when it is back,
and the tensors of one more layer are on their way while another runs: the largest of any layer is
counted once on top.

**What may move.** Tensors of at least a 32nd of the bytes the layer saves. Smaller ones save little
and cost a copy each; leaving them out also keeps the exact search small.

Double buffering layer by layer is what Transformer Engine's ``cpu_offload.py`` and Megatron-Core's
fine-grained activation offloading do; single tensors are chosen in PyTorch by
``torch.autograd.graph.saved_tensors_hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.plan.options import NANO, Costs, ModuleChoice, module_policies, policy_option
from actcalc.policy.rules import Policy
from actcalc.solve.frontier import layer_frontier
from actcalc.solve.options import Option, OptionSet
from actcalc.solve.problem import PlanLayer, check_int

Ints = NDArray[np.int64]

SMALLEST_SHARE = 32
"""A tensor may move if it is at least one part in so many of what its layer saves."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a layer has to hide copies behind, and how fast they are; times in nanoseconds.

    ``host_rate`` and ``memory_rate`` are bytes per second of the link to the host, one direction,
    and of the device memory.

    Raises:
        SpecError: a number is not a whole number in range.
    """

    host_rate: int
    memory_rate: int
    forward: int
    backward: int

    def __post_init__(self) -> None:
        check_int(self.host_rate, "host_rate", low=1)
        check_int(self.memory_rate, "memory_rate", low=1)
        check_int(self.forward, "forward")
        check_int(self.backward, "backward")

    def waits(self, moved: int, rerun: int) -> tuple[int, int, int]:
        """Nanoseconds that ``moved`` bytes cost: forward, backward, and of the device's memory."""
        copy = moved * NANO // self.host_rate
        return (
            max(0, copy - self.forward),
            max(0, copy - self.backward - rerun),
            2 * moved * NANO // self.memory_rate,
        )

    def priced(self, rerun: Ints, moved: Ints) -> Ints:
        """Cost in nanoseconds of re-running for ``rerun`` and moving ``moved`` bytes."""
        pairs = zip(rerun.tolist(), moved.tolist(), strict=True)
        return np.array([r + sum(self.waits(x, r)) for r, x in pairs], dtype=np.int64)


def movable(layer: PlanLayer) -> frozenset[str]:
    """Tensors of a layer that are large enough to move."""
    least = layer.total_saved_bytes
    kept = layer.saved_for_backward | {layer.input}
    return frozenset(
        t for t in kept if layer.tensors[t] and layer.tensors[t] * SMALLEST_SHARE >= least
    )


@lru_cache(maxsize=256)
def offload_options(layer: PlanLayer, transfer: Transfer) -> OptionSet:
    """Every undominated way to keep, re-run or offload in one layer, cached.

    Costs must be in nanoseconds, as those of a layer planned for a device are.

    Raises:
        SpecError: see :func:`actcalc.solve.frontier.layer_frontier`.
    """
    frontier = layer_frontier(layer, movable(layer))
    return OptionSet.from_frontier(frontier, transfer.priced(frontier.cost, frontier.moved))


def module_offload_options(
    model: ModelGraph, graph: Graph, costs: Costs, full: Policy, transfer: Transfer
) -> OptionSet:
    """Every undominated way to wrap modules of a layer and offload tensors that stay stored.

    Of the tensors of one policy, one choice is kept for every sum of their bytes.
    """
    sizes = {name: int(tensor.bytes.value(model.sizes)) for name, tensor in graph.tensors.items()}
    least = sum(sizes[name] for name in graph.saved if name not in graph.shared)
    options: list[Option] = []
    for policy in module_policies(model, graph, full):
        plain = policy_option(model, graph, costs, policy)
        choice = plain.payload
        assert isinstance(choice, ModuleChoice)
        own = {name: sizes[name] for name in choice.kept if name not in graph.shared}
        large = {name: size for name, size in own.items() if size * SMALLEST_SHARE >= least}
        for moved, names in _sums(large).items():
            # Of an input kept whole or in parts the policy's own bytes count, not the tensor's.
            if moved > plain.stored:
                continue
            options.append(
                Option(
                    plain.stored - moved,
                    plain.working + moved,
                    plain.cost + sum(transfer.waits(moved, plain.cost)),
                    ModuleChoice(
                        choice.policy,
                        choice.recompute,
                        tuple(name for name in choice.kept if name not in names),
                        names,
                    ),
                    moved,
                )
            )
    return OptionSet.of(options)


def _sums(sizes: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Every sum of some of ``sizes``, with names that make it."""
    found: dict[int, tuple[str, ...]] = {0: ()}
    for name, size in sizes.items():
        found = {total + size: (*names, name) for total, names in found.items()} | found
    return found
