"""What every answer about a run begins with: the run itself, as it was read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actcalc.run.staged import StagedRun
from actcalc.specs.result import Result


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunAnswer(Result):
    """An answer about one run."""

    title: str
    """What the user calls the run; the model's name unless a run file has a title."""
    model: dict[str, Any]
    """The model's fields."""
    layout: dict[str, Any]
    """The layout's fields."""
    workload: dict[str, Any]
    """The workload's fields."""
    device: dict[str, Any] | None
    """The device's fields, or null."""
    headroom_ratio: float | None
    """Share of the device's memory that is left free where something fits; null without a device.
    """
    framework: str
    """The framework profile that chose the kernels."""
    microbatches: int
    """Micro-batches each replica runs in a step."""


def header(staged: StagedRun) -> dict[str, Any]:
    """The fields of :class:`RunAnswer` for one run."""
    run = staged.run
    return {
        "title": run.name,
        "model": run.model.model_dump(),
        "layout": run.layout.model_dump(),
        "workload": run.workload.model_dump(),
        "device": run.device.model_dump() if run.device else None,
        "headroom_ratio": run.headroom_ratio if run.device else None,
        "framework": str(run.framework),
        "microbatches": staged.microbatches,
    }


def run_notes(staged: StagedRun) -> list[str]:
    """What every answer says of a run: warnings of its reader, notes of its layers."""
    run = staged.run
    notes = [note for kind in staged.kinds for note in kind.graph.notes]
    if run.model.tower and not run.workload.image_tokens:
        notes.append("No image is counted: --image-tokens N adds those of a sequence.")
    return list(dict.fromkeys([*run.warnings, *notes]))
