"""Multi-token prediction: one more layer that predicts the token after the next (DeepSeek-V3)."""

from __future__ import annotations

from actcalc.layers.context import Context
from actcalc.layers.ends import embed, predict
from actcalc.layers.graph import Collective, Comm, Graph, GraphBuilder
from actcalc.layers.layer import layer_body
from actcalc.layers.linear import linear
from actcalc.layers.norm import norm
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
    first = norm(g, ctx, "enorm", embedded, "enorm_out", modules=())
    second = norm(g, ctx, "hnorm", stream, "hnorm_out", modules=())
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
    output = layer_body(g, ctx, kind, "input")
    normed = norm(g, ctx, "mtp_norm", output, "mtp_norm_out", group="head", modules=())
    return g.build("hidden", predict(g, ctx, normed))
