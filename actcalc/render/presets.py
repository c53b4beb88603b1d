"""Presets as sheets: a list per kind, and one preset with the source of every value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actcalc.io.presets import Preset
from actcalc.render.sheet import Column, Row, Sheet, rows_of


def list_sheets(found: Mapping[Any, Sequence[Preset]]) -> list[Sheet]:
    """One sheet per kind of preset: name and title."""
    columns = (
        Column("name", "name", align="left"),
        Column("title", "what", align="left", wrap=True),
    )
    return [
        Sheet(
            title=f"{kind} ({len(group)})",
            columns=columns,
            rows=rows_of(columns, group),
        )
        for kind, group in found.items()
        if group
    ]


def show_sheets(preset: Preset) -> list[Sheet]:
    """Every value of a preset beside its source."""
    columns = (
        Column("key", "key", align="left", wrap=True),
        Column("value", "value", align="left", wrap=True),
        Column("source", "source", align="left", wrap=True),
    )
    rows = tuple(
        Row((key, value, preset.sources.get(key, ""))) for key, value in _flat(preset.values, "")
    )
    title = f"{preset.name}: {preset.title} ({preset.kind.removesuffix('s')})"
    return [Sheet(title=title, columns=columns, rows=rows)]


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
