"""Configurations that a launch names: its program's, which options override, and accelerate's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.io.readers.beside import beside, missing
from actcalc.io.readers.document import Document
from actcalc.io.readers.shell.launch import Launch

_ENDINGS = (".yaml", ".yml", ".json", ".toml")
_OPTIONS = ("config", "job.config_file", "config-file", "config_file")
_LAUNCHERS = ("config_file", "config-file")


def configurations(launch: Launch) -> list[str]:
    """Files that a launched program is given as what to run."""
    words = [*(launch.options.get(name) for name in _OPTIONS), *launch.files]
    return [word for word in words if isinstance(word, str) and word.endswith(_ENDINGS)]


def overridden(launch: Launch, options: dict[str, Any], where: Document) -> dict[str, Any]:
    """A launch's options over the configuration that it names, where that lies beside."""
    for name in configurations(launch):
        found = beside(where, name)
        if found is not None:
            kept = {k: v for k, v in options.items() if v != name and k != "job"}
            return _over(found.data, kept)
    return options


def absent(launch: Launch, where: Document) -> tuple[str, ...]:
    """Notes on files that a launch names and that are not here."""
    names = {"": configurations(launch), "accelerate": launcher_files(launch)}
    return tuple(
        missing(where, name, f"the {what} launch".replace("  ", " "))
        for what, found in names.items()
        for name in found
        if beside(where, name) is None
    )


def launcher_files(launch: Launch) -> list[str]:
    """accelerate's own configuration of a launch."""
    words = [launch.launcher.get(name) for name in _LAUNCHERS]
    return [word for word in words if isinstance(word, str) and word.endswith(_ENDINGS)]


def _over(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in other.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = _over(inner, value) if both else value  # type: ignore[arg-type]
    return result
