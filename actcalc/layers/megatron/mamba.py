"""The Mamba-2 mixer: a state-space layer in place of attention (Dao and Gu 2024).

One product makes gate z, values x, input and output matrices B and C of every state group, and a
step dt for every head; x, B and C pass a short causal convolution, the scan runs in chunks, and a
grouped norm precedes the output projection.

Kept and made on the way: Megatron-Core ssm/mamba_mixer.py, mamba_ssm ops/triton/ssd_combined.py
``MambaSplitConv1dScanCombinedFn`` (it keeps the packed projection and the scan's output before
the gate, and makes convolution and states again), ops/triton/layernorm_gated.py.
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout, residual_add
from actcalc.layers.core.scan import scan_cost
from actcalc.layers.megatron.linear import linear
from actcalc.specs import Mamba

GROUP = "mamba"


def _mamba(ctx: Context) -> Mamba:
    if ctx.model.mamba is None:
        raise SpecError(f"{ctx.model.name} has no state-space layers", "describe mamba")
    return ctx.model.mamba


def refuse_unsupported(ctx: Context) -> None:
    """Raise ``SpecError`` for splits that Megatron's mixer refuses or that are not priced."""
    # Asked for, so that a framework without state-space layers refuses the model.
    ctx.kernel("mamba")
    spec, layout = _mamba(ctx), ctx.layout
    if spec.version == 1 or spec.bias or not (spec.conv_bias and spec.norm):
        raise SpecError(
            f"Megatron-Core has no state-space mixer like {ctx.model.name}'s (Mamba-1, biases "
            "of projections, no bias of the convolution, or no norm)",
            "use --framework transformers",
        )
    heads = spec.heads_of(ctx.model.hidden)
    for name, count in (("heads", heads), ("groups", spec.groups)):
        if count % (layout.tp * layout.cp):
            raise SpecError(
                f"tp {layout.tp} x cp {layout.cp} does not divide mamba.{name} {count}",
                "use degrees that divide it",
            )


def mamba_layer(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append one state-space layer with its norm and residual; return its output."""
    refuse_unsupported(ctx)
    normed = norm(g, ctx, "norm1", stream, modules=())
    branch = mamba_mixer(g, ctx, normed)
    if ctx.hidden_dropout:
        branch = dropout(g, "mamba_dropout", GROUP, branch)
    return residual_add(g, "mamba_add", GROUP, branch, stream, "output")


def mamba_mixer(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append projection, convolution and scan, gated norm and output projection of ``source``."""
    heads, width, state, groups = (symbol(letter) for letter in "HPNG")
    t, tokens = ctx.t, ctx.tokens
    inner = heads * width / t
    # z and x, B and C, dt: written out as sums of whole widths so that formulas stay exact.
    packed = inner * 2 + groups * state * 2 / t + heads / t
    several = ctx.workload.micro_batch > 1 or ctx.layout.cp > 1
    projected = g.tensor("zxbcdt", (ctx.s, ctx.b, packed), ctx.act)
    linear(
        g, ctx, "in_proj", GROUP, source, [projected], width_in=ctx.h, width_out=packed,
        split="column",
    )  # fmt: skip
    # Over a context-parallel group heads are exchanged for the whole sequence, and back
    # (ssm/mamba_context_parallel.py).
    there = _exchanged(ctx, packed)
    home = _exchanged(ctx, inner)
    if several:
        # The kernel wants (b, s, width) contiguous; with one sequence that is the same storage.
        copied = g.tensor("zxbcdt_contiguous", (ctx.b, ctx.s, packed), ctx.act)
        g.op("layout", "copy", GROUP, [projected], [copied], comm=there, backward_comm=there)
        projected = copied
    scanned = _scan(g, ctx, projected, inner)
    if several:
        back = g.tensor("scanned_contiguous", (ctx.s, ctx.b, inner), ctx.act)
        g.op("layout_back", "copy", GROUP, [scanned], [back], comm=home, backward_comm=home)
        scanned = back
    normed = g.tensor("gated_norm_out", (ctx.s, ctx.b, inner), ctx.act)
    rstd = g.tensor("gated_norm_rstd", (groups / t, tokens), DType.FP32)
    g.op(
        "gated_norm", "norm", GROUP, [scanned], [normed, rstd], saves=[scanned, rstd],
        weights=[Weight("gated_norm.weight", (inner,))],
    )  # fmt: skip
    out = g.tensor("mamba_out", (ctx.s_region, ctx.b, ctx.h), ctx.act)
    linear(
        g, ctx, "out_proj", GROUP, normed, [out], width_in=inner, width_out=ctx.h, split="row",
    )  # fmt: skip
    return out


def _exchanged(ctx: Context, width: Expr) -> list[Comm]:
    if ctx.layout.cp == 1:
        return []
    return [Comm(Collective.ALL_TO_ALL, "cp", ctx.tokens * width * ctx.act.itemsize)]


def _scan(g: GraphBuilder, ctx: Context, packed: str, inner: Expr) -> str:
    """Append the fused convolution and chunked scan; return its gated output."""
    spec = _mamba(ctx)
    heads, state, groups = (symbol(letter) for letter in "HNG")
    convolved = inner + groups * state * 2 / ctx.t
    cost = scan_cost(ctx, spec, inner)
    out = g.tensor("scanned", (ctx.b, ctx.s, inner), ctx.act)
    ungated = g.tensor("scanned_ungated", (ctx.b, ctx.s, inner), ctx.act)
    g.op(
        "scan", "scan", GROUP, [packed], [out, ungated], saves=[packed, ungated],
        flops=cost.flops,
        weights=[
            Weight("conv1d.weight", (convolved, ONE, ONE * spec.conv)),
            Weight("conv1d.bias", (convolved,)),
            *(Weight(name, (heads / ctx.t,)) for name in ("dt_bias", "A_log", "D")),
        ],
        forward_scratch=cost.forward_scratch, backward_scratch=cost.backward_scratch,
        kernel="split conv1d scan",
        source="mamba_ssm ops/triton/ssd_combined.py mamba_split_conv1d_scan_combined",
    )  # fmt: skip
    return out
