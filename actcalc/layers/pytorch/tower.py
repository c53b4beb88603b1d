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
from actcalc.layers.core.graph import DType, Graph, GraphBuilder, Op, Weight
from actcalc.layers.core.norm import norm
from actcalc.layers.core.resize import op_at, shape_at
from actcalc.layers.pytorch.layer import layer_graph
from actcalc.layers.pytorch.linear import linear
from actcalc.specs import Model, Tower

GROUP = "tower"
PROJECTOR = "projector"


def images_of(ctx: Context, tower: Tower) -> int:
    """Images of one sequence; ``SpecError`` where the image tokens are no whole images."""
    tokens = ctx.workload.image_tokens
    if tokens % tower.tokens or tokens > ctx.workload.seq:
        raise SpecError(
            f"image_tokens {tokens} of a sequence of {ctx.workload.seq} are no whole images of "
            f"{tower.tokens} tokens ({ctx.model.name})",
            f"use a multiple of {tower.tokens}, at most seq",
        )
    return tokens // tower.tokens


def tower_model(tower: Tower) -> Model:
    """The tower as a model: a pre-norm vision transformer without a head."""
    return Model(
        name="vision tower", family=tower.family, layers=tower.layers, hidden=tower.hidden,
        heads=tower.heads, ffn=tower.ffn, patches=tower.patches, max_positions=tower.sequence,
        activation=tower.activation, causal=False, tied=False, head="none",
    )  # fmt: skip


def with_images(g: GraphBuilder, ctx: Context, tower: Tower, embedded: str) -> str:
    """Append tower, projector and the placing of image tokens among ``embedded``.

    Without images in the run its weights are there all the same, and get no gradient.
    """
    images = images_of(ctx, tower)
    inner = _inside(ctx, tower, max(images, 1))
    copy = _Copy(g, ctx, inner, max(images, 1), runs=images > 0)
    stream = copy.patches(tower)
    if tower.class_token:
        stream = copy.norm("pre_norm", stream)
    graph = layer_graph(inner, inner.model.kind(0))
    for index in range(tower.layers):
        read = index < tower.layers - tower.unread
        out = copy.layer(graph, f"tower{index}_", stream, read=read)
        stream = out if read else stream
    # LLaVA reads a layer's output, before the last norm.
    stream = copy.norm("post_norm", stream, read=tower.projector == "pooled")
    features = _project(copy, tower, stream)
    if not images:
        return embedded
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
    return Context(tower_model(tower), ctx.layout, workload, ctx.framework)


class _Copy:
    """Puts ops of the tower's graphs into the embedding's, at the tower's sizes."""

    def __init__(
        self, g: GraphBuilder, ctx: Context, inner: Context, images: int, *, runs: bool
    ) -> None:
        self.g, self.ctx, self.inner, self.runs = g, ctx, inner, runs
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
        out = self.g.tensor("tower_embedded", whole, inner.residual)
        weights = [
            Weight("patch_embedding.weight", (hidden, ONE * tower.patches)),
            Weight("position_embedding", (ONE * tower.sequence, hidden)),
            Weight("class_token" if tower.class_token else "patch_embedding.bias", (hidden,)),
        ]
        kept = []
        if inner.autocast:
            kept.append(self.g.tensor("pixels_cast", self.g.shape(pixels), inner.act))
            shape = (hidden, ONE * tower.patches)
            kept.append(self.g.tensor("patch_embedding_weight", shape, inner.act))
        flops = product((*rows, hidden, ONE * tower.patches)) * 2
        self._append(
            Op("patch_embedding", "linear", GROUP, (), (pixels, out, *kept), tuple(kept), flops,
               flops, tuple(weights)),
            read=True,
        )  # fmt: skip
        return out

    def norm(self, name: str, stream: str, *, read: bool = True) -> str:
        """Append a norm of the tower outside its layers."""
        builder = GraphBuilder(name)
        inner = self.inner
        source = builder.tensor("input", (inner.b, inner.s, inner.h), inner.residual)
        out = norm(builder, inner, name, source, group=GROUP, modules=())
        made = self.layer(builder.build(source, out), "tower_", stream, read=read)
        return made if read else stream

    def layer(self, graph: Graph, prefix: str, stream: str, *, read: bool) -> str:
        """Append a graph of the tower that reads ``stream``; return its output."""
        names = {graph.input: stream}
        for name, tensor in graph.tensors.items():
            if name != graph.input:
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


def _project(copy: _Copy, tower: Tower, stream: str) -> str:
    """Append the projector; return the image's tokens at the language model's width."""
    g, ctx = copy.g, copy.ctx
    hidden = ONE * tower.hidden
    before = len(g.ops)
    rows = (*copy.shape((copy.inner.b,)), ONE * tower.tokens)
    if tower.projector == "mlp":
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
