"""Hugging Face ``config.json``: read as plain JSON into the fields of a model and a workload.

Nothing a configuration names is ever run or downloaded (``auto_map`` is ignored).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.hub.read import known_types, language_model, read, refused_types
from actcalc.io.hub.refused import refuse
from actcalc.io.hub.values import Values, shown
from actcalc.io.yamlfile import MAX_DEPTH, MAX_ENTRIES, MAX_JSON_BYTES, parse_json, read_text

__all__ = ["Imported", "known_types", "read_config", "read_config_file", "refused_types"]

_OPEN_RANGES = ("time_step_limit", "mamba_dt_limit")
"""Keys of ranges without an upper end, which Python writes as Infinity."""


@dataclass(frozen=True)
class Imported:
    """Fields of ``specs.Model`` and ``specs.Workload``, and what to tell the user."""

    fields: dict[str, Any]
    workload: dict[str, Any]
    warnings: tuple[str, ...] = ()


def read_config(config: Mapping[str, Any]) -> Imported:
    """Fields of the model that a configuration describes, to be validated by the caller.

    Raises ``SpecError`` for a model that cannot be described (naming its layers), for missing
    keys, and for values of no use (naming key and value).
    """
    inner, _ = language_model(Values(config))
    for level in (inner, Values(config)):
        named = level.data.get("model_type")
        refuse(named if isinstance(named, str) else "", level)
    _check_plain(config)
    reading = read(config)
    return Imported(reading.fields, reading.workload, tuple(dict.fromkeys(reading.warnings)))


def read_config_file(path: Path | str) -> Imported:
    """Read a ``config.json``, or the one in a folder; ``SpecError`` if it is not one."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise SpecError(
                f"{path.parent} holds no config.json", "name a config.json or its folder"
            )
    data = parse_json(read_text(path, MAX_JSON_BYTES), str(path), finite=False)
    if not isinstance(data, dict):
        raise SpecError(
            f"{path} holds {type(data).__name__}, not a mapping", "name a model's config.json"
        )
    try:
        return read_config(data)
    except SpecError as error:
        raise SpecError(f"{path}: {error}", error.hint) from error


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse what plain JSON cannot hold (NaN, Infinity), deep nesting, and very long lists."""
    pending: list[tuple[str, Any, int]] = [("", config, 0)]
    entries = 0
    while pending:
        path, node, depth = pending.pop()
        entries += 1
        if depth > MAX_DEPTH:
            raise SpecError(f"{shown(path)} is nested too deeply", "name a model's config.json")
        if entries > MAX_ENTRIES:
            raise SpecError("the configuration is too long", "name a model's config.json")
        open_end = node == math.inf and path.rpartition(".")[2] in _OPEN_RANGES
        if isinstance(node, float) and not math.isfinite(node) and not open_end:
            raise SpecError(
                f"{shown(path)} is {node}: not a number of plain JSON", "write a finite number"
            )
        if isinstance(node, Mapping):
            pending += [(f"{path}.{key}" if path else str(key), value, depth + 1)
                        for key, value in node.items()]  # fmt: skip
        elif isinstance(node, list | tuple):
            pending += [(path, value, depth + 1) for value in node]
