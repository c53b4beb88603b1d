"""Alternating updates: a layer works on one of several residual streams (Gemma 3n).

The layer predicts what all streams become, runs on the first prediction, corrects all of them by
what came of it, and adds the layer's embedding to the others (modeling_gemma3n.py
Gemma3nTextAltUp, Gemma3nTextLaurelBlock, Gemma3nTextDecoderLayer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import residual_add
from actcalc.layers.pytorch.hyper import stream_shape
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.per_layer import gated_by_layer
from actcalc.specs import AltUp

GROUP = "streams"
_SOURCE = "transformers models/gemma3n/modeling_gemma3n.py Gemma3nTextAltUp"

Part = Callable[[str], str]
"""Attention or feed-forward: appended over its input, it returns its branch."""


def _spec(ctx: Context) -> AltUp:
    if ctx.model.altup is None:
        raise SpecError(f"{ctx.model.name} has no alternating updates", "describe altup")
    return ctx.model.altup


def altup_layer(g: GraphBuilder, ctx: Context, stream: str, attend: Part, feed: Part) -> str:
    """Append a layer over its streams; return the streams it hands on."""
    if ctx.autocast:
        raise SpecError(
            f"autocast is not described for the residual streams of {ctx.model.name}",
            "use --precision bf16",
        )
    predicted = _predict(g, ctx, stream)
    active = _first(g, ctx, "active", predicted)
    normed = norm(g, ctx, "norm1", predicted, shape=g.shape(active))
    beside = _laurel(g, ctx, normed)
    branch = norm(g, ctx, "norm1_post", attend(normed))
    middle = residual_add(g, "attention_add", "attention", branch, active, "attention_sum")
    middle = residual_add(g, "laurel_add", GROUP, beside, middle, "middle")
    branch = norm(g, ctx, "norm2_post", feed(norm(g, ctx, "norm2", middle)))
    done = residual_add(g, "ffn_add", "ffn", branch, middle, "ffn_sum")
    corrected = _correct(g, ctx, predicted, done)
    added = gated_by_layer(g, ctx, _scaled(g, ctx, _first(g, ctx, "corrected_first", corrected)))
    return residual_add(g, "per_layer_add", GROUP, added, corrected, "output")


def _many(ctx: Context) -> Expr:
    return ONE * ctx.model.streams


def _first(g: GraphBuilder, ctx: Context, name: str, streams: str) -> str:
    """Append the view, or the copy, of the stream that a layer works on."""
    out = g.tensor(name, (ctx.b, ctx.s, ctx.h), g.dtype(streams))
    g.op(name, "copy", GROUP, [streams], [out])
    return out


def _modalities(g: GraphBuilder, ctx: Context, name: str, source: str) -> str:
    """Append a number of each stream for each token: tanh of a projection of the normed input,
    which keeps its result in fp32. One norm and one projection serve prediction and correction."""
    shape, since = (ctx.b, ctx.s, ctx.h), len(g.ops)
    normed = norm(g, ctx, f"{name}_norm", source, shape=shape, group=GROUP, modules=())
    scaled = g.tensor(f"{name}_scaled", g.shape(normed), g.dtype(normed))
    g.op(f"{name}_scale", "multiply", GROUP, [normed], [scaled])
    routed = linear(g, ctx, f"{name}_router", GROUP, scaled, inside=ctx.h, outside=_many(ctx))
    if name == "correct":
        g.ops[since:] = [replace(op, weights=()) for op in g.ops[since:]]
    tanh = g.tensor(f"{name}_tanh", g.shape(routed), DType.FP32)
    g.op(f"{name}_tanh", "activation", GROUP, [routed], [tanh], saves=[tanh], source=_SOURCE)
    if ctx.act is DType.FP32:
        return tanh
    out = g.tensor(f"{name}_modalities", g.shape(routed), ctx.act)
    g.op(f"{name}_cast", "copy", GROUP, [tanh], [out])
    return out


def _predict(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append the prediction of all streams: a product of them with each token's coefficients."""
    many, rows = _many(ctx), (ctx.b, ctx.s)
    found = _modalities(g, ctx, "predict", stream)
    coefficients = linear(g, ctx, "prediction", GROUP, found, inside=many, outside=many * many)
    product = g.tensor("predictions_apart", (*rows, ctx.h, many), g.dtype(stream))
    g.op(
        "predict_mix", "core", GROUP, [stream, coefficients], [product],
        saves=[stream, coefficients], flops=ctx.tokens * ctx.h * many * many * 2, source=_SOURCE,
    )  # fmt: skip
    out = g.tensor("predictions", stream_shape(ctx, ctx.s), g.dtype(stream))
    g.op("predict_add", "add", GROUP, [product, stream], [out])
    return out


def _laurel(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the low-rank product of attention's input, its norm and their sum."""
    rank = ONE * _spec(ctx).laurel
    narrow = linear(g, ctx, "laurel_left", GROUP, source, inside=ctx.h, outside=rank)
    wide = linear(g, ctx, "laurel_right", GROUP, narrow, inside=rank, outside=ctx.h)
    normed = norm(g, ctx, "laurel_norm", wide, group=GROUP)
    return residual_add(g, "laurel_sum", GROUP, normed, source, "laurel")


def _correct(g: GraphBuilder, ctx: Context, predicted: str, done: str) -> str:
    """Append the correction of all streams by what the layer made of its own.

    The difference is repeated for every stream, which the product with the coefficients keeps.
    """
    many = _many(ctx)
    found = _modalities(g, ctx, "correct", done)
    kept = [found]
    made: list[str] = []
    if _spec(ctx).clipped:
        made.append(g.tensor("correction_clamped", (many, many), ctx.residual))
    coefficients = g.tensor("correction", (ctx.b, ctx.s, many), ctx.act)
    unused = [] if _spec(ctx).scaled else [_scale(ctx)]
    g.op(
        "correction", "linear", GROUP, [found], [coefficients, *made], saves=[*kept, *made],
        flops=ctx.tokens * many * many * 2, source=_SOURCE,
        weights=[Weight("correction.weight", (many, many)), *unused],
    )  # fmt: skip
    difference = g.tensor("innovation", stream_shape(ctx, ctx.s), g.dtype(predicted))
    g.op("innovation", "copy", GROUP, [done, predicted], [difference])
    out = g.tensor("corrected", stream_shape(ctx, ctx.s), g.dtype(predicted))
    g.op(
        "correct", "multiply", GROUP, [difference, coefficients, predicted], [out],
        saves=[difference, coefficients], source=_SOURCE,
    )  # fmt: skip
    return out


def _scale(ctx: Context) -> Weight:
    """The vector of the corrected stream, which exists whether it is used or not."""
    return Weight("corrected_scale", (ctx.h,))


def _scaled(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the corrected stream's product with a learned vector, which keeps the stream."""
    if not _spec(ctx).scaled:
        return source
    out = g.tensor("corrected_scaled", g.shape(source), g.dtype(source))
    g.op(
        "corrected_scale", "multiply", GROUP, [source], [out], saves=[source],
        weights=[_scale(ctx)],
    )  # fmt: skip
    return out


def _as_large(g: GraphBuilder, ctx: Context, name: str, source: str, target: str) -> str:
    """Append the scaling of a projected stream to the size of another, all of it kept."""
    rows = (ctx.b, ctx.s, ONE)
    dtype = g.dtype(source)
    kept = [g.tensor(f"{name}_{what}", rows, dtype) for what in ("square", "size")]
    grown = g.tensor(f"{name}_grown", g.shape(source), dtype)
    out = g.tensor(f"{name}_as_large", g.shape(source), dtype)
    g.op(
        f"{name}_as_large", "norm", GROUP, [source, target], [out, grown, *kept],
        saves=[source, target, grown, *kept],
    )  # fmt: skip
    return out


def _size(g: GraphBuilder, ctx: Context, name: str, source: str, stream: str) -> str:
    """Append the root of a stream's mean square, which keeps the stream and the mean."""
    rows = (ctx.b, ctx.s, ONE)
    square, size = (g.tensor(f"{name}_{w}", rows, g.dtype(source)) for w in ("square", "size"))
    g.op(f"{name}_size", "norm", GROUP, [source], [size, square], saves=[stream, square])
    return size


def spread(g: GraphBuilder, ctx: Context, embedded: str) -> str:
    """Append the streams that the embedding is projected to, each as large as itself."""
    target = _size(g, ctx, "first", embedded, embedded)
    parts = [embedded]
    for number in range(1, ctx.model.streams):
        name = f"stream{number}"
        projected = linear(g, ctx, name, GROUP, embedded, inside=ctx.h, outside=ctx.h)
        parts.append(_as_large(g, ctx, name, projected, target))
    out = g.tensor("streams", stream_shape(ctx, ctx.s), g.dtype(embedded))
    g.op("stack", "copy", GROUP, parts, [out])
    return out


def gathered_streams(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append the mean of the streams, projected back and scaled to the size of the first."""
    first = _first(g, ctx, "first", stream)
    target = _size(g, ctx, "first", first, stream)
    parts = [first]
    for number in range(1, ctx.model.streams):
        name = f"stream{number}"
        projected = linear(
            g, ctx, name, GROUP, stream, rows=(ctx.b, ctx.s), inside=ctx.h, outside=ctx.h
        )
        parts.append(_as_large(g, ctx, name, projected, target))
    out = g.tensor("gathered", (ctx.b, ctx.s, ctx.h), g.dtype(stream))
    g.op("gather", "add", GROUP, parts, [out])
    return out
