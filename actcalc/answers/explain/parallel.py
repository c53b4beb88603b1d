"""What each kind of parallelism splits of a layer's activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actcalc.answers.explain.term import (
    KORTHIKANTI,
    Body,
    Term,
    gpt,
    is_gpt,
    layer_words,
    named,
    own_saved,
    size_text,
    splitting,
)
from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph
from actcalc.run.staged import StagedRun
from actcalc.specs.check import check
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run

_RING = "Liu et al. 2023, Ring Attention, arXiv:2310.01889; Megatron-Core context_parallel"
_GSHARD = "Lepikhin et al. 2020, GShard, arXiv:2006.16668; Megatron-Core transformer/moe"


def _laid(run: Run, **degrees: Any) -> StagedRun:
    """The run in a layout of these degrees alone; ``SpecError`` where the model has no such."""
    layout = Layout(**degrees)
    check(run.model, layout, run.workload)
    return StagedRun(replace(run, layout=layout))


def _largest(run: Run, name: str, **more: Any) -> int:
    """The degree of the run, else the largest of 8, 4, 2 that the model allows."""
    given: int = getattr(run.layout, name)
    if given > 1:
        return given
    for degree in (8, 4, 2):
        try:
            _laid(run, **{name: degree}, **dict.fromkeys(more, degree))
        except SpecError:
            continue
        return degree
    raise SpecError(f"{run.model.name} cannot be split {name} 2, 4 or 8 ways", "name another model")


def _kept(staged: StagedRun) -> str:
    layer = staged.main.graph
    return size_text(layer.bytes_of(own_saved(layer)), staged.graph)


def _whole_tensors(staged: StagedRun, letter: str) -> list[str]:
    """Saved tensors that a degree does not split."""
    layer: Graph = staged.main.graph
    return [n for n in own_saved(layer) if letter not in layer.tensors[n].bytes.symbols()]


def _tensor_parallel(staged: StagedRun) -> Body:
    run, notes = splitting(staged.run)
    lines = list(notes)
    plain, t = _laid(run), _largest(run, "tp")
    if run.layout.tp == 1:
        lines.append(f"No --tp given: t = {t}.")
    lines.append(f"alone: {_kept(plain)}")
    sharded = _laid(run, tp=t, sp=True)
    result = f"{layer_words(staged).capitalize()} keeps {_kept(sharded)} on each of {t} GPUs"
    result += " with tensor and sequence parallelism"
    if not run.framework.op_by_op:
        split = _laid(run, tp=t)
        layer, whole = split.main.graph, _whole_tensors(split, "t")
        result += f", {_kept(split)} without the latter"
        lines += [
            f"tp {t}: {_kept(split)}",
            f"Not split by tp, {size_text(layer.bytes_of(whole), split.graph)} on every rank: "
            + ", ".join(named(name) for name in whole),
        ]
    lines.append(f"tp {t} with sp, which splits those along the sequence: {_kept(sharded)}")
    if not is_gpt(staged):
        paper = gpt().run
        lines.append(
            "GPT's, in the paper: "
            + ", ".join(
                _laid(paper, **degrees).main.graph.bytes_of(own_saved(gpt().main.graph)).formula()
                for degrees in ({"tp": 8}, {"tp": 8, "sp": True})
            )
            + "."
        )
    return Body(
        title="tensor and sequence parallelism",
        result=result + ".",
        lines=tuple(lines),
        source=f"{KORTHIKANTI}, section 4.2, table 2",
    )


def _context_parallel(staged: StagedRun) -> Body:
    run, notes = splitting(staged.run)
    run = replace(run, workload=run.workload.model_copy(update={"attention": "flash"}))
    lines = list(notes)
    tp = {"tp": run.layout.tp, "sp": run.layout.sp}
    c = _largest(run, "cp")
    plain, split = _laid(run, **tp), _laid(run, **tp, cp=c)
    if run.layout.cp == 1:
        lines.append(f"No --cp given: c = {c}, with flash attention.")
    whole = _whole_tensors(split, "c")
    lines += [
        f"cp 1: {_kept(plain)}",
        f"cp {c}: {_kept(split)}",
        "Not split by cp: " + ", ".join(named(name) for name in whole)
        if whole
        else "Every saved tensor is split along the sequence.",
        "Only attention looks beyond its own tokens: keys and values of the other ranks come by "
        "messages, and are not kept.",
        "Weights and states are the same on every rank of the group, as under data parallelism.",
    ]
    return Body(
        title="context parallelism",
        result=f"Each of {c} GPUs has s/c tokens of every sequence: {layer_words(staged)} keeps "
        f"{_kept(split)} there.",
        lines=tuple(lines),
        source=_RING,
    )


def _expert_parallel(staged: StagedRun) -> Body:
    run, notes = splitting(staged.run)
    moe = run.model.moe
    if moe is None:
        raise SpecError(
            f"{run.model.name} has no experts to spread", "name a model with experts: mixtral-8x7b"
        )
    e = _largest(run, "ep", dp=1)
    lines = list(notes)
    if run.layout.ep == 1:
        lines.append(f"No --ep given: e = {e}.")
    layout = run.layout.model_copy(update={"pp": 1, "vpp": 1, "layers_per_stage": ()})
    dense = StagedRun(replace(run, layout=layout.model_copy(update={"ep": 1})))
    split = StagedRun(
        replace(run, layout=layout.model_copy(update={"ep": e, "dp": max(e, layout.dp)}))
    )
    lines += [
        f"weights of the routed experts of a layer, ep 1: {_experts(dense):,} on each GPU",
        f"ep {e}: {_experts(split):,}, for {moe.experts}/{e} = {moe.experts / e:g} of the experts",
        f"activations of a layer, ep 1: {_kept(dense)}",
        f"ep {e}: {_kept(split)}",
        f"A token still goes to {moe.topk} experts: FLOPs do not change, tokens travel to their "
        "experts and back (all-to-all).",
        "The fullest rank gets --moe-imbalance times the mean of the tokens.",
    ]
    return Body(
        title="expert parallelism",
        result=f"The {moe.experts} routed experts of a layer are spread over {e} GPUs: each holds "
        f"{_experts(split):,} of {_experts(dense):,} weights.",
        lines=tuple(lines),
        source=_GSHARD,
    )


def _experts(staged: StagedRun) -> int:
    layer = max(
        (kind.graph for kind in staged.kinds),
        key=lambda graph: sum(weight.expert for weight in graph.weights),
    )
    return sum(
        int(weight.parameters.value(staged.graph.sizes))
        for weight in layer.weights
        if weight.expert
    )


TERMS = (
    Term(
        "tp",
        "what tensor and sequence parallelism split",
        _tensor_parallel,
        words=("sp", "10", "24", "10+24/t", "tensor parallel", "tensor parallelism",
               "sequence parallel", "sequence parallelism", "megatron"),
        flags=("tp", "sp"),
    ),
    Term(
        "cp",
        "what context parallelism splits",
        _context_parallel,
        words=("context parallel", "context parallelism", "ring attention", "long context"),
        flags=("cp",),
        model="llama-3-8b",
        layout={"cp": 4},
    ),
    Term(
        "ep",
        "what expert parallelism splits",
        _expert_parallel,
        words=("expert parallel", "expert parallelism", "experts", "moe", "etp"),
        flags=("ep", "etp", "moe_imbalance"),
        model="mixtral-8x7b",
        layout={"ep": 8, "dp": 8},
    ),
)  # fmt: skip
"""The terms of this module."""
