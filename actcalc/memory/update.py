"""The optimizer's step: what it makes beside states and gradients, moment by moment."""

from __future__ import annotations

from typing import NamedTuple

from actcalc.layers.core.algebra import least, most
from actcalc.memory.states import States
from actcalc.specs import Layout
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training


class StepMoment(NamedTuple):
    """One moment of an optimizer step."""

    gradients: int
    """Bytes of gradients that are left."""
    blocks: tuple[int, ...]
    """Bytes of each temporary."""


_SUB_GROUP = 1_000_000_000  # elements that DeepSpeed's ZeRO 3 updates at once (sub_group_size)


_BF16_BUCKET = (
    500_000_000  # elements that BF16_Optimizer reduces at once (MEMORY_OPT_ALLREDUCE_SIZE)
)


def reduction(
    layout: Layout, training: Training, rules: Recipe, held: States, largest: int
) -> StepMoment | None:
    """The moment at which DeepSpeed reduces gradients after a last backward, if it does so.

    Pipelines reduce after it, through a bucket made for that (runtime/zero/stage_1_and_2.py
    reduce_gradients); BF16_Optimizer's fp32 sums are copied into flat ones, of so many elements or
    of one weight (runtime/engine.py buffered_allreduce_fallback).
    """
    if rules.summed == "twice":
        elements = least(held.gradients // rules.gradient, most(_BF16_BUCKET, largest))
        return StepMoment(held.gradients, (elements * rules.reduced,))
    if rules.flattens and layout.pp > 1 and layout.zero in (1, 2):
        return StepMoment(held.gradients, (training.bucket_elements * rules.reduced,))
    return None


def step_moments(
    layout: Layout, training: Training, rules: Recipe, held: States, largest: int
) -> tuple[StepMoment, ...]:
    """The moments of an optimizer step; ``largest`` is the largest weight's elements.

    A reduction of gradients that waits for the last backward comes before them.
    """
    first = reduction(layout, training, rules, held, largest)
    each = _update_moments(training, rules, held, largest, layout.zero)
    return each if first is None else (first, *each)


def _update_moments(
    training: Training, rules: Recipe, held: States, largest: int, zero: int
) -> tuple[StepMoment, ...]:
    """The moments of the update.

    DeepSpeed's optimizers flatten the 16-bit gradients of a rank's own shard and cast them to fp32;
    their norm is taken in double, weight by weight (runtime/zero/stage_1_and_2.py step,
    get_grad_norm_direct). Without ZeRO each gradient is cast, and the casts are flattened
    (fp16/fused_optimizer.py); ZeRO 3 goes by sub-groups, whose gradients are views of a buffer that
    stays (stage3.py _prepare_fp32_grad_for_sub_group).
    """
    update = _update_bytes(training, rules, held, largest)
    fp32 = held.step_gradients
    if not (rules.flattens and held.optimizer):
        return (StepMoment(held.gradients, (update + fp32,)),)
    half = fp32 * rules.gradient // rules.master
    if not zero:
        return (StepMoment(held.gradients, (fp32, fp32)), StepMoment(0, (fp32, update)))
    norm = StepMoment(held.gradients, (8 * largest,))
    if zero < 3:
        return (norm, StepMoment(half, (half, fp32)), StepMoment(0, (fp32, update)))
    fp32, half = least(fp32, rules.master * _SUB_GROUP), least(half, rules.gradient * _SUB_GROUP)
    return (norm, StepMoment(held.gradients, (half, fp32)),
            StepMoment(held.gradients, (fp32, update)))  # fmt: skip


def step_bytes(
    layout: Layout, training: Training, rules: Recipe, held: States, largest: int
) -> int:
    """What an optimizer step has beyond the gradients that it begins with, at most."""
    found: int = 0
    for moment in step_moments(layout, training, rules, held, largest):
        found = most(found, moment.gradients + sum(moment.blocks) - held.gradients)
    return found


def _update_bytes(training: Training, rules: Recipe, held: States, largest: int) -> int:
    """Temporaries of the update itself.

    Adafactor goes tensor by tensor: gradient and weight in fp32 (where they are not), and two
    tensors that become the update (transformers optimization.py Adafactor.step). torch.optim's
    foreach makes one list as large as a moment (optim/adam.py _multi_tensor_adam,
    exp_avg_sq_sqrt), a loop over tensors two of one weight (_single_tensor_adam, denom).
    """
    kind = OPTIMIZERS[training.optimizer]
    if kind.kept == "factored":
        return 4 * largest * (2 + (rules.weight < 4) + (rules.gradient < 4))
    if training.fused_optimizer:
        return 0
    if training.foreach_optimizer or not kind.moments:
        return held.largest_state
    return 2 * rules.moment * largest
