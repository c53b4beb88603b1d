"""Self-attention and cross-attention: projections, norms and position around a core.

Recompute modules: every op between the layer's norm and the residual is ``attention``; the ops
between the positioned q, k, v and the context are ``core_attn`` (Megatron's name).
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout, residual_add
from actcalc.layers.megatron.core import GROUP, MODULE, CoreInput, core
from actcalc.layers.megatron.linear import linear
from actcalc.specs import LayerKind


def keys_of(ctx: Context, kind: LayerKind) -> Expr:
    """How many keys each token is multiplied with: the sequence, or the layer's window."""
    return symbol("y") if kind.window else ctx.s_keys


def rotary_tables(g: GraphBuilder, ctx: Context, *, width: Expr) -> str:
    """Append the fp32 angles that this layer's tables are computed from."""
    angles = g.tensor("rotary_angles", (ctx.s, 1, 1, width), DType.FP32)
    g.op("rotary_angles", "rotary", GROUP, [], [angles], modules=MODULE)
    return angles


def rotate(
    g: GraphBuilder,
    ctx: Context,
    sources: dict[str, str],
    shapes: dict[str, tuple[Expr, ...]],
    *,
    angles: str,
    width: Expr,
    modules: tuple[str, ...] = MODULE,
) -> dict[str, str]:
    """Append rotary position for each of ``sources`` (label -> storage); return the new names.

    Unfused, every tensor gets its own cosine and sine table in the activations' type, kept by the
    two products of the rotation (Megatron-Core ``_apply_rotary_pos_emb_bshd``). The fused kernel
    keeps only the angles, which exist once per model.
    """
    fused = ctx.kernel("rotary") == "fused" or ctx.workload.kernels.apply_rope_fusion
    result: dict[str, str] = {}
    for label, source in sources.items():
        out = g.tensor(f"{label}_rotary", shapes[label], ctx.act)
        made = [out]
        if not fused:
            for function in ("cos", "sin"):
                table = g.tensor(f"{label}_{function}", (ctx.s, 1, 1, width), ctx.act)
                made.append(table)
        kept = [angles] if fused else made[1:]
        g.op(
            f"rotary_{label}", "rotary", GROUP, [source, angles], made, saves=kept, modules=modules
        )
        result[label] = out
    return result


def _project(g: GraphBuilder, ctx: Context, source: str) -> tuple[str, str, str, frozenset[str]]:
    """Append the query, key and value projection; return q, k, v and which of them are views."""
    model = ctx.model
    packed = ctx.kernel("qkv") == "packed"
    gathered = ctx.kernel("kv_shards") == "gathered" and model.kv_heads < ctx.layout.tp
    width = ctx.q_width + ctx.kv_width * 2
    if gathered:
        width = (symbol("a") * ctx.d + symbol("k") * ctx.d * 2) / ctx.t
    widths = {"qkv": width} if packed else {"q": ctx.q_width, "k": ctx.kv_width, "v": ctx.kv_width}
    names = [g.tensor(name, (ctx.s, ctx.b, each), ctx.act) for name, each in widths.items()]
    linear(
        g, ctx, "qkv", GROUP, source, names, width_in=ctx.h, width_out=width, split="column",
        bias=model.qkv_bias, modules=MODULE,
    )  # fmt: skip
    if model.clip_qkv:
        clipped = [g.tensor(f"{name}_clipped", g.shape(name), ctx.act) for name in names]
        # clamp keeps its input (ATen ClampBackward).
        g.op("clip_qkv", "activation", GROUP, names, clipped, saves=names, modules=MODULE)
        names = clipped
    q, k, v = names * 3 if packed else names
    if not packed:
        return q, k, v, frozenset()
    if gathered:
        full = _gather(g, ctx, q, width)
        return full, full, full, frozenset([full])
    groups = model.kv_heads // min(model.kv_heads, ctx.layout.tp)
    per_group = model.heads // model.kv_heads
    if per_group > 1 and groups > 1:
        # Heads of several groups do not lie evenly spaced, so reshape copies the query.
        copy = g.tensor("q_reshaped", (ctx.s, ctx.b, ctx.q_width), ctx.act)
        g.op("reshape_q", "copy", GROUP, [q], [copy], modules=MODULE)
        return copy, k, v, frozenset([k])
    return q, k, v, frozenset([q])


def _gather(g: GraphBuilder, ctx: Context, part: str, width: Expr) -> str:
    """Append the gathering of the whole projection, of which q, k and v are slices.

    With fewer groups than ranks every rank gathers all of it (Megatron-Core attention.py).
    """
    full = g.tensor("qkv_gathered", (ctx.s, ctx.b, width * ctx.t), ctx.act)
    message = ctx.tokens * width * ctx.t * ctx.act.itemsize
    g.op(
        "gather_qkv", "gather", GROUP, [part], [full],
        comm=[Comm(Collective.ALL_GATHER, "tp", message)],
        backward_comm=[Comm(Collective.REDUCE_SCATTER, "tp", message)], modules=MODULE,
    )  # fmt: skip
    g.note(
        f"kv_heads {ctx.model.kv_heads} < tp {ctx.layout.tp}: every rank keeps the whole "
        "projection, gathered"
    )
    return full


def _normalised(g: GraphBuilder, ctx: Context, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Append normalisation of queries and keys (and values), per head or over the full width."""
    model, rows = ctx.model, (ctx.s, ctx.b)
    each = model.qk_norm == "head"

    def normed(label: str, source: str, shape: tuple[Expr, ...]) -> str:
        return norm(
            g, ctx, f"{label}_norm", source, out=f"{label}_normed", shape=shape, group=GROUP,
            modules=MODULE,
        )  # fmt: skip

    if model.qk_norm != "none":
        q = normed("q", q, (*rows, ctx.heads, ctx.d) if each else (*rows, ctx.q_width))
        k = normed("k", k, (*rows, ctx.kv_heads, ctx.d) if each else (*rows, ctx.kv_width))
    if model.v_norm:
        v = normed("v", v, (*rows, ctx.kv_heads, ctx.d))
    return q, k, v


def attention(
    g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, stream: str, out: str
) -> str:
    """Append self-attention of ``source``, its dropout, and the addition to ``stream``."""
    return close_attention(g, ctx, self_attention(g, ctx, kind, source), ctx.q_width, stream, out)


def self_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append the projections, position and core of self-attention; return the context."""
    q, k, v, views = _project(g, ctx, source)
    q, k, v = _normalised(g, ctx, q, k, v)
    if kind.rotary:
        width = symbol("p")
        turned = rotate(
            g,
            ctx,
            {"q": q, "k": k},
            {"q": (ctx.s, ctx.b, ctx.q_width), "k": (ctx.s, ctx.b, ctx.kv_width)},
            angles=g.shared("rotary_angles", (ctx.s, 1, 1, width), DType.FP32),
            width=width,
        )
        q, k = turned["q"], turned["k"]
    return core(
        g,
        ctx,
        CoreInput(
            q,
            k,
            v,
            ctx.q_width,
            ctx.kv_width,
            ctx.kv_width,
            ctx.q_width,
            keys_of(ctx, kind),
            views=views,
            repeats=_repeats(ctx),
            causal=kind.cross if ctx.model.encoder_layers else ctx.model.causal,
            mask=_given_mask(g, ctx, kind),
            bias=_relative_bias(g, ctx, kind),
        ),
    )


def _given_mask(g: GraphBuilder, ctx: Context, kind: LayerKind) -> str:
    """Declare the mask of padding that Megatron's T5 hands to its local attention; "" if none.

    The data set makes it for every pair of tokens (t5_dataset.py config_attention_mask).
    """
    if not ctx.model.encoder_layers or ctx.framework.transformer_engine:
        return ""
    name = "decoder_mask" if kind.cross else "encoder_mask"
    return g.shared(name, (ctx.b, 1, ctx.s, ctx.s_keys), DType.BOOL)


def _relative_bias(g: GraphBuilder, ctx: Context, kind: LayerKind) -> str:
    """Append the learned bias of relative positions of T5; "" for other models.

    One table serves a stack; its look-up keeps the bucket of every pair, and runs once for all
    layers (relative_pos_embedding.py, t5_model.py).
    """
    if ctx.model.position != "relative":
        return ""
    stack = "decoder" if kind.cross else "encoder"
    pairs = (ctx.s_keys, ctx.s_keys)
    buckets = g.shared(f"relative_buckets_{stack}", pairs, DType.INT64)
    bias = g.shared(f"relative_bias_{stack}", (1, ctx.heads, *pairs), ctx.act)
    table = (Expr.of(ctx.model.relative_buckets), symbol("a"))
    g.op(
        "relative_bias", "embedding", GROUP, [buckets], [], saves=[buckets], modules=MODULE,
        weights=[Weight("relative_bias", table, scope=f"relative_bias_{stack}")],
    )  # fmt: skip
    return bias


def cross_attention(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append attention of ``source`` over the encoder's output; return the context.

    Queries are projected from the decoder, keys and values in one product from the encoder
    (Megatron-Core transformer/attention.py CrossAttention, which has no grouped queries).
    """
    model, encoder = ctx.model, ctx.of_encoder()
    if model.kv_heads != model.heads:
        raise SpecError(
            f"Megatron's cross-attention has no grouped queries (kv_heads {model.kv_heads})",
            f"use kv_heads {model.heads}",
        )
    memory = g.shared("encoder_output", (encoder.s_region, ctx.b, ctx.h), ctx.residual)
    q = g.tensor("q", (ctx.s, ctx.b, ctx.q_width), ctx.act)
    linear(
        g, ctx, "q", GROUP, source, [q], width_in=ctx.h, width_out=ctx.q_width, split="column",
        bias=model.qkv_bias, modules=MODULE,
    )  # fmt: skip
    kv = g.tensor("kv", (encoder.s, ctx.b, ctx.kv_width * 2), ctx.act)
    linear(
        g, ctx, "kv", GROUP, memory, [kv], width_in=ctx.h, width_out=ctx.kv_width * 2,
        split="column", bias=model.qkv_bias, modules=MODULE, tokens=encoder.tokens,
    )  # fmt: skip
    mask = ""
    if not ctx.framework.transformer_engine:
        mask = g.shared("cross_mask", (ctx.b, 1, ctx.s, encoder.s_keys), DType.BOOL)
    return core(
        g,
        ctx,
        CoreInput(
            q, kv, kv, ctx.q_width, ctx.kv_width, ctx.kv_width, ctx.q_width, encoder.s_keys,
            views=frozenset([kv]), other=encoder, mask=mask,
        ),
    )  # fmt: skip


def _repeats(ctx: Context) -> bool:
    """Whether a rank has more query heads than key heads."""
    tp = ctx.layout.tp
    return ctx.model.heads // tp > max(1, ctx.model.kv_heads // tp)


def close_attention(
    g: GraphBuilder, ctx: Context, context: str, width: Expr, stream: str, out: str
) -> str:
    """Append the output projection, its dropout, and the addition to ``stream``.

    ``width`` is the context's width on one rank. An empty ``out`` leaves the addition out and
    returns the branch.
    """
    branch = g.tensor("attention_out", (ctx.s_region, ctx.b, ctx.h), ctx.act)
    linear(
        g,
        ctx,
        "out_proj",
        GROUP,
        context,
        [branch],
        width_in=width,
        width_out=ctx.h,
        split="row",
        bias=ctx.model.out_bias,
        modules=MODULE,
    )
    if not out:
        return branch
    if ctx.hidden_dropout:
        branch = dropout(g, "attention_dropout", GROUP, branch)
    return residual_add(g, "attention_add", GROUP, branch, stream, out)
