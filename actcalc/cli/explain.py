"""``actcalc explain TERM [MODEL]``: how a number is derived."""

from __future__ import annotations

from typing import Annotated

import typer

from actcalc.cli.options import OutputOptions, RunOptions, refuse_idle, with_options
from actcalc.cli.output import chosen_format, emit
from actcalc.planner.explain import explain_term
from actcalc.render.explain import explain_sheets
from actcalc.specs.run import source

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, OutputOptions)
def explain(
    options: RunOptions,
    output: OutputOptions,
    term: Annotated[str, typer.Argument(metavar="TERM", help="34, c*, selective, 8psi, mfu, ...")],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Whose numbers; GPT-3 if none is named.")
    ] = None,
) -> int:
    """How a number is derived, in a few lines, with its source."""
    chosen_format(output)
    idle = ("device", "policy", "recompute_method", "recompute_num_layers", "schedule", "zero")
    refuse_idle(options, "explain", (*idle, "global_batch", "layers_per_stage", "vpp"))
    origin = source(model or "gpt3-175b")
    if model is None and options.tp is None and options.sp is None:
        from dataclasses import replace

        options = replace(options, tp=8, sp=True)
    result = explain_term(term, options.run(origin))
    emit(lambda: explain_sheets(result), result.document, output)
    return 0
