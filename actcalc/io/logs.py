"""Logs of real runs: what they say of memory, time and parameters, figure by figure.

Read are Megatron-LM's lines (``training/training.py``, ``report_memory``), torchtitan's
(``components/metrics.py``), the Trainer's (``trainer_state.json``, its printed dictionaries),
DeepSpeed's (``utils/timer.py``, ``see_memory_usage``), messages of PyTorch's allocator, and
``nvidia-smi``. Nothing is loaded but text and JSON: snapshots of memory are pickles, which run
code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from actcalc.errors import SpecError
from actcalc.io.yamlfile import parse_json, read_text

MAX_BYTES = 64_000_000
Quantity = Literal[
    "parameters", "resident", "peak_allocated", "peak_reserved", "device_used", "needed",
    "step_seconds", "tokens_per_second_per_gpu", "samples_per_second", "steps_per_second",
    "flops_per_second_per_gpu",
]  # fmt: skip
"""What a log measures; bytes, seconds, counts, or rates of them."""
_MIB, _GIB = 2**20, 2**30
_WARM = 2
"""First iterations, which compile and allocate, are left out of times where more follow."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure of a log."""

    quantity: Quantity
    value: float
    """In bytes, seconds, counts, or a rate of them."""
    rank: int | None = None
    """The rank that printed it, where that is said."""
    line: str = ""
    """What it was read from, shortened."""


@dataclass(frozen=True)
class Log:
    """What a log is, and what it measures."""

    kind: str
    figures: tuple[Measured, ...]
    global_batch: int | None = None
    """Sequences of a step, where the log says so."""


Taken = list[tuple[Quantity, float, int | None, str]]
_NUMBER = r"([\d,]+(?:\.\d+)?(?:[eE][+-]?\d+)?)"


def read_log(name: str) -> Log:
    """What the file called ``name`` measures; ``SpecError`` where that is nothing.

    Of a figure that is printed at every step the median is taken, of peaks the greatest.
    """
    path = Path(name)
    if path.suffix in (".pickle", ".pkl", ".pt"):
        raise snapshot_refused(name)
    text = read_text(path, MAX_BYTES)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    if path.suffix == ".json":
        return _trainer_state(parse_json(text, name), name)
    kinds: list[str] = []
    taken: Taken = []
    for kind, reader in _READERS.items():
        found = reader(text)
        if found:
            kinds.append(kind)
            taken += found
    if not taken:
        raise SpecError(
            f"{name} says nothing of memory, time or parameters that is known",
            "read are logs of Megatron-LM, torchtitan, DeepSpeed and the Trainer, "
            "trainer_state.json, messages of CUDA out of memory, and nvidia-smi",
        )
    batch = re.findall(r"global batch size: +(\d+)", text)
    return Log(" and ".join(kinds), _settled(taken), int(batch[-1]) if batch else None)


def snapshot_refused(name: str) -> SpecError:
    """Why a snapshot of PyTorch's allocator is not read, and what is instead."""
    return SpecError(
        f"{name} is a pickle, which runs code when it is loaded: it is not read",
        'write JSON where you trust it: python -c "import json, pickle, sys; '
        "json.dump(pickle.load(open(sys.argv[1], 'rb')), open('snapshot.json', 'w'), default=str)\""
        " FILE, or give --log with torch.cuda.memory_stats() printed",
    )


def _settled(taken: Taken) -> tuple[Measured, ...]:
    """One figure for each quantity and rank: the greatest of bytes, the median of times."""
    groups: dict[tuple[Quantity, int | None], list[tuple[float, str]]] = {}
    for quantity, value, rank, line in taken:
        groups.setdefault((quantity, rank), []).append((value, line))
    result: list[Measured] = []
    for (quantity, rank), found in groups.items():
        values = [value for value, _ in found]
        rate = "second" in quantity
        steady = values[_WARM:] if rate and len(values) > 2 * _WARM else values
        value = median(steady) if rate else max(values)
        line = " ".join(found[-1][1].split())[:120]
        result.append(Measured(quantity=quantity, value=value, rank=rank, line=line))
    return tuple(result)


def _real(text: str) -> float:
    return float(text.replace(",", ""))


def _lines(text: str, pattern: str) -> list[tuple[re.Match[str], str]]:
    """Matches of a pattern with the line each is on; lines are at most 4096 characters."""
    compiled = re.compile(pattern)
    found: list[tuple[re.Match[str], str]] = []
    for line in text.splitlines():
        if (match := compiled.search(line[:4096])) is not None:
            found.append((match, line.strip()))
    return found


def _megatron(text: str) -> Taken:
    taken: Taken = []
    memory = rf"\[Rank (\d+)\].*memory \(MB\) \| allocated: {_NUMBER} \| max allocated: {_NUMBER}"
    for match, line in _lines(
        text, memory + rf" \| reserved: {_NUMBER} \| max reserved: {_NUMBER}"
    ):
        rank = int(match[1])
        taken.append(("resident", _real(match[2]) * _MIB, rank, line))
        taken.append(("peak_allocated", _real(match[3]) * _MIB, rank, line))
        taken.append(("peak_reserved", _real(match[5]) * _MIB, rank, line))
    for match, line in _lines(text, rf"elapsed time per iteration \(ms\): {_NUMBER}"):
        taken.append(("step_seconds", _real(match[1]) / 1e3, None, line))
    for match, line in _lines(text, rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}"):
        taken.append(("flops_per_second_per_gpu", _real(match[1]) * 1e12, None, line))
    ranks = r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d+), (\d+)\)"
    for match, line in _lines(text, ranks + rf": {_NUMBER}"):
        if match[1] == "0":  # by pipeline stage: negative, so that no rank is meant
            taken.append(("parameters", _real(match[3]), -1 - int(match[2]), line))
    return taken


def _torchtitan(text: str) -> Taken:
    taken: Taken = []
    step = rf"step: +\d+ .*memory: +{_NUMBER}GiB.*(?:tps|wps): {_NUMBER}"
    for match, line in _lines(text, step):
        if "validate" in line:
            continue
        taken.append(("peak_reserved", _real(match[1]) * _GIB, None, line))
        taken.append(("tokens_per_second_per_gpu", _real(match[2]), None, line))
        if tflops := re.search(rf"tflops: {_NUMBER}", line):
            taken.append(("flops_per_second_per_gpu", _real(tflops[1]) * 1e12, None, line))
    for match, line in _lines(text, rf"size: {_NUMBER} total parameters"):
        taken.append(("parameters", _real(match[1]), None, line))
    return taken


def _deepspeed(text: str) -> Taken:
    taken: Taken = []
    for match, line in _lines(text, rf"CurrSamplesPerSec={_NUMBER}"):
        taken.append(("samples_per_second", _real(match[1]), None, line))
    for match, line in _lines(text, rf"MaxMemAllocated={_NUMBER}GB"):
        taken.append(("peak_allocated", _real(match[1]) * _GIB, None, line))
    seen = rf"\bMA {_NUMBER} GB\s+Max_MA {_NUMBER} GB\s+CA {_NUMBER} GB\s+Max_CA {_NUMBER} GB"
    for match, line in _lines(text, seen):
        taken.append(("resident", _real(match[1]) * _GIB, None, line))
        taken.append(("peak_allocated", _real(match[2]) * _GIB, None, line))
        taken.append(("peak_reserved", _real(match[4]) * _GIB, None, line))
    return taken


_UNITS = {"MiB": _MIB, "GiB": _GIB, "KiB": 2**10, "bytes": 1, "MB": 10**6, "GB": 10**9}
_SIZE = rf"{_NUMBER} (MiB|GiB|KiB|bytes)"


def _out_of_memory(text: str) -> Taken:
    """Messages of ``c10/cuda/CUDACachingAllocator.cpp``, today's and those before 2.1."""
    taken: Taken = []
    for match, line in _lines(text, rf"out of memory\. Tried to allocate {_SIZE}"):
        asked = _real(match[1]) * _UNITS[match[2]]
        rank = re.search(r"^\s*\[?(?:default|rank)?(\d+)\]?:", line)
        number = int(rank[1]) if rank else None
        allocated = re.search(rf"{_SIZE} is allocated by PyTorch", line) or re.search(
            rf"{_SIZE} already allocated", line
        )
        spare = re.search(rf"{_SIZE} is reserved by PyTorch but unallocated", line)
        whole = re.search(rf"{_SIZE} reserved in total", line)
        used = re.search(rf"has {_SIZE} memory in use", line)
        if allocated:
            held = _real(allocated[1]) * _UNITS[allocated[2]]
            taken.append(("needed", held + asked, number, line))
            if spare:
                reserved = held + _real(spare[1]) * _UNITS[spare[2]]
                taken.append(("peak_reserved", reserved, number, line))
        if whole:
            taken.append(("peak_reserved", _real(whole[1]) * _UNITS[whole[2]], number, line))
        if used:
            taken.append(("device_used", _real(used[1]) * _UNITS[used[2]], number, line))
    return taken


def _nvidia_smi(text: str) -> Taken:
    return [
        ("device_used", _real(match[1]) * _MIB, None, line)
        for match, line in _lines(text, rf"{_NUMBER}MiB */ *{_NUMBER}MiB")
    ]


def _printed_dictionaries(text: str) -> Taken:
    """What the Trainer prints: ``{'train_runtime': ..., 'train_samples_per_second': ...}``."""
    taken: Taken = []
    for match, line in _lines(text, r"\{'[a-z_]+': .*\}"):
        pairs = re.findall(rf"'([a-z_]+)': '?{_NUMBER}", match[0][:4096])
        taken += _trainer({name: _real(value) for name, value in pairs}, line)
    for match, line in _lines(text, rf"^\s*(train_[a-z_]+)\s*=\s*{_NUMBER}\s*$"):
        taken += _trainer({match[1]: _real(match[2])}, line)
    return taken


def _trainer(values: Mapping[str, float], line: str) -> Taken:
    names: dict[str, Quantity] = {
        "train_samples_per_second": "samples_per_second",
        "train_steps_per_second": "steps_per_second",
    }
    return [(names[name], value, None, line) for name, value in values.items() if name in names]


_READERS: Mapping[str, Callable[[str], Taken]] = {
    "a log of Megatron-LM": _megatron,
    "a log of torchtitan": _torchtitan,
    "a log of DeepSpeed": _deepspeed,
    "a log of the Trainer": _printed_dictionaries,
    "a message of PyTorch's allocator": _out_of_memory,
    "nvidia-smi": _nvidia_smi,
}


def _trainer_state(data: Any, name: str) -> Log:
    """trainer_state.json, all_results.json, or torch.cuda.memory_stats() as JSON."""
    taken: Taken = []
    if isinstance(data, dict):
        history: Sequence[Any] = data.get("log_history") or [data]
        for entry in history:
            if isinstance(entry, dict):
                numbers = {
                    key: float(value)
                    for key, value in entry.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
                taken += _trainer(numbers, json.dumps(entry)[:120])
        for key, quantity in _STATS.items():
            if isinstance(data.get(key), int | float):
                taken.append((quantity, float(data[key]), None, key))
    if not taken:
        raise SpecError(
            f"{name} says nothing of memory or time",
            "trainer_state.json ends with train_samples_per_second once training has ended; "
            "torch.cuda.memory_stats() as JSON is read too",
        )
    return Log("the Trainer's state" if "log_history" in data else "JSON", _settled(taken))


_STATS: Mapping[str, Quantity] = {
    "allocated_bytes.all.peak": "peak_allocated",
    "reserved_bytes.all.peak": "peak_reserved",
    "allocated_bytes.all.current": "resident",
    "max_memory_allocated": "peak_allocated",
    "max_memory_reserved": "peak_reserved",
}
"""Keys of ``torch.cuda.memory_stats()`` and of what people write of it."""
