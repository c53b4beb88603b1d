"""What is built in: the names of presets, and one preset's values with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.io.devices import device_of
from actcalc.io.presets import Preset
from actcalc.specs.result import Result


@dataclass(frozen=True, kw_only=True)
class PresetName:
    """One preset."""

    kind: str
    """models, devices, frameworks or runs."""
    name: str
    """What the command line calls it."""
    title: str
    """What it is."""
    aliases: tuple[str, ...]
    """Other names of a device, instance types of clouds among them (* for anything)."""
    device: dict[str, Any] | None
    """A device's fields; null for all else."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PresetList(Result):
    """The presets of one kind, or of all."""

    schema_name: ClassVar[str] = "actcalc/presets/1"

    presets: tuple[PresetName, ...]
    """One entry per preset."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PresetValues(Result):
    """One preset: every value, and where it comes from."""

    schema_name: ClassVar[str] = "actcalc/preset/1"

    kind: str
    """models, devices, frameworks or runs."""
    name: str
    """What the command line calls it."""
    title: str
    """What it is."""
    values: dict[str, Any]
    """The values, as in the preset's file."""
    sources: dict[str, str]
    """Where each comes from, by its key; keys of nested values are joined with dots."""


def list_presets(found: Sequence[Preset]) -> PresetList:
    """The presets as a result."""
    return PresetList(
        presets=tuple(
            PresetName(
                kind=preset.kind,
                name=preset.name,
                title=preset.title,
                aliases=(*preset.aliases, *preset.instances),
                device=device_of(preset).model_dump() if preset.kind == "devices" else None,
            )
            for preset in found
        )
    )


def show_preset(preset: Preset) -> PresetValues:
    """One preset as a result."""
    return PresetValues(
        kind=preset.kind,
        name=preset.name,
        title=preset.title,
        values=dict(preset.values),
        sources=dict(preset.sources),
    )
