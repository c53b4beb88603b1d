"""A sequence's tokens made one: what classifiers and contrastive losses read of it."""

from __future__ import annotations

from typing import NamedTuple

from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import residual_add
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import activate

GROUP = "head"


class Pooled(NamedTuple):
    """The storage that holds what was pooled, and its width; a token is a view of all tokens."""

    source: str
    width: Expr


def pool(g: GraphBuilder, ctx: Context, stream: str) -> Pooled:
    """Append the model's pooling of ``stream``.

    A mean keeps nothing, a pick the two indices it is made with (CLIPTextModel.forward).
    """
    rule = ctx.model.pooling
    if rule in ("first", "last"):
        return Pooled(stream, ctx.h)
    if rule == "attention":
        return Pooled(_attend(g, ctx, stream), ctx.h)
    width = ctx.h * 2 if rule == "first_and_mean" else ctx.h
    out = g.tensor("pooled", (ctx.b, width), g.dtype(stream))
    made = []
    if rule == "picked":
        made = [g.tensor(f"picked_{what}", (ctx.b,), DType.INT64) for what in ("rows", "tokens")]
    g.op("pool", "copy", GROUP, [stream], [out, *made], saves=made)
    return Pooled(out, width)


def pooled_output(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append what a tower hands to a loss outside it: pooling, a norm, a projection."""
    source, width = pool(g, ctx, stream)
    if ctx.model.pooled_norm:
        source = norm(g, ctx, "final_norm", source, shape=(ctx.b, ctx.h), group=GROUP, modules=())
    if ctx.model.labels:
        source = linear(
            g, ctx, "head", GROUP, source, inside=width, outside=ONE * ctx.model.labels, bias=True,
            rows=(ctx.b,),
        )  # fmt: skip
    g.op("end", "view", GROUP, [source], [])
    return source


def _attend(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append attention of a learned query over all tokens, and a feed-forward.

    torch.nn.MultiheadAttention copies the packed keys and values, scales the query and keeps the
    probabilities, since it returns them (SiglipMultiheadAttentionPoolingHead;
    torch.nn.functional.multi_head_attention_forward).
    """
    one = (ctx.b, ONE, ctx.h)
    probe = g.tensor("probe", one, ctx.residual)
    g.op("probe", "copy", GROUP, [], [probe], weights=[Weight("probe", (ctx.h,))])
    q = _linear(g, ctx, "pool_q", probe, ctx.h, ctx.h)
    kv = _linear(g, ctx, "pool_kv", stream, ctx.h, ctx.h * 2)
    scaled = g.tensor("pool_q_scaled", one, ctx.act)
    packed = g.tensor("pool_kv_contiguous", (ctx.b, ctx.s, ctx.h * 2), ctx.act)
    g.op("pool_split", "copy", GROUP, [q, kv], [scaled, packed])
    shape = (ctx.b, ctx.heads, ONE, ctx.s)
    scores = g.tensor("pool_scores", shape, ctx.act)
    flops = ctx.b * ctx.s * ctx.h * 2
    pair = [scaled, packed]
    g.op("pool_qk", "core", GROUP, pair, [scores], saves=pair, flops=flops)
    probs = g.tensor("pool_probs", shape, DType.FP32 if ctx.autocast else ctx.act)
    g.op("pool_softmax", "softmax", GROUP, [scores], [probs], saves=[probs])
    if ctx.autocast:
        cast = g.tensor("pool_probs_cast", shape, ctx.act)
        g.op("pool_softmax_cast", "copy", GROUP, [probs], [cast])
        probs = cast
    found = g.tensor("pool_context", one, ctx.act)
    pair = [probs, packed]
    g.op("pool_pv", "core", GROUP, pair, [found], saves=pair, flops=flops)
    token = _linear(g, ctx, "pool_out", found, ctx.h, ctx.h)
    normed = norm(g, ctx, "pool_norm", token, group=GROUP, modules=())
    wide = _linear(g, ctx, "pool_fc1", normed, ctx.h, ctx.ffn)
    active = activate(g, ctx, "pool_activation", wide, g.shape(wide), group=GROUP, modules=())
    branch = _linear(g, ctx, "pool_fc2", active, ctx.ffn, ctx.h)
    return residual_add(g, "pool_add", GROUP, branch, token, "pooled")


def _linear(
    g: GraphBuilder, ctx: Context, name: str, source: str, inside: Expr, outside: Expr
) -> str:
    return linear(g, ctx, name, GROUP, source, inside=inside, outside=outside, bias=True)
