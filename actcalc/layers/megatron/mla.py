"""Multi-head latent attention (DeepSeek-V2/V3): low-rank queries, keys and values.

Queries (unless full-rank) and the joint keys and values are projected down, normalised and
projected up; a part of each query head and one key part shared by all heads are rotated.

Recompute module ``mla_up_proj``: up-projections and rotation; the norms before them belong to it
only where the framework fuses norm and projection (Megatron-Core multi_latent_attention.py).
"""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import Expr, symbol
from actcalc.layers.core.context import Context
from actcalc.layers.core.graph import Collective, Comm, DType, GraphBuilder
from actcalc.layers.core.norm import norm
from actcalc.layers.megatron.attention import keys_of, rotary_tables
from actcalc.layers.megatron.core import GROUP, CoreInput, core
from actcalc.layers.megatron.linear import linear
from actcalc.specs import LayerKind, Mla

MODULE = ("attention",)
_UP = ("attention", "mla_up_proj")


def _mla(ctx: Context) -> Mla:
    if ctx.model.mla is None:
        raise SpecError(f"{ctx.model.name} has no latent attention", "describe mla")
    return ctx.model.mla


def _down(
    g: GraphBuilder, ctx: Context, name: str, source: str, width: Expr, *, bias: bool = False
) -> str:
    """Append a projection to ``width``; return its output's storage.

    ``duplicated``: every rank holds the whole weight and projects its own tokens.
    ``column_gathered``: the weight is split over the tensor-parallel group and the output gathered
    in full on every rank (Megatron-Core's local spec, ``ColumnParallelLinear`` followed by
    ``gather_from_tensor_model_parallel_region``).
    """
    rows = ctx.s_region * ctx.b
    if ctx.kernel("mla_down") == "duplicated" or not ctx.tp:
        out = g.tensor(f"{name}_out", (ctx.s_region, ctx.b, width), ctx.act)
        linear(
            g, ctx, name, GROUP, source, [out], width_in=ctx.h, width_out=width, split="none",
            bias=bias, modules=MODULE, tokens=rows,
        )  # fmt: skip
        return out
    part = g.tensor(f"{name}_part", (ctx.s, ctx.b, width / ctx.t), ctx.act)
    linear(
        g, ctx, name, GROUP, source, [part], width_in=ctx.h, width_out=width / ctx.t,
        split="column", bias=bias, modules=MODULE,
    )  # fmt: skip
    out = g.tensor(f"{name}_out", (ctx.s, ctx.b, width), ctx.act)
    message = ctx.tokens * width * ctx.act.itemsize
    g.op(
        f"{name}_gather", "gather", GROUP, [part], [out],
        comm=[Comm(Collective.ALL_GATHER, "tp", message)], modules=MODULE,
    )  # fmt: skip
    return out


def mla_attention(g: GraphBuilder, ctx: Context, kind: LayerKind, source: str) -> tuple[str, Expr]:
    """Append latent attention of ``source``; return the context and its width on one rank."""
    mla = _mla(ctx)
    fused_norm = ctx.kernel("norm_fusion") == "fused"
    norm_modules = _UP if fused_norm else MODULE
    gathered = ctx.kernel("mla_down") == "column_gathered" and ctx.tp
    rank, joint, rope = symbol("q"), symbol("n"), symbol("p")
    nope, value = symbol("d"), symbol("g")
    qk = nope + rope
    region = (ctx.s_region, ctx.b)
    queries = source
    if mla.q_lora:
        down = _down(g, ctx, "q_down", source, rank)
        queries = norm(
            g, ctx, "q_norm", down, out="q_compressed", group=GROUP, modules=norm_modules,
            shape=(*region, rank),
        )  # fmt: skip
    packed = _down(g, ctx, "kv_down", source, joint + rope)
    compressed = packed
    if gathered and ctx.layout.sp:
        # The rank's slice of the keys and values is not contiguous, so it is copied; the
        # query's slice is, and keeps the whole gathered tensor alive.
        compressed = g.tensor("kv_scattered", (*region, joint), ctx.act)
        g.op("kv_scatter", "copy", GROUP, [packed], [compressed], modules=MODULE)
    latent = norm(
        g, ctx, "kv_norm", compressed, out="kv_compressed", group=GROUP, modules=norm_modules,
        shape=(*region, joint),
    )  # fmt: skip
    key_part = packed
    if not gathered and ctx.layout.sp:
        key_part = g.tensor("k_position_gathered", (ctx.s, ctx.b, rope), ctx.act)
        message = ctx.tokens * rope * ctx.act.itemsize
        g.op(
            "k_position_gather", "gather", GROUP, [packed], [key_part],
            comm=[Comm(Collective.ALL_GATHER, "tp", message)],
            backward_comm=[Comm(Collective.REDUCE_SCATTER, "tp", message)], modules=MODULE,
        )  # fmt: skip
    q_raw = g.tensor("q_up_out", (ctx.s, ctx.b, ctx.heads * qk), ctx.act)
    _up(g, ctx, "q_up", queries, q_raw, rank if mla.q_lora else ctx.h, ctx.heads, nope, rope)
    kv_raw = g.tensor("kv_up_out", (ctx.s, ctx.b, ctx.heads * (nope + value)), ctx.act)
    _up(g, ctx, "kv_up", latent, kv_raw, joint, ctx.heads, nope, value)
    q, k, v = _position(g, ctx, q_raw, kv_raw, key_part, kind)
    out_width = ctx.heads * value
    context = core(
        g,
        ctx,
        CoreInput(
            q, k, v, ctx.heads * qk, ctx.heads * qk, out_width, out_width, keys_of(ctx, kind),
            equal_dims=mla.qk_dim == mla.v_dim, causal=ctx.model.causal,
        ),
    )  # fmt: skip
    return context, out_width


def _up(
    g: GraphBuilder,
    ctx: Context,
    name: str,
    source: str,
    out: str,
    width_in: Expr,
    heads: Expr,
    first: Expr,
    second: Expr,
) -> None:
    """Append an up-projection to ``heads`` heads of ``first`` + ``second``, column-parallel.

    The parts are two weights in name only: sums are written out so that formulas stay exact.
    """
    linear(
        g, ctx, name, GROUP, source, [out], width_in=width_in, width_out=heads * (first + second),
        split="column", modules=_UP,
    )  # fmt: skip


def _position(
    g: GraphBuilder, ctx: Context, q_raw: str, kv_raw: str, key_part: str, kind: LayerKind
) -> tuple[str, str, str]:
    """Append rotation of the position parts and the copies that assemble q, k and v.

    Unfused, the query part and the key part keep a cosine and a sine table each.
    """
    rope = symbol("p")
    fused = ctx.kernel("rotary") == "fused" or ctx.workload.kernels.apply_rope_fusion
    heads = ctx.heads
    qk = symbol("d") + rope
    shape = (ctx.s, ctx.b)
    q = g.tensor("q", (*shape, heads * qk), ctx.act)
    k = g.tensor("k", (*shape, heads * qk), ctx.act)
    v = g.tensor("v", (*shape, heads * symbol("g")), ctx.act)
    tables: list[str] = []
    if not kind.rotary:
        angles, kept = "", tables
    elif fused:
        angles = g.shared("rotary_angles", (ctx.s, 1, 1, rope), DType.FP32)
        kept = [angles]
    else:
        angles = rotary_tables(g, ctx, width=rope)
        tables = [
            g.tensor(f"{label}_{function}", (ctx.s, 1, 1, rope), ctx.act)
            for label in ("q", "k")
            for function in ("cos", "sin")
        ]
        kept = tables
    inputs = [q_raw, kv_raw, key_part, *([angles] if angles else [])]
    g.op(
        "position", "rotary", GROUP, inputs, [q, k, v, *tables], saves=kept, modules=_UP,
        source="Megatron-Core multi_latent_attention.py qkv_up_proj_and_rope_apply",
    )  # fmt: skip
    return q, k, v
