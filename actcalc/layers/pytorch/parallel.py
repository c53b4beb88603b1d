"""Tensor parallelism of PyTorch modules: DTensor's plan with sequence parallelism (torchtitan).

Norms, the residual stream and dropout lie split over the sequence. A module's input is gathered
once for all of its products (``PrepareModuleInput``), which keep the gathered tensor; its last
product is split by rows, and its partial sums are reduced and scattered (``RowwiseParallel`` with
``Shard(1)`` as output; torchtitan models/llama3/infra/parallelize.py apply_tp).
"""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, GraphBuilder


def gathered(
    g: GraphBuilder, ctx: Context, name: str, group: str, source: str, modules: Iterable[str] = ()
) -> str:
    """Append the gathering of a split sequence; ``source`` itself without tensor parallelism."""
    return _moved(g, ctx, f"{name}_gather", "gather", group, source, modules, split=False)


def scattered(
    g: GraphBuilder, ctx: Context, name: str, group: str, source: str, modules: Iterable[str] = ()
) -> str:
    """Append the sum over ranks of which each keeps its part of the sequence."""
    return _moved(g, ctx, f"{name}_scatter", "scatter", group, source, modules, split=True)


def _moved(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    kind: str,
    group: str,
    source: str,
    modules: Iterable[str],
    *,
    split: bool,
) -> str:
    if not ctx.tp:
        return source
    dtype = g.dtype(source)
    length = ctx.s_region if split else ctx.s
    out = g.tensor(name, (ctx.b, length, *g.shape(source)[2:]), dtype)
    whole = g.shape(source if split else out)
    size = whole[0] * whole[1] * whole[2] * dtype.itemsize
    ways = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    first, second = reversed(ways) if split else ways
    g.op(
        name, kind, group, [source], [out],
        comm=[Comm(first, "tp", size)], backward_comm=[Comm(second, "tp", size)], modules=modules,
    )  # fmt: skip
    return out
