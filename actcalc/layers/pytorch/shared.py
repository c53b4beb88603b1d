"""A block of attention and feed-forward whose weights several layers share (modeling_zamba2.py).

It reads the stream and the embedding's output side by side. Each layer adds products of low rank to
its projections, and hands what it gives through a projection of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, Operand
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import residual_add
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.pytorch.attention import close
from actcalc.layers.pytorch.core import attend
from actcalc.layers.pytorch.heads import Heads
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import activate, product
from actcalc.layers.pytorch.rotary import rotate
from actcalc.layers.pytorch.scores import Core
from actcalc.specs import LayerKind, Shared

_ATTENTION = ("attention", ("attention",))
_FFN = ("ffn", ("mlp",))
Part = tuple[str, tuple[str, ...]]
"""Group and recompute modules of a part's ops."""


class _Shared(Scoped):
    """Appends ops whose weights every layer of a block shares.

    So are the casts of them that autocast makes and keeps (torch/csrc autocast: a weight is cast
    once in a forward pass).
    """

    def __init__(self, parent: GraphBuilder, block: int) -> None:
        super().__init__(parent, "block_")
        self._block = block

    def tensor(self, name: str, shape: Iterable[Operand], dtype: DType) -> str:
        """Declare a tensor under the prefix, a weight's cast for all layers of the block."""
        if name.endswith("_weight"):
            return self.shared(f"block{self._block}_{name}", shape, dtype)
        return super().tensor(name, shape, dtype)

    def op(self, name: str, *args: Any, weights: Iterable[Weight] = (), **kwargs: Any) -> None:
        """Append an op under the prefix; its weights are counted once for the block."""
        scoped = [replace(w, scope=f"block {self._block} {w.name}") for w in weights]
        super().op(name, *args, weights=scoped, **kwargs)


def shared_block(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Append the block that a layer shares; return what its own projection makes of it."""
    spec = ctx.model.shared
    if spec is None:
        raise SpecError(f"{ctx.model.name} has no blocks that layers share", "describe shared")
    block = _Shared(g, kind.block)
    embedded = g.shared("embedded", g.shape(stream), ctx.stream)
    both = block.tensor("in", (ctx.b, ctx.s, ctx.h * 2), g.dtype(stream))
    block.op("in", "copy", "attention", [stream, embedded], [both])
    attended = _attention(g, block, ctx, kind, norm(block, ctx, "norm1", both))
    fed = _feed_forward(g, block, ctx, spec, norm(block, ctx, "norm2", attended))
    return linear(g, ctx, "from_block", "ffn", fed, inside=ctx.h, outside=ctx.h)


def _projected(
    g: GraphBuilder,
    block: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    outside: Expr,
    *,
    part: Part,
    rank: int,
    bias: bool = False,
) -> str:
    """Append a block's projection, and the layer's own product of low rank if it has one."""
    group, modules = part
    inside = g.shape(source)[-1]
    out = linear(
        block, ctx, name, group, source, inside=inside, outside=outside, bias=bias,
        modules=modules,
    )  # fmt: skip
    if not rank:
        return out
    down = linear(
        g, ctx, f"{name}_down", group, source, inside=inside, outside=ONE * rank, modules=modules
    )
    up = linear(
        g, ctx, f"{name}_up", group, down, inside=ONE * rank, outside=outside, modules=modules
    )
    return residual_add(g, f"{name}_add", group, up, out, f"{name}_sum")


def _attention(
    g: GraphBuilder, block: GraphBuilder, ctx: Context, kind: LayerKind, source: str
) -> str:
    """Append attention of twice the hidden width, whose output has the hidden width."""
    spec, model = ctx.model.shared, ctx.model
    rank = spec.rank if spec and spec.in_attention else 0
    q, k, v = (
        _projected(g, block, ctx, name, source, width, part=_ATTENTION, rank=rank)
        for name, width in (("q", ctx.q_width), ("k", ctx.kv_width), ("v", ctx.v_width))
    )
    queries = Heads(q, ctx.heads, model.heads, ctx.d)
    keys, values = (Heads(x, ctx.kv_heads, model.kv_heads, ctx.d) for x in (k, v))
    if kind.rotary:
        queries, keys = rotate(block, ctx, kind, queries, keys)
    core = Core(
        queries, keys, values, kind, causal=True, keys=ctx.s_keys, query_width=model.head_dim,
        value_width=model.v_dim,
    )  # fmt: skip
    return close(block, ctx, attend(block, ctx, core))


def _feed_forward(
    g: GraphBuilder, block: GraphBuilder, ctx: Context, spec: Shared, source: str
) -> str:
    """Append a gated feed-forward of one projection, to which the layer adds its own."""
    bias = ctx.model.mlp_bias
    both = _projected(
        g, block, ctx, "gate_up", source, ctx.ffn * 2, part=_FFN, rank=spec.rank, bias=bias
    )
    shape = (ctx.b, ctx.s, ctx.ffn)
    active = activate(block, ctx, "activation", both, shape)
    gated = product(block, "gated", active, both, shape)
    return linear(
        block, ctx, "fc2", "ffn", gated, inside=ctx.ffn, outside=ctx.h, bias=bias, modules=_FFN[1]
    )
