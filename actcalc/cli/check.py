"""``actcalc check RUN --log FILE``: predicted beside a real run's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actcalc.answers.check import check_run
from actcalc.cli.choices import examples, option
from actcalc.cli.options import ModelArguments, OutputOptions, RunOptions, refuse_idle, with_options
from actcalc.cli.output import check_units, chosen_format, emit
from actcalc.cli.training import MemoryOptions
from actcalc.errors import SpecError
from actcalc.io.logs import read_log, snapshot_refused
from actcalc.render.check import check_sheets

if TYPE_CHECKING:
    from actcalc.render.charts.chart import Chart

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Log"


@app.command(
    epilog=examples(
        "check run.yaml --log train.log",
        "check launch.sh --log train.log --device a100-80gb",
    )
)
@with_options(RunOptions, MemoryOptions, OutputOptions)
def check(
    models: ModelArguments,
    options: RunOptions,
    memory: MemoryOptions,
    output: OutputOptions,
    log: Annotated[
        str | None,
        option(
            "--log",
            help="Log of Megatron, torchtitan, DeepSpeed or the Trainer, trainer_state.json, an "
            "out-of-memory message, nvidia-smi's table.",
            panel=_PANEL,
            metavar="FILE",
            files=True,
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        option(
            "--snapshot",
            help="Not read: snapshots are pickles, which run code. Says what to give instead.",
            panel=_PANEL,
            metavar="FILE",
            files=True,
        ),
    ] = None,
) -> int:
    """Predicted beside measured, the likely cause of what differs, and what to calibrate with."""
    check_units(output.units)
    chosen_format(output)
    refuse_idle(options, "check", ("headroom",))
    if snapshot is not None:
        raise snapshot_refused(snapshot)
    if log is None:
        raise SpecError("check needs what a run has measured", "add --log FILE")
    measured = read_log(log)
    origin = options.origin(models)
    run = options.run(origin, options.frameworks()[0], memory.training())
    result = check_run(run, measured, models[0])

    def chart() -> Chart:
        from actcalc.render.charts.check import check_chart

        return check_chart(result)

    emit(
        lambda: check_sheets(result, output.units),
        result.document,
        output,
        {"check": chart},
    )
    return 0 if result.within else 1
