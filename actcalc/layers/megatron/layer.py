"""One transformer layer: norms, attention and feed-forward in the model's arrangement."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Graph, GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.megatron.attention import close_attention, cross_attention, self_attention
from actcalc.layers.megatron.mlp import close_ffn, mlp
from actcalc.specs import LayerKind, Model

_ELSEWHERE = "use --framework transformers, or --framework paper for an estimate"


def refuse_architecture(ctx: Context) -> None:
    """Raise ``SpecError`` for architectures the framework profile does not run.

    Megatron-Core's ``TransformerLayer`` is pre-norm with sequential attention and feed-forward
    (transformer_layer.py 0.16.1); whatever deviates from that is not priced as if it did not.
    Norms after both parts too are layer specifications of others: Megatron-Bridge
    models/gemma/modules.py TERowParallelLinearLayerNorm, slime_plugins/models/glm4.py.
    """
    model = ctx.model
    if model.encoder_layers:
        _refuse_encoder_decoder(ctx)
    for given, what in (
        (model.linear, "linear attention"),
        (model.disentangled, "disentangled attention"),
        (model.indexer, "attention that picks keys by a learned indexer"),
        (model.tower, "a vision tower"),
    ):
        if given is not None:
            raise SpecError(
                f"framework {ctx.framework} does not model {what} ({model.name})",
                "use --framework transformers",
            )
    for wrong, what in _not_modelled(model):
        if wrong:
            raise SpecError(
                f"framework {ctx.framework} does not model {what} ({model.name})",
                "use --framework transformers",
            )
    if ctx.framework.idealised:
        return
    for wrong, what in _not_in_megatron(model):
        if wrong:
            raise SpecError(f"Megatron-Core has no {what} ({model.name})", _elsewhere(ctx))


def _not_modelled(model: Model) -> list[tuple[bool, str]]:
    """What neither Megatron-Core nor the papers have.

    Layers may differ in key/value heads and feed-forward width alone
    (transformer/heterogeneous/heterogeneous_config.py).
    """
    other = {name for sizes in model.layer_sizes for name in sizes.own} - {"kv_heads", "ffn"}
    return [
        (model.mla is None and model.v_dim != model.head_dim, "values narrower than keys"),
        (model.sinks_in != "every", "attention sinks in some layers alone"),
        (model.compression is not None, "attention over compressed keys"),
        (model.streams > 1, "several residual streams"),
        (model.clamped_gate, "clamped gates"),
        (model.per_layer is not None, "embeddings of each layer's own"),
        (model.kv_shared_layers > 0, "layers that share keys and values"),
        (model.keys_as_values, "keys that serve as values"),
        (bool(model.sparse_layers), "feed-forwards cut off below a threshold"),
        (model.moe is not None and model.moe.beside_dense, "experts beside a dense feed-forward"),
        (bool(other), f"layers that differ in {' and '.join(sorted(other))}"),
    ]


def _elsewhere(ctx: Context) -> str:
    """What runs the architecture: under model parallelism transformers does not."""
    if ctx.model.encoder_layers:
        return "use --framework transformers, on one GPU per replica"
    split = [name for name in ("tp", "pp", "cp", "ep") if getattr(ctx.layout, name) > 1]
    if not split:
        return _ELSEWHERE
    flags = ", ".join(f"--{name}" for name in split)
    return (
        f"use --framework paper for an estimate, or drop {flags} and use --framework transformers"
    )


def _refuse_encoder_decoder(ctx: Context) -> None:
    """Raise ``SpecError`` for what Megatron-Core's T5 does not run (pretrain_t5.py)."""
    name = ctx.framework
    if ctx.framework.idealised:
        raise SpecError(
            f"{ctx.model.name} is an encoder-decoder, which framework {name} does not model",
            "use --framework transformers or megatron",
        )
    for degree in ("pp", "cp"):
        if getattr(ctx.layout, degree) > 1:
            raise SpecError(
                f"Megatron's encoder-decoder has no {degree} (here {getattr(ctx.layout, degree)})",
                f"use --{degree} 1",
            )


def _not_in_megatron(model: Model) -> list[tuple[bool, str]]:
    return [
        (model.norm_placement not in ("pre", "sandwich"), f"{model.norm_placement}-norm layers"),
        (model.parallel != "none", "parallel attention and feed-forward"),
        (model.position == "alibi", "alibi positions"),
        (model.position == "relative" and not model.encoder_layers, "relative positions"),
        (model.attention_softcap > 0, "soft cap of attention scores"),
        (model.logit_softcap > 0, "soft cap of logits"),
        (model.clip_qkv, "clamped queries, keys and values"),
        (model.v_norm, "normalised values"),
        (model.attention_gate != "none", "gate of attention's output"),
        (model.mla is not None and model.position == "none", "latent attention without positions"),
        (model.qk_norm == "full", "normalisation of queries and keys over their full width"),
        (model.patches > 0, "vision transformer head and patches in its GPT model"),
        (model.mel_bins > 0, "encoder of sounds"),
        (not model.key_bias, "projections of which the keys' alone has no bias"),
        (
            model.decoder_positions not in (0, model.max_positions),
            "table of positions of a decoder's own",
        ),
        (
            model.head in ("classifier", "score", "pooled", "none"),
            f"{model.head} head in its GPT model",
        ),
        (not model.first_norm, "first layer without a norm"),
        (model.layer_scale, "learned scales of a layer's parts"),
        (model.embedding_dim not in (0, model.hidden), "embedding narrower than hidden"),
        (model.embedding_norm, "normalisation right after the embedding"),
    ]


def layer_graph(ctx: Context, kind: LayerKind) -> Graph:
    """The graph of one layer of ``kind`` on one rank."""
    # What this kind of layer does not need is not loaded.
    if ctx.framework.layers == "pytorch":
        from actcalc.layers.pytorch import layer

        return layer.layer_graph(ctx, kind)
    g = GraphBuilder(kind.label)
    g.tensor("input", (ctx.s_region, ctx.b, ctx.h), ctx.residual)
    return g.build("input", layer_body(g, ctx, kind, "input"))


def layer_body(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Append one layer that reads ``stream``; return its output."""
    refuse_architecture(ctx)
    if kind.mixer == kind.mlp == "none":
        return stream
    if kind.mixer == "none" or kind.mlp == "none":
        return _half(g, ctx, kind, stream)
    if kind.mixer != "attention":
        raise SpecError(
            f"Megatron-Core has no layers of {kind.mixer} and a feed-forward ({ctx.model.name})",
            _ELSEWHERE,
        )
    if ctx.model.parallel != "none":
        return _parallel(g, ctx, kind, stream)
    placement = ctx.model.norm_placement
    if placement == "post":
        attended = _close_attention(g, ctx, _attend(g, ctx, kind, stream), stream, "attention_sum")
        middle = norm(g, ctx, "norm1", attended)
        summed = close_ffn(g, ctx, _feed(g, ctx, kind, middle), middle, "ffn_sum")
        return norm(g, ctx, "norm2", summed, out="output")
    if placement == "pre":
        first = norm(g, ctx, "norm1", stream, modules=_norm1_modules(ctx))
        middle = _close_attention(g, ctx, _attend(g, ctx, kind, first), stream, "middle")
        if kind.cross:
            middle = _attend_encoder(g, ctx, middle)
        second = norm(g, ctx, "norm2", middle, modules=_norm2_modules(ctx, kind))
        return close_ffn(g, ctx, _feed(g, ctx, kind, second), middle, "output")
    before = placement == "sandwich"
    first = norm(g, ctx, "norm1", stream, modules=_norm1_modules(ctx)) if before else stream
    context, width = _attend(g, ctx, kind, first)
    branch = close_attention(g, ctx, context, width, stream, "")
    # The recompute module ``layernorm`` covers the norms before a part alone.
    branch = norm(g, ctx, "norm1_post", branch, modules=())
    middle = _add(g, ctx, "attention", branch, stream, "middle")
    second = middle
    if before:
        second = norm(g, ctx, "norm2", middle, modules=_norm2_modules(ctx, kind))
    branch = norm(g, ctx, "norm2_post", _feed(g, ctx, kind, second), modules=())
    return close_ffn(g, ctx, branch, middle, "output")


def _half(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """One layer of a hybrid: state-space mixer, attention or feed-forward, each with its norm.

    Source: Megatron-Core models/hybrid/hybrid_layer_specs.py hybrid_stack_spec.
    """
    if kind.block:
        raise SpecError(
            f"Megatron-Core has no blocks that layers share ({ctx.model.name})", _ELSEWHERE
        )
    if kind.mixer == "mamba":
        from actcalc.layers.megatron.mamba import mamba_layer

        return mamba_layer(g, ctx, stream)
    if kind.mixer == "attention":
        first = norm(g, ctx, "norm1", stream, modules=_norm1_modules(ctx))
        return _close_attention(g, ctx, _attend(g, ctx, kind, first), stream, "output")
    second = norm(g, ctx, "norm2", stream, modules=_norm2_modules(ctx, kind))
    return close_ffn(g, ctx, _feed(g, ctx, kind, second), stream, "output")


def _parallel(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Attention and feed-forward of the same input, after one norm or one each (GPT-J, NeoX)."""
    first = norm(g, ctx, "norm1", stream)
    second = first
    if ctx.model.parallel == "two_norms":
        second = norm(g, ctx, "norm2", stream)
    middle = _close_attention(g, ctx, _attend(g, ctx, kind, first), stream, "middle")
    return close_ffn(g, ctx, _feed(g, ctx, kind, second), middle, "output")


def _attend(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> tuple[str, Expr]:
    if ctx.model.mla:
        from actcalc.layers.megatron.mla import mla_attention

        return mla_attention(g, ctx, kind, source)
    return self_attention(g, ctx, kind, source), ctx.q_width


def _attend_encoder(g: GraphBuilder, ctx: Context, stream: str) -> str:
    """Append a decoder layer's second attention, over the encoder's output, with its own norm.

    The norm is not fused with a product (t5_spec.py: TENorm, TEColumnParallelLinear), and the
    recompute module ``layernorm`` does not cover it (transformer_layer.py).
    """
    inner = Scoped(g, "cross_")
    first = norm(inner, ctx, "norm", stream, modules=())
    attended = cross_attention(inner, ctx, first)
    return close_attention(inner, ctx, attended, ctx.q_width, stream, "middle")


def _close_attention(
    g: GraphBuilder, ctx: Context, attended: tuple[str, Expr], stream: str, out: str
) -> str:
    return close_attention(g, ctx, *attended, stream, out)


def _feed(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    if kind.mlp == "moe":
        from actcalc.layers.megatron.moe import moe

        return moe(g, ctx, source)
    return mlp(g, ctx, source)


def _add(g: GraphBuilder, ctx: Context, what: str, branch: str, stream: str, out: str) -> str:
    if ctx.hidden_dropout:
        branch = dropout(g, f"{what}_dropout", what, branch)
    g.tensor(out, g.shape(stream), g.dtype(stream))
    g.op(f"{what}_add", "add", what, [branch, stream], [out])
    return out


def _norm1_modules(ctx: Context) -> tuple[str, ...]:
    """Recompute modules of the norm before attention.

    Transformer Engine fuses it into the projection, where ``layernorm`` recompute cannot reach
    it; latent attention projects twice from it and keeps a norm of its own
    (Megatron-Core gpt_layer_specs.py).
    """
    if ctx.kernel("norm_fusion") == "fused" and not ctx.model.mla:
        return ("attention",)
    return ("layernorm",)


def _norm2_modules(ctx: Context, kind: LayerKind) -> tuple[str, ...]:
    """Recompute modules of the norm before the feed-forward; fused into it unless it is MoE."""
    if ctx.kernel("norm_fusion") == "fused" and kind.mlp == "dense":
        return ("mlp",)
    return ("layernorm",)
