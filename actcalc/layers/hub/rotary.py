"""Rotary position as transformers' modelling code applies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actcalc.layers.algebra import Expr, symbol
from actcalc.layers.context import Context
from actcalc.layers.graph import DType, GraphBuilder
from actcalc.layers.hub.heads import GROUP, MODULE, Heads
from actcalc.layers.hub.linear import promoted

RotaryKernel = Callable[[GraphBuilder, Context, Heads, Heads], tuple[Heads, Heads]]


def _partial(ctx: Context) -> bool:
    return ctx.model.rotary_dim not in (0, ctx.model.head_dim)


def rotary_width(ctx: Context) -> Expr:
    """The width of a head that is rotated."""
    return symbol("p") if _partial(ctx) else ctx.d


def tables(g: GraphBuilder, ctx: Context, dtype: DType, width: Expr) -> list[str]:
    """Declare the cosine and sine tables that all layers share; return their names.

    The model computes them once for its position ids (one row for all sequences); each product
    with one saves a reference.
    """
    shape = (Expr.of(1), ctx.s, width)
    return [g.shared(what, shape, dtype) for what in ("rotary_cos", "rotary_sin")]


def _rotated(
    g: GraphBuilder,
    name: str,
    ctx: Context,
    x: Heads,
    kept: list[str],
    made: list[str],
    dtype: DType,
    *,
    order: str | None = None,
) -> Heads:
    out = replace(x, storage=name, sliced=False, order=order or x.order)
    g.tensor(name, out.shape(ctx), dtype)
    g.op(
        f"{name}_rotate", "rotary", GROUP, [x.storage, *(k for k in kept if k not in made)],
        [name, *made], saves=kept, modules=MODULE,
    )  # fmt: skip
    return out


def _half(g: GraphBuilder, ctx: Context, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """``x * cos + rotate_half(x) * sin``: the tables alone are kept, and x keeps its strides."""
    kept = tables(g, ctx, ctx.residual, rotary_width(ctx))
    dtypes = (promoted(g.dtype(x.storage), ctx.residual) for x in (q, k))
    order = "head" if _partial(ctx) else None
    first, second = dtypes
    return (
        _rotated(g, "q", ctx, q, kept, [], first, order=order),
        _rotated(g, "k", ctx, k, kept, [], second, order=order),
    )


def _half_cat(g: GraphBuilder, ctx: Context, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """As :func:`_half`, then concatenated with what is not rotated, even if that is nothing.

    A concatenation lays its result out afresh, in head order.
    """
    kept = tables(g, ctx, ctx.residual, rotary_width(ctx))
    return (
        _rotated(g, "q", ctx, q, kept, [], promoted(g.dtype(q.storage), ctx.residual), order="head"),
        _rotated(g, "k", ctx, k, kept, [], promoted(g.dtype(k.storage), ctx.residual), order="head"),
    )


def _half_fp32(g: GraphBuilder, ctx: Context, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """Tables and products in fp32, cast back (OLMo, Cohere)."""
    kept = tables(g, ctx, DType.FP32, rotary_width(ctx))
    return (
        _rotated(g, "q", ctx, q, kept, [], g.dtype(q.storage)),
        _rotated(g, "k", ctx, k, kept, [], g.dtype(k.storage)),
    )


ROTARY_KERNELS: dict[str, RotaryKernel] = {
    "half": _half,
    "half_cat": _half_cat,
    "half_fp32": _half_fp32,
}


def rotate(g: GraphBuilder, ctx: Context, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """Append the rotation of queries and keys with the framework's kernel for the family."""
    return ROTARY_KERNELS[ctx.kernel("rotary")](g, ctx, q, k)
