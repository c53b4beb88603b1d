"""How a number is derived: a few lines, computed from the graphs of a run, with the source."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from actcalc.answers.compare import optimum
from actcalc.answers.explain import memory as explain_memory
from actcalc.answers.explain.overhead import Overhead, PolicyOverhead, overhead
from actcalc.cost.flops import (
    forward_flops,
    head_forward_flops,
    layers_forward_flops,
    model_flops,
    paper_model_flops,
    paper_selective_flops,
)
from actcalc.cost.rates import default_note
from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr, total
from actcalc.layers.core.context import LEGEND
from actcalc.layers.model import ModelGraph
from actcalc.policy.checkpoints import segment_memory
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import MODULES, NONE
from actcalc.run.staged import StagedRun
from actcalc.specs.result import Result
from actcalc.specs.run import Run

KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation, arXiv:2205.05198"
NARAYANAN = (
    "Narayanan et al. 2021, Efficient Large-Scale Training on GPU Clusters, arXiv:2104.04473"
)
CHEN = "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
DAO = "Dao et al. 2022, FlashAttention, arXiv:2205.14135"


@dataclass(frozen=True, kw_only=True)
class Explanation(Result):
    """A term, its derivation line by line, and where it comes from."""

    schema_name: ClassVar[str] = "actcalc/explain/1"

    term: str
    """The term asked for."""
    title: str
    """What it is, in one line."""
    lines: tuple[str, ...]
    """The derivation."""
    source: str
    """Paper and section, or framework file."""
    example: str
    """The run the numbers are of."""
    overhead: Overhead | None = None
    """For the term overhead: where each policy's slow-down comes from, in numbers; else null."""


Body = tuple[str, tuple[str, ...], str]
Explainer = Callable[[StagedRun], Body]


def _size(expr: Expr, graph: ModelGraph) -> str:
    return f"{expr.formula()} = {int(expr.value(graph.sizes)):,} B"


def _coefficient(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    layer = staged.main.graph
    lines = ["What one layer keeps for backward, by the op that saves it:"]
    own = [name for name in layer.saved if name not in layer.shared]
    for group in dict.fromkeys(layer.savers[name][0].group for name in own):
        names = [name for name in own if layer.savers[name][0].group == group]
        parts = "  ".join(f"{layer.tensors[n].bytes.formula()} ({_words(n)})" for n in names)
        lines.append(f"{group}: {parts}")
        lines.append(f"    = {_size(layer.bytes_of(names), graph)}")
    lines.append(f"all: {_size(layer.bytes_of(own), graph)}")
    lines.append("16-bit tensors weigh 2 bytes per element, dropout masks 1.")
    if run.framework.name == "paper":
        lines.append(
            "Without sharding, GPT with eager attention and dropout: attention 11 + FFN 19 + "
            "norms 4 = 34 sbh, and 5as²b for the s x s tensors."
        )
    return "what one layer keeps: 34 and 5as/h", tuple(lines), f"{KORTHIKANTI}, section 4.1"


def _scores(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    layer = staged.main.graph
    square = [n for n in layer.saved if layer.tensors[n].bytes.formula().count("s²")]
    lines = [f"{_words(n)}: {_size(layer.tensors[n].bytes, graph)}" for n in square]
    if not square:
        lines.append("No s x s tensor is kept here: flash attention makes the scores again.")
    else:
        expr = layer.bytes_of(square)
        share = int(expr.value(graph.sizes)) / int(layer.bytes_of(layer.saved).value(graph.sizes))
        lines.append(f"together {_size(expr, graph)}: {share:.0%} of the layer")
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
            f"keeps: {_size(outcome.stored_size, graph)} of {before:,} B per layer "
            f"({1 - size.stored / before:.1%} freed)",
            f"brings back {size.restored:,} B while one layer is re-run",
            f"computes {rerun:,} FLOPs again per layer and micro-batch: "
            f"{rerun / forward:.2%} of the layer's forward",
        ]
        if MODULES.get(policy.modules[0] if policy.modules else "") and any(
            MODULES[m].discards_output for m in policy.modules
        ):
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


def _optimum(staged: StagedRun) -> Body:
    graph = staged.graph
    layer = staged.main.graph
    best = optimum(staged)
    count, held = best.layers, best.in_flight
    near = min(count, max(1, round(best.continuous)))
    counted = best.input_bytes if layer.input in layer.saved else 0

    def memory(segments: int) -> int:
        return segment_memory(
            segments,
            layers=count,
            input_bytes=best.input_bytes,
            layer_bytes=best.layer_bytes,
            counted_bytes=counted,
            in_flight=Fraction(held).limit_denominator(10**6),
        )

    inside = f"√({count}·{best.layer_bytes_per_input_bytes_ratio:.4g}"
    inside += f"/{held:.4g})" if held != 1 else ")"
    lines = [
        "memory(c) = m·c·A_in + (l/c)·A_int - A_in: c checkpoints stay for each of m micro-batches "
        "in flight, one segment of l/c layers works, whose first input is its checkpoint.",
        f"A_in = {_size(layer.tensors[layer.input].bytes, graph)}",
        f"A_int = {_size(layer.bytes_of(n for n in layer.saved if n not in layer.shared), graph)}",
        f"A_int/A_in = {best.layer_bytes_per_input_bytes_ratio:.4g}",
        f"l = {count} layers on the first pipeline stage, m = {held:.4g} in flight",
        f"d/dc = 0 at c* = √(l·A_int/(m·A_in)) = {inside} = {best.continuous:.2f}, "
        f"{best.continuous_bytes:,.0f} B",
        f"c* is no plan: {near} checkpoints over {count} whole layers leave segments of "
        f"{-(-count // near)}, {memory(near):,} B.",
        f"Best realisable: {best.integer} checkpoints, {best.layers_per_segment} layer(s) each, "
        f"{best.total_bytes:,} B.",
        "With A_in = A_int it is the √n scheme: 96 equal layers in 10 segments keep "
        "10 + 9.6 = 19.6 layers' worth.",
    ]
    source = f"{CHEN}, section 4.3; {NARAYANAN}, section 3.5"
    return "the best number of checkpoints", tuple(lines), source


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


def _units(staged: StagedRun) -> Body:
    lines = (
        "GB = 10^9 bytes, MB = 10^6 (the default); GiB = 2^30, MiB = 2^20 (--units GiB).",
        "JSON and CSV hold exact bytes.",
    )
    return "units", lines, "IEC 80000-13"


def _legend(staged: StagedRun) -> Body:
    graph = staged.graph
    lines = tuple(
        f"{letter}  {meaning}" + (f" = {graph.sizes[letter]}" if letter in graph.sizes else "")
        for letter, meaning in LEGEND.items()
    )
    return "symbols", lines, f"{KORTHIKANTI}, table 1; this program's own for the rest"


_EXPLAINERS: Mapping[str, Explainer] = {
    "34": _coefficient,
    "5as/h": _scores,
    "c*": _optimum,
    "selective": _policy("selective"),
    "full": _policy("full"),
    "full-sharded": _policy("full-sharded"),
    "ffn": _policy("ffn"),
    "attention": _policy("attention"),
    "norm": _policy("norm"),
    "8psi": _eight,
    "72": _closed_form,
    "mfu": _mfu,
    "transient": _transient,
    "tp": _tensor_parallel,
    "flash": _flash,
    "symbols": _legend,
    "units": _units,
}

ALIASES: Mapping[str, str] = {
    "sbh": "34",
    "layer": "34",
    "per layer": "34",
    "all layers": "34",
    "saved": "34",
    "none": "34",
    "as/h": "5as/h",
    "scores": "5as/h",
    "80": "5as/h",
    "cstar": "c*",
    "c": "c*",
    "checkpoints": "c*",
    "sqrt": "c*",
    "core_attn": "selective",
    "2.7": "selective",
    "s/6h": "selective",
    "1+s/6h": "selective",
    "2sbh": "full",
    "2sbh/t": "full-sharded",
    "mlp": "ffn",
    "layernorm": "norm",
    "6psi": "8psi",
    "6ψd": "8psi",
    "8ψd": "8psi",
    "6nd": "8psi",
    "8nd": "8psi",
    "flops": "72",
    "of step": "8psi",
    "re-run": "selective",
    "hfu": "mfu",
    "bring back": "transient",
    "sp": "tp",
    "10": "tp",
    "24": "tp",
    "legend": "symbols",
    "gb": "units",
    "gib": "units",
}

OVERHEAD = "overhead"
"""The one term that depends on device and policies."""
_OVERHEAD_WORDS = (OVERHEAD, "slow-down", "slowdown", "39", "39%", "39 %", "33%")
TERMS = (*_EXPLAINERS, *explain_memory.EXPLAINERS, OVERHEAD)
HEEDS: Mapping[str, tuple[str, ...]] = {
    "c*": ("schedule", "vpp", "global_batch", "layers_per_stage"),
    **explain_memory.HEEDS,
}
"""Options of the command line that change a term's numbers and no other term's."""
_WORDS = {**ALIASES, **explain_memory.ALIASES}


def is_overhead(term: str) -> bool:
    """Whether ``term`` asks for a slow-down in time, which needs a device."""
    return term.strip().lower() in _OVERHEAD_WORDS


def term_of(text: str) -> str:
    """The term that ``text`` names; ``SpecError`` with a hint for one that nothing is known of."""
    if is_overhead(text):
        return OVERHEAD
    word = text.strip().lower()
    word = word.replace("ψ", "psi").removesuffix("d") if "ψ" in text else word
    key = word if word in TERMS else _WORDS.get(word, "")
    if key:
        return key
    # A number is no misspelling of another one.
    known = [name for name in (*TERMS, *_WORDS) if sum(map(str.isalpha, name)) >= 3]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "terms: " + ", ".join(TERMS)
    raise SpecError(f"nothing to explain under {text!r}", hint)


def explain_term(term: str, run: Run, efficiency: Mapping[str, float] | None = None) -> Explanation:
    """Explain ``term`` with the numbers of ``run``; ``SpecError`` for an unknown term.

    ``efficiency`` overrides shares of a device's peaks where the term is of times.
    """
    if is_overhead(term):
        return _explain_overhead(run, efficiency)
    key = term_of(term)
    explainer = _EXPLAINERS.get(key) or explain_memory.EXPLAINERS[key]
    title, lines, origin = explainer(StagedRun(run))
    return Explanation(term=key, title=title, lines=lines, source=origin, example=_example(run))


def _example(run: Run) -> str:
    layout = run.layout
    degrees = [
        f"{n} {getattr(layout, n)}"
        for n in ("tp", "pp", "cp", "ep", "dp")
        if getattr(layout, n) > 1
    ]
    degrees += ["sp"] if layout.sp else []
    return " ".join(
        [
            run.model.name,
            f"s {run.workload.seq} b {run.workload.micro_batch}",
            *degrees,
            f"{run.workload.attention} attention, {run.framework.name} kernels",
        ]
    )


def _explain_overhead(run: Run, efficiency: Mapping[str, float] | None) -> Explanation:
    found = overhead(run, run.policies or ("full", "selective"), efficiency)
    lines = []
    for one in found.policies:
        lines.append(
            f"{one.policy}: {'; '.join(_layer_words(one))}; a step of "
            f"{one.plain_step_seconds:.4g} s grows to {one.step_seconds:.4g} s, "
            f"{100 * one.slowdown_ratio:.1f} %."
        )
        lines.append(one.reason)
    lines += found.reasons
    note = default_note(run.device, efficiency) if run.device else ""
    lines += [note] if note else []
    return Explanation(
        term=OVERHEAD,
        title="where a policy's slow-down comes from",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, section 6.2; times from presets/devices and presets/efficiency",
        example=f"{_example(run)}, {found.device}",
        overhead=found,
    )


def _layer_words(one: PolicyOverhead) -> Iterator[str]:
    """What each kind of layer takes, and what re-running adds to it."""
    for layer in one.layers:
        what = "one layer's forward and backward"
        if len(one.layers) > 1:
            what = f"forward and backward of one of {layer.count} {layer.layer} layers"
        yield (
            f"{what} take "
            f"{1e3 * (layer.forward_seconds + layer.backward_seconds):.4g} ms, re-running adds "
            f"{1e3 * layer.rerun_seconds:.4g} ms, {100 * layer.layer_ratio:.1f} %"
        )


def _words(name: str) -> str:
    return name.replace("_", " ")
