"""Values of options, read from text."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import cast, get_args

from actcalc.cost.flops import Counting
from actcalc.cost.rates import FORMATS
from actcalc.errors import SpecError
from actcalc.plan.budget import parse_bytes
from actcalc.specs.check import check_sharding
from actcalc.specs.run import Run

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_RATES = {"": 1.0, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def _read(text: str, units: dict[str, float] | dict[str, int], what: str, hint: str) -> float:
    found = _NUMBER.fullmatch(text)
    try:
        value = float(found[1]) * units[found[2].lower()] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not (0 < value < math.inf):
        raise SpecError(f"{what} {text!r} does not read as a value above 0", hint)
    return value


def seconds_of(text: str | None) -> float | None:
    """``1.1``, ``1.1s`` or ``980ms`` in seconds; ``SpecError`` for anything else."""
    if text is None:
        return None
    return _read(text, _SECONDS, "--step-time", "write seconds, e.g. 1.1, or 980ms")


def count_of(text: str | None) -> int | None:
    """``300e9``, ``300B`` or ``15T`` as a whole number; ``SpecError`` for anything else."""
    if text is None:
        return None
    return max(1, round(_read(text, _COUNTS, "--tokens", "write e.g. 300e9, 300B or 15T")))


def flops_of(text: str) -> float:
    """``312TFLOPS``, ``1.98 PFLOP/s`` or ``312e12`` in FLOP/s; ``SpecError`` for anything else."""
    bare = re.sub(r"flops?(/s)?\s*$", "", text.strip(), flags=re.IGNORECASE)
    hint = "write FLOP/s, e.g. 312TFLOPS, 1.98PFLOPS or 312e12"
    flops = _read(bare, _RATES, "--peak", hint)
    if not 1e9 <= flops <= 1e18:
        raise SpecError(f"--peak {text!r} is {flops:g} FLOP/s, which no device has", hint)
    return flops


def counting_of(text: str) -> Counting:
    """How scores are counted; ``SpecError`` for an unknown word."""
    if text not in get_args(Counting):
        raise SpecError(f"--flops {text!r} is no way of counting", "use full or causal")
    return cast(Counting, text)


def replicas(run: Run, gpus: int | None, *, described: bool = False) -> Run:
    """The run with as many replicas as ``gpus`` devices hold, where it asks for none itself.

    ``described``: a layout of one device stands for a replica, too. Raises ``SpecError`` where
    ZeRO's shards do not divide them.
    """
    layout = run.layout
    model_parallel = layout.tp * layout.pp * layout.cp
    if gpus is None or gpus < 1 or layout.dp > 1 or gpus % model_parallel:
        return run
    if model_parallel == 1 and layout.ep == 1 and not layout.zero and not described:
        return run  # no layout was described: utilisation needs none, a prediction would guess
    batch = run.workload.global_batch
    dp = gpus // model_parallel
    if batch is not None and batch % dp:
        return run
    filled = replace(layout, dp=dp)
    check_sharding(filled, run.training)
    return replace(run, layout=filled)


def with_figures(run: Run, memory: str | None, peak: str | None) -> Run:
    """The run on its device with the memory and the dense peak that were given, and a note of each.

    The peak is that of the run's number format. Raises ``SpecError`` where the run has no device,
    or an amount cannot be read.
    """
    device = run.device
    if memory is None and peak is None:
        return run
    if device is None:
        flag = "--peak" if memory is None else "--device-memory"
        raise SpecError(
            f"{flag} is a figure of a device, and there is none", "add --device NAME or FILE"
        )
    notes = []
    if memory is not None:
        size = parse_bytes(memory, "--device-memory")
        device = device.model_copy(update={"memory_bytes": size})
        notes.append(f"Memory of {device.name} is taken as {size:,} bytes (--device-memory).")
    if peak is not None:
        number, flops = FORMATS[run.workload.arithmetic][0], flops_of(peak)
        device = device.model_copy(update={"peak_flops": {**device.peak_flops, number: flops}})
        notes.append(
            f"The dense {number} peak of {device.name} is taken as {flops / 1e12:g} TFLOP/s "
            "(--peak); its peaks in other formats stay."
        )
    return replace(run, device=device, warnings=(*run.warnings, *notes))


def with_headroom(run: Run, text: str | None) -> Run:
    """The run with the share of its device's memory that stays free where it fits.

    Raises ``SpecError`` where it has no device, or the share cannot be read.
    """
    if text is None:
        return run
    if run.device is None:
        raise SpecError(
            f"--headroom {text} is a share of a device's memory, and there is no device",
            "add --device, or drop --headroom",
        )
    return replace(run, headroom_ratio=share_of(text, "--headroom"))


def share_of(text: str, what: str) -> float:
    """``5%`` or ``0.05`` as a share; ``SpecError`` for anything else, and for 0.9 or more."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*", text)
    if not found:
        raise SpecError(f"{what} {text!r} is no share", "write 5% or 0.05; 0 leaves nothing free")
    share = float(found[1]) / (100 if found[2] else 1)
    if not found[2] and share >= 1:
        raise SpecError(f"{what} {text!r} is more than all", f"did you mean {text.strip()}%?")
    if share >= 0.9:
        raise SpecError(f"{what} {text!r} leaves next to nothing to use", "use less than 90%")
    return share
