"""``actcalc compare MODEL``: policies side by side."""

from __future__ import annotations

import typer

from actcalc.cli.options import ModelArgument, OutputOptions, RunOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit, joined
from actcalc.planner.compare import compare_run
from actcalc.render.compare import compare_sheets, side_by_side
from actcalc.render.sheet import Sheet

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, OutputOptions)
def compare(model: ModelArgument, options: RunOptions, output: OutputOptions) -> int:
    """Recompute policies side by side: bytes stored, freed, brought back, and extra FLOPs."""
    check_units(output.units)
    chosen_format(output)
    results = [compare_run(run) for run in options.runs(model)]

    def sheets() -> list[Sheet]:
        if len(results) == 1:
            return compare_sheets(results[0], output.units)
        return side_by_side(results, output.units)

    emit(sheets, lambda: joined(results), output)
    return 0
