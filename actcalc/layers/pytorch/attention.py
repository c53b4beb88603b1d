"""Attention of transformers' modelling code: projections, norms, position, core, output."""

from __future__ import annotations

from dataclasses import replace

from actcalc.layers.core.algebra import ONE, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.pytorch.core import attend
from actcalc.layers.pytorch.heads import GROUP, MODULE, Heads, copied, kept_name
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import product
from actcalc.layers.pytorch.parallel import scattered
from actcalc.layers.pytorch.relative import look_up
from actcalc.layers.pytorch.rotary import rotate, rotate_one
from actcalc.layers.pytorch.scores import Bias, Core
from actcalc.specs import LayerKind

Triple = tuple[Heads, Heads, Heads]


def attention(
    g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, *, memory: str = ""
) -> str:
    """Append attention of ``source``; return the branch, before dropout and residual.

    Keys and values are of ``source`` too, or of an encoder's output, the ``memory``.
    """
    model = ctx.model
    q, k, v = project(
        g, ctx, source, memory, keys_serve=model.keys_as_values and kind.attention == "full"
    )
    gate = _output_gate(g, ctx, source, q)
    norm_last = ctx.kernel("qk_norm") == "after_rotary"
    if not kind.rotary and model.position == "rotary" and ctx.kernel("nope") == "scaled":
        q = _scaled(g, ctx, q)
    elif not norm_last:
        q, k = normed(g, ctx, q, k)
    if model.clip_qkv and not model.packed_qkv:
        q, k, v = (
            replace(x, storage=_clamp(g, x.storage, name))
            for x, name in ((q, "q"), (k, "k"), (v, "v"))
        )
    v = _values_normed(g, ctx, kind, _values_scaled(g, ctx, v))
    if kind.rotary:
        q, k = rotate(g, ctx, kind, q, k)
        if ctx.kernel("rope_scale") == "scaled":
            q = _rescaled(g, ctx, q)
        if norm_last:
            q, k = normed(g, ctx, q, k)
    bias: Bias = "alibi" if model.position == "alibi" else ""
    if model.position == "relative":
        bias = "zeros" if memory else "relative"
    if bias == "relative":
        look_up(g, ctx, kind)
    core = Core(
        q, k, v, kind,
        causal=not memory and (kind.cross if model.encoder_layers else model.causal),
        keys=(ctx.of_encoder() if memory else ctx).s_keys,
        query_width=model.head_dim, value_width=model.v_dim, bias=bias, memory=bool(memory),
    )  # fmt: skip
    if kind.keys == "kept":
        g.share(k.storage)
        g.share(v.storage)
    context = attend(g, ctx, core)
    return close(g, ctx, gated_output(g, ctx, context, gate))


def borrowing_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append attention of ``source``'s queries to keys and values that an earlier layer kept."""
    storage = linear(
        g, ctx, "q", GROUP, source,
        inside=ctx.h, outside=ctx.q_width, bias=ctx.model.qkv_bias, modules=MODULE, out="q_proj",
    )  # fmt: skip
    q = Heads(storage, ctx.heads, ctx.model.heads // ctx.layout.tp, ctx.d)
    q = rotate_one(g, ctx, kind, _normed(g, ctx, q, "q"), "q")
    kv = replace(q, heads=ctx.kv_heads, count=ctx.model.kv_heads // ctx.layout.tp)
    k, v = (replace(kv, storage=kept_name(kind, part)) for part in ("k", "v"))
    g.shared(k.storage, k.shape(ctx), g.dtype(q.storage))
    g.shared(v.storage, v.shape(ctx), g.dtype(storage))
    core = Core(
        q, k, v, kind, causal=ctx.model.causal, keys=ctx.s_keys,
        query_width=ctx.model.head_dim, value_width=ctx.model.v_dim,
    )  # fmt: skip
    return close(g, ctx, attend(g, ctx, core))


def _values_normed(g: GraphBuilder, ctx: Context, kind: LayerKind, v: Heads) -> Heads:
    """Append the norm of each head's values, which has no weight (Gemma3nTextAttention)."""
    if not ctx.model.v_norm:
        return v
    out = kept_name(kind, "v") if kind.keys == "kept" else ""
    shape = (ctx.b, ctx.s, v.heads, v.width)
    storage = norm(
        g, ctx, "v_norm", v.storage, kind="unweighted", shape=shape, modules=MODULE, out=out
    )
    return replace(v, storage=storage, sliced=False)


def _values_scaled(g: GraphBuilder, ctx: Context, v: Heads) -> Heads:
    """Append the scaling of values by a number, which keeps nothing (MiMoV2FlashAttention)."""
    if not ctx.model.values_scaled:
        return v
    out = replace(v, storage="v_scaled", sliced=False)
    g.tensor("v_scaled", out.shape(ctx), g.dtype(v.storage))
    g.op("v_scale", "multiply", GROUP, [v.storage], ["v_scaled"], modules=MODULE)
    return out


def _output_gate(g: GraphBuilder, ctx: Context, source: str, q: Heads) -> str:
    """Append what gates attention's output; "" without a gate.

    Packed with the queries it is a slice, which is copied (Qwen3NextAttention).
    """
    if ctx.model.attention_gate == "none":
        return ""
    if ctx.model.attention_gate == "own":
        return linear(
            g, ctx, "attention_gate", GROUP, source,
            inside=ctx.h, outside=ctx.q_width, modules=MODULE, out="output_gate",
        )  # fmt: skip
    out = g.tensor("output_gate", (ctx.b, ctx.s, ctx.q_width), g.dtype(q.storage))
    g.op("output_gate", "copy", GROUP, [q.storage], [out], modules=MODULE)
    return out


def gated_output(g: GraphBuilder, ctx: Context, context: str, gate: str) -> str:
    """Append ``context * sigmoid(gate)``: both factors are kept."""
    if not gate:
        return context
    scale = g.tensor("gate_sigmoid", g.shape(gate), g.dtype(gate))
    g.op("gate_sigmoid", "activation", GROUP, [gate], [scale], saves=[scale], modules=MODULE)
    return product(
        g, "attention_gated", context, scale, g.shape(context), group=GROUP, modules=MODULE
    )


def _clamp(g: GraphBuilder, source: str, name: str) -> str:
    """Append a clamp, which keeps its input (ClampBackward)."""
    out = g.tensor(f"{name}_clamped", g.shape(source), g.dtype(source))
    g.op(f"{name}_clamp", "activation", GROUP, [source], [out], saves=[source], modules=MODULE)
    return out


def _rescaled(g: GraphBuilder, ctx: Context, q: Heads) -> Heads:
    """Append the scaling of rotated queries by position (Ministral3Attention)."""
    scales = g.tensor("q_scales", (ONE, ONE, ctx.s, ONE), ctx.residual)
    out = replace(q, storage="q_by_position")
    g.tensor("q_by_position", out.shape(ctx), g.dtype(q.storage))
    g.op(
        "q_scale", "multiply", GROUP, [q.storage], ["q_by_position", scales], saves=[scales],
        modules=MODULE,
    )  # fmt: skip
    return out


def _scaled(g: GraphBuilder, ctx: Context, q: Heads) -> Heads:
    """Append the scaling of queries by position in layers without rotary position.

    Those layers have no norm of queries and keys either (Llama4TextAttention); the fp32 scales
    are kept.
    """
    scales = g.tensor("q_scales", (ONE, ctx.s), DType.FP32)
    out = replace(q, storage="q", sliced=False)
    g.tensor("q", out.shape(ctx), g.dtype(q.storage))
    g.op("q_scale", "multiply", GROUP, [q.storage], ["q", scales], saves=[scales], modules=MODULE)
    return out


def close(g: GraphBuilder, ctx: Context, context: str) -> str:
    """Append the output projection of the heads' context."""
    branch = linear(
        g, ctx, "out", GROUP, context,
        inside=ctx.context_width, outside=ctx.h, bias=ctx.model.out_bias, modules=MODULE,
    )  # fmt: skip
    return scattered(g, ctx, "attention", GROUP, branch, MODULE)


def project(
    g: GraphBuilder, ctx: Context, source: str, memory: str = "", *, keys_serve: bool = False
) -> Triple:
    """Append the projections; q, k and v of one packed projection are views of it.

    Keys and values are those of ``memory`` where there is one; values are the keys where
    ``keys_serve`` for them.
    """
    model = ctx.model
    if ctx.kernel("qkv") == "falcon":
        return _falcon(g, ctx, source)
    if ctx.kernel("qkv") == "copied":
        return _copied(g, ctx, source)
    bias = model.qkv_bias
    packed = model.packed_qkv and not memory
    if packed:
        storage = linear(
            g, ctx, "qkv", GROUP, source,
            inside=ctx.h, outside=ctx.q_width + ctx.kv_width + ctx.v_width, bias=bias,
            modules=MODULE,
        )  # fmt: skip
        if model.clip_qkv:
            storage = _clamp(g, storage, "qkv")
        names = [storage] * 3
    else:
        gated = model.attention_gate == "packed"
        widths = (ctx.q_width * 2 if gated else ctx.q_width, ctx.kv_width, ctx.v_width)
        names = [
            linear(
                g, ctx, part, GROUP, source if part == "q" else memory or source,
                inside=ctx.h, outside=width, bias=bias and (part != "k" or model.key_bias),
                modules=MODULE, out=f"{part}_proj",
            )
            for part, width in zip("qk" if keys_serve else "qkv", widths, strict=False)
        ]  # fmt: skip
    tp = ctx.layout.tp
    halved = packed or model.attention_gate == "packed"
    q = Heads(names[0], ctx.heads, model.heads // tp, ctx.d, sliced=halved)
    kv = replace(
        q, heads=ctx.kv_heads, count=model.kv_heads // tp, sliced=packed,
        rows=ctx.of_encoder().s if memory else None,
    )  # fmt: skip
    k, v = replace(kv, storage=names[1]), replace(kv, storage=names[-1], width=ctx.v_head)
    if ctx.kernel("qkv") == "contiguous":
        parts = ((q, "q"), (k, "k"), (v, "v"))
        q, k, v = (copied(g, ctx, x, f"{n}_contiguous", order="head") for x, n in parts)
    return q, k, v


def _copied(g: GraphBuilder, ctx: Context, source: str) -> Triple:
    """Append a packed projection whose parts are interleaved so that each is copied (CodeGen)."""
    storage = linear(
        g, ctx, "qkv", GROUP, source,
        inside=ctx.h, outside=ctx.q_width * 3, bias=ctx.model.qkv_bias, modules=MODULE,
    )  # fmt: skip
    whole = Heads(storage, symbol("a"), ctx.model.heads, ctx.d)
    parts = [replace(whole, storage=f"{part}_split") for part in ("q", "k", "v")]
    names = [g.tensor(part.storage, part.shape(ctx), ctx.act) for part in parts]
    g.op("split_heads", "copy", GROUP, [storage], names, modules=MODULE)
    return parts[0], parts[1], parts[2]


def _falcon(g: GraphBuilder, ctx: Context, source: str) -> Triple:
    """Append Falcon's packed projection and what its split copies.

    Multi-query (7B): queries are a view, the one key and value are gathered by an index of one
    entry. Grouped (40B): all three are copied out, keys and values repeated to every query head.
    With as many keys as queries all three are views.
    """
    model = ctx.model
    storage = linear(
        g, ctx, "qkv", GROUP, source,
        inside=ctx.h, outside=ctx.q_width + ctx.kv_width * 2, bias=model.qkv_bias, modules=MODULE,
    )  # fmt: skip
    q = Heads(storage, symbol("a"), model.heads, ctx.d, sliced=True)
    if model.kv_heads == model.heads:
        return q, q, q
    grouped = model.kv_heads > 1
    kv = q if grouped else replace(q, heads=ctx.kv_heads, count=1)
    indices = [g.tensor(f"{part}_index", (ONE,), DType.INT64) for part in ("k", "v")]
    made = {"k": replace(kv, storage="k_split", sliced=False),
            "v": replace(kv, storage="v_split", sliced=False)}  # fmt: skip
    if grouped:
        made["q"] = replace(q, storage="q_split", sliced=False)
    for heads in made.values():
        g.tensor(heads.storage, heads.shape(ctx), ctx.act)
    outputs = [*(heads.storage for heads in made.values()), *indices]
    g.op("split_heads", "copy", GROUP, [storage], outputs, saves=indices, modules=MODULE)
    return made.get("q", q), made["k"], made["v"]


def normed(g: GraphBuilder, ctx: Context, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """Append the norms of queries and keys, per head or over their whole width."""
    kind = ctx.model.qk_norm
    if kind == "none":
        return q, k
    return _normed(g, ctx, q, "q"), _normed(g, ctx, k, "k")


def _normed(g: GraphBuilder, ctx: Context, x: Heads, name: str) -> Heads:
    kind = ctx.model.qk_norm
    if kind == "full":
        whole = (ctx.b, ctx.s, x.heads * x.width)
        out = norm(g, ctx, f"{name}_norm", x.storage, shape=whole, modules=MODULE)
    else:
        shape = (ctx.b, ctx.s, x.heads, x.width)
        weight = (x.heads, x.width) if kind == "heads" else None
        out = norm(
            g, ctx, f"{name}_norm", x.storage, shape=shape, weight=weight, modules=MODULE,
            kind="unweighted" if kind == "unweighted" else "",
            bias=False if kind == "heads" else None,
        )  # fmt: skip
    return replace(x, storage=out, sliced=False)
