"""CUDA's autograd formulas without a GPU: fake tensors on a CUDA device that need not exist.

What autograd saves depends on the device's kernels. On the CPU, dropout keeps its noise in the
input's dtype, LayerNorm its statistics in bf16, attention with dropout runs op by op, and
``F.rms_norm`` decomposes. A trace must therefore run on tensors whose device is ``cuda``, also
where PyTorch is a CPU build and where the machine has no GPU. Three things are missing there,
and this module supplies them for as long as :func:`fake_cuda` is entered:

* a device guard. Autograd asks the guard of each tensor's device for a stream when it creates a
  node; a CPU build has none for CUDA (``c10/core/impl/DeviceGuardImplInterface.h``), and the one
  of a CUDA build wants a driver. The CPU's guard does nothing, and nothing is what fake tensors
  need, so it takes the slot where there is no GPU.
* the choice of attention kernel (:func:`choose_attention`), which is compiled into CUDA builds
  only (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
* a kernel registration for ``_fused_rms_norm``, without which it decomposes.

Everything else (dropout, norms, autocast, cross entropy) picks its formula by the tensors'
device key alone and needs no help.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actcalc.errors import MissingExtraError, SpecError, install

DEVICE = "cuda:0"
"""The device of every traced tensor. The index is explicit: ``cuda`` alone asks a driver."""

COMPUTE_CAPABILITY = (9, 0)
"""The traced GPU, for code that asks: Hopper. From (8, 0) on all choices here are the same."""

AttentionKernel = Literal["flash", "efficient", "math"]

_CPU_TYPE = 0
_CUDA_TYPE = 1
_GUARD_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``, an array indexed by ``c10::DeviceType``."""

_FLASH_MAX_HEAD_DIM = 256
_FLASH_HEAD_DIM_MULTIPLE = 8
_EFFICIENT_BIAS_MULTIPLE = 16


def require_torch() -> Any:
    """Return the ``torch`` module, or say how to install it.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: it is, but importing it fails.
    """
    return imported("torch", "measuring needs PyTorch")


def imported(name: str, need: str) -> Any:
    """Return the module called ``name``; ``need`` says, as a sentence, what needs it.

    Raises:
        MissingExtraError: it is not installed.
        SpecError: it is installed, and fails while it is imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise MissingExtraError(
                f"{need}, which is not installed",
                hint=f"{install('torch')} (a torch for CPUs is enough)",
            ) from error
        raise _broken(name, error) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # A shared library that is missing, or two packages whose versions do not go together.
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> SpecError:
    line = next((line for line in str(error).splitlines() if line.strip()), "no message")
    return SpecError(
        f"{name} is installed but cannot be imported: {type(error).__name__}: {line.strip()}",
        hint=f"`python -c 'import {name}'` shows the whole error; reinstall it",
    )


@dataclass(slots=True)
class FakeCuda:
    """A trace in progress: the fake mode, and how often each attention kernel was chosen."""

    mode: Any
    attention_kernels: Counter[str] = field(default_factory=Counter)


def choose_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    has_mask: bool,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionKernel:
    """Return the kernel that ``scaled_dot_product_attention`` runs on a GPU from sm_80 on.

    The constraints and their order (flash, memory-efficient, math) are PyTorch's defaults. With a
    recent cuDNN it prefers cuDNN's kernel on Hopper and Blackwell, which no build without a GPU
    can tell; that one keeps what flash keeps, less 8 bytes of random state.

    Source: ``can_use_flash_attention`` and ``can_use_mem_efficient_attention`` in
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``.
    """
    torch = require_torch()
    if not query.dim() == key.dim() == value.dim() == 4:
        return "math"
    if 0 in (query.shape[-2], key.shape[-2], query.shape[0], query.shape[1]):
        return "math"
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    grouped = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    unit_stride = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (query, key, value))
    flash = (
        not has_mask
        and half
        and width == key.shape[-1] == value.shape[-1]
        and width <= _FLASH_MAX_HEAD_DIM
        and same_batch
        and (same_heads or grouped)
        and unit_stride
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )
    if flash:
        return "flash"
    # CUTLASS moves 128 bits at a time: 8 half or 4 single precision elements.
    alignment = 8 if half else 4
    efficient = (
        (half or query.dtype == torch.float32)
        and width == key.shape[-1]
        and width % alignment == 0
        and value.shape[-1] % alignment == 0
        and same_batch
        and same_heads
        and unit_stride
    )
    return "efficient" if efficient else "math"


def _float_mask(mask: Any, dtype: Any) -> Any:
    """Return a boolean mask as the additive bias that the kernels take."""
    torch = require_torch()
    if mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))


def _aligned_bias(bias: Any, query: Any, key: Any) -> Any:
    """Return the bias as the memory-efficient kernel keeps it: rows of a multiple of 16."""
    torch = require_torch()
    strided = bias.stride(-1) == 1 and all(
        stride % _EFFICIENT_BIAS_MULTIPLE == 0 for stride in bias.stride()[:-1]
    )
    if not strided:
        width = bias.shape[-1]
        missing = _EFFICIENT_BIAS_MULTIPLE - width % _EFFICIENT_BIAS_MULTIPLE
        bias = torch.nn.functional.pad(bias, (0, missing))[..., :width]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _attention(
    counts: Counter[str],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run attention through the kernel CUDA would choose (``attention.cpp`` in ATen)."""
    torch = require_torch()
    aten = torch.ops.aten
    mask = None if attn_mask is None else _float_mask(attn_mask, query.dtype)
    kernel = choose_attention(
        query,
        key,
        value,
        has_mask=mask is not None,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    counts[kernel] += 1
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "flash":
        width = query.shape[-1]
        missing = -width % _FLASH_HEAD_DIM_MULTIPLE
        if missing:
            query, key, value = (
                torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value)
            )
        out = aten._scaled_dot_product_flash_attention(
            query,
            key,
            value,
            dropout_p,
            is_causal,
            False,
            scale=width**-0.5 if scale is None else scale,
        )[0]
        return out[..., :width] if missing else out
    if kernel == "efficient":
        if mask is not None:
            mask = _aligned_bias(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _unused_rms_norm(*_: Any) -> Any:
    """Stand for CUDA's kernel: the fake mode answers before it could be reached."""
    raise AssertionError("a fake tensor reached a real kernel")


def _install_guard(torch: Any) -> None:
    """Give CUDA the CPU's device guard where there is no GPU that needs another.

    It stays for the life of the process: autograd nodes ask it again when they die.

    Raises:
        SpecError: the library does not export its registry (then nothing can be traced).
    """
    if torch.cuda.is_available():
        return
    lib = Path(torch.__file__).parent / "lib"
    found = [lib / name for name in ("libc10.so", "libc10.dylib") if (lib / name).exists()]
    try:
        library = ctypes.CDLL(str(found[0]))
        slots = (ctypes.c_void_p * 2).in_dll(library, _GUARD_REGISTRY)
    except (IndexError, OSError, ValueError) as error:
        raise SpecError(
            f"this build of PyTorch ({torch.__version__}) cannot trace CUDA tensors",
            hint="use a Linux or macOS build of PyTorch, or one that is built for CUDA",
        ) from error
    slots[_CUDA_TYPE] = slots[_CPU_TYPE]


def _forgetful_swap(mode: Any, swap: Any) -> Any:
    """Return ``torch.utils.swap_tensors`` for fake tensors.

    ``Module.to`` swaps a fake parameter with its converted self, which refuses tensors that
    something holds weakly. The fake mode itself does, in a memo that only saves work.
    """

    def forget_and_swap(first: Any, second: Any) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    return forget_and_swap


def _indexed_moves() -> Any:
    """Return a mode in which moving a tensor to ``cuda`` means device 0.

    Without an index PyTorch asks the device guard for the current device, and the borrowed
    guard answers with the CPU.
    """
    torch = require_torch()
    from torch.overrides import TorchFunctionMode

    def indexed(value: Any) -> Any:
        is_device = isinstance(value, str | torch.device)
        return DEVICE if is_device and str(value) == "cuda" else value

    class IndexedMoves(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                return args[0].to(DEVICE)
            if func is torch.Tensor.to:
                args = tuple(map(indexed, args))
                kwargs = {name: indexed(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)

    return IndexedMoves()


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes for the length of a block; each change is (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Enter a mode in which every new tensor is fake and lives on a CUDA device.

    Yields the :class:`FakeCuda` of the trace. No memory is taken and no kernel runs.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: this build of PyTorch is too old, or cannot trace CUDA tensors.
    """
    torch = require_torch()
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not hasattr(torch._C._autograd.SavedTensor, "data"):
        raise SpecError(
            f"PyTorch {torch.__version__} does not show what autograd saved",
            hint="pip install --upgrade torch",
        )
    _install_guard(torch)
    trace = FakeCuda(mode=FakeTensorMode(allow_non_fake_inputs=True))

    def attention(*args: Any, **kwargs: Any) -> Any:
        return _attention(trace.attention_kernels, *args, **kwargs)

    log = logging.getLogger("torch._subclasses.fake_tensor")
    with contextlib.ExitStack() as stack:
        # It logs, with a traceback, what it then raises.
        stack.enter_context(patched((log, "disabled", True)))
        # The registrations replace nothing that fake tensors could otherwise reach, and the
        # warning says only that they replace something.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        cpu_build = torch.version.cuda is None and torch.version.hip is None
        if cpu_build and hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("_fused_rms_norm", _unused_rms_norm, "CUDA")
        stack.enter_context(
            patched(
                (torch.cuda, "current_device", lambda: 0),
                (torch.cuda, "get_device_capability", lambda *_: COMPUTE_CAPABILITY),
                (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
                (
                    torch.utils,
                    "swap_tensors",
                    _forgetful_swap(trace.mode, torch.utils.swap_tensors),
                ),
                (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
                # Distributions read their arguments to check them, and keep nothing of that.
                (torch.distributions.Distribution, "_validate_args", False),
            )
        )
        stack.enter_context(trace.mode)
        stack.enter_context(torch.device(DEVICE))
        stack.enter_context(_indexed_moves())
        yield trace
