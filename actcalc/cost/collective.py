"""Time of collectives: volume over bus bandwidth, plus the latency of the steps.

Volumes are those of NCCL's ring (nccl-tests, doc/PERFORMANCE.md): an all-reduce of B bytes over n
ranks moves 2(n-1)/n·B per rank, all-gather, reduce-scatter and all-to-all (n-1)/n·B. Latencies are
those of NCCL's own model (NVIDIA/nccl src/graph/tuning.cc, ncclTopoTuneModel): a ring takes n-1
steps (twice that for an all-reduce), nodes-1 of them over the network; an all-reduce may take a
tree instead, whose steps grow with the logarithm of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

from actcalc.cost.rates import Rates
from actcalc.layers.core.either import each
from actcalc.layers.core.graph import Collective
from actcalc.specs import Moe

_VOLUME = {
    Collective.ALL_REDUCE: 2.0,
    Collective.ALL_GATHER: 1.0,
    Collective.REDUCE_SCATTER: 1.0,
    Collective.ALL_TO_ALL: 1.0,
    Collective.RING: 1.0,
}


def group_of(group: str, sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Size of a group and the distance between its ranks (Megatron's order: tp, cp, dp, pp).

    ``sizes`` are those of a graph's symbols.
    """
    degree, stride = _GROUPS[group]
    return sizes[degree], sizes[stride] if stride else 1


_GROUPS = {"tp": ("t", ""), "cp": ("c", "t"), "ep": ("e", "x")}
"""The symbols of a group's degree and of its stride."""


def bandwidth(size: int, stride: int, rates: Rates, *, exchange: bool = False) -> float:
    """Bus bandwidth of a group of ``size`` ranks, ``stride`` devices apart, in bytes per second.

    Inside a node it is that of the links. Across nodes a ring enters and leaves each node through
    the network cards of all its members there; an all-to-all (``exchange``) sends the part that
    leaves the node through the rank's own card.
    """
    span = size * stride
    if span <= rates.node:
        return rates.intra
    members = max(1, rates.node // stride)
    if exchange:
        outside = (size - members) / max(1, size - 1)
        return 1.0 / (outside / rates.inter + (1 - outside) / rates.intra)
    return min(rates.intra, rates.inter * members)


def collective_seconds(
    kind: Collective, message: float, size: int, stride: int, rates: Rates
) -> float:
    """Seconds of one collective on ``message`` bytes (the whole, gathered buffer).

    Message, size and stride may be arrays.
    """

    def seconds(message: float, size: int, stride: int) -> float:
        return _collective_seconds(kind, message, size, stride, rates)

    found: float = each(seconds, message, size, stride)
    return found


def _collective_seconds(
    kind: Collective, message: float, size: int, stride: int, rates: Rates
) -> float:
    if size <= 1 or message <= 0:
        return 0.0
    exchange = kind is Collective.ALL_TO_ALL
    speed = bandwidth(size, stride, rates, exchange=exchange)
    moved = _VOLUME[kind] * message * (size - 1) / size
    if kind is Collective.ALL_REDUCE and size * stride <= rates.node:
        speed *= rates.shares.all_reduce
    return moved / speed + _latency(kind, size, stride, rates)


def distinct(parts: int, experts: int, chosen: int) -> float:
    """Expected number of equal ``parts`` of ``experts`` that hold one of the ``chosen`` of them."""
    none = 1.0
    for taken in range(chosen):
        none *= max(0.0, experts - experts / parts - taken) / (experts - taken)
    return parts * (1.0 - none)


def sent_once_seconds(tokens: float, moe: Moe, size: int, stride: int, rates: Rates) -> float:
    """Seconds of an exchange that sends each token once to a node, and there once to a rank.

    ``tokens`` are the bytes of one rank's tokens, each counted once. Network and links work at the
    same time (DeepEP's README: forwarding from RDMA to NVLink; NVIDIA's HybridEP alike). Where
    routing is limited to groups of experts, so are the nodes.
    """

    def seconds(tokens: float, size: int, stride: int) -> float:
        return _sent_once_seconds(tokens, moe, size, stride, rates)

    found: float = each(seconds, tokens, size, stride)
    return found


def _sent_once_seconds(tokens: float, moe: Moe, size: int, stride: int, rates: Rates) -> float:
    if size <= 1 or tokens <= 0:
        return 0.0
    nodes = min(size, ceil(size * stride / rates.node))
    members = size / nodes
    reached = distinct(nodes, moe.experts, moe.topk)
    if moe.groups > 1 and moe.groups % nodes == 0:
        reached = min(reached, moe.topk_groups)
    network = tokens * reached * (nodes - 1) / nodes / rates.inter
    links = tokens * distinct(size, moe.experts, moe.topk) * (members - 1) / members / rates.intra
    return max(network, links) + _latency(Collective.ALL_TO_ALL, size, stride, rates)


def _latency(kind: Collective, size: int, stride: int, rates: Rates) -> float:
    shares = rates.shares
    nodes = ceil(size * stride / rates.node) if size * stride > rates.node else 1
    nodes = min(nodes, size)
    if kind is Collective.ALL_TO_ALL:
        # Every pair at once: no rank waits for another's.
        return shares.collective_seconds + (shares.network_hop_seconds if nodes > 1 else 0.0)
    ring = (size - nodes) * shares.hop_seconds + (nodes - 1) * shares.network_hop_seconds
    if kind is not Collective.ALL_REDUCE:
        return shares.collective_seconds + ring
    inside = (size / nodes - 1) * shares.hop_seconds
    tree = 2 * (inside + log2(nodes) * 2 * shares.network_hop_seconds)
    return shares.collective_seconds + min(2 * ring, tree)


def send_seconds(message: float, stride: int, rates: Rates) -> float:
    """Seconds to send ``message`` bytes to the rank ``stride`` devices away (or arrays of them)."""

    def seconds(message: float, stride: int) -> float:
        if message <= 0:
            return 0.0
        speed = rates.intra if stride < rates.node else rates.inter
        return message / speed + rates.shares.collective_seconds

    found: float = each(seconds, message, stride)
    return found
