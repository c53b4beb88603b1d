"""Reading YAML and JSON written by people: bounded, without aliases, tags or duplicate keys."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from actcalc.errors import SpecError

MAX_BYTES = 2_000_000
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]
    """A safe loader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping; raises ``SpecError`` for a repeated or unhashable key."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise SpecError(f"line {line}: a key must be a plain word", "remove the brackets")
            if key in mapping:
                raise SpecError(f"key {key!r} is given twice (line {line})", "keep one of them")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a regular file of at most ``limit`` bytes; ``SpecError`` for anything else."""
    if path.is_dir():
        raise SpecError(f"{path} is a directory", "name a file, or a folder with a config.json")
    try:
        if not path.is_file():
            what = "not a regular file" if path.exists() else "no such file"
            raise SpecError(f"{path}: {what}", "check the path")
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror or error}", "check the path") from error
    if len(data) > limit:
        raise SpecError(
            f"{path} is larger than {limit / 1e6:g} MB", "a description is a few kilobytes of text"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not text (byte {error.start} is not UTF-8)", "name a YAML or JSON file"
        ) from error


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML (JSON is a subset); ``SpecError`` for aliases, tags, duplicates or bad syntax."""
    try:
        # Only a star can be an alias: without one the events need no second look.
        for event in yaml.parse(text, Loader=_BASE) if "*" in text else ():
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise SpecError(
                    f"{where}: alias *{event.anchor} (line {line})",
                    "write the value out: anchors and aliases are not read",
                )
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where_in = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise SpecError(f"{where}: {problem}{where_in}", "check the YAML syntax") from error
    except RecursionError as error:
        raise SpecError(f"{where}: nested too deeply", "flatten it") from error
    except (ValueError, OverflowError) as error:
        raise SpecError(f"{where}: {error}", "check the values") from error


def read_mapping(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The mapping a YAML or JSON file of at most ``limit`` bytes holds; ``SpecError`` if it holds
    anything else.
    """
    text = read_text(path, limit)
    parse = parse_json if path.suffix == ".json" else parse_yaml
    data = parse(text, str(path))
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kind = "nothing" if data is None else type(data).__name__
        raise SpecError(f"{path} holds {kind}, not a mapping", "write `key: value` lines")
    return data


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; ``SpecError`` for NaN, duplicate keys or bad syntax.

    ``Infinity`` is let through: configurations of state-space models hold it, as Python writes it.
    """
    import json
    import math

    def constant(name: str) -> Any:
        if name == "Infinity":
            return math.inf
        raise SpecError(f"{where}: {name} is not a number", "write a finite number")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(items)
        if len(mapping) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise SpecError(f"{where}: key {twice!r} is given twice", "keep one of them")
        return mapping

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where}: {error.msg} at line {error.lineno}", "check the JSON syntax"
        ) from error
    except RecursionError as error:
        raise SpecError(f"{where}: nested too deeply", "flatten it") from error
    except ValueError as error:
        raise SpecError(f"{where}: {error}", "check the values") from error
