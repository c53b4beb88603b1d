"""``actcalc explain TERM [MODEL]``: how a number is derived."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from actcalc.answers.explain.terms import OVERHEAD, TERMS, explain_term, term_of
from actcalc.cli.options import (
    OutputOptions,
    RunOptions,
    TimeOptions,
    refuse_idle,
    with_options,
)
from actcalc.cli.output import chosen_format, emit
from actcalc.errors import SpecError
from actcalc.io.sources import source
from actcalc.render.explain import explain_sheets

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_IDLE = (
    "device",
    "device_memory",
    "peak",
    "headroom",
    "policy",
    "recompute_method",
    "recompute_num_layers",
    "schedule",
    "zero",
    "global_batch",
    "layers_per_stage",
    "vpp",
)
_GRID = ("tp", "sp", "pp", "vpp", "cp", "ep", "schedule")


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, TimeOptions, OutputOptions)
def explain(
    options: RunOptions,
    timing: TimeOptions,
    output: OutputOptions,
    term: Annotated[str, typer.Argument(metavar="TERM", help="34, 18, zero, peak, plan, ...")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Whose numbers; GPT-3 if none is named.")
    ] = None,
) -> int:
    """How a number is derived, in a few lines, with its source."""
    chosen_format(output)
    key = term_of(term)
    if key == OVERHEAD:
        return _overhead(options, timing, output, term, model)
    row = TERMS[key]
    refuse_idle(options, f"explain {key}", [name for name in _IDLE if name not in row.heeds])
    if timing.efficiency:
        raise SpecError(f"explain {term} is of no time", "drop --efficiency")
    free = all(getattr(options, field) is None for field in _GRID)
    if model is None and free:
        options = replace(options, **row.layout)
    run = options.run(source(model or row.model, options.from_))
    result = explain_term(term, run)
    result = replace(result, lines=(*result.lines, *run.warnings))
    emit(lambda: explain_sheets(result), result.document, output)
    return 0


def _overhead(
    options: RunOptions,
    timing: TimeOptions,
    output: OutputOptions,
    term: str,
    model: str | None,
) -> int:
    """The one term that needs a device; without any, the paper's own case."""
    refuse_idle(options, "explain overhead", ("device_memory", "headroom"))
    assumed = []
    if model is None:
        assumed.append("No model named: the layer of the paper's table 4.")
        given = options.tp is None and options.sp is None and options.micro_batch is None
        if given:
            options = replace(options, tp=8, micro_batch=4)
    if options.device is None:
        origin = source(model or "gpt-22b", options.from_)
        if origin.device is None:
            assumed.append("No --device given: an A100, as in the paper.")
            options = replace(options, device="a100-80gb")
    run = options.run(source(model or "gpt-22b", options.from_))
    result = explain_term(term, run, timing.shares(run))
    result = replace(result, lines=(*result.lines, *assumed, *run.warnings))
    emit(lambda: explain_sheets(result), result.document, output)
    return 0
