"""What MODEL names -> plain fields: presets, run files, config.json, Megatron's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actcalc.errors import SpecError, shorten
from actcalc.io import presets

if TYPE_CHECKING:
    from actcalc.io.megatron import Arguments
    from actcalc.measure.layer import MeasuredLayer

RUN_KEYS = ("model", "layout", "workload", "training", "framework", "device", "policies")
MEASURED_LAYER = "actcalc/measured-layer/"
"""Schema of a layer that `measure --save` wrote, without its number."""
_LARGEST = 64_000_000


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """What MODEL named, before overrides: plain fields, to be validated once all are known."""

    name: str
    model: Mapping[str, Any]
    layout: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    framework: str | None = None
    profile: str | None = None
    device: str | None = None
    policies: tuple[str, ...] = ()
    title: str = ""
    warnings: tuple[str, ...] = ()
    vetted: bool = False
    devices: int | None = None
    """How many devices the run has in all, where the source says so: replicas follow from it."""


def source(text: str) -> Source:
    """Read what MODEL names: a preset, a run file, a config.json or a folder that holds one.

    A flat mapping of Megatron's argument names is one too (:func:`megatron_source`). Raises
    ``SpecError`` with a did-you-mean when it names nothing.
    """
    if not text.strip():
        raise SpecError("the model's name is empty", "name a preset, a run file or a config.json")
    if presets.exists("models", text):
        return _model_preset(text)
    if presets.exists("runs", text):
        return _run_fields(dict(presets.load("runs", text).values), text)
    path = Path(text)
    try:
        found = path.exists()
    except (OSError, ValueError):
        found = False
    if found:
        return _file(path)
    if "/" in text or path.suffix:
        raise SpecError(f"{text}: no such file", "check the path")
    hint = presets.suggestion(text, (*presets.names("models"), *presets.names("runs")))
    raise SpecError(
        f"unknown model {shorten(text)}: not a preset, and no such file",
        hint or "`actcalc presets list` lists the presets",
    )


def _model_preset(name: str) -> Source:
    values = presets.load("models", name).values
    fields = {"name": name, **_section(values, "model", name)}
    return Source(
        name=name,
        model=fields,
        workload=_section(values, "workload", name),
        profile=values.get("framework"),
        vetted=True,
    )


def _section(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    section = values.get(key) or {}
    if not isinstance(section, dict):
        raise SpecError(
            f"{where}: {key} holds {section!r}, not a mapping", f"put fields under {key}:"
        )
    return dict(section)


def megatron_source(text: str) -> Source:
    """Read a flat JSON or YAML mapping of Megatron's long option names; ``SpecError`` if not."""
    from actcalc.io.megatron import read_arguments
    from actcalc.io.yamlfile import read_mapping

    path = Path(text)
    return arguments_source(read_arguments(read_mapping(path), path.stem), path.stem)


def arguments_source(found: Arguments, name: str) -> Source:
    """What Megatron's arguments describe, under a name."""
    return Source(
        name=name,
        model={"name": name, **found.model},
        layout=found.layout,
        workload=found.workload,
        training=found.training,
        framework=found.framework,
        policies=found.policies,
        warnings=found.warnings,
        devices=found.devices,
    )


def _holds_megatron(path: Path) -> bool:
    if path.is_dir():
        return False
    from actcalc.io.yamlfile import read_text

    text = read_text(path)
    if not any(part in text for part in ("-size", "-layers", "_size", "_layers")):
        return False
    if '"model_type"' in text:
        return False  # a config.json says so itself, and need not be read twice
    from actcalc.io.megatron import is_arguments
    from actcalc.io.yamlfile import read_mapping

    try:
        return is_arguments(read_mapping(path))
    except SpecError:
        return False  # the reader of its kind says what is wrong with it


def measured_layer(text: str) -> MeasuredLayer | None:
    """The measured layer that the file called ``text`` holds; None if it is none.

    Raises ``SpecError`` for a file that says it is one and cannot be read as one.
    """
    path = Path(text)
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            holds = MEASURED_LAYER.encode() in stream.read(_LARGEST)
    except (OSError, ValueError):
        return None
    if not holds:
        return None
    return read_layer(path)


def read_layer(path: Path) -> MeasuredLayer:
    """The measured layer in a file of at most 64 MB.

    Raises ``SpecError`` for a file that cannot be read, or holds something else.
    """
    from actcalc.io.yamlfile import read_mapping
    from actcalc.measure.layer import layer_of

    return layer_of(read_mapping(path, _LARGEST), path)


def _refuse_measured_layer(path: Path) -> None:
    """A measured layer has no fields of a model: only commands made for one can take it."""
    layer = None if path.is_dir() else measured_layer(str(path))
    if layer is not None:
        raise SpecError(
            f"{path} is the measured layer {shorten(layer.name)}, not a model's description",
            f"`actcalc compare {path}` and `actcalc plan {path}` take it",
        )


def _file(path: Path) -> Source:
    _refuse_measured_layer(path)
    if _holds_megatron(path):
        return megatron_source(str(path))
    if path.is_dir() or path.suffix == ".json":
        from actcalc.io.hf import read_config_file

        imported = read_config_file(path)
        resolved = path.resolve()
        folder = resolved if path.is_dir() else resolved.parent
        name = resolved.stem if path.is_file() and path.stem != "config" else folder.name
        return Source(
            name=name or "config",
            model={"name": name or "config", **imported.fields},
            workload=imported.workload,
            warnings=imported.warnings,
        )
    from actcalc.io.yamlfile import read_mapping

    return _run_fields(read_mapping(path), str(path))


def _run_fields(data: dict[str, Any], where: str) -> Source:
    unknown = [key for key in data if key not in (*RUN_KEYS, "title", "source", "parameters")]
    if unknown:
        hint = presets.suggestion(unknown[0], RUN_KEYS)
        raise SpecError(
            f"{where}: unknown key {unknown[0]!r}", hint or "a run file has: " + ", ".join(RUN_KEYS)
        )
    model = data.get("model")
    if isinstance(model, str):
        base = source(model)
    elif isinstance(model, dict):
        fields = dict(model)
        preset = fields.pop("preset", None)
        base = (
            source(str(preset)) if preset else Source(name=where, model={"name": Path(where).stem})
        )
        base = _merged(base, model=fields)
    else:
        raise SpecError(f"{where}: model is {model!r}", "name a preset, or give the model's fields")
    return _merged(
        base,
        layout=_section(data, "layout", where),
        workload=_section(data, "workload", where),
        training=_section(data, "training", where),
        framework=word_of(data, "framework", where),
        device=word_of(data, "device", where),
        policies=_policies(data, where),
        title=str(data.get("title") or ""),
    )


def word_of(data: Mapping[str, Any], key: str, where: str) -> str | None:
    """The name under ``key``, None if there is none; ``SpecError`` for anything but a text."""
    value = data.get(key)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise SpecError(
            f"{where}: {key} is {shorten(value)}, not a name",
            f"write {key}: NAME" + (", or a path to a file of your own" if key == "device" else ""),
        )
    return value


def _policies(data: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """A run file's policies: one name or a list of names."""
    value = data.get("policies")
    listed = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise SpecError(
            f"{where}: policies is {shorten(value)}, not names",
            "write policies: [none, selective], or one name",
        )
    return tuple(listed)


def _merged(base: Source, **parts: Any) -> Source:
    return Source(
        name=base.name,
        model={**base.model, **parts.get("model", {})},
        layout={**base.layout, **parts.get("layout", {})},
        workload={**base.workload, **parts.get("workload", {})},
        training={**base.training, **parts.get("training", {})},
        framework=parts.get("framework") or base.framework,
        profile=base.profile,
        device=parts.get("device") or base.device,
        policies=parts.get("policies") or base.policies,
        title=parts.get("title") or base.title,
        warnings=base.warnings,
        devices=None if "dp" in parts.get("layout", {}) else base.devices,
    )


READERS: Mapping[str, Callable[[str], Source]] = {"megatron": megatron_source}
"""Kinds of files that --from forces, and who reads them."""
