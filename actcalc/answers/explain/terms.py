"""How a number is derived: a few lines, computed from the graphs of a run, with the source.

Each module of this folder has the terms of one subject, a row each; this one finds them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from actcalc.answers.explain import (
    activations,
    checkpoints,
    flops,
    peak,
    pipelines,
    states,
    words,
)
from actcalc.answers.explain.overhead import Overhead, PolicyOverhead, overhead
from actcalc.answers.explain.term import KORTHIKANTI, Term
from actcalc.cost.rates import default_note
from actcalc.errors import SpecError
from actcalc.run.staged import StagedRun
from actcalc.specs.result import Result
from actcalc.specs.run import Run


@dataclass(frozen=True, kw_only=True, repr=False)
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


OVERHEAD = "overhead"
"""The one term that depends on device and policies."""
_OVERHEAD_WORDS = (OVERHEAD, "slow-down", "slowdown", "39", "39%", "39 %", "33%")
SUBJECTS: Mapping[str, tuple[Term, ...]] = {
    "what is kept": activations.TERMS,
    "checkpoints": checkpoints.TERMS,
    "what it costs": flops.TERMS,
    "weights and states": states.TERMS,
    "pipelines": pipelines.TERMS,
    "the whole GPU": peak.TERMS,
    "letters and units": words.TERMS,
}
"""The terms of each subject."""
TERMS: Mapping[str, Term] = {term.name: term for rows in SUBJECTS.values() for term in rows}
"""Every term but the overhead, by its name."""
_WORDS = {word: term.name for term in TERMS.values() for word in term.words}


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
    names = (*TERMS, OVERHEAD)
    # A number is no misspelling of another one.
    known = [name for name in (*names, *_WORDS) if sum(map(str.isalpha, name)) >= 3]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else "terms: " + ", ".join(names)
    raise SpecError(f"nothing to explain under {text!r}", hint)


def explain_term(term: str, run: Run, efficiency: Mapping[str, float] | None = None) -> Explanation:
    """Explain ``term`` with the numbers of ``run``; ``SpecError`` for an unknown term.

    ``efficiency`` overrides shares of a device's peaks where the term is of times.
    """
    if is_overhead(term):
        return _explain_overhead(run, efficiency)
    found = TERMS[term_of(term)]
    title, lines, origin = found.explain(StagedRun(run))
    return Explanation(
        term=found.name, title=title, lines=lines, source=origin, example=_example(run)
    )


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
            f"{run.workload.attention} attention, {run.framework} kernels",
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
