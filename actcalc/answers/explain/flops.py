"""FLOPs of a step: 6ΨD and 8ΨD, the closed form, utilisation."""

from __future__ import annotations

from actcalc.answers.explain.term import KORTHIKANTI, NARAYANAN, Body, Term
from actcalc.cost.flops import (
    forward_flops,
    head_forward_flops,
    layers_forward_flops,
    model_flops,
    paper_model_flops,
)
from actcalc.run.staged import StagedRun


def _eight(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    layers, head = layers_forward_flops(graph), head_forward_flops(graph)
    useful = model_flops(graph)
    tokens = run.workload.tokens
    count = staged.parameters
    matrix = 6 * count * tokens
    lines = (
        "Every parameter of a matrix product costs 2 FLOPs per token forward, 4 backward: 6ΨD.",
        "Full recomputation runs the forward twice: 2 + 4 + 2 = 8ΨD, one third more.",
        f"Here, one micro-batch: layers {layers:,} + head {head:,} forward, "
        f"model FLOPs 3x that = {useful:,}",
        f"6ΨD with Ψ = {count:,}, D = {tokens:,} is {matrix:,}: the difference is attention's "
        "s x s products (which 6ΨD leaves out) less the embedding lookup.",
        f"full: ({useful:,} + {layers:,}) / {useful:,} = {1 + layers / useful:.4f}, not 4/3: the "
        "output head is not run again.",
    )
    return "6ΨD and 8ΨD", lines, f"{NARAYANAN}, section 3.5 and appendix; {KORTHIKANTI}, appendix A"


def _closed_form(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    seq, batch = run.workload.seq, run.workload.micro_batch
    s, h, v, layers = seq, run.model.hidden, run.model.vocab, run.model.layers
    exact = model_flops(graph)
    closed = paper_model_flops(run.model, seq, batch)
    lines = (
        "Per layer and token forward: qkv 6h², output 2h², FFN 16h², scores and values 4sh.",
        "Sum over bs tokens and l layers, plus 2hv for the head, three times for backward:",
        "72·b·l·s·h²(1 + s/6h + v/12hl)",
        f"s/6h = {s / (6 * h):.5f}   v/12hl = {v / (12 * h * layers):.5f}",
        f"closed form {float(closed):,.0f}; sum over the ops {exact:,}"
        + ("" if closed == exact else " (another feed-forward or attention than GPT's)"),
    )
    return "model FLOPs of a GPT step", lines, f"{KORTHIKANTI}, appendix A"


def _mfu(staged: StagedRun) -> Body:
    graph = staged.graph
    lines = (
        "MFU = model FLOPs / (step time · GPUs · peak FLOP/s): only what the model needs.",
        "HFU = (model + re-run FLOPs) / (step time · GPUs · peak FLOP/s): what the GPU did.",
        f"model FLOPs of one micro-batch here: {model_flops(graph):,} (three times the forward's "
        f"{forward_flops(graph):,})",
        "Causal attention is counted in full, as the papers do.",
    )
    return "model and hardware FLOPs utilisation", lines, f"{KORTHIKANTI}, section 6.3, appendix A"


TERMS = (
    Term(
        "8psi",
        "6ΨD and 8ΨD: FLOPs by parameters",
        _eight,
        words=("6psi", "6ψd", "8ψd", "6nd", "8nd", "of step"),
    ),
    Term("72", "the closed form of model FLOPs", _closed_form, words=("flops",)),
    Term("mfu", "model and hardware FLOPs utilisation", _mfu, words=("hfu",)),
)
"""The terms of this module."""
