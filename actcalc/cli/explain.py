"""``actcalc explain TERM [MODEL]``: how a number is derived."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from actcalc.answers.explain.listing import Terms, terms
from actcalc.answers.explain.terms import (
    HEEDED,
    OVERHEAD,
    TERMS,
    Explanation,
    explain_term,
    term_of,
)
from actcalc.cli.choices import argument, examples
from actcalc.cli.given import given_words
from actcalc.cli.options import (
    OptionalModel,
    OutputOptions,
    RunOptions,
    TimeOptions,
    refuse_idle,
    with_options,
)
from actcalc.cli.output import chosen_format, emit
from actcalc.errors import SpecError
from actcalc.io.sources import Source, source
from actcalc.render.explain import explain_sheets, terms_sheets

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_GRID = ("tp", "sp", "pp", "vpp", "cp", "ep", "schedule")


@app.command(
    epilog=examples(
        "explain 34",
        "explain peak llama-3-8b --tp 2 --sp",
    )
)
@with_options(RunOptions, TimeOptions, OutputOptions)
def explain(
    options: RunOptions,
    timing: TimeOptions,
    output: OutputOptions,
    term: Annotated[
        str | None,
        argument(
            metavar="[TERM]",
            help="34, c*, zero, a formula, a flag, ...; all if none.",
            words=lambda: TERMS,
        ),
    ] = None,
    model: OptionalModel = None,
) -> int:
    """How a number is derived, in a few lines, with its source; without a TERM, all terms."""
    chosen_format(output)
    if term is None:
        if given := given_words((), options, timing):
            raise SpecError(
                f"explain without a term lists all terms, and {' '.join(given[:2])} changes none",
                f"name a term, e.g. `actcalc explain 34 {' '.join(given)}`",
            )
        found = listing()
        emit(lambda: terms_sheets(found), found.document, output)
        return 0
    origin = None if model is None else source(model, options.from_)
    result = answer(term, origin, options, timing)
    emit(lambda: explain_sheets(result), result.document, output)
    return 0


def listing() -> Terms:
    """Every term, by subject."""
    return terms()


def answer(
    term: str, origin: Source | None, options: RunOptions, timing: TimeOptions
) -> Explanation:
    """The explanation of one term, with the numbers of ``origin`` or of the term's own example."""
    key = _key(term, origin, options)
    if key == OVERHEAD:
        return _overhead(origin, options, timing)
    row = TERMS[key]
    refuse_idle(options, f"explain {key}", sorted(HEEDED - {*row.heeds}))
    if timing.efficiency:
        raise SpecError(f"explain {term} is of no time", "drop --efficiency")
    free = all(getattr(options, field) is None for field in _GRID)
    if origin is None and free:
        options = replace(options, **row.layout)
    run = options.run(origin or source(row.model))
    result = explain_term(key, run)
    return replace(result, lines=(*result.lines, *run.warnings))


def _key(term: str, origin: Source | None, options: RunOptions) -> str:
    """The term that ``term`` names, maybe a formula that the run prints."""
    try:
        return term_of(term)
    except SpecError:
        if origin is None:
            raise
        return term_of(term, options.run(origin))


def _overhead(origin: Source | None, options: RunOptions, timing: TimeOptions) -> Explanation:
    """The one term that needs a device; without any, the paper's own case."""
    refuse_idle(options, "explain overhead", ("device_memory", "headroom"))
    assumed = []
    if origin is None:
        assumed.append("No model named: the layer of the paper's table 4.")
        given = options.tp is None and options.sp is None and options.micro_batch is None
        if given:
            options = replace(options, tp=8, micro_batch=4)
        origin = source("gpt-22b")
    if options.device is None and origin.device is None:
        assumed.append("No --device given: an A100, as in the paper.")
        options = replace(options, device="a100-80gb")
    run = options.run(origin)
    result = explain_term(OVERHEAD, run, timing.shares(run))
    return replace(result, lines=(*result.lines, *assumed, *run.warnings))
