"""What differs between two runs in a framework's own words: the flags or keys to change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.writers import TARGETS
from actcalc.io.writers.back import differences
from actcalc.specs.run import Run

_FLAG = re.compile(r"--([\w-]+)(?:[ =](.*))?")


def changed_words(run: Run, other: Run, targets: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The file that says ``other``, and what differs in it from the one that says ``run``.

    Of ``targets`` the first that can say both. Words of flags that are dropped begin with a minus
    sign and a space. Raises ``SpecError`` where no target can, with the last one's reason.
    """
    reason = SpecError("this profile is no framework's: there is nothing to paste", "")
    for name in targets:
        try:
            return name, _differing(_settings(name, run), _settings(name, other, beside=run))
        except SpecError as error:
            reason = error
    raise reason


def _settings(name: str, run: Run, beside: Run | None = None) -> Mapping[str, str]:
    """Settings of a run in a target's file, by name.

    What the file cannot say of ``run`` is refused, unless it cannot say it of ``beside`` either.
    """
    target = TARGETS[name]
    text = target.write(run)
    if beside is not None:
        known = _lost(name, beside)
        lost = [one for one in _lost(name, run) if one not in known]
        if lost:
            raise SpecError(f"--emit {name}: its file cannot say {', '.join(lost)}", "")
    return dict(_READ[target.file.rpartition(".")[2]](text))


def _lost(name: str, run: Run) -> list[str]:
    target = TARGETS[name]
    found = differences(run, target.file, target.write(run), target.same)
    return [one.split()[0] for one in found]


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    added = [f"{key} {value}".strip() for key, value in other.items() if one.get(key) != value]
    return (*added, *(f"- {key}" for key in one if key not in other))


def _script(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        found = _FLAG.search(line.rstrip(" \\"))
        if found and line.startswith(" "):
            yield f"--{found[1]}", found[2] or ""


def _toml(text: str) -> Iterator[tuple[str, str]]:
    """As torchtitan takes them on its command line."""
    section = ""
    for line in text.splitlines():
        key, equals, value = line.partition(" = ")
        if line.startswith("["):
            section = line.strip("[]")
        elif equals:
            yield f"--{section}.{key}", value.strip('"')


def _json(text: str) -> Iterator[tuple[str, str]]:
    yield from _flat("", json.loads(text))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, json.dumps(value)


_READ: Mapping[str, Callable[[str], Iterator[tuple[str, str]]]] = {
    "sh": _script,
    "toml": _toml,
    "json": _json,
}
"""Readers of settings, by the ending of a target's file."""
