"""Recipes of number formats, one row each: bytes of every copy of a parameter, and of its gradient.

Choices, help, schema, bytes and times come from these rows; every column must be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from actcalc.specs.row import Row

Summed = Literal["fused", "own type", "cast", "collected", "twice"]
"""How gradients of several micro-batches are summed: inside the product that makes them; in their
own type; cast to fp32 first; in the buffer that is reduced over shards; in 16 bits, and these in
fp32 again."""


class Recipe(Row):
    """Bytes per parameter of each copy."""

    name: str
    """As given to --recipe."""
    title: str
    """In a few words, for help and schema."""
    choosable: bool
    """May be asked for by name; the other rows follow from --precision."""
    weight: int
    """Of the weight that forward reads."""
    gradient: int
    """Of its gradients, all copies."""
    gradient_in_16_bit: int
    """The same where gradients are accumulated and reduced in 16 bits."""
    updates_from: int
    """Of the gradient that the optimizer reads; 0: all of them."""
    reduced: int
    """Of the gradient as replicas reduce it."""
    reduced_whole: bool
    """Replicas that share optimizer states (ZeRO-1) all-reduce gradients: each gets all of them."""
    summed: Summed
    """How gradients of several micro-batches are summed."""
    master: int
    """Of the fp32 copy that the optimizer updates."""
    moment: int
    """Of one moment of the optimizer."""
    gathered: int
    """Of the element in which sharded weights are gathered."""
    persistent: bool
    """Gradients keep their buffer between steps (``zero_grad`` of torch drops them)."""
    states_at_start: bool
    """Optimizer states are made before the first step (else at its end)."""
    flattens: bool
    """An optimizer step flattens 16-bit gradients and casts them (DeepSpeed's optimizers)."""
    units: bool
    """With PyTorch's modules, weights that ZeRO shards are sharded in units (fully_shard)."""
    source: str
    """Where the formats are from."""

    def figures(self) -> dict[str, Any]:
        """What answers show of a recipe."""
        shown = ("name", "weight", "gradient", "master", "moment", "gathered", "persistent")
        return {key: getattr(self, key) for key in shown}


_ROWS = (
    Recipe(
        name="megatron", title="16-bit weights, fp32 gradients and master weights", choosable=True,
        weight=2, gradient=4, gradient_in_16_bit=2, updates_from=0, reduced=4, reduced_whole=False,
        summed="fused",
        master=4, moment=4, gathered=2, persistent=True,
        states_at_start=False, flattens=False, units=True,
        source="Megatron-LM optimizer.py Float16OptimizerWithFloat16Params; docs, dist_optimizer: "
        "18 bytes with Adam",
    ),
    Recipe(
        name="mixed", title="16-bit weights and gradients, fp32 master weights", choosable=True,
        weight=2, gradient=2, gradient_in_16_bit=2, updates_from=0, reduced=2, reduced_whole=False,
        summed="own type",
        master=4, moment=4, gathered=2, persistent=False,
        states_at_start=True, flattens=True, units=False,
        source="Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1: 16 bytes with Adam",
    ),
    Recipe(
        name="deepspeed", title="bf16 gradients beside their fp32 sum", choosable=True,
        weight=2, gradient=6, gradient_in_16_bit=6, updates_from=4, reduced=4, reduced_whole=True,
        summed="twice",
        master=4, moment=4, gathered=2, persistent=True,
        states_at_start=True, flattens=False, units=False,
        source="DeepSpeed runtime/bf16_optimizer.py BF16_Optimizer, update_hp_grads; "
        "runtime/pipe/engine.py _bf16_reduce_grads: buffered_allreduce_fallback",
    ),
    Recipe(
        name="amp", title="fp32 weights and gradients under autocast", choosable=True,
        weight=4, gradient=4, gradient_in_16_bit=4, updates_from=0, reduced=4, reduced_whole=False,
        summed="cast",
        master=0, moment=4, gathered=4, persistent=False,
        states_at_start=False, flattens=False, units=True,
        source="torch.autocast: weights and gradients stay fp32",
    ),
    Recipe(
        name="fsdp", title="fp32 shards, gathered in 16 bits", choosable=True,
        weight=4, gradient=4, gradient_in_16_bit=4, updates_from=0, reduced=4, reduced_whole=False,
        summed="collected",
        master=0, moment=4, gathered=2, persistent=False,
        states_at_start=False, flattens=False, units=True,
        source="torch.distributed.fsdp MixedPrecision: param_dtype, reduce_dtype",
    ),
    Recipe(
        name="pure", title="all in the activations' type", choosable=True,
        weight=2, gradient=2, gradient_in_16_bit=2, updates_from=0, reduced=2, reduced_whole=False,
        summed="own type",
        master=0, moment=2, gathered=2, persistent=False,
        states_at_start=False, flattens=False, units=True,
        source="torch.optim on a model of that type: states are like their parameter",
    ),
    Recipe(
        name="fp32", title="all in fp32", choosable=False,
        weight=4, gradient=4, gradient_in_16_bit=4, updates_from=0, reduced=4, reduced_whole=False,
        summed="own type",
        master=0, moment=4, gathered=4, persistent=False,
        states_at_start=False, flattens=False, units=True,
        source="torch.optim on an fp32 model: states are like their parameter",
    ),
)  # fmt: skip

RECIPES: Mapping[str, Recipe] = {row.name: row for row in _ROWS}
"""Every recipe by its name."""

CHOOSABLE = tuple(row.name for row in _ROWS if row.choosable)
"""Those that may be asked for by name."""
