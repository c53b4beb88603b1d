"""``actcalc memory MODEL [MODEL]``: the whole GPU, per pipeline stage."""

from __future__ import annotations

from typing import Annotated

import typer

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.cli.options import MemoryOptions, OutputOptions, RunOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.errors import SpecError
from actcalc.io.sources import READERS, Source, source
from actcalc.render.memory import memory_sheets, two_sheets
from actcalc.render.sheet import Sheet
from actcalc.specs.result import joined

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Memory"
_MODELS = "Preset, YAML run file, config.json or Megatron's arguments; two to compare."


def _origin(name: str, kind: str | None) -> Source:
    if kind is None:
        return source(name)
    if kind not in READERS:
        known = ", ".join(READERS)
        raise SpecError(f"--from {kind!r} is no kind of input", f"use {known}, or drop --from")
    return READERS[kind](name)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, MemoryOptions, OutputOptions)
def memory(
    models: Annotated[list[str], typer.Argument(metavar="MODEL [MODEL]", help=_MODELS)],
    options: RunOptions,
    memory: MemoryOptions,
    output: OutputOptions,
    largest: Annotated[
        list[str] | None,
        typer.Option(
            "--max",
            help="Largest micro-batch, or seq, that fits the device; repeatable.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline",
            help="Every moment of a step, with bytes by kind.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Kind of input: megatron (a mapping of its arguments).",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
) -> int:
    """Weights, gradients, optimizer, activations, transient peak and buffers of every stage."""
    check_units(output.units)
    chosen_format(output)
    if len(models) > 2:
        raise SpecError(f"memory compares two runs, not {len(models)}", "name one or two")
    training = memory.training()
    results: list[MemoryReport] = []
    for name in models:
        read = _origin(name, origin)
        for framework in options.frameworks():
            run = options.run(read, framework, training)
            results.append(memory_run(run, limits=largest or (), timeline=timeline))

    def sheets() -> list[Sheet]:
        if len(results) == 2:
            return two_sheets(results[0], results[1], output.units)
        return [sheet for result in results for sheet in memory_sheets(result, output.units)]

    emit(sheets, lambda: joined(results, "runs"), output)
    return 1 if any(result.fits is False for result in results) else 0
