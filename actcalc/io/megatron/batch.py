"""Replicas and sequences of a step, as Megatron-LM's options give them."""

from __future__ import annotations

from math import gcd

from actcalc.errors import SpecError
from actcalc.io.megatron.options import Options


def fed(o: Options, given: int, warnings: list[str]) -> int:
    """Replicas that a step feeds: a world-size of the whole machine may have more.

    A global batch of fewer sequences than one micro-batch for each replica cannot have run on all.
    """
    batch, micro_batch = (
        o.number("global-batch-size", given),
        o.number("micro-batch-size", 1, least=1),
    )
    if not o.has("global-batch-size") or batch >= micro_batch * given or batch % micro_batch:
        return given
    possible = gcd(given, batch // micro_batch)
    warnings.append(
        f"world-size has {given} replicas, but a global batch of {batch} feeds {possible}: the "
        "others are taken to be idle (Megatron refuses such a world-size)."
    )
    return possible


_MOST_TRIED = 1024
"""Micro-batches up to which a smaller one is looked for."""


def global_batch(o: Options, micro_batch: int, replicas: int) -> int:
    """Sequences of one step; ``num_microbatches_calculator.py`` refuses what does not divide."""
    batch, step = o.number("global-batch-size", 1), micro_batch * replicas
    if batch % step == 0:
        return batch
    near = [size for size in (batch // step * step, -(-batch // step) * step) if size]
    smaller = range(1, min(micro_batch, _MOST_TRIED))
    fit = [str(size) for size in smaller if batch % (size * replicas) == 0]
    hint = "use global-batch-size " + " or ".join(map(str, near))
    raise SpecError(
        f"global-batch-size {batch} is not divisible by micro-batch-size {micro_batch} x {replicas}"
        f" replicas (world-size over tp, pp and cp) = {step}; Megatron refuses it",
        hint + (f", or micro-batch-size {fit[-1]}" if fit else ""),
    )
