"""What --device names -> a device: presets, their other names, clouds' instance types, files."""

from __future__ import annotations

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError, shorten
from actcalc.io import presets
from actcalc.specs.device import Device
from actcalc.specs.validate import build

_MAKERS = frozenset({"nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "google", "intel"})
"""Words of full names that say nothing more: ``NVIDIA GeForce RTX 4090`` is ``rtx-4090``."""
_ENDINGS = (".yaml", ".yml", ".json")


def load_device(text: str) -> Device:
    """The device that ``text`` names.

    A preset's name, another name of it (``a6000``), the name that torch reports, a cloud's instance
    type (``p5.48xlarge``), or a file (``mine.yaml``). Raises ``SpecError`` for a name of several
    devices, listing them, and for one of none.
    """
    if not presets.exists("devices", text) and _is_file(text):
        return read_device(Path(text))
    name = find_device(text)
    preset = presets.load("devices", name)
    return build(Device, _fields(preset), f"device {name}", vetted=True)


def find_device(text: str) -> str:
    """The name of the preset that ``text`` names; ``SpecError`` if none, or more than one, is."""
    if presets.exists("devices", text):
        return text
    key = _key(text)
    for name, keys in _names().items():
        if any(fnmatchcase(key, known) for known in keys):
            return name
    members = [preset for preset in _all() if key and key == _key(preset.family)]
    if members:
        named = ", ".join(f"{preset.name} ({preset.title})" for preset in members)
        raise SpecError(f"device {shorten(text)} may be {len(members)} devices", f"name one: {named}")
    hint = presets.suggestion(text, presets.names("devices"), shortest=3, likeness=0.8)
    raise SpecError(
        f"unknown device {shorten(text)}",
        hint or "`actcalc presets list devices` lists them; a file of your own is one too "
        "(`actcalc schema device`)",
    )


def read_device(path: Path) -> Device:
    """The device that a YAML or JSON file describes; ``SpecError`` names the first wrong value.

    Fields are those of :class:`Device`, each a plain value or ``{value: ..., source: ...}``; the
    name is the file's. A file of shares that it names is looked for beside it.
    """
    from actcalc.io.yamlfile import read_mapping

    preset = presets.parse("devices", path.stem, read_mapping(path))
    given = {key: _number(key, value) for key, value in _fields(preset).items()}
    shares = given.get("efficiency")
    if isinstance(shares, str) and (path.parent / shares).is_file():
        given["efficiency"] = str(path.parent / shares)
    return build(Device, given, str(path))


def _fields(preset: presets.Preset) -> dict[str, Any]:
    return {"name": preset.name, "title": preset.title, **preset.values}


def _number(key: str, value: Any) -> Any:
    """``value`` as people write numbers: YAML reads 80e9 as a text, 80.0e+9 as no whole number."""
    if isinstance(value, dict):
        return {inner: _number(inner, each) for inner, each in value.items()}
    if isinstance(value, str) and key not in ("name", "title", "efficiency"):
        try:
            value = float(value)
        except ValueError:
            return value
    kinds = {field.name: str(field.type) for field in fields(Device)}
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole and kinds.get(key, "").startswith(("int", "Memory")) else value


def _is_file(text: str) -> bool:
    if text.lower().endswith(_ENDINGS):
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _key(text: str) -> str:
    """What two spellings of one name share: ``RTX 4090``, ``rtx4090`` and ``rtx-4090``."""
    words = re.findall(r"[a-z0-9.*]+", text.lower())
    return "".join(word for word in words if word not in _MAKERS)


@cache
def _all() -> tuple[presets.Preset, ...]:
    return tuple(presets.load("devices", name) for name in presets.names("devices"))


@cache
def _names() -> dict[str, tuple[str, ...]]:
    """Keys of every name of each preset; * stands for anything."""
    return {
        preset.name: tuple(map(_key, (preset.name, *preset.aliases, *preset.instances)))
        for preset in _all()
    }
