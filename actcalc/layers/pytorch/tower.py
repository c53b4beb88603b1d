"""A vision tower before a language model, as part of what its embedding does.

The tower is a model of its own: its layers are built as any other's, at its own sizes, and run in
the graph of the embedding, followed by the projector and by the tokens taking their places
(modeling_llava.py, modeling_gemma3.py). Its sizes are numbers there, for the symbols are the
language model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, Operand, product, symbol
from actcalc.layers.core.context import Context, sizes_of
from actcalc.layers.core.graph import DType, Graph, GraphBuilder, Op, Tensor, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.resize import op_at, shape_at
from actcalc.layers.pytorch.layer import layer_graph
from actcalc.layers.pytorch.linear import linear
from actcalc.specs import Model, Tower
from actcalc.specs.layer import LayerWord

GROUP = "tower"
PROJECTOR = "projector"


def images_of(ctx: Context, tower: Tower) -> int:
    """Images of one sequence; ``SpecError`` where the image tokens are no whole images."""
    tokens = ctx.workload.image_tokens
    if tokens % tower.tokens or tokens > ctx.workload.seq:
        raise SpecError(
            f"image_tokens {tokens} of a sequence of {ctx.workload.seq} are no whole images of "
            f"{tower.tokens} tokens ({ctx.model.name})",
            f"use a multiple of {tower.tokens}, at most seq"
            + (", or --set tower.tokens=N, the square of a number" if tower.packed else ""),
        )
    return tokens // tower.tokens


def tower_model(tower: Tower) -> Model:
    """The tower as a model: a pre-norm vision transformer without a head."""
    windowed = bool(tower.window) and tower.layers != len(tower.whole_layers)
    kinds: tuple[LayerWord, ...] = tuple(
        "full" if index in tower.whole_layers else "sliding" for index in range(tower.layers)
    )
    return Model(
        name="vision tower", family=tower.family, layers=tower.layers, hidden=tower.hidden,
        heads=tower.heads, ffn=tower.ffn, patches=tower.patches, max_positions=tower.sequence,
        activation=tower.activation, causal=False, tied=False, head="none",
        norm=tower.norm, gated=tower.gated, packed_qkv=tower.packed, qkv_bias=tower.qkv_bias,
        qk_norm="full" if tower.qk_norm else "none", layer_scale=tower.layer_scale,
        position="rotary" if tower.packed or tower.unfolds else "learned",
        window=tower.window**2, attention_pattern=kinds if windowed else (),
    )  # fmt: skip


def with_images(g: GraphBuilder, ctx: Context, tower: Tower, embedded: str) -> str:
    """Append tower, projector and the placing of image tokens among ``embedded``.

    Without images in the run its weights are there all the same, and get no gradient.
    """
    images = images_of(ctx, tower)
    inner = _inside(ctx, tower, max(images, 1))
    copy = _Copy(g, ctx, inner, max(images, 1), runs=images > 0)
    stream = copy.patches(tower)
    if tower.pre_norm:
        stream = copy.norm("pre_norm", stream)
    if tower.window:
        stream = copy.reordered(tower, stream, "by_window")
    graphs = {kind: layer_graph(inner, kind) for kind, _ in inner.model.runs()}
    for index in range(tower.layers):
        read = index < tower.layers - tower.unread
        graph = graphs[inner.model.kind(index)]
        out = copy.layer(graph, f"tower{index}_", stream, read=read)
        stream = out if read else stream
        if index in tower.deep_layers:
            merged(copy, tower, stream, f"deep{index}_", shuffled=True)
    if tower.packed:
        features = merged(copy, tower, stream, "")
        if tower.window:
            features = copy.reordered(tower, features, "by_image")
        return _placed(g, ctx, embedded, features) if images else embedded
    # LLaVA reads a layer's output, before the last norm.
    if tower.last_norm:
        read = tower.projector != "mlp"
        stream = copy.norm("post_norm", stream, read=read)
    features = _project(copy, tower, stream)
    return _placed(g, ctx, embedded, features) if images else embedded


def _placed(g: GraphBuilder, ctx: Context, embedded: str, features: str) -> str:
    """Append the placing of an image's tokens, which keeps where they go."""
    out = g.tensor("with_images", g.shape(embedded), ctx.residual)
    mask = g.tensor("image_mask", (ctx.b, ctx.s, ONE), DType.BOOL)
    g.op("place_images", "copy", "embedding", [embedded, features], [out, mask], saves=[mask])
    return out


def _inside(ctx: Context, tower: Tower, images: int) -> Context:
    work = ctx.workload
    workload = work.model_copy(
        update={
            "seq": tower.sequence,
            "micro_batch": work.micro_batch * images,
            "padding_mask": False,
            "image_tokens": 0,
        }
    )
    return Context(
        tower_model(tower), ctx.layout, workload, ctx.framework, narrow_stream=tower.packed
    )


class _Copy:
    """Puts ops of the tower's graphs into the embedding's, at the tower's sizes."""

    def __init__(
        self, g: GraphBuilder, ctx: Context, inner: Context, images: int, *, runs: bool
    ) -> None:
        self.g, self.ctx, self.inner, self.runs = g, ctx, inner, runs
        self.shared: set[str] = set()
        sizes = sizes_of(inner.model, inner.layout, inner.workload)
        self.values: Mapping[str, Operand] = {**sizes, "b": symbol("b") * images, "t": ONE}

    def shape(self, dims: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Dimensions at the tower's sizes."""
        return shape_at(dims, self.values)

    def patches(self, tower: Tower) -> str:
        """Append the convolution of patches; pixels need no gradient."""
        inner, hidden = self.inner, ONE * tower.hidden
        rows = self.shape((inner.b, ONE * tower.grid))
        pixels = self.g.tensor("pixels", (*rows, ONE * tower.patches), inner.residual)
        whole = self.shape((inner.b, inner.s, inner.h))
        out = self.g.tensor("tower_embedded", whole, inner.stream)
        weights = [Weight("patch_embedding.weight", (hidden, ONE * tower.patches))]
        made, kept = [pixels, out], list[str]()
        if tower.packed:
            weights += self._interpolated(tower, rows, kept)
        else:
            weights.append(Weight("position_embedding", (ONE * tower.sequence, hidden)))
            if tower.class_token:
                weights.append(Weight("class_token", (hidden,)))
            if not tower.pre_norm:
                weights.append(Weight("patch_embedding.bias", (hidden,)))
        if inner.autocast:
            kept.append(self.g.tensor("pixels_cast", self.g.shape(pixels), inner.act))
            shape = (hidden, ONE * tower.patches)
            cast = self.g.tensor("patch_embedding_weight", shape, inner.act)
            # A convolution keeps its weight even for an input without gradient, a product does not.
            (made if tower.unfolds else kept).append(cast)
        elif tower.unfolds:
            kept.append(pixels)
        outputs = tuple(dict.fromkeys((*made, *kept)))
        flops = product((*rows, hidden, ONE * tower.patches)) * 2
        self._append(
            Op("patch_embedding", "linear", GROUP, (), outputs, tuple(kept), flops, flops,
               tuple(weights)),
            read=True,
        )  # fmt: skip
        return out

    def _interpolated(self, tower: Tower, rows: tuple[Expr, ...], kept: list[str]) -> list[Weight]:
        """A table of positions read at four entries for each patch, which are kept with their
        weights (Qwen3VLVisionModel); none without a table."""
        if not tower.positions:
            return []
        hidden = ONE * tower.hidden
        kept += [
            self.g.tensor("position_ids", (*rows, ONE * 4), DType.INT64),
            self.g.tensor("position_weights", (*rows, ONE * 4), DType.FP32),
        ]
        return [
            Weight("patch_embedding.bias", (hidden,)),
            Weight("position_embedding", (ONE * tower.positions, hidden)),
        ]

    def norm(self, name: str, stream: str, *, read: bool = True) -> str:
        """Append a norm of the tower outside its layers."""
        builder = GraphBuilder(name)
        inner = self.inner
        source = builder.tensor("input", (inner.b, inner.s, inner.h), inner.stream)
        # The norms around the layers are LayerNorms, whatever those inside are.
        out = norm(builder, inner, name, source, kind="layernorm", group=GROUP, modules=())
        made = self.layer(builder.build(source, out), "tower_", stream, read=read)
        return made if read else stream

    def layer(self, graph: Graph, prefix: str, stream: str, *, read: bool) -> str:
        """Append a graph of the tower that reads ``stream``; return its output."""
        names = {graph.input: stream}
        for name, tensor in graph.tensors.items():
            if name in graph.shared:
                names[name] = self._once(tensor)
            elif name != graph.input:
                names[name] = self.g.tensor(
                    f"{prefix}{name}", self.shape(tensor.shape), tensor.dtype
                )
        for op in graph.ops:

            def named(listed: tuple[str, ...]) -> tuple[str, ...]:
                return tuple(names[name] for name in listed)

            self._append(
                replace(
                    op_at(op, self.values), name=f"{prefix}{op.name}", group=GROUP,
                    modules=frozenset(), inputs=named(op.inputs), outputs=named(op.outputs),
                    saves=named(op.saves),
                ),
                read=read,
            )  # fmt: skip
        return names[graph.output]

    def reordered(self, tower: Tower, stream: str, name: str) -> str:
        """Append a new order of an image's squares of patches, which keeps its index
        (Qwen2_5_VisionTransformerPretrainedModel)."""
        out = self.g.tensor(f"tower_{name}", self.g.shape(stream), self.g.dtype(stream))
        shape = self.shape((self.inner.b, ONE * tower.tokens))
        index = self.g.tensor(f"tower_{name}_index", shape, DType.INT64)
        op = Op(f"tower_{name}", "copy", GROUP, (stream,), (out, index), (index,))
        self._append(op, read=True)
        return out

    def _once(self, tensor: Tensor) -> str:
        """What all layers share (tables of sines): made before the first of them."""
        name = f"tower_{tensor.name}"
        if name not in self.shared:
            self.shared.add(name)
            self.g.tensor(name, self.shape(tensor.shape), tensor.dtype)
            self._append(Op(name, "rotary", GROUP, (), (name,)), read=True)
        return name

    def _append(self, op: Op, *, read: bool) -> None:
        """Add an op; without images, or read by nobody, it keeps nothing and gets no gradient."""
        if not self.runs:
            op = replace(op, flops=Expr.of(0), forward_scratch=Expr.of(0))
        if not (self.runs and read):
            op = still(op)
        self.g.append(op)


def still(op: Op) -> Op:
    """The op without a backward pass: it keeps nothing, and its weights stay as they are."""
    return replace(
        op,
        saves=(),
        backward_flops=Expr.of(0),
        backward_scratch=Expr.of(0),
        weights=tuple(replace(weight, frozen=True) for weight in op.weights),
    )


def merged(copy: _Copy, tower: Tower, stream: str, prefix: str, *, shuffled: bool = False) -> str:
    """Append Qwen-VL's merger of squares of patches; return their tokens.

    The norm is of patches, or (``shuffled``) of whole squares (Qwen3VLVisionPatchMerger).
    """
    g, ctx, inner = copy.g, copy.ctx, copy.inner
    before = len(g.ops)
    area = tower.merge**2
    width = ONE * (tower.hidden * area)
    rows = copy.shape((inner.b, inner.s / area))
    builder = GraphBuilder("merger")
    source = builder.tensor("input", (inner.b, inner.s, inner.h), inner.stream)
    shape = (inner.b, inner.s / area, inner.h * area) if shuffled else None
    out = norm(builder, inner, "norm", source, shape=shape, group=GROUP, modules=())
    normed = copy.layer(builder.build(source, out), f"{prefix}merger_", stream, read=True)
    wide = linear(
        g, ctx, f"{prefix}merger_in", PROJECTOR, normed, inside=width, outside=width, bias=True,
        rows=rows,
    )  # fmt: skip
    active = g.tensor(f"{prefix}merger_active", (*rows, width), g.dtype(wide))
    g.op(f"{prefix}merger_activation", "activation", PROJECTOR, [wide], [active], saves=[wide])
    features = linear(
        g, ctx, f"{prefix}merger_out", PROJECTOR, active, inside=width, outside=ctx.h, bias=True,
        rows=rows,
    )  # fmt: skip
    if not copy.runs:
        g.ops[before:] = [still(replace(op, flops=Expr.of(0))) for op in g.ops[before:]]
    return features


def _project(copy: _Copy, tower: Tower, stream: str) -> str:
    """Append the projector; return the image's tokens at the language model's width."""
    g, ctx = copy.g, copy.ctx
    hidden = ONE * tower.hidden
    before = len(g.ops)
    rows = (*copy.shape((copy.inner.b,)), ONE * tower.tokens)
    if tower.projector == "shuffled":
        out = _shuffled(copy, tower, stream, rows)
    elif tower.projector == "three":
        out = _three(copy, tower, stream, rows)
    elif tower.projector == "mlp":
        if tower.class_token and copy.inner.workload.micro_batch > 1:
            # Without the class token the patches of several images are no view.
            patches = g.tensor("tower_patches", (*rows, hidden), g.dtype(stream))
            g.op("drop_class_token", "copy", PROJECTOR, [stream], [patches])
            stream = patches
        narrow = linear(
            g, ctx, "project_in", PROJECTOR, stream, inside=hidden, outside=ctx.h, bias=True,
            rows=rows,
        )  # fmt: skip
        active = g.tensor("project_active", (*rows, ctx.h), g.dtype(narrow))
        g.op("project_activation", "activation", PROJECTOR, [narrow], [active], saves=[narrow])
        out = linear(
            g, ctx, "project_out", PROJECTOR, active, inside=ctx.h, outside=ctx.h, bias=True,
            rows=rows,
        )  # fmt: skip
    else:
        square = g.tensor("square", g.shape(stream), g.dtype(stream))
        pooled = g.tensor("pooled", (*rows, hidden), g.dtype(stream))
        g.op("pool", "copy", PROJECTOR, [stream], [square, pooled], saves=[square])
        normed = norm(g, ctx, "project_norm", pooled, group=PROJECTOR, modules=())
        out = linear(g, ctx, "project_out", PROJECTOR, normed, inside=hidden, outside=ctx.h)
    if not copy.runs:
        g.ops[before:] = [still(replace(op, flops=Expr.of(0))) for op in g.ops[before:]]
    return out


def _shuffled(copy: _Copy, tower: Tower, stream: str, rows: tuple[Expr, ...]) -> str:
    """Append InternVL's projector: squares of patches, copied side by side, are normed first."""
    g, ctx = copy.g, copy.ctx
    squares = _squares(g, tower, stream, rows, PROJECTOR)
    width = g.shape(squares)[-1]
    normed = norm(
        g, copy.inner, "project_norm", squares, kind="layernorm", group=PROJECTOR, modules=()
    )
    narrow = linear(g, ctx, "project_in", PROJECTOR, normed, inside=width, outside=ctx.h, bias=True)
    active = g.tensor("project_active", (*rows, ctx.h), g.dtype(narrow))
    g.op("project_activation", "activation", PROJECTOR, [narrow], [active], saves=[narrow])
    return linear(g, ctx, "project_out", PROJECTOR, active, inside=ctx.h, outside=ctx.h, bias=True)


def _squares(g: GraphBuilder, tower: Tower, stream: str, rows: tuple[Expr, ...], group: str) -> str:
    """Append the copy of squares of patches that lays them side by side (pixel_shuffle)."""
    shape = (*rows, ONE * (tower.hidden * tower.merge**2))
    squares = g.tensor("tower_squares", shape, g.dtype(stream))
    g.op("shuffle", "copy", group, [stream], [squares])
    return squares


def _three(copy: _Copy, tower: Tower, stream: str, rows: tuple[Expr, ...]) -> str:
    """Append Llama 4's adapter, which is the tower's (Llama4VisionPixelShuffleMLP), and its
    projector of one product (Llama4MultiModalProjector)."""
    g, ctx = copy.g, copy.ctx
    out = _squares(g, tower, stream, rows, GROUP)
    width = ONE * tower.projector_width
    for name in ("adapt_in", "adapt_out"):
        wide = linear(g, ctx, name, GROUP, out, inside=g.shape(out)[-1], outside=width)
        out = g.tensor(f"{name}_active", (*rows, width), g.dtype(wide))
        g.op(f"{name}_activation", "activation", GROUP, [wide], [out], saves=[wide])
    return linear(g, ctx, "project_out", PROJECTOR, out, inside=width, outside=ctx.h)
