"""What norms and rotations move where they run op by op: bytes and kernels of an element.

Counted in the code that each kernel names (specs/kinds.py), run in bf16 under a
``TorchDispatchMode`` that adds up inputs and outputs of ATen ops other than views, forward and
backward: fp32 copies, squares, means and products are each written and read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Chain(NamedTuple):
    """Of one element in 16 bits."""

    forward: float
    """Bytes that its forward reads and writes."""
    kernels: int
    """Kernels of it."""
    backward: float
    """Bytes of its backward."""
    backward_kernels: int
    weight: float = 0.0
    """Of these: bytes for the gradient of its weight."""
    weight_kernels: int = 0


_HALF = Chain(20.0, 5, 28.0, 7)
_HALF_FP32 = Chain(36.0, 6, 54.0, 10)
_COMPLEX = Chain(20.0, 3, 20.0, 4)

CHAINS: Mapping[tuple[str, str], Chain] = {
    ("norm", "rms"): Chain(36.0, 8, 92.0, 16, 8.0, 2),
    ("norm", "rms_late_cast"): Chain(40.0, 8, 104.0, 17, 16.0, 3),
    ("norm", "rms_fp32_weight"): Chain(40.0, 9, 104.0, 18, 16.0, 4),
    ("norm", "rms_gemma"): Chain(40.0, 10, 104.0, 17, 16.0, 3),
    ("norm", "rms_t5"): Chain(34.0, 8, 90.0, 17, 8.0, 2),
    ("rotary", "half"): _HALF,
    ("rotary", "half_layer"): _HALF,
    ("rotary", "half_cat"): _HALF,
    ("rotary", "half_fp32"): _HALF_FP32,
    ("rotary", "half_upcast"): Chain(52.0, 8, 54.0, 10),
    ("rotary", "complex"): _COMPLEX,
    ("rotary", "complex_buffer"): _COMPLEX,
}
"""By kind and kernel of an op; what is not here is one kernel, or moves what it keeps."""
