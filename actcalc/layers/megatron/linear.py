"""Matrix products with a weight: column-parallel, row-parallel, replicated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from actcalc.layers.core.algebra import Expr, Operand
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, GraphBuilder
from actcalc.layers.core.ops import matmul

Split = Literal["column", "row", "none"]


def linear(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    group: str,
    source: str,
    outputs: Iterable[str],
    *,
    width_in: Operand,
    width_out: Operand,
    split: Split,
    bias: bool = False,
    modules: Iterable[str] = (),
    tokens: Operand | None = None,
) -> None:
    """Append ``outputs = source · W``; it saves its input for the weight's gradient.

    ``width_in`` and ``width_out`` are widths on one rank. Under sequence parallelism a
    column-parallel product gathers its input (and keeps the sharded one, gathering again in
    backward), a row-parallel product reduce-scatters its output; without it the row-parallel
    product all-reduces its output and the column-parallel one its input's gradient
    (Shoeybi et al. 2019 §3; Korthikanti et al. 2022 §4.2.2).
    """
    rows = Expr.of(ctx.tokens if tokens is None else tokens)
    inside, outside = Expr.of(width_in), Expr.of(width_out)
    forward: list[Comm] = []
    backward: list[Comm] = []
    if ctx.tp and split != "none":
        full = rows * (inside if split == "column" else outside) * ctx.act.itemsize
        if ctx.layout.sp:
            gather = Comm(Collective.ALL_GATHER, "tp", full)
            scatter = Comm(Collective.REDUCE_SCATTER, "tp", full)
            forward = [gather] if split == "column" else [scatter]
            backward = [gather, scatter] if split == "column" else [gather]
        else:
            reduce = Comm(Collective.ALL_REDUCE, "tp", full)
            forward = [] if split == "column" else [reduce]
            backward = [reduce] if split == "column" else []
    matmul(
        g, name, group, source, outputs, rows=rows, inside=inside, outside=outside, bias=bias,
        comm=forward, backward_comm=backward, modules=modules,
    )  # fmt: skip
