"""``actcalc advise RUN``: what to change so that it fits, or what its spare memory buys."""

from __future__ import annotations

from typing import Annotated

import typer

from actcalc.answers.advise import advise_run
from actcalc.cli.options import (
    MemoryOptions,
    ModelArguments,
    OutputOptions,
    RunOptions,
    TimeOptions,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.values import count_of, replicas
from actcalc.cli.words import given_words
from actcalc.errors import SpecError
from actcalc.render.advise import advise_sheets

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Training run"


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def advise(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            help="GPUs of the run, where --dp is not given.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Tokens to train on: 300e9, 15T.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-gpu-hour",
            help="Price of one GPU for one hour.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
) -> int:
    """What to change so that a run fits its device, cheapest first; exit 1 where it does not fit.

    Each remedy alone, with the bytes it frees and what it costs in time, then the cheapest
    combination that fits. Where the run fits: what the memory left free would buy.
    """
    check_units(output.units)
    chosen_format(output)
    if len(options.frameworks()) > 1:
        raise SpecError("advise looks at one framework profile", "give one --framework")
    if price is not None and not price > 0:
        raise SpecError(f"--price-per-gpu-hour {price:g} is not above 0", "give a price above 0")
    read = options.run(options.origin(models), training=memory.training())
    run = replicas(read, gpus)
    if gpus is not None and run.layout.devices != gpus:
        raise SpecError(
            f"--gpus {gpus}, but the layout takes {run.layout.devices}",
            "give --dp, --tp, --pp or --cp so that they do, or drop --gpus",
        )
    given = given_words(models, options, memory)
    if run.layout.dp != read.layout.dp:
        given += ["--dp", str(run.layout.dp)]
    result = advise_run(
        run,
        given=given,
        efficiency=timing.shares(run),
        tokens=count_of(tokens),
        price_per_gpu_hour=price,
    )
    emit(lambda: advise_sheets(result, output.units), result.document, output)
    return 0 if result.fits else 1
