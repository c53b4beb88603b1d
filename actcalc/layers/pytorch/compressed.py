"""Attention over a window and compressed keys: DeepSeek-V4's, op by op (modeling_deepseek_v4.py).

One head serves as key and value of all queries. Keys of a window of tokens are followed by
compressed ones, each a weighted sum of a few tokens' (of an indexer's choice among them) or of
many. The output is rotated back, and projected by groups of heads first.
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.pytorch.core import attend
from actcalc.layers.pytorch.heads import CORE, GROUP, MODULE, Heads
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.scores import Core
from actcalc.specs import Compression, LayerKind

_SOURCE = "transformers models/deepseek_v4/modeling_deepseek_v4.py DeepseekV4"


def compressed_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append attention of ``source``; return the branch."""
    spec = ctx.model.compression
    if spec is None:
        raise SpecError(f"{ctx.model.name} has no compressed attention", "describe compression")
    latent, q = _queries(g, ctx, spec, source)
    kv = linear(g, ctx, "kv", GROUP, source, inside=ctx.h, outside=ctx.d, modules=MODULE)
    kv = norm(g, ctx, "kv_norm", kv, modules=MODULE)
    kv = _rotated(g, ctx, "kv", kv, (ctx.b, ONE, ctx.s, ctx.d), ONE)
    keys = ctx.s
    rate = spec.rate(kind.attention)
    if rate:
        entries = ctx.workload.seq // rate
        if entries:
            made = _compressed(g, ctx, kind, source, rate, entries)
            keys = keys + entries
            whole = g.tensor("kv_joined", (ctx.b, ONE, keys, ctx.d), ctx.act)
            g.op("kv_join", "copy", GROUP, [kv, made], [whole], modules=MODULE)
            kv = whole
        else:
            _idle(g, ctx, kind, source, rate)
        if kind.attention == "sparse":
            _index(g, ctx, spec, latent, source, entries)
    heads = Heads(kv, ONE, 1, ctx.d, order="head", rows=keys)
    core = Core(
        q, heads, heads, kind,
        causal=True, keys=keys, query_width=ctx.model.head_dim, value_width=ctx.model.head_dim,
    )  # fmt: skip
    return _output(g, ctx, spec, attend(g, ctx, core))


def _queries(g: GraphBuilder, ctx: Context, spec: Compression, source: str) -> tuple[str, Heads]:
    """Append low-rank queries, their norm without weights and their rotation: (latent, queries).

    The norm multiplies in the input's type: it keeps the input, and the cast reciprocal beside what
    made it.
    """
    rank = ONE * spec.q_lora
    down = linear(g, ctx, "q_down", GROUP, source, inside=ctx.h, outside=rank, modules=MODULE)
    latent = norm(g, ctx, "q_norm", down, modules=MODULE)
    heads = symbol("a")
    up = linear(g, ctx, "q_up", GROUP, latent, inside=rank, outside=heads * ctx.d, modules=MODULE)
    shape = (ctx.b, heads, ctx.s, ctx.d)
    made = [g.tensor("q_rstd", (*shape[:-1], ONE), DType.FP32)]
    kept = [up, *made]
    if ctx.act is not DType.FP32:
        made += [
            g.tensor("q_fp32", shape, DType.FP32),
            g.tensor("q_rstd_cast", (*shape[:-1], ONE), ctx.act),
        ]
        kept = [up, *made]
    normed = g.tensor("q_normed", shape, ctx.act)
    g.op("q_head_norm", "norm", GROUP, [up], [normed, *made], saves=kept, modules=MODULE)
    turned = _rotated(g, ctx, "q", normed, shape, ONE)
    return latent, Heads(turned, heads, ctx.model.heads, ctx.d, order="head")


def _rotated(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    shape: tuple[Expr, ...],
    batch: Expr,
    rows: Expr | None = None,
) -> str:
    """Append the rotation of the last part of each head, which keeps tables made for it alone."""
    span = (batch, ctx.s if rows is None else rows, symbol("p"))
    tables = [g.tensor(f"{name}_{what}", span, ctx.residual) for what in ("cos", "sin")]
    out = g.tensor(f"{name}_rotated", shape, ctx.act)
    g.op(f"{name}_rotate", "rotary", GROUP, [source], [out, *tables], saves=tables, modules=MODULE)
    return out


def _compressed(
    g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, rate: int, entries: int
) -> str:
    """Append compressed keys: a softmax over each window's tokens weighs their projections.

    Windows of a sparse layer overlap, so that both are written into tensors of their own; else the
    projection is read as it is.
    """
    wide = 2 if kind.attention == "sparse" else 1
    projected, gates = (
        linear(
            g, ctx, f"compress_{what}", GROUP, source, inside=ctx.h, outside=ctx.d * wide,
            modules=MODULE,
        )
        for what in ("kv", "gate")
    )  # fmt: skip
    slots = (ctx.b, ONE * entries, ONE * (rate * wide), ctx.d)
    probs = g.tensor("compress_softmax", slots, DType.FP32)
    made, kept = [probs], [probs]
    if ctx.act is not DType.FP32:
        made.append(g.tensor("compress_weights", slots, ctx.act))
        kept.append(made[-1])
    if wide > 1:
        made.append(g.tensor("compress_slots", slots, ctx.act))
        kept.append(made[-1])
    else:
        kept.append(projected)
    pooled = g.tensor("compress_pooled", (ctx.b, ONE * entries, ctx.d), ctx.act)
    g.op(
        "compress", "multiply", GROUP, [projected, gates], [pooled, *made], saves=kept,
        weights=[Weight("compress_position_bias", (ONE * rate, ctx.d * wide))], modules=MODULE,
        source=f"{_SOURCE}CSACompressor, HCACompressor",
    )  # fmt: skip
    normed = norm(g, ctx, "compress_norm", pooled, modules=MODULE)
    shape = (ctx.b, ONE, ONE * entries, ctx.d)
    return _rotated(g, ctx, "compress", normed, shape, ctx.b, ONE * entries)


def _idle(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, rate: int) -> None:
    """Append the projections of a sequence too short for one compressed key: nobody reads them."""
    wide = ctx.d * (2 if kind.attention == "sparse" else 1)
    out = g.tensor("compress_idle", (ctx.b, ctx.s, wide * 2), ctx.act)
    names = {
        "compress_kv.weight": (wide, ctx.h),
        "compress_gate.weight": (wide, ctx.h),
        "compress_position_bias": (ONE * rate, wide),
        "compress_norm.weight": (ctx.d,),
    }
    g.op(
        "compress_idle", "linear", GROUP, [source], [out],
        flops=ctx.tokens * ctx.h * wide * 4, backward_flops=0, modules=MODULE,
        weights=[Weight(name, shape, frozen=True) for name, shape in names.items()],
    )  # fmt: skip


def _index(
    g: GraphBuilder, ctx: Context, spec: Compression, latent: str, source: str, entries: int
) -> None:
    """Append the indexer: what it picks has no gradient, so that it keeps nothing.

    Its scores of every head, query and compressed key are in fp32, before and after ReLU.
    """
    width, heads = ONE * spec.index_dim, ONE * spec.index_heads
    rank = ONE * spec.q_lora
    pairs = ctx.tokens * entries
    shape = (ctx.b, ctx.s, ONE * min(spec.index_topk, entries))
    picked = g.tensor("picked_keys", shape, DType.INT64)
    projections = ctx.h * width * 4 + rank * heads * width + ctx.h * heads
    g.op(
        "indexer", "core", GROUP, [latent, source], [picked],
        flops=ctx.tokens * projections * 2 + pairs * heads * width * 2, backward_flops=0,
        weights=[
            Weight("indexer.kv.weight", (width * 2, ctx.h)),
            Weight("indexer.gate.weight", (width * 2, ctx.h)),
            Weight("indexer.position_bias", (ONE * spec.sparse_rate, width * 2)),
            Weight("indexer.kv_norm.weight", (width,)),
            Weight("indexer.q.weight", (heads * width, rank)),
            Weight("indexer.heads.weight", (heads, ctx.h)),
        ],
        forward_scratch=pairs * heads * 8, modules=MODULE, rerunnable=False,
        source=f"{_SOURCE}Indexer",
    )  # fmt: skip


def _output(g: GraphBuilder, ctx: Context, spec: Compression, context: str) -> str:
    """Append the rotation back and the projections: of each group of heads, and of all of them."""
    heads = symbol("a")
    back = _rotated(g, ctx, "context", context, (ctx.b, heads, ctx.s, ctx.d), ONE)
    groups, rank = ONE * spec.groups, ONE * spec.group_rank
    whole = (ctx.b, ctx.s, heads * ctx.d)
    grouped = g.tensor("context_grouped", whole, ctx.act)
    g.op("group_heads", "copy", GROUP, [back], [grouped], modules=CORE)
    narrow = g.tensor("grouped_out", (ctx.b, ctx.s, groups * rank), ctx.act)
    g.op(
        "out_groups", "linear", GROUP, [grouped], [narrow], saves=[grouped],
        flops=ctx.tokens * heads * ctx.d * rank * 2, modules=MODULE,
        weights=[Weight("out_groups.weight", (groups * rank, heads * ctx.d / spec.groups))],
        source=f"{_SOURCE}GroupedLinear",
    )  # fmt: skip
    return linear(g, ctx, "out", GROUP, narrow, inside=groups * rank, outside=ctx.h, modules=MODULE)
