"""One layer of transformers' modelling code: norms, attention, feed-forward, residuals."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, Graph, GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.core.ops import dropout, residual_add
from actcalc.layers.core.scoped import Scoped
from actcalc.layers.pytorch.attention import attention
from actcalc.layers.pytorch.mla import mla_attention
from actcalc.layers.pytorch.mlp import feed_forward
from actcalc.layers.pytorch.moe import moe
from actcalc.layers.pytorch.parallel import gathered
from actcalc.layers.pytorch.relative import relative_attention
from actcalc.specs import LayerKind


def layer_graph(ctx: Context, kind: LayerKind) -> Graph:
    """The graph of one layer of ``kind``."""
    g = GraphBuilder(kind.label)
    g.tensor("input", (ctx.b, ctx.s_region, ctx.h), ctx.stream)
    return g.build("input", _body(g, ctx, kind, "input"))


def _body(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    if ctx.workload.decoder_seq:
        raise SpecError(
            f"framework {ctx.framework} models a decoder as long as its encoder, "
            f"not decoder_seq {ctx.workload.decoder_seq}",
            "use --framework megatron, or drop decoder_seq",
        )
    if ctx.model.position == "relative":
        return _relative(g, ctx, kind, stream)
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
        summed = _add(g, ctx, "ffn", _feed(g, ctx, kind, middle), middle, "ffn_sum")
        return norm(g, ctx, "norm2", summed, out="output")
    before, after = placement in ("pre", "sandwich"), placement in ("sandwich", "post_sublayer")
    first = norm(g, ctx, "norm1", stream) if before else stream
    branch = _attend(g, ctx, kind, first)
    branch = norm(g, ctx, "norm1_post", branch) if after else branch
    middle = _add(g, ctx, "attention", branch, stream, "middle")
    second = norm(g, ctx, "norm2", middle) if before else middle
    branch = _feed(g, ctx, kind, second)
    branch = norm(g, ctx, "norm2_post", branch) if after else branch
    return _add(g, ctx, "ffn", branch, middle, "output")


def _half(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """A layer of one part: a mixer or a feed-forward with its norm (NemotronHBlock, MambaBlock)."""
    source = stream
    if g.dtype(stream) is not ctx.residual:
        source = g.tensor("input_cast", g.shape(stream), ctx.residual)
        g.op("input_cast", "copy", "norm", [stream], [source])
    normed = norm(g, ctx, "norm1", source)
    feed = kind.mixer == "none"
    branch = _feed(g, ctx, kind, normed) if feed else _attend(g, ctx, kind, normed)
    return _add(g, ctx, "ffn" if feed else "attention", branch, stream, "output")


def _relative(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """T5's layer: a decoder's has a second attention, over the encoder's output (T5Block)."""
    branch = relative_attention(g, ctx, kind, norm(g, ctx, "norm1", stream))
    middle = _bounded(g, ctx, _add(g, ctx, "attention", branch, stream, "middle"), "middle")
    if kind.cross:
        inner = Scoped(g, "cross_")
        first = norm(inner, ctx, "norm", middle)
        branch = relative_attention(inner, ctx, kind, first, cross=True)
        summed = _add(inner, ctx, "attention", branch, middle, "middle")
        middle = _bounded(inner, ctx, summed, "middle")
    branch = feed_forward(g, ctx, norm(g, ctx, "norm2", middle))
    return _bounded(g, ctx, _add(g, ctx, "ffn", branch, middle, "output"), "output")


def _bounded(g: GraphBuilder, ctx: Context, source: str, name: str) -> str:
    """Append T5Block's clamp to finite numbers, which runs in fp16 and keeps input and bounds."""
    if ctx.workload.precision != "fp16":
        return source
    bounds = g.tensor(f"{name}_bounds", (ONE * 2,), DType.FP32)
    out = g.tensor(f"{name}_bounded", g.shape(source), g.dtype(source))
    g.op(f"{name}_clamp", "activation", "norm", [source], [out, bounds], saves=[source, bounds])
    return out


def _parallel(g: GraphBuilder, ctx: Context, kind: LayerKind, stream: str) -> str:
    """Attention and feed-forward of the same input, after one norm or one each."""
    first = norm(g, ctx, "norm1", stream)
    second = norm(g, ctx, "norm2", stream) if ctx.model.parallel == "two_norms" else first
    middle = _add(g, ctx, "attention", _attend(g, ctx, kind, first), stream, "middle")
    return _add(g, ctx, "ffn", _feed(g, ctx, kind, second), middle, "output")


def _attend(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    if kind.mixer == "mamba":
        from actcalc.layers.pytorch.mamba import mamba_mixer

        return mamba_mixer(g, ctx, source)
    if kind.mixer == "linear":
        from actcalc.layers.pytorch.linear_attention import linear_attention

        return linear_attention(g, ctx, source)
    source = gathered(g, ctx, "attention", "attention", source, ("attention",))
    if ctx.model.mla:
        return mla_attention(g, ctx, kind, source)
    return attention(g, ctx, kind, source)


def _feed(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> str:
    if kind.mlp == "moe":
        return moe(g, ctx, source)
    return feed_forward(g, ctx, gathered(g, ctx, "mlp", "ffn", source, ("mlp",)))


def _add(g: GraphBuilder, ctx: Context, what: str, branch: str, stream: str, out: str) -> str:
    """Append the branch's dropout and its addition to the stream, which keeps nothing."""
    spared = what == "attention" and ctx.kernel("attention_output_dropout") == "none"
    if ctx.hidden_dropout and not spared:
        branch = dropout(g, f"{what}_dropout", what, branch)
    return residual_add(g, f"{what}_add", what, branch, stream, out)
