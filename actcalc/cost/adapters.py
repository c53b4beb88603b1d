"""Seconds that low-rank adapters and a quantised base add to a frozen linear layer.

An adapter is two products of rank r beside the layer's own, a scaling and an addition; backward has
two products for its weights and two on the way to the input (Hu et al. 2021, section 4.1;
huggingface/peft tuners/lora/layer.py Linear.forward). A base in fewer bits is made whole again
before each product that reads it, forward and backward (Dettmers et al. 2023, QLoRA, equation 5;
bitsandbytes autograd/_functions.py MatMul4Bit), and once more where forward runs again.
"""

from __future__ import annotations

from typing import NamedTuple

from actcalc.cost.gemm import Product, gemm_seconds
from actcalc.cost.rates import Rates


class Beside(NamedTuple):
    """Seconds beside a frozen layer's own products."""

    forward: float
    backward: float


def adapter_seconds(whole: Product, rank: int, rates: Rates, *, fused: bool) -> Beside:
    """Seconds of an adapter of ``rank`` beside the product ``whole`` (rows x outside x inside).

    ``fused``: scaling and additions are one kernel; else each reads and writes its operands.
    """
    rows, outside, inside, local = whole.m, whole.n, whole.k, whole.batch
    item = whole.result_bytes

    def product(m: float, n: float, k: float) -> float:
        return gemm_seconds(Product(m, n, k, local, item, item), rates, core=True)

    def moved(passes: float, width: float, kernels: int) -> float:
        size = passes * item * rows * width * local
        return size / rates.memory + kernels * rates.shares.kernel_seconds

    # Scaled 1 + 1, added 2 + 1; in one kernel the product's result and the sum are read, one is
    # written. Its gradient is scaled; the input's two gradients are added.
    joined = moved(3, outside, 1) if fused else moved(5, outside, 2)
    back = moved(2, outside, 1) + moved(3, inside, 1)
    forward = product(rows, rank, inside) + product(rows, outside, rank) + joined
    backward = (
        product(rows, rank, outside)
        + product(rows, inside, rank)
        + product(outside, rank, rows)
        + product(rank, inside, rows)
        + back
    )
    return Beside(forward, backward)


def whole_again_seconds(parameters: float, bits: int, item: float, rates: Rates) -> float:
    """Seconds of making ``parameters`` weights of ``bits`` bits whole again; 0 for 16 and more."""
    if bits >= 16:
        return 0.0
    return (bits / 8 + item) * parameters / rates.memory + rates.shares.kernel_seconds
