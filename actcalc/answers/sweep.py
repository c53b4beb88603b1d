"""One row for each combination of varied values: memory, step, a training run's time and price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, ClassVar

from actcalc.answers.mfu import Utilisation, utilisation
from actcalc.errors import SpecError
from actcalc.memory.stage import total_bytes
from actcalc.run.staged import StagedRun
from actcalc.specs.result import Result
from actcalc.specs.run import Run

_DAY = 86400


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SweepRow:
    """One combination; figures of time are null where it does not fit, or is no run at all."""

    values: dict[str, Any]
    """What it has of everything that is varied."""
    problem: str | None
    """Why there is no such run; null if there is one."""
    fits: bool | None
    """Whether it fits its device, headroom left free; null without a device, or a run."""
    best: bool
    """It is the fastest per GPU of its group that fits."""
    gpus: int | None
    """Devices that take part; null where there is no such run."""
    peak_bytes: int | None
    """What the fullest GPU needs in all; null where there is no such run."""
    step_seconds: float | None
    """One optimizer step."""
    tokens_per_second: float | None
    """Tokens per second over all GPUs."""
    tokens_per_second_per_gpu: float | None
    """The same of one GPU."""
    tokens_per_day: float | None
    """Tokens in a day over all GPUs."""
    mfu_ratio: float | None
    """Model FLOPs over what the devices could do in the step."""
    days: float | None
    """A training run on so many tokens; null unless they were given."""
    gpu_hours: float | None
    """The same in GPU-hours."""
    price: float | None
    """GPU-hours times the price of one, in its currency; null if no price was given."""
    energy_kwh: float | None
    """GPU-hours times the power of one GPU; null if no power was given."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sweep(Result):
    """Rows of all combinations of varied values."""

    schema_name: ClassVar[str] = "actcalc/sweep/1"

    title: str
    """The model that is varied."""
    varied: dict[str, list[Any]]
    """Everything that is varied, with its values."""
    group_by: str | None
    """What rows are grouped by; null if by nothing."""
    tokens: int | None
    """Tokens of the training run; null if none were given."""
    price_per_gpu_hour: float | None
    """Price of one GPU for one hour; null if none was given."""
    watts_per_gpu: float | None
    """Power of one GPU with its share of all that runs beside it; null if none was given."""
    complete: bool
    """False where the sweep was stopped before its end."""
    rows: tuple[SweepRow, ...]
    """One for each combination, the last varied changing fastest; by group where there is one."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""


def sweep_runs(
    title: str,
    varied: Mapping[str, Sequence[Any]],
    combinations: Iterable[Mapping[str, Any]],
    run_of: Callable[[Mapping[str, Any]], Run],
    *,
    gpus: int | None = None,
    group_by: str | None = None,
    tokens: int | None = None,
    price_per_gpu_hour: float | None = None,
    watts_per_gpu: float | None = None,
    efficiency: Mapping[str, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
    seconds: float = float("inf"),
) -> Sweep:
    """Evaluate every combination; one that is refused is a row that says why.

    Stopped by the user (``KeyboardInterrupt``), or after so many ``seconds``, it keeps what it has.
    Raises ``SpecError`` for a group of something that is not varied.
    """
    if group_by is not None and group_by not in varied:
        raise SpecError(
            f"--group-by {group_by}: it is not varied",
            "vary it, or use one of " + ", ".join(varied),
        )
    every, rows, complete, notes = list(combinations), [], True, dict[str, None]()
    asked = {"tokens": tokens, "price_per_gpu_hour": price_per_gpu_hour}
    end = monotonic() + seconds
    try:
        for index, values in enumerate(every):
            if monotonic() > end:
                complete = False
                notes[
                    f"The first {index:,} of {len(every):,} rows, which took {seconds:g} s "
                    "(--time-limit for more)."
                ] = None
                break
            if progress is not None:
                progress(index, len(every))
            try:
                run = run_of(values)
                row = _row(values, run, gpus, asked, watts_per_gpu, efficiency)
                notes |= dict.fromkeys(run.warnings)
            except SpecError as error:
                row = _refused(values, str(error))
            rows.append(row)
    except KeyboardInterrupt:
        complete = False
        notes["Stopped before the end: the rows until then."] = None
    return Sweep(
        title=title,
        varied={key: list(values) for key, values in varied.items()},
        group_by=group_by,
        tokens=tokens,
        price_per_gpu_hour=price_per_gpu_hour,
        watts_per_gpu=watts_per_gpu,
        complete=complete,
        rows=tuple(_grouped(rows, varied, group_by)),
        notes=tuple(notes),
    )


_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "gpus", "peak_bytes", "step_seconds", "tokens_per_second", "tokens_per_second_per_gpu",
        "tokens_per_day", "mfu_ratio", "days", "gpu_hours", "price", "energy_kwh",
    )
)  # fmt: skip


def _refused(values: Mapping[str, Any], problem: str) -> SweepRow:
    return SweepRow(values=dict(values), problem=problem, fits=None, best=False, **_NOTHING)


def _row(
    values: Mapping[str, Any],
    run: Run,
    gpus: int | None,
    asked: Mapping[str, Any],
    watts: float | None,
    efficiency: Mapping[str, float] | None,
) -> SweepRow:
    known: dict[str, Any] = {"values": dict(values), "problem": None, "best": False}
    if run.device is None:
        staged = StagedRun(run)
        needed = total_bytes(staged, staged.only_policy)
        figures = {**_NOTHING, "gpus": run.layout.devices, "peak_bytes": needed}
        return SweepRow(**known, fits=None, **figures)
    found = utilisation(run, gpus=gpus, efficiency=efficiency, **asked)
    figures = {**_NOTHING, "gpus": found.gpus, "peak_bytes": found.device_bytes}
    if found.fits:
        figures |= _figures(found, watts)
    return SweepRow(**known, fits=found.fits, **figures)


def _figures(found: Utilisation, watts: float | None) -> dict[str, Any]:
    train = found.training
    hours = train.gpu_hours if train else None
    return {
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_per_gpu": found.tokens_per_second_per_gpu,
        "tokens_per_day": found.tokens_per_second * _DAY,
        "mfu_ratio": found.mfu_ratio,
        "days": train.days if train else None,
        "gpu_hours": hours,
        "price": train.price if train else None,
        "energy_kwh": None if hours is None or watts is None else hours * watts / 1000,
    }


def _grouped(
    rows: Sequence[SweepRow], varied: Mapping[str, Sequence[Any]], key: str | None
) -> list[SweepRow]:
    """The rows by group, in the order of its values, with the best of each marked."""
    values = [None] if key is None else list(varied[key])
    found = []
    for value in values:
        own = [row for row in rows if key is None or row.values[key] == value]
        speeds = [row.tokens_per_second_per_gpu or 0.0 for row in own]
        best = speeds.index(max(speeds)) if any(speeds) else -1
        found += [replace(row, best=index == best) for index, row in enumerate(own)]
    return found
