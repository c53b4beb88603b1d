"""Mixture of experts: router, dispatch, routed and shared experts.

Token counts on one rank: the router sees ``b·s/(c·t)`` tokens under sequence parallelism; each is
sent to K experts, and after the exchange over the expert-parallel group (balanced routing: as
many tokens arrive as leave) the ranks of one expert-tensor-parallel group gather each other's, so
the experts' input is ``K·b·s·x/(c·t)`` tokens wide, not divided by t when etp = tp.

Recompute modules: everything is ``moe``; the experts' activation is ``moe_act`` where the experts
run as one grouped product, the shared experts are ``shared_experts`` (Megatron-Core moe_layer.py,
experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder, Weight
from actcalc.layers.core.ops import matmul
from actcalc.layers.megatron.linear import linear
from actcalc.layers.megatron.mlp import GROUP, Style, activate, feed_forward
from actcalc.specs import Moe

Keep = Callable[[str, Iterable[Expr], DType], str]

MODULE = ("moe",)
_EXPERTS = ("moe", "experts")


def _moe(ctx: Context) -> Moe:
    if ctx.model.moe is None:
        raise SpecError(f"{ctx.model.name} has no experts", "describe moe")
    return ctx.model.moe


def _etp(ctx: Context) -> int:
    return ctx.layout.expert_tp


def _etp_symbol(ctx: Context) -> Expr:
    return symbol("x") if _etp(ctx) > 1 else ONE


def _ep_symbol(ctx: Context) -> Expr:
    return symbol("e") if ctx.layout.ep > 1 else ONE


def sent_tokens(ctx: Context) -> Expr:
    """Copies of tokens that one rank's router sends out: K per token it sees."""
    return ctx.s_region * ctx.b * symbol("K")


def expert_tokens(ctx: Context) -> Expr:
    """Tokens that one rank's experts process, with the run's imbalance over expert parallelism."""
    spread = ONE if _etp(ctx) == ctx.layout.tp else _etp_symbol(ctx) / ctx.t
    tokens = ctx.s * ctx.b * symbol("K") * spread
    if ctx.layout.ep == 1 or ctx.workload.moe_imbalance == 1.0:
        return tokens
    factor = Fraction(ctx.workload.moe_imbalance).limit_denominator(10**6)
    return tokens * factor


def refuse_unsupported(ctx: Context) -> None:
    """Raise ``SpecError`` for what Megatron-Core itself refuses or this builder does not price."""
    moe, layout = _moe(ctx), ctx.layout
    if layout.tp > 1 and not layout.sp:
        raise SpecError(
            f"Megatron trains experts with tp {layout.tp} only under sequence parallelism",
            "add --sp",
        )
    if moe.shared_ffn and ctx.model.mlp_bias:
        raise SpecError("Megatron's shared experts have no biases", "use --set mlp_bias=false")
    if moe.scale_input and moe.topk > 1:
        raise SpecError(
            f"routing weights on the experts' input need topk 1, not {moe.topk}",
            "use --set moe.topk=1, or moe.scale_input=false",
        )
    grouped = _grouped(ctx)
    if grouped and moe.bias and ctx.kernel("experts") == "sequential":
        raise SpecError(
            "Megatron's legacy grouped experts have no biases",
            "use --set kernels.moe_grouped_gemm=off",
        )
    if grouped and ctx.act is not DType.BF16 and ctx.kernel("experts") == "sequential":
        raise SpecError(
            f"Megatron's legacy grouped experts run in bf16 only, not {ctx.act.label}",
            "use --set kernels.moe_grouped_gemm=off",
        )


def _grouped(ctx: Context) -> bool:
    option = ctx.workload.kernels.moe_grouped_gemm
    if option == "auto":
        return ctx.kernel("experts") != "sequential"
    return option == "on"


def moe(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the mixture of experts of ``source``; return its output, before dropout."""
    spec = _moe(ctx)
    megatron = ctx.kernel("router") == "complete"
    if megatron:
        refuse_unsupported(ctx)
    shared = _shared_experts(g, ctx, source) if spec.shared_ffn else ""
    router = _router_megatron if megatron else _router_ideal
    chosen, probs = router(g, ctx, source)
    combined = _latent_experts(g, ctx, source, chosen, probs)
    if not shared:
        return combined
    out = g.tensor("moe_out", (ctx.s_region, ctx.b, ctx.h), ctx.act)
    g.op("moe_add", "add", GROUP, [combined, shared], [out], modules=MODULE)
    return out


def _router_weights(ctx: Context) -> list[Weight]:
    spec = _moe(ctx)
    experts = symbol("E")
    weights = [Weight("router.weight", (experts, ctx.h))]
    if spec.router_bias:
        weights.append(Weight("router.bias", (experts,)))
    return weights


def _router_ideal(g: GraphBuilder, ctx: Context, source: str) -> tuple[str, str]:
    """A router that keeps its input and fp32 probabilities; indices are neglected."""
    experts = symbol("E")
    rows = ctx.s_region * ctx.b
    logits = g.tensor("router_logits", (rows, experts), ctx.act)
    probs = g.tensor("router_probs", (rows, experts), DType.FP32)
    chosen = g.tensor("router_indices", (sent_tokens(ctx),), DType.INT64)
    g.op(
        "router", "linear", GROUP, [source], [logits],
        saves=[source], flops=rows * ctx.h * experts * 2, weights=_router_weights(ctx),
        modules=MODULE,
    )  # fmt: skip
    g.op("routing", "router", GROUP, [logits], [probs, chosen], saves=[probs], modules=MODULE)
    return chosen, probs


def _balancing(ctx: Context) -> str:
    spec = _moe(ctx)
    kind = ctx.workload.kernels.moe_router_load_balancing_type
    if kind != "auto":
        return kind
    if not spec.aux_loss:
        return "none"
    return "seq_aux_loss" if spec.router == "sigmoid" else "aux_loss"


def _pre_softmax(ctx: Context) -> bool:
    """Whether softmax runs over all experts before top-k.

    Weights that stay as they come out of it, not renormalised, cannot be had from a softmax over
    the chosen experts alone.
    """
    spec = _moe(ctx)
    return spec.router == "softmax" and (not spec.normalize_topk or spec.topk == 1)


def _router_megatron(g: GraphBuilder, ctx: Context, source: str) -> tuple[str, str]:
    """Megatron-Core ``TopKRouter``: gate, scores, top-k, load-balancing loss.

    ``topk_routing_with_score_function`` (post-softmax, pre-softmax, sigmoid),
    ``compute_routing_scores_for_aux_loss`` and ``switch_load_balancing_loss_func`` of
    moe_utils.py; each op keeps what ATen's formula of it keeps. Returns the indices of the chosen
    experts and the sparse probabilities.
    """
    spec = _moe(ctx)
    experts, topk = symbol("E"), symbol("K")
    rows = ctx.s_region * ctx.b
    dtype = DType.FP32 if ctx.workload.kernels.moe_router_dtype == "fp32" else ctx.act
    logits = g.tensor("router_logits", (rows, experts), dtype)
    g.op(
        "router", "linear", GROUP, [source], [logits],
        saves=[source], flops=rows * ctx.h * experts * 2, weights=_router_weights(ctx),
        modules=MODULE, source="Megatron-Core RouterGatingLinearFunction",
    )  # fmt: skip
    chosen = g.tensor("router_indices", (rows, topk), DType.INT64)
    probs = g.tensor("router_probs", (rows, experts), dtype)
    made, saves = [chosen, probs], [chosen]

    def keep(name: str, shape: Iterable[Expr], kind: DType) -> str:
        tensor = g.tensor(name, shape, kind)
        made.append(tensor)
        saves.append(tensor)
        return tensor

    limited = spec.groups > 1
    if spec.router == "sigmoid":
        keep("router_sigmoid_fp32", (rows, experts), DType.FP32)
        if spec.correction_bias:
            if dtype is not DType.FP32:
                keep("router_scores", (rows, experts), dtype)
        elif limited:
            keep("router_group_mask", (rows, experts), DType.BOOL)
        if spec.topk > 1 and spec.normalize_topk:
            keep("router_chosen_scores", (rows, topk), dtype)
            keep("router_score_sum", (rows, Expr.of(1)), dtype)
    else:
        if _pre_softmax(ctx):
            keep("router_softmax_fp32", (rows, experts), DType.FP32)
        else:
            keep("router_softmax_fp32", (rows, topk), DType.FP32)
        if limited:
            keep("router_group_mask", (rows, experts), DType.BOOL)
    _keep_auxiliary(ctx, keep, rows, dtype)
    g.op(
        "routing", "router", GROUP, [logits], made, saves=saves, modules=MODULE,
        source="Megatron-Core moe_utils.py, router.py",
    )  # fmt: skip
    return chosen, probs


def _keep_auxiliary(ctx: Context, keep: Keep, rows: Expr, dtype: DType) -> None:
    """Declare what the load-balancing loss keeps: its scores, token counts, the loss itself."""
    spec, balancing = _moe(ctx), _balancing(ctx)
    if balancing == "none":
        return
    experts = symbol("E")
    sigmoid = spec.router == "sigmoid"
    keep("aux_scores", (rows, experts), dtype if sigmoid else DType.FP32)
    if sigmoid:
        keep("aux_score_sum", (rows, Expr.of(1)), dtype)
    counts = experts * ctx.b if balancing == "seq_aux_loss" else experts
    floating = balancing == "global_aux_loss"
    keep("tokens_per_expert", (counts,), DType.FP32 if floating else DType.INT64)
    keep("aux_loss", (Expr.of(1),), dtype if sigmoid and not floating else DType.FP32)


def _width(ctx: Context) -> Expr:
    """Width of the tokens that experts read and write."""
    latent = _moe(ctx).latent
    return ONE * latent if latent else ctx.h


def _latent_experts(g: GraphBuilder, ctx: Context, source: str, chosen: str, probs: str) -> str:
    """Append the routed experts, between projections to a narrower width and back if they have any.

    Every rank holds both projections whole (moe_layer.py fc1_latent_proj, fc2_latent_proj);
    router and shared experts read the hidden width.
    """
    if not _moe(ctx).latent:
        return _routed_experts(g, ctx, source, chosen, probs)
    rows, width = ctx.s_region * ctx.b, _width(ctx)
    narrow = g.tensor("latent_input", (ctx.s_region, ctx.b, width), ctx.act)
    linear(
        g, ctx, "latent_down", GROUP, source, [narrow], width_in=ctx.h, width_out=width,
        split="none", bias=ctx.model.mlp_bias, modules=MODULE, tokens=rows,
    )  # fmt: skip
    combined = _routed_experts(g, ctx, narrow, chosen, probs)
    out = g.tensor("latent_output", (ctx.s_region, ctx.b, ctx.h), ctx.act)
    linear(
        g, ctx, "latent_up", GROUP, combined, [out], width_in=width, width_out=ctx.h,
        split="none", bias=ctx.model.mlp_bias, modules=MODULE, tokens=rows,
    )  # fmt: skip
    return out


def _routed_experts(g: GraphBuilder, ctx: Context, source: str, chosen: str, probs: str) -> str:
    """Append dispatch, the experts' two projections and the combination."""
    spec = _moe(ctx)
    megatron = ctx.kernel("router") == "complete"
    tokens = expert_tokens(ctx)
    outer = _width(ctx)
    arrived = g.tensor("expert_input", (tokens, outer), ctx.act)
    weights, order = _dispatch(g, ctx, source, chosen, probs, arrived, tokens, megatron=megatron)
    source_tokens = arrived
    if spec.scale_input:
        # The product keeps both factors; the experts see the scaled tokens and no weights.
        scaled = g.tensor("expert_input_scaled", (tokens, outer), ctx.act)
        g.op(
            "scale_input", "multiply", GROUP, [arrived, *([weights] if weights else [])], [scaled],
            saves=[arrived, *([weights] if weights else [])], modules=_EXPERTS,
        )  # fmt: skip
        source_tokens = scaled
        if weights:
            ones = g.tensor("expert_ones", (tokens,), g.dtype(weights))
            g.op("ones", "fill", GROUP, [weights], [ones], modules=_EXPERTS)
            weights = ones
    width = symbol("w") / _etp_symbol(ctx)
    local = symbol("E") / _ep_symbol(ctx)
    grouped = _grouped(ctx)
    legacy = grouped and ctx.kernel("experts") == "sequential"
    style: Style = "legacy_grouped" if legacy else "mlp"
    both = width * 2 if ctx.model.gated else width
    wide = g.tensor("expert_fc1_out", (tokens, both), ctx.act)
    _expert_linear(g, ctx, "expert_fc1", source_tokens, wide, tokens, outer, both, local)
    active = activate(
        g,
        ctx,
        "expert_activation",
        wide,
        (tokens, width),
        bias=spec.bias,
        weights=weights,
        style=style,
        modules=(*_EXPERTS, "moe_act") if grouped else _EXPERTS,
    )
    back = g.tensor("expert_output", (tokens, outer), ctx.act)
    _expert_linear(g, ctx, "expert_fc2", active, back, tokens, width, outer, local)
    return _combine(g, ctx, back, order, megatron=megatron)


def _expert_linear(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    out: str,
    tokens: Expr,
    inside: Expr,
    outside: Expr,
    local: Expr,
) -> None:
    """Append one projection of all local experts; each token passes exactly one of them."""
    weights = [Weight(f"{name}.weight", (local, outside, inside), expert=True)]
    if _moe(ctx).bias:
        weights.append(Weight(f"{name}.bias", (local, outside), expert=True))
    g.op(
        name, "linear", GROUP, [source], [out],
        saves=[source], flops=tokens * inside * outside * 2, weights=weights,
        modules=_EXPERTS,
    )  # fmt: skip


def _exchange(ctx: Context, width: Expr, itemsize: int) -> tuple[list[Comm], list[Comm]]:
    """Collectives that bring tokens to their experts, and those that take results back."""
    there: list[Comm] = []
    back: list[Comm] = []
    gathering = ctx.workload.kernels.moe_token_dispatcher_type == "allgather"
    if gathering and (ctx.layout.ep > 1 or _etp(ctx) > 1):
        full = ctx.s_region * ctx.b * width * itemsize * _etp_symbol(ctx) * _ep_symbol(ctx)
        group = "ep" if ctx.layout.ep > 1 else "tp"
        return (
            [Comm(Collective.ALL_GATHER, group, full)],
            [Comm(Collective.REDUCE_SCATTER, group, full)],
        )
    if ctx.layout.ep > 1:
        message = sent_tokens(ctx) * width * itemsize
        there.append(Comm(Collective.ALL_TO_ALL, "ep", message))
        back.append(Comm(Collective.ALL_TO_ALL, "ep", message))
    if _etp(ctx) > 1:
        full = expert_tokens(ctx) * width * itemsize
        there.append(Comm(Collective.ALL_GATHER, "tp", full))
        back.insert(0, Comm(Collective.REDUCE_SCATTER, "tp", full))
    return there, back


def _dispatch(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    chosen: str,
    probs: str,
    arrived: str,
    tokens: Expr,
    *,
    megatron: bool,
) -> tuple[str, str]:
    """Append the way to the experts; return the permuted weights ("" if not kept) and the order.

    Megatron: ``masked_select`` keeps the transposed probabilities and map, ``index_select`` the
    source row of each copy (``permute`` in moe_utils.py); the exchange keeps nothing. The
    all-gather dispatcher permutes after the exchange, so it keeps those for the gathered tokens
    and local experts.
    """
    there, back = _exchange(ctx, _width(ctx), ctx.act.itemsize)
    if not megatron:
        g.op(
            "dispatch", "dispatch", GROUP, [source, chosen], [arrived],
            comm=there, backward_comm=back, modules=MODULE,
        )  # fmt: skip
        return "", chosen
    gathering = ctx.workload.kernels.moe_token_dispatcher_type == "allgather"
    experts = symbol("E") / _ep_symbol(ctx) if gathering else symbol("E")
    rows = ctx.s_region * ctx.b
    if gathering:
        rows = rows * _etp_symbol(ctx) * _ep_symbol(ctx)
    sent = tokens if gathering else sent_tokens(ctx)
    dtype = g.dtype(probs)
    table = g.tensor("permute_probs", (experts, rows), dtype)
    routing_map = g.tensor("permute_map", (experts, rows), DType.BOOL)
    order = g.tensor("permute_rows", (sent,), DType.INT64)
    weights = g.tensor("expert_weights", (tokens,), dtype)
    g.op(
        "dispatch", "dispatch", GROUP, [source, chosen, probs],
        [arrived, table, routing_map, order, weights], saves=[table, routing_map, order],
        comm=there, backward_comm=back, modules=MODULE,
        source="Megatron-Core moe_utils.py permute, token_dispatcher.py",
    )  # fmt: skip
    return weights, order


def _combine(g: GraphBuilder, ctx: Context, back: str, order: str, *, megatron: bool) -> str:
    """Append the way back: exchange and sum over each token's experts (``scatter_add``)."""
    there, home = _exchange(ctx, _width(ctx), ctx.act.itemsize)
    out = g.tensor("moe_combined", (ctx.s_region, ctx.b, _width(ctx)), ctx.act)
    g.op(
        "combine", "dispatch", GROUP, [back, order], [out],
        saves=[order] if megatron else [], comm=home, backward_comm=there, modules=MODULE,
    )  # fmt: skip
    return out


def _shared_experts(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the experts that every token passes: one feed-forward, with an optional gate."""
    modules = ("moe", "shared_experts")
    out = feed_forward(
        g, ctx, source, prefix="shared_", width=symbol("u") / ctx.t, bias=False, modules=modules
    )
    if not _moe(ctx).shared_gate:
        return out
    rows = (ctx.s_region, ctx.b)
    gate = g.tensor("shared_gate", (*rows, Expr.of(1)), ctx.act)
    gated = g.tensor("shared_gated", (*rows, ctx.h), ctx.act)
    # The linear keeps its input, sigmoid its output, the product both factors.
    matmul(
        g, "shared_gate", GROUP, source, [gate], rows=ctx.s_region * ctx.b, inside=ctx.h,
        outside=ONE, saves=[source, gate], modules=modules,
    )  # fmt: skip
    kept = [out, gate] if ctx.kernel("router") == "complete" else [out]
    g.op("gate_shared", "multiply", GROUP, [out, gate], [gated], saves=kept, modules=modules)
    return gated
