"""Attention that scores content and relative position apart (modeling_deberta_v2.py)."""

from __future__ import annotations

from dataclasses import replace

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout
from actcalc.layers.pytorch.attention import close
from actcalc.layers.pytorch.core import weighted
from actcalc.layers.pytorch.heads import CORE, GROUP, MODULE, Heads, copied
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.scores import Core, softmax
from actcalc.specs import Disentangled, LayerKind

_TABLE = "position_table"


def position_table(g: GraphBuilder, ctx: Context, embedded: str) -> str:
    """Append the mask that the embedding is multiplied by, and the norm of the table of positions.

    Both are of the model, once for all layers: DebertaV2Embeddings, DebertaV2Encoder.
    """
    spec = _spec(ctx)
    mask = g.tensor("embedding_mask", (ctx.b, ctx.s, ONE), ctx.residual)
    out = g.tensor("embedding_masked", g.shape(embedded), g.dtype(embedded))
    g.op("embedding_mask", "multiply", "embedding", [embedded], [out, mask], saves=[mask])
    shape = (ONE * spec.span * 2, ctx.h)
    g.tensor("positions", shape, ctx.residual)
    g.op("positions", "view", "embedding", [], ["positions"], weights=[Weight(_TABLE, shape)])
    if spec.normed:
        before = len(g.ops)
        norm(g, ctx, "position_norm", "positions", group="embedding", modules=())
        # The norm's input is the table itself, a parameter.
        op = g.ops[before]
        saves = tuple(name for name in op.saves if name != "positions")
        g.ops[before] = replace(op, saves=saves)
    return out


def _spec(ctx: Context) -> Disentangled:
    if ctx.model.disentangled is None:
        raise SpecError("the model has no disentangled attention", "describe disentangled")
    return ctx.model.disentangled


def disentangled_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append DisentangledSelfAttention; return the branch, before dropout and residual."""
    spec = _spec(ctx)
    if ctx.workload.attention != "eager":
        raise SpecError(
            f"framework {ctx.framework} has no {ctx.workload.attention} attention for "
            f"{ctx.model.family} models ({ctx.model.name})",
            "use --attention eager",
        )
    names = [
        linear(
            g, ctx, part, GROUP, source, inside=ctx.h, outside=ctx.q_width,
            bias=ctx.model.qkv_bias, modules=MODULE, out=f"{part}_proj",
        )
        for part in "qkv"
    ]  # fmt: skip
    q, k, v = (
        copied(g, ctx, Heads(name, ctx.heads, ctx.model.heads, ctx.d), f"{part}_heads",
               order="head")
        for part, name in zip("qkv", names, strict=True)
    )  # fmt: skip
    keys = _scaled(g, ctx, "k_scaled", k.storage)
    shape = (ctx.b, ctx.heads, ctx.s, ctx.s)
    scores = g.tensor("scores", shape, ctx.act)
    pair, flops = [q.storage, keys], ctx.tokens * ctx.s * ctx.q_width * 2
    g.op("qk", "core", GROUP, pair, [scores], saves=pair, flops=flops, modules=CORE)
    table = _dropped_table(g, ctx, spec)
    for on, name, content in (
        (spec.content_to_position, "c2p", q.storage),
        (spec.position_to_content, "p2c", k.storage),
    ):
        if on:
            _positions(g, ctx, spec, name, content, table)
    mask = g.tensor("attention_mask", (ctx.b, ONE, ctx.s, ctx.s), DType.BOOL)
    g.op("attention_mask", "copy", GROUP, [], [mask], modules=CORE)
    probs = softmax(g, ctx, scores, shape, [mask])
    if ctx.attention_dropout:
        probs = dropout(g, "softmax_dropout", GROUP, probs, modules=CORE)
    core = Core(
        q, k, v, kind, causal=False, keys=ctx.s_keys, query_width=ctx.model.head_dim,
        value_width=ctx.model.head_dim,
    )  # fmt: skip
    return close(g, ctx, weighted(g, ctx, core, probs, v))


def _scaled(g: GraphBuilder, ctx: Context, name: str, source: str) -> str:
    """Append a division by a scale that is a tensor, which is kept."""
    out = g.tensor(name, g.shape(source), ctx.act)
    scale = g.tensor(f"{name}_by", (), ctx.act)
    g.op(name, "multiply", GROUP, [source], [out, scale], saves=[scale], modules=CORE)
    return out


def _dropped_table(g: GraphBuilder, ctx: Context, spec: Disentangled) -> str:
    """Append each layer's own dropout of the table; without one all layers read the same."""
    shape = (ONE * spec.span * 2, ctx.h)
    if not ctx.hidden_dropout:
        return g.shared(_TABLE, shape, ctx.residual)
    out = g.tensor("positions_dropped", shape, ctx.residual)
    mask = g.tensor("positions_mask", shape, DType.BOOL)
    g.op("positions_dropout", "dropout", GROUP, [], [out, mask], saves=[mask], modules=CORE)
    return out


def _positions(
    g: GraphBuilder, ctx: Context, spec: Disentangled, name: str, content: str, table: str
) -> None:
    """Append the scores of one side's content and every position, and the pick for each pair.

    The projected table is repeated for each sequence; the pick keeps all scores and its indices,
    which it makes itself.
    """
    rows = ONE * spec.span * 2
    part = "k" if name == "c2p" else "q"
    projected = _projected(g, ctx, spec, part, table)
    heads = (ctx.b, ctx.heads, rows, ctx.d)
    if not (spec.normed or ctx.hidden_dropout):
        # The table is a parameter then, which is there anyway.
        saves = tuple(each for each in g.ops[-1].saves if each != table)
        g.ops[-1] = replace(g.ops[-1], saves=saves)
    repeated = g.tensor(f"{name}_positions", heads, ctx.act)
    g.op(f"{name}_repeat", "copy", GROUP, [projected], [repeated], modules=CORE)
    scores = g.tensor(f"{name}_scores", (ctx.b, ctx.heads, ctx.s, rows), ctx.act)
    pair, flops = [content, repeated], ctx.tokens * rows * ctx.q_width * 2
    g.op(f"{name}_product", "core", GROUP, pair, [scores], saves=pair, flops=flops, modules=CORE)
    index = g.tensor(f"{name}_index", (ctx.s, ctx.s), DType.INT64)
    picked = g.tensor(f"{name}_picked", (ctx.b, ctx.heads, ctx.s, ctx.s), ctx.act)
    kept = [scores, index]
    g.op(f"{name}_pick", "copy", GROUP, [scores], [picked, index], saves=kept, modules=CORE)
    _scaled(g, ctx, f"{name}_scaled", picked)


def _projected(g: GraphBuilder, ctx: Context, spec: Disentangled, part: str, table: str) -> str:
    """Append the projection of the table, by the content's own weights where they are shared."""
    rows: Expr = ONE * spec.span * 2
    if not spec.shared:
        return linear(
            g, ctx, f"position_{part}", GROUP, table, inside=ctx.h, outside=ctx.q_width, bias=True,
            modules=MODULE,
        )  # fmt: skip
    out = g.tensor(f"position_{part}_out", (rows, ctx.q_width), ctx.act)
    made, kept = [], [table]
    if g.dtype(table) is not ctx.act:
        made = [g.tensor(f"position_{part}_input", (rows, ctx.h), ctx.act)]
        kept = made
    weight = [f"{part}_weight"] if ctx.autocast else []
    g.op(
        f"position_{part}", "linear", GROUP, [table, *weight], [out, *made],
        saves=[*kept, *weight], flops=rows * ctx.h * ctx.q_width * 2, modules=MODULE,
    )  # fmt: skip
    return out
