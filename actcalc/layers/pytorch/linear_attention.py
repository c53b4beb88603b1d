"""Linear attention of transformers' modelling code: gated delta nets and Kimi delta attention.

Queries, keys and values pass one short causal convolution and a delta rule in chunks; a norm that
the layer's input gates precedes the output projection. Convolution and rule are fused kernels,
whose autograd functions say what they keep: causal-conv1d 1.6.1 ``CausalConv1dFn``,
flash-linear-attention 0.5.2 ``ChunkGatedDeltaRuleFunction`` and ``ChunkKDAFunction``. The rest is
PyTorch, op by op (modeling_qwen3_next.py, modeling_kimi_linear.py).
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.ops import promoted
from actcalc.layers.pytorch.lightning import lightning_attention
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import product
from actcalc.layers.pytorch.rwkv import time_mix
from actcalc.specs import Linear

GROUP = "attention"
MODULE = ("attention",)
CHUNK = 64
"""Tokens that the delta rule handles at once."""
_CONV = "causal_conv1d causal_conv1d_interface.py CausalConv1dFn"
_RULES = {
    "gated_delta": "fla ops/gated_delta_rule/chunk.py ChunkGatedDeltaRuleFunction",
    "kimi_delta": "fla ops/kda/chunk.py ChunkKDAFunction",
}


def spec_of(ctx: Context) -> Linear:
    """The model's linear attention; ``SpecError`` where it has none."""
    if ctx.model.linear is None:
        raise SpecError(f"{ctx.model.name} has no linear attention", "describe linear")
    return ctx.model.linear


def linear_attention(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append linear attention of ``source``; return the branch."""
    spec = spec_of(ctx)
    heads, width = symbol("H"), symbol("P")
    if spec.rule == "lightning":
        return lightning_attention(g, ctx, spec, source)
    if spec.rule == "wkv":
        return time_mix(g, ctx, spec, source)
    source = without_padding(g, ctx, source)
    if spec.rule == "short_conv":
        return _gated_convolution(g, ctx, spec, source)
    mixed, gate, strength, decay = _PROJECTIONS[ctx.kernel("linear_projections")](g, ctx, source)
    mixed = short_convolution(g, ctx, mixed, spec.conv)
    beta = _strength(g, ctx, spec, strength)
    if spec.rule == "kimi_delta":
        steps = _decay_per_channel(g, ctx, source)
        gate = _low_rank(g, ctx, "gate", source)
    else:
        steps = _decay_per_head(g, ctx, decay)
    out = _rule(g, ctx, spec, mixed, steps, beta)
    out = _GATED_NORMS[ctx.kernel("gated_norm")](g, ctx, out, gate)
    return linear(
        g, ctx, "out", GROUP, out, inside=heads * width, outside=ctx.h, rows=(ctx.b, ctx.s),
        modules=MODULE,
    )  # fmt: skip


def without_padding(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the product with the mask of real tokens, where some are padded.

    What it keeps is the mask: part of the batch, which is nobody's activation.
    """
    if not ctx.workload.padding_mask:
        return source
    out = g.tensor("unpadded", g.shape(source), g.dtype(source))
    g.op("unpad", "multiply", GROUP, [source], [out], modules=MODULE)
    return out


def short_convolution(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    taps: int,
    *,
    width: Expr | None = None,
    bias: bool = False,
    group: str = GROUP,
) -> str:
    """Append the causal convolution over a few tokens of each channel, and its SiLU if it has one.

    It keeps its input, in place: the whole storage where ``width`` of its channels are read.
    """
    wide = g.shape(source)[-1] if width is None else width
    weights = [Weight("conv1d.weight", (wide, ONE, ONE * taps))]
    if bias:
        weights.append(Weight("conv1d.bias", (wide,)))
    out = g.tensor("convolved", (*g.shape(source)[:-1], wide), g.dtype(source))
    g.op(
        "conv", "scan", group, [source], [out], saves=[source],
        modules=MODULE if group == GROUP else (), weights=weights, kernel="causal_conv1d",
        source=_CONV,
    )  # fmt: skip
    return out


def _gated_convolution(g: GraphBuilder, ctx: Context, spec: Linear, source: str) -> str:
    """Append ``out(C * conv(B * x))`` of one projection's three parts (Lfm2ShortConv).

    Both products keep their factors, and so the whole projection.
    """
    shape = (ctx.b, ctx.s, ctx.h)
    packed = linear(
        g, ctx, "in_proj", GROUP, source, inside=ctx.h, outside=ctx.h * 3, bias=spec.bias,
        modules=MODULE,
    )  # fmt: skip
    gated = product(g, "conv_in", packed, packed, shape, group=GROUP, modules=MODULE)
    mixed = short_convolution(g, ctx, gated, spec.conv, bias=spec.bias)
    out = product(g, "conv_out", packed, mixed, shape, group=GROUP, modules=MODULE)
    return linear(
        g, ctx, "out", GROUP, out, inside=ctx.h, outside=ctx.h, bias=spec.bias, modules=MODULE
    )


def _widths() -> tuple[Expr, Expr]:
    """Width of all queries (or keys), and of all values."""
    return symbol("G") * symbol("N"), symbol("H") * symbol("P")


def _each(g: GraphBuilder, ctx: Context, source: str, names: dict[str, Expr]) -> list[str]:
    return [
        linear(
            g, ctx, name, GROUP, source, inside=ctx.h, outside=width, modules=MODULE,
            out=f"{name}_proj",
        )
        for name, width in names.items()
    ]  # fmt: skip


def _joined(g: GraphBuilder, ctx: Context, sources: list[str]) -> str:
    """Append the concatenation of queries, keys and values."""
    keys, values = _widths()
    out = g.tensor("qkv", (ctx.b, ctx.s, keys * 2 + values), g.dtype(sources[0]))
    g.op("qkv_join", "copy", GROUP, list(dict.fromkeys(sources)), [out], modules=MODULE)
    return out


Projected = tuple[str, str, str, str]
"""Queries, keys and values in one tensor; the gate; writing strengths; decays."""


def _packed(g: GraphBuilder, ctx: Context, source: str) -> Projected:
    """Two projections ordered by key head, so that each part is copied (Qwen3-Next)."""
    keys, values = _widths()
    heads = symbol("H")
    qkvz, ba = _each(g, ctx, source, {"qkvz": keys * 2 + values * 2, "ba": heads * 2})
    gate = g.tensor("z", (ctx.b, ctx.s, values), g.dtype(qkvz))
    parts = [g.tensor(name, (ctx.b, ctx.s, heads), g.dtype(ba)) for name in ("beta_in", "decay_in")]
    g.op("z_copy", "copy", GROUP, [qkvz], [gate], modules=MODULE)
    g.op("ba_split", "copy", GROUP, [ba], parts, modules=MODULE)
    return _joined(g, ctx, [qkvz]), gate, parts[0], parts[1]


def _split(g: GraphBuilder, ctx: Context, source: str) -> Projected:
    """Queries, keys and values from one projection, the rest from their own (Qwen3.5)."""
    keys, values = _widths()
    heads = symbol("H")
    made = _each(g, ctx, source, {"qkv": keys * 2 + values, "z": values, "b": heads, "a": heads})
    return made[0], made[1], made[2], made[3]


def _single(g: GraphBuilder, ctx: Context, source: str) -> Projected:
    """A projection for each (OLMo Hybrid; Kimi's decays and gate are made apart)."""
    keys, values = _widths()
    heads = symbol("H")
    kimi = spec_of(ctx).rule == "kimi_delta"
    parts = _each(g, ctx, source, {"q": keys, "k": keys, "v": values})
    joined = _joined(g, ctx, parts)
    (strength,) = _each(g, ctx, source, {"b": heads})
    if kimi:
        return joined, "", strength, ""
    decay, gate = _each(g, ctx, source, {"a": heads, "g": values})
    return joined, gate, strength, decay


_PROJECTIONS = {"packed": _packed, "split": _split, "single": _single}


def _strength(g: GraphBuilder, ctx: Context, spec: Linear, source: str) -> str:
    """Append the sigmoid of the writing strengths, which it keeps; doubled, a tensor of its own."""
    shape = g.shape(source)
    out = g.tensor("beta", shape, g.dtype(source))
    g.op("beta", "activation", GROUP, [source], [out], saves=[out], modules=MODULE)
    if not spec.doubled:
        return out
    twice = g.tensor("beta_doubled", shape, g.dtype(out))
    g.op("beta_double", "multiply", GROUP, [out], [twice], modules=MODULE)
    return twice


def _decay_per_head(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append ``-exp(A_log) * softplus(a + dt_bias)`` in fp32.

    exp keeps its result, softplus its input, the product both factors.
    """
    heads = symbol("H")
    shape = g.shape(source)
    per_token = [g.tensor(f"decay_{what}", shape, DType.FP32) for what in ("sum", "softplus")]
    per_head = [g.tensor(f"decay_{what}", (heads,), DType.FP32) for what in ("exp", "rate")]
    out = g.tensor("decay", shape, DType.FP32)
    kept = [*per_token, *per_head]
    g.op(
        "decay", "activation", GROUP, [source], [out, *kept], saves=kept, modules=MODULE,
        weights=[Weight("dt_bias", (heads,)), Weight("A_log", (heads,))],
    )  # fmt: skip
    return out


def _low_rank(g: GraphBuilder, ctx: Context, name: str, source: str) -> str:
    """Append a projection to one head's width and from there to all heads'."""
    width = symbol("P")
    down = linear(
        g, ctx, f"{name}_down", GROUP, source, inside=ctx.h, outside=width, modules=MODULE
    )
    return linear(
        g, ctx, f"{name}_up", GROUP, down, inside=width, outside=symbol("H") * width,
        modules=MODULE,
    )  # fmt: skip


def _decay_per_channel(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append Kimi's forget gate in fp32 (KimiLinearForgetGate).

    Softplus is written out: exp keeps its result, log its input, the choice of large values its
    condition; the product keeps both factors.
    """
    heads, width = symbol("H"), symbol("P")
    low = _low_rank(g, ctx, "forget", source)
    shape = (ctx.b, ctx.s, heads, width)
    kept = [g.tensor(f"decay_{what}", shape, DType.FP32) for what in ("exp", "sum", "softplus")]
    kept.append(g.tensor("decay_large", shape, DType.BOOL))
    kept += [g.tensor(f"decay_{what}", (heads,), DType.FP32) for what in ("rate_exp", "rate")]
    out = g.tensor("decay", shape, DType.FP32)
    g.op(
        "decay", "activation", GROUP, [low], [out, *kept], saves=kept, modules=MODULE,
        weights=[Weight("dt_bias", (heads * width,)), Weight("A_log", (heads,))],
    )  # fmt: skip
    return out


def _rule(g: GraphBuilder, ctx: Context, spec: Linear, mixed: str, decay: str, beta: str) -> str:
    """Append the delta rule; return its output, (b, s, heads · width).

    It normalises queries and keys, copies the values out of the convolution's output and keeps
    these with the decays summed per chunk and the inverse of each chunk's triangular system;
    Kimi's also keeps the decays as given and the scores of each chunk. FLOPs are those of its
    matrix products: scores of keys, their inverse applied to keys and values, three products with
    the state, and the scores of queries with what they weigh.
    """
    heads, keys, width, state = symbol("H"), symbol("G"), symbol("P"), symbol("N")
    tokens, item = ctx.tokens, ctx.act.itemsize
    rows = (ctx.b, ctx.s)
    made = [g.tensor(f"{name}_normed", (*rows, keys, state), ctx.act) for name in ("q", "k")] + [
        g.tensor(f"{name}_rstd", (*rows, keys), DType.FP32) for name in ("q", "k")
    ]
    made.append(g.tensor("v", (*rows, heads, width), ctx.act))
    made.append(g.tensor("decay_summed", g.shape(decay), DType.FP32))
    made.append(g.tensor("chunk_inverse", (*rows, heads, ONE * CHUNK), ctx.act))
    kept = [*made, beta]
    if spec.rule == "kimi_delta":
        made.append(g.tensor("chunk_scores", (*rows, heads, ONE * CHUNK), ctx.act))
        kept += [made[-1], decay]
    out = g.tensor("core_out", (*rows, heads * width), ctx.act)
    inside = tokens * heads
    again = state * width * 4 + (state + width) * (2 * CHUNK)
    flops = inside * (state * width * 6 + (state * 3 + width * 2) * (2 * CHUNK))
    # Keys and values as the state sees them, and a state per chunk.
    scratch = inside * (state + width * 2 + state * width / CHUNK) * item
    g.op(
        "delta_rule", "scan", GROUP, [mixed, decay, beta], [out, *made], saves=kept,
        flops=flops, backward_flops=flops * 2 + inside * again, modules=MODULE,
        forward_scratch=scratch + tokens * keys * state * (2 * item),
        # All of that again, with the gradients of the states, of the values and, per value head,
        # of queries and keys.
        backward_scratch=scratch * 2 + inside * state * (2 * item),
        kernel="chunked delta rule", source=_RULES[spec.rule],
    )  # fmt: skip
    return out


def _norm_in_fp32(g: GraphBuilder, ctx: Context, source: str) -> tuple[list[str], list[str]]:
    """The norm's first part: the input in fp32 and one number per head. (made, kept)"""
    heads = symbol("H")
    made = [g.tensor("gated_norm_rstd", (ctx.b, ctx.s, heads), DType.FP32)]
    kept = list(made)
    if g.dtype(source) is DType.FP32:
        return made, [source, *kept]
    made.append(g.tensor("gated_norm_fp32", g.shape(source), DType.FP32))
    return made, [*kept, made[-1]]


def _gated(g: GraphBuilder, source: str, gate: str, made: list[str], kept: list[str]) -> str:
    out = g.tensor("gated_norm_out", g.shape(source), g.dtype(source))
    g.op(
        "gated_norm", "norm", GROUP, [source, gate], [out, *made], saves=kept,
        weights=[Weight("gated_norm.weight", (symbol("P"),))], modules=MODULE,
    )  # fmt: skip
    return out


def _cast_norm(g: GraphBuilder, ctx: Context, source: str, gate: str) -> str:
    """``weight * norm(x).to(x.dtype) * silu(gate.float())`` (Qwen3NextRMSNormGated)."""
    shape, dtype = g.shape(source), g.dtype(source)
    made, kept = _norm_in_fp32(g, ctx, source)
    own = [
        g.tensor("gated_norm_normed", shape, dtype),
        g.tensor("gated_norm_weighted", shape, promoted(dtype, ctx.residual)),
        g.tensor("gate_silu", shape, DType.FP32),
    ]
    if g.dtype(gate) is DType.FP32:
        kept.append(gate)
    else:
        own.append(g.tensor("gate_fp32", shape, DType.FP32))
    return _gated(g, source, gate, made + own, kept + own)


def _fp32_norm(g: GraphBuilder, ctx: Context, source: str, gate: str) -> str:
    """``weight.float() * norm(x) * sigmoid(gate.float())``, then cast (KimiLinearRMSNormGated)."""
    made, kept = _norm_in_fp32(g, ctx, source)
    own = [
        g.tensor(f"gated_norm_{what}", g.shape(source), DType.FP32)
        for what in ("normed", "weighted", "sigmoid")
    ]
    if ctx.residual is not DType.FP32:
        own.append(g.tensor("gated_norm_weight", (symbol("P"),), DType.FP32))
    return _gated(g, source, gate, made + own, kept + own)


_GATED_NORMS = {"silu_cast": _cast_norm, "sigmoid_fp32": _fp32_norm}
