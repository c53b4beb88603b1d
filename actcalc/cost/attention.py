"""What a fused attention kernel works on beside the scores that are asked for.

A block of queries costs more than the keys it sees: its operands are fetched before the first
product and its results written after the last, tiles on the diagonal are done whole and masked, and
blocks with few keys end before those with many. All of it grows with the queries alone, so it is
told as so many *further keys* a query, and a kernel reaches its stated rate as sequences grow.

Figures are of kernels by themselves; each asks for so many keys between its shortest and its
longest sequence, and the mean is taken (``tests/cost/test_attention.py`` has all of them):

- unmasked, forward and backward: FlashAttention-2 on B200 (Dao-AILab/flash-attention issue 1589),
  on H100 (pull request 2688) and on RTX A5000 (gpu-mode/ring-attention issue 10), Triton on A100
  (triton-lang/triton pull request 1917);
- causal: Triton on A100, forward and backward (the same), FlashAttention-2 on H100 (Triton's pull
  request 2459) and cuDNN on B200 (flash-attention pull request 2605), forward. One figure serves
  both directions.
"""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Of a kernel, forward and backward."""

    forward: float
    backward: float


UNMASKED = Work(118.0, 285.0)
"""Further keys of a query that sees all of them."""
MASKED = Work(420.0, 420.0)
"""Further keys of a query under a causal mask."""


def unmasked(keys: float) -> Work:
    """Work over that of ``keys`` for each query (a number or an array)."""
    return Work(1.0 + UNMASKED.forward / keys, 1.0 + UNMASKED.backward / keys)


def masked(share: float, keys: float) -> Work:
    """The same where a mask leaves ``share`` of the scores."""
    return Work(share + MASKED.forward / keys, share + MASKED.backward / keys)
