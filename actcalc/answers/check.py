"""Predicted beside measured, figure by figure, with the likely cause of what lies too far apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actcalc.answers.header import RunAnswer, header, run_notes
from actcalc.answers.mfu import utilisation
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import check_timed, step_time
from actcalc.errors import SpecError
from actcalc.io.logs import Log, Measured
from actcalc.memory.figures import StageFigure
from actcalc.memory.replay import replayed
from actcalc.memory.stage import memory_of
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run

SMALL = 0.3e9
"""Bytes that may lie between figures of memory whatever their ratio (docs/accuracy.md)."""

RANGES: Mapping[str, tuple[float, float, str]] = {
    "parameters": (-0.01, 0.01, "parameters"),
    "resident": (-0.05, 0.05, "bytes"),
    "peak_allocated": (-0.10, 0.10, "bytes"),
    "peak_reserved": (-0.10, 0.10, "bytes"),
    "device_used": (-0.20, 0.05, "bytes"),
    "needed": (-0.10, float("inf"), "bytes"),
    "step_seconds": (-0.25, 0.25, "seconds"),
    "tokens_per_second_per_gpu": (-0.25, 0.25, "tokens/s"),
    "flops_per_second_per_gpu": (-0.25, 0.25, "FLOP/s"),
}
"""Range of predicted over measured, less one, that is stated for each quantity, and its unit.

Memory: the bounds of docs/accuracy.md; what the driver sees has libraries that are not predicted.
Times: beyond it a published run is called an outlier
(tests/published/step_times.py).
"""

_CAUSES = {
    ("parameters", True): "the model that was read is larger: check its sizes and the vocabulary",
    ("parameters", False): "the model that was read is smaller: check its sizes and the vocabulary",
    ("resident", True): (
        "fewer states than predicted: the optimizer may be sharded (--zero), kept in fewer bits "
        "(--optimizer, --recipe) or on the host, or the log may be older than the first step"
    ),
    ("resident", False): (
        "more states than predicted: the optimizer may not be sharded as read (--zero, --dp), or "
        "keeps wider states (--recipe); a second model beside it counts too"
    ),
    ("peak_allocated", True): (
        "less than predicted: recomputation (--policy), a fused loss (--loss fused), flash "
        "attention (--attention flash), compilation, or shorter sequences than --seq"
    ),
    ("peak_allocated", False): (
        "more than predicted: recomputation may be off (--policy none), attention eager "
        "(--attention eager), tokens uneven over experts (--moe-imbalance), or evaluation, "
        "generation or a second model runs beside"
    ),
    ("peak_reserved", True): (
        "less than predicted: expandable_segments and empty_cache() lessen what is reserved; else "
        "see the causes of peak_allocated"
    ),
    ("peak_reserved", False): (
        "more than predicted: sequences of several lengths, evaluation or checkpoints leave "
        "segments behind; PYTORCH_ALLOC_CONF=expandable_segments:True lessens it"
    ),
    ("device_used", True): "less than predicted: the process may have been seen between peaks",
    ("device_used", False): (
        "more than predicted: other processes, or libraries outside the allocator"
    ),
    ("needed", False): (
        "it asked for more than the predicted peak before it failed: recomputation may be off "
        "(--policy none), attention eager, sequences longer than --seq, or a second model beside"
    ),
    ("step_seconds", True): "the run is faster than the shares of peaks assumed: calibrate them",
    ("step_seconds", False): (
        "the run is slower: data loading, logging, checkpoints or the network may hold it up; "
        "calibrate the shares of peaks if it is steady"
    ),
}  # fmt: skip
"""Why a figure may lie out of its range, by whether the prediction is the larger."""


@dataclass(frozen=True, kw_only=True)
class CheckFigure:
    """One figure of a log beside what is predicted for it."""

    name: str
    """What is measured: parameters, resident, peak_allocated, step_seconds, ..."""
    stage: int | None
    """The pipeline stage of the rank that measured it; null where the log names none: it is then
    compared with the stage that has most."""
    predicted: float
    """What is predicted."""
    measured: float
    """What the log says."""
    difference_ratio: float
    """Predicted over measured, less one."""
    unit: str
    """bytes, seconds, parameters, tokens/s or FLOP/s."""
    low_ratio: float
    """Least difference that is stated for such figures."""
    high_ratio: float | None
    """Greatest one; null without a bound (what a run asked for before it failed is a least)."""
    within: bool
    """Whether the difference lies in that range (or within 0.3 GB, for memory)."""
    cause: str
    """The likely cause where it does not; empty else."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Check(RunAnswer):
    """A run beside a log of it."""

    schema_name: ClassVar[str] = "actcalc/check/1"

    policy: str
    """The recompute policy."""
    log: str
    """What the log is."""
    figures: tuple[CheckFigure, ...]
    """Every figure that the log has and that can be predicted."""
    calibration: str
    """What to write to a file for mfu --calibrate; empty without a measured time and a device."""
    notes: tuple[str, ...]
    """Choices made on the way that the reader should know."""

    @property
    def within(self) -> bool:
        """Whether every figure lies in its range."""
        return all(figure.within for figure in self.figures)


def check_run(run: Run, log: Log, name: str) -> Check:
    """Predicted beside measured; ``SpecError`` where nothing of the log can be predicted.

    ``name`` is what MODEL was on the command line, for the calibration's entry.
    """
    notes: list[str] = []
    if log.global_batch and run.workload.global_batch not in (None, log.global_batch):
        notes.append(
            f"The log's steps have {log.global_batch} sequences, the run's "
            f"{run.workload.global_batch}: times are of the run's."
        )
    elif log.global_batch and run.workload.global_batch is None:
        work = run.workload.model_copy(update={"global_batch": log.global_batch})
        run = replace(run, workload=work)
    staged = StagedRun(run)
    predict = _Predictor(staged)
    figures: list[CheckFigure] = []
    for measured in log.figures:
        found = predict.figure(measured)
        if isinstance(found, str):
            notes.append(found)
        else:
            figures.append(found)
    if not figures:
        raise SpecError(
            f"nothing that the log measures can be predicted: {'; '.join(notes)}",
            "times need --device",
        )
    seconds = next((f.measured for f in figures if f.name == "step_seconds"), None)
    return Check(
        **header(staged),
        policy=staged.only_policy.name,
        log=log.kind,
        figures=tuple(figures),
        calibration=_calibration(run, name, seconds, staged.only_policy.name),
        notes=tuple(dict.fromkeys((*notes, *run_notes(staged)))),
    )


class _Predictor:
    """What a run predicts of each quantity; memory and time are worked out when first asked."""

    def __init__(self, staged: StagedRun) -> None:
        self.staged, self.run = staged, staged.run
        self.stages: tuple[StageFigure, ...] = ()
        self.seconds: float | str | None = None

    def figure(self, measured: Measured) -> CheckFigure | str:
        """The figure beside its prediction, or why there is none."""
        quantity, value = measured.quantity, measured.value
        if not value > 0:
            return f"{quantity} is {value:g} in the log: left out."
        if quantity in ("samples_per_second", "steps_per_second"):
            batch = self.staged.global_batch if quantity == "samples_per_second" else 1
            quantity, value = "step_seconds", batch / value
        predicted, stage = self._predicted(quantity, measured.rank)
        if isinstance(predicted, str):
            return predicted
        low, high, unit = RANGES[quantity]
        ratio = predicted / value - 1
        near = unit == "bytes" and abs(predicted - value) <= SMALL and quantity != "needed"
        within = near or low <= ratio <= high
        return CheckFigure(
            name=quantity,
            stage=stage,
            predicted=predicted,
            measured=value,
            difference_ratio=ratio,
            unit=unit,
            low_ratio=low,
            high_ratio=None if high == float("inf") else high,
            within=within,
            cause="" if within else _CAUSES.get(_cause_key(quantity, ratio), ""),
        )

    def _predicted(self, quantity: str, rank: int | None) -> tuple[float | str, int | None]:
        if quantity in ("step_seconds", "tokens_per_second_per_gpu", "flops_per_second_per_gpu"):
            return self._rate(quantity), None
        stage = self._stage(rank)
        if quantity == "parameters" and rank is None:
            return float(self.staged.parameters), None
        if not self.stages:
            self.memory = memory_of(self.staged)
            self.stages = tuple(self.memory.figure(each) for each in range(self.run.layout.pp))
        shown = self.stages if stage is None else self.stages[stage : stage + 1]
        if not shown:
            return f"The log has a rank of stage {stage}, the run {len(self.stages)} stages.", None
        if quantity == "device_used" and self.run.device is None:
            return "What the driver reports needs --device.", None
        if quantity in ("peak_reserved", "device_used"):
            top = max(shown, key=lambda each: each.total_bytes)
            return float(_reserved(replayed(self.memory, top), quantity)), stage
        return max(float(_bytes(each, quantity)) for each in shown), stage

    def _stage(self, rank: int | None) -> int | None:
        """The stage of a rank: Megatron's ranks go over tp, cp and dp before pp; negative ranks
        are stages themselves."""
        if self.run.layout.pp == 1:
            return 0
        if rank is None:
            return None
        if rank < 0:
            return -1 - rank
        return rank // (self.run.layout.devices // self.run.layout.pp)

    def _rate(self, quantity: str) -> float | str:
        if self.run.device is None:
            return "Times of the log are left out: they need --device."
        if self.seconds is None:
            try:
                check_timed(self.run.training)
                self.seconds = step_time(
                    self.staged.only_policy, roofline_of(self.staged, {})
                ).total
            except SpecError as error:
                self.seconds = f"No time is predicted: {error}."
        if isinstance(self.seconds, str):
            return self.seconds
        layout = self.run.layout
        if quantity == "tokens_per_second_per_gpu":
            tokens = self.staged.global_batch * self.run.workload.seq
            return tokens / self.seconds / layout.devices
        if quantity == "flops_per_second_per_gpu":
            use = utilisation(self.run, gpus=layout.devices, step_seconds=self.seconds)
            return use.model_flops_per_second_per_gpu
        return self.seconds


def _cause_key(quantity: str, ratio: float) -> tuple[str, bool]:
    """Rates are the inverse of times."""
    if quantity.endswith("per_gpu"):
        return "step_seconds", ratio < 0
    return quantity, ratio > 0


def _bytes(figure: StageFigure, quantity: str) -> int:
    return {
        "parameters": figure.parameters,
        "resident": figure.static_bytes,
        "peak_allocated": figure.peak_bytes,
        "needed": figure.peak_bytes,
    }[quantity]


def _reserved(figure: StageFigure, quantity: str) -> int:
    """What the allocator has reserved, or the driver shows; at least, where it is not replayed."""
    reserved = figure.reserved_bytes or figure.reserved_at_least_bytes
    return reserved + (figure.overhead_bytes if quantity == "device_used" else 0)


def _calibration(run: Run, name: str, seconds: float | None, policy: str) -> str:
    """The entry that ``mfu --calibrate`` takes of this run; "" without a time or a device."""
    if seconds is None or run.device is None:
        return ""
    parts: list[tuple[str, Any]] = [
        ("model", name),
        ("layout", _given(run.layout.model_dump(), type(run.layout)().model_dump())),
        ("workload", {"seq": run.workload.seq, "micro_batch": run.workload.micro_batch,
                      "global_batch": run.workload.global_batch}),
        ("framework", str(run.framework)),
        ("device", run.device.name),
        ("policy", policy),
        ("step_seconds", round(seconds, 6)),
    ]  # fmt: skip
    lines = [f"{key}: {_flow(value)}" for key, value in parts if value not in ({}, None)]
    return "runs:\n  - " + "\n    ".join(lines) + "\n"


def _given(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value != usual[key]}


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{k}: {_flow(v)}" for k, v in value.items() if v is not None)
        return f"{{{inside}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
