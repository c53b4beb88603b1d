"""What a layer keeps, tensor by tensor."""

from __future__ import annotations

from actcalc.answers.explain.term import (
    DAO,
    DAO_2,
    KORTHIKANTI,
    Body,
    Term,
    alone,
    gpt,
    is_gpt,
    layer_words,
    named,
    own_saved,
    size_text,
)
from actcalc.layers.core.algebra import symbol
from actcalc.layers.core.graph import DType, Graph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent


def _groups(layer: Graph) -> dict[str, list[str]]:
    """What a layer saves, by the part of it whose op saves it first."""
    found: dict[str, list[str]] = {}
    for name in own_saved(layer):
        found.setdefault(layer.savers[name][0].group, []).append(name)
    return found


def _element_words(layer: Graph) -> str:
    """What an element of each saved type weighs."""
    types = {layer.tensors[name].dtype for name in own_saved(layer)}
    words = [
        f"{dtype.label} {dtype.itemsize}{' (masks)' if dtype in (DType.BOOL, DType.UINT8) else ''}"
        for dtype in sorted(types, key=lambda dtype: (-dtype.itemsize, dtype.label))
    ]
    return f"Bytes of an element: {', '.join(words)}."


def _coefficient(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    lines = ["By the op that saves it for backward, each tensor once:"]
    for group, names in _groups(layer).items():
        parts = "  ".join(f"{layer.tensors[n].bytes.formula()} ({named(n)})" for n in names)
        lines.append(f"{group}: {parts}")
        lines.append(f"    = {size_text(layer.bytes_of(names), graph)}")
    lines.append(f"all: {size_text(layer.bytes_of(own_saved(layer)), graph)}")
    lines.append(_element_words(layer))
    if not is_gpt(staged) or staged.run.layout.tp > 1:
        paper = gpt().main.graph
        parts = " + ".join(
            f"{group} {paper.bytes_of(names).formula()}" for group, names in _groups(paper).items()
        )
        whole = paper.bytes_of(own_saved(paper)).formula()
        lines.append(f"GPT with eager attention and dropout, unsharded: {parts} = {whole}.")
    profile = staged.run.framework
    source = f"{KORTHIKANTI}, section 4.1"
    if not profile.idealised:
        source = f"presets/frameworks/{profile.name}.yaml: {profile.title}; and {source}"
    return Body(
        title="what one layer keeps",
        result=f"{layer_words(staged).capitalize()} keeps "
        f"{size_text(layer.bytes_of(own_saved(layer)), graph)} on each GPU for one micro-batch.",
        lines=tuple(lines),
        source=source,
    )


def _squares(layer: Graph) -> list[str]:
    """Saved tensors that grow with the square of the sequence."""
    return [n for n in own_saved(layer) if "s²" in layer.tensors[n].bytes.formula()]


def _scores(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    square = _squares(layer)
    source = f"{KORTHIKANTI}, section 4.1"
    title = "the s x s tensors of attention"
    if not square:
        kept = sorted({op.kernel or op.kind for op in layer.ops if op.kind == "core"})
        attention = staged.run.workload.attention
        why = (
            f"attention is {attention} ({', '.join(kept)} kernel), which makes the scores again in "
            "backward"
            if kept
            else f"{layer_words(staged)} has no attention"
        )
        return Body(
            title=title,
            result=f"No s x s tensor is kept here: {why}.",
            lines=(f"With eager attention GPT keeps {_gpt_scores()}: --attention eager shows it.",),
            source=source,
        )
    expr = layer.bytes_of(square)
    heads = symbol("a") / (symbol("t") if staged.run.layout.tp > 1 else 1)
    scores = heads * symbol("s") * symbol("s") * symbol("b")
    tensors = [layer.tensors[n] for n in square]
    parts = " + ".join(f"{(one.bytes / scores).formula()} ({named(one.name)})" for one in tensors)
    share = int(expr.value(graph.sizes)) / int(layer.bytes_of(own_saved(layer)).value(graph.sizes))
    single = alone(staged)
    whole = single.main.graph.bytes_of(_squares(single.main.graph))
    inputs = symbol("s") * symbol("b") * symbol("h")
    ratio = int(whole.value(single.graph.sizes)) / int(inputs.value(single.graph.sizes))
    return Body(
        title=title,
        result=f"The s x s tensors are {size_text(expr, graph)}: {percent(share, 0)} of the layer.",
        lines=(
            *(f"{named(n)}: {size_text(layer.tensors[n].bytes, graph)}" for n in square),
            f"Bytes of one score: {parts} = {(expr / scores).formula()}.",
            f"Unsharded and over sbh that is {(whole / inputs).formula()} = {ratio:.4g}.",
            *(() if is_gpt(staged) else (f"GPT with dropout keeps {_gpt_scores()}.",)),
        ),
        source=source,
    )


def _gpt_scores() -> str:
    layer = gpt().main.graph
    return layer.bytes_of(_squares(layer)).formula()


def _transient(staged: StagedRun) -> Body:
    graph, layer = staged.graph, staged.main.graph
    lines = []
    for name in ("selective", "full"):
        size = layer_outcome(graph, layer, staged.policy(name)).sizes(graph)
        lines.append(
            f"{name}: stored {size.stored:,} B per layer, {size.restored:,} B brought back"
        )
    lines += [
        "peak_bytes of a policy = stored (all layers, all micro-batches in flight) + one segment.",
        "Outputs, gradients and scratch of single kernels come on top: see explain peak.",
    ]
    return Body(
        title="why recomputation has a peak of its own",
        result="While a segment re-runs, all it saves is alive again, beside everything stored.",
        lines=tuple(lines),
        source="torch.utils.checkpoint",
    )


def _flash(staged: StagedRun) -> Body:
    work = staged.run.workload.model_copy(update={"attention": "flash"})
    flash = staged.changed(workload=work)
    graph, layer = flash.graph, flash.main.graph
    cores = [op for op in layer.ops if op.kind == "core"]
    if not cores:
        return Body(
            title="flash attention",
            result=f"{layer_words(staged).capitalize()} has no attention.",
            lines=(),
            source=DAO,
        )
    names = [n for n in dict.fromkeys(n for op in cores for n in op.saves) if n in own_saved(layer)]
    selective = layer_outcome(graph, layer, flash.policy("selective")).sizes(graph)
    whole = layer_outcome(graph, layer, NONE).sizes(graph).stored
    lines = [
        *(f"{named(n)}: {size_text(layer.tensors[n].bytes, graph)}" for n in names),
        f"together {size_text(layer.bytes_of(names), graph)}",
        "Of the softmax it keeps one statistic per token and head, its logsumexp, from which "
        "backward makes the scores again.",
    ]
    if staged.run.workload.attention != "flash":
        here = layer_outcome(staged.graph, staged.main.graph, NONE).sizes(staged.graph).stored
        lines.append(
            f"The layer keeps {whole:,} B with it, {here:,} B with "
            f"{staged.run.workload.attention} attention."
        )
    lines.append(
        f"selective frees {percent(1 - selective.stored / whole, 1)} of the layer with "
        "it: flash attention "
        "is a selective recomputation built in."
    )
    return Body(
        title="flash attention",
        result="Flash attention keeps no s x s tensor: backward makes the scores again, tile by "
        "tile.",
        lines=tuple(lines),
        source=f"{DAO}, section 3.1; the logsumexp: {DAO_2}, section 3.1",
    )


TERMS = (
    Term(
        "34",
        "what one layer keeps for backward: 34 and 5as/h",
        _coefficient,
        words=(
            "sbh", "layer", "per layer", "all layers", "saved", "none", "activation",
            "activations", "stored", "kept", "114", "32", "19", "11",
        ),
        flags=("seq", "micro_batch", "precision", "framework", "layers"),
    ),
    Term(
        "5as/h",
        "the s x s tensors of attention",
        _scores,
        words=("as/h", "scores", "80", "5as2b", "attention matrix", "probs", "softmax",
               "quadratic"),
    ),
    Term(
        "transient",
        "why recomputation has a peak of its own",
        _transient,
        words=("bring back", "brought back", "working set", "peak_bytes", "segment"),
    ),
    Term(
        "flash",
        "flash attention, a recomputation built in",
        _flash,
        words=("flashattention", "flash attention", "sdpa", "eager", "logsumexp"),
        flags=("attention",),
    ),
)  # fmt: skip
"""The terms of this module."""
