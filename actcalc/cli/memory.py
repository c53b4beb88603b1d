"""``actcalc memory MODEL...``: the whole GPU, per pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.cli.choices import argument, examples, option
from actcalc.cli.choices import models as known_models
from actcalc.cli.options import OutputOptions, RunOptions, refuse_idle, with_options
from actcalc.cli.output import check_units, chosen_format, emit, emit_text
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError, say
from actcalc.io.sources import Source
from actcalc.render.memories import side_sheets
from actcalc.render.memory import memory_sheets
from actcalc.render.sheet import Sheet
from actcalc.specs.result import joined
from actcalc.specs.run import Run

if TYPE_CHECKING:
    from actcalc.render.charts.chart import Chart, Charts

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Memory"
EMITTED = ("megatron", "torchtitan", "deepspeed", "transformers", "fsdp", "axolotl", "yaml")
"""Rows of ``io.writers.TARGETS``, which help must not load."""
_MODELS = "Preset, hub id, run file, config.json or launch files of a run; two runs to compare."


def _emit(
    target: str,
    options: RunOptions,
    origin: Source,
    training: dict[str, Any],
    output: OutputOptions,
) -> int:
    """Print the run as a framework's file, and what reading it had to say on standard error."""
    from actcalc.io.writers import written

    if output.json or output.format is not None or output.plot is not None:
        raise SpecError(f"--emit {target} is text to paste", "drop --json, --format and --plot")
    run = options.run(origin, options.frameworks()[0], training)
    text = written(run, target)
    for note in run.warnings:
        say(f"note: {note}")
    emit_text(text, output)
    return 0


def _charts(result: MemoryReport, run: Run, output: OutputOptions) -> Charts:
    """The stages, and the fullest one through a step."""

    def stages() -> Chart:
        from actcalc.render.charts.memory import stages_chart

        return stages_chart(result, output.units)

    def step() -> Chart:
        from actcalc.answers.step_memory import step_memory
        from actcalc.render.charts.memory import step_chart

        return step_chart(step_memory(run), output.units)

    return {"stages": stages, "step": step}


def answer(
    origin: Source,
    options: RunOptions,
    memory: MemoryOptions,
    *,
    largest: Sequence[str] = (),
    timeline: bool = False,
) -> list[MemoryReport]:
    """One report for each framework profile that is asked for."""
    refuse_idle(options, "memory", ("peak",))
    return [
        memory_run(run, limits=largest, timeline=timeline, reserved=True)
        for run in options.runs(origin, memory.training())
    ]


def _advice(run: Run, result: MemoryReport, output: OutputOptions) -> tuple[str, ...]:
    """What to change where it does not fit, in a few lines."""
    if result.fits is not False:
        return ()
    from actcalc.cli.advise import first_lines

    return first_lines(run, output)


@app.command(
    epilog=examples(
        "memory llama-3-8b --device h100-80gb --policy full",
        "memory llama-3.1-70b --tp 8 --sp --pp 4 --device h100-80gb --max micro-batch",
    )
)
@with_options(RunOptions, MemoryOptions, OutputOptions)
def memory(
    models: Annotated[
        list[str], argument(metavar="MODEL...", help=_MODELS, words=known_models, files=True)
    ],
    options: RunOptions,
    memory: MemoryOptions,
    output: OutputOptions,
    largest: Annotated[
        list[str] | None,
        option(
            "--max",
            help="Largest micro-batch, or seq, that fits the device. Repeatable.",
            panel=_PANEL,
            metavar="WHAT",
            words=lambda: ("micro-batch", "seq"),
        ),
    ] = None,
    timeline: Annotated[
        bool,
        option("--timeline", help="Every moment of a step, with bytes by kind.", panel=_PANEL),
    ] = False,
    emit_for: Annotated[
        str | None,
        option(
            "--emit",
            help=f"Write the run as a file to paste: {', '.join(EMITTED)}.",
            panel=_PANEL,
            words=lambda: EMITTED,
        ),
    ] = None,
) -> int:
    """Weights, gradients, optimizer, activations, transient peak and buffers of every stage."""
    check_units(output.units)
    if emit_for is not None:
        return _emit(emit_for, options, options.origin(models), memory.training(), output)
    chosen_format(output)
    origins = options.origins(models)
    if len(origins) > 2:
        raise SpecError(f"memory compares two runs, not {len(origins)}", "name one or two")
    results = [
        result
        for origin in origins
        for one in options.by_policy()
        for result in answer(origin, one, memory, largest=largest or (), timeline=timeline)
    ]

    def sheets() -> list[Sheet]:
        if len(results) > 1:
            return side_sheets(results, output.units)
        (run,) = options.runs(origins[0], memory.training())
        return memory_sheets(results[0], output.units, _advice(run, results[0], output))

    charts = None
    if len(results) == 1:
        charts = _charts(results[0], options.run(origins[0], training=memory.training()), output)
    emit(sheets, lambda: joined(results, "runs"), output, charts)
    return 1 if any(result.fits is False for result in results) else 0
