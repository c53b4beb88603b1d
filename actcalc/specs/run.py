"""A run: model, layout, workload, framework, device and training, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actcalc.specs.device import Device
from actcalc.specs.framework import Framework
from actcalc.specs.layout import Layout
from actcalc.specs.model import Model
from actcalc.specs.training import Training
from actcalc.specs.workload import Workload

HEADROOM = 0.05
"""Share of a device's memory that is left free unless a run says otherwise: for what the allocator
has taken and cannot use again, which no rule gives."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One fully specified run. ``policies`` is empty where the command should choose."""

    model: Model
    layout: Layout
    workload: Workload
    framework: Framework
    device: Device | None = None
    policies: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    training: Training = field(default_factory=Training)
    title: str = ""
    """What the user calls this run (a run file's ``title``); empty: the model's name."""
    headroom_ratio: float = HEADROOM
    """Share of the device's memory that a run which fits leaves free."""

    @property
    def budget_bytes(self) -> int | None:
        """Memory that a run which fits may need on one device, in bytes; None without a device."""
        return None if self.device is None else self.device.budget_bytes(self.headroom_ratio)

    @property
    def name(self) -> str:
        """What tables call the run: its title, else the model's name."""
        return self.title or self.model.name


def __getattr__(name: str) -> Any:
    """``load_run`` and its kin live in :mod:`actcalc.io.runs` since 0.3; scripts that name them
    here keep working until 1.0."""
    if name in ("Source", "load_run", "resolve", "source"):
        from importlib import import_module

        return getattr(import_module("actcalc.io.runs"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
