"""Mixture of experts of transformers' modelling code: router, grouped experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import residual_add
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import GROUP, activate, clamped, feed_forward, product
from actcalc.layers.pytorch.token_choice import token_choice
from actcalc.specs import Moe

Experts = Callable[[GraphBuilder, Context, str, str], str]

ROUTER = ("moe",)
EXPERTS = ("moe", "experts")
SHARED = ("moe", "shared_experts")


def _spec(ctx: Context) -> Moe:
    moe = ctx.model.moe
    if moe is None:
        raise SpecError(f"{ctx.model.name} has no mixture of experts", "describe moe")
    return moe


def _width(ctx: Context) -> Expr:
    """What an expert reads and writes: the hidden width, or the latent one (Nemotron 3)."""
    latent = _spec(ctx).latent
    return ONE * latent if latent else ctx.h


def moe(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the mixture of experts of ``source``; return the branch."""
    return EXPERT_KERNELS[ctx.kernel("experts")](g, ctx, source)


def beside_dense(g: GraphBuilder, ctx: Context, source: str, stream: str) -> str:
    """Append the dense feed-forward of ``source`` and the experts of the ``stream`` before its norm
    (Gemma4TextDecoderLayer); return their sum, each after a norm of its own."""
    dense = norm(g, ctx, "norm2_post_dense", feed_forward(g, ctx, source))
    routed = ROUTERS[ctx.kernel(f"router_{_spec(ctx).router}")](g, ctx, stream)
    out = _grouped(g, ctx, norm(g, ctx, "norm2_experts", stream), routed)
    return residual_add(
        g, "moe_add", GROUP, norm(g, ctx, "norm2_post_experts", out), dense, "moe_out"
    )


def _routed(experts: Experts, g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append a router, the routed experts and the shared one (transformers)."""
    spec = _spec(ctx)
    routed = ROUTERS[ctx.kernel(f"router_{spec.router}")](g, ctx, source)
    narrow = source
    if spec.latent:
        narrow = linear(
            g, ctx, "latent_down", GROUP, source, inside=ctx.h, outside=_width(ctx),
            bias=ctx.model.mlp_bias, modules=EXPERTS,
        )  # fmt: skip
    out = experts(g, ctx, narrow, routed)
    if spec.latent:
        out = linear(
            g, ctx, "latent_up", GROUP, out, inside=_width(ctx), outside=ctx.h,
            bias=ctx.model.mlp_bias, modules=EXPERTS,
        )  # fmt: skip
    if not spec.shared_ffn:
        return out
    shared = feed_forward(
        g, ctx, source, prefix="shared_", width=symbol("u"), bias=False, modules=SHARED
    )
    if spec.shared_gate:
        shared = _gated(g, ctx, source, shared)
    total = g.tensor("moe_out", (ctx.b, ctx.s, ctx.h), g.dtype(out))
    g.op("moe_add", "add", GROUP, [out, shared], [total], modules=ROUTER)
    return total


def _gated(g: GraphBuilder, ctx: Context, source: str, shared: str) -> str:
    """``sigmoid(gate(x)) * shared(x)`` (Qwen2MoeSparseMoeBlock): gate and expert are kept."""
    logit = linear(
        g, ctx, "shared_gate_score", GROUP, source, inside=ctx.h, outside=1, modules=SHARED
    )
    gate = g.tensor("shared_gate_sigmoid", (ctx.b, ctx.s, ONE), ctx.act)
    g.op("shared_gate_sigmoid", "activation", GROUP, [logit], [gate], saves=[gate], modules=SHARED)
    return product(g, "shared_gated_out", gate, shared, (ctx.b, ctx.s, ctx.h), modules=SHARED)


def _logits(g: GraphBuilder, ctx: Context, source: str, *, fp32: bool) -> str:
    """Append the router's projection; in fp32 it keeps an fp32 copy of its input."""
    spec = _spec(ctx)
    if not fp32:
        return linear(
            g, ctx, "router", GROUP, source,
            inside=ctx.h, outside=symbol("E"), bias=spec.router_bias, modules=ROUTER,
        )  # fmt: skip
    operand = source
    if g.dtype(source) is not DType.FP32:
        operand = g.tensor("router_input", (ctx.b, ctx.s, ctx.h), DType.FP32)
        g.op("router_cast", "copy", GROUP, [source], [operand], modules=ROUTER)
    logits = g.tensor("router_out", (ctx.b, ctx.s, symbol("E")), DType.FP32)
    g.op(
        "router", "linear", GROUP, [operand], [logits], saves=[operand],
        flops=ctx.tokens * ctx.h * symbol("E") * 2, modules=ROUTER,
        weights=[Weight("router.weight", (symbol("E"), ctx.h))],
    )  # fmt: skip
    return logits


def _chosen(ctx: Context) -> tuple[Expr, Expr]:
    return ctx.tokens, symbol("K")


def _choose(
    g: GraphBuilder,
    ctx: Context,
    inputs: list[str],
    made: list[str],
    dtype: DType,
    *,
    normalized: bool,
    clamped: bool = False,
    cast: DType | None = None,
) -> str:
    """Append the choice of experts; return the weights of the chosen.

    Choosing within groups first masks the scores of the others, which keeps the mask where the
    chosen scores have a gradient (DeepseekV2TopkRouter, group_limited_greedy).
    The indices are kept for the gradient's scatter; scaling to a sum of one keeps the sum and the
    weights before it (DivBackward).
    """
    kept = [*made, g.tensor("router_indices", _chosen(ctx), DType.INT64)]
    if _spec(ctx).groups > 1 and _spec(ctx).router == "softmax":
        kept.append(g.tensor("router_group_mask", (ctx.tokens, symbol("E")), DType.BOOL))
    if clamped:
        kept.append(g.tensor("router_sum_unclamped", (ctx.tokens, ONE), dtype))
    if normalized:
        kept.append(g.tensor("router_sum", (ctx.tokens, ONE), dtype))
        kept.append(g.tensor("router_chosen", _chosen(ctx), dtype))
    weights = g.tensor("routing_weights", _chosen(ctx), cast or dtype)
    learned = _spec(ctx).correction_bias and ctx.kernel("correction_bias") == "parameter"
    bias = [Weight("router.correction_bias", (symbol("E"),))] if learned else []
    g.op(
        "topk", "router", GROUP, inputs, [weights, *kept], saves=kept, modules=ROUTER,
        weights=bias, rerunnable=False,
    )  # fmt: skip
    return weights


def _softmax(
    g: GraphBuilder,
    ctx: Context,
    source: str,
    *,
    fp32: bool,
    cast: bool,
    clamped: bool = False,
) -> str:
    """Softmax of all experts in fp32, then the best ones (MixtralTopKRouter)."""
    logits = _logits(g, ctx, source, fp32=fp32)
    probs = g.tensor("router_probs", (ctx.tokens, symbol("E")), DType.FP32)
    return _choose(
        g, ctx, [logits], [probs], DType.FP32,
        normalized=_spec(ctx).normalize_topk, clamped=clamped, cast=ctx.act if cast else None,
    )  # fmt: skip


def _softmax_scaled(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Softmax of a normed input times a learned vector; the chosen are scaled once more, by a
    number of each expert (Gemma4TextRouter)."""
    normed = norm(
        g, ctx, "router_norm", source, kind="unweighted", group=GROUP, modules=ROUTER,
    )  # fmt: skip
    scaled = g.tensor("router_scaled", g.shape(normed), g.dtype(normed))
    g.op(
        "router_scale", "multiply", GROUP, [normed], [scaled], saves=[normed], modules=ROUTER,
        weights=[Weight("router.scale", (ctx.h,))],
    )  # fmt: skip
    chosen = _softmax(g, ctx, scaled, fp32=False, cast=False)
    scales = g.tensor("router_expert_scales", _chosen(ctx), ctx.residual)
    weights = g.tensor("routing_weights_scaled", _chosen(ctx), DType.FP32)
    g.op(
        "router_expert_scale", "multiply", GROUP, [chosen], [weights, scales],
        saves=[chosen, scales], modules=ROUTER,
        weights=[Weight("router.expert_scales", (symbol("E"),))],
    )  # fmt: skip
    return weights


def _sparsemixer(g: GraphBuilder, ctx: Context, source: str) -> str:
    """One masked softmax per chosen expert, sampled (PhimoeTopKRouter, ``sparsemixer``).

    Each keeps its mask, its probabilities, the index and the probability chosen.
    """
    logits = _logits(g, ctx, source, fp32=False)
    kept = []
    for rank in range(_spec(ctx).topk):
        kept += [
            g.tensor(f"router_mask{rank}", (ctx.tokens, symbol("E")), DType.BOOL),
            g.tensor(f"router_probs{rank}", (ctx.tokens, symbol("E")), ctx.act),
            g.tensor(f"router_index{rank}", (ctx.tokens, ONE), DType.INT64),
            g.tensor(f"router_chosen{rank}", (ctx.tokens, ONE), ctx.act),
        ]
    weights = g.tensor("routing_weights", _chosen(ctx), ctx.act)
    g.op(
        "topk", "router", GROUP, [logits], [weights, *kept], saves=kept, modules=ROUTER,
        rerunnable=False,
    )  # fmt: skip
    return weights


def _sigmoid(
    g: GraphBuilder, ctx: Context, source: str, *, fp32: bool, dtype: DType = DType.FP32
) -> str:
    """Sigmoid scores, chosen with a bias that has no gradient (DeepseekV3TopkRouter: in fp32)."""
    logits = _logits(g, ctx, source, fp32=fp32)
    scores = g.tensor("router_scores", (ctx.tokens, symbol("E")), dtype)
    return _choose(g, ctx, [logits], [scores], dtype, normalized=_spec(ctx).normalize_topk)


def _softmax_of_chosen(g: GraphBuilder, ctx: Context, source: str, *, fp32: bool) -> str:
    """The best logits, then their softmax.

    In the type of the logits (GptOssTopKRouter), or in fp32 and cast back (GraniteMoeTopKRouter).
    """
    logits = _logits(g, ctx, source, fp32=False)
    weights = _choose(g, ctx, [logits], [], ctx.act, normalized=False)
    dtype = DType.FP32 if fp32 or ctx.autocast else ctx.act
    probs = g.tensor("router_probs", _chosen(ctx), dtype)
    g.op("router_softmax", "softmax", GROUP, [weights], [probs], saves=[probs], modules=ROUTER)
    if not fp32 or dtype is ctx.act:
        return probs
    cast = g.tensor("router_probs_cast", _chosen(ctx), ctx.act)
    g.op("router_cast_back", "copy", GROUP, [probs], [cast], modules=ROUTER)
    return cast


def _sigmoid_of_chosen(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Logits of all but the best set to minus infinity, then sigmoid in fp32 (Llama4Router)."""
    logits = _logits(g, ctx, source, fp32=False)
    indices = g.tensor("router_indices", _chosen(ctx), DType.INT64)
    scores = g.tensor("router_scores", (ctx.tokens, symbol("E")), DType.FP32)
    weights = g.tensor("routing_weights", (ctx.tokens, symbol("E")), ctx.act)
    g.op(
        "topk", "router", GROUP, [logits], [weights, indices, scores],
        saves=[indices, scores], modules=ROUTER, rerunnable=False,
    )  # fmt: skip
    return weights


def _square_roots(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Square roots of softplus, chosen by a bias without gradient or by the token alone
    (DeepseekV4TopKRouter, DeepseekV4HashRouter): softplus keeps its input, the root its result."""
    logits = _logits(g, ctx, source, fp32=False)
    scores = g.tensor("router_scores", (ctx.tokens, symbol("E")), ctx.act)
    g.op(
        "router_scores", "activation", GROUP, [logits], [scores], saves=[logits, scores],
        modules=ROUTER,
    )  # fmt: skip
    return _choose(g, ctx, [scores], [], ctx.act, normalized=True)


Router = Callable[[GraphBuilder, Context, str], str]

ROUTERS: dict[str, Router] = {
    "softmax": lambda g, ctx, source: _softmax(g, ctx, source, fp32=False, cast=False),
    "softmax_cast": lambda g, ctx, source: _softmax(g, ctx, source, fp32=False, cast=True),
    "softmax_fp32": lambda g, ctx, source: _softmax(g, ctx, source, fp32=True, cast=False),
    "softmax_fp32_clamped": lambda g, ctx, source: _softmax(
        g, ctx, source, fp32=True, cast=True, clamped=True
    ),
    "softmax_scaled": _softmax_scaled,
    "sparsemixer": _sparsemixer,
    "sigmoid": lambda g, ctx, source: _sigmoid(g, ctx, source, fp32=True),
    "sigmoid_half": lambda g, ctx, source: _sigmoid(g, ctx, source, fp32=False),
    "sigmoid_own": lambda g, ctx, source: _sigmoid(g, ctx, source, fp32=False, dtype=ctx.act),
    "softmax_of_chosen": lambda g, ctx, source: _softmax_of_chosen(g, ctx, source, fp32=False),
    "softmax_of_chosen_fp32": lambda g, ctx, x: _softmax_of_chosen(g, ctx, x, fp32=True),
    "sigmoid_of_chosen": _sigmoid_of_chosen,
    "half": _square_roots,
}


def _expert_weights(ctx: Context) -> tuple[list[Weight], list[Weight]]:
    spec, width, experts = _spec(ctx), symbol("w"), symbol("E")
    both = width * 2 if ctx.model.gated else width
    first = [Weight("experts.up", (experts, both, _width(ctx)), expert=True)]
    second = [Weight("experts.down", (experts, _width(ctx), width), expert=True)]
    if spec.bias:
        first.append(Weight("experts.up_bias", (experts, both), expert=True))
        second.append(Weight("experts.down_bias", (experts, _width(ctx)), expert=True))
    return first, second


def _activated(g: GraphBuilder, ctx: Context, source: str, shape: tuple[Expr, ...]) -> str:
    """Append the experts' nonlinearity; gate and linear part are halves of ``source``."""
    if ctx.model.activation == "swiglu_oai":
        return _clamped(g, ctx, source, shape)
    linear_part = source
    if ctx.model.clamped_gate:
        source, linear_part = clamped(g, "expert_", [source], shape, EXPERTS)
    active = activate(g, ctx, "expert_activation", source, shape, modules=EXPERTS)
    if not ctx.model.gated:
        return active
    return product(g, "expert_gated", active, linear_part, shape, modules=EXPERTS)


def _clamped(g: GraphBuilder, ctx: Context, source: str, shape: tuple[Expr, ...]) -> str:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped halves (GptOssExperts)."""
    dtype = g.dtype(source)
    names = ("sigmoid", "gate", "glu", "up_plus_one")
    kept = [g.tensor(f"expert_{name}", shape, dtype) for name in names]
    out = g.tensor("expert_gated_out", shape, dtype)
    g.op(
        "expert_activation", "activation", GROUP, [source], [out, *kept],
        saves=[source, *kept], modules=EXPERTS,
    )  # fmt: skip
    return out


def _grouped(g: GraphBuilder, ctx: Context, source: str, weights: str) -> str:
    """All experts in one grouped product (integrations/moe.py, ``grouped_mm_experts_forward``).

    Every token is gathered once per chosen expert, sorted by expert: the gather's and the
    inverse's indices, the gathered input, both products' operands, the routing weights and what
    they multiply are kept. Outside bf16 the same tensors are kept by a loop over experts.
    """
    spec, wide, hidden = _spec(ctx), symbol("w"), _width(ctx)
    rows = ctx.tokens * symbol("K")
    dtype = g.dtype(source)
    indices = [
        g.tensor(f"expert_{what}", (rows,), DType.INT64)
        for what in ("gather", "weight_gather", *(("ids",) if spec.bias else ()))
    ]
    gathered = g.tensor("expert_input", (rows, hidden), dtype)
    sorted_weights = g.tensor("expert_weights", (rows, ONE), g.dtype(weights))
    offsets = g.tensor("expert_offsets", (symbol("E"),), DType.INT32)
    g.op(
        "expert_gather", "copy", GROUP, [source, weights],
        [gathered, sorted_weights, offsets, *indices], saves=indices, modules=EXPERTS,
    )  # fmt: skip
    first, second = _expert_weights(ctx)
    both = wide * 2 if ctx.model.gated else wide
    up = g.tensor("expert_up", (rows, both), dtype)
    g.op(
        "expert_fc1", "linear", GROUP, [gathered, offsets], [up], saves=[gathered, offsets],
        flops=rows * hidden * both * 2, weights=first, modules=EXPERTS,
    )  # fmt: skip
    active = _activated(g, ctx, up, (rows, wide))
    down = g.tensor("expert_down", (rows, hidden), dtype)
    g.op(
        "expert_fc2", "linear", GROUP, [active, offsets], [down], saves=[active, offsets],
        flops=rows * hidden * wide * 2, weights=second, modules=EXPERTS,
    )  # fmt: skip
    inverse = g.tensor("expert_scatter", (rows,), DType.INT64)
    out = g.tensor("experts_out", (ctx.b, ctx.s, hidden), dtype)
    g.op(
        "expert_combine", "multiply", GROUP, [down, sorted_weights], [out, inverse],
        saves=[sorted_weights, down, inverse], modules=EXPERTS,
    )  # fmt: skip
    return out


def _modules(g: GraphBuilder, ctx: Context, source: str, weights: str) -> str:
    """Experts as modules of linear layers, one after another (MixtralSparseMoeBlock before 5).

    Each gathers its tokens and weighs its result: the places of both, the gathered tokens, every
    product's input and the weighed result are kept; the mask that says which tokens are whose is
    dropped. One after another they keep what they would together.
    """
    rows, wide, hidden = ctx.tokens * symbol("K"), symbol("w"), _width(ctx)
    dtype = g.dtype(source)
    places = g.tensor("expert_places", (rows, Expr.of(2)), DType.INT64)
    chosen = g.tensor("expert_mask", (symbol("E"), symbol("K"), ctx.tokens), DType.INT64)
    gathered = g.tensor("expert_input", (rows, hidden), dtype)
    sorted_weights = g.tensor("expert_weights", (rows, ONE), g.dtype(weights))
    g.op(
        "expert_gather", "copy", GROUP, [source, weights],
        [gathered, sorted_weights, chosen, places], saves=[places], modules=EXPERTS,
    )  # fmt: skip
    active = _linear_of_each(g, ctx, "expert_w1", gathered, (rows, hidden, wide))
    active = activate(g, ctx, "expert_activation", active, (rows, wide), modules=EXPERTS)
    if ctx.model.gated:
        up = _linear_of_each(g, ctx, "expert_w3", gathered, (rows, hidden, wide))
        active = product(g, "expert_gated", active, up, (rows, wide), modules=EXPERTS)
    down = _linear_of_each(g, ctx, "expert_w2", active, (rows, wide, hidden))
    out = g.tensor("experts_out", (ctx.b, ctx.s, hidden), dtype)
    g.op(
        "expert_combine", "multiply", GROUP, [down, sorted_weights, chosen], [out],
        saves=[sorted_weights, down, places], modules=EXPERTS,
    )  # fmt: skip
    return out


def _linear_of_each(
    g: GraphBuilder, ctx: Context, name: str, source: str, shape: tuple[Expr, Expr, Expr]
) -> str:
    """Append the same linear layer of every expert, on its own tokens; autocast copies weights."""
    rows, inside, outside = shape
    out = g.tensor(f"{name}_out", (rows, outside), ctx.act)
    made, saves = [out], [source]
    if g.dtype(source) is not ctx.act:
        saves = [g.tensor(f"{name}_input", (rows, inside), ctx.act)]
        made += saves
    whole = (symbol("E"), outside, inside)
    if ctx.autocast:
        saves.append(g.tensor(f"{name}_weight", whole, ctx.act))
        made.append(saves[-1])
    g.op(
        name, "linear", GROUP, [source], made, saves=saves, flops=rows * inside * outside * 2,
        weights=[Weight(f"{name}.weight", whole, expert=True, apart=True)], modules=EXPERTS,
    )  # fmt: skip
    return out


def _every_token(g: GraphBuilder, ctx: Context, source: str, weights: str) -> str:
    """Every expert multiplies every token, scaled by its routing weight first (Llama4TextMoe).

    Tokens are repeated for all experts, most of them scaled to zero: memory and FLOPs are those
    of E experts per token, whatever top-k is.
    """
    wide, experts = symbol("w"), symbol("E")
    rows = ctx.tokens * experts
    repeated = g.tensor("expert_repeated", (experts, ctx.tokens, ctx.h), g.dtype(source))
    scales = g.tensor("expert_weights", (rows, ONE), ctx.act)
    g.op("expert_repeat", "copy", GROUP, [source, weights], [repeated, scales], modules=EXPERTS)
    scaled = product(
        g, "expert_scaled", repeated, scales, (experts, ctx.tokens, ctx.h), modules=EXPERTS
    )
    first, second = _expert_weights(ctx)
    up = _batched(g, ctx, "expert_fc1", scaled, (experts, ctx.h, wide * 2), first)
    active = _activated(g, ctx, up, (experts, ctx.tokens, wide))
    down = _batched(g, ctx, "expert_fc2", active, (experts, wide, ctx.h), second)
    out = g.tensor("experts_out", (ctx.b, ctx.s, ctx.h), ctx.act)
    g.op("expert_sum", "add", GROUP, [down], [out], modules=EXPERTS)
    return out


def _batched(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    shape: tuple[Expr, Expr, Expr],
    weights: list[Weight],
) -> str:
    """Append one product per expert (bmm); autocast copies weights, and an input in fp32."""
    experts, inside, outside = shape
    out = g.tensor(f"{name}_out", (experts, ctx.tokens, outside), ctx.act)
    made, saves = [out], [source]
    if g.dtype(source) is not ctx.act:
        saves = [g.tensor(f"{name}_input", (experts, ctx.tokens, inside), ctx.act)]
        made += saves
    if ctx.autocast:
        saves.append(g.tensor(f"{name}_weight", shape, ctx.act))
        made.append(saves[-1])
    g.op(
        name, "linear", GROUP, [source], made, saves=saves,
        flops=experts * ctx.tokens * inside * outside * 2, weights=weights, modules=EXPERTS,
    )  # fmt: skip
    return out


EXPERT_KERNELS: dict[str, Callable[[GraphBuilder, Context, str], str]] = {
    "grouped": partial(_routed, _grouped),
    "modules": partial(_routed, _modules),
    "every_token": partial(_routed, _every_token),
    "token_choice": token_choice,
}
