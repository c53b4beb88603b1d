"""``actcalc mfu MODEL``: MFU and HFU from a step time, a step time from an MFU, or a prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, get_args

import typer

from actcalc.answers.calibrate import calibrate_file
from actcalc.answers.mfu import Utilisation, utilisation
from actcalc.cli.choices import examples, option
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, TimeOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.training import MemoryOptions
from actcalc.cli.values import count_of, counting_of, replicas, seconds_of
from actcalc.cost.flops import Counting
from actcalc.io.sources import Source
from actcalc.render.mfu import mfu_sheets
from actcalc.render.sheet import Sheet

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Step"


_CALIBRATE = (
    "Fit efficiencies to measured runs; YAML: runs: [{model: gpt-22b, layout: {tp: 8}, workload: "
    "{global_batch: 4}, device: a100-80gb, policy: full, step_seconds: 1.4}, ...]; also name, "
    "framework, training."
)


@dataclass(frozen=True, eq=False, repr=False)
class StepOptions:
    """The step: as it was measured, as it is to be, or what it is worth."""

    step_time: Annotated[
        str | None,
        option(
            "--step-time",
            help="Measured time of one step: 1.1, 980ms.",
            panel=_PANEL,
            metavar="TIME",
        ),
    ] = None
    gpus: Annotated[int | None, option("--gpus", help="Devices that take part.", panel=_PANEL)] = (
        None
    )
    mfu: Annotated[
        float | None,
        option("--mfu", help="Instead of a time: the MFU it is to have, 0.45.", panel=_PANEL),
    ] = None
    hfu: Annotated[
        float | None,
        option("--hfu", help="The same for HFU, re-runs counted.", panel=_PANEL),
    ] = None
    tokens_per_second: Annotated[
        float | None,
        option("--tokens-per-second", help="Measured, of all devices together.", panel=_PANEL),
    ] = None
    tflops: Annotated[
        float | None,
        option("--tflops", help="Measured model TFLOP/s of one device.", panel=_PANEL),
    ] = None
    flops: Annotated[
        str,
        option(
            "--flops",
            help="Count attention's scores full or causal.",
            panel=_PANEL,
            words=lambda: get_args(Counting),
        ),
    ] = "full"
    tokens: Annotated[
        str | None,
        option("--tokens", help="Tokens to train on: 300e9, 15T.", panel=_PANEL, metavar="COUNT"),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None,
        option("--price-per-gpu-hour", help="Price of one GPU for one hour.", panel=_PANEL),
    ] = None
    calibrate: Annotated[
        str | None,
        option("--calibrate", metavar="FILE", help=_CALIBRATE, panel=_PANEL, files=True),
    ] = None


def answer(
    origin: Source,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    step: StepOptions,
) -> Utilisation:
    """The utilisation of the step that the options describe."""
    chosen = replicas(options.run(origin, training=memory.training()), step.gpus)
    shares = timing.shares(chosen)
    fit = calibrate_file(step.calibrate, shares) if step.calibrate else None
    result = utilisation(
        chosen,
        gpus=step.gpus,
        step_seconds=seconds_of(step.step_time),
        mfu=step.mfu,
        hfu=step.hfu,
        tokens_per_second=step.tokens_per_second,
        tflops=step.tflops,
        counting=counting_of(step.flops),
        tokens=count_of(step.tokens),
        price_per_gpu_hour=step.price_per_gpu_hour,
        efficiency={**shares, **(fit.efficiency if fit else {})},
    )
    return replace(result, calibration=fit)


@app.command(
    epilog=examples(
        "mfu gpt3-175b --device a100-80gb --gpus 64 --global-batch 64 --step-time 17",
        "mfu llama-3-8b --device h100-80gb --policy full --tokens 1T",
    )
)
@with_options(StepOptions, RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def mfu(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    step: StepOptions,
) -> int:
    """MFU and HFU of a measured step, or the step that an MFU (or the roofline) promises.

    Exit 1 for a step that cannot be: more than the peak, or predicted of a run that does not fit.
    """
    check_units(output.units)
    chosen_format(output)
    result = answer(options.origin(models), options, memory, timing, step)

    def sheets() -> list[Sheet]:
        if result.fits or result.basis != "predicted":
            return mfu_sheets(result, output.units)
        from actcalc.cli.advise import first_lines

        run = replicas(options.run(options.origin(models), training=memory.training()), step.gpus)
        return mfu_sheets(result, output.units, first_lines(run, output, timing.shares(run)))

    emit(sheets, result.document, output)
    return 0 if result.possible and (result.fits or result.basis != "predicted") else 1
