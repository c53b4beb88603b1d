"""Mixture of experts."""

from __future__ import annotations

from actcalc.layers.context import Context
from actcalc.layers.graph import GraphBuilder


def moe(g: GraphBuilder, ctx: Context, source: str) -> str:
    raise NotImplementedError
