"""The two ends of a model: embedding, and output head with the loss."""

from __future__ import annotations

from actcalc.layers.core.algebra import ONE, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, Graph, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import EMBEDDING_SCOPE, dropout, matmul, softcap
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.megatron.linear import linear


def embedding_graph(ctx: Context) -> Graph:
    """Token and position embedding, norm and dropout; it keeps ids and the dropout's mask."""
    if ctx.framework.layers == "pytorch":
        from actcalc.layers.pytorch import ends

        return ends.embedding_graph(ctx)
    g = GraphBuilder("embedding")
    if ctx.model.patches:
        first, out = "patches", _patch_embedding(g, ctx)
    else:
        first, out = "token_ids", embed(g, ctx)
    if ctx.model.embedding_norm:
        out = norm(g, ctx, "embedding_norm", out, group="embedding", modules=())
    if ctx.embedding_dropout:
        out = dropout(g, "embedding_dropout", "embedding", out)
    if ctx.model.encoder_layers:
        _between(g, ctx)
    return g.build(first, out)


def _between(g: GraphBuilder, ctx: Context) -> None:
    """Append what lies between an encoder and a decoder: the encoder's last norm, a look-up.

    The decoder's tokens are looked up in the same tables (t5_model.py). The normed output is kept
    by each decoder layer's key and value projection, the norm's input by the norm.
    """
    last = g.shared("encoder_last", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    norm(g, ctx, "encoder_final_norm", last, out="encoder_normed", group="embedding", modules=())
    inner = Scoped(g, "decoder_")
    out = embed(inner, ctx.of_decoder(), source=last)
    if ctx.embedding_dropout:
        dropout(inner, "embedding_dropout", "embedding", out)


def embed(g: GraphBuilder, ctx: Context, *, source: str = "") -> str:
    """Append the look-up of tokens, positions and segments; return the embedded tokens.

    The ids are the graph's input unless another tensor is named as its ``source``.

    Under tensor parallelism each rank looks up its part of the vocabulary and the parts are
    summed. Megatron then keeps the ids shifted into that part with a mask of those outside it,
    and the position ids (tensor_parallel/layers.py ``VocabParallelEmbedding``).
    """
    model = ctx.model
    ids = g.tensor("token_ids", (ctx.b, ctx.s), DType.INT64)
    saves = [ids]
    made = [ids] if source else []
    width = ctx.h if model.embedding_dim in (0, model.hidden) else ONE * model.embedding_dim
    weights = [Weight("token_embedding", (symbol("v") / ctx.t, width), scope=EMBEDDING_SCOPE)]
    megatron = ctx.kernel("ends") == "complete"
    if model.max_positions:
        weights.append(Weight("position_embedding", (symbol("o"), ctx.h), scope="positions"))
        if megatron:
            # T5 makes them once for all sequences (t5_model.py t5_position_ids).
            rows = ONE if model.encoder_layers else ctx.b
            made.append(g.tensor("position_ids", (rows, ctx.s), DType.INT64))
    if model.token_types:
        segments = (ONE * model.token_types, ctx.h)
        weights.append(Weight("token_type_embedding", segments, scope="token_types"))
        if megatron:
            made.append(g.tensor("token_type_ids", (ctx.b, ctx.s), DType.INT64))
    if megatron and ctx.tp:
        made.append(g.tensor("vocab_mask", (ctx.b, ctx.s), DType.BOOL))
    out = g.tensor("embedded", (ctx.s_region, ctx.b, width), ctx.residual)
    comm, backward = [], []
    if ctx.tp:
        full = ctx.tokens * width * ctx.residual.itemsize
        kind = Collective.REDUCE_SCATTER if ctx.layout.sp else Collective.ALL_REDUCE
        comm = [Comm(kind, "tp", full)]
        backward = [Comm(Collective.ALL_GATHER, "tp", full)] if ctx.layout.sp else []
    g.op(
        "embedding", "embedding", "embedding", [source or ids], [out, *made],
        saves=dict.fromkeys([*saves, *made]), weights=weights, comm=comm, backward_comm=backward,
    )  # fmt: skip
    if width == ctx.h:
        return out
    projected = g.tensor("embedding_projected", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    linear(
        g, ctx, "embedding_projection", "embedding", out, [projected], width_in=width,
        width_out=ctx.h, split="none", tokens=ctx.s_region * ctx.b,
    )  # fmt: skip
    return projected


def _patch_embedding(g: GraphBuilder, ctx: Context) -> str:
    """Append the projection of image patches, the class token and learned positions."""
    model = ctx.model
    pixels = g.tensor("patches", (ctx.s, ctx.b, model.patches), ctx.act)
    out = g.tensor("embedded", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    rows = ctx.s_region * ctx.b
    weights = [
        Weight("patch_embedding.weight", (ctx.h, ONE * model.patches)),
        Weight("patch_embedding.bias", (ctx.h,)),
        Weight("class_token", (ctx.h,)),
    ]
    if model.max_positions:
        weights.append(Weight("position_embedding", (symbol("o"), ctx.h), scope="positions"))
    g.op(
        "patch_embedding", "linear", "embedding", [pixels], [out],
        saves=[pixels], flops=rows * ctx.h * model.patches * 2, weights=weights,
    )  # fmt: skip
    return out


def head_graph(ctx: Context) -> Graph:
    """Final norm, output projection and cross-entropy, which keeps fp32 logits.

    The vocabulary is split over the tensor-parallel group (Korthikanti et al. 2022 §4.3:
    4sbh(1+v/h)/t, of which 2sbh the norm's input, 2sbh the projection's, 4sbv the logits).
    """
    if ctx.framework.layers == "pytorch":
        from actcalc.layers.pytorch import ends

        return ends.head_graph(ctx)
    model = ctx.model
    g = GraphBuilder("head")
    stream = g.tensor("input", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    if model.head == "none":
        if model.final_norm:
            stream = norm(g, ctx, "final_norm", stream, group="head", modules=())
        g.op("end", "view", "head", [stream], [])
        return g.build("input", stream)
    if model.head == "mlm":
        if model.norm_placement == "pre" and model.final_norm:
            stream = norm(g, ctx, "final_norm", stream, group="head", modules=())
        if model.sentence_head:
            _sentence_head(g, ctx, stream)
        dense = g.tensor("transform_out", (ctx.s_region, ctx.b, ctx.h), ctx.act)
        linear(
            g, ctx, "transform", "head", stream, [dense],
            width_in=ctx.h, width_out=ctx.h, split="none", bias=True,
            tokens=ctx.s_region * ctx.b,
        )  # fmt: skip
        active = g.tensor("transform_active", g.shape(dense), ctx.act)
        g.op("transform_activation", "activation", "head", [dense], [active], saves=[dense])
        stream = norm(g, ctx, "head_norm", active, group="head", modules=())
    elif model.final_norm:
        stream = norm(g, ctx, "final_norm", stream, group="head", modules=())
    if model.head == "classifier":
        return g.build("input", _classify(g, ctx, stream))
    return g.build("input", predict(g, ctx, stream))


def _sentence_head(g: GraphBuilder, ctx: Context, stream: str) -> None:
    """Append the pooler of the first token and the classifier of sentence order.

    Every rank holds both whole (Megatron-Core models/bert/pooler.py, bert_model.py binary_head).
    """
    pooled = g.tensor("pooled", (ctx.b, ctx.h), ctx.act)
    # The first token is a slice of the stream, tanh keeps its output.
    matmul(
        g, "pooler", "head", stream, [pooled], rows=ctx.b, inside=ctx.h, outside=ctx.h, bias=True,
        saves=[stream, pooled],
    )  # fmt: skip
    order = g.tensor("sentence_order", (ctx.b, ONE * 2), DType.FP32)
    matmul(
        g, "binary_head", "head", pooled, [order], rows=ctx.b, inside=ctx.h, outside=ONE * 2,
        bias=True, saves=[pooled, order],
    )  # fmt: skip


def _classify(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append a classifier of the first token and its loss."""
    labels = ONE * (ctx.model.labels or 2)
    logits = g.tensor("logits", (ctx.b, labels), ctx.act)
    matmul(g, "head", "head", stream, [logits], rows=ctx.b, inside=ctx.h, outside=labels, bias=True)
    probs = g.tensor("log_probs", (ctx.b, labels), ctx.act)
    g.op("cross_entropy", "loss", "head", [logits], [probs], saves=[probs])
    return probs


def predict(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append the projection to the vocabulary and the cross-entropy; return the loss.

    The fp32 logits become the softmax in place, which is kept. Megatron also keeps a mask of the
    labels outside the rank's part of the vocabulary and the labels shifted into it
    (tensor_parallel/cross_entropy.py; the fused variant keeps the same). Transformer Engine's
    kernel reads the logits as they are and keeps them with three sums for every token.
    """
    model = ctx.model
    vocab = symbol("v") / ctx.t
    logits = g.tensor("logits", (ctx.s, ctx.b, vocab), ctx.act)
    rows = ctx.tokens
    weights = [
        Weight("head.weight", (vocab, ctx.h), scope=EMBEDDING_SCOPE if model.tied else "head")
    ]
    if model.head_bias:
        weights.append(Weight("head.bias", (vocab,), scope="head_bias"))
    comm, backward = [], []
    if ctx.tp:
        full = rows * ctx.h * ctx.act.itemsize
        gather, scatter = (
            Comm(kind, "tp", full) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        comm = [gather] if ctx.layout.sp else []
        backward = [gather, scatter] if ctx.layout.sp else [Comm(Collective.ALL_REDUCE, "tp", full)]
    g.op(
        "head", "linear", "head", [stream], [logits],
        saves=[stream], flops=rows * ctx.h * vocab * 2, weights=weights,
        comm=comm, backward_comm=backward,
    )  # fmt: skip
    if model.logit_softcap:
        logits = softcap(g, "logit_softcap", "head", logits, "logits_capped")
    loss = g.tensor("loss", (ctx.b, ctx.s), DType.FP32)
    # Maximum, predicted logit and sum of exponentials are each reduced over the group.
    reduced = [Comm(Collective.ALL_REDUCE, "tp", rows * 4)] * 3 if ctx.tp else []
    if engine_loss(ctx):
        sums = g.tensor("logit_sums", (ctx.b, ctx.s, ONE * 3), DType.FP32)
        g.op(
            "cross_entropy", "loss", "head", [logits], [sums, loss], saves=[logits, sums],
            comm=reduced, kernel="te", source="Transformer Engine pytorch/cross_entropy.py",
        )  # fmt: skip
        return loss
    softmax = g.tensor("softmax_fp32", g.shape(logits), DType.FP32)
    kept = [softmax]
    if ctx.kernel("ends") == "complete":
        kept.append(g.tensor("label_mask", (ctx.b, ctx.s), DType.BOOL))
        kept.append(g.tensor("labels_shifted", (ctx.b, ctx.s), DType.INT64))
    g.op("cross_entropy", "loss", "head", [logits], [*kept, loss], saves=kept, comm=reduced)
    return loss


def engine_loss(ctx: Context) -> bool:
    """Whether the cross-entropy is Transformer Engine's, of a Megatron run that has it."""
    kernels = ctx.workload.kernels
    return (
        ctx.framework.transformer_engine
        and kernels.cross_entropy_loss_fusion
        and kernels.cross_entropy_fusion_impl == "te"
    )
