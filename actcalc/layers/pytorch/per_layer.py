"""Embeddings of every token for each layer, which a gate of the stream multiplies (Gemma 3n, 4).

The model makes them once, of a table as wide as all layers together and of a projection of the
first stream; every layer multiplies its own slice, so that the whole is kept.
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import promoted, residual_add
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import activate
from actcalc.specs import PerLayer

GROUP = "per layer"
_WHOLE = "per_layer_inputs"


def _spec(ctx: Context) -> PerLayer:
    if ctx.model.per_layer is None:
        raise SpecError(f"{ctx.model.name} has no per-layer embedding", "describe per_layer")
    return ctx.model.per_layer


def _shape(ctx: Context) -> tuple[Expr, ...]:
    return (ctx.b, ctx.s, symbol("l"), ONE * _spec(ctx).dim)


def per_layer_inputs(g: GraphBuilder, ctx: Context, ids: str, embedded: str) -> None:
    """Append what all layers' embeddings are made of (``project_per_layer_inputs``)."""
    spec = _spec(ctx)
    width = symbol("l") * spec.dim
    looked_up = g.tensor("per_layer_embedded", (ctx.b, ctx.s, width), ctx.residual)
    made = []
    if ctx.model.altup:  # ids beyond the table become 0, in a tensor of their own
        made.append(g.tensor("per_layer_ids", (ctx.b, ctx.s), DType.INT64))
    g.op(
        "per_layer_embedding", "embedding", "embedding", [ids], [looked_up, *made], saves=made,
        weights=[Weight("per_layer_embedding", (ONE * spec.vocab, width), scope="per_layer")],
    )  # fmt: skip
    projected = linear(
        g, ctx, "per_layer_projection", "embedding", embedded, inside=ctx.h, outside=width
    )
    normed = norm(
        g, ctx, "per_layer_norm", projected, shape=_shape(ctx), group="embedding", modules=()
    )
    out = g.shared(_WHOLE, _shape(ctx), promoted(g.dtype(normed), g.dtype(looked_up)))
    g.op("per_layer_add", "add", "embedding", [normed, looked_up], [out])


def gated_by_layer(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the gate of ``source``, its product with the layer's embedding, and their norm."""
    dim = ONE * _spec(ctx).dim
    shape = (ctx.b, ctx.s, dim)
    gate = linear(g, ctx, "per_layer_gate", GROUP, source, inside=ctx.h, outside=dim)
    active = activate(g, ctx, "per_layer_activation", gate, shape, group=GROUP, modules=())
    dtype = promoted(ctx.act, ctx.residual)
    whole = g.shared(_WHOLE, _shape(ctx), dtype)
    gated = g.tensor("per_layer_gated", shape, promoted(g.dtype(active), dtype))
    g.op("per_layer_multiply", "multiply", GROUP, [active, whole], [gated], saves=[active, whole])
    wide = linear(g, ctx, "per_layer_out", GROUP, gated, inside=dim, outside=ctx.h)
    return norm(g, ctx, "per_layer_norm", wide, group=GROUP)


def add_gated(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append the addition to the stream of what its gate leaves of the layer's embedding."""
    return residual_add(g, "per_layer_add", GROUP, gated_by_layer(g, ctx, stream), stream, "output")
