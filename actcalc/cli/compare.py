"""``actcalc compare MODEL``: policies side by side."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from actcalc.answers.compare import Comparison, compare_run
from actcalc.cli.choices import argument, examples
from actcalc.cli.choices import models as known_models
from actcalc.cli.options import (
    OutputOptions,
    RunOptions,
    TimeOptions,
    refuse_given,
    split_policies,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError
from actcalc.io.sources import Source, measured_layer
from actcalc.render.compare import compare_sheets, model_sheets, side_by_side
from actcalc.render.sheet import Sheet
from actcalc.specs.result import joined

if TYPE_CHECKING:
    from actcalc.answers.layer_picture import LayerPicture
    from actcalc.answers.measured_layer import LayerComparison
    from actcalc.measure.layer import MeasuredLayer
    from actcalc.render.charts.chart import Chart, Charts
    from actcalc.specs.run import Run

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_MODELS = "Preset, hub id, run file, config.json or launch file; several to set side by side."


@app.command(
    epilog=examples(
        "compare gpt3-175b --tp 8 --sp",
        "compare llama-3-8b qwen3-8b --device h100-80gb",
    )
)
@with_options(RunOptions, TimeOptions, OutputOptions)
def compare(
    models: Annotated[
        list[str], argument(metavar="MODEL...", help=_MODELS, words=known_models, files=True)
    ],
    options: RunOptions,
    timing: TimeOptions,
    output: OutputOptions,
) -> int:
    """Recompute policies side by side: bytes stored, freed, brought back, and extra FLOPs."""
    check_units(output.units, of_run=len(models) == 1)
    chosen_format(output)
    layer = measured_layer(models[0]) if len(models) == 1 else None
    if layer is not None:
        from actcalc.render.measure import layer_sheets

        result = layer_answer(layer, options, timing)
        emit(lambda: layer_sheets(result, output.units), result.document, output)
        return 0
    origins = options.origins(models)
    if len(origins) > 1:
        return _compare_models(origins, options, timing, output)
    results = answer(origins[0], options, timing)

    def sheets() -> list[Sheet]:
        if len(results) == 1:
            advice = _advice(results[0], options.runs(origins[0])[0], timing, output)
            return compare_sheets(results[0], output.units, advice)
        return side_by_side(results, output.units)

    charts = _charts(results, options.runs(origins[0]), output) if len(results) == 1 else None
    emit(sheets, lambda: joined(results, "frameworks"), output, charts)
    return _code(results)


def _advice(
    result: Comparison, run: Run, timing: TimeOptions, output: OutputOptions
) -> tuple[str, ...]:
    """What to change where the device holds no policy, in a few lines."""
    if result.device is None or any(policy.fits for policy in result.policies):
        return ()
    from actcalc.cli.advise import first_lines

    without = {f"training.{field.name}": "" for field in fields(MemoryOptions)}
    return first_lines(run, output, timing.shares(run), names=without)


def _charts(results: list[Comparison], runs: tuple[Run, ...], output: OutputOptions) -> Charts:
    """What one layer keeps, and its work in time, under the policies compared."""
    names = tuple(policy.policy for policy in results[0].policies)

    @cache
    def picture() -> LayerPicture:
        from actcalc.answers.layer_picture import layer_picture

        return layer_picture(runs[0], names)

    def layer() -> Chart:
        from actcalc.render.charts.compare import layer_chart

        return layer_chart(picture(), output.units)

    def timeline() -> Chart:
        from actcalc.render.charts.compare import timeline_chart

        return timeline_chart(picture())

    return {"layer": layer, "timeline": timeline}


def answer(origin: Source, options: RunOptions, timing: TimeOptions) -> list[Comparison]:
    """One comparison for each framework profile that is asked for."""
    chosen = bool(options.policies())
    return [
        compare_run(run, timing.shares(run), beside=len(run.policies) == 1 and not chosen)
        for run in options.runs(origin)
    ]


def layer_answer(layer: MeasuredLayer, options: RunOptions, timing: TimeOptions) -> LayerComparison:
    """Modules of a measured layer side by side; its sizes are as it was measured."""
    from actcalc.answers.measured_layer import compare_layer

    if timing.efficiency:
        raise SpecError("a measured layer is not timed", "drop --efficiency")
    refuse_given(options, "a measured layer", keep=("layers", "policy"))
    return compare_layer(
        layer,
        layers=1 if options.layers is None else options.layers,
        policies=split_policies(options.policy),
    )


def _compare_models(
    origins: list[Source],
    options: RunOptions,
    timing: TimeOptions,
    output: OutputOptions,
) -> int:
    """The same policies for several models, one table."""
    if len(options.frameworks()) > 1:
        raise SpecError(
            "several models and several frameworks make a table of both",
            "name one framework, or one model",
        )
    results = [
        compare_run(run, timing.shares(run)) for origin in origins for run in options.runs(origin)
    ]

    emit(lambda: model_sheets(results, output.units), lambda: joined(results, "models"), output)
    return _code(results)


def _code(results: list[Comparison]) -> int:
    """1 where the device holds none of several policies; without a device nothing is judged.

    One policy alone is no choice: its figures are what was asked for.
    """
    fits = [policy.fits for result in results for policy in result.policies]
    return 1 if len(fits) > 1 and False in fits and True not in fits else 0
