"""Multi-head latent attention of transformers' DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import replace

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import promoted
from actcalc.layers.pytorch.core import attend
from actcalc.layers.pytorch.heads import GROUP, MODULE, Heads
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.parallel import scattered
from actcalc.layers.pytorch.rotary import rotation, tables
from actcalc.layers.pytorch.scores import Core
from actcalc.specs import Indexer, LayerKind


def mla_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append latent attention of ``source``; return the branch.

    Queries and the joint key/value latent pass a norm and an up-projection each. Queries are
    concatenated, keys written, into tensors of their own in head order; values stay a slice of
    the up-projection, which is kept whole for them. Tensor parallelism splits the up-projections by
    heads; latents, their norms and the down-projections are whole on every rank.
    """
    model, mla = ctx.model, ctx.model.mla
    if mla is None:
        raise SpecError(f"{model.name} has no latent attention", "describe mla")
    rope, value = symbol("p"), symbol("g")
    width = ctx.d + rope
    heads, count = ctx.heads, model.heads // ctx.layout.tp
    up = ("attention", "mla_up_proj")
    queries = source
    rank: Expr = ctx.h
    if mla.q_lora:
        rank = symbol("q")
        down = linear(
            g, ctx, "q_down", GROUP, source, inside=ctx.h, outside=rank, bias=model.qkv_bias,
            modules=MODULE,
        )  # fmt: skip
        queries = norm(g, ctx, "q_norm", down, modules=MODULE)
    q_proj = linear(
        g, ctx, "q_up", GROUP, queries, inside=rank, outside=heads * width,
        modules=up if mla.q_lora else MODULE,
    )  # fmt: skip
    latent = symbol("n")
    joint = linear(
        g, ctx, "kv_down", GROUP, source, inside=ctx.h, outside=latent + rope, bias=model.qkv_bias,
        modules=MODULE,
    )  # fmt: skip
    normed = norm(g, ctx, "kv_norm", joint, shape=(ctx.b, ctx.s, latent), modules=MODULE)
    kv_proj = linear(
        g, ctx, "kv_up", GROUP, normed, inside=latent, outside=heads * (ctx.d + value), modules=up
    )
    q, k = _positioned(g, ctx, kind, Heads(q_proj, heads, count, width), joint, kv_proj)
    v = Heads(kv_proj, heads, count, value, sliced=True)
    if model.indexer:
        _index(g, ctx, model.indexer, queries, source)
    core = Core(
        q, k, v, kind,
        causal=model.causal, keys=ctx.s, query_width=mla.qk_dim, value_width=mla.v_dim,
    )  # fmt: skip
    context = attend(g, ctx, core)
    branch = linear(
        g, ctx, "out", GROUP, context, inside=heads * value, outside=ctx.h, bias=model.out_bias,
        modules=MODULE,
    )  # fmt: skip
    return scattered(g, ctx, "attention", GROUP, branch, MODULE)


def _index(g: GraphBuilder, ctx: Context, spec: Indexer, queries: str, source: str) -> None:
    """Append the indexer (DeepseekV32Indexer), which runs without gradients and keeps nothing.

    Its scores of every head, query and key are in fp32, before and after ReLU.
    """
    width, heads = ONE * spec.head_dim, ONE * spec.heads
    pairs = ctx.tokens * ctx.s
    picked = g.tensor("picked_keys", (ctx.b, ctx.s, ctx.s), DType.BOOL)
    projections = symbol("q") * heads * width + ctx.h * width + ctx.h * heads
    g.op(
        "indexer", "core", GROUP, [queries, source], [picked],
        flops=ctx.tokens * projections * 2 + pairs * heads * (width + 1) * 2, backward_flops=0,
        weights=[
            Weight("indexer.q.weight", (heads * width, symbol("q"))),
            Weight("indexer.k.weight", (width, ctx.h)),
            Weight("indexer.k_norm.weight", (width,)),
            Weight("indexer.k_norm.bias", (width,)),
            Weight("indexer.heads.weight", (heads, ctx.h)),
        ],
        forward_scratch=pairs * heads * 8, modules=MODULE, rerunnable=False,
        source="transformers models/deepseek_v32/modeling_deepseek_v32.py DeepseekV32Indexer",
    )  # fmt: skip


def _positioned(
    g: GraphBuilder, ctx: Context, kind: LayerKind, q: Heads, joint: str, kv_proj: str
) -> tuple[Heads, Heads]:
    """Append the rotation of the positional parts and the assembly of queries and keys.

    Without positions (Kimi Linear) queries stay as projected, keys are written all the same.
    """
    if not kind.rotary:
        k = replace(q, storage="k", order="head")
        g.tensor("k", k.shape(ctx), ctx.act)
        g.op(
            "k_write", "copy", GROUP, [joint, kv_proj], ["k"], modules=("attention", "mla_up_proj")
        )
        return q, k
    rule = rotation(ctx)
    made = []
    for name, sources in (("q", [q.storage]), ("k", [joint, kv_proj])):
        kept, own = tables(g, ctx, kind, rule, name)
        dtype = ctx.act
        if name == "q" and not rule.cast:
            dtype = promoted(g.dtype(q.storage), g.dtype(kept[0]))
        out = replace(q, storage=name, order="head", sliced=False)
        g.tensor(name, out.shape(ctx), dtype)
        inputs = [*sources, *(table for table in kept if table not in own)]
        g.op(
            f"{name}_rotate", "rotary", GROUP, inputs, [name, *own], saves=kept,
            modules=("attention", "mla_up_proj"),
        )  # fmt: skip
        made.append(out)
    return made[0], made[1]
