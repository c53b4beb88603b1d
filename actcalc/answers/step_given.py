"""A step's time as it was measured or is asked for: in seconds, tokens, FLOPs or as a share."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from actcalc.errors import SpecError

_PLAUSIBLE = (1e-9, 1e15)
"""What seconds, rates and shares may be."""
Basis = Literal["measured", "mfu", "hfu", "predicted"]
"""Where a step's time is from: measured, asked for as a share of the peak, or the roofline."""


class Given(NamedTuple):
    """What was said of one step; at most one of these."""

    step_seconds: float | None = None
    """Seconds of one step."""
    tokens_per_second: float | None = None
    """Tokens of all devices in a second."""
    tflops: float | None = None
    """Model TFLOP/s of one device, as Megatron-LM prints them."""
    mfu: float | None = None
    """Model FLOPs over the peak."""
    hfu: float | None = None
    """Hardware FLOPs, re-runs included, over the peak."""

    def check(self) -> None:
        """Refuse numbers that mean nothing, and two that say the same thing twice."""
        flags = {f"--{name.replace('_seconds', '_time').replace('_', '-')}": value
                 for name, value in self._asdict().items()}  # fmt: skip
        for flag, value in flags.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise SpecError(f"{flag} {value:g} is not above 0", f"give {flag} a value above 0")
            low, high = _PLAUSIBLE
            if value is not None and not low <= value <= high:
                raise SpecError(
                    f"{flag} {value:g} is beyond anything real", f"give {low:g} to {high:g}"
                )
        named = [flag for flag, value in flags.items() if value is not None]
        if len(named) > 1:
            raise SpecError(
                f"{named[0]} and {named[1]} contradict", "give one: each follows from the other"
            )
        for flag in ("--mfu", "--hfu"):
            share = flags[flag]
            if share is not None and share > 1:
                raise SpecError(f"{flag} {share:g} is above 1", f"a share, e.g. {flag} 0.4")

    def seconds(self, work: Work) -> tuple[Basis, float] | None:
        """Where the step's time is from, and the time; None where nothing was said."""
        if self.step_seconds is not None:
            return "measured", self.step_seconds
        if self.tokens_per_second is not None:
            return "measured", work.tokens / self.tokens_per_second
        if self.tflops is not None:
            return "measured", work.model_flops / (work.devices * self.tflops * 1e12)
        available = work.devices * work.peak
        if self.mfu is not None:
            return "mfu", work.model_flops / (available * self.mfu)
        if self.hfu is not None:
            return "hfu", work.hardware_flops / (available * self.hfu)
        return None


class Work(NamedTuple):
    """One step's work."""

    tokens: int
    model_flops: int
    hardware_flops: int
    devices: int
    peak: float
    """FLOP/s of one device, dense."""
