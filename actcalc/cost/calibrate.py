"""Efficiencies fitted to a user's own measured runs, and how well they then predict.

A file lists runs: what ``actcalc`` takes on its command line, and what was measured.

    runs:
      - {model: gpt-22b, layout: {tp: 8, sp: true}, workload: {global_batch: 4},
         device: a100-80gb, policy: selective, step_seconds: 1.10}

The shares that a step time can tell apart are fitted, as many as there are runs: first that of
matrix products, then memory, then communication, by least squares on the logarithm of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import Roofline
from actcalc.cost.step import policy_of, step_time
from actcalc.errors import SpecError
from actcalc.io.yamlfile import read_mapping
from actcalc.layers.model import model_graph
from actcalc.specs.run import Run, resolve, source

FITTED = ("gemm", "memory", "communication")
_ROUNDS = 30
_STEP = 1e-3
_KEYS = (
    "model", "layout", "workload", "training", "framework", "device", "policy", "step_seconds",
    "name",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CalibratedRun:
    """One measured run, before and after the fit."""

    name: str
    """The run's name, or its model's."""
    measured_seconds: float
    """Measured time of one step."""
    before_seconds: float
    """Predicted with the device preset's efficiencies."""
    after_seconds: float
    """Predicted with the fitted ones."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted efficiencies and how well they reproduce the runs they were fitted to."""

    efficiency: dict[str, float]
    """The fitted shares; pass them to --efficiency."""
    runs: tuple[CalibratedRun, ...]
    """Every run, before and after."""
    before_ratio: float
    """Median absolute relative error before the fit."""
    after_ratio: float
    """The same after it."""
    left_out_ratio: float | None
    """The same when each run is predicted from a fit to the others; null with one run."""


Predict = Callable[[Mapping[str, float]], float]


def predictor(run: Run) -> Predict:
    """Step seconds of ``run`` as a function of efficiency overrides."""
    graph = model_graph(run.model, run.layout, run.workload, run.framework)
    policy = policy_of(run, graph)
    device = run.device
    if device is None:
        raise SpecError(f"{run.model.name}: a measured run needs its device", "add device:")

    def predict(overrides: Mapping[str, float]) -> float:
        rates = rates_of(device, run.workload.precision, overrides, devices=run.layout.devices)
        return step_time(graph, policy, Roofline(graph, rates, run.training)).total

    return predict


def calibrate_file(path: str, fixed: Mapping[str, float] | None = None) -> Calibration:
    """Fit the runs listed in ``path``; ``SpecError`` for a file that lists none, or a wrong key."""
    data = read_mapping(Path(path))
    entries = data.get("runs")
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"{path} lists no measured runs", "write runs: [{model: ..., ...}]")
    runs = [_entry(entry, f"{path}: run {index}") for index, entry in enumerate(entries, 1)]
    return calibrate(runs, fixed or {})


def _entry(entry: Any, where: str) -> tuple[str, Predict, float]:
    if not isinstance(entry, dict):
        raise SpecError(f"{where} is {entry!r}, not a mapping", "keys: " + ", ".join(_KEYS))
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise SpecError(f"{where}: unknown key {unknown[0]!r}", "keys: " + ", ".join(_KEYS))
    seconds = entry.get("step_seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise SpecError(f"{where}: step_seconds is {seconds!r}", "give the seconds of one step")
    policy = entry.get("policy")
    run = resolve(
        source(str(entry.get("model"))),
        layout=entry.get("layout") or {},
        workload=entry.get("workload") or {},
        training=entry.get("training") or {},
        framework=entry.get("framework"),
        device=entry.get("device"),
        policies=(str(policy),) if policy else (),
    )
    return str(entry.get("name", run.model.name)), predictor(run), float(seconds)


def calibrate(
    runs: Sequence[tuple[str, Predict, float]], fixed: Mapping[str, float]
) -> Calibration:
    """Fit shares to ``runs`` (name, predictor, measured seconds)."""
    fitted = _fit([(predict, seconds) for _, predict, seconds in runs], fixed)
    table = tuple(
        CalibratedRun(
            name=name,
            measured_seconds=seconds,
            before_seconds=predict(fixed),
            after_seconds=predict({**fixed, **fitted}),
        )
        for name, predict, seconds in runs
    )
    left_out = None
    if len(runs) > 1:
        errors = []
        for index, (_, predict, seconds) in enumerate(runs):
            rest = [(p, s) for i, (_, p, s) in enumerate(runs) if i != index]
            errors.append(abs(predict({**fixed, **_fit(rest, fixed)}) / seconds - 1))
        left_out = median(errors)
    return Calibration(
        efficiency=fitted,
        runs=table,
        before_ratio=median(abs(r.before_seconds / r.measured_seconds - 1) for r in table),
        after_ratio=median(abs(r.after_seconds / r.measured_seconds - 1) for r in table),
        left_out_ratio=left_out,
    )


def _fit(runs: Sequence[tuple[Predict, float]], fixed: Mapping[str, float]) -> dict[str, float]:
    """Gauss-Newton on the logarithm of each share, with halved steps where one overshoots."""
    import numpy as np

    names = [name for name in FITTED if name not in fixed][: len(runs)]
    if not names:
        return {}

    def residuals(point: Sequence[float]) -> list[float]:
        merged = {**fixed, **{n: math.exp(v) for n, v in zip(names, point, strict=True)}}
        return [math.log(predict(merged) / seconds) for predict, seconds in runs]

    point = [math.log(0.8)] * len(names)
    found = residuals(point)
    for _ in range(_ROUNDS):
        columns = [
            residuals([*point[:i], point[i] - _STEP, *point[i + 1 :]]) for i in range(len(names))
        ]
        slope = [
            [(f - c) / _STEP for f, c in zip(found, column, strict=True)] for column in columns
        ]
        change = np.linalg.lstsq(np.array(slope).T, -np.array(found), rcond=None)[0].tolist()
        scale = 1.0
        while scale > 1e-3:
            trial = [_bounded(v + scale * d) for v, d in zip(point, change, strict=True)]
            reached = residuals(trial)
            if sum(r * r for r in reached) < sum(r * r for r in found):
                break
            scale /= 2
        else:
            break
        point, found = trial, reached
    return {name: round(math.exp(value), 4) for name, value in zip(names, point, strict=True)}


def _bounded(value: float) -> float:
    return min(0.0, max(math.log(0.05), value))
