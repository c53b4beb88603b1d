"""``actcalc advise RUN``: what to change so that it fits, or what its spare memory buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from actcalc.answers.advise import AdviceReport, advise_run, first_advice
from actcalc.cli.choices import examples, option
from actcalc.cli.given import given_words
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, TimeOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.training import MemoryOptions
from actcalc.cli.values import count_of, replicas
from actcalc.errors import SpecError
from actcalc.io.sources import Source
from actcalc.render.advise import advice_lines, advise_sheets
from actcalc.specs.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Training run"


@dataclass(frozen=True, eq=False, repr=False)
class AdviseOptions:
    """How many GPUs there are, and what the whole training is worth."""

    gpus: Annotated[
        int | None, option("--gpus", help="GPUs of the run, where --dp is not given.", panel=_PANEL)
    ] = None
    tokens: Annotated[
        str | None,
        option("--tokens", help="Tokens to train on: 300e9, 15T.", panel=_PANEL, metavar="COUNT"),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None,
        option("--price-per-gpu-hour", help="Price of one GPU for one hour.", panel=_PANEL),
    ] = None


def answer(
    origin: Source,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    more: AdviseOptions,
    *,
    models: Sequence[str] | None = None,
) -> AdviceReport:
    """The advice on one run; ``models`` are the words that name it on the command line."""
    if len(options.frameworks()) > 1:
        raise SpecError("advise looks at one framework profile", "give one --framework")
    price = more.price_per_gpu_hour
    if price is not None and not price > 0:
        raise SpecError(f"--price-per-gpu-hour {price:g} is not above 0", "give a price above 0")
    read = options.run(origin, training=memory.training())
    run = replicas(read, more.gpus)
    if more.gpus is not None and run.layout.devices != more.gpus:
        raise SpecError(
            f"--gpus {more.gpus}, but the layout takes {run.layout.devices}",
            "give --dp, --tp, --pp or --cp so that they do, or drop --gpus",
        )
    given = None if models is None else given_words(models, options, memory)
    if given is not None and run.layout.dp != read.layout.dp:
        given += ["--dp", str(run.layout.dp)]
    return advise_run(
        run,
        given=given,
        efficiency=timing.shares(run),
        tokens=count_of(more.tokens),
        price_per_gpu_hour=price,
    )


def first_lines(
    run: Run,
    output: OutputOptions,
    efficiency: Mapping[str, float] | None = None,
    *,
    budget: int | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """At most three lines on what to change where a run does not fit; none for machines.

    ``budget`` is what it has to fit, where that is not its device's memory; ``names`` has flags
    that a command spells otherwise than ``memory``.
    """
    wanted = budget or run.budget_bytes
    if wanted is None or chosen_format(output) in ("csv", "json"):
        return ()
    return advice_lines(first_advice(run, wanted, efficiency, names), output.units)


@app.command(
    epilog=examples(
        "advise llama-3-8b --device rtx-4090",
        "advise llama-3.1-70b --framework torchtitan --gpus 64 --zero 3 --device h100-80gb",
    )
)
@with_options(AdviseOptions, RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def advise(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
    more: AdviseOptions,
) -> int:
    """What to change so that a run fits its device, cheapest first; exit 1 where it does not fit.

    Each remedy alone, with the bytes it frees and what it costs in time, then the cheapest
    combination that fits. Where the run fits: what the memory left free would buy.
    """
    check_units(output.units)
    chosen_format(output)
    result = answer(options.origin(models), options, memory, timing, more, models=models)
    emit(lambda: advise_sheets(result, output.units), result.document, output)
    return 0 if result.fits else 1
