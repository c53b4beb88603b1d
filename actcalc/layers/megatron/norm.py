"""Normalisations: what each implementation keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from actcalc.layers.core.algebra import Expr, Operand
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight

NormKernel = Callable[[GraphBuilder, str, str, str, str, tuple[Weight, ...], frozenset[str]], None]


def _stats_shape(g: GraphBuilder, source: str) -> tuple[Expr, ...]:
    return (*g.shape(source)[:-1], Expr.of(1))


def _input_only(
    g: GraphBuilder,
    name: str,
    group: str,
    source: str,
    out: str,
    weights: tuple[Weight, ...],
    modules: frozenset[str],
) -> None:
    """Keep the input; per-token statistics are neglected (Korthikanti et al. 2022 §4.1)."""
    g.op(name, "norm", group, [source], [out], saves=[source], weights=weights, modules=modules)


def _fused_layernorm(
    g: GraphBuilder,
    name: str,
    group: str,
    source: str,
    out: str,
    weights: tuple[Weight, ...],
    modules: frozenset[str],
) -> None:
    """Keep the input and fp32 mean and rstd per token (ATen native_layer_norm; apex; TE)."""
    stats = [
        g.tensor(f"{name}_{what}", _stats_shape(g, out), DType.FP32) for what in ("mean", "rstd")
    ]
    g.op(
        name,
        "norm",
        group,
        [source],
        [out, *stats],
        saves=[source, *stats],
        weights=weights,
        modules=modules,
    )


def _fused_rmsnorm(
    g: GraphBuilder,
    name: str,
    group: str,
    source: str,
    out: str,
    weights: tuple[Weight, ...],
    modules: frozenset[str],
) -> None:
    """Keep the input and fp32 rstd per token (ATen _fused_rms_norm on CUDA; TE RMSNorm)."""
    rstd = g.tensor(f"{name}_rstd", _stats_shape(g, out), DType.FP32)
    g.op(
        name,
        "norm",
        group,
        [source],
        [out, rstd],
        saves=[source, rstd],
        weights=weights,
        modules=modules,
    )


NORM_KERNELS: dict[str, NormKernel] = {
    "input_only": _input_only,
    "fused_layernorm": _fused_layernorm,
    "fused_rmsnorm": _fused_rmsnorm,
}


def norm(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    out: str,
    *,
    group: str = "norm",
    modules: Iterable[str] = ("layernorm",),
    width: Expr | None = None,
    weight_width: Expr | None = None,
    out_dtype: DType | None = None,
    shape: Iterable[Operand] | None = None,
) -> str:
    """Append a normalisation of ``source`` to ``out`` with the framework's kernel.

    ``width`` is the parameter width if it is not the last dimension of ``source``; ``shape`` the
    shape that is normalised where ``source`` is the larger storage it is a view of.
    """
    kind = ctx.model.norm
    dims = g.shape(source) if shape is None else tuple(map(Expr.of, shape))
    out = g.tensor(out, dims, out_dtype or g.dtype(source))
    width = weight_width or width or dims[-1]
    weights: tuple[Weight, ...] = ()
    if kind != "nonparametric":
        weights = (Weight(f"{name}.weight", (width,)),)
    if kind == "layernorm" and ctx.model.norm_bias:
        weights = (*weights, Weight(f"{name}.bias", (width,)))
    kernel = NORM_KERNELS[ctx.kernel(kind)]
    kernel(g, name, group, source, out, weights, frozenset(modules))
    return out
