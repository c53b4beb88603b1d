"""Lightning attention: linear attention whose states fade at a fixed rate (modeling_minimax.py).

Tokens are taken block by block: scores within a block, and a state that carries what came before.
It is written in PyTorch, op by op, so that every product keeps its factors.
"""

from __future__ import annotations

from typing import NamedTuple

from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.pytorch.attention import gated_output
from actcalc.layers.pytorch.linear import linear
from actcalc.specs import Linear

GROUP = "attention"
MODULE = ("attention",)


class Blocks(NamedTuple):
    """How many tokens each block of a sequence has."""

    sizes: tuple[int, ...]

    @property
    def scored(self) -> int:
        """Pairs of a query and a key within a block."""
        return sum(size * size for size in self.sizes)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(self.sizes)

    @property
    def later(self) -> int:
        """Tokens that see a state of tokens before their block."""
        return self.tokens - self.sizes[0]

    @property
    def passed(self) -> int:
        """Tokens whose block has another after it, which reads what they write."""
        return self.tokens - self.sizes[-1]


def blocks_of(ctx: Context, spec: Linear) -> Blocks:
    """The blocks of this run's sequences."""
    whole, rest = divmod(ctx.length, spec.block)
    return Blocks((spec.block,) * whole + ((rest,) if rest else ()))


def lightning_attention(g: GraphBuilder, ctx: Context, spec: Linear, source: str) -> str:
    """Append lightning attention of ``source``; return the branch."""
    width = symbol("H") * symbol("P")
    projected = linear(
        g, ctx, "qkv", GROUP, source, inside=ctx.h, outside=width * 3, modules=MODULE
    )
    active = g.tensor("qkv_active", g.shape(projected), g.dtype(projected))
    g.op(
        "qkv_activation", "activation", GROUP, [projected], [active], saves=[projected],
        modules=MODULE,
    )  # fmt: skip
    context = _mixed(g, ctx, blocks_of(ctx, spec), active)
    normed = norm(g, ctx, "context_norm", context, group=GROUP, modules=MODULE)
    gate = linear(g, ctx, "output_gate", GROUP, source, inside=ctx.h, outside=width, modules=MODULE)
    gated = gated_output(g, ctx, normed, gate)
    return linear(g, ctx, "out", GROUP, gated, inside=width, outside=ctx.h, modules=MODULE)


def _mixed(g: GraphBuilder, ctx: Context, blocks: Blocks, active: str) -> str:
    """Append the products of all blocks.

    A product of several sequences copies the parts of queries, keys and values that it reads, for
    they are slices; of one sequence they stay views. The first block's state is zero and has no
    gradient; nobody reads what the last one writes.
    """
    heads, width = symbol("H"), symbol("P")

    def made(name: str, *dims: Expr | int) -> str:
        return g.tensor(name, (ctx.b, heads, *(Expr.of(dim) for dim in dims)), ctx.act)

    kept = [
        made("scores", blocks.scored),
        made("states", len(blocks.sizes), width, width),
    ]
    if blocks.later:
        kept.append(made("q_faded", blocks.later, width))
        kept.append(made("k_faded", blocks.passed, width))
    if ctx.workload.micro_batch > 1 and ctx.model.heads > 1:
        kept += [made(f"{name}_blocks", blocks.tokens, width) for name in "qkv"]
        if blocks.passed:
            kept.append(made("v_written", blocks.passed, width))
        whole = []
    else:
        whole = [active]
    if len(blocks.sizes) > 2:
        kept.append(g.tensor("fading", (ONE * (len(blocks.sizes) - 2), heads), ctx.residual))
    out = g.tensor("context", (ctx.b, ctx.s, heads * width), ctx.act)
    each = ctx.b * heads * width * 2
    flops = each * (2 * blocks.scored) + each * width * (2 * blocks.tokens)
    gradients = each * (4 * blocks.scored) + each * width * (
        blocks.sizes[0] + 2 * blocks.later + 2 * blocks.passed
    )
    g.op(
        "lightning", "scan", GROUP, [active], [out, *kept], saves=[*whole, *kept], flops=flops,
        backward_flops=gradients, modules=MODULE, kernel="blocks in PyTorch",
        source="models/minimax/modeling_minimax.py MiniMaxLightningAttention",
    )  # fmt: skip
    return out
