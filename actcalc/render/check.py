"""Predicted beside measured as one table, with causes below."""

from __future__ import annotations

from actcalc.answers.check import Check, CheckFigure
from actcalc.render.compare import run_lines
from actcalc.render.sheet import Column, Row, Sheet, share_column
from actcalc.render.units import count, percent, size

_NAMES = {
    "parameters": "parameters",
    "resident": "kept between steps",
    "peak_allocated": "peak, allocated",
    "peak_reserved": "peak, reserved",
    "device_used": "memory of the device (predicted: the least)",
    "needed": "asked for when it failed (a least)",
    "step_seconds": "step time",
    "tokens_per_second_per_gpu": "tokens/s of one GPU",
    "flops_per_second_per_gpu": "FLOP/s of one GPU",
}


def check_sheets(result: Check, units: str) -> list[Sheet]:
    """A row for each figure of the log."""
    columns = (
        Column("name", "figure", align="left"),
        Column("stage", "stage", shown=result.layout["pp"] > 1),
        Column("predicted", "predicted"),
        Column("measured", "measured"),
        share_column("difference_ratio", "difference"),
        Column("within", "in range", align="left"),
    )
    rows = tuple(Row(_row(figure, units)) for figure in result.figures)
    return [
        Sheet(
            title=f"{result.title}: predicted beside {result.log}",
            columns=columns,
            rows=rows,
            records=tuple(_record(figure) for figure in result.figures),
            keys=tuple(column.key for column in columns),
            answer=_answer(result),
            fits=result.within,
            above=(
                *run_lines(result.model, result.layout, result.workload, result.framework),
                f"policy {result.policy}",
            ),
            below=_below(result),
            notes=result.notes,
        )
    ]


def name_of(figure: CheckFigure) -> str:
    """What a figure is called, without remarks."""
    return _NAMES[figure.name].split(" (")[0]


def _row(figure: CheckFigure, units: str) -> tuple[object, ...]:
    return (
        _NAMES[figure.name],
        figure.stage,
        _shown(figure.predicted, figure.unit, units),
        _shown(figure.measured, figure.unit, units),
        figure.difference_ratio,
        "yes" if figure.within else "no",
    )


def _record(figure: CheckFigure) -> tuple[object, ...]:
    return (
        figure.name, figure.stage, figure.predicted, figure.measured, figure.difference_ratio,
        figure.within,
    )  # fmt: skip


def _shown(value: float, unit: str, units: str) -> str:
    if unit == "bytes":
        return size(value, units)
    if unit == "seconds":
        return f"{value:.4g} s"
    if unit == "FLOP/s":
        return f"{value / 1e12:.4g} T"
    return count(value) if unit == "parameters" else f"{value:,.0f}"


def _answer(result: Check) -> str:
    """How far prediction and log are apart, in one sentence."""
    far = [figure for figure in result.figures if not figure.within]
    if not far:
        return "Every figure lies in the range that is stated for it."
    worst = max(far, key=lambda figure: abs(figure.difference_ratio or 0.0))
    off = percent(worst.difference_ratio) if worst.difference_ratio is not None else "unknown"
    return (
        f"{len(far)} of {len(result.figures)} figures are out of range, {name_of(worst)} most: "
        f"{off}."
    )


def _below(result: Check) -> tuple[str, ...]:
    far = [figure for figure in result.figures if not figure.within]
    lines = [f"{name_of(f)}: {f.cause}." for f in far if f.cause]
    if result.calibration:
        lines += ["For `actcalc mfu ... --calibrate FILE`:", *result.calibration.splitlines()]
    return tuple(lines)
