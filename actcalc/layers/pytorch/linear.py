"""Matrix products with a weight, with what autocast copies for them."""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.layers.core.algebra import Expr, Operand, product
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import GraphBuilder
from actcalc.layers.core.ops import matmul


def linear(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    group: str,
    source: str,
    *,
    inside: Operand,
    outside: Operand,
    bias: bool = False,
    modules: Iterable[str] = (),
    rows: Iterable[Operand] | None = None,
    scope: str = "",
    out: str = "",
) -> str:
    """Append a product of ``source`` with a weight (outside × inside); return its output.

    It saves its input. ``rows`` are the leading dimensions where ``source`` is a larger storage
    than what is read. Under autocast the fp32 weight, and an fp32 input, are copied to half
    precision for it: the copies are what is saved (torch/csrc autocast: ``linear`` and ``addmm``
    run in the lower precision; weights are cast once in a forward pass, inputs each time).
    """
    leading = tuple(Expr.of(dim) for dim in (g.shape(source)[:-1] if rows is None else rows))
    width_in, width_out = Expr.of(inside), Expr.of(outside)
    # A bias that is added apart is in fp32 under autocast, and so is the sum (FalconLinear).
    apart = bias and ctx.kernel("bias") == "apart"
    made = g.tensor(out or f"{name}_out", (*leading, width_out), ctx.residual if apart else ctx.act)
    outputs, saves = [made], []
    if g.dtype(source) is ctx.act:
        saves.append(source)
    else:
        saves.append(g.tensor(f"{name}_input", (*leading, width_in), ctx.act))
        outputs += saves
    if ctx.autocast:
        weight = g.tensor(f"{name}_weight", (width_out, width_in), ctx.act)
        outputs.append(weight)
        saves.append(weight)
    matmul(
        g, name, group, source, outputs, rows=product(leading), inside=width_in, outside=width_out,
        bias=bias, saves=saves, scope=scope, modules=modules,
    )  # fmt: skip
    return made
