"""FLOPs of one micro-batch through the whole model: model FLOPs, re-run FLOPs, closed forms.

Matrix products only, 2·m·n·k; backward is twice forward (dX and dW); the embedding lookup costs
nothing; attention scores are counted in full, causal or not, unless asked otherwise. Experts count
for the tokens they get, a sliding window for the keys it reaches, multi-token prediction like the
layers and heads it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph, Op
from actcalc.layers.model import LayerRun, ModelGraph
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.specs import Model

Counting = Literal["full", "causal"]


def core_share(model: ModelGraph, run: LayerRun) -> Expr:
    """Share of the counted score products that lie below the causal diagonal.

    A token reaches half the sequence on average; with a window of y keys, y - y²/2s of them, of
    which the full count has y.
    """
    context = model.context
    if not context.model.causal:
        return ONE
    if run.kind.window and context.model.window:
        return ONE - symbol("y") / symbol("s") / 2
    return ONE / 2


def _graph_flops(model: ModelGraph, graph: Graph, ops: Iterable[Op], share: Expr | None) -> int:
    """Forward FLOPs of some ops of a graph over all ranks, ``share`` of the attention core's."""
    flops = model.op_flops[graph]
    if share is None:
        return sum(flops[op.name] for op in ops)
    sizes = whole(dict(model.sizes))
    return sum(
        int((op.flops * share).value(sizes)) if op.kind == "core" else flops[op.name] for op in ops
    )


def _share(model: ModelGraph, run: LayerRun, counting: Counting) -> Expr | None:
    """The share of the core that is counted; None where all of it is."""
    causal = counting == "causal" and model.context.model.causal
    return core_share(model, run) if causal else None


def _run_flops(model: ModelGraph, run: LayerRun, counting: Counting) -> int:
    share = _share(model, run, counting)
    return run.count * _graph_flops(model, run.graph, run.graph.ops, share)


def layers_forward_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Forward FLOPs of all transformer layers for one micro-batch, over all ranks."""
    return sum(_run_flops(model, run, counting) for run in model.kinds)


def head_forward_flops(model: ModelGraph) -> int:
    """Forward FLOPs of embedding and output head for one micro-batch, over all ranks."""
    return sum(sum(model.op_flops[graph].values()) for graph in (model.embedding, model.head))


def prediction_forward_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Forward FLOPs of the multi-token-prediction layers for one micro-batch, over all ranks."""
    return _run_flops(model, model.mtp, counting) if model.mtp else 0


def forward_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Forward FLOPs of the whole model for one micro-batch, over all ranks."""
    return (
        layers_forward_flops(model, counting)
        + head_forward_flops(model)
        + prediction_forward_flops(model, counting)
    )


def model_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Model FLOPs of one micro-batch: forward and backward, three times the forward's.

    For a GPT this is 72·b·l·s·h²(1 + s/6h + v/12hl) (Korthikanti et al. 2022, appendix A).
    Re-run FLOPs are not model FLOPs, nor is the scores' recomputation inside flash attention.
    """
    return 3 * forward_flops(model, counting)


def paper_model_flops(model: Model, seq: int, batch: int) -> int:
    """72·b·l·s·h²(1 + s/6h + v/12hl), multiplied out: the closed form for a 4h feed-forward."""
    h, layers = model.hidden, model.layers
    return batch * seq * (72 * layers * h * h + 12 * layers * seq * h + 6 * h * model.vocab)


def paper_selective_flops(model: Model, seq: int, batch: int) -> int:
    """72·b·l·s·h²(1 + s/3h + v/12hl), multiplied out: hardware FLOPs of selective recomputation.

    The published equation adds s/6h for the re-run attention core, three times that core's forward
    FLOPs (4bs²h per layer, which is s/18h of 72bsh²). See ``actcalc explain selective``.
    """
    h, layers = model.hidden, model.layers
    return batch * seq * (72 * layers * h * h + 24 * layers * seq * h + 6 * h * model.vocab)


class HardwareFlops(NamedTuple):
    """What the devices compute for one micro-batch, over all ranks.

    Weight gradients of frozen weights (adapters alone are trained) are in none of these figures.
    """

    flops: int
    """Model and re-run FLOPs by the convention named."""
    convention: str
    """``ops``: model FLOPs plus each re-run op once; ``paper``: the published equation."""
    op_flops: int
    """Model FLOPs plus each re-run op once, whatever the convention."""
    rerun: int
    """Of these: what runs again."""


def rerun_flops(staged: StagedRun, policy: Policy, counting: Counting = "full") -> int:
    """Forward FLOPs that ``policy`` runs again for one micro-batch, over all ranks."""
    model, stage = staged.graph, staged.under(policy)
    shares = {run.graph: _share(model, run, counting) for run in staged.kinds}

    def again(graph: Graph, chosen: Policy) -> int:
        whole = chosen.passes - 1  # forward passes before the one whose tensors backward takes
        last = _graph_flops(model, graph, stage.outcome(graph, chosen).rerun, shares[graph])
        return last + (whole * _graph_flops(model, graph, graph.ops, shares[graph]) if whole else 0)

    return sum(
        count * again(graph, chosen)
        for chunk in staged.chunks
        for graph, chosen, count in stage.tally(chunk)
    )


def frozen_flops(staged: StagedRun, policy: Policy) -> int:
    """FLOPs of backward that nobody computes, for one micro-batch, over all ranks.

    A product whose weight is frozen has an input gradient alone (Hu et al. 2021, section 4.2); a
    layer that no gradient passes has no backward. The adapters' own products are left out: their
    rank is a hundredth of the width.
    """
    model, stage = staged.graph, staged.under(policy)
    sizes, total = staged.whole_sizes, 0
    for graph, count in model.graphs():
        if graph.gradient != "passes" and stage.outcome(graph).detached:
            total += count * sum(int(op.backward_flops.value(sizes)) for op in graph.ops)
            continue
        frozen = (op for op in graph.ops if op.kind == "linear" and not graph.trains(op))
        total += count * sum(model.op_flops[graph][op.name] for op in frozen)
    return total


def hardware_flops(staged: StagedRun, policy: Policy, counting: Counting = "full") -> HardwareFlops:
    """Hardware FLOPs of one micro-batch: the paper's own equation where its profile applies it."""
    model = staged.graph
    context = model.context
    seq, batch = context.workload.seq, context.workload.micro_batch
    useful = model_flops(model, counting)
    frozen = frozen_flops(staged, policy)
    rerun = rerun_flops(staged, policy, counting)
    by_ops = useful + rerun - frozen
    published = (
        counting == "full"
        and not frozen
        and context.framework.idealised
        and policy.modules == ("core_attn",)
        and context.workload.attention == "eager"
        and paper_model_flops(context.model, seq, batch) == useful
    )
    if not published:
        return HardwareFlops(by_ops, "ops", by_ops, rerun)
    published_flops = paper_selective_flops(context.model, seq, batch)
    return HardwareFlops(published_flops, "paper", by_ops, rerun)
