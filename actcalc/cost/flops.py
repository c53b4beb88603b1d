"""FLOPs of one micro-batch through the whole model: model FLOPs, re-run FLOPs, closed forms.

Matrix products only, 2·m·n·k; backward is twice forward (dX and dW); the embedding lookup costs
nothing; attention scores are counted in full, causal or not, unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from actcalc.layers.algebra import Expr, total
from actcalc.layers.context import whole
from actcalc.layers.graph import Op
from actcalc.layers.model import ModelGraph
from actcalc.specs import Model

Counting = Literal["full", "causal"]


def op_flops(ops: Iterable[Op], *, causal: bool = False) -> Expr:
    """Forward FLOPs of ``ops`` on one rank; ``causal`` halves the attention core's products."""
    return total(op.flops / 2 if causal and op.kind == "core" else op.flops for op in ops)


def layers_forward_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Forward FLOPs of all transformer layers for one micro-batch, over all ranks."""
    sizes = whole(dict(model.sizes))
    causal = counting == "causal" and model.context.model.causal
    return sum(
        run.count * int(op_flops(run.graph.ops, causal=causal).value(sizes)) for run in model.runs
    )


def head_forward_flops(model: ModelGraph) -> int:
    """Forward FLOPs of embedding and output head for one micro-batch, over all ranks."""
    sizes = whole(dict(model.sizes))
    return sum(int(op_flops(g.ops).value(sizes)) for g in (model.embedding, model.head))


def forward_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Forward FLOPs of the whole model for one micro-batch, over all ranks."""
    return layers_forward_flops(model, counting) + head_forward_flops(model)


def model_flops(model: ModelGraph, counting: Counting = "full") -> int:
    """Model FLOPs of one micro-batch: forward and backward, three times the forward's.

    For a GPT this is 72·b·l·s·h²(1 + s/6h + v/12hl) (Korthikanti et al. 2022, appendix A).
    Re-run FLOPs are not model FLOPs, nor is the scores' recomputation inside flash attention.
    """
    return 3 * forward_flops(model, counting)


def paper_model_flops(model: Model, seq: int, batch: int) -> int:
    """72·b·l·s·h²(1 + s/6h + v/12hl), multiplied out: the closed form for a 4h feed-forward."""
    h, layers = model.hidden, model.layers
    return batch * seq * (72 * layers * h * h + 12 * layers * seq * h + 6 * h * model.vocab)


def paper_selective_flops(model: Model, seq: int, batch: int) -> int:
    """72·b·l·s·h²(1 + s/3h + v/12hl), multiplied out: hardware FLOPs of selective recomputation.

    The published equation adds s/6h for the re-run attention core, three times that core's forward
    FLOPs (4bs²h per layer, which is s/18h of 72bsh²). See ``actcalc explain selective``.
    """
    h, layers = model.hidden, model.layers
    return batch * seq * (72 * layers * h * h + 24 * layers * seq * h + 6 * h * model.vocab)
