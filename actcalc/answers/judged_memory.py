"""How far published peaks were from the predicted ones.

``presets/accuracy/memory.yaml`` holds, by what was measured, between which factors of the
prediction published peaks above 10 GB lie; ``python -m benchmarks.accuracy --errors`` writes it, a
test holds it to what the benchmark finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from actcalc.io.presets import presets_root
from actcalc.io.yamlfile import read_mapping
from actcalc.memory.figures import StageFigure


@dataclass(frozen=True, kw_only=True)
class MemoryRange:
    """What one GPU may need in all, by how far published peaks were from predicted ones."""

    metric: str
    """What is predicted and was measured: reserved, what PyTorch's allocator takes from the device;
    or allocated, what it has given out, where the replay of its rules would take too long."""
    predicted_bytes: int
    """That, with what lies outside the allocator."""
    low_bytes: int
    """The same, were it as much off as the tenth of published peaks that lie lowest."""
    high_bytes: int
    """The same of the highest tenth."""
    judged_runs: int
    """Published peaks of that metric."""


def memory_range(figure: StageFigure) -> MemoryRange:
    """The range of one stage's peak, with what lies outside the allocator as predicted."""
    reserved = figure.reserved_bytes
    metric, inside = (
        ("allocated", figure.peak_bytes) if reserved is None else ("reserved", reserved)
    )
    found, outside = _table()[metric], figure.overhead_bytes
    return MemoryRange(
        metric=metric,
        predicted_bytes=inside + outside,
        low_bytes=round(inside * found["low"]) + outside,
        high_bytes=round(inside * found["high"]) + outside,
        judged_runs=int(found["runs"]),
    )


@cache
def _table() -> dict[str, Any]:
    return read_mapping(presets_root() / "accuracy" / "memory.yaml")
