"""An accelerator as a framework sees it: memory, peaks, and the links around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from actcalc.errors import SpecError
from actcalc.specs.base import Bounds, Spec

Number = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""A number format of matrix multiplication."""

Memory = Annotated[int, Bounds(1, 2**50)]
"""Bytes of device memory."""

Speed = Annotated[float, Bounds(1.0, 1e18)]
"""Bytes per second."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Device(Spec):
    """One accelerator: what one rank of a training job runs on.

    A figure that no source gives is None, never a guess.
    """

    name: str
    """What --device calls it: a preset's name, or that of its file."""
    title: str
    """One line for people."""
    memory_nominal_bytes: Memory
    """Memory as sold, in bytes; a data sheet's "GB" of device memory is read as 2^30 bytes."""
    memory_bytes: int | None = None
    """Memory a process can allocate in all, in bytes, as driver or framework report it."""
    peak_flops: dict[Number, float] = field(default_factory=dict)
    """Number format -> peak FLOP/s of dense matrix multiplication (no sparsity)."""
    memory_bandwidth_bytes_per_second: Speed
    """Peak bandwidth of the device memory, in bytes per second."""
    intra_node_bandwidth_bytes_per_second: float | None = None
    """Peak bandwidth from one device to the others of its node, one direction, bytes per second."""
    inter_node_bandwidth_bytes_per_second: float | None = None
    """Network bandwidth per device of the usual machine, one direction, in bytes per second."""
    devices_per_node: int | None = None
    """Devices joined by the fast links (a server, an NVLink rack, a TPU pod)."""
    host_bandwidth_bytes_per_second: float | None = None
    """Raw rate of the link to host memory (PCIe, C2C), one direction, in bytes per second.

    What the link signals; copies get 75 to 85 % of it (see the next field and its sources).
    """
    host_copy_bandwidth_bytes_per_second: float | None = None
    """Measured rate of large copies to or from pinned host memory, one direction, bytes per second.

    Of one device at a time: devices that share a link to their host share this rate too.
    """
    context_bytes: int | None = None
    """Memory the runtime's context takes before the first tensor, in bytes."""
    compute_capability: int | None = None
    """Major CUDA compute capability; None for devices of other makers."""
    efficiency: str | None = None
    """What is reached of its peaks: a preset of shares (presets/efficiency) or a YAML file of them,
    as `actcalc calibrate` writes; None: what is assumed of any device."""

    def _check(self) -> None:
        known = get_args(Number)
        for number, flops in self.peak_flops.items():
            if number not in known:
                raise SpecError(
                    f"device {self.name}: peak_flops of {number!r}",
                    f"use one of {', '.join(known)}",
                )
            if not flops > 0:
                raise SpecError(
                    f"device {self.name}: peak_flops of {number} is {flops}", "give FLOP/s above 0"
                )
        for key in (
            "memory_bytes",
            "intra_node_bandwidth_bytes_per_second",
            "inter_node_bandwidth_bytes_per_second",
            "devices_per_node",
            "host_bandwidth_bytes_per_second",
            "host_copy_bandwidth_bytes_per_second",
            "context_bytes",
        ):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise SpecError(
                    f"device {self.name}: {key} is {value}", "give a value above 0, or leave it out"
                )

    @property
    def usable_bytes(self) -> int:
        """Memory to plan with: what the framework reports, else the nominal size."""
        return self.memory_nominal_bytes if self.memory_bytes is None else self.memory_bytes

    def budget_bytes(self, headroom_ratio: float) -> int:
        """Usable memory less a share of it that stays free, in bytes (rounded down)."""
        return int(self.usable_bytes * (1 - headroom_ratio))

    @property
    def host_copy_rate(self) -> float | None:
        """Bytes per second of copies to or from host memory, one direction; None if not known.

        Where no measurement is at hand it is 0.8 of the link's raw rate, as measured on A100 and
        H100 (25.13 of 32 GB/s and 52.77 of 64 GB/s).
        """
        if self.host_copy_bandwidth_bytes_per_second is not None:
            return self.host_copy_bandwidth_bytes_per_second
        raw = self.host_bandwidth_bytes_per_second
        return None if raw is None else 0.8 * raw

    def peak(self, number: Number) -> float:
        """Peak dense FLOP/s in a number format; ``SpecError`` if the device has none."""
        if number not in self.peak_flops:
            raise SpecError(
                f"{self.title} has no known peak in {number}",
                "use one of " + ", ".join(self.peak_flops),
            )
        return self.peak_flops[number]
