"""State-space mixers of transformers' modelling code, with the kernels of mamba-ssm.

Mamba-2's whole mixer, output projection included, is one fused function; so is Mamba-1's
(Mamba, Falcon Mamba). They keep what stands in mamba-ssm 2.3.2 ``MambaSplitConv1dScanCombinedFn``
and ``MambaInnerFn``, and make the rest again in backward. Falcon-H1 multiplies the mixer's input
and its projection by numbers. Jamba calls convolution and scan apart, with norms between them
(modeling_jamba.py; ``CausalConv1dFn``, ``SelectiveScanFn``).
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import promoted
from actcalc.layers.core.scan import scan_cost
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.linear_attention import short_convolution, without_padding
from actcalc.specs import Mamba

GROUP = "mamba"
_STATES_EVERY = 2048
"""Tokens between two states that the selective scan writes (mamba-ssm csrc/selective_scan)."""


def spec_of(ctx: Context) -> Mamba:
    """The model's state-space mixer; ``SpecError`` where it has none."""
    if ctx.model.mamba is None:
        raise SpecError(f"{ctx.model.name} has no state-space layers", "describe mamba")
    return ctx.model.mamba


def mamba_mixer(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append a state-space mixer of ``source``; return the branch."""
    spec = spec_of(ctx)
    kernel = ctx.kernel("mamba")
    source = without_padding(g, ctx, source)
    if spec.version == 2:
        return _second(g, ctx, spec, source)
    if kernel == "apart":
        return _apart(g, ctx, spec, source)
    return _first(g, ctx, spec, source)


def _minus_exp(g: GraphBuilder, ctx: Context, shape: tuple[Expr, ...]) -> str:
    """Append ``-exp(A_log.float())``: exp keeps its result, the scan what it is given."""
    kept = g.tensor("decay_exp", shape, DType.FP32)
    out = g.tensor("decay", shape, DType.FP32)
    g.op(
        "decay", "activation", GROUP, [], [kept, out], saves=[kept],
        weights=[Weight("A_log", shape)],
    )  # fmt: skip
    return out


def _cast_weight(g: GraphBuilder, ctx: Context, name: str, shape: tuple[Expr, Expr]) -> list[str]:
    """The copy of a weight that autocast makes inside a fused function, which keeps it."""
    return [g.tensor(f"{name}_weight", shape, ctx.act)] if ctx.autocast else []


def _second(g: GraphBuilder, ctx: Context, spec: Mamba, source: str) -> str:
    """Mamba-2: the packed projection and the scan's output before gate and norm are kept."""
    heads, width, state, groups = (symbol(letter) for letter in "HPNG")
    inner = heads * width
    convolved = inner + groups * state * 2
    scaled = ctx.kernel("mamba") == "fused_scaled"
    if scaled:
        source = _multiplied(g, "mamba_in", source, g.dtype(source))
    packed = linear(
        g, ctx, "in_proj", GROUP, source, inside=ctx.h, outside=inner + convolved + heads,
        bias=spec.bias,
    )  # fmt: skip
    if scaled:
        # The numbers are a buffer, in fp32 under autocast, and so is the product.
        packed = _multiplied(g, "packed_scaled", packed, promoted(g.dtype(packed), ctx.residual))
    decay = _minus_exp(g, ctx, (heads,))
    scanned = g.tensor("scanned", (ctx.b, ctx.s, inner), g.dtype(packed))
    cost = scan_cost(ctx, spec, inner)
    weights = [
        Weight("conv1d.weight", (convolved, ONE, ONE * spec.conv)),
        *([Weight("conv1d.bias", (convolved,))] if spec.conv_bias else []),
        *(Weight(name, (heads,)) for name in ("dt_bias", "D")),
    ]
    g.op(
        "scan", "scan", GROUP, [packed, decay], [scanned], saves=[packed, scanned, decay],
        flops=cost.flops, weights=weights, forward_scratch=cost.forward_scratch,
        backward_scratch=cost.backward_scratch, kernel="split conv1d scan",
        source="mamba_ssm ops/triton/ssd_combined.py MambaSplitConv1dScanCombinedFn",
    )  # fmt: skip
    normed = scanned
    if spec.norm:
        rstd = g.tensor("gated_norm_rstd", (ctx.b, ctx.s, groups), DType.FP32)
        normed = g.tensor("gated_norm_out", (ctx.b, ctx.s, inner), g.dtype(packed))
        g.op(
            "gated_norm", "norm", GROUP, [scanned, packed], [normed, rstd], saves=[rstd],
            weights=[Weight("gated_norm.weight", (inner,))],
        )  # fmt: skip
    return _out(g, ctx, spec, normed, inner)


def _multiplied(g: GraphBuilder, name: str, source: str, dtype: DType) -> str:
    """Append a product with numbers that are not trained, which keeps none of its factors."""
    out = g.tensor(name, g.shape(source), dtype)
    g.op(name, "multiply", GROUP, [source], [out])
    return out


def _out(g: GraphBuilder, ctx: Context, spec: Mamba, source: str, inner: Expr) -> str:
    """Append the output projection inside a fused function: its input is made again."""
    casts = _cast_weight(g, ctx, "out_proj", (ctx.h, inner))
    out = g.tensor("mamba_out", (ctx.b, ctx.s, ctx.h), ctx.act)
    bias = [Weight("out_proj.bias", (ctx.h,))] if spec.bias else []
    g.op(
        "out_proj", "linear", GROUP, [source], [out, *casts], saves=casts,
        flops=ctx.tokens * inner * ctx.h * 2,
        weights=[Weight("out_proj.weight", (ctx.h, inner)), *bias],
    )  # fmt: skip
    return out


def _first(g: GraphBuilder, ctx: Context, spec: Mamba, source: str) -> str:
    """Mamba-1: the projection, copied so that time lies densely, and what the scan reads."""
    inner, state, rank = symbol("H"), symbol("N"), ONE * spec.rank
    projected = linear(
        g, ctx, "in_proj", GROUP, source, inside=ctx.h, outside=inner * 2, bias=spec.bias
    )
    decay = _minus_exp(g, ctx, (inner, state))
    xz = g.tensor("xz", (ctx.b, inner * 2, ctx.s), ctx.act)
    g.op("xz_copy", "copy", GROUP, [projected], [xz])
    rows = (ctx.b, ctx.s)
    kept = [
        xz, decay,
        g.tensor("x_proj_out", (*rows, rank + state * 2), ctx.act),
        *(g.tensor(f"{name}_dense", (ctx.b, ONE, state, ctx.s), ctx.act) for name in "BC"),
        *_scan_kept(g, ctx, inner, state),
        g.tensor("scanned", (ctx.b, inner, ctx.s), ctx.act),
        *_cast_weight(g, ctx, "x_proj", (rank + state * 2, inner)),
        *_cast_weight(g, ctx, "dt_proj", (inner, rank)),
    ]  # fmt: skip
    made = [name for name in kept if name not in (xz, decay)]
    projections = (rank + state * 2) * inner + inner * rank
    g.op(
        "scan", "scan", GROUP, [xz, decay], made, saves=kept,
        flops=ctx.tokens * projections * 2,
        weights=[*_conv_weights(spec, inner), *_scan_weights(inner, state, rank)],
        forward_scratch=ctx.tokens * inner * (3 * ctx.act.itemsize),
        backward_scratch=ctx.tokens * inner * (6 * ctx.act.itemsize), kernel="selective scan",
        source="mamba_ssm ops/selective_scan_interface.py MambaInnerFn",
    )  # fmt: skip
    return _out(g, ctx, spec, "scanned", inner)


def _scan_kept(g: GraphBuilder, ctx: Context, inner: Expr, state: Expr) -> list[str]:
    """States that the scan writes on its way, and fp32 copies of what each channel adds."""
    chunks = -(-ctx.length // _STATES_EVERY)
    made = [g.tensor("states", (ctx.b, inner, ONE * chunks, state * 2), DType.FP32)]
    if ctx.residual is not DType.FP32:
        made += [g.tensor(f"{name}_fp32", (inner,), DType.FP32) for name in ("D", "dt_bias")]
    return made


def _conv_weights(spec: Mamba, inner: Expr) -> list[Weight]:
    bias = [Weight("conv1d.bias", (inner,))] if spec.conv_bias else []
    return [Weight("conv1d.weight", (inner, ONE, ONE * spec.conv)), *bias]


def _scan_weights(inner: Expr, state: Expr, rank: Expr) -> list[Weight]:
    return [
        Weight("x_proj.weight", (rank + state * 2, inner)),
        Weight("dt_proj.weight", (inner, rank)),
        Weight("dt_proj.bias", (inner,)),
        Weight("D", (inner,)),
    ]


def _apart(g: GraphBuilder, ctx: Context, spec: Mamba, source: str) -> str:
    """Jamba's mixer: convolution, projection with norms, scan and output one after another."""
    inner, state, rank = symbol("H"), symbol("N"), ONE * spec.rank
    rows = (ctx.b, ctx.s)
    projected = linear(
        g, ctx, "in_proj", GROUP, source, inside=ctx.h, outside=inner * 2, bias=spec.bias
    )
    decay = _minus_exp(g, ctx, (inner, state))
    half = short_convolution(
        g, ctx, projected, spec.conv, width=inner, bias=spec.conv_bias, group=GROUP
    )
    packed = linear(g, ctx, "x_proj", GROUP, half, inside=inner, outside=rank + state * 2)
    steps, *matrices = (
        norm(g, ctx, f"{name}_norm", packed, shape=(*rows, width), group=GROUP, modules=())
        for name, width in (("dt", rank), ("B", state), ("C", state))
    )
    delta = g.tensor("dt_proj_out", (ctx.b, inner, ctx.s), ctx.act)
    g.op(
        "dt_proj", "linear", GROUP, [steps], [delta], saves=[steps],
        flops=ctx.tokens * inner * rank * 2, weights=[Weight("dt_proj.weight", (inner, rank))],
    )  # fmt: skip
    dense = [
        g.tensor("conv_dense", (ctx.b, inner, ctx.s), ctx.act),
        g.tensor("gate_dense", (ctx.b, inner, ctx.s), ctx.act),
        *(g.tensor(f"{name}_dense", (ctx.b, state, ctx.s), ctx.residual) for name in "BC"),
    ]
    g.op("dense", "copy", GROUP, [half, projected, *matrices], dense)
    made = [*_scan_kept(g, ctx, inner, state), g.tensor("ungated", (ctx.b, inner, ctx.s), ctx.act)]
    scanned = g.tensor("scanned", (ctx.b, ctx.s, inner), ctx.act)
    g.op(
        "scan", "scan", GROUP, [*dense, delta, decay], [scanned, *made],
        saves=[*dense, delta, decay, *made],
        weights=[Weight("dt_proj.bias", (inner,)), Weight("D", (inner,))],
        backward_scratch=ctx.tokens * inner * (3 * ctx.act.itemsize), kernel="selective scan",
        source="mamba_ssm ops/selective_scan_interface.py SelectiveScanFn",
    )  # fmt: skip
    return linear(g, ctx, "out_proj", GROUP, scanned, inside=inner, outside=ctx.h, bias=spec.bias)
