"""The dense feed-forward of transformers' modelling code, and its activation functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.megatron.linear import dropout
from actcalc.layers.pytorch.linear import linear, promoted

GROUP = "ffn"
MODULE = ("mlp",)


@dataclass
class _Activation:
    """An activation being appended: its input, and what it makes and saves so far.

    ``dtype`` becomes that of the result.
    """

    g: GraphBuilder
    ctx: Context
    name: str
    source: str
    shape: tuple[Expr, ...]
    dtype: DType
    made: list[str]
    saves: list[str]
    keeps_result: bool = False

    def keep(self, what: str, dtype: DType | None = None) -> str:
        """Make a tensor of the result's shape and save it."""
        name = self.g.tensor(f"{self.name}_{what}", self.shape, dtype or self.dtype)
        self.made.append(name)
        self.saves.append(name)
        return name

    def keep_powered(self) -> None:
        """Save the operand of a power, which autocast runs in fp32 (as all that follows it)."""
        if self.ctx.autocast and self.dtype is not DType.FP32:
            self.keep("fp32", DType.FP32)
            self.dtype = DType.FP32
        else:
            self.saves.append(self.source)


def _keeps_input(a: _Activation) -> None:
    """GELU (exact or tanh) and SiLU as one ATen kernel: the input."""
    a.saves.append(a.source)


def _gelu_new(a: _Activation) -> None:
    """``0.5 x (1 + tanh(c (x + 0.044715 x³)))``, op by op (NewGELUActivation).

    pow keeps x, tanh its result, the product both of its factors.
    """
    half = a.dtype
    a.keep_powered()
    a.keep("tanh")
    a.keep("one_plus_tanh")
    a.keep("half_x", half)


def _gelu_fast(a: _Activation) -> None:
    """``0.5 x (1 + tanh(x c (1 + 0.044715 x x)))``, op by op (FastGELUActivation): 7 tensors."""
    a.saves.append(a.source)
    for what in ("scaled_x", "poly_x", "poly", "tanh", "one_plus_tanh", "half_x"):
        a.keep(what)


def _quick_gelu(a: _Activation) -> None:
    """``x sigmoid(1.702 x)`` (QuickGELUActivation): both factors; sigmoid keeps its result."""
    a.saves.append(a.source)
    a.keep("sigmoid")


def _relu(a: _Activation) -> None:
    """ReLU keeps its result."""
    a.keeps_result = True


def _relu2(a: _Activation) -> None:
    """``square(relu(x))`` (ReLUSquaredActivation): relu and square share what they keep."""
    a.keep("relu")
    if a.ctx.autocast and a.dtype is not DType.FP32:
        a.keep("relu_fp32", DType.FP32)
        a.dtype = DType.FP32


_ACTIVATIONS: dict[str, Callable[[_Activation], None]] = {
    "gelu": _keeps_input,
    "gelu_tanh": _keeps_input,
    "silu": _keeps_input,
    "gelu_new": _gelu_new,
    "gelu_fast": _gelu_fast,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "relu2": _relu2,
}


def activate(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    shape: Iterable[Expr],
    *,
    group: str = GROUP,
    modules: Iterable[str] = MODULE,
) -> str:
    """Append the model's activation function on a part of ``source`` of ``shape``."""
    rule = _ACTIVATIONS.get(ctx.model.activation)
    if rule is None:
        raise SpecError(
            f"activation {ctx.model.activation} of {ctx.model.name} is modelled only in experts",
            "use another activation, or --framework paper",
        )
    dims = tuple(shape)
    a = _Activation(g, ctx, name, source, dims, g.dtype(source), [], [])
    rule(a)
    out = g.tensor(f"{name}_out", dims, a.dtype)
    saves = [*a.saves, out] if a.keeps_result else a.saves
    g.op(
        name, "activation", group, [source], [out, *a.made], saves=saves, modules=modules,
        source="transformers/activations.py",
    )  # fmt: skip
    return out


def product(
    g: GraphBuilder,
    name: str,
    left: str,
    right: str,
    shape: Iterable[Expr],
    *,
    group: str = GROUP,
    modules: Iterable[str] = MODULE,
) -> str:
    """Append an elementwise product, which keeps both factors; return it."""
    out = g.tensor(f"{name}_out", tuple(shape), promoted(g.dtype(left), g.dtype(right)))
    inputs = list(dict.fromkeys([left, right]))
    g.op(name, "multiply", group, inputs, [out], saves=inputs, modules=modules)
    return out


def feed_forward(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    *,
    prefix: str = "",
    width: Expr | None = None,
    bias: bool | None = None,
    modules: Iterable[str] = MODULE,
) -> str:
    """Append projections and activation of ``source``; return the branch, before dropout.

    With a gate, ``down(act(gate(x)) * up(x))``. Where gate and up are one projection their halves
    are views of it, so that the whole output stays for the activation's input.
    """
    model = ctx.model
    wide = ctx.ffn_whole if width is None else width
    biased = model.mlp_bias if bias is None else bias
    rows = (ctx.b, ctx.s)
    hidden = (*rows, wide)

    def project(name: str, outside: Expr) -> str:
        return linear(
            g, ctx, f"{prefix}{name}", GROUP, source,
            inside=ctx.h, outside=outside, bias=biased, modules=modules,
        )  # fmt: skip

    if not model.gated:
        up = project("fc1", wide)
        active = activate(g, ctx, f"{prefix}activation", up, hidden, modules=modules)
    else:
        packed = model.packed_gate
        gate = project("gate_up", wide * 2) if packed else project("gate", wide)
        active = activate(g, ctx, f"{prefix}activation", gate, hidden, modules=modules)
        up = gate if packed else project("up", wide)
        active = product(g, f"{prefix}gated", active, up, hidden, modules=modules)
    if ctx.workload.dropout and model.activation_dropout > 0:
        active = dropout(g, f"{prefix}activation_dropout", GROUP, active, modules=modules)
    return linear(
        g, ctx, f"{prefix}fc2", GROUP, active,
        inside=wide, outside=ctx.h, bias=biased, modules=modules,
    )  # fmt: skip
