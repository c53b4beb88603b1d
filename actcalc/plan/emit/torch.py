"""PyTorch's selective checkpoint: what it can do with one layer, and the code that does it.

The layer runs under ``torch.utils.checkpoint.checkpoint(use_reentrant=False)`` with a policy that
keeps the outputs of chosen matrix products and attention kernels. In backward every other op runs
again, up to the last one that a saved tensor comes from (early stop). Kept outputs are all stored,
whether backward needs them or not; besides them only the layer's input is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from actcalc.layers.core.graph import Graph, Op
from actcalc.plan.laying import RunStages
from actcalc.plan.options import outcome_of, policy_option
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE
from actcalc.solve.options import Option

MAX_PRODUCTS = 10
"""Products of one layer that may be kept or not; of more, the costliest are chosen from."""


@dataclass(frozen=True)
class Kept:
    """Which products of a layer are kept, by their place in the layer; None: no checkpoint."""

    products: tuple[int, ...] | None
    names: tuple[str, ...] = ()


def products(graph: Graph) -> tuple[Op, ...]:
    """Ops that run as one matrix product or attention kernel each, in order."""
    return tuple(op for op in graph.ops if op.kind in ("linear", "core"))


def keepable(planner: RunStages, graph: Graph) -> tuple[int, ...]:
    """Places of the products whose output may be kept.

    A fused attention kernel that draws its own dropout mask must run again: skipping it would
    leave the random generator behind, and later masks would differ. Expert products are grouped
    or looped over experts, not one call each, so layers with experts keep none.
    """
    if any(weight.expert for weight in graph.weights):
        return ()
    context = planner.model.context
    draws = context.attention_dropout
    apart = any(op.kind == "dropout" and "core_attn" in op.modules for op in graph.ops)
    found = [
        place
        for place, op in enumerate(products(graph))
        if not (draws and op.kind == "core" and not apart)
    ]
    if len(found) > MAX_PRODUCTS:
        costs = dict(zip((op.name for op in graph.ops), planner.costs.ops(graph), strict=True))
        ranked = sorted(found, key=lambda place: -costs[products(graph)[place].name])
        found = sorted(ranked[:MAX_PRODUCTS])
    return tuple(found)


def selective_options(planner: RunStages, graph: Graph) -> list[tuple[Option, LayerOutcome]]:
    """Every way to run one layer: no checkpoint, or one that keeps some of the products."""
    none = policy_option(planner.model, graph, planner.costs, NONE)
    nothing = layer_outcome(planner.model, graph, NONE)
    options = [(Option(none.stored, none.working, none.cost, Kept(None)), nothing)]
    places = keepable(planner, graph)
    for size in range(len(places) + 1):
        for chosen in combinations(places, size):
            options.append(_option(planner, graph, chosen))
    return options


def _option(
    planner: RunStages, graph: Graph, chosen: tuple[int, ...]
) -> tuple[Option, LayerOutcome]:
    sizes = planner.model.sizes
    every = products(graph)
    kept = [every[place] for place in chosen]
    names = {op.name for op in kept}
    stored = {graph.input, *(name for op in kept for name in op.outputs)} - graph.shared
    restored = {name for name in graph.saved if name not in stored and name not in graph.shared}
    last = max((i for i, op in enumerate(graph.ops) if op.saves), default=-1)
    cost = 0
    again: list[str] = []
    for i, (op, price) in enumerate(zip(graph.ops, planner.costs.ops(graph), strict=True)):
        reached = i < last or (i == last and bool(set(op.outputs) & set(op.saves)))
        if reached and op.name not in names:
            cost += price
            again.append(op.name)
    option = Option(
        sum(int(graph.tensors[name].bytes.value(sizes)) for name in stored),
        sum(int(graph.tensors[name].bytes.value(sizes)) for name in restored),
        cost,
        Kept(chosen, tuple(op.name for op in kept)),
    )
    return option, outcome_of(graph, stored, again)


_HEAD = """import functools

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)"""

_POLICY = """aten = torch.ops.aten
PRODUCTS = {
    getattr(aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(aten, name)
}
# For each pipeline stage: (layers, products kept by their place in the layer).
# None: no checkpoint; (): the layer runs again whole.
PLAN = {
@PLAN@
}


def policy(kept):
    calls = {False: 0, True: 0}

    def decide(ctx, op, *args, **kwargs):
        if op not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = calls[ctx.is_recompute]
        calls[ctx.is_recompute] += 1
        if place in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return decide"""

_APPLY = '''def contexts(kept):
    return create_selective_checkpoint_contexts(policy(kept))


def run(forward, kept, *args, **kwargs):
    if kept:
        kwargs["context_fn"] = functools.partial(contexts, kept)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def apply(layers, stage=0):
    """Call once with the transformer layers of this stage, in order."""
    plan = [kept for count, kept in PLAN[stage] for _ in range(count)]
    if len(plan) != len(layers):
        raise ValueError(f"{len(layers)} layers, the plan has {len(plan)}")
    for layer, kept in zip(layers, plan):
        if kept is not None:
            layer.forward = functools.partial(run, layer.forward, kept)'''


def snippet(stages: Sequence[Sequence[tuple[int, Kept]]]) -> str:
    """Code that applies a plan: for each stage (layers, what they keep) in order."""
    lines = []
    for index, rows in enumerate(stages):
        lines.append(f"    {index}: [")
        for count, kept in rows:
            names = f"  # {', '.join(kept.names)}" if kept.names else ""
            lines.append(f"        ({count}, {kept.products!r}),{names}")
        lines.append("    ],")
    return code(_POLICY, "\n".join(lines))


def code(policy: str, plan: str) -> str:
    """A module that checkpoints layers: imports, a policy with the plan's lines put in, apply()."""
    return "\n".join((_HEAD, "", policy.replace("@PLAN@", plan), "", "", _APPLY))
