"""Attention scores: which keys a query sees, and what masks and softmax keep of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actcalc.layers.core.algebra import ONE, Expr, product
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.pytorch.heads import CORE, GROUP, Heads
from actcalc.specs import LayerKind

Bias = Literal["", "alibi", "relative", "zeros"]


@dataclass(frozen=True, slots=True)
class Core:
    """What an attention core reads, and which keys a query sees.

    ``bias`` says which float bias scaled_dot_product_attention gets beside a mask: ALiBi's, the
    same for all layers; a learned one of relative positions; or the zeros that cross-attention
    adds in its place. ``memory`` says that the keys are an encoder's.
    """

    q: Heads
    k: Heads
    v: Heads
    kind: LayerKind
    causal: bool
    keys: Expr
    query_width: int
    value_width: int
    bias: Bias = ""
    memory: bool = False


def scores_shape(ctx: Context, x: Core) -> tuple[Expr, ...]:
    """A score for each head, query and key."""
    return (ctx.b, x.q.heads, ctx.s, x.keys)


def short_window(ctx: Context, x: Core) -> bool:
    """Whether the layer's window hides keys: transformers tests ``kv_length >= window``."""
    return 0 < x.kind.window <= ctx.length


def key_count(ctx: Context, x: Core) -> int:
    """Tokens that keys span, as a number."""
    return ctx.of_encoder().length if x.memory else ctx.length


def has_padding(ctx: Context, x: Core) -> bool:
    """Whether a mask of padded positions is passed.

    Images and sounds have none; of an encoder and a decoder it is the encoder's.
    """
    own = ctx.decoder and not x.memory
    return ctx.workload.padding_mask and not ctx.model.sensed and not own


def mask_name(ctx: Context, x: Core) -> str:
    """Name of the mask that all layers of a kind share."""
    if x.memory or ctx.decoder:
        return "encoder_mask" if x.memory else "decoder_mask"
    return "attention_mask" if x.kind.attention == "full" else f"{x.kind.attention}_mask"


def additive_mask(g: GraphBuilder, ctx: Context, x: Core) -> list[str]:
    """Declare the float mask that eager attention adds, shared by all layers of a kind.

    A bidirectional mask without padding is skipped (masking_utils.py, ``eager_mask``).
    """
    if not (x.causal or has_padding(ctx, x) or short_window(ctx, x)):
        return []
    dtype = DType.BOOL if ctx.kernel("mask") == "fill" else ctx.residual
    return [g.shared(mask_name(ctx, x), (ctx.b, 1, ctx.s, x.keys), dtype)]


def softmax(
    g: GraphBuilder,
    ctx: Context,
    scores: str,
    shape: tuple[Expr, ...],
    masks: list[str],
) -> str:
    """Append mask and softmax of the scores; return the probabilities.

    Adding a mask keeps nothing; filling with one keeps it (kernel ``mask: fill``).
    """
    inputs = [scores, *masks]
    filled = masks if ctx.kernel("mask") == "fill" else []
    if ctx.kernel("softmax") == "floored":
        scores = _floored(g, ctx, scores, shape, masks)
        inputs = [scores]
    wide = ctx.kernel("softmax") == "fp32"
    kept = DType.FP32 if wide or ctx.autocast else ctx.act
    probs = g.tensor("probs", shape, kept)
    # A kernel of its own reads fp16 and writes fp32; bf16 is copied, and so is the gradient back
    # (ATen SoftMax.cpp softmax, derivatives.yaml _softmax).
    copies = product(shape) if kept is DType.FP32 and g.dtype(scores) is DType.BF16 else ONE * 0
    g.op(
        "softmax", "softmax", GROUP, inputs, [probs], saves=[*filled, probs], modules=CORE,
        forward_scratch=copies * 4, backward_scratch=copies * 2,
    )  # fmt: skip
    if wide and ctx.act is not DType.FP32:
        cast = g.tensor("probs_cast", shape, ctx.act)
        g.op("softmax_cast", "copy", GROUP, [probs], [cast], modules=CORE)
        return cast
    return probs


def _floored(
    g: GraphBuilder, ctx: Context, scores: str, shape: tuple[Expr, ...], masks: list[str]
) -> str:
    """Append the maximum of masked scores and the smallest number, which keeps both (XGLM)."""
    masked = g.tensor("scores_masked", shape, ctx.residual)
    floor = g.tensor("scores_floor", (), DType.FP32)
    out = g.tensor("scores_floored", shape, ctx.residual)
    g.op(
        "floor", "activation", GROUP, [scores, *masks], [out, masked, floor],
        saves=[masked, floor], modules=CORE,
    )  # fmt: skip
    return out


def sinks(ctx: Context, x: Core) -> bool:
    """Whether a learned logit joins the softmax of this layer."""
    everywhere = ctx.model.sinks_in == "every"
    return ctx.model.attention_sinks and (everywhere or x.kind.attention != "full")


def maximum_softmax(g: GraphBuilder, ctx: Context, x: Core, scores: str) -> str:
    """Append the softmax of scores less their row's maximum, a learned sink per head among them.

    The row maximum keeps its index, the softmax its result, of which a view drops the sink
    (modeling_gpt_oss.py, modeling_mimo_v2_flash.py).
    """
    sink = sinks(ctx, x)
    shape = (ctx.b, x.q.heads, ctx.s, x.keys + 1 if sink else x.keys)
    wide = sink and ctx.kernel("attention_sinks") == "joint_fp32"
    dtype = DType.FP32 if ctx.autocast or wide else ctx.act
    probs = g.tensor("probs", shape, dtype)
    highest = g.tensor("row_maximum_index", (ctx.b, x.q.heads, ctx.s, ONE), DType.INT64)
    g.op(
        "softmax", "softmax", GROUP, [scores, *additive_mask(g, ctx, x)], [probs, highest],
        saves=[highest, probs], weights=[Weight("sinks", (x.q.heads,))] if sink else [],
        modules=CORE,
    )  # fmt: skip
    return probs
