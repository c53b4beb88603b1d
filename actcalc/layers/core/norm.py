"""Normalisations: what each implementation keeps for backward. Every builder reads this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actcalc.layers.core.algebra import Expr, Operand, product
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight


@dataclass
class _Norm:
    """A normalisation being appended: its input, and what it makes and saves so far."""

    g: GraphBuilder
    ctx: Context
    name: str
    source: str
    shape: tuple[Expr, ...]
    weight: tuple[Expr, ...]
    out: DType
    made: list[str]
    saves: list[str]
    in_python: bool = False
    """Made of single ops, with the mean of squares."""

    @property
    def backward_bytes(self) -> int:
        """Bytes per element at the highest moment of its backward, beside what the op's gradients
        and saved tensors count.

        As the square's gradient is made five tensors in fp32 are there: the gradient from the
        product with rstd, the mean's, and three of pow_backward (FunctionsManual.cpp). The gradient
        of the output is gone by then, and the normed tensor, too.
        """
        if not self.in_python:
            return 0
        normed = f"{self.name}_normed"
        gone = [self.out, self.g.dtype(self.source)]
        gone += [self.g.dtype(normed)] if normed in self.saves else []
        return max(0, 5 * DType.FP32.itemsize - sum(one.itemsize for one in gone))

    def keep(self, what: str, dtype: DType, shape: tuple[Expr, ...] | None = None) -> str:
        """Make a tensor and save it."""
        name = self.g.tensor(f"{self.name}_{what}", self.shape if shape is None else shape, dtype)
        self.made.append(name)
        self.saves.append(name)
        return name

    def keep_source_fp32(self) -> None:
        """Save the input in fp32: a copy, unless it is fp32 already."""
        if self.g.dtype(self.source) is DType.FP32:
            self.saves.append(self.source)
        else:
            self.keep("fp32", DType.FP32)

    def keep_statistic(self, what: str = "rstd") -> None:
        """Save one fp32 value per row."""
        self.keep(what, DType.FP32, (*self.shape[:-1], Expr.of(1)))

    def keep_weight_fp32(self) -> None:
        """Save the weight in fp32: a copy, unless parameters are fp32."""
        if self.ctx.residual is not DType.FP32:
            self.keep("weight_fp32", DType.FP32, self.weight)


NormKernel = Callable[[_Norm], None]


def _input_only(n: _Norm) -> None:
    """The input; statistics of each token are neglected (Korthikanti et al. 2022 §4.1)."""
    n.saves.append(n.source)


def _fused_layernorm(n: _Norm) -> None:
    """ATen native_layer_norm, apex, TE: the input, fp32 mean and rstd; autocast runs it in fp32."""
    if n.ctx.autocast:
        n.keep_source_fp32()
    else:
        n.saves.append(n.source)
    n.keep_statistic("mean")
    n.keep_statistic("rstd")


def _native_fp32(n: _Norm) -> None:
    """``F.layer_norm`` of the input in fp32, cast back (OLMo)."""
    n.keep_source_fp32()
    n.keep_statistic("mean")
    n.keep_statistic("rstd")
    n.out = n.g.dtype(n.source)


def _native_plus_one(n: _Norm) -> None:
    """native_layer_norm with ``weight + 1``, which is made anew (NemotronLayerNorm1P).

    Under autocast it casts all of its inputs to half precision itself.
    """
    if n.g.dtype(n.source) is n.ctx.act:
        n.saves.append(n.source)
    else:
        n.keep("input", n.ctx.act)
    n.keep_statistic("mean")
    n.keep_statistic("rstd")
    n.keep("weight_plus_one", n.ctx.act, n.weight)
    if n.ctx.autocast:
        n.keep("bias", n.ctx.act, n.weight)
    n.out = n.ctx.act


def _fused_rmsnorm(n: _Norm) -> None:
    """ATen _fused_rms_norm (torch.nn.RMSNorm on CUDA), TE: the input and one fp32 rstd per row."""
    n.saves.append(n.source)
    n.keep_statistic()


def _rms(n: _Norm) -> None:
    """``weight * (x.float() * rstd).to(x.dtype)`` (LlamaRMSNorm).

    pow and the product with rstd keep the fp32 copy, the product with the weight what was cast
    back.
    """
    n.in_python = True
    n.keep_source_fp32()
    n.keep_statistic()
    n.keep("normed", n.g.dtype(n.source))


def _rms_late_cast(n: _Norm) -> None:
    """``(weight * (x.float() * rstd)).to(x.dtype)`` (Olmo2RMSNorm): the normed tensor in fp32."""
    n.in_python = True
    n.keep_source_fp32()
    n.keep_statistic()
    n.keep("normed", DType.FP32)
    n.out = n.g.dtype(n.source)


def _rms_fp32_weight(n: _Norm) -> None:
    """``(weight.float() * (x.float() * rstd)).to(x.dtype)`` (HeliumRMSNorm)."""
    _rms_late_cast(n)
    n.keep_weight_fp32()


def _rms_pow(n: _Norm) -> None:
    """``(x.float() * mean_square ** -0.5) * weight.float()``, cast back (Gemma3nRMSNorm).

    The power keeps the mean of squares, the product its result.
    """
    n.keep_statistic("mean_square")
    _rms_fp32_weight(n)


def _rms_pow_unweighted(n: _Norm) -> None:
    """The same without a weight (``with_scale=False``)."""
    n.keep_statistic("mean_square")
    _rms_unweighted(n)


def _rms_gemma(n: _Norm) -> None:
    """``(x.float() * rstd) * (1 + weight.float())``, cast back (Gemma): all of it in fp32."""
    n.in_python = True
    n.keep_source_fp32()
    n.keep_statistic()
    n.keep("normed", DType.FP32)
    n.keep("scale", DType.FP32, n.weight)
    n.out = n.g.dtype(n.source)


def _rms_t5(n: _Norm) -> None:
    """``weight * (x * rstd).to(weight.dtype)`` (T5LayerNorm).

    pow keeps an fp32 copy, the product with rstd the input itself.
    """
    n.keep_source_fp32()
    n.keep_statistic()
    if n.source not in n.saves:
        n.saves.append(n.source)
    n.keep("normed", n.ctx.residual)


def _rms_unweighted(n: _Norm) -> None:
    """``x.float() * rstd``, cast back (Llama4TextL2Norm)."""
    n.in_python = True
    n.keep_source_fp32()
    n.keep_statistic()
    n.out = n.g.dtype(n.source)


def _centred(n: _Norm) -> None:
    """Mean and variance in Python, in fp32 (CohereLayerNorm).

    ``x - mean`` is computed twice, once for the variance and once for the result; the product
    with the fp32 weight keeps the normed tensor and the weight's copy.
    """
    n.keep("centred", DType.FP32)
    n.keep_statistic()
    n.keep("centred_again", DType.FP32)
    n.keep("normed", DType.FP32)
    n.keep_weight_fp32()
    n.out = n.g.dtype(n.source)


NORM_KERNELS: dict[str, NormKernel] = {
    "input_only": _input_only,
    "fused_layernorm": _fused_layernorm,
    "fused_rmsnorm": _fused_rmsnorm,
    "native_fp32": _native_fp32,
    "native_plus_one": _native_plus_one,
    "rms": _rms,
    "rms_late_cast": _rms_late_cast,
    "rms_fp32_weight": _rms_fp32_weight,
    "rms_gemma": _rms_gemma,
    "rms_t5": _rms_t5,
    "rms_unweighted": _rms_unweighted,
    "rms_pow": _rms_pow,
    "rms_pow_unweighted": _rms_pow_unweighted,
    "centred": _centred,
}


def norm(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    *,
    kind: str = "",
    shape: Iterable[Operand] | None = None,
    weight: Iterable[Operand] | None = None,
    bias: bool | None = None,
    group: str = "norm",
    modules: Iterable[str] = ("layernorm",),
    out: str = "",
) -> str:
    """Append a normalisation of ``source``'s last dimension; return its output.

    ``kind`` names the normalisation (default: the model's); ``shape`` is what is normalised where
    ``source`` is stored in another shape, ``weight`` the weight's shape where it is not the last
    dimension. The output has the type of the residual stream (autocast multiplies with fp32
    weights) unless the kernel casts back.
    """
    kind = kind or ctx.model.norm
    dims = g.shape(source) if shape is None else tuple(Expr.of(dim) for dim in shape)
    scale = dims[-1:] if weight is None else tuple(Expr.of(dim) for dim in weight)
    unweighted = kind in ("nonparametric", "unweighted")
    n = _Norm(g, ctx, name, source, dims, scale, ctx.residual, [], [])
    NORM_KERNELS[ctx.kernel(kind)](n)
    made = g.tensor(out or f"{name}_out", dims, n.out)
    weights: list[Weight] = [] if unweighted else [Weight(f"{name}.weight", scale)]
    with_bias = kind == "layernorm" and (ctx.model.norm_bias if bias is None else bias)
    if with_bias:
        weights.append(Weight(f"{name}.bias", scale))
    g.op(
        name, "norm", group, [source], [made, *n.made],
        saves=n.saves, weights=weights, modules=modules, kernel=ctx.kernel(kind),
        backward_scratch=product(dims) * n.backward_bytes,
    )  # fmt: skip
    return made
