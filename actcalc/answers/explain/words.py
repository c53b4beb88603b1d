"""Symbols and units."""

from __future__ import annotations

from actcalc.answers.explain.term import KORTHIKANTI, Body, Term
from actcalc.layers.core.context import LEGEND
from actcalc.run.staged import StagedRun


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


TERMS = (
    Term("symbols", "the letters in formulas", _legend, words=("legend",)),
    Term("units", "GB and GiB", _units, words=("gb", "gib")),
)
"""The terms of this module."""
