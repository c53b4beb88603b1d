"""Everything a page about one run says: its answers, and the assumptions they stand on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actcalc.answers.compare import Comparison, compare_run
from actcalc.answers.layer_picture import LayerPicture, layer_picture
from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.answers.plan import RunPlan, plan_run
from actcalc.answers.step_memory import StepMemory, step_memory
from actcalc.cost.rates import shares_of
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.run.staged import StagedRun
from actcalc.solve.clock import limited
from actcalc.specs.run import Run

POINTS = 16
"""Budgets of the frontier that the page draws."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """One value that the answers stand on."""

    of: str
    """What it is a value of: the device, the framework profile, the model."""
    key: str
    """Its name; nested ones are joined with dots."""
    value: Any
    """The value."""
    source: str
    """Where it comes from."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Report:
    """One run from every side."""

    comparison: Comparison
    """Policies side by side."""
    policy: str
    """The policy that the memory is of: the run's, else the fastest that fits, else the leanest."""
    chosen: bool
    """Whether the policy was chosen here, and not by the run."""
    memory: MemoryReport
    """The whole GPU under that policy."""
    plan: RunPlan | None
    """The cheapest plan that fits the device; None without one, or where none can be made."""
    unplanned: str
    """Why there is no plan; empty where there is one, or no device."""
    picture: LayerPicture
    """What one layer keeps and does by policy."""
    step: StepMemory
    """The fullest stage through one step."""
    assumptions: tuple[Assumption, ...]
    """Values of device, profile and model that the answers stand on."""


def report_run(
    run: Run, efficiency: Mapping[str, float] | None = None, *, preset: str | None = None
) -> Report:
    """Every answer about ``run``; ``preset`` is the model preset that it began with, if it did.

    Raises ``SpecError`` for a run that cannot be computed; that no plan can be made of it is part
    of the report.
    """
    staged = StagedRun(run)
    comparison = compare_run(staged, efficiency, beside=len(run.policies) == 1)
    policy = run.policies[0] if run.policies else _policy(comparison)
    under = staged.naming(policy)
    plan, unplanned = _plan(run)
    return Report(
        comparison=comparison,
        policy=policy,
        chosen=not run.policies,
        memory=memory_run(under),
        plan=plan,
        unplanned=unplanned,
        picture=layer_picture(staged, tuple(figure.policy for figure in comparison.policies)),
        step=step_memory(under),
        assumptions=tuple(_assumptions(run, efficiency or {}, preset)),
    )


def _policy(comparison: Comparison) -> str:
    """The fastest policy that fits the device, else the one that needs least; else none."""
    figures = comparison.policies
    fitting = [f for f in figures if f.fits and f.step_seconds is not None]
    if fitting:
        return min(fitting, key=lambda f: (f.step_seconds or 0.0, f.device_bytes or 0)).policy
    if comparison.device is not None:
        return min(figures, key=lambda f: f.device_bytes or 0).policy
    return figures[0].policy


PLAN_SECONDS = 4.0
"""How long the plans of a report are looked for."""


def _plan(run: Run) -> tuple[RunPlan | None, str]:
    budget = run.budget_bytes
    if budget is None:
        return None, ""
    free = replace(run, policies=())
    try:
        with limited(PLAN_SECONDS):
            return plan_run(free, budget, points=POINTS), ""
    except SpecError as error:
        return None, str(error)


def _assumptions(
    run: Run, efficiency: Mapping[str, float], preset: str | None
) -> Iterator[Assumption]:
    if run.device is not None:
        if presets.exists("devices", run.device.name):
            yield from _preset("device", "devices", run.device.name)
        shares, sources = shares_of(run.device)
        for key, value in vars(shares).items():
            given = efficiency.get(key)
            yield Assumption(
                of="share of a peak",
                key=key,
                value=value if given is None else given,
                source=sources.get(key, "") if given is None else "as given (--efficiency)",
            )
    if preset is not None:
        yield from _preset("model", "models", preset)
    yield from _preset("profile", "frameworks", str(run.framework))


def _preset(of: str, kind: Any, name: str) -> Iterator[Assumption]:
    found = presets.load(kind, name)
    for key, value in _flat(found.values, ""):
        yield Assumption(of=f"{of} {name}", key=key, value=value, source=found.sources[key])


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
