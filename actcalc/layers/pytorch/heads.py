"""Queries, keys and values as PyTorch sees them: a storage, and how its heads lie in memory.

Whether a product, a cache or an attention kernel reads a tensor in place or copies it depends on
its strides. Two facts decide: the order of the dimensions (``token``: batch, sequence, head,
width; ``head``: batch, head, sequence, width) and whether it is a slice of a larger storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.specs import LayerKind

GROUP = "attention"
MODULE = ("attention",)
CORE = ("core_attn", "attention")

Order = Literal["token", "head"]


@dataclass(frozen=True, slots=True)
class Heads:
    """One of q, k, v: its storage, heads and width, and its layout in memory.

    ``storage`` is what stays alive when autograd saves the tensor; ``count`` the number of heads;
    ``rows`` the tokens of another sequence (keys of an encoder's output), None for this one's.
    """

    storage: str
    heads: Expr
    count: int
    width: Expr
    order: Order = "token"
    sliced: bool = False
    rows: Expr | None = None

    def shape(self, ctx: Context) -> tuple[Expr, ...]:
        """Dimensions in the order of memory."""
        rows = self.rows or ctx.s
        if self.order == "token":
            return (ctx.b, rows, self.heads, self.width)
        return (ctx.b, self.heads, rows, self.width)


def kept_name(kind: LayerKind, part: str) -> str:
    """What a layer's keys or values are called: those that later layers read, by their kind."""
    return part if kind.keys == "own" else f"{part}_of_{kind.attention}"


def copied(
    g: GraphBuilder,
    ctx: Context,
    x: Heads,
    name: str,
    *,
    dtype: DType | None = None,
    order: Order | None = None,
) -> Heads:
    """Append a copy of ``x`` into a storage of its own; return it."""
    made = replace(x, order=order or x.order, sliced=False)
    storage = g.tensor(name, made.shape(ctx), dtype or g.dtype(x.storage))
    g.op(name, "copy", GROUP, [x.storage], [storage], modules=CORE)
    return replace(made, storage=storage)


def in_act(g: GraphBuilder, ctx: Context, x: Heads, name: str) -> Heads:
    """``x`` in the element type of matrix products: autocast copies whatever is wider."""
    return in_type(g, ctx, x, name, ctx.act)


def in_type(g: GraphBuilder, ctx: Context, x: Heads, name: str, dtype: DType) -> Heads:
    """``x`` in an element type, copied if it has another."""
    if g.dtype(x.storage) is dtype:
        return x
    return copied(g, ctx, x, f"{name}_cast", dtype=dtype)


def repeated(
    g: GraphBuilder,
    ctx: Context,
    x: Heads,
    like: Heads,
    name: str,
    *,
    whole: bool = False,
    single: bool = False,
) -> Heads:
    """``x`` with its heads repeated to those of ``like`` (``repeat_kv``).

    Repeating expands and reshapes. That copies, but for a single head, whose repeats stay a view
    of stride 0; ``whole`` says that the shape is that of all ranks' heads (a DTensor's), ``single``
    that a single head is copied too (``repeat_interleave``).
    """
    if x.count == like.count:
        return x
    if x.count == 1 and not single and not (whole and ctx.tp):
        return replace(x, heads=like.heads, count=like.count, sliced=True)
    wide = replace(x, heads=like.heads, count=like.count)
    return copied(g, ctx, wide, f"{name}_repeated", order="head")


def merged(g: GraphBuilder, ctx: Context, x: Heads, name: str) -> Heads:
    """``x`` as a batched product reads it, with batch and heads as one dimension.

    ``torch.matmul`` reshapes to (batch · heads, rows, width): a view for one sequence, one head,
    or a storage in head order, else a copy.
    """
    one = ctx.workload.micro_batch == 1 or x.count == 1
    if one or (x.order == "head" and not x.sliced):
        return x
    return copied(g, ctx, x, f"{name}_merged", order="head")
