"""How a plan of a run is made, and what excludes what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.run import Run

MemoryModel = Literal["stored", "stored+working", "timeline"]
Semantics = Literal["minimal", "module"]
Method = Literal["optimal", "sqrt", "greedy"]


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How a plan is made.

    ``timeline`` counts every moment of a step as ``actcalc memory`` does; ``stored`` leaves out
    what works and is a lower bound of it, ``stored+working`` leaves out the order of layers and is
    an upper bound. ``offload`` lets kept tensors leave for host memory, where the run's device has
    a known link. ``activations_only``: the budget is for the layers' activations alone.
    """

    memory_model: MemoryModel = "timeline"
    semantics: Semantics = "minimal"
    method: Method = "optimal"
    same_on_all_stages: bool = False
    offload: bool = False
    activations_only: bool = False


def default_model(method: str, *, offload: bool, activations_only: bool) -> MemoryModel:
    """The memory model where none is named: that of ``actcalc memory``, for all it can plan.

    Of activations alone ``memory`` says nothing.
    """
    exact = method != "greedy" and not offload and not activations_only
    return "timeline" if exact else "stored+working"


def check_settings(run: Run, settings: PlanSettings) -> None:
    """Refuse settings that exclude each other, or that the run cannot have."""
    training = run.training
    if settings.method != "optimal":
        if settings.semantics == "module":
            raise SpecError(
                f"--method {settings.method} chooses single ops, not modules",
                "drop --semantics module",
            )
        if settings.same_on_all_stages:
            raise SpecError(
                f"--method {settings.method} plans each stage by itself",
                "drop --same-on-all-stages, or use --method optimal",
            )
        if settings.memory_model == "timeline" and settings.method == "greedy":
            raise SpecError(
                "--method greedy does not look at single moments",
                "use --memory-model stored or stored+working",
            )
    if settings.offload:
        _check_offload(run, settings)
    moved = training.offload_modules or training.offload_layers
    if not settings.activations_only and (training.offload == "activations" or moved):
        raise SpecError(
            "offloaded activations: plan chooses itself what is stored and where",
            "drop it; plan --offload lets tensors go to the host",
        )


def _check_offload(run: Run, settings: PlanSettings) -> None:
    device = run.device
    if device is None:
        raise SpecError(
            "--offload weighs copies to the host against time, which needs a device",
            "add --device",
        )
    if device.host_copy_rate is None:
        raise SpecError(
            f"{device.title} has no known rate of copies to host memory",
            "drop --offload, or give host_copy_bandwidth_bytes_per_second in a device file",
        )
    for name, value, known in (
        ("--memory-model", settings.memory_model, ("stored", "stored+working")),
        ("--method", settings.method, ("optimal",)),
    ):
        if value not in known:
            raise SpecError(
                f"--offload is not planned with {name} {value}", f"use {' or '.join(known)}"
            )
