"""``actcalc mfu MODEL``: MFU and HFU from a step time, a step time from an MFU, or a prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from actcalc.answers.calibrate import calibrate_file
from actcalc.answers.mfu import utilisation
from actcalc.cli.options import (
    MemoryOptions,
    ModelArguments,
    OutputOptions,
    RunOptions,
    TimeOptions,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.values import count_of, counting_of, replicas, seconds_of
from actcalc.render.mfu import mfu_sheets

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Step"


_CALIBRATE = (
    "Fit efficiencies to measured runs; YAML: runs: [{model: gpt-22b, layout: {tp: 8}, workload: "
    "{global_batch: 4}, device: a100-80gb, policy: full, step_seconds: 1.4}, ...]; also name, "
    "framework, training."
)


def _option(*names: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=_PANEL, show_default=False
    )
    return option


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def mfu(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    step_time: Annotated[
        str | None, _option("--step-time", help="Measured time of one step: 1.1, 980ms.")
    ] = None,
    gpus: Annotated[int | None, _option("--gpus", help="Devices that take part.")] = None,
    utilised: Annotated[
        float | None, _option("--mfu", help="Instead of a time: the MFU it is to have.")
    ] = None,
    flops: Annotated[
        str, _option("--flops", help="Count attention's scores full (default) or causal.")
    ] = "full",
    tokens: Annotated[
        str | None, _option("--tokens", help="Tokens to train on: 300e9, 15T.")
    ] = None,
    price: Annotated[
        float | None, _option("--price-per-gpu-hour", help="Price of one GPU for one hour.")
    ] = None,
    calibrate: Annotated[
        str | None, _option("--calibrate", metavar="FILE", help=_CALIBRATE)
    ] = None,
) -> int:
    """MFU and HFU of a measured step, or the step that an MFU (or the roofline) promises.

    Exit 1 for a step that cannot be: more than the peak, or predicted of a run that does not fit.
    """
    check_units(output.units)
    chosen_format(output)
    chosen = replicas(options.run(options.origin(models), training=memory.training()), gpus)
    shares = timing.shares(chosen)
    fit = calibrate_file(calibrate, shares) if calibrate else None
    result = utilisation(
        chosen,
        gpus=gpus,
        step_seconds=seconds_of(step_time),
        mfu=utilised,
        counting=counting_of(flops),
        tokens=count_of(tokens),
        price_per_gpu_hour=price,
        efficiency={**shares, **(fit.efficiency if fit else {})},
    )
    result = replace(result, calibration=fit)
    emit(lambda: mfu_sheets(result, output.units), result.document, output)
    return 0 if result.possible and (result.fits or result.basis != "predicted") else 1
