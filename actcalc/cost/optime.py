"""Seconds of one op, and of a product with a collective beside it."""

from __future__ import annotations

from dataclasses import dataclass

from actcalc.layers.core.algebra import least, most


@dataclass(frozen=True)
class OpTime:
    """One op on one rank for one micro-batch, in seconds; communication is what is exposed."""

    name: str
    kind: str
    group: str
    forward: float
    forward_comm: float
    input_gradient: float
    weight_gradient: float
    backward_comm: float
    backward_hidden: float
    """Seconds of collectives in backward that run beside a product."""
    backward_slowed: float = 0.0
    """Of ``input_gradient`` and ``weight_gradient``: what those collectives lengthen them by."""
    kernels: float = 1
    """Kernels of its forward."""
    backward_kernels: float = 1
    """Kernels of its backward."""

    @property
    def forward_seconds(self) -> float:
        """Forward with its exposed collectives."""
        return self.forward + self.forward_comm

    @property
    def backward_seconds(self) -> float:
        """Backward with its exposed collectives."""
        return self.input_gradient + self.weight_gradient + self.backward_comm

    @property
    def backward_compute(self) -> float:
        """Backward as it would be without collectives."""
        return self.input_gradient + self.weight_gradient - self.backward_slowed


def beside(compute: float, hidden: float, share: float) -> float:
    """Seconds of a product with a collective beside it that takes ``share`` of the device.

    All of it (1): they run one after the other.
    """
    together = least(hidden, compute / (1 - share)) if share < 1 else hidden
    exposed: float = most(hidden, compute + share * together)
    return exposed
