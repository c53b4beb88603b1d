"""Attention with a learned bias of relative positions, and over an encoder's output (T5)."""

from __future__ import annotations

from actcalc.layers.core.algebra import ONE, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.pytorch.core import attend
from actcalc.layers.pytorch.heads import GROUP, MODULE, Heads
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.scores import Core
from actcalc.specs import LayerKind


def encoder_output(g: GraphBuilder, ctx: Context) -> str:
    """Declare the encoder's output, which every decoder layer reads; return its name."""
    return g.shared("encoder_output", (ctx.b, ctx.s, ctx.h), ctx.residual)


def relative_attention(
    g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, *, cross: bool = False
) -> str:
    """Append T5's attention of ``source``, or of the encoder's output; return the branch.

    One table of biases serves a stack (UMT5: one in every layer). Its look-up keeps the bucket of
    every pair of positions.
    """
    model = ctx.model
    memory = encoder_output(g, ctx) if cross else source
    causal = kind.cross if model.encoder_layers else model.causal
    parts = [
        linear(
            g, ctx, part, GROUP, read, inside=ctx.h, outside=ctx.q_width, bias=model.qkv_bias,
            modules=MODULE, out=f"{part}_proj",
        )
        for part, read in (("q", source), ("k", memory), ("v", memory))
    ]  # fmt: skip
    if not cross:
        _bias(g, ctx, "decoder" if kind.cross else "encoder")
    q, k, v = (Heads(part, symbol("a"), model.heads, ctx.d) for part in parts)
    core = Core(
        q, k, v, kind,
        causal=causal and not cross, keys=ctx.s,
        query_width=model.head_dim, value_width=model.head_dim,
        bias="zeros" if cross else "relative",
    )  # fmt: skip
    context = attend(g, ctx, core)
    return linear(
        g, ctx, "out", GROUP, context,
        inside=ctx.q_width, outside=ctx.h, bias=model.out_bias, modules=MODULE,
    )  # fmt: skip


def _bias(g: GraphBuilder, ctx: Context, stack: str) -> None:
    """Append the look-up of the biases of relative positions."""
    model = ctx.model
    # Asked for, so that a framework without relative positions refuses the model.
    ctx.kernel("relative_bias")
    own = model.relative_every_layer
    shape, made = (ctx.s, ctx.s), []
    if own:
        buckets = g.tensor("relative_buckets", shape, DType.INT64)
        made.append(buckets)
    else:
        buckets = g.shared(f"relative_buckets_{stack}", shape, DType.INT64)
    out = g.tensor("relative_bias", (ONE, symbol("a"), ctx.s, ctx.s), ctx.residual)
    table = (ONE * model.relative_buckets, symbol("a"))
    g.op(
        "relative_bias", "embedding", GROUP, [] if own else [buckets], [out, *made],
        saves=[buckets], modules=MODULE,
        weights=[Weight("relative_bias", table, scope="" if own else f"relative_bias_{stack}")],
    )  # fmt: skip
