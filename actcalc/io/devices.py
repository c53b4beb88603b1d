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
    return device_of(presets.load("devices", find_device(text)))


def device_of(preset: presets.Preset) -> Device:
    """The device that a preset describes."""
    return build(Device, _fields(preset), f"device {preset.name}", vetted=True)


def find_device(text: str) -> str:
    """The name of the preset that ``text`` names; ``SpecError`` if none, or more than one, is."""
    if presets.exists("devices", text):
        return text
    found = named_devices(text)
    if len(found) == 1:
        return found[0].name
    if found:
        members = ", ".join(f"{preset.name} ({preset.title})" for preset in found)
        raise SpecError(
            f"device {shorten(text)} may be {len(found)} devices", f"name one: {members}"
        )
    hint = presets.suggestion(text, presets.names("devices"), shortest=3, likeness=0.8)
    raise SpecError(
        f"unknown device {shorten(text)}",
        hint
        or "`actcalc presets list devices` lists them; a file of your own is one too "
        "(`actcalc schema device`)",
    )


def named_devices(text: str) -> tuple[presets.Preset, ...]:
    """The presets that ``text`` may mean: one, several of a family, or none."""
    key = _key(text)
    for preset, keys in _names():
        if any(fnmatchcase(key, known) for known in keys):
            return (preset,)
    family = tuple(preset for preset, _ in _names() if key and key == _key(preset.family))
    return family or _of_words(text)


def _of_words(text: str) -> tuple[presets.Preset, ...]:
    """The presets whose full names have every word of ``text``: ``a100-sxm``, ``v100 pcie``."""
    words = [word for word in re.findall(r"[a-z0-9.]+", text.lower()) if word not in _MAKERS]
    if len(words) < 2:
        return ()
    return tuple(
        preset
        for preset, _ in _names()
        if all(any(_means(word, has) for has in _words(preset)) for word in words)
    )


def _means(word: str, has: str) -> bool:
    """Whether ``word`` is short for a word of a name: ``sxm`` for SXM4, but 80 for 80 alone."""
    return word == has or (word.isalpha() and has.startswith(word))


def _words(preset: presets.Preset) -> list[str]:
    return re.findall(r"[a-z0-9.]+", f"{preset.name} {preset.title}".lower())


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
    from actcalc.io.yamlfile import is_there

    return text.lower().endswith(_ENDINGS) or (is_there(text) and not Path(text).is_dir())


def _key(text: str) -> str:
    """What two spellings of one name share: ``RTX 4090``, ``rtx4090`` and ``rtx-4090``."""
    words = re.findall(r"[a-z0-9.*]+", text.lower())
    return "".join(word for word in words if word not in _MAKERS)


@cache
def _names() -> tuple[tuple[presets.Preset, tuple[str, ...]], ...]:
    """Every preset with the keys of its names; * stands for anything."""
    found = [presets.load("devices", name) for name in presets.names("devices")]
    return tuple(
        (preset, tuple(map(_key, (preset.name, *preset.aliases, *preset.instances))))
        for preset in found
    )
