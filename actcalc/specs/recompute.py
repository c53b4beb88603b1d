"""Recompute modules, one row each: parts of a layer that can be re-run by themselves.

Policies, help, hints, what plans are written for and what is read from launch files come from these
rows; every column must be given. To add a module is to add a row and its tag to the ops of layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from actcalc.specs.row import Row


class Module(Row):
    """One recompute module."""

    name: str
    """As given to --policy."""
    aliases: tuple[str, ...]
    """Other names of the policy that re-runs it alone."""
    about: str
    """What it covers, in a few words."""
    tag: str
    """The tag of its ops in layer graphs."""
    discards_output: bool
    """Its output is dropped and made again, whoever saves it (Megatron-Core
    ``CheckpointWithoutOutput``)."""
    megatron: str
    """Its name in Megatron-LM's --recompute-modules; empty where there is none."""
    source: str
    """Where it is from."""


_MCORE = "Megatron-Core transformer_config.py recompute_modules"
_ROWS = (
    Module(
        name="core_attn", aliases=("selective",), tag="core_attn", discards_output=False,
        about="the attention core: scores, softmax, dropout, weighted values",
        megatron="core_attn", source=f"Korthikanti et al. 2022 section 5; {_MCORE}",
    ),
    Module(
        name="attention", aliases=(), tag="attention", discards_output=False,
        about="the attention block from its projections to its output",
        megatron="",
        source="attention-only checkpointing, torch.utils.checkpoint around the attention module",
    ),
    Module(
        name="mlp", aliases=("ffn",), tag="mlp", discards_output=False,
        about="the dense feed-forward", megatron="mlp", source=_MCORE,
    ),
    Module(
        name="layernorm", aliases=("norm",), tag="layernorm", discards_output=True,
        about="the norms before attention and feed-forward", megatron="layernorm", source=_MCORE,
    ),
    Module(
        name="moe", aliases=(), tag="moe", discards_output=False,
        about="the whole mixture-of-experts layer", megatron="moe", source=_MCORE,
    ),
    Module(
        name="moe_act", aliases=(), tag="moe_act", discards_output=True,
        about="the experts' activation function", megatron="moe_act", source=_MCORE,
    ),
    Module(
        name="shared_experts", aliases=(), tag="shared_experts", discards_output=False,
        about="the shared experts", megatron="shared_experts", source=_MCORE,
    ),
    Module(
        name="mla_up_proj", aliases=(), tag="mla_up_proj", discards_output=True,
        about="up-projections and rotary position of latent attention",
        megatron="mla_up_proj", source=_MCORE,
    ),
)  # fmt: skip

MODULES: Mapping[str, Module] = {row.name: row for row in _ROWS}
"""Every module by its name."""

WHOLE = ("full", "full-sharded", "sqrt", "recursive", "op")
"""Policies that decide for whole layers."""

COUNTED = ("uniform", "block", "every")
"""Those that count layers: their names are followed by a colon and a number."""

ALIASES: Mapping[str, str] = {alias: row.name for row in _ROWS for alias in row.aliases}
"""The module that another name stands for."""
