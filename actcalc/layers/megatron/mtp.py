"""Multi-token prediction: one more layer that predicts the token after the next (DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import replace

from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, Graph, GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.megatron.ends import embed, predict
from actcalc.layers.megatron.layer import layer_body
from actcalc.layers.megatron.linear import linear
from actcalc.specs import LayerKind


def mtp_graph(ctx: Context, kind: LayerKind) -> Graph:
    """The graph of one prediction layer with its embedding look-up, projection, head and loss.

    The embedding of the shifted tokens and the hidden states are normalised, concatenated and
    projected back to one width; a layer like the last one, a norm and the shared head follow
    (DeepSeek-V3 §2.2; Megatron-Core multi_token_prediction.py). Embedding and head share the
    model's weights.
    """
    g = GraphBuilder("mtp")
    # The head keeps its input, the normed hidden states, already.
    stream = g.shared("hidden", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    # The shifted ids come from the data, not from this graph.
    embedded = embed(g, ctx, source=stream)
    first = norm(g, ctx, "enorm", embedded, modules=())
    second = norm(g, ctx, "hnorm", stream, modules=())
    both = g.tensor("concatenated", (ctx.s_region, ctx.b, ctx.h * 2), ctx.act)
    g.op("concatenate", "copy", "norm", [first, second], [both])
    part = g.tensor("projected_part", (ctx.s, ctx.b, ctx.h / ctx.t), ctx.act)
    linear(
        g, ctx, "eh_proj", "head", both, [part], width_in=ctx.h * 2, width_out=ctx.h / ctx.t,
        split="column",
    )  # fmt: skip
    g.tensor("input", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    full = ctx.tokens * ctx.h * ctx.act.itemsize
    comm = [Comm(Collective.ALL_GATHER, "tp", full)] if ctx.tp else []
    g.op("gather_projected", "gather", "head", [part], ["input"], comm=comm)
    output = _inside(g, ctx, kind)
    normed = norm(g, ctx, "mtp_norm", output, group="head", modules=())
    graph = g.build("hidden", predict(g, ctx, normed))
    return _sharing(graph) if ctx.model.mtp_shared else graph


def _inside(g: GraphBuilder, ctx: Context, kind: LayerKind) -> str:
    """Append the layer, or a hybrid's layers, inside one prediction layer; return its output."""
    letters = ctx.model.mtp_pattern
    if not letters:
        return layer_body(g, ctx, kind, "input")
    stream = "input"
    for index, letter in enumerate(letters):
        part = Scoped(g, f"part{index}_")
        stream = layer_body(part, ctx, ctx.model.part(letter), stream)
    return stream


def _sharing(graph: Graph) -> Graph:
    """The same graph with weights that all prediction layers share."""
    ops = tuple(
        replace(
            op,
            weights=tuple(
                weight if weight.scope else replace(weight, scope=f"mtp {op.name} {weight.name}")
                for weight in op.weights
            ),
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops)
