"""Presets as sheets: a list per kind, and one preset with the source of every value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from actcalc.io.devices import device_of
from actcalc.io.presets import Preset
from actcalc.render.sheet import Column, Row, Sheet, rows_of
from actcalc.render.units import digits


def list_sheets(found: Mapping[Any, Sequence[Preset]]) -> list[Sheet]:
    """One sheet per kind of preset: name and title; of devices their figures."""
    columns = (
        Column("name", "name", align="left"),
        Column("title", "what", align="left", wrap=True),
    )
    sheets = [
        _devices(group)
        if kind == "devices"
        else Sheet(
            title=f"{kind} ({len(group)})",
            columns=columns,
            rows=rows_of(columns, group),
        )
        for kind, group in found.items()
        if group
    ]
    counts = [f"{len(group)} {kind}" for kind, group in found.items() if group]
    answer = f"{', '.join(counts)}; `actcalc presets show NAME` has every value with its source."
    return [replace(sheets[0], answer=answer), *sheets[1:]] if sheets else sheets


def _devices(group: Sequence[Preset]) -> Sheet:
    """Devices side by side: memory, dense peaks, links."""

    def figure(key: str, title: str, unit: float, rank: int) -> Column:
        return Column(key, title, lambda value: digits(value / unit), rank=rank)

    columns = (
        Column("name", "name", align="left"),
        figure("usable_bytes", "memory\nGiB", 2**30, 0),
        figure("memory_bandwidth_bytes_per_second", "its\nGB/s", 1e9, 1),
        figure("bf16", "bf16\nTFLOP/s", 1e12, 0),
        figure("fp8", "fp8\nTFLOP/s", 1e12, 2),
        figure("intra_node_bandwidth_bytes_per_second", "in node\nGB/s", 1e9, 2),
        figure("inter_node_bandwidth_bytes_per_second", "network\nGB/s", 1e9, 3),
        figure("host_bandwidth_bytes_per_second", "host\nGB/s", 1e9, 4),
        Column("devices_per_node", "per\nnode", rank=5),
        Column("compute_capability", "CUDA", rank=6),
        Column("title", "title", shown=False),
    )
    rows = []
    for preset in group:
        device = device_of(preset)
        peaks = {str(number): flops for number, flops in device.peak_flops.items()}
        given = {**device.model_dump(), **peaks, "usable_bytes": device.usable_bytes}
        rows.append(Row(tuple(given.get(column.key) for column in columns)))
    return Sheet(
        title=f"devices ({len(group)})",
        columns=columns,
        rows=tuple(rows),
        notes=(
            "Memory is what a process can use where the driver's figure is known, else as sold; "
            "peaks are dense; links in one direction.",
        ),
    )


def device_file(preset: Preset) -> str:
    """A device as the YAML file that --device reads, each figure with its source."""
    lines = [
        f"# {preset.name}: a file for --device; its fields: actcalc schema device",
        f"title: {_text(preset.title)}",
    ]
    for key, value in preset.values.items():
        if not isinstance(value, dict):
            lines.append(_entry(key, value, preset.sources[key]))
            continue
        sources = [preset.sources[f"{key}.{inner}"] for inner in value]
        common = max(sources, key=sources.count)
        lines += [f"{key}:", f"  source: {_text(common)}"]
        for (inner, each), source in zip(value.items(), sources, strict=True):
            lines.append("  " + _entry(inner, each, "" if source == common else source))
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, source: str) -> str:
    plain = _decimal(value) if isinstance(value, float) else str(value)
    return f"{key}: {{value: {plain}, source: {_text(source)}}}" if source else f"{key}: {plain}"


def _decimal(value: float) -> str:
    """``3.35e+12``: as short as it reads back to the same number, with the dot that YAML needs."""
    mantissa, _, exponent = f"{Decimal(repr(value)).normalize():e}".partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}e{exponent}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
    sources = len({source for source in preset.sources.values() if source})
    many = "1 source" if sources == 1 else f"{sources} sources"
    return [
        Sheet(title="", columns=columns, rows=rows, answer=f"{title}: {len(rows)} values, {many}.")
    ]


def _flat(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
