"""How a number is derived: a few lines, computed from the graphs of a run, with the source.

Each module of this folder has the terms of one subject, a row each; this one finds them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.answers.explain import (
    activations,
    checkpoints,
    flops,
    parallel,
    peak,
    pipelines,
    policies,
    states,
    tuning,
    words,
)
from actcalc.answers.explain.overhead import Overhead, PolicyOverhead, overhead
from actcalc.answers.explain.term import KORTHIKANTI, Body, Term
from actcalc.cost.rates import default_note
from actcalc.errors import SpecError, shorten
from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun
from actcalc.solve.clock import limited
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
    result: str
    """The answer, in a sentence."""
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


def _timed(staged: StagedRun) -> Body:
    raise SpecError("an overhead in time needs a device", "add --device, e.g. a100-80gb")


SUBJECTS: Mapping[str, tuple[Term, ...]] = {
    "what is kept": activations.TERMS,
    "what runs again": policies.TERMS,
    "checkpoints": checkpoints.TERMS,
    "parallelism": parallel.TERMS,
    "what it costs": (
        *flops.TERMS,
        Term(
            OVERHEAD,
            "where a policy's slow-down comes from: 33 % or 39 %",
            _timed,
            words=(
                "slow-down", "slowdown", "slower", "slow", "39", "33", "7", "4%", "time", "seconds",
                "30-40", "step time", "overheads",
            ),
            flags=("efficiency", "cuda_graphs"),
        ),
    ),
    "weights and states": (*states.TERMS, *tuning.TERMS),
    "pipelines": pipelines.TERMS,
    "the whole GPU": peak.TERMS,
    "letters and units": words.TERMS,
}  # fmt: skip
"""The terms of each subject."""
_ROWS = [term for rows in SUBJECTS.values() for term in rows]
TERMS: Mapping[str, Term] = {term.name: term for term in _ROWS if term.name != OVERHEAD}
"""Every term but the overhead, by its name."""

HEEDED = frozenset(name for term in _ROWS for name in term.heeds)
"""Options that change what some terms say, and nothing of the others."""


def plain(text: str) -> str:
    """A word or formula as it is looked up: small letters, no blanks, signs as on a keyboard."""
    word = "".join(text.lower().split()).translate(_SIGNS)
    return word.removesuffix("%") or word


_SIGNS = str.maketrans({"ψ": "psi", "·": "", "²": "2", "×": "x", "−": "-", "–": "-", "≈": "~"})
_NAMES = {plain(term.name): term.name for term in _ROWS}
_WORDS = {plain(word): term.name for term in _ROWS for word in term.words}
_FLAGS = {flag: term.name for term in _ROWS for flag in term.flags}


def is_overhead(term: str) -> bool:
    """Whether ``term`` asks for a slow-down in time, which needs a device."""
    return term_of(term) == OVERHEAD


def explains(flag: str) -> bool:
    """Whether an option of the command line, as it is typed, is explained by some term."""
    return flag.lstrip("-").replace("-", "_") in _FLAGS


def term_of(text: str, run: Run | None = None) -> str:
    """The term that ``text`` names: a term, a word, a flag, a formula that ``run`` prints.

    Without a run the formulas are those of GPT-3. ``SpecError`` with a hint for what nothing is
    known of.
    """
    word = plain(text)
    flag = word.lstrip("-").replace("-", "_")
    found = _FLAGS.get(flag) if text.strip().startswith("-") else None
    found = found or _NAMES.get(word) or _WORDS.get(word) or _FLAGS.get(flag)
    found = found or _formula(word, run)
    if found:
        return found
    # A number is no misspelling of another one.
    known = [name for name in (*_NAMES, *_WORDS) if sum(map(str.isalpha, name)) >= 3]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) if len(word) < 100 else []
    hint = f"did you mean {close[0]}?" if close else "terms: " + ", ".join(_NAMES.values())
    raise SpecError(f"nothing to explain under {shorten(text)}", hint)


def _formula(word: str, run: Run | None) -> str | None:
    """The term of a size that tables print: of a policy's layer, of a tensor."""
    if len(word) > 100 or not set("sbhat2") & set(word):
        return None
    runs = [run] if run else [load_run("gpt3-175b", layout=layout) for layout in _LAYOUTS]
    for one in runs:
        staged = StagedRun(one)
        for name in staged.usual_policies:
            size = staged.under(staged.policy(name)).outcome(staged.main.graph).stored_size
            if plain(size.formula()) == word and not staged.policy(name).segmented:
                return _NAMES.get(name) or _WORDS.get(name)
        layer = staged.main.graph
        if word in {plain(layer.tensors[name].bytes.formula()) for name in layer.saved}:
            return "34"
    return None


_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 8},
    {"tp": 8, "sp": True},
)
"""Layouts of GPT-3 whose formulas are known without a model."""


_PLAN_SECONDS = 4.0  # for terms that plan; what is left open then says so


def explain_term(term: str, run: Run, efficiency: Mapping[str, float] | None = None) -> Explanation:
    """Explain ``term`` with the numbers of ``run``; ``SpecError`` for an unknown term.

    ``efficiency`` overrides shares of a device's peaks where the term is of times.
    """
    key = term_of(term, run)
    if key == OVERHEAD:
        return _explain_overhead(run, efficiency)
    with limited(_PLAN_SECONDS):
        said = TERMS[key].explain(StagedRun(run))
    return Explanation(
        term=key,
        title=said.title,
        result=said.result,
        lines=said.lines,
        source=said.source,
        example=_example(run),
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
            f"s {run.workload.seq:,} b {run.workload.micro_batch}",
            *degrees,
            f"{run.workload.attention} attention, {run.framework} kernels",
        ]
    )


def _explain_overhead(run: Run, efficiency: Mapping[str, float] | None) -> Explanation:
    found = overhead(run, run.policies or ("full", "selective"), efficiency)
    lines, results = [], []
    for one in found.policies:
        results.append(
            f"{one.policy} slows a layer down by {100 * one.layer_ratio:.1f} %, a step by "
            f"{100 * one.slowdown_ratio:.1f} %."
        )
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
        result=" ".join(results),
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
