"""Context parallelism of PyTorch: ring attention over gathered keys and values.

``_templated_ring_attention`` in torch/distributed/tensor/experimental/_context_parallel with its
defaults: one all-gather of keys and values, causal work balanced over the ranks, results merged in
fp32. A rank holds two pieces of the sequence, one from either end. Autograd keeps what a
flash kernel keeps, of those pieces; every rank but the last merges halves by a copy, which lies in
head order.
"""

from __future__ import annotations

from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm

_WIDE = 4


class Ring(NamedTuple):
    """What ring attention has beside a flash kernel: temporaries in bytes, and collectives."""

    forward_scratch: Expr
    backward_scratch: Expr
    comm: tuple[Comm, ...]
    backward_comm: tuple[Comm, ...]


def ring(ctx: Context, queries: Expr, keys: Expr, rows: Expr, *, ratio: float) -> Ring:
    """Temporaries of the fullest rank that merges halves, and what it sends.

    ``queries``, ``keys`` and ``rows`` are elements of its own queries, of its keys (values have as
    many) and of its logsumexp; ``ratio`` is keys over queries. The sums are those of the highest
    moment of a pass, without what the op takes, makes and gathers: forward merges in fp32, with two
    ranks halves alone; backward adds gradients up in fp32 and joins, sends and receives those of
    keys and values.

    Raises ``SpecError`` where the rank's share of the sequence is not two equal pieces.
    """
    degree = ctx.layout.cp
    if ctx.workload.seq % (2 * degree):
        raise SpecError(
            f"seq {ctx.workload.seq} is not cut into 2 x cp {degree} equal pieces",
            f"choose a multiple of {2 * degree}",
        )
    if degree == 2:
        merged = queries * 11 + rows * _WIDE
        summed = queries * 5 + keys * 32 if 2 * ratio >= 1 else queries * 7 + keys * 28
    else:
        merged = queries * 16 + rows * (2 * _WIDE)
        summed = queries * 4 + keys * 36 if 8 * ratio >= 3 else queries * 7 + keys * 28
    gathered = Comm(Collective.ALL_GATHER, "cp", keys * (2 * ctx.act.itemsize) * symbol("c"))
    sent = Comm(Collective.RING, "cp", keys * (2 * _WIDE) * symbol("c"))
    return Ring(merged, summed, (gathered,), (gathered, sent))
