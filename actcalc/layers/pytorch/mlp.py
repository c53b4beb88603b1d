"""The dense feed-forward of transformers' modelling code, and its activation functions."""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.errors import SpecError
from actcalc.layers.core.activation import TRANSFORMERS, Activation
from actcalc.layers.core.algebra import ONE, Expr
from actcalc.layers.core.algebra import product as elements
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import GraphBuilder
from actcalc.layers.core.ops import dropout, promoted
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.parallel import scattered

GROUP = "ffn"
MODULE = ("mlp",)


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
    rule = TRANSFORMERS.get(ctx.model.activation)
    if rule is None:
        raise SpecError(
            f"activation {ctx.model.activation} of {ctx.model.name} is modelled only in experts",
            "use another activation, or --framework paper",
        )
    dims = tuple(shape)
    a = Activation(g, ctx, name, source, dims, g.dtype(source))
    rule(a)
    out = g.tensor(f"{name}_out", dims, a.dtype)
    saves = [*a.saves, out] if a.keeps_result else a.saves
    g.op(
        name, "activation", group, [source], [out, *a.made], saves=saves, modules=modules,
        backward_scratch=elements(dims) * a.dtype.itemsize if a.both else 0,
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
    sparse: bool = False,
) -> str:
    """Append a feed-forward of ``source``; return the branch, before dropout."""
    branch = projected(
        g, ctx, source, prefix=prefix, width=width, bias=bias, modules=modules, sparse=sparse
    )
    return scattered(g, ctx, f"{prefix}mlp", GROUP, branch, modules)


def projected(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    *,
    prefix: str = "",
    width: Expr | None = None,
    bias: bool | None = None,
    modules: Iterable[str] = MODULE,
    sparse: bool = False,
) -> str:
    """Append projections and activation of ``source``; return the rank's part of the sum.

    With a gate, ``down(act(gate(x)) * up(x))``. Where gate and up are one projection their halves
    are views of it, so that the whole output stays for the activation's input.
    """
    model = ctx.model
    wide = ctx.ffn if width is None else width
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
        up = ""
        if sparse:
            gate = _cut_off(g, ctx, gate, modules)
        if model.clamped_gate:
            gate, up = clamped(g, prefix, [gate, project("up", wide)], hidden, modules)
        active = activate(g, ctx, f"{prefix}activation", gate, hidden, modules=modules)
        up = up or (gate if packed else project("up", wide))
        active = product(g, f"{prefix}gated", active, up, hidden, modules=modules)
    if ctx.workload.dropout and model.activation_dropout > 0:
        active = dropout(g, f"{prefix}activation_dropout", GROUP, active, modules=modules)
    return linear(
        g, ctx, f"{prefix}fc2", GROUP, active,
        inside=wide, outside=ctx.h, bias=biased, modules=modules,
    )  # fmt: skip


def _cut_off(g: GraphBuilder, ctx: Context, gate: str, modules: Iterable[str]) -> str:
    """Append what sets gates to zero that lie below a multiple of their deviation, and keeps the
    gates, the deviation, its multiple and what remains (Gemma3nTextMLP._gaussian_topk)."""
    shape, dtype = g.shape(gate), g.dtype(gate)
    deviation = g.tensor("gate_deviation", (*shape[:-1], ONE), dtype)
    multiple = g.tensor("gate_multiple", (), dtype)
    out = g.tensor("gate_cut", shape, dtype)
    g.op(
        "gate_cut", "activation", GROUP, [gate], [out, deviation, multiple],
        saves=[gate, deviation, multiple, out], modules=modules,
    )  # fmt: skip
    return out


def clamped(
    g: GraphBuilder,
    prefix: str,
    sources: list[str],
    shape: Iterable[Expr],
    modules: Iterable[str] = MODULE,
) -> tuple[str, str]:
    """Append the clamps of gate and up, which keep what they read (DeepseekV4MLP)."""
    dims = tuple(shape)
    gate, up = (
        g.tensor(f"{prefix}{name}_clamped", dims, g.dtype(sources[0])) for name in ("gate", "up")
    )
    g.op(f"{prefix}clamp", "activation", GROUP, sources, [gate, up], saves=sources, modules=modules)
    return gate, up
