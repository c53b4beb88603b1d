"""What a chunked state-space scan costs, whoever runs it (Dao and Gu 2024)."""

from __future__ import annotations

from typing import NamedTuple

from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType
from actcalc.specs import Mamba


class ScanCost(NamedTuple):
    """Forward FLOPs, and bytes that kernels make and drop in each direction."""

    flops: Expr
    forward_scratch: Expr
    backward_scratch: Expr


def scan_cost(ctx: Context, spec: Mamba, inner: Expr) -> ScanCost:
    """The cost of convolution and scan on one rank (mamba_ssm ops/triton/ssd_combined.py).

    FLOPs are those of its matrix products: C·B of each group and chunk, and for each head the
    product with x, the states of the chunks and what they add to the output. Backward makes
    convolution and states again, fp32 gradients of the states, then both in 16 bits.
    """
    heads, state, groups = (symbol(letter) for letter in "HNG")
    t, tokens, chunk = ctx.t, ctx.tokens, ONE * spec.chunk
    convolved = inner + groups * state * 2 / t
    # Bytes per token of what the kernels make and drop; states are one per chunk.
    states = inner * state / spec.chunk
    item, fp32 = ctx.act.itemsize, DType.FP32.itemsize
    small = heads / t * fp32 * 2 + groups / t * chunk * fp32
    forward = convolved * item + small + states * (fp32 + item)
    backward = convolved * item + small + states * (2 * fp32 + 2 * item)
    flops = tokens * (groups * state / t * chunk * 2 + inner * chunk * 2 + inner * state * 4)
    return ScanCost(flops, tokens * forward, tokens * backward)
