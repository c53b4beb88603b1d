"""FLOPs of a step: by parameters, in closed form, utilisation, and where products are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

from actcalc.answers.explain.term import (
    KORTHIKANTI,
    NARAYANAN,
    Body,
    Term,
    alone,
    gpt,
    layer_words,
    own_saved,
)
from actcalc.cost.flops import (
    forward_flops,
    head_forward_flops,
    layers_forward_flops,
    model_flops,
    paper_model_flops,
    prediction_forward_flops,
    rerun_flops,
)
from actcalc.io.runs import load_run
from actcalc.layers.core.algebra import Expr, symbol, total
from actcalc.layers.core.graph import Op, Weight
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent

_TABLE = "tables that are looked up and not multiplied"


def _label(op: Op) -> str:
    """What an op's share of 6ΨD less model FLOPs is due to."""
    if not op.weights:
        return "attention's scores and values" if op.kind == "core" else f"products of {op.group}"
    if any(weight.expert for weight in op.weights):
        return "experts that a token is not sent to"
    if op.kind == "embedding" or any(weight.scope for weight in op.weights):
        return _TABLE
    return "matrices" if op.flops else "norms and other vectors"


def gap(staged: StagedRun) -> dict[str, int]:
    """6ΨD less the model FLOPs of one micro-batch, part by part; the parts sum to it."""
    graph, sizes = staged.graph, staged.whole_sizes
    tokens, seen = staged.run.workload.tokens, set[str]()
    found: Counter[str] = Counter()

    def numbers(weight: Weight) -> int:
        if weight.scope in seen:
            return 0
        if weight.scope:
            seen.add(weight.scope)
        return int(weight.parameters.value(sizes))

    for one, count in graph.graphs(mtp=False):
        flops = graph.op_flops[one]
        for op in one.ops:
            vectors = sum(numbers(w) * (1 if w.scope else count) for w in op.weights if _thin(w))
            whole = sum(numbers(w) * (1 if w.scope else count) for w in op.weights if not _thin(w))
            found["norms, biases and other vectors"] += 6 * vectors * tokens
            found[_label(op)] += 6 * whole * tokens - 3 * count * flops[op.name]
    found["layers that predict further tokens"] -= 3 * prediction_forward_flops(graph)
    return {label: size for label, size in found.items() if size}


def _thin(weight: Weight) -> bool:
    return len(weight.shape) == 1


def _eight(staged: StagedRun) -> Body:
    graph = staged.graph
    useful, tokens, count = model_flops(graph), staged.run.workload.tokens, staged.parameters
    matrix = 6 * count * tokens
    again = rerun_flops(staged, staged.full)
    parts = gap(staged)
    head = head_forward_flops(graph) + prediction_forward_flops(graph)
    lines = [
        "Every parameter of a matrix product costs 2 FLOPs per token forward, 4 backward: 6ΨD. "
        "Running the forward again makes it 8ΨD, one third more.",
        f"One micro-batch over all ranks: layers {layers_forward_flops(graph):,} + head {head:,} "
        f"forward; model FLOPs are 3 times that, {useful:,}.",
        f"6ΨD with Ψ = {count:,} and D = {tokens:,} is {matrix:,}, "
        f"{abs(matrix - useful):,} {'more' if matrix >= useful else 'less'}:",
        *(
            f"{'+' if size > 0 else '-'} {abs(size):,}: {label}"
            for label, size in sorted(parts.items(), key=lambda pair: -abs(pair[1]))
        ),
    ]
    if any(label == "experts that a token is not sent to" for label in parts):
        idle = parts["experts that a token is not sent to"] // (6 * tokens)
        lines.append(
            f"Without those experts Ψ is {count - idle:,}: the parameters that a token meets."
        )
    lines.append(
        f"full: ({useful:,} + {again:,}) / {useful:,} = {1 + again / useful:.4f}, not 4/3: only "
        "the layers run again" + (", up to what backward needs." if _early(staged) else ".")
    )
    return Body(
        title="6ΨD and 8ΨD",
        result=f"6ΨD is {matrix / useful:.4f} times the model FLOPs here; full recomputation makes "
        f"them {1 + again / useful:.4f} times as many, not 8/6.",
        lines=tuple(lines),
        source=f"{NARAYANAN}, section 3.5 and appendix; {KORTHIKANTI}, appendix A",
    )


def _early(staged: StagedRun) -> bool:
    return staged.run.framework.early_stop


def _per_token(staged: StagedRun, ops: Sequence[Op]) -> str:
    """Forward FLOPs of some ops for one token, as a formula; the whole model on one device."""
    return (total(op.flops for op in ops) / (symbol("s") * symbol("b"))).formula()


def _by_group(staged: StagedRun) -> str:
    single = alone(staged)
    layer = single.main.graph
    groups: dict[str, list[Op]] = {}
    for op in layer.ops:
        if op.flops:
            name = "scores and values" if op.kind == "core" else op.group
            groups.setdefault(name, []).append(op)
    return ", ".join(f"{name} {_per_token(single, ops)}" for name, ops in groups.items())


def _closed_form(staged: StagedRun) -> Body:
    run = staged.run
    seq, batch = run.workload.seq, run.workload.micro_batch
    h, v, layers = run.model.hidden, run.model.vocab, run.model.layers
    exact, closed = model_flops(staged.graph), paper_model_flops(run.model, seq, batch)
    lines = [
        f"Forward, per token and layer ({layer_words(staged)}): {_by_group(staged)}; the head "
        f"{_per_token(staged, [op for op in alone(staged).graph.head.ops if op.flops])}.",
        "Summed over bs tokens and l layers, three times for backward.",
    ]
    form = "72·b·l·s·h²(1 + s/6h + v/12hl)"
    if closed == exact:
        lines += [
            f"For a GPT that is {form}.",
            f"s/6h = {seq / (6 * h):.5f}   v/12hl = {v / (12 * h * layers):.5f}",
            f"closed form {closed:,}; sum over the ops {exact:,}",
        ]
    else:
        lines.append(
            f"GPT's closed form, {form}, would be {closed:,} ({closed / exact:.4f} times): these "
            f"layers are no GPT's, whose are {_by_group(gpt())}."
        )
    return Body(
        title="model FLOPs in closed form",
        result=f"Forward and backward of one micro-batch take {exact:,} model FLOPs, over all "
        "ranks.",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, appendix A",
    )


def _ninety_six(staged: StagedRun) -> Body:
    run, graph = staged.run, staged.graph
    seq, batch = run.workload.seq, run.workload.micro_batch
    h, v, layers = run.model.hidden, run.model.vocab, run.model.layers
    useful, again = model_flops(graph), rerun_flops(staged, staged.full)
    closed = batch * seq * (96 * layers * h * h + 16 * layers * seq * h + 6 * h * v)
    form = "96·B·s·l·h²(1 + s/6h + V/16lh)"
    gpts = paper_model_flops(run.model, seq, batch) == useful
    lines = [
        "It is the FLOPs of a step whose layers all run again: 4 times the layers' forward "
        "(forward, twice that backward, re-run) and 3 times the head's.",
        f"layers {layers_forward_flops(graph):,} and head {head_forward_flops(graph):,} forward, "
        "one micro-batch over all ranks",
        f"model FLOPs {useful:,} + run again {again:,} = {useful + again:,}",
    ]
    if gpts:
        lines += [
            "GPT: 4·24·b·s·l·h²(1 + s/6h) + 3·2·b·s·h·V = " + form,
            f"s/6h = {seq / (6 * h):.5f}   V/16lh = {v / (16 * h * layers):.5f}",
            f"closed form {closed:,}",
            "Less the re-run it is 72·b·l·s·h²(1 + s/6h + v/12hl): see explain 72. A utilisation "
            "by 96 is an HFU, by 72 an MFU.",
        ]
    else:
        lines.append(f"GPT's closed form, {form}, would be {closed:,}: these layers are no GPT's.")
    return Body(
        title="FLOPs with full recomputation: 96Bslh²(1 + s/6h + V/16lh)",
        result=f"With full recomputation one micro-batch takes {useful + again:,} FLOPs over all "
        f"ranks, {(useful + again) / useful:.4f} times the model FLOPs.",
        lines=tuple(lines),
        source=f"{NARAYANAN}, section 3.5 and appendix",
    )


def _mfu(staged: StagedRun) -> Body:
    graph = staged.graph
    again = rerun_flops(staged, staged.full)
    useful = model_flops(graph)
    lines = (
        "MFU = model FLOPs / (step time · GPUs · peak FLOP/s): only what the model needs.",
        "HFU = (model + re-run FLOPs) / (step time · GPUs · peak FLOP/s): what the GPU did.",
        f"model FLOPs of one micro-batch, over all ranks: {useful:,} (three times the forward's "
        f"{forward_flops(graph):,})",
        f"Under full recomputation HFU is {(useful + again) / useful:.4f} times MFU.",
        "Causal attention is counted in full, as the papers do (mfu --flops causal: half).",
    )
    return Body(
        title="model and hardware FLOPs utilisation",
        result="MFU is the share of the peak that the model's own FLOPs take, HFU also counts what "
        "is run again.",
        lines=lines,
        source=f"{KORTHIKANTI}, section 6.3, appendix A",
    )


def _powers(expr: Expr) -> set[int]:
    """With which powers of the sequence its terms grow; none where a window bounds them."""
    if expr.symbols() & {"y", "j"}:
        return set()
    return {dict(monomial).get("s", 0) for monomial in expr.terms}


def _crossing(part: Expr, rest: Expr, sizes: Mapping[str, int]) -> tuple[str, float] | None:
    """The sequence at which ``part``, which grows with s², equals ``rest``, which grows with s.

    As a formula, where each is one term, and a number. None where they do not grow so.
    """
    if _powers(part) != {2} or _powers(rest) != {1}:
        return None
    at = sizes["s"] * float(rest.value(sizes)) / float(part.value(sizes))
    single = len(part.terms) == len(rest.terms) == 1
    return f"{(rest * symbol('s') / part).formula()} = " if single else "", at


def _equal(staged: StagedRun) -> Body:
    single = alone(staged)
    layer, sizes = single.main.graph, single.graph.sizes
    core = total(op.flops for op in layer.ops if op.kind == "core")
    ffn = total(op.flops for op in layer.ops if op.group == "ffn")
    other = total(op.flops for op in layer.ops if op.group != "ffn" and op.kind != "core")
    seq, h = staged.run.workload.seq, staged.run.model.hidden
    lines = []
    cross = _crossing(core, ffn, sizes)
    if cross is None:
        result = f"The scores of {layer_words(staged)} do not grow with s² beside a feed-forward."
    else:
        result = (
            f"The scores' FLOPs equal the feed-forward's at s = {cross[0]}{cross[1]:,.0f}, not at "
            f"s = h = {h:,}."
        )
        lines.append(
            f"scores and values {core.formula()}, feed-forward {ffn.formula()}, projections "
            f"{other.formula()} FLOPs forward, {layer_words(staged)}, over all ranks"
        )
        for length in dict.fromkeys((seq, h)):
            share = cross[1] and length / cross[1]
            lines.append(
                f"at s = {length:,} the scores take {percent(share, 1)} of the feed-forward's"
            )
        rest = ffn - other
        if rest.value(sizes) > 0 and (both := _crossing(core, rest, sizes)) is not None:
            lines.append(
                f"All of attention, projections too, equals it at s = {both[0]}{both[1]:,.0f}."
            )
    square = [n for n in own_saved(layer) if "s²" in layer.tensors[n].bytes.formula()]
    kept = layer.bytes_of(square)
    rest = layer.bytes_of([n for n in own_saved(layer) if n not in square])
    crossing = _crossing(kept, rest, sizes) if square else None
    if crossing is not None:
        lines.append(
            f"In bytes, {kept.formula()} of s x s tensors equal the other {rest.formula()} at s = "
            f"{crossing[0]}{crossing[1]:,.0f}."
        )
    elif not square:
        lines.append("No s x s tensor is kept: in bytes they never cross.")
    lines.append(
        "That the two are comparable at S ≈ H forgets a factor: of GPT's layer the scores are "
        "4s²bh, the feed-forward 16sbh²."
    )
    return Body(
        title="long or short sequence: S ≈ H or S = 4H?",
        result=result,
        lines=tuple(lines),
        source="this program's layer graphs; for GPT 4bs²h = 16bsh² at s = 4h",
    )


def _ends(staged: StagedRun) -> Body:
    held = sum(n for n, (begins, _) in zip(staged.held(0), staged.ends[0], strict=True) if begins)
    layers = staged.stored_bytes(0, staged.policy("none"))
    first = held * own_bytes(staged, "embedding")
    last = own_bytes(staged, "head") if staged.run.layout.pp == 1 else 0
    share = (first + last) / layers
    lines = [
        f"layers of the first stage, all micro-batches in flight: {layers:,} B on each GPU",
        f"embedding, {held} in flight: {first:,} B",
        f"last norm, output layer and loss: {last:,} B"
        if last
        else "Last norm, output layer and loss are on the last stage.",
        f"({first:,} + {last:,}) / {layers:,} = {share:.4f} = {percent(share, 2)}",
        "For GPT the paper gives the ends sbhl/t·(p/l + δ(4/l)(1 + v/h)) beside the layers' "
        "sbhl/t·(34 + 5as/h), δ = 1 where p = 1, and calls them less than 0.01 % of the layers' "
        "for its 22B model.",
    ]
    work = _paper_22b()
    model, seq = work.run.model, work.run.workload.seq
    ratio = (own_bytes(work, "embedding") + own_bytes(work, "head")) / work.stored_bytes(
        0, work.policy("none")
    )
    depth = model.layers
    lines.append(
        f"There (1/{depth} + 4/{depth}·(1 + {model.vocab}/{model.hidden})) / (34 + "
        f"5·{model.heads}·{seq}/{model.hidden}) = {ratio:.4f}: less than 0.01 as a ratio, "
        f"{percent(ratio, 2)} in per cent."
    )
    return Body(
        title="embedding, output layer and loss: 0.57 %, not < 0.01 %",
        result=f"Embedding, output layer and loss add {percent(share, 2)} to what the "
        "layers of the first "
        "stage keep.",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, section 4.3",
    )


@cache
def _paper_22b() -> StagedRun:
    """The paper's model of 22 billion parameters, as it was trained."""
    return StagedRun(load_run("gpt-22b", layout={"tp": 8, "sp": True}))


def own_bytes(staged: StagedRun, end: str) -> int:
    """What an end of the model keeps of one micro-batch, on one rank."""
    graph = getattr(staged.graph, end)
    sizes = staged.graph.tensor_bytes[graph]
    return sum(sizes[name] for name in own_saved(graph))


TERMS = (
    Term(
        "8psi",
        "6ΨD and 8ΨD: FLOPs by parameters",
        _eight,
        words=("6psi", "6psid", "8psid", "6nd", "8nd", "of step", "chinchilla"),
    ),
    Term("72", "the closed form of model FLOPs", _closed_form, words=("flops", "modelflops")),
    Term(
        "96",
        "Narayanan's closed form, with full recomputation",
        _ninety_six,
        words=("96bslh2", "96bslh2(1+s/6h+v/16lh)", "v/16lh", "96bslh"),
    ),
    Term(
        "mfu",
        "model and hardware FLOPs utilisation",
        _mfu,
        words=("hfu", "utilization", "utilisation", "efficiency of gpus"),
        flags=("step_time", "tokens_per_second", "tflops", "gpus", "mfu", "hfu", "flops", "tokens",
               "price_per_gpu_hour", "peak", "calibrate"),
    ),
    Term(
        "s=4h",
        "where scores cost as much as the feed-forward: S = 4H",
        _equal,
        words=("s≈h", "s~h", "4h", "s=h", "long sequence", "crossover", "s=2h"),
        layout={},
    ),
    Term(
        "ends",
        "embedding and output layer: why < 0.01 % is 0.57 %",
        _ends,
        words=("0.57", "0.01", "<0.01", "embedding", "head", "output layer", "logits", "loss",
               "4sbh/t(1+v/h)"),
        flags=("loss",),
        heeds=("global_batch", "layers_per_stage", "vpp", "schedule"),
        model="gpt-22b",
    ),
)  # fmt: skip
"""The terms of this module."""
