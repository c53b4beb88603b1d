"""``actcalc report RUN -o report.html``: one self-contained page about a run."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

import typer

from actcalc.cli.choices import examples
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, TimeOptions, with_options
from actcalc.cli.output import check_units, chosen_format, emit_text
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError, install

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog=examples(
        "report gpt3-175b --tp 8 --sp -o report.html",
        "report llama-3-8b --dp 8 --zero 3 --device h100-80gb -o report.html",
    )
)
@with_options(RunOptions, MemoryOptions, TimeOptions, OutputOptions)
def report(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    timing: TimeOptions,
    output: OutputOptions,
) -> int:
    """One page about a run: the answer in a sentence, tables, charts, assumptions with sources.

    The page is one file that loads and runs nothing, for a screen, a telephone or a printer.
    """
    check_units(output.units)
    if chosen_format(output) != "html" or output.plot is not None:
        what = f"--plot {output.plot}" if output.plot is not None else chosen_format(output)
        raise SpecError(f"report writes a page, not {what}", "name one: -o report.html")
    if len(options.frameworks()) > 1:
        raise SpecError("a report is of one framework profile", "give one --framework")
    from actcalc.answers.report import report_run
    from actcalc.io import presets
    from actcalc.render.page import MISSING
    from actcalc.render.report import report_page

    run = options.run(options.origin(models), training=memory.training())
    preset = models[0] if len(models) == 1 and presets.exists("models", models[0]) else None
    result = report_run(run, timing.shares(run), preset=preset)
    emit_text(report_page(result, shlex.join(["actcalc", *sys.argv[1:]]), output.units), output)
    if find_spec("vl_convert") is None:
        print(f"note: {MISSING}\nhint: {install('charts')}", file=sys.stderr)
    return 1 if result.memory.fits is False else 0
