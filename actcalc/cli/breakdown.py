"""``actcalc breakdown MODEL``: every saved tensor."""

from __future__ import annotations

import typer

from actcalc.answers.breakdown import breakdown_run
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, refuse_idle, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.errors import SpecError
from actcalc.render.breakdown import breakdown_sheets
from actcalc.render.sheet import Sheet
from actcalc.specs.result import joined

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, OutputOptions)
def breakdown(models: ModelArguments, options: RunOptions, output: OutputOptions) -> int:
    """Every tensor a layer keeps: op, shape in named dimensions, formula, bytes."""
    check_units(output.units)
    chosen_format(output)
    refuse_idle(options, "breakdown", ("device", "device_memory", "peak", "headroom", "schedule"))
    if len(options.policy or ()) > 1:
        raise SpecError("breakdown lists one policy at a time", "give one --policy")
    results = [breakdown_run(run) for run in options.runs(options.origin(models))]

    def sheets() -> list[Sheet]:
        return [sheet for result in results for sheet in breakdown_sheets(result, output.units)]

    emit(sheets, lambda: joined(results, "frameworks"), output)
    return 0
