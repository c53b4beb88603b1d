"""Attention cores of Megatron's layers and of the paper: what each keeps of q, k, v and scores.

A tensor is one storage. Where a framework hands on a view (v as a slice of the packed projection)
the op that saves the view saves the whole storage, and so does the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder
from actcalc.layers.core.ops import dropout, softcap

GROUP = "attention"
MODULE = ("attention",)
_CORE = ("core_attn", "attention")


@dataclass(frozen=True)
class CoreInput:
    """What an attention core reads: storages, widths on one rank, and how far keys reach.

    ``views`` names those of q, k, v whose storage is larger than they are (or strided), so that a
    kernel that wants them contiguous must copy. ``repeats`` says that k and v have fewer heads
    than q on this rank.
    """

    q: str
    k: str
    v: str
    q_width: Expr
    k_width: Expr
    v_width: Expr
    out_width: Expr
    keys: Expr
    views: frozenset[str] = frozenset()
    repeats: bool = False
    equal_dims: bool = True
    other: Context | None = None
    """The side of an encoder-decoder that keys and values come from, if not the queries'."""
    causal: bool = False
    """A query sees only keys before it."""
    mask: str = ""
    """A mask that the run makes once and hands to every layer."""
    bias: str = ""
    """A learned bias of the scores that every layer of a stack adds."""

    def contiguous(self, name: str) -> bool:
        """Whether the tensor called ``name`` is a storage of its own."""
        return name not in self.views


CoreKernel = Callable[[GraphBuilder, Context, CoreInput], str]


def _qk_flops(ctx: Context, x: CoreInput) -> Expr:
    """FLOPs of QK^T: 2 · tokens · keys · width; causal masking is not discounted (the papers')."""
    return ctx.tokens * x.keys * x.q_width * 2


def _pv_flops(ctx: Context, x: CoreInput) -> Expr:
    """FLOPs of the product of probabilities and values."""
    return ctx.tokens * x.keys * x.out_width * 2


def _scores_shape(ctx: Context, x: CoreInput) -> tuple[Expr, ...]:
    return (ctx.b, ctx.heads, ctx.s, (x.other or ctx).s_keys)


def _scores(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Append QK^T (and a soft cap); return the scores."""
    scores = g.tensor("scores", _scores_shape(ctx, x), ctx.act)
    inputs = list(dict.fromkeys([x.q, x.k]))
    flops = _qk_flops(ctx, x)
    g.op("qk", "core", GROUP, inputs, [scores], saves=inputs, flops=flops, modules=_CORE)
    if ctx.model.attention_softcap:
        return softcap(g, "softcap", GROUP, scores, "scores_capped", _CORE)
    return scores


def _weighted_values(g: GraphBuilder, ctx: Context, x: CoreInput, probs: str) -> str:
    if ctx.attention_dropout:
        probs = dropout(g, "softmax_dropout", GROUP, probs, modules=_CORE)
    context = g.tensor("context", (ctx.s, ctx.b, x.out_width), ctx.act)
    flops = _pv_flops(ctx, x)
    inputs = list(dict.fromkeys([probs, x.v]))
    g.op("pv", "core", GROUP, inputs, [context], saves=inputs, flops=flops, modules=_CORE)
    return context


def _eager_fused(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Scores, fused softmax, dropout and product kept apart: 2 + 1 + 2 B per score.

    The softmax keeps its output, dropout its mask, the product its left operand (Korthikanti et
    al. 2022 §4.1; Megatron-Core fused_softmax). Without dropout the softmax's output is the
    product's operand: one tensor.
    """
    scores = _scores(g, ctx, x)
    probs = g.tensor("probs", _scores_shape(ctx, x), ctx.act)
    g.op(
        "softmax", "softmax", GROUP, [scores], [probs],
        saves=[probs], modules=_CORE, kernel="fused",
    )  # fmt: skip
    return _weighted_values(g, ctx, x, probs)


def _eager_unfused(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Mask and softmax in PyTorch: in fp32 and cast back, 4 + 1 + 2 B per score.

    ``masked_fill`` keeps its mask: made anew in every causal layer unless one is passed in
    (Megatron-Core ``forward_torch_softmax``, ``get_default_causal_mask``).
    """
    scores = _scores(g, ctx, x)
    fp32 = ctx.act is DType.FP32 or ctx.workload.kernels.attention_softmax_in_fp32
    wide = g.tensor("probs_fp32", _scores_shape(ctx, x), DType.FP32) if fp32 else ""
    kept = [wide] if fp32 else []
    inputs, saves, outputs = [scores], list(kept), list(kept)
    if x.mask:
        inputs.append(x.mask)
        saves.append(x.mask)
    elif ctx.workload.padding_mask:
        mask = g.shared("attention_mask", (1, 1, ctx.s_keys, ctx.s_keys), DType.BOOL)
        inputs.append(mask)
        saves.append(mask)
    elif x.causal and ctx.length > 1:
        mask = g.tensor("causal_mask", (ctx.s_keys, ctx.s_keys), DType.BOOL)
        saves.append(mask)
        outputs.append(mask)
    probs = wide
    if not (fp32 and ctx.act is DType.FP32):
        probs = g.tensor("probs", _scores_shape(ctx, x), ctx.act)
        outputs.append(probs)
        if not fp32:
            saves.append(probs)
    g.op("softmax", "softmax", GROUP, inputs, outputs, saves=saves, modules=_CORE)
    return _weighted_values(g, ctx, x, probs)


def _repeated(g: GraphBuilder, ctx: Context, x: CoreInput) -> CoreInput:
    """Copy k and v out to every query head (``repeat_interleave`` in eager attention)."""
    if not x.repeats:
        return x
    wide = (ctx.s, ctx.b, x.q_width)
    k = g.tensor("k_repeated", wide, ctx.act)
    v = g.tensor("v_repeated", (ctx.s, ctx.b, x.out_width), ctx.act)
    inputs = list(dict.fromkeys([x.k, x.v]))
    g.op("repeat_kv", "copy", GROUP, inputs, [k, v], modules=_CORE)
    views = x.views - {x.k, x.v} | ({x.q} & x.views)
    return replace(x, k=k, v=v, k_width=x.q_width, v_width=x.out_width, views=views, repeats=False)


def _merged_query(g: GraphBuilder, ctx: Context, x: CoreInput) -> CoreInput:
    """Copy a strided query whose batch and head dimensions do not merge into one.

    Eager attention reshapes q to (s, b·heads, d). A slice of the packed projection allows that as
    long as its heads are evenly spaced over both dimensions: not with several heads per group
    and several sequences.
    """
    if x.contiguous(x.q) or not x.repeats or ctx.workload.micro_batch == 1:
        return x
    q = g.tensor("q_merged", (ctx.s, ctx.b, x.q_width), ctx.act)
    g.op("merge_q", "copy", GROUP, [x.q], [q], modules=_CORE)
    return replace(x, q=q, views=x.views - {x.q} | ({x.k, x.v} & x.views))


@dataclass(frozen=True)
class SoftmaxLimits:
    """What scores a fused softmax kernel takes: 16 < keys <= ``longest``, keys in ``multiple``s.

    ``counts`` is what must fill whole blocks of the kernel: rows of queries, or batch · heads.
    """

    longest: int
    multiple: int
    counts: Literal["queries", "batches"]


def _why_unfused(ctx: Context, x: CoreInput, limits: SoftmaxLimits) -> str:
    """Why the fused softmax kernel does not take these scores; "" if it does.

    Queries and batch · heads are divisible by 4 in any case; a block of 128 threads handles 4
    rows, 8 up to 128 keys (``is_kernel_available`` and ``get_batch_per_block`` of Megatron-Core's
    and Transformer Engine's fused softmax).
    """
    work, layout = ctx.workload, ctx.layout
    if not work.kernels.masked_softmax_fusion:
        return "masked_softmax_fusion is off"
    if ctx.act is DType.FP32:
        return "activations are fp32"
    keys, queries = (x.other or ctx).length, ctx.length // layout.cp
    batches = work.micro_batch * (ctx.model.heads // layout.tp)
    if not 16 < keys <= limits.longest:
        return f"the fused kernel takes 17 to {limits.longest} keys, here are {keys}"
    if keys % limits.multiple:
        return f"{keys} keys are not divisible by {limits.multiple}"
    if queries % 4:
        return f"sequence {queries} is not divisible by 4"
    if batches % 4:
        return f"batch x heads {batches} is not divisible by 4"
    rows = 8 if keys <= 128 else 4
    by_batches = limits.counts == "batches" and x.causal
    counted, what = (batches, "batch x heads") if by_batches else (queries, "sequence")
    if counted % rows:
        return f"{what} {counted} is not divisible by {rows}"
    return ""


def _eager_megatron(g: GraphBuilder, ctx: Context, x: CoreInput, limits: SoftmaxLimits) -> str:
    x = _repeated(g, ctx, _merged_query(g, ctx, x))
    why = _why_unfused(ctx, x, limits)
    if why:
        g.note(f"softmax runs unfused: {why}")
        return _eager_unfused(g, ctx, x)
    return _eager_fused(g, ctx, x)


def _eager_megatron_local(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Megatron-Core ``DotProductAttention``: the fused softmax up to 4096 keys, else PyTorch's."""
    _check_local(ctx, x, "--framework megatron --attention flash")
    if x.other is None and x.keys != ctx.s_keys:
        g.note("eager attention keeps all s x s scores also in layers with a window")
    return _eager_megatron(g, ctx, x, SoftmaxLimits(4096, 4, "batches"))


def _check_local(ctx: Context, x: CoreInput, instead: str) -> None:
    """Refuse what Megatron's local attention does not know."""
    if ctx.layout.cp > 1:
        raise SpecError(
            f"Megatron's local attention has no context parallelism (cp {ctx.layout.cp})",
            f"use {instead}, or --cp 1",
        )
    if x.bias:
        raise SpecError(
            "Megatron's local attention takes no bias of relative positions",
            "use --framework megatron",
        )


def _eager_te(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Transformer Engine ``UnfusedDotProductAttention``: the softmax takes under 16384 keys."""
    if ctx.layout.cp > 1:
        raise SpecError(
            f"Transformer Engine's unfused attention has no context parallelism "
            f"(cp {ctx.layout.cp})",
            "use --attention flash",
        )
    return _eager_megatron(g, ctx, x, SoftmaxLimits(16383, 8, "queries"))


def _flash(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """FlashAttention keeps q, k, v, the output and fp32 logsumexp per token and head.

    Its backward recomputes the scores: five products where the forward has two, so 2.5 times the
    FLOPs (Dao et al. 2022 §3.1; torch.utils.flop_counter).
    """
    return _flash_core(g, ctx, x, random_bytes=0)


def _flash_rng(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """As flash, plus the random-number state that PyTorch's op keeps.

    24 B for ``_scaled_dot_product_flash_attention``; 16 B for the cuDNN op that takes over when
    values have another head width than keys (latent attention).
    """
    return _flash_core(g, ctx, x, random_bytes=24 if x.equal_dims else 16)


def _flash_local(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """PyTorch's flash op in place of Megatron's local attention, as measured."""
    _check_local(ctx, x, "--framework megatron")
    return _flash_rng(g, ctx, x)


def _te_attention(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Transformer Engine ``DotProductAttention`` without s x s tensors.

    flash-attn wants (b, s, a, d): q, k, v are copied unless they have that layout already, and
    with several sequences the output is copied back for the projection, so two of it stay
    (``FlashAttention.forward``). cuDNN takes the tensors as they are; it runs where flash-attn
    cannot (other width of values, attention sinks) or where attention_backend says so.
    """
    backend = ctx.workload.kernels.attention_backend
    if backend == "unfused":
        return _eager_te(g, ctx, x)
    if ctx.layout.cp > 1:
        return _ring(g, ctx, x)
    if backend == "fused" or not x.equal_dims or ctx.model.attention_sinks or x.bias:
        if backend == "flash":
            raise SpecError(
                "flash-attn takes no attention sinks, no bias and no values narrower than keys",
                "use --set kernels.attention_backend=fused",
            )
        return _flash_core(g, ctx, x, random_bytes=16)
    several = ctx.workload.micro_batch > 1
    copies: dict[str, str] = {}
    widths = {"q": x.q_width, "k": x.k_width, "v": x.v_width}
    names = {"q": x.q, "k": x.k, "v": x.v}
    for label, name in names.items():
        if several or not x.contiguous(name):
            tokens = ctx.s if label == "q" else (x.other or ctx).s
            shape = (ctx.b, tokens, widths[label])
            copies[label] = g.tensor(f"{label}_contiguous", shape, ctx.act)
    if copies:
        sources = list(dict.fromkeys(names[label] for label in copies))
        g.op("layout", "copy", GROUP, sources, copies.values(), modules=_CORE)
    q, k, v = (copies.get(label, name) for label, name in names.items())
    copied = replace(x, q=q, k=k, v=v, views=frozenset(), repeats=False)
    context = _flash_core(g, ctx, copied, random_bytes=24)
    return _copied_back(g, ctx, x, context) if several else context


def _copied_back(g: GraphBuilder, ctx: Context, x: CoreInput, context: str) -> str:
    back = g.tensor("context_contiguous", (ctx.s, ctx.b, x.out_width), ctx.act)
    g.op("layout_back", "copy", GROUP, [context], [back], modules=_CORE)
    return back


def _ring(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Ring attention over the context-parallel group (Transformer Engine, p2p).

    Keys and values travel as one buffer around the ring; q, the last such buffer, the output,
    logsumexp and one random state per step are kept (``AttnFuncWithCPAndKVP2P``; per-step sequence
    offsets of a few bytes are neglected). The layouts are those of flash-attn, so several
    sequences keep a copy of the output for the projection. Each rank sends its keys and values to
    the next c - 1 times.
    """
    shape = (ctx.s, ctx.b)
    kv = g.tensor("kv_ring", (*shape, x.k_width + x.v_width), ctx.act)
    inputs = list(dict.fromkeys([x.q, x.k, x.v]))
    context = g.tensor("context", (*shape, x.out_width), ctx.act)
    lse = g.tensor("logsumexp", (ctx.b, ctx.heads, ctx.s), DType.FP32)
    rng = g.tensor("rng_state", (symbol("c"), 2), DType.INT64)
    q = x.q
    outputs = [kv, context, lse, rng]
    if not x.contiguous(q):
        q = g.tensor("q_contiguous", (*shape, x.q_width), ctx.act)
        outputs.append(q)
    forward = _qk_flops(ctx, x) + _pv_flops(ctx, x)
    message = ctx.tokens * (x.k_width + x.v_width) * ctx.act.itemsize * symbol("c")
    g.op(
        "flash",
        "core",
        GROUP,
        inputs,
        outputs,
        saves=[q, kv, context, lse, rng],
        flops=forward,
        backward_flops=forward / 2 * 5,
        comm=[Comm(Collective.RING, "cp", message)],
        backward_comm=[Comm(Collective.RING, "cp", message * 2)],
        modules=_CORE,
        kernel="ring flash",
    )
    if ctx.workload.micro_batch == 1 or ctx.workload.kernels.attention_backend == "fused":
        return context
    return _copied_back(g, ctx, x, context)


def _flash_core(g: GraphBuilder, ctx: Context, x: CoreInput, *, random_bytes: int) -> str:
    context = g.tensor("context", (ctx.s, ctx.b, x.out_width), ctx.act)
    lse = g.tensor("logsumexp", (ctx.b, ctx.heads, ctx.s), DType.FP32)
    made = [context, lse]
    if random_bytes:
        made.append(g.tensor("rng_state", (random_bytes // 8,), DType.INT64))
    forward = _qk_flops(ctx, x) + _pv_flops(ctx, x)
    inputs = list(dict.fromkeys([x.q, x.k, x.v, *([x.bias] if x.bias else [])]))
    g.op(
        "flash",
        "core",
        GROUP,
        inputs,
        made,
        saves=[*inputs, *made],
        flops=forward,
        backward_flops=forward / 2 * 5,
        modules=_CORE,
        kernel="flash",
    )
    return context


CORE_KERNELS: dict[str, CoreKernel] = {
    "eager_fused": _eager_fused,
    "eager_megatron_local": _eager_megatron_local,
    "eager_te": _eager_te,
    "flash": _flash,
    "flash_local": _flash_local,
    "te": _te_attention,
}


def core(g: GraphBuilder, ctx: Context, x: CoreInput) -> str:
    """Append the attention core that the run uses; return the context.

    Raises ``SpecError`` for kernels a framework does not have.
    """
    if ctx.model.attention_sinks:
        sinks = ctx.kernel("attention_sinks")
        if sinks == "unsupported" or (sinks == "fused" and ctx.workload.attention == "eager"):
            raise SpecError(
                f"attention sinks of {ctx.model.name} are not modelled for "
                f"{ctx.framework} with {ctx.workload.attention} attention",
                "use --framework megatron --attention flash",
            )
    return CORE_KERNELS[ctx.kernel(f"core_{ctx.workload.attention}")](g, ctx, x)
