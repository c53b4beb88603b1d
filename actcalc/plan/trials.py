"""A run with changes made to it: what each needs and how long a step then takes, evaluated once.

Every figure is that of the changed run itself, built and asked as ``memory`` and ``mfu`` ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from actcalc.cost.offload import offload_times
from actcalc.cost.roofline import Roofline, roofline_of
from actcalc.cost.step import step_time
from actcalc.errors import SpecError
from actcalc.memory.stage import memory_of
from actcalc.plan.changes import Change, changed_run
from actcalc.run.staged import StagedRun
from actcalc.specs.run import Run

_Key = frozenset[tuple[str, Any]]


class Need(NamedTuple):
    """What the fullest stage of a run needs."""

    total_bytes: int
    """In all: the framework's allocator, and what lies beside it."""
    peak_bytes: int
    """In the framework's allocator, the most of any stage."""
    stage: int
    """The fullest stage."""


class Trials:
    """Changed runs of one run; raises nothing for a change that cannot be: it needs None."""

    def __init__(self, run: Run, efficiency: Mapping[str, float] | None = None) -> None:
        self.staged = StagedRun(run)
        self.run = run
        self.efficiency = efficiency
        self.evaluated = 0
        """Changed runs that were evaluated."""
        self._staged: dict[_Key, StagedRun | None] = {frozenset(): self.staged}
        self._rooflines: dict[_Key, Roofline] = {}
        self._needs: dict[_Key, Need | None] = {}
        self._seconds: dict[_Key, float | None] = {}

    def made(self, change: Change) -> StagedRun | None:
        """The changed run, whose policies are as they were; None where there is no such run."""
        key = frozenset((path, value) for path, value in change.items() if path != "policy")
        if key not in self._staged:
            try:
                self._staged[key] = StagedRun(self.changed(dict(key)))
            except SpecError:
                self._staged[key] = None
        return self._staged[key]

    def changed(self, change: Change) -> Run:
        """The run with ``change`` made to it; ``SpecError`` where there is no such run."""
        return changed_run(self.run, self.staged.global_batch, change)

    def policy(self, change: Change) -> str:
        """The policy of the changed run."""
        named: str = change.get("policy", (self.run.policies or ("none",))[0])
        return named

    def need(self, change: Change) -> Need | None:
        """What the changed run needs; None where there is no such run."""
        key = frozenset(change.items())
        if key not in self._needs:
            self._needs[key] = self._need(change)
        return self._needs[key]

    def _need(self, change: Change) -> Need | None:
        staged = self.made(change)
        if staged is None:
            return None
        self.evaluated += 1
        try:
            work = memory_of(staged, staged.policy(self.policy(change)))
            top = work.top
        except SpecError:
            return None
        most = max(figure.peak_bytes for figure in work.figures)
        return Need(top.total_bytes, most, top.stage)

    def seconds(self, change: Change) -> float | None:
        """Seconds in which the run's GPUs would do one step's tokens as the changed run does them.

        For as many tokens on as many GPUs that is its step. None where no time can be derived.
        """
        key = frozenset(change.items())
        if key not in self._seconds:
            self._seconds[key] = self._time(change)
        return self._seconds[key]

    def _time(self, change: Change) -> float | None:
        staged = self.made(change)
        if staged is None:
            return None
        key = frozenset((path, value) for path, value in change.items() if path != "policy")
        try:
            if key not in self._rooflines:
                self._rooflines[key] = roofline_of(staged, self.efficiency)
            roofline, policy = self._rooflines[key], staged.policy(self.policy(change))
            moves = staged.run.training.moves_activations
            more = offload_times(policy, roofline) if moves else None
            step = step_time(policy, roofline, more=more).total
        except SpecError:
            return None
        return step * self.gpu_seconds_per_token(staged)

    def gpu_seconds_per_token(self, staged: StagedRun) -> float:
        """GPUs over tokens of a step, of the changed run over those of the run as it is."""
        own = self.staged
        gpus = staged.run.layout.devices / own.run.layout.devices
        tokens = staged.global_batch * staged.run.workload.seq
        return gpus * (own.global_batch * own.run.workload.seq) / tokens
