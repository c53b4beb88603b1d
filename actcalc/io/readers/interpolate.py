"""References inside a configuration, as OmegaConf writes them: ``${model.seq_length}``, ``${.x}``.

What a file cannot tell (``${oc.env:HOME}``, a variable of the shell) is left out where it is a
whole value, and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20
Place = tuple[str, ...]
"""Keys from the top to a mapping."""


def interpolated(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A mapping with its references followed, and ``--name ${...}`` of the values left out."""
    unknown: list[str] = []
    return _mapping(data, data, (), unknown), tuple(unknown)


def _mapping(
    root: Mapping[str, Any], node: Mapping[str, Any], at: Place, unknown: list[str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            result[key] = _mapping(root, value, (*at, str(key)), unknown)
            continue
        made = _text(root, value, at, 0) if isinstance(value, str) and "${" in value else value
        if made == "???":  # mandatory, to be given on the command line (OmegaConf)
            continue
        if isinstance(made, str) and re.fullmatch(r"\s*\$\{.*\}\s*", made, re.S):
            unknown.append(f"--{str(key).lstrip('-')} {made}")
        else:
            result[key] = made
    return result


def _text(root: Mapping[str, Any], text: str, at: Place, depth: int) -> Any:
    """A text with its innermost references followed first; a whole one keeps its value's type."""
    for _ in range(_DEEPEST):
        found = _REFERENCE.search(text)
        if found is None:
            break
        value = _referred(root, found[1].strip(), at, depth)
        if value is None:
            return text
        if found[0] == text.strip():
            return value
        text = text[: found.start()] + str(value) + text[found.end() :]
    return text


def _referred(root: Mapping[str, Any], name: str, at: Place, depth: int) -> Any:
    """What one reference means; None where the file does not tell."""
    resolver, colon, words = name.partition(":")
    if colon:
        return _resolved(resolver, words)
    dots = len(name) - len(name.lstrip("."))
    if dots > len(at) + 1 or depth > _DEEPEST:
        return None
    base = at[: len(at) + 1 - dots] if dots else ()
    path = (*base, *name.lstrip(".").split("."))
    if not dots and len(path) > 1 and path[0] not in root:
        path = path[1:]  # the group under which a launcher puts this file (Hydra)
    node: Any = root
    for step in path:
        node = node.get(step) if isinstance(node, Mapping) else None
    if isinstance(node, str) and "${" in node:
        node = _text(root, node, path[:-1], depth + 1)
        return None if isinstance(node, str) and "${" in node else node
    return node if isinstance(node, bool | int | float | str) else None


def _resolved(name: str, words: str) -> Any:
    """A resolver over numbers (NeMo's launcher: ``multiply``); a default of env."""
    parts = [word.strip() for word in words.split(",")]
    if name == "oc.env":
        return parts[1].strip("'\"") if len(parts) > 1 and parts[1] not in ("null", "") else None
    try:
        values = [float(word) for word in parts]
    except ValueError:
        return None
    known = _RESOLVERS.get(name)
    if known is None or len(values) < 2:
        return None
    try:
        value = known(*values[:2]) if len(values) == 2 else _all(known, values)
    except (ZeroDivisionError, OverflowError):
        return None
    return int(value) if float(value).is_integer() else value


def _all(known: Callable[[float, float], float], values: list[float]) -> float:
    value = values[0]
    for each in values[1:]:
        value = known(value, each)
    return value


_RESOLVERS: Mapping[str, Callable[[float, float], float]] = {
    "multiply": lambda a, b: a * b,
    "mul": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "int_div": lambda a, b: a // b,
    "divide": lambda a, b: a / b,
    "divide_floor": lambda a, b: a // b,
    "divide_ceil": lambda a, b: -(-a // b),
    "max": max,
    "min": min,
}
