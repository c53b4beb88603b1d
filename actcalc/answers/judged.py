"""How far published steps were from the predicted ones, for runs of the same kind.

``presets/accuracy/step-times.yaml`` holds, per kind of run, how many published runs judge it and
between which factors of the prediction their measured times lie; ``python -m benchmarks.step_times
--errors`` writes it, a test holds it to what the benchmark finds.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from actcalc.cost.rates import efficiency_presets
from actcalc.io.presets import built_in
from actcalc.specs.run import Run


class Judged(NamedTuple):
    """Published runs of one kind beside their predictions."""

    kind: str
    """Family of the device, and dense, moe or adapters: ``a100 dense``."""
    runs: int
    """How many there are; 0 if none judges this kind."""
    low: float
    """Measured over predicted time that nine of ten exceed, or 1; of fewer than ten the least, on
    any device."""
    high: float
    """The same that one of ten exceeds, or 1; of fewer than ten the most, on any device."""

    @property
    def words(self) -> str:
        """How many there are, of which kind; empty if none."""
        if not self.runs:
            return ""
        which = f"{self.runs} published runs" if self.runs > 1 else "one published run"
        return f"By {which} of this kind ({self.kind})"

    @property
    def note(self) -> str:
        """What they say of any predicted step."""
        if not self.runs:
            return f"No published run of this kind ({self.kind}) judges the predicted times."
        return (
            f"{self.words} a step takes {self.low:g} to {self.high:g} times as long as predicted."
        )


def kind_of(run: Run) -> str:
    """What a step is judged with: the device's family, and what its layers are."""
    if run.device is None:
        raise ValueError("a step without a device has no time")
    layers = "moe" if run.model.moe else "dense"
    family = run.device.efficiency or ""
    device = family if family in efficiency_presets() else run.device.name
    return f"{device} {'adapters' if run.training.lora_rank else layers}"


def judged(run: Run) -> Judged:
    """The published runs of the same kind as ``run``."""
    kind = kind_of(run)
    found = _table().get(kind)
    if found is None:
        return Judged(kind, 0, 1.0, 1.0)
    return Judged(kind, int(found["runs"]), float(found["low"]), float(found["high"]))


@cache
def _table() -> dict[str, Any]:
    found = built_in("accuracy", "step-times")
    return {key: value for key, value in found.items() if key != "title"}
