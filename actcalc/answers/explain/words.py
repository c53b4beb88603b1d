"""Symbols and units."""

from __future__ import annotations

from actcalc.answers.explain.term import KORTHIKANTI, Body, Term
from actcalc.layers.core.context import LEGEND
from actcalc.run.staged import StagedRun

_ELSEWHERE = (
    "Explanations of pipelines and closed forms use letters as the papers do, whatever they are "
    "above:",
    "pipelines: p stages, r the stage from 0, m micro-batches, v chunks of a stage, l layers",
    "checkpoints: c how many, m micro-batches in flight, A_in a layer's input, A_int what it keeps",
    "closed forms: v (or V) vocabulary, B micro-batch; Ψ parameters, D tokens",
    "plan: R ops that run again, K bytes kept, W bytes made again, C their cost",
)


def _units(staged: StagedRun) -> Body:
    return Body(
        title="units",
        result="GB = 10^9 bytes, MB = 10^6 (the default); GiB = 2^30, MiB = 2^20 (--units GiB).",
        lines=("JSON and CSV hold exact bytes.",),
        source="IEC 80000-13",
    )


def _legend(staged: StagedRun) -> Body:
    graph = staged.graph
    used = {
        letter
        for one, _ in graph.graphs()
        for tensor in one.tensors.values()
        for letter in tensor.bytes.symbols()
    }
    used |= {letter for one, _ in graph.graphs() for op in one.ops for letter in op.flops.symbols()}
    used.add("l")
    lines = [
        f"{letter}  {LEGEND[letter]} = {graph.sizes[letter]:,}"
        for letter in LEGEND
        if letter in used
    ]
    rest = ", ".join(f"{letter} {LEGEND[letter]}" for letter in LEGEND if letter not in used)
    return Body(
        title="symbols",
        result="The letters in formulas of sizes and FLOPs, with this run's values.",
        lines=(*lines, f"in no formula of this run: {rest}", *_ELSEWHERE),
        source=f"{KORTHIKANTI}, table 1; this program's own for the rest",
    )


TERMS = (
    Term(
        "symbols",
        "the letters in formulas",
        _legend,
        words=("legend", "symbol", "letters", "notation"),
    ),
    Term(
        "units", "GB and GiB", _units, words=("gb", "gib", "mib", "mb", "bytes"), flags=("units",)
    ),
)
"""The terms of this module."""
