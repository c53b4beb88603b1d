"""Attention cores: transformers' eager code, PyTorch's scaled_dot_product_attention, flash-attn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.core.ops import dropout, softcap
from actcalc.layers.pytorch.heads import (
    CORE,
    GROUP,
    Heads,
    copied,
    in_act,
    in_type,
    merged,
    repeated,
)
from actcalc.layers.pytorch.packed import packed
from actcalc.layers.pytorch.ring import ring
from actcalc.layers.pytorch.scores import (
    Core,
    additive_mask,
    has_padding,
    key_count,
    mask_name,
    maximum_softmax,
    scores_shape,
    short_window,
    sinks,
    softmax,
)

Kernel = Literal["flash", "efficient", "math"]

_FLASH_MULTIPLE = 8
_BIAS_MULTIPLE = 16
_LSE_MULTIPLE = 32
_FLASH_WIDEST = 256


def _qk_flops(ctx: Context, x: Core) -> Expr:
    return ctx.tokens * x.keys * x.q.heads * x.q.width * 2


def _pv_flops(ctx: Context, x: Core) -> Expr:
    return ctx.tokens * x.keys * x.q.heads * x.v.width * 2


def needs_mask(ctx: Context, x: Core) -> bool:
    """Whether scaled_dot_product_attention gets a mask (masking_utils.py, ``sdpa_mask``)."""
    tower = ctx.model.tower
    images = tower is not None and tower.sees_itself and ctx.workload.image_tokens > 0
    always = ctx.kernel("sdpa_mask") == "always" or ctx.model.indexer is not None or images
    return always or has_padding(ctx, x) or short_window(ctx, x) or bool(x.bias)


def choose(ctx: Context, x: Core, *, masked: bool, grouped: bool, native: bool) -> Kernel:
    """The kernel scaled_dot_product_attention runs on a GPU from sm_80 on.

    ``grouped`` says that keys have fewer heads than queries, ``native`` that PyTorch is told so
    (``enable_gqa``). Source:
    ``can_use_flash_attention`` and ``can_use_mem_efficient_attention`` in ATen's
    ``transformers/cuda/sdp_utils.cpp``, tried in that order, then the math implementation.
    """
    half = ctx.act is not DType.FP32
    width, value = x.query_width, x.value_width
    if half and not masked and width == value <= _FLASH_WIDEST and (native or not grouped):
        return "flash"
    # CUTLASS moves 128 bits at a time: 8 half or 4 single precision elements.
    alignment = 8 if half else 4
    aligned = width % alignment == 0 and value % alignment == 0
    return "efficient" if aligned and not grouped else "math"


def attend(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Append the core the run asks for; return the context, (b, s, heads · width) in memory."""
    asked = ctx.workload.attention
    if ctx.kernel(f"core_{asked}") == "none":
        raise SpecError(
            f"framework {ctx.framework} has no {asked} attention for {ctx.model.family} "
            f"models ({ctx.model.name})",
            "use --attention " + ("eager" if asked == "sdpa" else "sdpa"),
        )
    if ctx.kernel(f"core_{asked}") == "packed":
        return packed(g, ctx, x)
    if asked == "eager":
        return eager(g, ctx, x)
    if asked == "flash":
        return _flash_package(g, ctx, x)
    return _sdpa(g, ctx, x)


def _context(g: GraphBuilder, ctx: Context, x: Core, source: str) -> str:
    """Append the copy that puts a result in head order back into token order."""
    out = g.tensor("context", (ctx.b, ctx.s, x.q.heads * x.v.width), g.dtype(source))
    g.op("merge_heads", "copy", GROUP, [source], [out], modules=CORE)
    return out


def eager(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Append ``eager_attention_forward``: scores, mask, softmax, dropout, weighted values.

    The softmax runs in fp32 and is cast back (kernel ``softmax: fp32``), or in the type of the
    scores (``input``; autocast runs it in fp32 all the same). It keeps its result, the product
    its operand.
    """
    wide = ctx.kernel("scores") == "fp32" and not ctx.autocast
    operand = DType.FP32 if wide else ctx.act
    k, v = x.k, x.v
    if ctx.kernel("sdpa_grouped") == "broadcast":
        # The product itself broadcasts one head, after autocast's copy of it.
        k = in_type(g, ctx, k, "k", operand)
    k, v = repeated(g, ctx, k, x.q, "k"), repeated(g, ctx, v, x.q, "v")
    v = merged(g, ctx, in_act(g, ctx, v, "v"), "v")
    q = merged(g, ctx, in_type(g, ctx, x.q, "q", operand), "q")
    k = merged(g, ctx, in_type(g, ctx, k, "k", operand), "k")
    shape = scores_shape(ctx, x)
    scores = g.tensor("scores", shape, operand)
    pair = list(dict.fromkeys([q.storage, k.storage]))
    g.op("qk", "core", GROUP, pair, [scores], saves=pair, flops=_qk_flops(ctx, x), modules=CORE)
    if ctx.model.attention_softcap:
        scores = softcap(g, "softcap", GROUP, scores, "scores_capped", CORE)
    if sinks(ctx, x):
        if ctx.kernel("attention_sinks") not in ("joint", "joint_fp32"):
            raise SpecError(
                f"the attention sinks of {ctx.model.family} models are not modelled as "
                f"{ctx.framework} computes them",
                "use --framework paper for an estimate",
            )
        probs = maximum_softmax(g, ctx, x, scores)
    elif ctx.kernel("softmax") == "less_maximum":
        probs = maximum_softmax(g, ctx, x, scores)
    else:
        probs = softmax(g, ctx, scores, shape, additive_mask(g, ctx, x))
    if ctx.attention_dropout:
        probs = dropout(g, "softmax_dropout", GROUP, probs, modules=CORE)
    return weighted(g, ctx, x, probs, v)


def weighted(g: GraphBuilder, ctx: Context, x: Core, probs: str, v: Heads) -> str:
    """Append the product of probabilities and values, and the copy into token order."""
    if g.dtype(probs) is not ctx.act:
        # Without a sink, which a view has dropped.
        cast = g.tensor("probs_operand", scores_shape(ctx, x), ctx.act)
        g.op("probs_operand", "copy", GROUP, [probs], [cast], modules=CORE)
        probs = cast
    out = g.tensor("weighted_values", (ctx.b, x.q.heads, ctx.s, x.v.width), ctx.act)
    pair = [probs, v.storage]
    g.op("pv", "core", GROUP, pair, [out], saves=pair, flops=_pv_flops(ctx, x), modules=CORE)
    return _context(g, ctx, x, out)


def _sdpa(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Append ``sdpa_attention_forward`` (integrations/sdpa_attention.py).

    Keys and values keep their number of heads only without a mask and with one width of at most
    256; else they are repeated first.
    """
    if ctx.model.attention_softcap or sinks(ctx, x):
        what = "soft cap of scores" if ctx.model.attention_softcap else "attention sinks"
        raise SpecError(
            f"scaled_dot_product_attention has no {what} ({ctx.model.name})",
            "use --attention eager",
        )
    masked = needs_mask(ctx, x)
    if masked and ctx.kernel("sdpa_mask") == "none":
        raise SpecError(
            f"framework {ctx.framework} passes no mask to scaled_dot_product_attention, "
            f"which {ctx.model.name} needs here (padding, or a window shorter than the sequence)",
            "use --framework transformers",
        )
    way = ctx.kernel("sdpa_grouped")
    native = way == "native"
    q, k, v = x.q, x.k, x.v
    if way in ("repeated", "repeated_whole"):
        whole = way == "repeated_whole"
        k, v = (repeated(g, ctx, t, q, n, whole=whole) for t, n in ((k, "k"), (v, "v")))
    grouped = k.count != q.count
    if grouped and native and (masked or not x.query_width == x.value_width <= _FLASH_WIDEST):
        k, v = repeated(g, ctx, k, q, "k"), repeated(g, ctx, v, q, "v")
        grouped = False
    q, k, v = (in_act(g, ctx, t, n) for t, n in ((q, "q"), (k, "k"), (v, "v")))
    x = replace(x, q=q, k=k, v=v)
    kernel = choose(ctx, x, masked=masked, grouped=grouped, native=native)
    if kernel == "flash":
        return _flash(g, ctx, x, "sdpa_flash", rng_bytes=24)
    if ctx.layout.cp > 1:
        raise SpecError(
            f"context parallelism (cp {ctx.layout.cp}) is modelled with sdpa's flash kernel, and "
            f"{ctx.model.name} runs its {kernel} one here",
            "drop --cp, or use --precision bf16",
        )
    if kernel == "efficient":
        return _efficient(g, ctx, x, masked=masked)
    return _math(g, ctx, x, masked=masked, interleaved=native)


def _flash(g: GraphBuilder, ctx: Context, x: Core, name: str, *, rng_bytes: int) -> str:
    """Append a flash kernel: q, k, v, output, logsumexp and random state are kept.

    Widths are padded to a multiple of 8, which copies. The output lies in memory as the query
    does (``empty_like``). Backward makes five products where forward has two.
    """
    padding = -x.query_width % _FLASH_MULTIPLE
    if padding:
        width = x.q.width + padding
        q, k, v = (
            copied(g, ctx, replace(heads, width=width), f"{part}_padded", order="head")
            for part, heads in (("q", x.q), ("k", x.k), ("v", x.v))
        )
        x = replace(x, q=q, k=k, v=v)
    lse = g.tensor("logsumexp", (ctx.b, x.q.heads, ctx.s), DType.FP32)
    made = [lse]
    if rng_bytes:
        made.append(g.tensor("rng_state", (ONE * rng_bytes,), DType.UINT8))
    flops = _qk_flops(ctx, x) + _pv_flops(ctx, x)
    inputs = list(dict.fromkeys([x.q.storage, x.k.storage, x.v.storage]))
    around = ctx.layout.cp > 1
    in_place = (x.q.order == "token" or ctx.length == 1) and not padding and not around
    shape = (ctx.b, ctx.s, x.q.heads * x.v.width)
    if in_place:
        out = g.tensor("context", shape, ctx.act)
    else:
        out = g.tensor("core_out", (ctx.b, x.q.heads, ctx.s, x.v.width), ctx.act)
    beside = _ring(ctx, x) if around else {}
    g.op(
        name, "core", GROUP, inputs, [out, *made], saves=[*inputs, out, *made],
        flops=flops, backward_flops=flops * 5 / 2, modules=CORE,
        kernel="ring flash" if around else "flash", **beside,
    )  # fmt: skip
    if in_place:
        return out
    narrow = replace(x.v, width=x.v.width - padding) if padding else x.v
    return _context(g, ctx, replace(x, v=narrow), out)


def _ring(ctx: Context, x: Core) -> dict[str, Any]:
    rows = ctx.tokens * x.q.heads
    queries, keys = rows * x.q.width, ctx.tokens * x.k.heads * x.k.width
    return ring(ctx, queries, keys, rows, ratio=x.k.count / x.q.count)._asdict()


def _efficient(g: GraphBuilder, ctx: Context, x: Core, *, masked: bool) -> str:
    """Append the memory-efficient kernel: as flash, plus an additive bias for a mask.

    A boolean mask becomes a bias of the activations' type in every layer, whose rows are padded
    to a multiple of 16; the logsumexp has rows up to a multiple of 32. The output is in token
    order; the random state is two int64.
    """
    rows = ctx.s + (-ctx.length % _LSE_MULTIPLE)
    lse = g.tensor("logsumexp", (ctx.b, x.q.heads, rows), DType.FP32)
    made = [lse, g.tensor("rng_state", (ONE * 16,), DType.UINT8)]
    inputs = list(dict.fromkeys([x.q.storage, x.k.storage, x.v.storage]))
    kept = list(inputs)
    if masked:
        made += _bias(g, ctx, x, inputs, kept)
    flops = _qk_flops(ctx, x) + _pv_flops(ctx, x)
    out = g.tensor("context", (ctx.b, ctx.s, x.q.heads * x.v.width), ctx.act)
    g.op(
        "sdpa_efficient", "core", GROUP, inputs, [out, *made], saves=[*kept, out, *made],
        flops=flops, backward_flops=flops * 5 / 2, modules=CORE, kernel="efficient",
    )  # fmt: skip
    return out


def boolean_mask(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Declare the boolean mask that the model makes once for all layers of a kind."""
    batch = ctx.b if has_padding(ctx, x) else ONE
    return g.shared(mask_name(ctx, x), (batch, 1, ctx.s, x.keys), DType.BOOL)


def _bias(g: GraphBuilder, ctx: Context, x: Core, inputs: list[str], kept: list[str]) -> list[str]:
    """Add the kernel's additive bias to what it reads and keeps; return what it makes for that.

    The bias of positions is one float tensor for all layers, padding and all; a boolean mask is
    turned into a float one in each. Rows are padded, by a copy, to a multiple of 16.
    """
    missing = -key_count(ctx, x) % _BIAS_MULTIPLE
    if x.bias in ("relative", "zeros"):
        return _position_bias(g, ctx, x, inputs, kept, missing)
    if x.bias and not missing and not ctx.autocast:
        shape = (ctx.b, x.q.heads, ctx.s, x.keys)
        inputs.append(g.shared(x.bias, shape, ctx.act))
        kept.append(x.bias)
        return []
    inputs.append("picked_keys" if ctx.model.indexer else boolean_mask(g, ctx, x))
    heads = x.q.heads if x.bias else ONE
    return [g.tensor("attention_bias", (ctx.b, heads, ctx.s, x.keys + missing), ctx.act)]


def _position_bias(
    g: GraphBuilder, ctx: Context, x: Core, inputs: list[str], kept: list[str], missing: int
) -> list[str]:
    """Add the bias of relative positions (integrations/sdpa_attention.py).

    ``create_position_bias_mask`` writes it into a tensor of its own in every layer: a causal or a
    padding mask selects from it and is kept for the gradient. Zeros need no gradient and no copy,
    so that all layers share them (but UMT5's, which make their own).
    """
    padded = has_padding(ctx, x)
    shape = (ctx.b if padded else ONE, x.q.heads, ctx.s, x.keys + missing)
    once = not (padded or missing or ctx.model.relative_every_layer)
    if x.bias == "zeros" and once:
        kept.append(g.shared("cross_bias", shape, ctx.act))
        inputs.append("cross_bias")
        return []
    made = [g.tensor("position_bias", shape, ctx.act)]
    if padded:
        inputs.append(boolean_mask(g, ctx, x))
        if x.bias == "relative":
            kept.append(inputs[-1])
    if x.causal and ctx.length > 1:
        made.append(g.tensor("causal_condition", (ctx.s, x.keys), DType.BOOL))
    return made


def _math(g: GraphBuilder, ctx: Context, x: Core, *, masked: bool, interleaved: bool) -> str:
    """Append the math implementation: in fp32, with q and k scaled first.

    Both products keep fp32 operands, the softmax its result, which dropout then copies. Grouped
    keys and values are ``interleaved`` where it is told of them, a copy for a single head too
    (``_scaled_dot_product_attention_math`` in ATen's ``transformers/attention.cpp``).
    """
    q = copied(g, ctx, x.q, "q_scaled", dtype=DType.FP32)
    k = copied(g, ctx, x.k, "k_scaled", dtype=DType.FP32)
    v = x.v if ctx.act is DType.FP32 else copied(g, ctx, x.v, "v_fp32", dtype=DType.FP32)
    q = merged(g, ctx, q, "q")
    whole = interleaved and x.k.count != q.count
    k, v = (
        merged(g, ctx, repeated(g, ctx, t, q, n, single=whole), n) for t, n in ((k, "k"), (v, "v"))
    )
    shape = scores_shape(ctx, x)
    scores = g.tensor("scores", shape, DType.FP32)
    pair = [q.storage, k.storage]
    g.op("qk", "core", GROUP, pair, [scores], saves=pair, flops=_qk_flops(ctx, x), modules=CORE)
    probs = g.tensor("probs", shape, DType.FP32)
    inputs = [scores, *([boolean_mask(g, ctx, x)] if masked else [])]
    g.op("softmax", "softmax", GROUP, inputs, [probs], saves=[probs], modules=CORE)
    if ctx.attention_dropout:
        probs = dropout(g, "softmax_dropout", GROUP, probs, modules=CORE)
    out = g.tensor("weighted_values", (ctx.b, x.q.heads, ctx.s, x.v.width), DType.FP32)
    pair = [probs, v.storage]
    g.op("pv", "core", GROUP, pair, [out], saves=pair, flops=_pv_flops(ctx, x), modules=CORE)
    cast = g.tensor("context", (ctx.b, ctx.s, x.q.heads * x.v.width), ctx.act)
    g.op("merge_heads", "copy", GROUP, [out], [cast], modules=CORE)
    return cast


def _flash_package(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Append the flash-attn package's kernel (integrations/flash_attention.py).

    It reads q, k, v in token order as they are, knows windows, soft caps and grouped keys, and
    keeps them with its output, logsumexp and 16 B of random state (``FlashAttnFunc``). Narrower
    values are padded to the width of keys first. Padding is removed before and put back after:
    q, k, v and the output are then copies, with the indices of the real tokens; all tokens are
    counted as real.
    """
    if ctx.act is DType.FP32:
        raise SpecError(
            "flash-attn has no fp32 kernel (precision fp32)",
            "use --precision bf16, or --attention sdpa",
        )
    if x.query_width > _FLASH_WIDEST:
        raise SpecError(
            f"flash-attn takes heads up to {_FLASH_WIDEST} wide, not {x.query_width}",
            "use --attention sdpa",
        )
    if x.bias or sinks(ctx, x):
        what = "additive position biases" if x.bias else "attention sinks"
        raise SpecError(f"flash-attn 2 has no {what} ({ctx.model.name})", "use --attention eager")
    q, k, v = (in_act(g, ctx, t, n) for t, n in ((x.q, "q"), (x.k, "k"), (x.v, "v")))
    if x.value_width != x.query_width:
        v = copied(g, ctx, replace(v, width=q.width), "v_padded", order="token")
    x = replace(x, q=q, k=k)
    if not has_padding(ctx, x):
        if v is x.v or v.width == x.v.width:
            return _flash(g, ctx, replace(x, v=v), "flash_attention", rng_bytes=16)
        padded = replace(x, v=v, q=replace(q, order="head"))
        return _cropped(g, ctx, x, padded)
    indices = g.tensor("real_tokens", (ctx.tokens,), DType.INT64)
    g.op("unpad", "copy", GROUP, [q.storage], [indices], saves=[indices], modules=CORE)
    g.note("padding: every token is counted as real; padded ones cost less with flash-attn")
    unpadded = (
        copied(g, ctx, t, f"{n}_unpadded", order="token") for t, n in ((q, "q"), (k, "k"), (v, "v"))
    )
    q, k, v = unpadded
    inner = replace(x, q=replace(q, order="head"), k=k, v=v)
    return _cropped(g, ctx, x, inner)


def _cropped(g: GraphBuilder, ctx: Context, x: Core, inner: Core) -> str:
    """Append flash attention of ``inner`` and the copy of its output to the shape of ``x``."""
    lse = g.tensor("logsumexp", (ctx.b, x.q.heads, ctx.s), DType.FP32)
    rng = g.tensor("rng_state", (ONE * 16,), DType.UINT8)
    out = g.tensor("core_out", (ctx.b, ctx.s, x.q.heads * inner.v.width), ctx.act)
    inputs = list(dict.fromkeys([inner.q.storage, inner.k.storage, inner.v.storage]))
    flops = _qk_flops(ctx, inner) + _pv_flops(ctx, inner)
    g.op(
        "flash_attention", "core", GROUP, inputs, [out, lse, rng], saves=[*inputs, out, lse, rng],
        flops=flops, backward_flops=flops * 5 / 2, modules=CORE, kernel="flash",
    )  # fmt: skip
    return _context(g, ctx, x, out)
