"""Ops that every framework has: products with a weight, dropout, additions, soft caps."""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.graph import Comm, DType, GraphBuilder, Weight

EMBEDDING_SCOPE = "embedding"
"""Scope of the token table, which a tied output head shares."""


def matmul(
    g: GraphBuilder,
    name: str,
    group: str,
    source: str,
    outputs: Iterable[str],
    *,
    rows: Expr,
    inside: Expr,
    outside: Expr,
    bias: bool = False,
    saves: Iterable[str] = (),
    expert: bool = False,
    scope: str = "",
    comm: Iterable[Comm] = (),
    backward_comm: Iterable[Comm] = (),
    modules: Iterable[str] = (),
) -> None:
    """Append ``outputs = source · W`` with W outside × inside.

    It saves its input for the weight's gradient, unless ``saves`` names copies of it. FLOPs are
    2 · rows · inside · outside.
    """
    weights = [Weight(f"{name}.weight", (outside, inside), expert, scope)]
    if bias:
        weights.append(Weight(f"{name}.bias", (outside,), expert, scope and f"{scope}.bias"))
    g.op(
        name, "linear", group, [source], outputs,
        saves=tuple(saves) or [source], flops=rows * inside * outside * 2, weights=weights,
        comm=comm, backward_comm=backward_comm, modules=modules,
    )  # fmt: skip


def dropout(
    g: GraphBuilder, name: str, group: str, source: str, *, modules: Iterable[str] = ()
) -> str:
    """Append a dropout that keeps a one-byte mask; return the dropped tensor's name."""
    shape = g.shape(source)
    mask = g.tensor(f"{name}_mask", shape, DType.BOOL)
    out = g.tensor(f"{name}_out", shape, g.dtype(source))
    g.op(name, "dropout", group, [source], [out, mask], saves=[mask], modules=modules)
    return out


def residual_add(g: GraphBuilder, name: str, group: str, branch: str, stream: str, out: str) -> str:
    """Append ``out = branch + stream``, in the wider of their types; an addition keeps nothing."""
    made = g.tensor(out, g.shape(stream), promoted(g.dtype(branch), g.dtype(stream)))
    g.op(name, "add", group, [branch, stream], [made])
    return made


def softcap(
    g: GraphBuilder, name: str, group: str, source: str, out: str, modules: Iterable[str] = ()
) -> str:
    """Append ``cap · tanh(source / cap)``: tanh keeps its output (ATen TanhBackward)."""
    capped = g.tensor(out, g.shape(source), g.dtype(source))
    g.op(name, "activation", group, [source], [capped], saves=[capped], modules=modules)
    return capped


def promoted(*dtypes: DType) -> DType:
    """The element type of an operation on floating-point tensors of these types."""
    return DType.FP32 if DType.FP32 in dtypes else dtypes[0]
