"""Time of a matrix product from its shape: tiles, waves, the epilogue, and the memory roof.

A kernel cuts the M × N result into tiles, one per multiprocessor at a time; all of them together
are a *wave*, and a last wave that is nearly empty takes as long as a full one (NVIDIA, Matrix
Multiplication Background User's Guide, "Wave Quantization"; Anthony et al. 2024,
arXiv:2401.14489, section 3). After its products each tile is written out while the tensor cores
wait, so the result's traffic adds to the time instead of hiding under it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from actcalc.cost.rates import Rates
from actcalc.layers.core.algebra import added
from actcalc.layers.core.either import each

# Output tiles of the vendor library's kernels and the operand bytes each loads per step of K,
# relative to the products it does with them: tile_m·tile_n/(tile_m + tile_n) products per element.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
# Products per loaded element from which operands arrive as fast as they are used: an A100 reads
# 5120 B per clock from its second-level cache (47 B per multiprocessor) and does 1024 16-bit
# products per clock and multiprocessor, so 2 · 1024 / 47 = 44 (NVIDIA A100 whitepaper, table 4
# and "A100 L2 cache").
_FED = 44.0
# fp32 products run on the vector units, at an eighth of the 16-bit rate or less (V100: 64 of 512
# products per clock and multiprocessor), with operands twice as wide.
_FED_FP32 = _FED / 4
_SPLITS = (1, 2, 4, 8, 16)


class Product(NamedTuple):
    """``batch`` products of (m × k) and (k × n); ``result_bytes`` moved per result element."""

    m: float
    n: float
    k: float
    batch: float = 1
    result_bytes: float = 2
    operand_bytes: float = 2
    unaligned: float = 0
    """Other than 0 where rows of an operand do not start at multiples of 16 bytes."""

    @property
    def flops(self) -> float:
        """2·m·n·k for each of the batch."""
        return 2.0 * self.m * self.n * self.k * self.batch


def misaligned(item: float, *pitches: float) -> float:
    """Bytes by which rows so many elements apart (numbers or arrays) miss multiples of 16 bytes.

    Tensor cores are fed in whole vectors of 16 bytes (NVIDIA, Matrix Multiplication Background
    User's Guide, "Tensor Core Requirements"); who quantises operands to 8 bits pads them.
    """
    if item < 2:
        return 0.0
    missed: float = added((item * pitch) % 16 for pitch in pitches)
    return missed


def gemm_seconds(product: Product, rates: Rates, *, core: bool = False) -> float:
    """Seconds of the product with the best of the tilings, on one device.

    ``core`` takes the rate of attention's number format. Splitting K over several tiles is
    allowed, at the price of summing the parts through memory. The product's sizes may be arrays.
    """

    def seconds(*sizes: float) -> float:
        return _gemm_seconds(Product(*sizes), rates, core)

    found: float = each(seconds, *product)
    return found


@lru_cache(maxsize=1 << 15)
def _gemm_seconds(product: Product, rates: Rates, core: bool) -> float:
    m, n, k, batch, result, operand, unaligned = product
    if min(m, n, k, batch) <= 0:
        return 0.0
    rate = rates.core_matrix if core else rates.matrix
    if unaligned:
        rate *= rates.shares.unaligned
    moved = batch * (operand * (m * k + k * n) + result * m * n)
    epilogue = batch * result * m * n / rates.memory
    if not rates.shares.multiprocessors:
        return max(product.flops / rate + epilogue, moved / rates.memory)
    best = min(
        _tiled(product, tile, split, rate, rates)
        for tile in _TILES
        for split in _SPLITS
        if split == 1 or k >= 512 * split
    )
    return max(best + epilogue, moved / rates.memory) + rates.shares.kernel_seconds


def _tiled(product: Product, tile: tuple[int, int], split: int, rate: float, rates: Rates) -> float:
    units = rates.shares.multiprocessors
    tile_m, tile_n = tile
    tiles = -(-product.m // tile_m) * -(-product.n // tile_n) * product.batch * split
    waves = -(-tiles // units)
    needed = _FED_FP32 if product.operand_bytes >= 4 else _FED
    fed = min(1.0, tile_m * tile_n / (tile_m + tile_n) / needed)
    per_tile = 2.0 * tile_m * tile_n * (product.k / split) / (rate / units * fed)
    parts = 0.0 if split == 1 else 8.0 * product.m * product.n * product.batch * split
    return waves * per_tile + parts / rates.memory
