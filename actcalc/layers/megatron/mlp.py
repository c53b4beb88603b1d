"""The dense feed-forward: projections and activation functions, by kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from actcalc.errors import SpecError
from actcalc.layers.core.activation import FUSED, OP_BY_OP, Activation
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.core.ops import dropout, residual_add
from actcalc.layers.megatron.linear import linear

GROUP = "ffn"
MODULE = ("mlp",)

Style = Literal["mlp", "legacy_grouped"]

# Activations that Megatron-Core has a fused kernel for (mlp.py, fusions/): gated ones as SwiGLU,
# GeGLU and, only with routing weights, quick GEGLU; GELU without a gate only with a bias.
_FUSED_GATED = {
    "silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "gelu_new": "geglu",
    "gelu_fast": "geglu",
}  # fmt: skip
_GELU = frozenset(_FUSED_GATED) - {"silu"}


def _unfused_reason(ctx: Context, *, bias: bool, weighted: bool, style: Style) -> str:
    """Why Megatron runs this activation op by op; "" if one fused kernel does it."""
    model = ctx.model
    if style == "legacy_grouped":
        return "the legacy grouped experts have no fused activation"
    if not ctx.workload.kernels.bias_activation_fusion:
        return "bias_activation_fusion is off"
    if weighted:
        if model.gated and model.activation in ("silu", "quick_gelu", "swiglu_oai"):
            return ""
        fused = ctx.workload.kernels.use_fused_weighted_squared_relu
        if fused and not model.gated and model.activation == "relu2":
            return ""  # fusions/fused_weighted_squared_relu.py
        return f"no fused kernel for {model.activation} with routing weights"
    if model.gated:
        if model.activation in _FUSED_GATED:
            return ""
    elif model.activation in _GELU:
        return "" if bias else "the fused GELU needs biases"
    gate = "gated " if model.gated else ""
    return f"Megatron has no fused kernel for {gate}{model.activation}"


def activate(
    g: GraphBuilder,
    ctx: Context,
    prefix: str,
    source: str,
    shape: Iterable[Expr],
    *,
    bias: bool = False,
    weights: str = "",
    style: Style = "mlp",
    modules: Iterable[str] = MODULE,
) -> str:
    """Append the activation function of ``source`` and return its output, of ``shape``.

    ``source`` holds gate and linear part side by side where the model is gated. ``weights`` are
    routing weights per token that multiply the result inside the kernel (experts). Fused kernels
    keep their input (and the weights); what the op-by-op versions keep is in :func:`_kept`.
    """
    dims = tuple(shape)
    out = g.tensor(f"{prefix}_out", dims, ctx.act)
    inputs = [source, weights] if weights else [source]
    if ctx.kernel("activation") == "fused":
        a = Activation(g, ctx, prefix, source, dims, ctx.act)
        FUSED[ctx.model.activation](a)
        # With a gate the kernel's input holds both factors, whatever the function itself keeps.
        kept = [out] if a.keeps_result and not ctx.model.gated else [source]
        g.op(prefix, "activation", GROUP, inputs, [out], saves=kept, modules=modules)
        return out
    reason = _unfused_reason(ctx, bias=bias, weighted=bool(weights), style=style)
    if not reason:
        made, saves = [out], [source]
        fp8 = ctx.workload.kernels.activation_func_fp8_input_store
        if fp8 and ctx.model.gated and ctx.model.activation not in _GELU:
            stored = g.tensor(f"{prefix}_input_fp8", g.shape(source), DType.FP8)
            made, saves = [out, stored], [stored]
        if weights:
            saves.append(weights)
        g.op(
            prefix, "activation", GROUP, inputs, made, saves=saves, modules=modules,
            kernel="fused", source="Megatron-Core fusions/fused_bias_swiglu.py, fused_bias_gelu.py",
        )  # fmt: skip
        return out
    g.note(f"activation runs unfused: {reason}")
    made, saves = _kept(g, ctx, prefix, source, dims, out, bool(weights), style)
    if weights:
        saves.append(weights)
    g.op(
        prefix, "activation", GROUP, inputs, made, saves=dict.fromkeys(saves), modules=modules,
        kernel="unfused", source="Megatron-Core transformer/mlp.py, moe/experts.py",
    )  # fmt: skip
    return out


def _kept(
    g: GraphBuilder,
    ctx: Context,
    prefix: str,
    source: str,
    dims: tuple[Expr, ...],
    out: str,
    weighted: bool,
    style: Style,
) -> tuple[list[str], list[str]]:
    """Tensors that an op-by-op activation makes, and those it keeps.

    What the nonlinearity keeps is in the table (:data:`OP_BY_OP`). A gate keeps both factors of the
    product: the linear half is a slice of ``source`` in the legacy grouped experts, and a new
    tensor elsewhere (``x_linear + glu_linear_offset``). Routing weights keep the product they
    multiply.
    """
    model = ctx.model
    rule = OP_BY_OP.get(model.activation)
    if rule is None:
        raise SpecError(
            f"the clamped activation of {model.name} is modelled only as Megatron's fused kernel",
            "leave bias_activation_fusion on and moe_grouped_gemm at auto",
        )
    a = Activation(g, ctx, prefix, source, dims, ctx.act, made=[out])
    rule(a)
    result = a.make("nonlinear") if model.gated or weighted else out
    if a.keeps_result or model.gated:
        a.saves.append(result)
    if model.gated:
        a.saves.append(source if style == "legacy_grouped" else a.make("linear"))
        result = a.make("product") if weighted else out
    if weighted:
        a.saves.append(result)
    return a.made, a.saves


def feed_forward(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    *,
    prefix: str = "",
    width: Expr,
    bias: bool,
    modules: Iterable[str] = MODULE,
) -> str:
    """Append the two projections with the activation between; return the branch's output.

    ``width`` is the feed-forward width on one rank. A gated layer's gate and linear projections
    are one product of twice the width.
    """
    both = width * 2 if ctx.model.gated else width
    wide = g.tensor(f"{prefix}fc1_out", (ctx.s, ctx.b, both), ctx.act)
    linear(
        g,
        ctx,
        f"{prefix}fc1",
        GROUP,
        source,
        [wide],
        width_in=ctx.h,
        width_out=both,
        split="column",
        bias=bias,
        modules=modules,
    )
    active = activate(
        g, ctx, f"{prefix}activation", wide, (ctx.s, ctx.b, width), bias=bias, modules=modules
    )
    branch = g.tensor(f"{prefix}ffn_out", (ctx.s_region, ctx.b, ctx.h), ctx.act)
    linear(
        g,
        ctx,
        f"{prefix}fc2",
        GROUP,
        active,
        [branch],
        width_in=width,
        width_out=ctx.h,
        split="row",
        bias=bias,
        modules=modules,
    )
    return branch


def close_ffn(g: GraphBuilder, ctx: Context, branch: str, stream: str, out: str) -> str:
    """Append the branch's dropout and its addition to ``stream``."""
    if ctx.hidden_dropout:
        branch = dropout(g, "ffn_dropout", GROUP, branch)
    return residual_add(g, "ffn_add", GROUP, branch, stream, out)


def mlp(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the dense feed-forward of ``source``; return its output, before dropout."""
    return feed_forward(g, ctx, source, width=ctx.ffn, bias=ctx.model.mlp_bias)
