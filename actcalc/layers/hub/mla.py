"""Multi-head latent attention of transformers' DeepSeek-V2 and V3."""

from __future__ import annotations

from actcalc.layers.context import Context
from actcalc.layers.graph import GraphBuilder
from actcalc.specs import LayerKind


def mla_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    raise NotImplementedError
