"""One layer of transformers' modelling code: norms, attention, feed-forward, residuals."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, Graph, GraphBuilder, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout, promoted, residual_add
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.pytorch.altup import altup_layer
from actcalc.layers.pytorch.attention import attention, borrowing_attention
from actcalc.layers.pytorch.hyper import hyper_layer, stream_shape
from actcalc.layers.pytorch.mla import mla_attention
from actcalc.layers.pytorch.mlp import feed_forward
from actcalc.layers.pytorch.moe import beside_dense, moe
from actcalc.layers.pytorch.parallel import gathered
from actcalc.layers.pytorch.per_layer import add_gated
from actcalc.layers.pytorch.relative import encoder_output
from actcalc.specs import LayerKind

_AROUND = ("sandwich", "post_sublayer")


def layer_graph(ctx: Context, kind: LayerKind) -> Graph:
    """The graph of one layer of ``kind``."""
    g = GraphBuilder(kind.label)
    g.tensor("input", stream_shape(ctx, ctx.s_region), ctx.stream)
    return g.build("input", _body(g, ctx, kind, "input"))


def _body(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    if kind.cross and (ctx.model.parallel != "none" or ctx.model.norm_placement in _AROUND):
        raise SpecError(
            f"a decoder over an encoder is described with norms before or after each part, not "
            f"{ctx.model.norm_placement} with parallel {ctx.model.parallel} ({ctx.model.name})",
            "set norm_placement to pre or post, and parallel to none",
        )
    if kind.opens:
        stream = norm(g, ctx, "opening_norm", stream)
    if ctx.model.altup:
        return altup_layer(
            g, ctx, stream,
            lambda source: _attend(g, ctx, kind, source),
            lambda source: _feed(g, ctx, kind, source),
        )  # fmt: skip
    if ctx.model.streams > 1:
        return hyper_layer(
            g, ctx, stream,
            lambda source: _attend(g, ctx, kind, source),
            lambda source: _feed(g, ctx, kind, source),
        )  # fmt: skip
    if ctx.model.parallel != "none":
        return _parallel(g, ctx, kind, stream)
    if kind.mixer == kind.mlp == "none":
        return stream
    if kind.mixer == "none" or kind.mlp == "none":
        return _half(g, ctx, kind, stream)
    placement = ctx.model.norm_placement
    if kind.mixer == "linear" and ctx.kernel("linear_norms") == "pre":
        placement = "pre"
    if placement == "post":
        middle = _add(g, ctx, "attention", _attend(g, ctx, kind, stream), stream, "attention_sum")
        middle = norm(g, ctx, "norm1", middle)
        middle = _cross(g, ctx, kind, middle) if kind.cross else middle
        summed = _add(g, ctx, "ffn", _feed(g, ctx, kind, middle), middle, "ffn_sum")
        return norm(g, ctx, "norm2", summed, out="output")
    before, after = placement != "post_sublayer", placement in _AROUND
    normed = placement == "normed_stream"
    first = norm(g, ctx, "norm1", stream) if before and not kind.bare else stream
    branch = _attend(g, ctx, kind, first)
    branch = norm(g, ctx, "norm1_post", branch) if after else branch
    kept = first if normed else stream
    middle = _bounded(g, ctx, _add(g, ctx, "attention", branch, kept, "middle"), "middle")
    middle = _cross(g, ctx, kind, middle) if kind.cross else middle
    second = norm(g, ctx, "norm2", middle) if before else middle
    branch = _feed(g, ctx, kind, second, middle)
    branch = norm(g, ctx, "norm2_post", branch) if after else branch
    kept = second if normed else middle
    if ctx.model.per_layer:
        return add_gated(g, ctx, _add(g, ctx, "ffn", branch, kept, "ffn_sum"))
    out = _add(g, ctx, "ffn", branch, kept, "output")
    return _clamped(g, ctx, kind, _bounded(g, ctx, out, "output"))


def _half(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """A layer of one part: a mixer or a feed-forward with its norm (NemotronHBlock, MambaBlock)."""
    source = stream
    if g.dtype(stream) is not ctx.residual:
        source = g.tensor("input_cast", g.shape(stream), ctx.residual)
        g.op("input_cast", "copy", "norm", [stream], [source])
    if kind.mixer == "shared+mamba":
        from actcalc.layers.pytorch.shared import shared_block

        source = residual_add(
            g, "block_add", "attention", shared_block(g, ctx, kind, source), source, "block_sum"
        )
    normed = norm(g, ctx, "norm1", source)
    feed = kind.mixer == "none"
    branch = _feed(g, ctx, kind, normed) if feed else _attend(g, ctx, kind, normed)
    return _add(g, ctx, "ffn" if feed else "attention", branch, stream, "output")


def _cross(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Append a decoder's second attention, over the encoder's output, with its norm."""
    inner = Scoped(g, "cross_")
    post = ctx.model.norm_placement == "post"
    source = stream if post else norm(inner, ctx, "norm", stream)
    branch = attention(inner, ctx, kind, source, memory=encoder_output(g, ctx))
    summed = _add(inner, ctx, "attention", branch, stream, "middle")
    return norm(inner, ctx, "norm", summed) if post else _bounded(inner, ctx, summed, "middle")


def _bounded(g: GraphBuilder, ctx: Context, source: str, name: str) -> str:
    """Append T5Block's clamp to finite numbers, which runs in fp16 and keeps input and bounds."""
    if ctx.workload.precision != "fp16" or ctx.kernel("fp16_clamp") != "every_sum":
        return source
    bounds = g.tensor(f"{name}_bounds", (ONE * 2,), DType.FP32)
    out = g.tensor(f"{name}_bounded", g.shape(source), g.dtype(source))
    g.op(f"{name}_clamp", "activation", "norm", [source], [out, bounds], saves=[source, bounds])
    return out


def _clamped(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append the clamp that ends an encoder's layer in fp16 and keeps its input (MBart)."""
    rule = ctx.kernel("fp16_clamp")
    if ctx.workload.precision != "fp16" or rule != "encoder_layer" or kind.cross:
        return source
    out = g.tensor("output_clamped", g.shape(source), g.dtype(source))
    g.op("output_clamp", "activation", "norm", [source], [out], saves=[source])
    return out


def _parallel(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Attention and feed-forward of the same input, after one norm or one each."""
    first = norm(g, ctx, "norm1", stream)
    second = norm(g, ctx, "norm2", stream) if ctx.model.parallel == "two_norms" else first
    middle = _add(g, ctx, "attention", _attend(g, ctx, kind, first), stream, "middle")
    return _add(g, ctx, "ffn", _feed(g, ctx, kind, second), middle, "output")


def _attend(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    if kind.mixer in ("mamba", "shared+mamba"):
        from actcalc.layers.pytorch.mamba import mamba_mixer

        return mamba_mixer(g, ctx, source)
    if kind.mixer == "linear":
        from actcalc.layers.pytorch.linear_attention import linear_attention

        return linear_attention(g, ctx, source)
    if kind.mixer == "mamba+attention":
        return _beside(g, ctx, kind, source)
    source = gathered(g, ctx, "attention", "attention", source, ("attention",))
    if kind.keys == "taken":
        return borrowing_attention(g, ctx, kind, source)
    if ctx.model.compression:
        from actcalc.layers.pytorch.compressed import compressed_attention

        return compressed_attention(g, ctx, kind, source)
    if ctx.model.disentangled:
        from actcalc.layers.pytorch.disentangled import disentangled_attention

        return disentangled_attention(g, ctx, kind, source)
    if ctx.model.mla:
        return mla_attention(g, ctx, kind, source)
    return attention(g, ctx, kind, source)


def _beside(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    """Append a state-space mixer and attention of the same input, and their sum.

    Each reads a product of the input with a number of its own (FalconH1DecoderLayer), which keeps
    nothing but is a tensor apart.
    """
    from actcalc.layers.pytorch.mamba import mamba_mixer

    mixed = mamba_mixer(g, ctx, source)
    scaled = g.tensor("attention_in", g.shape(source), g.dtype(source))
    g.op("attention_in", "multiply", "attention", [source], [scaled], modules=("attention",))
    attended = attention(g, ctx, kind, scaled)
    return residual_add(g, "mixer_add", "attention", attended, mixed, "mixers_out")


def _feed(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str, stream: str = "") -> str:
    if kind.mlp == "moe" and ctx.model.moe and ctx.model.moe.beside_dense:
        return beside_dense(g, ctx, source, stream)
    if kind.mlp == "moe":
        return moe(g, ctx, source)
    if kind.mixer == "linear" and ctx.model.linear and ctx.model.linear.rule == "wkv":
        from actcalc.layers.pytorch.rwkv import channel_mix

        return channel_mix(g, ctx, source)
    source = gathered(g, ctx, "mlp", "ffn", source, ("mlp",))
    return feed_forward(g, ctx, source, sparse=kind.sparse)


def _scaled(g: GraphBuilder, ctx: Context, what: str, branch: str) -> str:
    """Append the branch's product with a learned vector, which keeps the branch (LayerScale)."""
    out = g.tensor(f"{what}_scaled", g.shape(branch), promoted(g.dtype(branch), ctx.residual))
    g.op(
        f"{what}_scale", "multiply", what, [branch], [out], saves=[branch],
        weights=[Weight(f"{what}_scale", (ctx.h,))],
    )  # fmt: skip
    return out


def _drops(ctx: Context, what: str) -> bool:
    """Whether a part of the layer ends in dropout."""
    rule = ctx.kernel("attention_output_dropout")
    if what != "attention":
        return ctx.hidden_dropout and rule != "alone"
    at = {"attention": ctx.attention_dropout, "none": False}
    return at.get(rule, ctx.hidden_dropout)


def _add(g: GraphBuilder, ctx: Context, what: str, branch: str, stream: str, out: str) -> str:
    """Append the branch's dropout and its addition to the stream, which keeps nothing."""
    if ctx.model.layer_scale:
        branch = _scaled(g, ctx, what, branch)
    if _drops(ctx, what):
        branch = dropout(g, f"{what}_dropout", what, branch)
    return residual_add(g, f"{what}_add", what, branch, stream, out)
