"""What a layer keeps, and what each recompute policy makes of it."""

from __future__ import annotations

from actcalc.answers.explain.term import DAO, KORTHIKANTI, Body, Explainer, Term
from actcalc.cost.flops import model_flops, paper_model_flops, paper_selective_flops
from actcalc.layers.core.algebra import Expr, total
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.specs.recompute import MODULES


def size_text(expr: Expr, graph: ModelGraph) -> str:
    """A size as formula and bytes."""
    return f"{expr.formula()} = {int(expr.value(graph.sizes)):,} B"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _coefficient(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    layer = staged.main.graph
    lines = ["What one layer keeps for backward, by the op that saves it:"]
    own = [name for name in layer.saved if name not in layer.shared]
    for group in dict.fromkeys(layer.savers[name][0].group for name in own):
        names = [name for name in own if layer.savers[name][0].group == group]
        parts = "  ".join(f"{layer.tensors[n].bytes.formula()} ({_words(n)})" for n in names)
        lines.append(f"{group}: {parts}")
        lines.append(f"    = {size_text(layer.bytes_of(names), graph)}")
    lines.append(f"all: {size_text(layer.bytes_of(own), graph)}")
    lines.append("16-bit tensors weigh 2 bytes per element, dropout masks 1.")
    if run.framework.idealised:
        lines.append(
            "Without sharding, GPT with eager attention and dropout: attention 11 + FFN 19 + "
            "norms 4 = 34 sbh, and 5as²b for the s x s tensors."
        )
    return "what one layer keeps: 34 and 5as/h", tuple(lines), f"{KORTHIKANTI}, section 4.1"


def _scores(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    layer = staged.main.graph
    square = [n for n in layer.saved if layer.tensors[n].bytes.formula().count("s²")]
    lines = [f"{_words(n)}: {size_text(layer.tensors[n].bytes, graph)}" for n in square]
    if not square:
        lines.append("No s x s tensor is kept here: flash attention makes the scores again.")
    else:
        expr = layer.bytes_of(square)
        share = int(expr.value(graph.sizes)) / int(layer.bytes_of(layer.saved).value(graph.sizes))
        lines.append(f"together {size_text(expr, graph)}: {share:.0%} of the layer")
        lines.append("2 (softmax output) + 1 (dropout mask) + 2 (dropped output) = 5 bytes a score")
        ratio = 5 * run.model.heads * run.workload.seq / run.model.hidden
        lines.append(
            f"5as/h = 5·{run.model.heads}·{run.workload.seq}/{run.model.hidden} = {ratio:g}"
        )
    return "the s x s tensors of attention", tuple(lines), f"{KORTHIKANTI}, section 4.1"


def _policy(name: str) -> Explainer:
    def explain(staged: StagedRun) -> Body:
        graph, policy = staged.graph, staged.policy(name)
        layer = staged.main.graph
        outcome = layer_outcome(graph, layer, policy)
        base = layer_outcome(graph, layer, NONE)
        size = outcome.sizes(graph)
        before = base.sizes(graph).stored
        flops = graph.op_flops[layer]
        rerun = sum(flops[op.name] for op in outcome.rerun)
        forward = sum(flops.values())
        lines = [
            "re-runs: " + (", ".join(_words(op.name) for op in outcome.rerun) or "nothing"),
            f"keeps: {size_text(outcome.stored_size, graph)} of {before:,} B per layer "
            f"({1 - size.stored / before:.1%} freed)",
            f"brings back {size.restored:,} B while one layer is re-run",
            f"computes {rerun:,} FLOPs again per layer and micro-batch: "
            f"{rerun / forward:.2%} of the layer's forward",
        ]
        if any(MODULES[module].discards_output for module in policy.modules):
            lines.append(
                "Its output is dropped too and made again before backward needs it "
                "(Megatron-Core CheckpointWithoutOutput)."
            )
        if policy.modules == ("core_attn",):
            lines += _published_selective(staged, rerun)
        if policy.whole:
            lines.append(
                "The whole layer runs again from its input: 2 forward + 4 backward + 2 re-run = 8 "
                "instead of 6 FLOPs per parameter and token."
            )
        if name == "full":
            lines.append(
                "The paper counts 2sbh for the input also under sequence parallelism (replicated); "
                "Megatron keeps the split one, 2sbh/t: that is full-sharded."
            )
        source = f"{KORTHIKANTI}, section 5 and table 2; torch.utils.checkpoint"
        return f"policy {name}", tuple(lines), source

    return explain


def _published_selective(staged: StagedRun, rerun: int) -> list[str]:
    run, graph = staged.run, staged.graph
    seq, batch = run.workload.seq, run.workload.micro_batch
    useful = model_flops(graph)
    sizes = staged.whole_sizes
    core = total(op.flops for op in staged.main.graph.ops if op.kind == "core")
    other = total(op.flops for op in staged.main.graph.ops if op.kind != "core")
    share = int(core.value(sizes)) / int((core + other).value(sizes))
    lines = [
        f"Op by op that is {rerun * run.model.depth / useful:.2%} of the step's model FLOPs.",
        f"A rank's part of the layer's forward is {(core + other).formula()} FLOPs, "
        f"{core.formula()} of it the attention core: {share:.2%}. Run once more beside a backward "
        f"of twice the forward, it is {share / 3:.2%} of the layer's step.",
    ]
    if paper_model_flops(run.model, seq, batch) == useful:
        paper = float(paper_selective_flops(run.model, seq, batch) / useful) - 1
        lines += [
            f"4bs²h is s/18h = {seq / (18 * run.model.hidden):.2%} of 72bsh², the layer's step "
            "without its scores.",
            f"The paper's equation, 72blsh²(1 + s/3h + v/12hl), adds s/6h: {paper:.2%}. That is "
            "the share of a forward pass, three times the share of the whole step; its HFU "
            "figures use it, so mfu and hardware_flops_per_model_flops_ratio follow it under the "
            "paper profile and recompute_flops keeps the count of ops.",
        ]
    return lines


def _transient(staged: StagedRun) -> Body:
    graph = staged.graph
    layer = staged.main.graph
    lines = ["While a segment re-runs, all it saves is alive again, beside everything stored:"]
    for name in ("selective", "full"):
        outcome = layer_outcome(graph, layer, staged.policy(name))
        size = outcome.sizes(graph)
        lines.append(
            f"{name}: stored {size.stored:,} B per layer, {size.restored:,} B brought back"
        )
    lines.append(
        "peak with transient = stored (all layers, all microbatches in flight) + one segment."
    )
    return "why recomputation has a peak of its own", tuple(lines), "torch.utils.checkpoint"


def _tensor_parallel(staged: StagedRun) -> Body:
    lines = (
        "Inside attention and FFN every tensor is split t ways: 24sbh/t + 5as²b/t.",
        "Layer inputs, norm outputs and residual dropout masks are not: 10sbh on every rank.",
        "sbh(10 + 24/t + 5as/(ht)); sequence parallelism splits those 10 as well: "
        "sbh(34 + 5as/h)/t.",
    )
    return "tensor and sequence parallelism", lines, f"{KORTHIKANTI}, section 4.2, table 2"


def _flash(staged: StagedRun) -> Body:
    lines = (
        "Flash attention keeps q, k, v, its output and one fp32 logsumexp per token and head.",
        "Backward makes the scores again tile by tile: it is a selective recomputation built in,",
        "so `selective` frees next to nothing with it.",
    )
    return "flash attention", lines, f"{DAO}, section 3.1"


TERMS = (
    Term(
        "34",
        "what one layer keeps for backward: 34 and 5as/h",
        _coefficient,
        words=("sbh", "layer", "per layer", "all layers", "saved", "none"),
    ),
    Term("5as/h", "the s x s tensors of attention", _scores, words=("as/h", "scores", "80")),
    Term(
        "selective",
        "re-running the attention core alone",
        _policy("selective"),
        words=("core_attn", "2.7", "s/6h", "1+s/6h", "re-run"),
    ),
    Term("full", "re-running whole layers from their input", _policy("full"), words=("2sbh",)),
    Term(
        "full-sharded",
        "the same, with the input split over tensor-parallel ranks",
        _policy("full-sharded"),
        words=("2sbh/t",),
    ),
    Term("ffn", "re-running the feed-forward block", _policy("ffn"), words=("mlp",)),
    Term("attention", "re-running the attention block", _policy("attention")),
    Term("norm", "re-running the norms", _policy("norm"), words=("layernorm",)),
    Term("transient", "why recomputation has a peak of its own", _transient, words=("bring back",)),
    Term(
        "tp",
        "what tensor and sequence parallelism split",
        _tensor_parallel,
        words=("sp", "10", "24"),
    ),
    Term("flash", "flash attention, a recomputation built in", _flash),
)
"""The terms of this module."""
