"""Whole weights given to data-parallel ranks: Megatron's layer-wise distributed optimizer.

Muon orthogonalises whole matrices, so that a matrix's master copy and momentum live on one rank
(optimizer/layer_wise_optimizer.py ``LayerWiseDistributedOptimizer``). Two assignments exist. The
older one sorts all weights by size and deals them out back and forth over the ranks. The newer one
lays matrices out in buckets, each filled rank by rank with the largest matrix for the least loaded
rank, pads every rank's part of a bucket to the largest, and shards the other weights evenly, as the
plain distributed optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm, prod
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.states import replicas
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training

_PADDING_FLOOR = 0.9  # part of a padded bucket that weights fill at least, unless one dominates
_ALIGNED = 64  # elements that a weight's place in a buffer is a multiple of


class Piece(NamedTuple):
    """One weight as the optimizer sees it: its elements on this rank, and whether Muon takes it."""

    elements: int
    muon: bool
    expert: bool


class Share(NamedTuple):
    """What the layer-wise optimizer keeps on one rank, in bytes."""

    optimizer: int
    master: int
    padding: int
    """Elements that pad the buffers of weights and gradients."""


def pieces(model: ModelGraph, graphs: Iterable[Graph]) -> tuple[Piece, ...]:
    """Every trained weight of a stage in model order; grouped experts count one by one."""
    found: list[Piece] = []
    seen: set[str] = set()
    for graph in graphs:
        for op in graph.ops:
            for weight in op.weights:
                if weight.frozen or (weight.scope and weight.scope in seen):
                    continue
                seen.add(weight.scope)
                shape = [int(dim.value(model.sizes)) for dim in weight.shape]
                one_by_one = weight.expert and len(shape) > 2
                count, shape = (shape[0], shape[1:]) if one_by_one else (1, shape)
                ends = graph.name in ("embedding", "head") or op.kind in ("embedding", "norm")
                piece = Piece(prod(shape), len(shape) == 2 and not ends, weight.expert)
                found += [piece] * count
    return tuple(found)


def dealt(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The rank of each weight: sorted by size, they go to the ranks there and back again."""
    loop = (*range(ranks), *reversed(range(ranks)))
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    owners = [0] * len(sizes)
    for place, index in enumerate(order):
        owners[index] = loop[place % len(loop)]
    return tuple(owners)


def largest_first(sizes: Sequence[int], ranks: int) -> int:
    """Elements on the fullest rank where the largest weight goes to the least loaded rank.

    (torch.distributed.optim zero_redundancy_optimizer.py _partition_parameters.)
    """
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads)


def packed(sizes: Sequence[int], ranks: int, bucket: int | None) -> tuple[tuple[int, ...], int]:
    """The rank of each weight, and the elements of padding, in the layout by buckets.

    Weights fill buckets from the last one back, each of about ``bucket`` elements (None: one bucket
    for all); a bucket grows until its largest weight no longer leaves most of it empty.
    """
    owners = [0] * len(sizes)
    padding = 0

    def close(chunk: list[int]) -> int:
        loads = [0] * ranks
        for index in sorted(chunk, key=lambda i: -sizes[i]):
            rank = loads.index(min(loads))
            owners[index] = rank
            start = -(-loads[rank] // _ALIGNED) * _ALIGNED
            loads[rank] = start + sizes[index]
        part = -(-max(loads) // lcm(_ALIGNED, 128)) * lcm(_ALIGNED, 128)
        return ranks * part - sum(sizes[index] for index in chunk)

    chunk: list[int] = []
    for index in reversed(range(len(sizes))):
        chunk.append(index)
        largest = max(sizes[i] for i in chunk)
        full = bucket is not None and sum(sizes[i] for i in chunk) >= max(
            bucket, int(ranks * largest * _PADDING_FLOOR)
        )
        if full:
            padding += close(chunk)
            chunk = []
    if chunk:
        padding += close(chunk)
    return tuple(owners), padding


def shares(
    model: ModelGraph, training: Training, rules: Recipe, weights: Sequence[Piece]
) -> tuple[Share, ...]:
    """What every rank of the data-parallel group keeps of one stage; the last rank is the last.

    Dense and expert weights are dealt out over groups of their own; the rank of an expert group is
    that of its part of the dense one.
    """
    layout = model.context.layout
    groups = []
    for expert in (False, True):
        own = [weight for weight in weights if weight.expert is expert]
        groups.append(_group(training, rules, own, replicas(layout, training, expert=expert)))
    most = max(len(group) for group in groups)
    return tuple(
        Share(*(sum(parts) for parts in zip(*(g[rank % len(g)] for g in groups), strict=True)))
        for rank in range(most)
    )


def _group(
    training: Training, rules: Recipe, weights: Sequence[Piece], ranks: int
) -> tuple[Share, ...]:
    master = training.master_bytes or rules.master
    optimizer = OPTIMIZERS[training.optimizer]
    adam = training.moments_bytes or optimizer.moments * rules.moment
    muon = optimizer.matrix_moments * rules.moment
    sizes = [w.elements for w in weights]
    padding, even = 0, 0
    managed = [True] * len(weights)
    if ranks == 1 or training.whole_weights == "dealt":
        owners = dealt(sizes, ranks)
    else:
        managed = [w.muon for w in weights]
        even = sum(w.elements for w in weights if not w.muon)
        bucket = max(40_000_000, 1_000_000 * ranks) if training.overlapped_reduction else None
        inside, padding = packed([w.elements for w in weights if w.muon], ranks, bucket)
        ranked = iter(inside)
        owners = tuple(next(ranked) if w.muon else 0 for w in weights)
    result = []
    for rank in range(ranks):
        own = [w for w, o, m in zip(weights, owners, managed, strict=True) if m and o == rank]
        elements = sum(w.elements for w in own)
        moments = sum(w.elements * (muon if w.muon else adam) for w in own)
        spread = -(-even // ranks)
        result.append(
            Share(
                optimizer=(elements + spread) * master + moments + spread * adam,
                master=(elements + spread) * master,
                padding=padding,
            )
        )
    return tuple(result)
