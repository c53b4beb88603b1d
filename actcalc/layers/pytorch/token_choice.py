"""Mixture of experts as torchtitan runs it: token-choice router, reorderer, grouped experts.

Every rank of a tensor-parallel group routes all tokens of the gathered input. With expert
parallelism that borrows from it (etp 1) each reorders and sends its part of them, else all; the
sum of the routed outputs is made over all tokens on every rank, and reduced and scattered after
that (torchtitan 0.2.1 models/moe/moe.py, distributed/expert_parallel.py,
models/llama4/infra/parallelize.py apply_moe_ep_tp).
"""

from __future__ import annotations

from fractions import Fraction

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder, Weight
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import GROUP, activate, product, projected
from actcalc.layers.pytorch.parallel import gathered, scattered
from actcalc.specs import Moe

MODULE = ("moe",)
EXPERTS = ("moe", "experts")
SHARED = ("moe", "shared_experts")
GATE = ("moe", "router")

GROUPED = "grouped_mm"
"""Kernel of the experts' products, which is no ``aten.mm``."""

_ALIGNED = 8  # models/moe/utils.py TOKEN_GROUP_ALIGN_SIZE_M of bf16


def token_choice(g: GraphBuilder, ctx: Context, source: str) -> str:
    """Append the mixture of experts of ``source``; return the branch.

    Raises ``SpecError`` for what torchtitan's experts have not.
    """
    spec = _spec(ctx)
    x = gathered(g, ctx, "moe", GROUP, source, MODULE)
    scores, indices = _route(g, ctx, spec, x)
    order, rows = _reorder(g, ctx, spec, x, scores, indices)
    routed = _dispatched(g, ctx, rows)
    out = _shared(g, ctx, x) if spec.shared_ffn else ""
    out = _combined(g, ctx, spec, routed, order, scores, out)
    return scattered(g, ctx, "moe", GROUP, out, MODULE)


def _spec(ctx: Context) -> Moe:
    """The model's experts; ``SpecError`` for those that torchtitan has not."""
    moe = ctx.model.moe
    assert moe is not None
    more = {
        "biases": moe.bias or moe.router_bias,
        "a latent width": moe.latent,
        "a gate of the shared expert": moe.shared_gate,
        "feed-forwards without a gate": not ctx.model.gated,
        "a softmax over the chosen experts alone": moe.router == "softmax_topk",
    }
    for what, has in more.items():
        if has:
            raise SpecError(
                f"{ctx.model.name} has {what}, which torchtitan's experts have not",
                "use --framework transformers or megatron",
            )
    if ctx.workload.fp8_products or ctx.act is not DType.BF16:
        raise SpecError(
            f"the products of torchtitan's experts are known in bf16, not {ctx.workload.precision}",
            "use --precision bf16",
        )
    return moe


def _borrows(ctx: Context) -> bool:
    """Whether expert parallelism takes the ranks of the tensor-parallel group."""
    return ctx.tp and ctx.layout.ep > 1 and ctx.layout.etp == 1


def _sent(ctx: Context) -> Expr:
    """Copies of tokens that one rank reorders: K of each token that it has."""
    return ctx.tokens * symbol("K") / (ctx.t if _borrows(ctx) else ONE)


def _arrived(ctx: Context) -> Expr:
    """Tokens that one rank's experts process, with the run's imbalance over expert parallelism."""
    if ctx.layout.ep == 1 or ctx.workload.moe_imbalance == 1.0:
        return _sent(ctx)
    return _sent(ctx) * Fraction(ctx.workload.moe_imbalance).limit_denominator(10**6)


def _local(ctx: Context) -> Expr:
    return symbol("E") / symbol("e") if ctx.layout.ep > 1 else symbol("E")


def _padded(ctx: Context) -> Expr:
    """Rows of the experts' products: room for a group of each to be a multiple of 8."""
    return _arrived(ctx) + _local(ctx) * _ALIGNED


def _route(g: GraphBuilder, ctx: Context, spec: Moe, x: str) -> tuple[str, str]:
    """Append TokenChoiceTopKRouter; return the chosen scores and indices.

    Scores are a softmax or a sigmoid of all experts in fp32, which keeps its result; the gather of
    the chosen keeps its indices, a division by their sum both factors. Groups and a bias only
    choose, and keep nothing.
    """
    everyone = (ctx.tokens, symbol("E"))
    chosen = (ctx.tokens, symbol("K"))
    logits = linear(g, ctx, "router", GROUP, x, inside=ctx.h, outside=symbol("E"), modules=GATE)
    wide = g.tensor("router_fp32", everyone, DType.FP32)
    g.op("router_cast", "copy", GROUP, [logits], [wide], modules=MODULE)
    all_scores = g.tensor("router_scores", everyone, DType.FP32)
    g.op("router_scores", "softmax", GROUP, [wide], [all_scores], saves=[all_scores],
         modules=MODULE)  # fmt: skip
    indices = g.tensor("router_indices", chosen, DType.INT64)
    kept = [indices]
    if spec.normalize_topk:
        kept += [
            g.tensor("router_chosen", chosen, DType.FP32),
            g.tensor("router_sum", (ctx.tokens, ONE), DType.FP32),
        ]
    scores = g.tensor("routing_weights", chosen, DType.FP32)
    g.op("topk", "router", GROUP, [all_scores], [scores, *kept], saves=kept, modules=MODULE,
         rerunnable=False)  # fmt: skip
    return scores, indices


def _reorder(
    g: GraphBuilder, ctx: Context, spec: Moe, x: str, scores: str, indices: str
) -> tuple[str, str]:
    """Append TokenReorderer and the gather of tokens; return the order and the experts' rows.

    Scores that multiply the experts' input do so in fp32: both factors are kept.
    """
    sent = _sent(ctx)
    order = g.tensor("token_order", (sent,), DType.INT64)
    sorted_scores = g.tensor("sorted_scores", (sent,), DType.FP32)
    made, saves = [order, sorted_scores], []
    if spec.scale_input:
        saves = [order]
        if _borrows(ctx):  # of its own part of the tokens; the order is of all of them
            saves = [g.tensor("own_order", (sent,), DType.INT64)]
            made += saves
    g.op("reorder", "dispatch", GROUP, [scores, indices], made, saves=saves, modules=MODULE,
         rerunnable=False)  # fmt: skip
    source = g.tensor("token_source", (sent,), DType.INT64)
    rows = g.tensor("expert_rows", (sent, ctx.h), ctx.act)
    g.op("expert_gather", "copy", GROUP, [x, order], [rows, source], saves=[source],
         modules=EXPERTS)  # fmt: skip
    if not spec.scale_input:
        return order, rows
    wide = g.tensor("expert_rows_fp32", (sent, ctx.h), DType.FP32)
    g.op("scale_cast", "copy", GROUP, [rows], [wide], modules=EXPERTS)
    scaled = product(g, "scaled", wide, sorted_scores, (sent, ctx.h), modules=EXPERTS)
    narrow = g.tensor("expert_rows_scaled", (sent, ctx.h), ctx.act)
    g.op("scale_cast_back", "copy", GROUP, [scaled], [narrow], modules=EXPERTS)
    return order, narrow


def _exchanged(g: GraphBuilder, ctx: Context, name: str, source: str, rows: Expr) -> str:
    """Append an exchange over the expert-parallel group; ``source`` itself without one."""
    if ctx.layout.ep == 1:
        return source
    out = g.tensor(name, (rows, ctx.h), ctx.act)
    message = [Comm(Collective.ALL_TO_ALL, "ep", _sent(ctx) * ctx.h * ctx.act.itemsize)]
    g.op(name, "exchange", GROUP, [source], [out], comm=message, backward_comm=message,
         modules=MODULE)  # fmt: skip
    return out


def _dispatched(g: GraphBuilder, ctx: Context, rows: str) -> str:
    """Append the way to the experts, their products, and the way back (ExpertParallel).

    Rows are copied into groups that are aligned, behind one row of zeros, and back
    (utils.py _permute, _unpermute): the index is kept.
    """
    arrived, padded = _arrived(ctx), _padded(ctx)
    rows = _exchanged(g, ctx, "expert_arrived", rows, arrived)
    index = g.tensor("expert_permutation", (padded,), DType.INT32)
    aligned = g.tensor("expert_input", (padded, ctx.h), ctx.act)
    offsets = g.tensor("expert_offsets", (_local(ctx),), DType.INT32)
    behind = (arrived + 1) * ctx.h * ctx.act.itemsize
    g.op(
        "expert_align", "copy", GROUP, [rows], [aligned, index, offsets], saves=[index],
        forward_scratch=behind, backward_scratch=behind, modules=EXPERTS,
    )  # fmt: skip
    done = _experts(g, ctx, aligned, offsets)
    back = g.tensor("expert_output", (arrived + 1, ctx.h), ctx.act)
    g.op("expert_unalign", "copy", GROUP, [done, index], [back], saves=[index], modules=EXPERTS)
    return _exchanged(g, ctx, "expert_returned", back, _sent(ctx))


def _experts(g: GraphBuilder, ctx: Context, source: str, offsets: str) -> str:
    """Append GroupedExperts: three grouped products of the local experts' weights."""
    width = symbol("w") / (ctx.t if ctx.tp and not _borrows(ctx) else ONE)
    rows, local = _padded(ctx), _local(ctx)
    flops = _arrived(ctx) * ctx.h * width * 2

    def grouped(name: str, read: str, inside: Expr, outside: Expr) -> str:
        out = g.tensor(f"{name}_out", (rows, outside), ctx.act)
        g.op(
            name, "linear", GROUP, [read, offsets], [out], saves=[read, offsets], flops=flops,
            weights=[Weight(f"{name}.weight", (local, outside, inside), expert=True)],
            modules=EXPERTS, kernel=GROUPED,
        )  # fmt: skip
        return out

    gate = grouped("expert_w1", source, ctx.h, width)
    active = activate(g, ctx, "expert_activation", gate, (rows, width), modules=EXPERTS)
    up = grouped("expert_w3", source, ctx.h, width)
    gated = product(g, "expert_gated", active, up, (rows, width), modules=EXPERTS)
    return grouped("expert_w2", gated, width, ctx.h)


def _shared(g: GraphBuilder, ctx: Context, x: str) -> str:
    """Append the shared experts: one feed-forward, whose sum over ranks waits for the others'."""
    return projected(
        g, ctx, x, prefix="shared_", width=symbol("u") / ctx.t, bias=False, modules=SHARED
    )


def _combined(
    g: GraphBuilder, ctx: Context, spec: Moe, routed: str, order: str, scores: str, shared: str
) -> str:
    """Append the way back to the tokens' order and the sum over each one's experts.

    The rows of all tokens are laid out on every rank, and are kept in fp32 for the product with
    their scores; where those scaled the input already, the sum keeps nothing.
    """
    copies = (ctx.tokens, symbol("K"), ctx.h)
    laid = g.tensor("experts_unsorted", copies, ctx.act)
    g.op("unsort", "copy", GROUP, [routed, order], [laid], saves=[order], modules=MODULE)
    whole = (ctx.b, ctx.s, ctx.h)
    out = g.tensor("experts_out", whole, ctx.act)
    if spec.scale_input:
        g.op("expert_sum", "add", GROUP, [laid], [out], modules=MODULE)
    else:
        wide = g.tensor("experts_fp32", copies, DType.FP32)
        g.op("combine_cast", "copy", GROUP, [laid], [wide], modules=MODULE)
        summed = g.tensor("experts_summed", whole, DType.FP32)
        g.op("expert_combine", "multiply", GROUP, [wide, scores], [summed], saves=[wide, scores],
             modules=MODULE)  # fmt: skip
        g.op("combine_cast_back", "copy", GROUP, [summed], [out], modules=MODULE)
    if not shared:
        return out
    total = g.tensor("moe_out", whole, ctx.act)
    g.op("moe_add", "add", GROUP, [out, shared], [total], modules=MODULE)
    return total
