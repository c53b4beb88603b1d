"""What collectives along the sequence move beside their messages, and how wide those are.

torch gathers and scatters along the first dimension: parts of several sequences that lie as [batch,
sequence, width] are copied into order (distributed/_functional_collectives.py all_gather_tensor,
reduce_scatter_tensor: chunk and cat); one sequence alone needs no copy (_maybe_view_chunk_cat).
Where a product runs in pieces beside its collective there is none either, but what ranks sent of a
scattered result lies stacked and is summed by a kernel (distributed/_symmetric_memory/__init__.py
_fused_matmul_reduce_scatter).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.layers.core.algebra import least
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm

_ALONG = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def gathered_share(comm: Comm, context: Context, graph: str, *, narrow: bool) -> float:
    """Bytes of a message over those of 16 bits: half of what fp8 products' inputs have.

    ``narrow``: they are quantised before they are gathered. Embedding and head run in 16 bits.
    """
    gathers = comm.group == "tp" and comm.collective is Collective.ALL_GATHER
    ends = graph in ("embedding", "head")
    if not gathers or ends or not narrow or not context.workload.fp8_products:
        return 1.0
    return 1.0 / float(context.act.itemsize)


def in_order(
    comm: Comm, message: float, context: Context, sizes: Mapping[str, Any]
) -> tuple[float, float]:
    """Bytes and kernels of the copy that puts parts of ``message`` bytes in order."""
    split = comm.group == "tp" and comm.collective in _ALONG
    pieces = context.workload.kernels.tp_comm_overlap
    if not split or pieces or context.framework.sequence_first:
        return 0.0, 0.0
    several = least(1, sizes["b"] - 1)
    return 2 * message * several, several


def stacked(comm: Comm, message: float, context: Context, sizes: Mapping[str, Any]) -> float:
    """Bytes of summing what ranks sent of a result that was scattered piece by piece."""
    scatters = comm.group == "tp" and comm.collective is Collective.REDUCE_SCATTER
    if not scatters or context.framework.sequence_first:
        return 0.0
    moved: float = message * (1 + 1 / sizes["t"])
    return moved
