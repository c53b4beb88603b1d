"""What each recompute policy makes of a layer."""

from __future__ import annotations

from actcalc.answers.explain.term import (
    CHECKPOINT,
    KORTHIKANTI,
    Body,
    Explainer,
    Term,
    gpt,
    layer_words,
    named,
    size_text,
)
from actcalc.cost.flops import (
    hardware_flops,
    model_flops,
    paper_selective_flops,
    rerun_flops,
)
from actcalc.layers.core.algebra import total
from actcalc.policy.outcome import LayerOutcome, layer_outcome
from actcalc.policy.rules import NONE, Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent
from actcalc.specs.recompute import MODULES

_FULL = f"{KORTHIKANTI}, section 5 and table 2; {CHECKPOINT}"


def _shares(staged: StagedRun, policy: Policy) -> tuple[float, float, int]:
    """Of the main layer: the share of bytes freed, of forward FLOPs run again, and those FLOPs."""
    graph, layer = staged.graph, staged.main.graph
    outcome = layer_outcome(graph, layer, policy)
    before = layer_outcome(graph, layer, NONE).sizes(graph).stored
    flops = graph.op_flops[layer]
    again, forward = sum(flops[op.name] for op in outcome.rerun), sum(flops.values())
    freed = 1 - outcome.sizes(graph).stored / before if before else 0.0
    return freed, again / forward if forward else 0.0, again


def _moved(staged: StagedRun, outcome: LayerOutcome) -> int:
    """Bytes that the re-run ops read and write on one rank."""
    sizes = staged.graph.tensor_bytes[staged.main.graph]
    return sum(sizes[name] for op in outcome.rerun for name in (*op.inputs, *op.outputs))


def _said(freed: float, share: float, again: int) -> str:
    """What a policy does, in one sentence."""
    if not freed and not again:
        return "it changes nothing here"
    frees = f"frees {percent(freed, 1)} of what a layer keeps" if freed >= 0 else (
        f"keeps {percent(-freed, 1)} more than a layer keeps without it"
    )  # fmt: skip
    cost = f"{percent(share, 2)} of the layer's forward FLOPs" if again else "no matrix product"
    return f"{frees} and runs {cost} again"


def _policy(name: str) -> Explainer:
    def explain(staged: StagedRun) -> Body:
        graph, policy = staged.graph, staged.policy(name)
        outcome = layer_outcome(graph, staged.main.graph, policy)
        size = outcome.sizes(graph)
        before = layer_outcome(graph, staged.main.graph, NONE).sizes(graph).stored
        freed, share, again = _shares(staged, policy)
        if not outcome.rerun:
            return _idle(staged, policy, before)
        step = rerun_flops(staged, policy) / model_flops(graph)
        lines = [
            "re-runs: " + ", ".join(named(op.name) for op in outcome.rerun),
            f"keeps: {size_text(outcome.stored_size, graph)} of {before:,} B per layer and GPU",
            f"brings back {size.restored:,} B on each GPU while one layer is re-run",
            f"computes {again:,} FLOPs again per layer and micro-batch, over all ranks: "
            f"{percent(share, 2)} of the layer's forward",
        ]
        if again:
            lines.append(f"Op by op that is {percent(step, 2)} of the step's model FLOPs.")
        else:
            lines.append(
                "What it costs are passes over memory: its ops read and write "
                f"{_moved(staged, outcome):,} B on each GPU."
            )
        if any(MODULES[module].discards_output for module in policy.modules):
            lines.append(
                "Its output is dropped too and made again before backward needs it "
                "(Megatron-Core CheckpointWithoutOutput)."
            )
        if policy.modules == ("core_attn",):
            lines += _published_selective(staged, policy)
        if policy.whole:
            lines += _whole(staged, policy)
        return Body(
            title=f"policy {name}",
            result=f"Of {layer_words(staged)}: {_said(freed, share, again)}.",
            lines=tuple(lines),
            source=_source(policy),
        )

    return explain


def _idle(staged: StagedRun, policy: Policy, kept: int) -> Body:
    """A policy whose modules the layer, which keeps ``kept`` bytes, does not have."""
    tags = {tag for op in staged.main.graph.ops for tag in op.modules}
    there = [row.name for row in MODULES.values() if row.tag in tags]
    others = [
        kind.label
        for kind in staged.kinds
        if kind is not staged.main and layer_outcome(staged.graph, kind.graph, policy).rerun
    ]
    lines = [
        f"Its modules there: {', '.join(there) or 'none'}.",
        f"It keeps {kept:,} B per layer and GPU, as under none.",
    ]
    lines += [f"It does re-run something in other layers: {', '.join(others)}."] if others else []
    return Body(
        title=f"policy {policy.name}",
        result=f"Of {layer_words(staged)}: no op belongs to it, so that it changes nothing.",
        lines=tuple(lines),
        source=_source(policy),
    )


def _source(policy: Policy) -> str:
    if policy.whole:
        return _FULL
    return "; ".join(MODULES[module].source for module in policy.modules)


def _whole(staged: StagedRun, policy: Policy) -> list[str]:
    graph, layout = staged.graph, staged.run.layout
    useful = model_flops(graph)
    ratio = 1 + rerun_flops(staged, policy) / useful
    lines = [
        "By parameter and token a whole layer takes 2 FLOPs forward, 4 backward and 2 re-run: 8 "
        f"instead of 6. Of the whole model, whose head is not run again, it is {ratio:.4f} times.",
    ]
    if staged.run.framework.early_stop:
        lines.append("A re-run stops at the last tensor that backward needs.")
    if layout.sp:
        kept = layer_outcome(graph, staged.main.graph, policy).stored_size.formula()
        other = staged.policy("full" if policy.name == "full-sharded" else "full-sharded")
        also = layer_outcome(graph, staged.main.graph, other).stored_size.formula()
        lines.append(
            f"Under sequence parallelism {policy.name} keeps {kept}, {other.name} {also}: the "
            "paper counts a replicated input, Megatron-Core keeps the split one."
        )
    return lines


def _published_selective(staged: StagedRun, policy: Policy) -> list[str]:
    """The core's share in the run's own terms; the paper's where its equation is applied."""
    run, graph = staged.run, staged.graph
    if not any(op.kind == "core" for op in staged.main.graph.ops):
        return []
    sizes = staged.whole_sizes
    core = total(op.flops for op in staged.main.graph.ops if op.kind == "core")
    other = total(op.flops for op in staged.main.graph.ops if op.kind != "core")
    share = int(core.value(sizes)) / int((core + other).value(sizes))
    lines = [
        f"A rank's part of the layer's forward is {(core + other).formula()} FLOPs, "
        f"{core.formula()} of it the attention core: {percent(share, 2)}. Run once more "
        "beside a backward "
        f"of twice the forward, it is {percent(share / 3, 2)} of the layer's step.",
    ]
    if hardware_flops(staged, policy).convention != "paper":
        return lines
    seq, batch, h = run.workload.seq, run.workload.micro_batch, run.model.hidden
    paper = float(paper_selective_flops(run.model, seq, batch) / model_flops(graph)) - 1
    return [
        *lines,
        f"4bs²h is s/18h = {percent(seq / (18 * h), 2)} of 72bsh², a GPT layer's step "
        "without its scores.",
        "The paper's equation for GPT, 72blsh²(1 + s/3h + v/12hl), adds s/6h: "
        f"{percent(paper, 2)}. That "
        "is the share of a forward pass, three times the share of the whole step; its HFU figures "
        "use it, so mfu and hardware_flops_per_model_flops_ratio follow it under the paper profile "
        "and recompute_flops keeps the count of ops.",
    ]


def _all(staged: StagedRun) -> Body:
    lines = []
    for name in staged.usual_policies:
        policy = staged.policy(name)
        if policy.segmented or name == "none":
            continue
        about = "; ".join(MODULES[module].about for module in policy.modules)
        lines.append(f"{name}{f' ({about})' if about else ''}: {_said(*_shares(staged, policy))}")
    lines += [
        "sqrt, uniform:N: segments of layers from one input (explain c*); recursive: segments of "
        "segments; block:N, every:N: some layers only; op: all but every second product.",
        "A policy combines modules with +, e.g. --policy selective+norm; several are compared.",
    ]
    return Body(
        title="recompute policies, or activation checkpointing",
        result="Forward keeps less, and backward runs some ops again to make what it needs.",
        lines=(f"Of {layer_words(staged)}:", *lines),
        source=f"{KORTHIKANTI}, section 5; {CHECKPOINT}; Megatron-Core recompute_modules",
    )


_CPU_STATE = 5056  # torch.get_rng_state(): the Mersenne Twister's 624 words and its cache
_CUDA_STATE = 16  # torch.cuda.get_rng_state(): seed and offset, 8 bytes each


def _rng(staged: StagedRun) -> Body:
    layer = staged.main.graph
    drops = [op for op in layer.ops if op.kind == "dropout"]
    policy = staged.full
    again = layer_outcome(staged.graph, layer, policy).rerun
    wraps = [len(list(policy.segments(chunk))) for chunk in staged.places[0]]
    held = sum(n * count for n, count in zip(staged.held(0), wraps, strict=True))
    each = _CPU_STATE + _CUDA_STATE
    names = ", ".join(named(op.name) for op in drops if op in again)
    lines = [
        "checkpoint(..., preserve_rng_state=True), the default, copies the state of the CPU's and "
        "of each CUDA generator before the wrapped forward, sets it again before the re-run, and "
        "puts the current one back after it.",
        f"A state is {_CPU_STATE:,} B of the CPU's generator and {_CUDA_STATE} B of each GPU's, "
        "both in host memory: no byte of device memory.",
        f"full wraps {sum(wraps)} segments on the first stage: {held} states wait there at most, "
        f"{held:,} x {each:,} B = {held * each:,} B of host memory.",
        f"Dropouts that run again under full: {names}."
        if names
        else "Nothing random runs again here: preserve_rng_state=False changes no gradient.",
        "Megatron-Core also saves its tensor-parallel generators (tensor_parallel/random.py, "
        "CudaRNGStatesTracker), so that ranks drop the same elements again.",
    ]
    return Body(
        title="random state of a re-run: preserve_rng_state",
        result="A re-run draws the same dropout masks as the forward did, because the generators' "
        "state is saved and set again"
        + ("." if names else "; here nothing is dropped, so nothing depends on it."),
        lines=tuple(lines),
        source=f"{CHECKPOINT} (preserve_rng_state, get_device_states); "
        "aten/src/ATen/CPUGeneratorImpl.cpp, CUDAGeneratorImpl.cpp",
    )


def _ffn_only(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    policy = staged.policy("ffn")
    freed, share, again = _shares(staged, policy)
    step = rerun_flops(staged, policy) / model_flops(graph)
    outcome = layer_outcome(graph, layer, policy)
    before = layer_outcome(graph, layer, NONE)
    lines = [
        f"freed: {size_text(before.stored_size - outcome.stored_size, graph)} of "
        f"{size_text(before.stored_size, graph)} per layer and GPU, {percent(freed, 1)}",
        f"run again: {again:,} FLOPs per layer, over all ranks, {percent(share, 1)} of "
        "its forward, "
        f"{percent(step, 1)} of the step's model FLOPs",
    ]
    others = [name for name in ("attention", "selective") if name in staged.usual_policies]
    for name in others:
        other_freed, other_share, _ = _shares(staged, staged.policy(name))
        lines.append(
            f"{name} instead frees {percent(other_freed, 1)} for "
            f"{percent(other_share, 1)} of the forward"
        )
    paper = gpt()
    square_free = paper.changed(
        workload=paper.run.workload.model_copy(update={"attention": "flash"})
    )
    best, cost, _ = _shares(square_free, square_free.policy("ffn"))
    lines += [
        f"Of GPT without s x s tensors (flash attention) it is {percent(best, 1)} freed "
        f"for {percent(cost, 1)} of "
        "a forward.",
        "35-40 % freed for 12 % of forward compute is said of FFN-only checkpoints of BERT-base "
        "and GPT-2. Two products of 4h width are the larger part of a layer's FLOPs, so 12 % can "
        "only be a step's time (which grows less than its FLOPs where kernels wait for memory), "
        "and bytes depend on whether s x s tensors are kept.",
    ]
    return Body(
        title="FFN-only checkpointing: 35-40 % for 12 %?",
        result=f"Re-running only the feed-forward frees {percent(freed, 1)} of what a "
        "layer keeps here and "
        f"runs {percent(share, 1)} of its forward FLOPs again.",
        lines=tuple(lines),
        source="this program's layer graphs; compare --device gives the step's time",
    )


TERMS = (
    Term(
        "policies",
        "recompute policies side by side",
        _all,
        words=(
            "policy", "checkpoint", "checkpointing", "recompute", "recomputation", "remat",
            "activation checkpointing", "gradient checkpointing", "activation recomputation",
            "gradient_checkpointing", "rematerialization",
        ),
        flags=("policy",),
    ),
    Term(
        "selective",
        "re-running the attention core alone: 2.7 %",
        _policy("selective"),
        words=("core_attn", "2.7", "s/6h", "1+s/6h", "s/18h", "re-run", "0.9", "70"),
    ),
    Term("full", "re-running whole layers from their input", _policy("full")),
    Term(
        "full-sharded",
        "the same, with the input split over tensor-parallel ranks",
        _policy("full-sharded"),
        words=("distribute-saved-activations",),
    ),
    Term("ffn", "re-running the feed-forward block", _policy("ffn"), words=("mlp", "feed-forward")),
    Term("attention", "re-running the attention block", _policy("attention")),
    Term("norm", "re-running the norms", _policy("norm"), words=("layernorm", "rmsnorm")),
    Term(
        "ffn-only",
        "why FFN-only is not 35-40 % for 12 %",
        _ffn_only,
        words=("12", "35", "40", "35-40", "ffnonly"),
        model="bert-base",
        layout={},
    ),
    Term(
        "rng",
        "random state: what preserve_rng_state does and costs",
        _rng,
        words=("preserve_rng_state", "rng state", "seed", "random", "mask", "dropout mask"),
        flags=("dropout",),
    ),
)  # fmt: skip
"""The terms of this module."""
