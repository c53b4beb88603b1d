"""Attention of images that lie packed in one sequence: each image, or window of it, by itself.

Qwen-VL's towers split queries, keys and values into pieces, call the attention for each and join
the results (modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py). Pieces are views:
what their products keep is the whole. Images are taken as squares.
"""

from __future__ import annotations

from math import isqrt

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.pytorch.heads import CORE, GROUP, in_act
from actcalc.layers.pytorch.scores import Core
from actcalc.specs import LayerKind

_LSE_MULTIPLE = 32


def pieces(ctx: Context, kind: LayerKind) -> list[int]:
    """Patches of each piece of one image that attends to itself."""
    side = isqrt(ctx.workload.seq)
    if kind.attention == "full":
        return [ctx.workload.seq]
    window = isqrt(kind.window)
    sides = [min(window, side - start) for start in range(0, side, window)]
    return [height * width for height in sides for width in sides]


def packed(g: GraphBuilder, ctx: Context, x: Core) -> str:
    """Append the core the run asks for, piece by piece; return the joined context."""
    parts = pieces(ctx, x.kind)
    pairs = ctx.b * sum(part * part for part in parts)
    flops = pairs * x.q.heads * (x.q.width + x.v.width) * 2
    eager = ctx.workload.attention == "eager"
    out = _eager(g, ctx, x, parts, flops) if eager else _fused(g, ctx, x, parts, flops)
    joined = g.tensor("context", (ctx.b, ctx.s, x.q.heads * x.v.width), g.dtype(out))
    g.op("join_pieces", "copy", GROUP, [out], [joined], modules=CORE)
    return joined


def _fused(g: GraphBuilder, ctx: Context, x: Core, parts: list[int], flops: Expr) -> str:
    """scaled_dot_product_attention of each piece: flash for half precision, else efficient."""
    if x.query_width % 8:
        raise SpecError(
            f"heads of {x.query_width} in a packed vision tower are not described "
            f"({ctx.model.name})",
            "use heads of a multiple of 8",
        )
    half = ctx.act is not DType.FP32
    rows = sum(part if half else part + -part % _LSE_MULTIPLE for part in parts)
    q, k, v = (in_act(g, ctx, t, n) for t, n in ((x.q, "q"), (x.k, "k"), (x.v, "v")))
    made = [
        g.tensor("logsumexp", (ctx.b, x.q.heads, ONE * rows), DType.FP32),
        g.tensor("rng_state", (ctx.b, ONE * (len(parts) * (24 if half else 16))), DType.UINT8),
    ]
    inputs = list(dict.fromkeys([q.storage, k.storage, v.storage]))
    out = g.tensor("core_out", (ctx.b, ctx.s, x.q.heads * x.v.width), ctx.act)
    kernel = "flash" if half else "efficient"
    g.op(
        f"sdpa_{kernel}", "core", GROUP, inputs, [out, *made], saves=[*inputs, out, *made],
        flops=flops, backward_flops=flops * 5 / 2, modules=CORE, kernel=kernel,
    )  # fmt: skip
    return out


def _eager(g: GraphBuilder, ctx: Context, x: Core, parts: list[int], flops: Expr) -> str:
    """Scores, softmax in fp32 and values of each piece; no mask, and no dropout."""
    shape = (ctx.b, x.q.heads, ONE * sum(part * part for part in parts))
    q, k, v = (in_act(g, ctx, t, n) for t, n in ((x.q, "q"), (x.k, "k"), (x.v, "v")))
    scores = g.tensor("scores", shape, ctx.act)
    pair = list(dict.fromkeys([q.storage, k.storage]))
    g.op("qk", "core", GROUP, pair, [scores], saves=pair, flops=flops / 2, modules=CORE)
    probs = g.tensor("probs", shape, DType.FP32)
    g.op("softmax", "softmax", GROUP, [scores], [probs], saves=[probs], modules=CORE)
    if ctx.act is not DType.FP32:
        cast = g.tensor("probs_cast", shape, ctx.act)
        g.op("softmax_cast", "copy", GROUP, [probs], [cast], modules=CORE)
        probs = cast
    out = g.tensor("weighted_values", (ctx.b, x.q.heads, ctx.s, x.v.width), ctx.act)
    pair = [probs, v.storage]
    g.op("pv", "core", GROUP, pair, [out], saves=pair, flops=flops / 2, modules=CORE)
    return out
