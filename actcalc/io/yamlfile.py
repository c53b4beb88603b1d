"""Reading YAML and JSON written by people: bounded, without aliases, tags or duplicate keys."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from actcalc.errors import SpecError, file_error, shorten

MAX_BYTES = 2_000_000
"""Bytes of a description; far more than any has."""
MAX_JSON_BYTES = 5_000_000
"""The same of a .json file, which is read faster."""
MAX_DEPTH = 32
"""Levels of nesting."""
MAX_ENTRIES = 200_000
"""Values in one file."""
MAX_DIGITS = 100
"""Characters of one whole number."""
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WHOLE = re.compile(r"[-+]?(0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)\Z")
_REAL = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
    r"|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z"
)
_NUMBERS = {"tag:yaml.org,2002:int": _WHOLE, "tag:yaml.org,2002:float": _REAL}
"""Numbers as YAML 1.1 writes them, but those in base 60 (1:30): they are texts, as in YAML 1.2."""


class _Loader(_BASE):  # type: ignore[misc]
    """A safe loader that refuses a key given twice, and whole numbers nobody writes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in rules]
        for first, rules in _BASE.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping; raises ``SpecError`` for a repeated or unhashable key."""
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise SpecError(f"line {line}: a key must be a plain word", "remove the brackets")
            if key in mapping:
                raise SpecError(
                    f"key {shorten(key)} is given twice (line {line})", "keep one of them"
                )
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number; ``SpecError`` for one of very many digits."""
        return _whole(node.value, super().construct_yaml_int, node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _whole(text: str, read: Callable[[Any], Any], node: Any) -> int:
    if len(text) > MAX_DIGITS:
        raise SpecError(
            f"{shorten(text, 30)} is a number of {len(text)} digits", "no size has so many"
        )
    number: int = read(node)
    return number


def largest(path: Path) -> int:
    """Bytes that a description in a file of that name may have."""
    return MAX_JSON_BYTES if path.suffix.lower() == ".json" else MAX_BYTES


def read_text(path: Path, limit: int | None = None) -> str:
    """The text of a regular file of at most ``limit`` bytes (default: as its ending allows).

    Raises ``SpecError`` for anything else.
    """
    limit = largest(path) if limit is None else limit
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise SpecError(f"{path} is a directory", "name a file, or a folder with a config.json")
        if not stat.S_ISREG(mode):
            raise SpecError(f"{path}: not a regular file", "check the path, or pipe it into -")
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except FileNotFoundError as error:
        raise SpecError(f"{path}: no such file", "check the path") from error
    except (OSError, ValueError) as error:
        raise file_error(f"read {path}", error) from error
    if len(data) > limit:
        raise SpecError(
            f"{path} is larger than {limit / 1e6:g} MB", "a description is a few kilobytes of text"
        )
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SpecError(f"{path} begins with the mark of UTF-16", "save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not text (byte {error.start} is not UTF-8)", "name a YAML or JSON file"
        ) from error


def is_there(text: str) -> bool:
    """Whether ``text`` names a file or a folder, one that cannot be looked into among them."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML (JSON is a subset); ``SpecError`` for aliases, tags, duplicates or bad syntax."""
    if text.count(",") + text.count("\n") > MAX_ENTRIES:
        raise SpecError(
            f"{where}: more than {MAX_ENTRIES:,} lines and values", "a run has a few hundred"
        )
    try:
        # Only a star can be an alias: without one the events need no second look.
        for event in yaml.parse(text, Loader=_BASE) if "*" in text else ():
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise SpecError(
                    f"{where}: alias of {shorten(event.anchor)} (line {line})",
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


def read_mapping(path: Path, limit: int | None = None) -> dict[str, Any]:
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


def parse_json(text: str, where: str, *, finite: bool = True) -> Any:
    """Parse JSON; ``SpecError`` for duplicate keys, bad syntax and, if ``finite``, for NaN.

    ``Infinity`` is let through: configurations of state-space models hold it, as Python writes it.
    """
    import json

    def constant(name: str) -> Any:
        if not finite or name == "Infinity":
            return float(name)
        raise SpecError(f"{where}: {name} is not a number", "write a finite number")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(items)
        if len(mapping) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise SpecError(f"{where}: key {shorten(twice)} is given twice", "keep one of them")
        return mapping

    try:
        return json.loads(
            text,
            parse_constant=constant,
            parse_int=lambda digits: _whole(digits, int, digits),
            object_pairs_hook=pairs,
        )
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where}: {error.msg} at line {error.lineno}", "check the JSON syntax"
        ) from error
    except RecursionError as error:
        raise SpecError(f"{where}: nested too deeply", "flatten it") from error
    except ValueError as error:
        raise SpecError(f"{where}: {error}", "check the values") from error
