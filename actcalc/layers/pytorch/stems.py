"""What an encoder reads in place of tokens: patches of an image, the spectrogram of a sound."""

from __future__ import annotations

from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import GraphBuilder, Weight

_TAPS = 3
"""Width of the two convolutions over a spectrogram."""


def patches(g: GraphBuilder, ctx: Context) -> tuple[str, str]:
    """The convolution of patches, learned tokens before them and positions (ViTEmbeddings).

    Pixels need no gradient: backward has one product, the weight's. Nor does a token that stands in
    for hidden patches, which are none here.
    """
    model = ctx.model
    tokens = ONE * (ctx.workload.seq - model.prefix_tokens)
    pixels = g.tensor("pixels", (ctx.b, tokens, ONE * model.patches), ctx.residual)
    out = g.tensor("embedded", (ctx.b, ctx.s, ctx.h), ctx.residual)
    weights = [Weight("patch_embedding.weight", (ctx.h, ONE * model.patches))]
    if model.patch_bias:
        weights.append(Weight("patch_embedding.bias", (ctx.h,)))
    if model.prefix_tokens:
        shape = (ctx.h,) if model.prefix_tokens == 1 else (ONE * model.prefix_tokens, ctx.h)
        weights.append(Weight("class_token", shape))
    if model.mask_token:
        weights.append(Weight("mask_token", (ctx.h,), frozen=True))
    if model.position == "learned":
        weights.append(Weight("position_embedding", (symbol("o") + -model.registers, ctx.h)))
    flops = ctx.b * tokens * ctx.h * model.patches * 2
    kept = []
    if ctx.autocast:
        kept.append(g.tensor("pixels_cast", g.shape(pixels), ctx.act))
        kept.append(g.tensor("patch_embedding_weight", (ctx.h, ONE * model.patches), ctx.act))
    g.op(
        "patch_embedding", "linear", "embedding", [pixels], [out, *kept], saves=kept, flops=flops,
        backward_flops=flops, weights=weights,
    )  # fmt: skip
    return pixels, out


def sounds(g: GraphBuilder, ctx: Context) -> tuple[str, str]:
    """Two convolutions of a spectrogram, the second of stride 2, and fixed positions.

    A frame of the encoder is two of the spectrogram, whose values need no gradient (WhisperEncoder;
    positions are parameters that are not trained).
    """
    model = ctx.model
    frames = (ctx.b, ctx.s * 2)
    spectrogram = g.tensor("spectrogram", (*frames, ONE * model.mel_bins), ctx.residual)
    wide = _convolution(g, ctx, "conv1", spectrogram, ONE * model.mel_bins, frames, first=True)
    active = _gelu(g, "conv1_gelu", wide)
    out = _convolution(g, ctx, "conv2", active, ctx.h, (ctx.b, ctx.s), first=False)
    active = _gelu(g, "conv2_gelu", out)
    embedded = g.tensor("embedded", (ctx.b, ctx.s, ctx.h), ctx.residual)
    table = Weight("position_embedding", (symbol("o"), ctx.h), frozen=True)
    g.op("positions", "add", "embedding", [active], [embedded], weights=[table])
    return spectrogram, embedded


def _convolution(
    g: GraphBuilder, ctx: Context, name: str, source: str, inside: Expr,
    rows: tuple[Expr, Expr], *, first: bool,
) -> str:  # fmt: skip
    """Append a convolution, which keeps its input (a batch's own is there anyway)."""
    out = g.tensor(f"{name}_out", (*rows, ctx.h), ctx.act)
    kept = [] if first or g.dtype(source) is not ctx.act else [source]
    made = []
    if ctx.autocast:
        made.append(g.tensor(f"{name}_weight", (ctx.h, inside, ONE * _TAPS), ctx.act))
        if g.dtype(source) is not ctx.act:
            made.append(g.tensor(f"{name}_input", g.shape(source), ctx.act))
    flops = rows[0] * rows[1] * ctx.h * inside * (2 * _TAPS)
    weights = [
        Weight(f"{name}.weight", (ctx.h, inside * _TAPS)),
        Weight(f"{name}.bias", (ctx.h,)),
    ]
    g.op(
        name, "linear", "embedding", [source], [out, *made], saves=[*kept, *made], flops=flops,
        backward_flops=flops if first else flops * 2, weights=weights,
    )  # fmt: skip
    return out


def _gelu(g: GraphBuilder, name: str, source: str) -> str:
    out = g.tensor(f"{name}_out", g.shape(source), g.dtype(source))
    g.op(name, "activation", "embedding", [source], [out], saves=[source])
    return out
