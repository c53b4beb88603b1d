"""Activation functions: what each keeps for backward, by the kernels that run it. One table.

A rule appends what one nonlinearity makes and keeps (ATen's autograd formulas); gates and routing
weights that multiply its result are the builders' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder


@dataclass
class Activation:
    """An activation being appended: its input, and what it makes and keeps so far.

    ``dtype`` becomes that of the result.
    """

    g: GraphBuilder
    ctx: Context
    name: str
    source: str
    shape: tuple[Expr, ...]
    dtype: DType
    made: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    keeps_result: bool = False
    both: bool = False
    """It ends with a product of two tensors that both need gradients: one more in backward."""

    def make(self, what: str, dtype: DType | None = None) -> str:
        """Make a tensor of the result's shape."""
        name = self.g.tensor(f"{self.name}_{what}", self.shape, dtype or self.dtype)
        self.made.append(name)
        return name

    def keep(self, what: str, dtype: DType | None = None) -> None:
        """Make a tensor of the result's shape and save it."""
        self.saves.append(self.make(what, dtype))

    def keep_powered(self) -> None:
        """Save the operand of a power, which autocast runs in fp32 (as all that follows it)."""
        if self.ctx.autocast and self.dtype is not DType.FP32:
            self.keep("fp32", DType.FP32)
            self.dtype = DType.FP32
        else:
            self.saves.append(self.source)


Rule = Callable[[Activation], None]


def _keeps_input(a: Activation) -> None:
    """One kernel that keeps its input: GELU (exact or tanh) and SiLU of ATen, fused kernels."""
    a.saves.append(a.source)


def _keeps_result(a: Activation) -> None:
    """ReLU keeps its result instead of its input (ATen ThresholdBackward)."""
    a.keeps_result = True


def _gelu_new(a: Activation) -> None:
    """``0.5 x (1 + tanh(c (x + 0.044715 x³)))``, op by op (NewGELUActivation).

    pow keeps x, tanh its result, the product both of its factors.
    """
    half = a.dtype
    a.keep_powered()
    a.keep("tanh")
    a.keep("one_plus_tanh")
    a.keep("half_x", half)
    a.both = True


def _gelu_fast(a: Activation) -> None:
    """``0.5 x (1 + tanh(x c (1 + 0.044715 x x)))``, op by op (FastGELUActivation): 7 tensors."""
    a.saves.append(a.source)
    for what in ("scaled_x", "poly_x", "poly", "tanh", "one_plus_tanh", "half_x"):
        a.keep(what)
    a.both = True


def _quick_gelu(a: Activation) -> None:
    """``x sigmoid(1.702 x)``: both factors; sigmoid keeps its result."""
    a.saves.append(a.source)
    a.keep("sigmoid")
    a.both = True


def _relu2(a: Activation) -> None:
    """``square(relu(x))``: relu's result, which relu and square share."""
    a.keep("relu")
    if a.ctx.autocast and a.dtype is not DType.FP32:
        a.keep("relu_fp32", DType.FP32)
        a.dtype = DType.FP32


FUSED: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("gelu", "gelu_tanh", "gelu_new", "gelu_fast", "silu", "quick_gelu", "swiglu_oai"),
        _keeps_input,
    ),
    "relu": _keeps_result,
    "relu2": _keeps_result,
}
"""The whole function as one kernel (Korthikanti et al. 2022 §4.1: the nonlinearity's input)."""

OP_BY_OP: Mapping[str, Rule] = {
    **dict.fromkeys(("gelu", "gelu_tanh", "gelu_new", "gelu_fast", "silu"), _keeps_input),
    "quick_gelu": _quick_gelu,
    "relu": _keeps_result,
    "relu2": _relu2,
}
"""ATen's functions; every GELU is one of them (Megatron-Core's unfused feed-forward)."""

TRANSFORMERS: Mapping[str, Rule] = {**OP_BY_OP, "gelu_new": _gelu_new, "gelu_fast": _gelu_fast}
"""transformers/activations.py, where two GELUs are written out in Python."""
