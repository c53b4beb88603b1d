"""What MODEL names -> plain fields: presets, run files, config.json, hub ids, launch files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    accumulation: int | None = None
    """Micro-batches of each replica in a step, where the source says so instead of a batch."""
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Notes on what was taken for fields nobody gave, by name (``layout.dp``)."""
    needs: Mapping[str, SpecError] = field(default_factory=dict)
    """Fields that must be given elsewhere, by name (``model.vocab``), and the error."""


def source(text: str, kind: str | None = None) -> Source:
    """Read what MODEL names: a preset, a hub id, a run file, a config.json, a launch file.

    ``kind`` forces how a file is read (:mod:`actcalc.io.readers.kinds`). Raises ``SpecError`` with
    a did-you-mean when it names nothing.
    """
    (found,) = sources([text], kind)
    return found


def sources(texts: Sequence[str], kind: str | None = None) -> list[Source]:
    """The runs that several names describe: one each, or one of all where they are its parts.

    Raises ``SpecError`` as :func:`source` does, and for parts that contradict each other.
    """
    if kind is None and all(presets.exists("models", text) for text in texts):
        return [_model_preset(text) for text in texts]
    from actcalc.io.readers import read

    return read(texts, kind)


def one_source(texts: Sequence[str], kind: str | None = None) -> Source:
    """The same for a command that takes one run; ``SpecError`` where they describe several."""
    found = sources(texts, kind)
    if len(found) > 1:
        raise SpecError(
            f"{' and '.join(texts[:2])} describe {len(found)} runs, and this command takes one",
            "name one of them, or the files of one run",
        )
    return found[0]


def named(text: str) -> Source | None:
    """A preset or a hub id; None for anything else. ``SpecError`` where no file has the name."""
    if not text.strip():
        raise SpecError("the model's name is empty", "name a preset, a run file or a config.json")
    if presets.exists("models", text):
        return _model_preset(text)
    if presets.exists("runs", text):
        return run_fields(dict(presets.load("runs", text).values), text)
    path = Path(text)
    from actcalc.io.yamlfile import is_there

    if text == "-" or is_there(text):
        return None
    from actcalc.io import hub_ids

    beside = _neighbours(path) if "/" in text else ()
    if hub_ids.is_id(text) and path.suffix.lower() not in _ENDINGS and not beside:
        return hub_source(text)
    hint = presets.suggestion(text, (*presets.names("models"), *presets.names("runs")))
    if "/" in text or path.suffix.lower() in _ENDINGS:
        close = presets.suggestion(path.name, beside)
        raise SpecError(f"{text}: no such file", close or hint or "check the path")
    raise SpecError(
        f"unknown model {shorten(text)}: not a preset, and no such file",
        hint or "`actcalc presets list` lists the presets",
    )


def _neighbours(path: Path) -> tuple[str, ...]:
    """Names of files in the folder that a path is to lie in: where there are some, it is no id."""
    try:
        return tuple(sorted(each.name for each in path.parent.iterdir()))[:1000]
    except (OSError, ValueError):
        return ()


_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".sh", ".log", ".txt", ".py", ".out")
"""Endings of file names, which no hub id has."""


def hub_source(text: str) -> Source:
    """What a hub id describes: its preset, else its config.json, cached or fetched."""
    from actcalc.io import hub_ids

    preset, note = hub_ids.preset_of(text)
    if preset and (not note or hub_ids.cached_config(text) is None):
        found = _model_preset(preset)
        return replace(found, warnings=(note,)) if note else found
    imported = hub_ids.config_of(text)
    name = text.split("/")[1]
    return Source(
        name=name,
        model={"name": name, **imported.fields},
        workload=imported.workload,
        warnings=imported.warnings,
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
    section = values.get(key)
    section = {} if section is None else section
    if not isinstance(section, dict):
        raise SpecError(
            f"{where}: {key} is {shorten(section)}, not a mapping", f"put fields under {key}:"
        )
    return dict(section)


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
        assumed=found.assumed,
        needs=found.needs,
    )


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


def refuse_measured_layer(path: Path) -> None:
    """A measured layer has no fields of a model: only commands made for one can take it."""
    layer = None if path.is_dir() else measured_layer(str(path))
    if layer is not None:
        raise SpecError(
            f"{path} is the measured layer {shorten(layer.name)}, not a model's description",
            f"`actcalc compare {path}` and `actcalc plan {path}` take it",
        )


def config_source(path: Path) -> Source:
    """The model that a config.json describes, or the one in a folder."""
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


def run_fields(data: dict[str, Any], where: str) -> Source:
    """What a run file's mapping describes; ``SpecError`` for keys that it does not have."""
    unknown = [key for key in data if key not in (*RUN_KEYS, "title", "source", "parameters")]
    if unknown:
        hint = presets.suggestion(unknown[0], RUN_KEYS)
        raise SpecError(
            f"{where}: unknown key {shorten(unknown[0])}",
            hint or "a run file has: " + ", ".join(RUN_KEYS),
        )
    return merged(
        _base_of(data, where),
        layout=_section(data, "layout", where),
        workload=_section(data, "workload", where),
        training=_section(data, "training", where),
        framework=word_of(data, "framework", where),
        device=word_of(data, "device", where),
        policies=_policies(data, where),
        title=word_of(data, "title", where) or "",
    )


def _base_of(data: Mapping[str, Any], where: str) -> Source:
    """The model of a run file: a name or a file, or fields of its own over either."""
    model = data.get("model")
    if isinstance(model, str):
        return _within(where, model)
    if not isinstance(model, dict):
        raise SpecError(
            f"{where}: model is {shorten(model)}", "name a preset, or give the model's fields"
        )
    fields = dict(model)
    preset, file = (word_of(fields, key, f"{where}: model") for key in ("preset", "file"))
    for key in ("preset", "file"):
        fields.pop(key, None)
    if preset is not None and file is not None:
        raise SpecError(
            f"{where}: model has both preset {shorten(preset)} and file {shorten(file)}",
            "keep one of them",
        )
    if preset is not None:
        return merged(_by_name(preset, where), model=fields)
    if file is not None:
        return merged(_within(where, file), model=fields)
    return merged(Source(name=where, model={"name": Path(where).stem}), model=fields)


def _by_name(preset: str, where: str) -> Source:
    """A preset or a hub id, never a file."""
    from actcalc.io import hub_ids

    if presets.exists("models", preset) or presets.exists("runs", preset):
        return source(preset)
    if hub_ids.is_id(preset):
        return hub_source(preset)
    raise SpecError(
        f"{where}: model.preset is {shorten(preset)}, which names no preset",
        presets.suggestion(preset, presets.names("models"))
        or "`actcalc presets list models` lists them; a file goes under file:",
    )


_reading: list[str] = []
"""Files that are being read because another names them, outermost first."""


def _within(where: str, text: str) -> Source:
    """What ``text``, a name or a path in the file ``where``, describes.

    A file that another names is not shown: the error says that it is no model, not what it holds.
    """
    from actcalc.io.yamlfile import is_there

    if presets.exists("models", text) or presets.exists("runs", text) or not is_there(text):
        return source(text)
    path = os.path.realpath(text)
    if path in _reading or path == os.path.realpath(where):
        raise SpecError(f"{where}: the file {text} names itself as its model", "name a config.json")
    _reading.append(path)
    try:
        return source(text)
    except SpecError as error:
        if "names itself" in str(error):
            raise
        raise hidden(where, text) from None
    finally:
        _reading.pop()


def hidden(where: str, name: str) -> SpecError:
    """The error for a file that another names, which tells nothing of what it holds."""
    return SpecError(
        f"{where} names the file {shorten(name)}, which does not read as what it should be",
        f"ask about {shorten(name)} itself to see why",
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


def merged(base: Source, **parts: Any) -> Source:
    """A source with fields of its parts replaced (``layout={"tp": 8}``)."""
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
        accumulation=base.accumulation,
        assumed=base.assumed,
        needs=base.needs,
    )
