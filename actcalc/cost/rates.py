"""How fast one device really is: sustained rates from peaks, shares of them, and their sources.

Peaks come from the device preset, the shares of them that are reached from
``presets/efficiency``: one file per family of devices, and ``default.yaml`` for what no source
gives. No share belongs to a model or a run: one set serves every prediction on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError, shorten
from actcalc.io.presets import built_in, presets_root, suggestion
from actcalc.io.yamlfile import read_mapping
from actcalc.specs.device import Device, Number

_NO_SHARE: Mapping[str, bool] = {"may exceed 1": True}


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What is reached of a device's peaks. Each field is a share of a peak unless it says else.

    One field is one row: its default and the source of that are the entry of the same name in
    ``presets/efficiency/default.yaml``.
    """

    gemm: float
    """Of the peak FLOP/s: matrix products that fill the device, at boost clock."""
    gemm_fp8: float
    """The same in fp8, of its own peak."""
    unaligned: float
    """Speed of a matrix product with operands whose rows do not start at multiples of 16 bytes,
    over that of an aligned one."""
    sustained_clock: float
    """Clock under steady full load over boost clock; scales everything that computes."""
    attention_forward: float
    """Of the peak FLOP/s: fused attention, forward, counting the products it really does."""
    attention_backward: float
    """The same for its backward."""
    vendor_attention_forward: float
    """The same for the vendor's own kernels (cuDNN, which Transformer Engine runs), forward."""
    vendor_attention_backward: float
    """The same for their backward."""
    attention_generation_forward: float
    """Speed of the fused attention kernel that runs over FlashAttention-2's, forward (1: itself;
    the vendor's kernels are not affected)."""
    attention_generation_backward: float
    """The same for its backward."""
    slowest_device: float
    """Speed of the slowest of several devices over the typical one's: all wait for it."""
    memory: float
    """Of the memory bandwidth: element-wise, reduction and copy kernels on large tensors."""
    communication: float
    """Of the links inside a node: the bus bandwidth of large collectives."""
    all_reduce: float = field(metadata=_NO_SHARE)
    """Bus bandwidth of an all-reduce inside a node over that of other collectives: above 1 where
    switches add up (NVLink SHARP)."""
    network: float
    """Of the network between nodes: the bus bandwidth of large collectives."""
    communication_multiprocessors: float
    """Share of the multiprocessors that a running collective occupies (its channels)."""
    multiprocessors: int = field(metadata=_NO_SHARE)
    """Units that work on one output tile of a matrix product each; 0 if tiles are not the unit."""
    kernel_seconds: float = field(metadata=_NO_SHARE)
    """Seconds between the end of one kernel and the start of the next."""
    launch_seconds: float = field(metadata=_NO_SHARE)
    """Seconds of the host to launch one kernel from compiled code."""
    host_pace: float = field(metadata=_NO_SHARE)
    """Seconds that the machine's host needs over those of an H100 server's x86 host."""
    collective_seconds: float = field(metadata=_NO_SHARE)
    """Seconds of a collective before its first step."""
    hop_seconds: float = field(metadata=_NO_SHARE)
    """Seconds of one step of a ring between devices of a node."""
    network_hop_seconds: float = field(metadata=_NO_SHARE)
    """Seconds of one step of a ring between nodes; a tree's take twice that."""


SHARE_FIELDS = {field.name: field for field in fields(Shares)}


@dataclass(frozen=True, eq=False)
class Rates:
    """Sustained rates of one device for one number format, in FLOP/s, bytes/s and seconds."""

    peak: float
    """Peak FLOP/s of the number format that matrix products with weights run in."""
    matrix: float
    """FLOP/s of matrix products that fill the device."""
    core_matrix: float
    """The same in the activations' number format (attention's products under fp8)."""
    attention_forward: float
    """FLOP/s of fused attention, forward."""
    attention_backward: float
    """The same for its backward."""
    vendor_attention_forward: float
    """FLOP/s of the vendor's fused attention, forward."""
    vendor_attention_backward: float
    """The same for its backward."""
    memory: float
    """Bytes per second of device memory."""
    intra: float
    """Bytes per second of bus bandwidth inside a node."""
    inter: float
    """Bytes per second of bus bandwidth between nodes, per device."""
    host: float
    """Bytes per second to and from host memory."""
    node: int
    """Devices in a node."""
    shares: Shares = field(repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)


_ELEMENTS: Mapping[str, Number] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "amp-bf16": "bf16",
    "amp-fp16": "fp16",
    "fp32": "fp32",
}
FORMATS: Mapping[str, tuple[Number, Number]] = {
    **{precision: (element, element) for precision, element in _ELEMENTS.items()},
    **{f"{precision}+fp8": ("fp8", element) for precision, element in _ELEMENTS.items()},
    "fp8": ("fp8", "bf16"),
}
"""``Workload.arithmetic`` -> number formats of products with weights, and of attention's."""


def peak_flops(device: Device, precision: str) -> float:
    """Peak dense FLOP/s that utilisation is measured against; ``SpecError`` if not known."""
    return device.peak(FORMATS[precision][0])


def shares_of(device: Device) -> tuple[Shares, Mapping[str, str]]:
    """The device's shares and the source of each; what no source gives is the default's."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, value, origin in (*_entries("default"), *_own(device)):
        values[key], sources[key] = value, origin
    values["multiprocessors"] = int(values["multiprocessors"])
    return Shares(**values), sources


def _own(device: Device) -> tuple[tuple[str, Any, str], ...]:
    """The shares that its own preset or file gives, each with its source."""
    if device.efficiency is None:
        return ()
    if device.efficiency in efficiency_presets():
        return _entries(device.efficiency)
    shares = _named(device.efficiency, f"device {device.name}: efficiency ")
    return tuple((key, value, device.efficiency) for key, value in shares.items())


_TELLING = {
    "gemm": "matrix products",
    "attention_forward": "fused attention",
    "communication": "links",
}


def default_note(device: Device, overrides: Mapping[str, float] | None = None) -> str:
    """Which of the device's shares are only assumed, in one sentence; empty if none is."""
    own = {key for key, _, _ in _own(device)} | set(overrides or ())
    missing = [words for key, words in _TELLING.items() if key not in own]
    if not missing:
        return ""
    return (
        f"No measurement of {device.name} is at hand for {', '.join(missing)}: default shares of "
        "its peaks (presets/efficiency/default.yaml; --efficiency overrides them)."
    )


@cache
def _entries(name: str) -> tuple[tuple[str, Any, str], ...]:
    return entries_of(built_in("efficiency", name), name)


def entries_of(shares: Mapping[str, Any], name: str) -> tuple[tuple[str, Any, str], ...]:
    """Name, value and source of each of the ``shares`` in the file ``name``.

    Raises ``SpecError`` for one that is not known.
    """
    return tuple(
        (_known(f"{name}: {key}", key), entry["value"], str(entry["source"]))
        for key, entry in shares.items()
        if key != "title"
    )


def parse_overrides(texts: Iterable[str]) -> dict[str, float]:
    """Shares to replace: ``gemm=0.8``, the name of an efficiency preset, or a YAML file of shares.

    Later texts override earlier ones. A file maps names of :class:`Shares` to numbers, or to
    ``{value: ..., source: ...}``. Raises ``SpecError`` for an unknown name or a bad value.
    """
    result: dict[str, float] = {}
    for text in texts:
        for part in text.split(","):
            key, equals, number = part.strip().partition("=")
            if equals:
                result |= _override(f"--efficiency {shorten(part)}", key, number)
            else:
                result |= _named(key)
    return result


def efficiency_presets() -> tuple[str, ...]:
    """Names of the files of shares under ``presets/efficiency``."""
    folder = presets_root() / "efficiency"
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def _named(text: str, what: str = "--efficiency ") -> dict[str, float]:
    names = efficiency_presets()
    if text in names:
        return {key: float(value) for key, value, _ in _entries(text)}
    path = Path(text)
    if path.suffix not in (".yaml", ".yml", ".json"):
        hint = (
            suggestion(text, (*names, *SHARE_FIELDS))
            or (
                "write gemm=0.8 (known: "
                + ", ".join(SHARE_FIELDS)
                + "), one of "
                + ", ".join(names)
            )
            + ", or a YAML file of such shares"
        )
        raise SpecError(f"{what}{shorten(text)}: no such efficiency", hint)
    result: dict[str, float] = {}
    for key, entry in read_mapping(path).items():
        value = entry.get("value") if isinstance(entry, dict) else entry
        if key != "title":
            result |= _override(f"{text}: {key}", str(key), str(value))
    return result


def _known(what: str, key: str) -> str:
    """``key``, if it names a share; ``SpecError`` with a did-you-mean for one that does not."""
    if key not in SHARE_FIELDS:
        hint = suggestion(key, tuple(SHARE_FIELDS)) or "known: " + ", ".join(SHARE_FIELDS)
        raise SpecError(f"{what}: no such efficiency", hint)
    return key


def _override(what: str, key: str, number: str) -> dict[str, float]:
    key = _known(what, key.strip().replace("-", "_"))
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    share = not SHARE_FIELDS[key].metadata
    least, most = (1e-6, 1.0) if share else (1e-12, 1e6)
    if not least <= value <= most:
        wrong = "is no share" if share else "is not above 0" if value <= 0 else "is out of range"
        hint = "give a number above 0" + (" and up to 1" if share else f" and up to {most:g}")
        raise SpecError(f"{what}: {shorten(number, 40)} {wrong}", hint)
    return {key: value}


def rates_of(
    device: Device,
    precision: str,
    overrides: Mapping[str, float] | None = None,
    *,
    devices: int = 1,
) -> Rates:
    """Sustained rates of ``device`` at ``precision``; ``overrides`` replace single shares.

    Of several ``devices`` in one job every step waits for the slowest, so its speed is taken.
    Raises ``SpecError`` where the device has no known peak for the precision.
    """
    shares, sources = shares_of(device)
    if overrides:
        changed: dict[str, Any] = dict(overrides)
        if "multiprocessors" in changed:
            changed["multiprocessors"] = max(1, int(changed["multiprocessors"]))
        shares = replace(shares, **changed)
        sources = {**sources, **dict.fromkeys(overrides, "given on the command line")}
    peak = peak_flops(device, precision)
    core = device.peak(FORMATS[precision][1])
    intra = device.intra_node_bandwidth_bytes_per_second
    inter = device.inter_node_bandwidth_bytes_per_second
    host = device.host_bandwidth_bytes_per_second or 16e9
    node = device.devices_per_node or 1
    pace = shares.slowest_device if devices > 1 else 1.0
    filled = shares.gemm_fp8 if FORMATS[precision][0] == "fp8" else shares.gemm
    return Rates(
        peak=peak,
        matrix=peak * filled * shares.sustained_clock * pace,
        core_matrix=core * shares.gemm * shares.sustained_clock * pace,
        attention_forward=core
        * shares.attention_forward
        * shares.attention_generation_forward
        * pace,
        attention_backward=core
        * shares.attention_backward
        * shares.attention_generation_backward
        * pace,
        vendor_attention_forward=core * shares.vendor_attention_forward * pace,
        vendor_attention_backward=core * shares.vendor_attention_backward * pace,
        memory=device.memory_bandwidth_bytes_per_second * shares.memory,
        intra=(intra or host) * shares.communication,
        inter=(inter or min(intra or host, host)) * shares.network,
        host=device.host_copy_rate or host,
        node=node,
        shares=shares,
        sources=sources,
    )
