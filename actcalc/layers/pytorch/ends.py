"""Embedding and head of transformers' models: what they save, and the loss."""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, Graph, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import EMBEDDING_SCOPE, dropout, softcap
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.pytorch.altup import gathered_streams, spread
from actcalc.layers.pytorch.hyper import one_stream, stream_shape, widened
from actcalc.layers.pytorch.linear import linear
from actcalc.layers.pytorch.mlp import activate
from actcalc.layers.pytorch.parallel import gathered, scattered
from actcalc.layers.pytorch.per_layer import per_layer_inputs
from actcalc.layers.pytorch.pooling import pool, pooled_output
from actcalc.layers.pytorch.stems import patches, sounds


def embedding_graph(ctx: Context) -> Graph:
    """Token, position and segment look-up, norm and dropout.

    The batch itself is nobody's activation, so that the token ids count for nothing; position ids
    the model makes for itself are kept by their look-up.
    """
    g = GraphBuilder("embedding")
    if ctx.model.patches:
        first, out = patches(g, ctx)
    elif ctx.model.mel_bins:
        first, out = sounds(g, ctx)
    else:
        first, out = _look_up(g, ctx)
    if ctx.model.per_layer:
        per_layer_inputs(g, ctx, first, out)
    if ctx.model.tower:
        from actcalc.layers.pytorch.tower import with_images

        out = with_images(g, ctx, ctx.model.tower, out)
    if ctx.model.embedding_norm:
        out = norm(g, ctx, "embedding_norm", out, group="embedding", modules=())
    if ctx.model.disentangled:
        from actcalc.layers.pytorch.disentangled import position_table

        out = position_table(g, ctx, out)
    if ctx.embedding_dropout:
        out = dropout(g, "embedding_dropout", "embedding", out)
    if _narrow(ctx) and _projects_last(ctx):
        out = linear(
            g, ctx, "embedding_projection", "embedding", out,
            inside=_table_width(ctx), outside=ctx.h, bias=True,
        )  # fmt: skip
    if ctx.model.encoder_layers:
        _between(g, ctx)
    return g.build(first, spread(g, ctx, out) if ctx.model.altup else widened(g, ctx, out))


def _between(g: GraphBuilder, ctx: Context) -> None:
    """Append what lies between an encoder and a decoder.

    The encoder's last norm and its dropout, and the decoder's own look-up: of the labels, shifted
    into a tensor that is kept.
    """
    if ctx.model.final_norm:
        last = g.shared("encoder_last", (ctx.b, ctx.s, ctx.h), ctx.residual)
        out = norm(g, ctx, "encoder_final_norm", last, group="embedding", modules=())
        if ctx.embedding_dropout and ctx.kernel("final_dropout") == "embedding":
            dropout(g, "encoder_final_dropout", "embedding", out)
    inner = Scoped(g, "decoder_")
    _, out = _look_up(inner, ctx.of_decoder())
    if ctx.model.embedding_norm:
        out = norm(inner, ctx, "embedding_norm", out, group="embedding", modules=())
    if ctx.embedding_dropout:
        dropout(inner, "embedding_dropout", "embedding", out)


def _narrow(ctx: Context) -> bool:
    """Whether the token table is narrower than the residual stream."""
    return ctx.model.embedding_dim not in (0, ctx.model.hidden)


def _table_width(ctx: Context) -> Expr:
    return ONE * ctx.model.embedding_dim if _narrow(ctx) else ctx.h


def _projects_last(ctx: Context) -> bool:
    """Whether positions, norm and dropout work on the narrow embedding (ELECTRA)."""
    return ctx.kernel("embedding_projection") == "after_norm"


def _position_rows(ctx: Context) -> Expr | None:
    """Rows of the position ids that the look-up keeps; None where they are a buffer."""
    kernel = ctx.kernel("position_ids")
    if kernel == "unsupported":
        raise SpecError(
            f"framework {ctx.framework} has no learned positions ({ctx.model.name})",
            "use --framework transformers",
        )
    if kernel == "batch_then_one":
        kernel = "one" if ctx.decoder else "batch"
    return {"buffer": None, "one": ONE, "batch": ctx.b}[kernel]


def _positions(ctx: Context) -> Weight:
    """The table of learned positions; a decoder's is its own."""
    width = _table_width(ctx) if _projects_last(ctx) else ctx.h
    if ctx.decoder:
        rows = ONE * (ctx.model.decoder_positions or ctx.model.max_positions)
        return Weight("decoder_position_embedding", (rows, width), scope="decoder_positions")
    return Weight("position_embedding", (symbol("o"), width), scope="positions")


def _look_up(g: GraphBuilder, ctx: Context) -> tuple[str, str]:
    """Token, position and segment look-up; a decoder makes its ids, which are kept."""
    model = ctx.model
    ids = g.tensor("token_ids", (ctx.b, ctx.s), DType.INT64)
    width = _table_width(ctx)
    inner = width if _projects_last(ctx) else ctx.h
    weights = [Weight("token_embedding", (symbol("v") / ctx.t, width), scope=EMBEDDING_SCOPE)]
    made: list[str] = []
    if model.max_positions:
        rows = _position_rows(ctx)
        weights.append(_positions(ctx))
        if rows is not None:
            made.append(g.tensor("position_ids", (rows, ctx.s), DType.INT64))
    if model.token_types:
        segments = (ONE * model.token_types, inner)
        weights.append(Weight("token_type_embedding", segments, scope="token_types"))
        rows = ctx.b if ctx.kernel("token_type_ids") == "batch" else ONE
        made.append(g.tensor("token_type_ids", (rows, ctx.s), DType.INT64))
    if ctx.kernel("embedding_scale") == "tensor":
        made.append(g.tensor("embedding_scale", (), ctx.residual))
    out = g.tensor("embedded", (ctx.b, ctx.s, width), ctx.residual)
    shifted = [ids] if ctx.decoder else []
    g.op(
        "embedding", "embedding", "embedding", [] if shifted else [ids],
        [*shifted, out, *made], saves=[*shifted, *made], weights=weights,
    )  # fmt: skip
    out = scattered(g, ctx, "embedding", "embedding", out)
    if width != inner:
        out = linear(g, ctx, "embedding_projection", "embedding", out, inside=width, outside=ctx.h)
    return ids, out


def head_graph(ctx: Context) -> Graph:
    """Final norm, output projection and loss."""
    model = ctx.model
    g = GraphBuilder("head")
    stream = g.tensor("input", stream_shape(ctx, ctx.s_region), ctx.stream)
    stream = gathered_streams(g, ctx, stream) if model.altup else one_stream(g, ctx, stream)
    if model.final_norm and not model.pooled_norm:
        stream = norm(g, ctx, "final_norm", stream, group="head", modules=())
    if ctx.embedding_dropout and ctx.kernel("final_dropout") == "embedding":
        stream = dropout(g, "final_dropout", "head", stream)
    if model.head == "none":
        g.op("end", "view", "head", [stream], [])
        return g.build("input", stream)
    if model.head == "mlm":
        width = _table_width(ctx)
        stream = linear(
            g, ctx, "transform", "head", stream, inside=ctx.h, outside=width,
            bias=model.transform_bias,
        )  # fmt: skip
        shape = (ctx.b, ctx.s, width)
        stream = activate(g, ctx, "transform_activation", stream, shape, group="head", modules=())
        stream = norm(g, ctx, "head_norm", stream, group="head", modules=())
    if model.head == "classifier":
        return g.build("input", _classify(g, ctx, stream))
    if model.head == "pooled":
        return g.build("input", pooled_output(g, ctx, stream))
    if model.head == "score":
        return g.build("input", _score(g, ctx, stream))
    return g.build("input", _predict(g, ctx, stream))


def _score(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """A number a token, of which the last one's is read (LlamaForSequenceClassification)."""
    scores = linear(g, ctx, "head", "head", stream, inside=ctx.h, outside=ONE)
    rewards = g.tensor("rewards", (ctx.b,), g.dtype(scores))
    g.op("last_token", "view", "head", [scores], [rewards])
    return rewards


def _classify(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """A classifier of what is pooled of the sequence."""
    labels = ONE * (ctx.model.labels or 2)
    pooled = pool(g, ctx, stream)
    logits = linear(
        g, ctx, "head", "head", pooled.source, inside=pooled.width, outside=labels, bias=True,
        rows=(ctx.b,),
    )  # fmt: skip
    return _loss(g, ctx, logits, (ctx.b, labels), shifted=False, upcast=False)


def _predict(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """The projection to the vocabulary and the loss.

    Causal language models upcast the logits and shift the labels (loss/loss_utils.py
    ``ForCausalLMLoss``); masked ones and encoder-decoders do neither, torchtitan upcasts only.
    """
    model = ctx.model
    vocab = symbol("v") / ctx.t
    stream = gathered(g, ctx, "head", "head", stream)
    rule = ctx.kernel("loss") if model.head == "lm" else ctx.kernel("masked_loss")
    width = _table_width(ctx)
    if _narrow(ctx) and model.head == "lm":
        stream = linear(g, ctx, "project_out", "head", stream, inside=ctx.h, outside=width)
    logits = linear(
        g, ctx, "head", "head", stream,
        inside=width, outside=vocab, bias=model.head_bias,
        scope=EMBEDDING_SCOPE if model.tied else "head",
    )  # fmt: skip
    shape = (ctx.b, ctx.s, vocab)
    if model.logit_softcap:
        logits = softcap(g, "logit_softcap", "head", logits, "logits_capped")
    if rule == "biased" and ctx.autocast:
        wide = g.tensor("logits_biased", shape, ctx.residual)
        g.op("logits_bias", "add", "head", [logits], [wide])
        logits = wide
    shifted, upcast = rule == "shifted", rule in ("shifted", "upcast")
    return _loss(g, ctx, logits, shape, shifted=shifted, upcast=upcast)


def _loss(
    g: GraphBuilder,
    ctx: Context,
    logits: str,
    shape: Iterable[Expr],
    *,
    shifted: bool,
    upcast: bool,
) -> str:
    """Append the cross-entropy: log-probabilities, shifted labels and a scalar are kept."""
    dtype = DType.FP32 if upcast else g.dtype(logits)
    dims = tuple(shape)
    probs = g.tensor("log_probs", dims, dtype)
    kept = [probs]
    kernel = "parallel" if ctx.tp else ""
    if ctx.autocast and dtype is not DType.FP32:
        kept.append(g.tensor("log_probs_fp32", dims, DType.FP32))
        dtype = DType.FP32
    if shifted:
        # Labels are padded by one and shifted: of one sequence that is a view of the padded ones.
        extra = 1 if ctx.workload.micro_batch == 1 else 0
        kept.append(g.tensor("labels", (ctx.b, ctx.s + extra), DType.INT64))
    kept.append(g.tensor("total_weight", (), dtype))
    loss = g.tensor("loss", (), dtype)
    g.op("cross_entropy", "loss", "head", [logits], [*kept, loss], saves=kept, kernel=kernel)
    return loss
