"""Utilisation of a step as a sheet of figures, and a calibration as a table of runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from actcalc.answers.calibrate import BOUNDS, Calibration
from actcalc.answers.mfu import Utilisation
from actcalc.answers.mfu_figures import Prediction, Training
from actcalc.render.compare import over_memory, run_lines
from actcalc.render.sheet import Column, Row, Sheet, rows_of, share_column
from actcalc.render.units import count, flops

_BASIS = {
    "measured": "step time as measured",
    "mfu": "step time that follows from the MFU",
    "hfu": "step time that follows from the HFU",
    "predicted": "step time as the roofline predicts it",
}


def four(value: float | str) -> str:
    """Four significant digits: utilisation is quoted to a tenth of a per cent; text as it is."""
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else text


def _unfit(result: Utilisation, units: str) -> str:
    """What to say of a layout that its devices do not hold; empty where they do."""
    if result.fits or result.device is None or result.prediction is None:
        return ""
    needs = over_memory(result.device_bytes, result, units)
    if result.basis == "predicted":
        return f"Does not fit: {needs}."
    return f"With this layout and policy a run {needs}: what was measured had others."


def _answer(result: Utilisation, units: str) -> str:
    """The utilisation of a measured step, or the step that was asked for."""
    unfit = _unfit(result, units)
    if unfit and result.basis == "predicted":
        return unfit
    mfu, hfu = f"{100 * result.mfu_ratio:.1f} %", f"{100 * result.hfu_ratio:.1f} %"
    if not result.possible:
        return f"This cannot be: it asks for {mfu} MFU, {hfu} HFU of {result.device['name']}."
    step = f"{four(_warranted(result))} s"
    if result.basis == "measured":
        return f"{mfu} MFU, {hfu} HFU: a step of {step} on {result.gpus} x {result.device['name']}."
    asked = {"mfu": (f"At {mfu} MFU", f" ({hfu} HFU)"), "hfu": (f"At {hfu} HFU", f" ({mfu} MFU)")}
    how, rest = asked.get(result.basis, ("By the roofline", f": {mfu} MFU, {hfu} HFU"))
    return f"{how} a step takes {step}{rest}."


def _warranted(result: Utilisation) -> float | str:
    """The step time with as many digits as it is known to: two of a prediction that may be off by
    more than a twentieth, else three; all of a measured one."""
    guess = result.prediction
    if result.basis != "predicted" or guess is None:
        return result.step_seconds
    spread = guess.high_seconds - guess.low_seconds
    digits = 2 if not guess.judged_runs or spread > 0.1 * guess.step_seconds else 3
    text = f"{result.step_seconds:#.{digits}g}".rstrip(".")
    return float(text) if "e" in text else text


def mfu_sheets(result: Utilisation, units: str, advice: tuple[str, ...] = ()) -> list[Sheet]:
    """Figures of one step; a calibration's runs below it. First whether it fits at all.

    ``advice`` is what to change, where it does not fit.
    """
    unfit = _unfit(result, units)
    lines = run_lines(result.model, result.layout, result.workload, result.framework)
    counted = "all s x s scores" if result.counting == "full" else "scores below the diagonal"
    record = _record(result)
    sheet = Sheet(
        title=f"{result.title}: utilisation of {result.gpus} x {result.device['name']}",
        columns=(
            Column("quantity", "quantity", align="left"),
            Column("value", "value", four),
            Column("unit", "unit", align="left"),
        ),
        rows=tuple(Row(row) for row in _quantities(result)),
        answer=_answer(result, units),
        advice=advice if unfit and result.basis == "predicted" else (),
        fits=False if not result.possible or (unfit and result.basis == "predicted") else None,
        above=(
            *lines,
            f"policy {result.policy}  {_sequences(result.global_batch)} per step  "
            f"{_BASIS[result.basis]}",
        ),
        below=(
            f"model FLOPs per step {flops(result.model_flops)}, hardware "
            f"{flops(result.hardware_flops)} ({counted}); peak "
            f"{result.peak_flops_per_second / 1e12:.4g} TFLOP/s, dense.",
        ),
        notes=(*result.notes, *([unfit] if unfit and result.basis == "measured" else [])),
        keys=tuple(record),
        records=(tuple(record.values()),),
    )
    return [sheet, *([_calibration(result.calibration)] if result.calibration else [])]


def _sequences(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch:,} sequences"


def _quantities(result: Utilisation) -> list[tuple[str, float | str, str]]:
    """Each quantity with its value and unit."""
    rows: list[tuple[str, float | str, str]] = [
        ("step time", _warranted(result), "s"),
        ("MFU", 100 * result.mfu_ratio, "% of peak"),
        ("HFU", 100 * result.hfu_ratio, "% of peak"),
        ("model", result.model_flops_per_second_per_gpu / 1e12, "TFLOP/s per GPU"),
        ("hardware", result.hardware_flops_per_second_per_gpu / 1e12, "TFLOP/s per GPU"),
        ("throughput", result.tokens_per_second, "tokens/s"),
        ("per GPU", result.tokens_per_second_per_gpu, "tokens/s"),
    ]
    for other in result.countings:
        if other.counting != result.counting and result.model["causal"]:
            word = "causal" if other.counting == "causal" else "full"
            rows.append((f"MFU, {word} attention", 100 * other.mfu_ratio, "% of peak"))
            rows.append((f"HFU, {word} attention", 100 * other.hfu_ratio, "% of peak"))
    guess = result.prediction
    if guess and result.basis != "predicted":
        rows.append(("predicted step time", guess.step_seconds, "s"))
        if guess.error_ratio is not None:
            rows.append(("predicted - measured", 100 * guess.error_ratio, "%"))
    if guess and result.basis == "predicted":
        rows.append(("pipeline", guess.pipeline_seconds, "s"))
        rows.append(("of it idle", 100 * guess.bubble_ratio, "%"))
        if guess.host_seconds:
            rows.append(("of it waiting for the host", guess.host_seconds, "s"))
        if guess.exchange_seconds:
            rows.append(("of it expert exchange", guess.exchange_seconds, "s"))
        rows.append(("gradients, exposed", guess.gradients_seconds, "s"))
        rows.append(("optimizer", guess.optimizer_seconds, "s"))
    if result.training:
        train = result.training
        rows.append(("training steps", train.steps, f"for {count(train.tokens)} tokens"))
        rows.append(("training time", train.days, "days"))
        rows.append(("training GPU time", train.gpu_hours, "GPU-hours"))
        if train.price is not None:
            rows.append(("training price", train.price, "in the price's currency"))
    return rows


_FIGURES = (
    "framework", "policy", "gpus", "global_batch", "basis", "step_seconds", "counting",
    "model_flops", "hardware_flops", "hardware_flops_convention", "hardware_flops_by_ops",
    "mfu_ratio", "hfu_ratio", "hfu_by_ops_ratio", "possible", "device_bytes", "fits",
    "peak_flops_per_second",
    "model_flops_per_second_per_gpu", "hardware_flops_per_second_per_gpu", "tokens_per_second",
    "tokens_per_second_per_gpu", "model_flops_per_token",
)  # fmt: skip


def _record(result: Utilisation) -> dict[str, Any]:
    """The figures under their names in JSON, nested ones after a dot: one row for machines."""
    record = {"model.name": result.model["name"], "device.name": result.device["name"]}
    record |= {name: getattr(result, name) for name in _FIGURES}
    for one in result.countings:
        record[f"countings.{one.counting}.mfu_ratio"] = one.mfu_ratio
        record[f"countings.{one.counting}.hfu_ratio"] = one.hfu_ratio
    for name, kind in (("prediction", Prediction), ("training", Training)):
        part = getattr(result, name)
        for field in fields(kind):
            if field.name != "efficiency":
                record[f"{name}.{field.name}"] = getattr(part, field.name, None)
    return record


def _calibration(fit: Calibration) -> Sheet:
    fitted = ", ".join(f"{key}={value:.3g}" for key, value in fit.efficiency.items())
    lines = [
        f"fitted: --efficiency {fitted}" if fitted else "nothing left to fit",
        f"median error {100 * fit.before_ratio:.1f} % before, {100 * fit.after_ratio:.1f} % after"
        + (
            ""
            if fit.left_out_ratio is None
            else f", {100 * fit.left_out_ratio:.1f} % for runs left out of the fit"
        ),
    ]
    stuck = [key for key, value in fit.efficiency.items() if value in BOUNDS]
    if stuck:
        lines.append(f"Ended at a bound of what is fitted: {', '.join(stuck)}.")
    if fit.after_ratio > 0.1 or fit.after_ratio > fit.before_ratio:
        worst = [
            max(abs(seconds / run.measured_seconds - 1) for run, seconds in pairs)
            for pairs in (
                [(run, run.before_seconds) for run in fit.runs],
                [(run, run.after_seconds) for run in fit.runs],
            )
        ]
        lines.append(
            "No shares fit all these runs; least squares heed the worst: largest error "
            f"{100 * worst[0]:.1f} % before, {100 * worst[1]:.1f} % after."
        )
    columns = (
        Column("name", "run", align="left"),
        Column("measured_seconds", "measured\ns", four),
        Column("before_seconds", "before\ns", four),
        Column("after_seconds", "after\ns", four),
        share_column(
            "error_ratio", "error\n ", get=lambda run: run.after_seconds / run.measured_seconds - 1
        ),
    )
    return Sheet(
        title="calibration: step time of each measured run",
        columns=columns,
        rows=rows_of(columns, fit.runs),
        below=tuple(lines),
    )
