"""Stand-ins for fused CUDA kernels that transformers calls where their packages are installed.

A state-space or linear-attention layer calls functions of ``causal_conv1d``, ``fla`` or
``mamba_ssm``, and falls back to PyTorch without them. Their kernels run on a GPU alone. What they
keep stands in their autograd functions, which the stand-ins follow: shapes, element types and
copies, without any arithmetic. A trace then holds what a GPU with these packages keeps.

Sources: causal-conv1d 1.6.1 ``causal_conv1d_interface.py``, flash-linear-attention 0.5.2
``ops/gated_delta_rule/chunk.py`` and ``ops/kda/chunk.py``, mamba-ssm 2.3.2
``ops/selective_scan_interface.py`` and ``ops/triton/ssd_combined.py``.

RWKV's autograd function is part of transformers (modeling_rwkv.py ``RwkvLinearAttention``) and runs
as it is, around kernels that compute nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from types import CellType, FunctionType
from typing import Any

from actcalc.measure.fake_cuda import patched, require_torch

Rule = Callable[..., tuple[Any, list[Any]]]
"""Arguments of a kernel -> what it returns, and what its autograd function keeps."""

_SCAN_STEPS = 2048
"""Tokens between two states that the selective scan writes (csrc/selective_scan.cpp)."""
_DELTA_CHUNK = 64


def _contiguous(x: Any, *dims: int) -> Any:
    """``x``, copied unless one of the dimensions lies densely in memory."""
    return x if any(x.stride(dim) == 1 for dim in dims) else x.contiguous()


def _conv(
    x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, **_: Any
) -> tuple[Any, list[Any]]:
    """``CausalConv1dFn``: the input alone; a copy if neither time nor channels lie densely."""
    x = _contiguous(x, 2, 1)
    return require_torch().empty_like(x), [x, weight, bias, seq_idx]


def _normed(x: Any, wanted: bool) -> tuple[Any, Any]:
    """``l2norm_fwd``: the normed tensor and one fp32 number per head."""
    torch = require_torch()
    if not wanted:
        return x, None
    return torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _delta(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``ChunkGatedDeltaRuleFunction``: inputs, made contiguous, and the inverse of each chunk."""
    torch = require_torch()
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q, q_rstd = _normed(q, use_qk_l2norm_in_kernel)
    k, k_rstd = _normed(k, use_qk_l2norm_in_kernel)
    decay = torch.empty_like(g, dtype=torch.float32)
    inverse = torch.empty((*v.shape[:3], _DELTA_CHUNK), dtype=k.dtype, device=k.device)
    out = torch.empty_like(v, dtype=q.dtype)
    return (out, None), [q, q_rstd, k, k_rstd, v, decay, beta, inverse]


def _kimi(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``ChunkKDAFunction``: as the delta rule, with a decay per channel and scores per chunk."""
    torch = require_torch()
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q, q_rstd = _normed(q, use_qk_l2norm_in_kernel)
    k, k_rstd = _normed(k, use_qk_l2norm_in_kernel)
    decay = None if use_gate_in_kernel else torch.empty_like(g, dtype=torch.float32)
    squashed = torch.empty_like(beta) if use_beta_sigmoid_in_kernel else beta
    scores, inverse = (
        torch.empty((*v.shape[:3], _DELTA_CHUNK), dtype=k.dtype, device=k.device) for _ in range(2)
    )
    kept = [q, q_rstd, k, k_rstd, v, decay, g, beta, squashed, A_log, dt_bias, scores, inverse]
    return (torch.empty_like(v, dtype=q.dtype), None), kept


def _states(x: Any, A: Any) -> Any:
    """The states that the selective scan writes every 2048 tokens: values and decays, fp32."""
    torch = require_torch()
    batch, width, length = x.shape
    shape = (batch, width, -(-length // _SCAN_STEPS), 2 * A.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _selective(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    return_last_state: bool = False,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``SelectiveScanFn``: its inputs with time lying densely, its states, its ungated output."""
    torch = require_torch()
    u, delta, B, C = (_contiguous(x, -1) for x in (u, delta, B, C))
    states, out = _states(u, A), torch.empty_like(u)
    kept = [u, delta, A, B, C, D, delta_bias, states]
    if z is not None:
        kept += [_contiguous(z, -1), out]
        out = torch.empty_like(u)
    return ((out, states[:, :, -1, 1::2]) if return_last_state else out), kept


def _mamba(
    xz: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    x_proj_weight: Any,
    delta_proj_weight: Any,
    out_proj_weight: Any,
    out_proj_bias: Any,
    A: Any,
    B: Any = None,
    C: Any = None,
    D: Any = None,
    delta_bias: Any = None,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``MambaInnerFn`` at its default level: convolution and steps are made again in backward."""
    torch = require_torch()
    xz = _contiguous(xz, -1)
    batch, double, length = xz.shape
    state = A.shape[-1]
    # Under autocast the products' weights are cast inside, and the casts are what is kept.
    weights = [x_proj_weight, delta_proj_weight, out_proj_weight]
    if torch.is_autocast_enabled("cuda"):
        weights = [weight.to(torch.get_autocast_dtype("cuda")) for weight in weights]
    low = {"dtype": weights[0].dtype, "device": xz.device}
    rank = delta_proj_weight.shape[1]
    packed = torch.empty((batch * length, rank + 2 * state), **low)
    matrices = [torch.empty((batch, 1, state, length), **low) for _ in range(2)]
    scanned = torch.empty((batch, double // 2, length), **low)
    kept = [xz, packed, *weights, A, *matrices, D, delta_bias, _states(scanned, A), scanned]
    out = torch.empty((batch, length, out_proj_weight.shape[0]), **low)
    return out, [*kept, conv1d_weight, conv1d_bias]


def _chunk_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    return_final_states: bool = False,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``MambaChunkScanCombinedFn``: its inputs, its output and the decays summed in each chunk."""
    torch = require_torch()
    B, C, x = _contiguous(B, -1), _contiguous(C, -1), _contiguous(x, -1, 1)
    batch, length, heads, _width = x.shape
    chunks = -(-length // chunk_size)
    sums = torch.empty((batch, heads, chunks, chunk_size), dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(
        (batch, heads, x.shape[-1], B.shape[-1]), dtype=torch.float32, device=x.device
    )
    return ((out, final) if return_final_states else out), [
        out, x, dt, sums, A, B, C, D, z, dt_bias,
    ]  # fmt: skip


def _split_scan(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,
    D: Any,
    chunk_size: int,
    rmsnorm_weight: Any = None,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int = 0,
    ngroups: int = 1,
    **_: Any,
) -> tuple[Any, list[Any]]:
    """``MambaSplitConv1dScanCombinedFn``: the packed input and the scan's output, no more."""
    torch = require_torch()
    batch, length, _packed = zxbcdt.shape
    width = D.shape[0] * (headdim or D.shape[-1])
    like = {"dtype": zxbcdt.dtype, "device": zxbcdt.device}
    scanned = torch.empty((batch, length, width), **like)
    kept = [zxbcdt, conv1d_weight, conv1d_bias, scanned, A, D, dt_bias, rmsnorm_weight]
    if rmsnorm_weight is not None:
        rows = batch * length * ngroups
        kept.append(torch.empty(rows, dtype=torch.float32, device=zxbcdt.device))
    out = scanned if rmsnorm_weight is None else torch.empty_like(scanned)
    if outproj_weight is not None:
        if torch.is_autocast_enabled("cuda"):
            outproj_weight = outproj_weight.to(torch.get_autocast_dtype("cuda"))
        like["dtype"] = outproj_weight.dtype
        out = torch.empty((batch, length, outproj_weight.shape[0]), **like)
    return out, [*kept, outproj_weight, outproj_bias]


STAND_INS: Mapping[str, tuple[str, str, Rule]] = {
    "causal_conv1d_fn": ("CausalConv1dFn", "causal-conv1d", _conv),
    "chunk_gated_delta_rule": ("ChunkGatedDeltaRuleFunction", "flash-linear-attention", _delta),
    "chunk_kda": ("ChunkKDAFunction", "flash-linear-attention", _kimi),
    "selective_scan_fn": ("SelectiveScanFn", "mamba-ssm", _selective),
    "mamba_inner_fn": ("MambaInnerFn", "mamba-ssm", _mamba),
    "mamba_chunk_scan_combined": ("MambaChunkScanCombinedFn", "mamba-ssm", _chunk_scan),
    "mamba_split_conv1d_scan_combined": (
        "MambaSplitConv1dScanCombinedFn", "mamba-ssm", _split_scan,
    ),
}  # fmt: skip
"""Kernel by the name transformers asks for -> its autograd function, its package, its rule."""


RWKV = ("RwkvLinearAttention", "kernels-community/rwkv")
"""The autograd function of RWKV's recurrence, and where its kernels are from."""


class _RwkvKernels:
    """The kernels of RWKV's recurrence, without arithmetic: they write into tensors they are given.

    Each takes the decay in fp32 and the rest in its own type, as ``data_ptr`` does (wkv_op.cpp).
    """

    def __init__(self, longest: int, ran: set[str]) -> None:
        self.max_seq_length, self._ran = longest, ran

    def forward(self, *given: Any) -> None:
        self._take("float32", *given)

    def forward_bf16(self, *given: Any) -> None:
        self._take("bfloat16", *given)

    backward, backward_bf16 = forward, forward_bf16

    def _take(self, dtype: str, decay: Any, *rest: Any) -> None:
        torch = require_torch()
        for tensor, wanted in ((decay, "float32"), *((tensor, dtype) for tensor in rest)):
            if tensor.dtype is not getattr(torch, wanted):
                raise RuntimeError(f"expected scalar type {wanted} but found {tensor.dtype}")
        self._ran.add(RWKV[0])


@cache
def _function(name: str) -> Any:
    """The autograd function that keeps what the rule of that kernel says."""
    torch = require_torch()
    label, _package, rule = STAND_INS[name]
    parameters = inspect.signature(rule).parameters

    def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
        out, kept = rule(**dict(zip(names, values, strict=True)))
        ctx.save_for_backward(*(x for x in kept if x is not None))
        ctx.like = [
            (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else None for x in values
        ]
        return out

    def backward(ctx: Any, *_: Any) -> Any:
        made = (
            None if like is None else torch.empty(like[0], dtype=like[1], device=like[2])
            for like in ctx.like
        )
        return (None, *made)

    # The node in the autograd graph is named after the class.
    passes = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    stand_in = type(torch.autograd.Function)(label, (torch.autograd.Function,), passes)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        return stand_in.apply(tuple(given), *given.values())

    return call


def _cells(function: Any) -> dict[str, CellType]:
    """The variables a function closes over, by name."""
    closure = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, closure, strict=True))


def _kernel(function: object) -> tuple[str, dict[str, CellType]] | None:
    """The kernel that a function of modelling code asks for, and where it keeps its choice.

    Source: transformers ``integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback``.
    """
    if not isinstance(function, FunctionType):
        return None
    cells = _cells(function)
    if not {"implementation", "is_new_implementation", "func_name"} <= set(cells):
        return None
    name = cells["func_name"].cell_contents
    return (name, cells) if name in STAND_INS else None


@contextlib.contextmanager
def fused_kernels(cls: Any, longest: int = 0) -> Iterator[set[str]]:
    """Let the modelling code of a class run its fused kernels' stand-ins in the block.

    ``longest`` is the number of tokens that RWKV's are made for. Yields the names of the kernels
    that ran.
    """
    ran: set[str] = set()
    changes: list[tuple[Any, str, Any]] = []
    seen: set[int] = set()
    for module in _modules(cls):
        if hasattr(module, RWKV[0]):
            changes.append((module, "rwkv_cuda_kernel", _RwkvKernels(longest, ran)))
        for function in vars(module).values():
            found = _kernel(function)
            if found is None or id(function) in seen:
                continue
            seen.add(id(function))
            name, cells = found
            stand_in = _recorded(name, ran)
            changes += [
                (cells["implementation"], "cell_contents", stand_in),
                (cells["is_new_implementation"], "cell_contents", True),
                (cells["applicable_params"], "cell_contents", _Any()),
            ]
    with patched(*changes):
        yield ran


class _Any(tuple[str, ...]):
    """A list of parameters that has every name."""

    def __contains__(self, _name: object) -> bool:
        return True


def _recorded(name: str, ran: set[str]) -> Callable[..., Any]:
    function = _function(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        ran.add(name)
        return function(*args, **kwargs)

    return call


def _modules(cls: Any) -> list[Any]:
    """The modules of transformers that hold modelling code, as far as they are loaded."""
    root = cls.__module__.rpartition(".models.")[0] + ".models."
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(root) and ".modeling_" in name and module is not None
    ]


def notes_of(ran: Set[str]) -> tuple[str, ...]:
    """What a trace took from the source of fused kernels, in sentences."""
    known = {RWKV[0]: RWKV, **{name: (row[0], row[1]) for name, row in STAND_INS.items()}}
    packages = sorted({known[name][1] for name in ran})
    if not packages:
        return ()
    names = ", ".join(known[name][0] for name in sorted(ran))
    return (
        f"Fused kernels of {' and '.join(packages)} do not run here: what they keep is read from "
        f"their source ({names}).",
    )
