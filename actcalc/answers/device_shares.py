"""What a GPU reaches of its peaks, measured: shares for --efficiency and for a device's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from actcalc.cost.rates import FORMATS, Shares, shares_of
from actcalc.errors import SpecError
from actcalc.measure.cuda import require_gpu
from actcalc.measure.run import first_line
from actcalc.measure.speed import (
    LARGE,
    Kind,
    Sample,
    Sizes,
    attention,
    collectives,
    copies,
    fitting,
    products,
    products_fp8,
    settle,
    sustained_product,
)
from actcalc.specs.device import Device
from actcalc.specs.result import Result

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Number formats that products and attention are measured in, and torch's names of them."""
_NO_GPU = (
    "run it where the GPU is; shares of published measurements are built in, and "
    "`actcalc mfu --calibrate FILE` fits them to measured step times"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredShare:
    """One share, measured beside the one that is built in or assumed."""

    share: str
    """Its name, as --efficiency takes it."""
    value: float
    """Measured."""
    before: float
    """What is built in for the device, or assumed of any."""
    how: str
    """The sample that gave it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DeviceShares(Result):
    """What one GPU reaches of its peaks."""

    schema_name: ClassVar[str] = "actcalc/calibrate/1"

    device: dict[str, Any]
    """The device's fields: its peaks are what the shares are of."""
    gpu: str
    """What the driver calls it."""
    gpus: int
    """How many took part in collectives."""
    precision: str
    """Number format of products and attention."""
    shares: tuple[MeasuredShare, ...]
    """The shares that were measured."""
    samples: tuple[Sample, ...]
    """Every timing behind them."""
    notes: tuple[str, ...]
    """What else to know."""


def gpu_name() -> str:
    """What the driver calls the first GPU.

    Raises ``MissingExtraError`` without PyTorch, and ``SpecError`` without a GPU.
    """
    name: str = require_gpu(_NO_GPU).cuda.get_device_name(0)
    return name


def measure_gpu(device: Device, precision: str, gpus: int | None = None) -> DeviceShares:
    """Measure this machine's GPU, or its first ``gpus``, against the peaks of ``device``.

    Raises ``MissingExtraError`` without PyTorch, and ``SpecError`` without as many GPUs, or for a
    GPU that is faster than ``device``.
    """
    torch = require_gpu(_NO_GPU)
    present = torch.cuda.device_count()
    wanted = present if gpus is None else gpus
    if not 1 <= wanted <= present:
        raise SpecError(f"--gpus {wanted}: this machine has {present}", f"use 1 to {present}")
    memory = torch.cuda.mem_get_info(0)[0]
    if not fitting(LARGE, memory).products:
        raise SpecError(
            f"the GPU has {memory / 2**30:.1f} GiB free, too little to measure it",
            "end what else runs on it (nvidia-smi)",
        )
    return measured(
        torch,
        "cuda",
        device,
        precision,
        fitting(LARGE, memory),
        ranks=wanted,
        gpu=torch.cuda.get_device_name(0),
        fp8="fp8" in device.peak_flops and torch.cuda.get_device_capability(0) >= (8, 9),
    )


def measured(
    torch: Any,
    where: str,
    device: Device,
    precision: str,
    sizes: Sizes,
    *,
    ranks: int,
    gpu: str,
    fp8: bool,
) -> DeviceShares:
    """Time what ``sizes`` lists on ``where``, a device of ``torch``, and fit shares to it."""
    dtype = getattr(torch, PRECISIONS[precision])
    left_out: list[str] = []

    def tried(what: str, part: Callable[[], Sequence[Sample]]) -> Sequence[Sample]:
        """What a part measured; nothing, and why, where this GPU or its PyTorch cannot run it."""
        try:
            return part()
        except Exception as error:  # drivers and libraries raise many kinds
            left_out.append(f"{what} could not be measured here: {first_line(error)}")
            return ()

    settle(torch, where, dtype, sizes)
    samples = list(products(torch, where, dtype, sizes))
    best = max(samples, key=lambda sample: sample.rate)
    m, n, k = best.shape
    samples.append(sustained_product(torch, where, dtype, (m, n, k), sizes))
    if fp8:
        samples += tried("Products in fp8", lambda: products_fp8(torch, where, sizes))
    samples += tried("Attention", lambda: attention(torch, where, dtype, sizes))
    samples += copies(torch, where, sizes)
    if ranks > 1:
        samples += tried("Collectives", lambda: collectives(torch, where, ranks, sizes))
    found = fit_shares(samples, device, precision)
    known = shares_of(device)[0]
    return DeviceShares(
        device=device.model_dump(),
        gpu=gpu,
        gpus=ranks,
        precision=precision,
        shares=tuple(
            MeasuredShare(share=name, value=value, before=getattr(known, name), how=how)
            for name, (value, how) in found.items()
        ),
        samples=tuple(samples),
        notes=(*left_out, *_notes(ranks, torch.__version__)),
    )


def fit_shares(
    samples: Sequence[Sample], device: Device, precision: str
) -> dict[str, tuple[float, str]]:
    """Share -> its value and the sample behind it; a share without samples is left out.

    The best of several shapes counts: shares are of kernels that fill the device. Raises
    ``SpecError`` where a sample is faster than the device's peak.
    """
    number = FORMATS[precision][0]
    peaks: dict[Kind, tuple[str, float | None]] = {
        "product": ("gemm", device.peak(number)),
        "product_fp8": ("gemm_fp8", device.peak_flops.get("fp8")),
        "attention_forward": ("attention_forward", device.peak(number)),
        "attention_backward": ("attention_backward", device.peak(number)),
        "copy": ("memory", device.memory_bandwidth_bytes_per_second),
        "all_gather": ("communication", device.intra_node_bandwidth_bytes_per_second),
    }
    best: dict[Kind, Sample] = {}
    for sample in samples:
        if sample.kind not in best or sample.rate > best[sample.kind].rate:
            best[sample.kind] = sample
    found = {
        name: _share(best[kind], peak, device)
        for kind, (name, peak) in peaks.items()
        if kind in best and peak is not None
    }
    for name, part, whole in (
        ("sustained_clock", "product_sustained", "product"),
        ("all_reduce", "all_reduce", "all_gather"),
    ):
        if part in best and whole in best:
            ratio = best[part].rate / best[whole].rate
            share = ratio if name == "all_reduce" else min(1.0, ratio)
            found[name] = (share, f"{_shown(best[part])} over {_shown(best[whole])}")
    order = [field.name for field in fields(Shares)]
    return {name: found[name] for name in sorted(found, key=order.index)}


_SLACK = 1.05
"""A GPU may clock a little higher than the vendor's peak assumes."""


def _share(sample: Sample, peak: float, device: Device) -> tuple[float, str]:
    if sample.rate > _SLACK * peak:
        raise SpecError(
            f"{_shown(sample)} is more than the peak of {device.name}, {peak / 1e12:.4g} T",
            "name this GPU's own --device, or a file with its peaks",
        )
    return min(1.0, sample.rate / peak), f"{_shown(sample)} of {peak / 1e12:.4g} T"


def _shown(sample: Sample) -> str:
    shape = "x".join(map(str, sample.shape))
    return f"{sample.kind} {shape} at {sample.rate / 1e12:.4g} T/s"


def _notes(ranks: int, version: str) -> tuple[str, ...]:
    links = (
        "One GPU: nothing was sent, so shares of links stay as they are."
        if ranks == 1
        else f"Links are those between {ranks} GPUs of this machine; the network is not measured."
    )
    return (
        links,
        f"Attention is PyTorch's own ({version}); kernels of the vendor's libraries, launches and "
        "latencies stay as they are.",
    )


def shares_file(result: DeviceShares) -> str:
    """The shares as the YAML file that --efficiency and a device's file read."""

    def quote(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    about = f"actcalc calibrate on {result.gpu}, {result.precision}"
    lines = [f"title: {quote(f'measured on {result.gpu}')}"]
    for share in result.shares:
        lines.append(
            f"{share.share}: {{value: {share.value:.4g}, source: {quote(f'{about}: {share.how}')}}}"
        )
    return "\n".join(lines) + "\n"
