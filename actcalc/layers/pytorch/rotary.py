"""Rotary position as transformers' modelling code applies it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import DType, GraphBuilder
from actcalc.layers.core.ops import promoted
from actcalc.layers.pytorch.heads import GROUP, MODULE, Heads, Order, kept_name
from actcalc.specs import LayerKind


@dataclass(frozen=True, slots=True)
class Rotation:
    """What one implementation of rotary position keeps, and how its result lies in memory.

    ``table`` is the tables' element type (None: that of the residual stream), ``tables`` how many
    are saved and ``share`` the part of the rotated width they span. ``shared`` tables are computed
    once for all layers, the others anew in each layer (and for queries and keys apart, if
    ``apart``). ``patches`` leaves out the tokens before an image's. ``order`` is that of the result
    (None: the input's). ``cast`` returns to the input's type.
    """

    table: DType | None = None
    tables: int = 2
    share: int = 1
    shared: bool = True
    apart: bool = False
    order: Order | None = None
    partial_order: Order | None = "head"
    cast: bool = False
    components: int = 1
    patches: bool = False


ROTARY_KERNELS: dict[str, Rotation] = {
    # x * cos + rotate_half(x) * sin: x keeps its strides; what is not rotated is concatenated,
    # which lays the result out afresh.
    "half": Rotation(),
    # The same, of a buffer's rows that are cast in every layer.
    "half_layer": Rotation(shared=False),
    # As the first, concatenated with what is not rotated even if that is nothing.
    "half_cat": Rotation(order="head"),
    # Tables and products in fp32, cast back.
    "half_fp32": Rotation(table=DType.FP32, cast=True),
    # Products in fp32, cast back.
    "half_upcast": Rotation(cast=True),
    # Halves rotated apart and concatenated; the tables are half as wide.
    "half_tables": Rotation(share=2, order="head"),
    # Even and odd entries; cosine and sine repeated for each in every layer, q and k apart,
    # before heads and sequence are transposed.
    "interleaved": Rotation(shared=False, apart=True, order="token", partial_order="token"),
    "interleaved_fp32": Rotation(
        table=DType.FP32, shared=False, apart=True, order="token", partial_order="token", cast=True
    ),
    # Cosine and sine repeated for even and odd entries in every layer.
    "interleaved_layer": Rotation(shared=False),
    "interleaved_layer_fp32": Rotation(table=DType.FP32, shared=False, cast=True),
    # Patches alone, concatenated with the tokens before them.
    "half_patches": Rotation(order="head", patches=True),
    # Pairs as complex numbers, of a table that is a buffer of the model.
    "complex_buffer": Rotation(table=DType.FP32, tables=0, cast=True),
    # Pairs as complex numbers in fp32, before heads and sequence are transposed.
    "complex": Rotation(table=DType.FP32, tables=1, share=2, components=2, cast=True),
}


def _partial(ctx: Context) -> bool:
    return ctx.model.rotary_dim not in (0, ctx.model.head_dim)


def rotary_width(ctx: Context) -> Expr:
    """The width of a head that is rotated."""
    if ctx.model.mla or _partial(ctx):
        return symbol("p")
    return ctx.d


def rotation(ctx: Context) -> Rotation:
    """The framework's rotary position for the model's family."""
    return ROTARY_KERNELS[ctx.kernel("rotary")]


def tables(
    g: GraphBuilder, ctx: Context, kind: LayerKind, rule: Rotation, name: str
) -> tuple[list[str], list[str]]:
    """Declare the tables; return all of their names, and those that the layer makes itself.

    One row serves all sequences, for which the model makes position ids once; ids of three
    dimensions (time, height, width) have a row for each. Where layers with a
    window rotate by another base there are tables for each kind of layer.
    """
    width = rotary_width(ctx) / rule.share
    rows = ctx.b if ctx.kernel("rotary_rows") == "batch" else ONE
    length = ONE * (ctx.length - ctx.model.prefix_tokens) if rule.patches else ctx.s
    shape = (rows, length, width, *((ONE * 2,) if rule.components == 2 else ()))
    dtype = rule.table or ctx.residual
    names = {2: ("cos", "sin"), 1: ("complex",), 0: ()}[rule.tables]
    own = ctx.kernel("rotary_tables") == "per_kind" and kind.attention != "full"
    suffix = f"_{kind.attention}" if own else ""
    if rule.shared:
        return [g.shared(f"rotary_{what}{suffix}", shape, dtype) for what in names], []
    prefix = f"{name}_" if rule.apart else ""
    wanted = [f"{prefix}rotary_{what}" for what in names]
    if not rule.apart and name == "k":
        return wanted, []
    made = [g.tensor(what, shape, dtype) for what in wanted]
    return made, made


def rotate(
    g: GraphBuilder, ctx: Context, kind: LayerKind, q: Heads, k: Heads
) -> tuple[Heads, Heads]:
    """Append the rotation of queries and keys: it is linear, so that the tables alone are kept."""
    return rotate_one(g, ctx, kind, q, "q"), rotate_one(g, ctx, kind, k, "k")


def rotate_one(g: GraphBuilder, ctx: Context, kind: LayerKind, x: Heads, name: str) -> Heads:
    """Append the rotation of queries or of keys, by the name of which (``q``, ``k``)."""
    rule = rotation(ctx)
    kept, made = tables(g, ctx, kind, rule, name)
    dtype = g.dtype(x.storage)
    if not rule.cast:
        dtype = promoted(dtype, g.dtype(kept[0]))
    order = rule.partial_order if _partial(ctx) else rule.order
    turned = replace(x, sliced=False, order=order or x.order)
    made_as = kept_name(kind, name) if name == "k" else name
    out = g.tensor(made_as, turned.shape(ctx), dtype)
    inputs = [x.storage, *(table for table in kept if table not in made)]
    g.op(
        f"{name}_rotate", "rotary", GROUP, inputs, [out, *made],
        saves=kept, modules=MODULE, kernel=ctx.kernel("rotary"),
    )  # fmt: skip
    return replace(turned, storage=out)
