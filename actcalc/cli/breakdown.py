"""``actcalc breakdown MODEL``: every saved tensor."""

from __future__ import annotations

from dataclasses import replace

import typer

from actcalc.answers.breakdown import Breakdown, breakdown_run
from actcalc.cli.choices import examples
from actcalc.cli.options import (
    ModelArguments,
    OutputOptions,
    RunOptions,
    flag_of,
    refuse_idle,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.errors import SpecError
from actcalc.io.sources import Source
from actcalc.render.breakdown import breakdown_sheets
from actcalc.render.sheet import Sheet
from actcalc.specs.result import joined

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def answer(origin: Source, options: RunOptions) -> list[Breakdown]:
    """One breakdown for each framework profile that is asked for."""
    refuse_idle(options, "breakdown", ("device", "device_memory", "peak", "headroom", "schedule"))
    if len(options.policy or ()) > 1:
        raise SpecError("breakdown lists one policy at a time", "give one --policy")
    idle = [name for name in _OF_A_STEP if getattr(options, name) is not None]
    told = f"{' and '.join(map(flag_of, idle))} change nothing of what one layer keeps."
    runs = options.runs(origin)
    return [
        breakdown_run(replace(run, warnings=(*run.warnings, told)) if idle else run) for run in runs
    ]


_OF_A_STEP = ("dp", "zero", "global_batch")
"""What is of a step, or of all replicas, and moves no tensor of a layer."""


@app.command(
    epilog=examples(
        "breakdown gpt3-175b --tp 8 --sp",
        "breakdown llama-3-8b --policy selective -o tensors.csv",
    )
)
@with_options(RunOptions, OutputOptions)
def breakdown(models: ModelArguments, options: RunOptions, output: OutputOptions) -> int:
    """Every tensor a layer keeps: op, shape in named dimensions, formula, bytes."""
    check_units(output.units, of_run=True)
    chosen_format(output)
    results = answer(options.origin(models), options)

    def sheets() -> list[Sheet]:
        return [sheet for result in results for sheet in breakdown_sheets(result, output.units)]

    emit(sheets, lambda: joined(results, "frameworks"), output)
    return 0
