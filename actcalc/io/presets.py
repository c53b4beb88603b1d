"""Presets: models, devices, framework profiles and runs kept as YAML, every value with its source.

A preset file has ``title``, ``source`` (of every value that states no other) and sections of
``key: value`` or ``key: {value: ..., source: ...}``. Reading separates values from sources. A file
that names a ``base`` states only what differs from that preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from actcalc.errors import SpecError
from actcalc.errors import suggestion as suggestion

Kind = Literal["models", "devices", "frameworks", "runs"]
KINDS: tuple[Kind, ...] = ("models", "devices", "frameworks", "runs")


@dataclass(frozen=True, eq=False, repr=False)
class Preset:
    """One preset file: plain values, and where each came from (dotted key -> source)."""

    kind: Kind
    name: str
    title: str
    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    family: str = ""
    """Of a device: a name that it shares with others, and that does not say which is meant."""
    aliases: tuple[str, ...] = ()
    """Of a device: other names of its own."""
    instances: Mapping[str, str] = field(default_factory=dict)
    """Of a device: instance types of clouds that have it, with * for anything, and the source."""


@cache
def presets_root() -> Path:
    """The folder with the presets: inside the installed package, else beside pyproject.toml."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_presets", package.parent / "presets"):
        if candidate.is_dir():
            return candidate
    raise SpecError("the presets are missing from this installation", "reinstall actcalc")


@cache
def names(kind: Kind) -> tuple[str, ...]:
    """Names of all presets of ``kind``, sorted."""
    return tuple(sorted(path.stem for path in (presets_root() / kind).glob("*.yaml")))


def exists(kind: Kind, name: str) -> bool:
    """Whether a preset of that name exists."""
    return name in names(kind)


def load(kind: Kind, name: str) -> Preset:
    """Read one preset; ``SpecError`` with a did-you-mean for an unknown name."""
    if not exists(kind, name):
        what = kind.removesuffix("s")
        hint = suggestion(name, names(kind)) or f"`actcalc presets list {kind}` lists them"
        raise SpecError(f"unknown {what} {name!r}", hint)
    return parse(kind, name, _read(kind, name))


def parse(kind: Kind, name: str, data: dict[str, Any]) -> Preset:
    """What a preset's file holds: values and sources apart, names and title taken out."""
    title = str(data.pop("title", name))
    default = str(data.pop("source", ""))
    data.pop("name", None)
    family = ""
    aliases: tuple[str, ...] = ()
    instances: dict[str, str] = {}
    if kind == "devices":
        family = str(data.pop("family", ""))
        aliases = tuple(str(alias) for alias in data.pop("aliases", ()))
        instances = {
            str(pattern): str(entry["source"])
            for entry in data.pop("instances", ())
            for pattern in entry["value"]
        }
    sources: dict[str, str] = {}
    values = _unwrap(data, "", default, sources)
    return Preset(
        kind=kind,
        name=name,
        title=title,
        values=values,
        sources=sources,
        family=family,
        aliases=aliases,
        instances=instances,
    )


def stated_source(kind: Kind, name: str) -> str:
    """The source that a preset's file states for its values, without reading the rest."""
    compiled = presets_root() / "compiled" / kind / f"{name}.json"
    if compiled.is_file():
        return str(_read(kind, name).get("source", ""))
    with (presets_root() / kind / f"{name}.yaml").open(encoding="utf-8") as lines:
        stated = next((line for line in lines if line.startswith("source:")), "")
    return stated.removeprefix("source:").strip().strip('"')


def _read(kind: Kind, name: str) -> dict[str, Any]:
    """The file's mapping; over that of its ``base``, where it names one (another version)."""
    data = built_in(kind, name)
    base = data.pop("base", None)
    return data if base is None else _over(_read(kind, str(base)), data)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, section by section."""
    merged = dict(below)
    for key, value in above.items():
        section = isinstance(value, dict) and "value" not in value and key in below
        merged[key] = _over(below[key], value) if section else value
    return merged


def built_in(kind: str, name: str) -> dict[str, Any]:
    """The mapping of one file of a folder of presets, whichever the folder.

    From the JSON that a wheel compiles it to, else from the YAML.
    """
    compiled = presets_root() / "compiled" / kind / f"{name}.json"
    path = compiled if compiled.is_file() else presets_root() / kind / f"{name}.yaml"
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    return dict(_mapping(path, changed))


@lru_cache(maxsize=256)
def _mapping(path: Path, changed: int) -> dict[str, Any]:
    """A file's mapping, read once as long as it does not change; nobody changes its sections."""
    if path.suffix == ".json":
        import json

        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data
    from actcalc.io.yamlfile import read_mapping

    return read_mapping(path)


def _unwrap(node: Any, path: str, default: str, sources: dict[str, str]) -> Any:
    if isinstance(node, dict):
        if "value" in node and set(node) <= {"value", "source"}:
            sources[path] = str(node.get("source", default))
            return node["value"]
        inner = str(node["source"]) if "source" in node else default
        return {
            key: _unwrap(value, f"{path}.{key}" if path else str(key), inner, sources)
            for key, value in node.items()
            if key != "source"
        }
    sources[path] = default
    return node
