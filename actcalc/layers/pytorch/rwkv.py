"""RWKV-4's layer: time mix in place of attention, channel mix in place of the feed-forward.

Both read each token mixed with the one before, by learned shares (Peng et al. 2023,
arXiv:2305.13048). All is PyTorch, op by op (modeling_rwkv.py), but the recurrence: the autograd
function ``RwkvLinearAttention`` around the CUDA kernels of kernels-community/rwkv, whose
``save_for_backward`` says what it keeps. Without these kernels transformers loops over tokens in
PyTorch and keeps much more; that is not described.
"""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.ops import residual_add
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import activate, product
from actcalc.specs import Linear

_TIME = "attention"
_CHANNEL = "ffn"
_MODULES = {_TIME: ("attention",), _CHANNEL: ("mlp",)}
_STEP = 23
"""Operations per token and channel of one step of the recurrence (wkv_cuda.cu kernel_forward:
four exponentials, two maxima, a division, sums and products)."""
_STEP_BACK = 60
"""The same of both sweeps of its backward (kernel_backward): 34 forwards in time, 26 back."""
_WARP = 32
"""Channels that a block of threads has, or fewer (cuda_forward)."""


def time_mix(g: GraphBuilder, ctx: Context, spec: Linear, source: str) -> str:
    """Append RWKV's time mix of ``source``; return the branch.

    Raises ``SpecError`` where the recurrence's kernel does not take the run.
    """
    _check(ctx, spec)
    width = symbol("P")
    key, value, receptance = _mixed(g, ctx, _TIME, source, ("key", "value", "receptance"))
    key = _project(g, ctx, _TIME, "key", key, ctx.h, width)
    value = _project(g, ctx, _TIME, "value", value, ctx.h, width)
    gate = _receptance(g, ctx, _TIME, receptance, width)
    out = _recurrence(g, ctx, key, value)
    gated = product(
        g, "time_gated", gate, out, (ctx.b, ctx.s, width), group=_TIME, modules=_MODULES[_TIME]
    )
    return _project(g, ctx, _TIME, "out", gated, width, ctx.h)


def channel_mix(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append RWKV's channel mix of ``source``; return the branch.

    A receptance gates ``value(relu(key)²)``.
    """
    model = ctx.model
    if model.gated or model.activation != "relu2":
        gate = " with a gate" if model.gated else ""
        raise SpecError(
            f"RWKV's channel mix squares a ReLU, {model.name} has {model.activation}{gate}",
            "set activation to relu2, without gated",
        )
    key, receptance = _mixed(g, ctx, _CHANNEL, source, ("key", "receptance"))
    up = _project(g, ctx, _CHANNEL, "fc1", key, ctx.h, ctx.ffn)
    active = activate(g, ctx, "activation", up, (ctx.b, ctx.s, ctx.ffn))
    down = _project(g, ctx, _CHANNEL, "fc2", active, ctx.ffn, ctx.h)
    gate = _receptance(g, ctx, _CHANNEL, receptance, ctx.h)
    return product(g, "channel_gated", gate, down, (ctx.b, ctx.s, ctx.h))


def _check(ctx: Context, spec: Linear) -> None:
    """Raise ``SpecError`` for runs that the kernel refuses.

    ``RwkvLinearAttention.forward`` checks length and channels, wkv_op.cpp the type of
    ``time_first``, which autocast leaves in fp32; a single token takes another path.
    """
    ctx.kernel("wkv")
    name = ctx.model.name
    if ctx.length == 1 or ctx.length > spec.block:
        raise SpecError(
            f"RWKV's kernel takes 2 to {spec.block} tokens of {name}, not {ctx.length}",
            f"use a --seq of at most {spec.block}, or a longer context_length (linear.block)",
        )
    channels, batch = spec.value_dim, ctx.workload.micro_batch
    if batch * channels % min(channels, _WARP):
        raise SpecError(
            f"RWKV's kernel takes channels in blocks of {_WARP}: {batch} sequences of {channels} "
            f"({name}) do not fill them",
            f"use a width divisible by {_WARP}",
        )
    if ctx.autocast and ctx.act is DType.BF16:
        raise SpecError(
            f"RWKV's kernel in bf16 takes no time_first in fp32, as autocast leaves it ({name})",
            "use --precision bf16, fp32 or amp-fp16",
        )


def _named(group: str, name: str) -> str:
    """A name that both mixes have."""
    return f"{'time' if group == _TIME else 'channel'}_{name}"


def _mixed(
    g: GraphBuilder, ctx: Context, group: str, source: str, names: Iterable[str]
) -> list[str]:
    """Append each token's mixtures with the one before: ``x · share + shifted · (1 - share)``.

    The products keep the input, what is shifted, and the rest of each share.
    """
    shape, dtype = g.shape(source), g.dtype(source)
    share, modules = (ONE, ONE, ctx.h), _MODULES[group]
    shifted = g.tensor(_named(group, "shifted"), shape, dtype)
    g.op(_named(group, "shift"), "copy", group, [source], [shifted], modules=modules)
    mixed = []
    for name in names:
        label = _named(group, f"mix_{name}")
        now, before = (g.tensor(f"{label}_{what}", shape, dtype) for what in ("now", "before"))
        rest = g.tensor(f"{label}_rest", share, ctx.residual)
        g.op(
            f"{label}_products", "multiply", group, [source, shifted], [now, before, rest],
            saves=[source, shifted, rest], modules=modules, weights=[Weight(label, share)],
        )  # fmt: skip
        mixed.append(residual_add(g, label, group, now, before, f"{label}_out"))
    return mixed


def _project(
    g: GraphBuilder, ctx: Context, group: str, name: str, source: str, inside: Expr, outside: Expr
) -> str:
    return linear(
        g, ctx, name, group, source, inside=inside, outside=outside, modules=_MODULES[group]
    )


def _receptance(g: GraphBuilder, ctx: Context, group: str, source: str, width: Expr) -> str:
    """Append the sigmoid of a projection, which keeps its result."""
    name = _named(group, "receptance")
    projected = _project(g, ctx, group, name, source, ctx.h, width)
    out = g.tensor(f"{name}_gate", g.shape(projected), g.dtype(projected))
    g.op(
        f"{name}_gate", "activation", group, [projected], [out], saves=[out],
        modules=_MODULES[group],
    )  # fmt: skip
    return out


def _recurrence(g: GraphBuilder, ctx: Context, key: str, value: str) -> str:
    """Append the recurrence: a state per channel, one token after another.

    It keeps ``-exp(time_decay)`` in fp32, ``time_first``, keys, values and its output. There is no
    kernel in fp16: all of these are cast to fp32, and the output is cast back. Its time is that of
    its bytes and operations; how long one sequence takes token by token is not in it.
    """
    width, shape = symbol("P"), g.shape(key)
    decay = g.tensor("time_decay_rate", (width,), DType.FP32)
    out = g.tensor("wkv", shape, ctx.act)
    made, kept, scratch = [decay], [decay, key, value, out], Expr.of(0)
    if ctx.act is DType.FP16:
        made += [g.tensor(f"{name}_fp32", shape, DType.FP32) for name in ("key", "value", "wkv")]
        if ctx.residual is DType.FP16:
            made.append(g.tensor("time_first_fp32", (width,), DType.FP32))
        kept = made
        # Gradients of output, keys and values before they are cast back.
        scratch = ctx.tokens * width * (3 * DType.FP32.itemsize)
    g.op(
        "wkv", "scan", _TIME, [key, value], [out, *made], saves=kept,
        flops=ctx.tokens * width * _STEP, backward_flops=ctx.tokens * width * _STEP_BACK,
        weights=[Weight("time_decay", (width,)), Weight("time_first", (width,))],
        backward_scratch=scratch, modules=_MODULES[_TIME], kernel="wkv",
        source="models/rwkv/modeling_rwkv.py RwkvLinearAttention",
    )  # fmt: skip
    return out
