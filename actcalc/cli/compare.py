"""``actcalc compare MODEL``: policies side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from actcalc.cli.options import (
    ModelArgument,
    OutputOptions,
    RunOptions,
    refuse_given,
    split_policies,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit, joined
from actcalc.planner.compare import compare_run
from actcalc.render.compare import compare_sheets, side_by_side
from actcalc.render.sheet import Sheet
from actcalc.specs.run import measured_layer

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_options(RunOptions, OutputOptions)
def compare(model: ModelArgument, options: RunOptions, output: OutputOptions) -> int:
    """Recompute policies side by side: bytes stored, freed, brought back, and extra FLOPs."""
    check_units(output.units)
    chosen_format(output)
    layer = measured_layer(model)
    if layer is not None:
        return _compare_layer(layer, options, output)
    results = [compare_run(run) for run in options.runs(model)]

    def sheets() -> list[Sheet]:
        if len(results) == 1:
            return compare_sheets(results[0], output.units)
        return side_by_side(results, output.units)

    emit(sheets, lambda: joined(results), output)
    return 0


def _compare_layer(layer: MeasuredLayer, options: RunOptions, output: OutputOptions) -> int:
    """Modules of a measured layer side by side; its sizes are as it was measured."""
    from actcalc.planner.measured_layer import compare_layer
    from actcalc.render.measure import layer_sheets

    refuse_given(options, "a measured layer", keep=("layers", "policy"))
    result = compare_layer(
        layer,
        layers=1 if options.layers is None else options.layers,
        policies=split_policies(options.policy),
    )
    emit(lambda: layer_sheets(result, output.units), result.document, output)
    return 0
