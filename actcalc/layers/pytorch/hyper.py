"""Hyper-connections: residual streams, mixed by weights that each token makes (DeepSeek-V4).

Each part of a layer reads one mixture of the streams and is added to all of them, which are mixed
among themselves by a matrix made doubly stochastic in rounds, all of it in fp32 and op by op
(modeling_deepseek_v4.py DeepseekV4HyperConnection, DeepseekV4HyperHead).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm

GROUP = "streams"
_SOURCE = "transformers models/deepseek_v4/modeling_deepseek_v4.py DeepseekV4HyperConnection"

Part = Callable[[str], str]
"""Attention or feed-forward: appended over its input, it returns its branch."""


class _Mixing(NamedTuple):
    """What one part's weights are: of its output in each stream, and of streams in each other."""

    collapsed: str
    post: str
    comb: str


def stream_shape(ctx: Context, rows: Expr) -> tuple[Expr, ...]:
    """Dimensions of what one layer hands to the next."""
    many = (ONE * ctx.model.streams,) if ctx.model.streams > 1 else ()
    return (ctx.b, rows, *many, ctx.h)


def hyper_layer(g: GraphBuilder, ctx: Context, stream: str, attend: Part, feed: Part) -> str:
    """Append a layer's two parts over its streams; return the streams it hands on."""
    if ctx.autocast:
        raise SpecError(
            f"autocast is not described for the residual streams of {ctx.model.name}",
            "use --precision bf16",
        )
    for number, (what, part, out) in enumerate(
        (("attention", attend, "middle"), ("ffn", feed, "output")), start=1
    ):
        mixing = _collapse(g, ctx, f"{what}_streams", stream)
        branch = part(norm(g, ctx, f"norm{number}", mixing.collapsed))
        stream = _expand(g, ctx, what, branch, stream, mixing, out)
    return stream


def _mixtures(
    g: GraphBuilder, ctx: Context, name: str, stream: str, count: int, scales: int
) -> str:
    """Append ``count`` numbers a token, from its normed streams side by side in fp32."""
    many = ctx.model.streams
    wide = ctx.h * many
    rows = (ctx.b, ctx.s)
    made = [g.tensor(f"{name}_rstd", (*rows, ONE), DType.FP32)]
    kept = [*made]
    if g.dtype(stream) is DType.FP32:
        kept.append(stream)
    else:
        made.append(g.tensor(f"{name}_fp32", (*rows, wide), DType.FP32))
        kept.append(made[-1])
    normed = g.tensor(f"{name}_normed", (*rows, wide), DType.FP32)
    g.op(f"{name}_norm", "norm", GROUP, [stream], [normed, *made], saves=kept, source=_SOURCE)
    out = g.tensor(f"{name}_mixtures", (*rows, ONE * count), DType.FP32)
    g.op(
        f"{name}_mixtures", "linear", GROUP, [normed], [out], saves=[normed],
        flops=ctx.tokens * wide * (2 * count), source=_SOURCE,
        weights=[
            Weight(f"{name}.fn", (ONE * count, wide)),
            Weight(f"{name}.base", (ONE * count,)),
            Weight(f"{name}.scale", (ONE * scales,)),
        ],
    )  # fmt: skip
    return out


def _summed(g: GraphBuilder, ctx: Context, name: str, stream: str, pre: str) -> str:
    """Append the weighted sum of streams, a product in fp32 that keeps both factors."""
    out = g.tensor(f"{name}_collapsed", (ctx.b, ctx.s, ctx.h), g.dtype(stream))
    g.op(
        f"{name}_collapse", "multiply", GROUP, [stream, pre], [out], saves=[stream, pre],
        forward_scratch=ctx.tokens * ctx.h * (4 * ctx.model.streams),
        backward_scratch=ctx.tokens * ctx.h * (8 * ctx.model.streams), source=_SOURCE,
    )  # fmt: skip
    return out


def _collapse(g: GraphBuilder, ctx: Context, name: str, stream: str) -> _Mixing:
    """Append one part's weights and its input.

    A division keeps what it divides and its divisor: one at first and two in each further round.
    """
    many = ctx.model.streams
    mixtures = _mixtures(g, ctx, name, stream, (2 + many) * many, 3)
    divisions = ONE * (2 * max(ctx.model.sinkhorn_iterations, 1) - 1)
    m, rows = ONE * many, (ctx.b, ctx.s)

    def made(what: str, *shape: Expr) -> str:
        return g.tensor(f"{name}_{what}", (*rows, *shape), DType.FP32)

    kept = [
        made("pre_sigmoid", m), made("post_sigmoid", m), made("softmax", m, m),
        made("sums", divisions, m), made("divided", divisions, m, m),
    ]  # fmt: skip
    pre, post, comb = made("pre", m), made("post", m), made("comb", m, m)
    g.op(
        f"{name}_weights", "activation", GROUP, [mixtures], [pre, post, comb, *kept],
        saves=[mixtures, *kept], source=_SOURCE,
    )  # fmt: skip
    return _Mixing(_summed(g, ctx, name, stream, pre), post, comb)


def _expand(
    g: GraphBuilder, ctx: Context, what: str, branch: str, stream: str, mixing: _Mixing, out: str
) -> str:
    """Append the branch's addition to every stream, and the mixing of the streams before it."""
    many = ONE * ctx.model.streams
    dtype = g.dtype(stream)
    post, comb = mixing.post, mixing.comb
    if dtype is not DType.FP32:
        post = g.tensor(f"{what}_post_cast", g.shape(post), dtype)
        comb = g.tensor(f"{what}_comb_cast", g.shape(comb), dtype)
        g.op(f"{what}_weights_cast", "copy", GROUP, [mixing.post, mixing.comb], [post, comb])
    shape = g.shape(stream)
    spread = g.tensor(f"{what}_spread", shape, dtype)
    g.op(
        f"{what}_expand", "multiply", GROUP, [branch, post], [spread], saves=[branch, post],
        source=_SOURCE,
    )  # fmt: skip
    mixed = g.tensor(f"{what}_mixed", shape, dtype)
    g.op(
        f"{what}_mix", "core", GROUP, [comb, stream], [mixed], saves=[comb, stream],
        flops=ctx.tokens * ctx.h * many * many * 2, source=_SOURCE,
    )  # fmt: skip
    made = g.tensor(out, shape, dtype)
    g.op(f"{what}_add", "add", GROUP, [spread, mixed], [made])
    return made


def widened(g: GraphBuilder, ctx: Context, embedded: str) -> str:
    """Append the copy of the embedding into every stream; itself where there is one."""
    if ctx.model.streams == 1:
        return embedded
    out = g.tensor("streams", stream_shape(ctx, ctx.s), g.dtype(embedded))
    g.op("widen", "copy", "embedding", [embedded], [out])
    return out


def one_stream(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append the mixture of all streams before the last norm; itself where there is one."""
    if ctx.model.streams == 1:
        return stream
    mixtures = _mixtures(g, ctx, "head_streams", stream, ctx.model.streams, 1)
    shape = g.shape(mixtures)
    sigmoid = g.tensor("head_streams_sigmoid", shape, DType.FP32)
    pre = g.tensor("head_streams_pre", shape, DType.FP32)
    g.op(
        "head_streams_weights", "activation", GROUP, [mixtures], [pre, sigmoid],
        saves=[mixtures, sigmoid], source=_SOURCE,
    )  # fmt: skip
    return _summed(g, ctx, "head_streams", stream, pre)
