"""Reading YAML and JSON written by people: bounded, without aliases, tags or duplicate keys."""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def whole_number(text: str, read: Callable[[Any], Any], node: Any) -> int:
    """A whole number as ``read`` reads it; ``SpecError`` for one of very many digits."""
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
            f"{path} is larger than {limit / 1e6:g} MB",
            "a description is a few kilobytes of text"
            if limit <= MAX_JSON_BYTES
            else "keep the part of a few steps",
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
    from actcalc.io.yamlparser import parsed

    return parsed(text, where)


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
            parse_int=lambda digits: whole_number(digits, int, digits),
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
