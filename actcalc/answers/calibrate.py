"""Efficiencies fitted to a user's own measured runs, and how well they then predict.

A file lists runs: what ``actcalc`` takes on its command line, and what was measured.

    runs:
      - {model: gpt-22b, layout: {tp: 8, sp: true}, workload: {global_batch: 4},
         device: a100-80gb, policy: selective, step_seconds: 1.10}

``model`` is what MODEL is on the command line; ``layout``, ``workload`` and ``training`` hold the
fields of a run file; ``device`` and ``step_seconds`` are needed, ``framework``, ``policy`` and
``name`` are not.

Shares of matrix products, memory and communication are fitted, as many as there are runs and as
these can tell apart, in this order where the choice makes no difference, by least squares on the
logarithm of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import check_timed, step_time
from actcalc.errors import SpecError, shorten
from actcalc.io.runs import resolve
from actcalc.io.sources import source, word_of
from actcalc.io.yamlfile import read_mapping
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run

FITTED = ("gemm", "memory", "communication")
BOUNDS = (0.05, 1.0)
"""Least and greatest share that is fitted."""
_START = 0.8
_ROUNDS = 30
_STEP = 1e-3
_SMALLEST = 0.01  # of a step that still has to make the error smaller
_GAIN = 1e-3  # of the error; less is no progress
_ALIKE = 0.01  # of the time: what no choice between shares is made on
_NOTHING = 1e-9  # of squared logarithms: three hundredths of a per mille in time
_FORMAT = "write {model: ..., layout: {...}, device: ..., policy: ..., step_seconds: ...}"
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
    check_timed(run.training)
    if run.device is None:
        raise SpecError(f"{run.model.name}: a measured run needs its device", "add device:")
    staged = StagedRun(run)
    policy = staged.only_policy
    known: dict[tuple[tuple[str, float], ...], float] = {}

    def predict(overrides: Mapping[str, float]) -> float:
        key = tuple(sorted(overrides.items()))
        if key not in known:
            known[key] = step_time(policy, roofline_of(staged, overrides)).total
        return known[key]

    return predict


MAX_RUNS = 64
"""Measured runs that one file may list."""


def calibrate_file(path: str, fixed: Mapping[str, float] | None = None) -> Calibration:
    """Fit the runs listed in ``path``; ``SpecError`` for a file that lists none, or a wrong key."""
    data = read_mapping(Path(path))
    entries = data.get("runs")
    if not isinstance(entries, list) or not entries:
        raise SpecError(
            f"{path} lists no measured runs",
            "write runs:, and under it - " + _FORMAT.removeprefix("write "),
        )
    unknown = [key for key in data if key not in ("runs", "title", "source")]
    if unknown:
        raise SpecError(f"{path}: unknown key {shorten(unknown[0])}", "a file of runs has runs:")
    if len(entries) > MAX_RUNS:
        raise SpecError(f"{path} lists {len(entries)} runs", f"list at most {MAX_RUNS}")
    runs = [_entry(entry, f"{path}: run {index}") for index, entry in enumerate(entries, 1)]
    return calibrate(runs, fixed or {})


def _entry(entry: Any, where: str) -> tuple[str, Predict, float]:
    if not isinstance(entry, dict):
        raise SpecError(f"{where} is {shorten(entry)}, not a mapping", _FORMAT)
    name = entry.get("name", entry.get("model"))
    where = f"{where} ({shorten(str(name)).strip(chr(39))})" if name else where
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise SpecError(f"{where}: unknown key {shorten(unknown[0])}", "keys: " + ", ".join(_KEYS))
    if not isinstance(entry.get("model"), str):
        raise SpecError(f"{where}: model is {shorten(entry.get('model'))}", _FORMAT)
    seconds = entry.get("step_seconds")
    if not isinstance(seconds, int | float) or seconds is True or not 1e-9 <= seconds <= 1e9:
        raise SpecError(
            f"{where}: step_seconds is {shorten(seconds)}", "give the seconds of one step"
        )
    for key in ("layout", "workload", "training"):
        if entry.get(key) is not None and not isinstance(entry[key], dict):
            raise SpecError(f"{where}: {key} is {shorten(entry[key])}, not a mapping", _FORMAT)
    policy, framework, device = (
        word_of(entry, key, where) for key in ("policy", "framework", "device")
    )
    try:
        run = resolve(
            source(entry["model"]),
            layout=entry.get("layout") or {},
            workload=entry.get("workload") or {},
            training=entry.get("training") or {},
            framework=framework,
            device=device,
            policies=(policy,) if policy else (),
        )
        predict = predictor(run)
        predict({})
    except SpecError as error:
        raise SpecError(f"{where}: {error}", error.hint) from error
    return str(entry.get("name", run.model.name)), predict, float(seconds)


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
            others = _fit(rest, fixed, fitted)
            errors.append(abs(predict({**fixed, **others}) / seconds - 1))
        left_out = median(errors)
    return Calibration(
        efficiency=fitted,
        runs=table,
        before_ratio=median(abs(r.before_seconds / r.measured_seconds - 1) for r in table),
        after_ratio=median(abs(r.after_seconds / r.measured_seconds - 1) for r in table),
        left_out_ratio=left_out,
    )


Point = Mapping[str, float]
"""Overrides of shares, by name."""


@dataclass(frozen=True, eq=False)
class _Problem:
    """Runs to fit, and the shares that are given."""

    runs: Sequence[tuple[Predict, float]]
    fixed: Point

    def residuals(self, shares: Point) -> list[float]:
        """Logarithm of predicted over measured time, run by run."""
        merged = {**self.fixed, **shares}
        return [math.log(predict(merged) / seconds) for predict, seconds in self.runs]

    def error(self, shares: Point) -> float:
        """Sum of their squares: what a fit makes small."""
        return sum(value * value for value in self.residuals(shares))

    def slopes(self, shares: Point, names: Sequence[str]) -> list[list[float]]:
        """Each residual's derivative by the logarithm of each share: one row per share."""
        found = self.residuals(shares)
        rows = []
        for name in names:
            lower = self.residuals({**shares, name: shares[name] * math.exp(-_STEP)})
            rows.append([(f - c) / _STEP for f, c in zip(found, lower, strict=True)])
        return rows


def _fit(
    runs: Sequence[tuple[Predict, float]], fixed: Point, start: Point | None = None
) -> dict[str, float]:
    """The shares with the least squares; nothing where the presets' own predict better.

    As many shares are fitted together as there are runs that can tell them apart, each set of them
    from the best fit of one of its own; of sets that differ by less than a hundredth of the time
    the first in the order of ``FITTED`` is taken. So no single share fits better, nor the presets.
    """
    problem = _Problem(runs, fixed)
    if start and len(start) <= len(runs):
        found: list[Point] = [_descend(problem, start), {}]
    else:
        names = _telling(problem, [name for name in FITTED if name not in fixed])
        single = {name: _descend(problem, {name: _START}) for name in names}
        found = [*single.values(), {}]
        size = min(len(names), len(runs))
        if size > 1:
            found = [_together(problem, single, some) for some in combinations(names, size)] + found
    least = min(map(problem.error, found))
    enough = least + len(runs) * _ALIKE**2
    chosen = next(shares for shares in found if problem.error(shares) <= enough)
    return {name: round(value, 4) for name, value in chosen.items()}


def _together(
    problem: _Problem, single: Mapping[str, Point], names: Sequence[str]
) -> dict[str, float]:
    """Several shares fitted together, from the best fit of one of them."""
    best = min((single[name] for name in names), key=problem.error)
    return _descend(problem, {**dict.fromkeys(names, _START), **best})


def _telling(problem: _Problem, names: Sequence[str]) -> list[str]:
    """The shares that change a predicted time at all: one device has no communication to fit."""
    slopes = problem.slopes(dict.fromkeys(names, _START), names)
    return [name for name, row in zip(names, slopes, strict=True) if any(row)]


def _descend(problem: _Problem, start: Point) -> dict[str, float]:
    """Gauss-Newton inside the bounds on the logarithm of each share.

    Each round solves the linearised problem within the bounds exactly, and walks towards its
    solution as far as the true error falls: it ends no higher than it starts.
    """
    names = list(start)
    point = dict(start)
    error = problem.error(point)
    for _ in range(_ROUNDS):
        logs = [math.log(point[name]) for name in names]
        slopes = problem.slopes(point, names)
        change, promised = _bounded_change(slopes, problem.residuals(point), logs)
        if error - promised <= _GAIN * error + _NOTHING:
            break
        scale, trial, reached = 1.0, point, error
        while scale > _SMALLEST:
            moved = (math.exp(v + scale * d) for v, d in zip(logs, change, strict=True))
            trial = dict(zip(names, moved, strict=True))
            reached = problem.error(trial)
            if reached < error:
                break
            scale /= 4
        if reached >= error:
            break
        gained, error, point = error - reached, reached, trial
        if gained <= _GAIN * error + _NOTHING:
            break
    return point


def _bounded_change(
    slopes: Sequence[Sequence[float]], residuals: Sequence[float], point: Sequence[float]
) -> tuple[list[float], float]:
    """The change of ``point`` within the bounds that makes the linearised residuals' squares least.

    Of the few shares each is free or at one of its bounds; the best feasible of all these cases is
    the solution of the bounded linear problem. Returns it and the sum of squares it promises.
    """
    import numpy as np

    matrix, target = np.array(slopes).T, np.array(residuals)
    here = np.array(point)
    lower, upper = math.log(BOUNDS[0]) - here, math.log(BOUNDS[1]) - here
    best, least = np.zeros(len(here)), float(target @ target)
    for case in product((None, lower, upper), repeat=len(here)):
        change = np.array([0.0 if bound is None else bound[i] for i, bound in enumerate(case)])
        free = [i for i, bound in enumerate(case) if bound is None]
        if free:
            rest = target + matrix @ change
            change[free] = np.linalg.lstsq(matrix[:, free], -rest, rcond=None)[0]
        if (change < lower - 1e-12).any() or (change > upper + 1e-12).any():
            continue
        left = target + matrix @ change
        if float(left @ left) < least:
            best, least = change, float(left @ left)
    return [float(value) for value in best], least
