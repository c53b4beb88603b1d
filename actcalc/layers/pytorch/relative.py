"""The learned bias of relative positions, and the output of an encoder that decoders read."""

from __future__ import annotations

from actcalc.layers.core.algebra import ONE, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.pytorch.heads import GROUP, MODULE
from actcalc.specs import LayerKind


def encoder_output(g: GraphBuilder, ctx: Context) -> str:
    """Declare the encoder's output, which every decoder layer reads; return its name."""
    encoder = ctx.of_encoder()
    return g.shared("encoder_output", (encoder.b, encoder.s, encoder.h), encoder.residual)


def look_up(g: GraphBuilder, ctx: Context, kind: LayerKind) -> None:
    """Append the look-up of the biases of relative positions (T5Attention.compute_bias).

    One table of biases serves a stack (UMT5: one in every layer). The look-up keeps the bucket of
    every pair of positions.
    """
    model = ctx.model
    # Asked for, so that a framework without relative positions refuses the model.
    ctx.kernel("relative_bias")
    own = model.relative_every_layer
    stack = "decoder" if kind.cross else "encoder"
    shape, made = (ctx.s, ctx.s), []
    if own:
        buckets = g.tensor("relative_buckets", shape, DType.INT64)
        made.append(buckets)
    else:
        buckets = g.shared(f"relative_buckets_{stack}", shape, DType.INT64)
    out = g.tensor("relative_bias", (ONE, symbol("a"), ctx.s, ctx.s), ctx.residual)
    table = (ONE * model.relative_buckets, symbol("a"))
    g.op(
        "relative_bias", "embedding", GROUP, [] if own else [buckets], [out, *made],
        saves=[buckets], modules=MODULE,
        weights=[Weight("relative_bias", table, scope="" if own else f"relative_bias_{stack}")],
    )  # fmt: skip
