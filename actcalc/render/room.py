"""How much memory of a device there is for a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.render.units import size


def usable_bytes(device: Mapping[str, Any]) -> int:
    """Memory of a device's fields to plan with: what the framework reports, else the nominal."""
    known: int = device["memory_bytes"] or device["memory_nominal_bytes"]
    return known


def room(device: Mapping[str, Any], headroom_ratio: float | None, units: str) -> str:
    """Memory that a run may need: ``80.8 GB (85.0 GB less 5 % headroom)``."""
    usable, share = usable_bytes(device), headroom_ratio or 0.0
    if not share:
        return size(usable, units)
    return f"{size(usable * (1 - share), units)} ({less(usable, share, units)})"


def less(usable: int, share: float, units: str) -> str:
    """``85.0 GB less 5 % headroom``."""
    return f"{size(usable, units)} less {100 * share:g} % headroom"
