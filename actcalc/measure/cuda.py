"""One real training step on a GPU, and what the caching allocator says about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError
from actcalc.measure.fake_cuda import require_torch
from actcalc.measure.hf import (
    build_config,
    build_model,
    example_batch,
    model_class,
    prepare_config,
    require_transformers,
    text_part,
    torch_dtype,
)
from actcalc.measure.module import build_module, load_factory
from actcalc.measure.results import CudaStep, Dtype
from actcalc.measure.run import failing_as_spec_error, loss_of
from actcalc.measure.shorter import shorten

_TRACE = "leave --device out: the trace needs no GPU"


def require_gpu(hint: str = _TRACE) -> Any:
    """Return the ``torch`` module of a machine that has a GPU; ``hint`` is what else to do.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: no GPU, or a build of PyTorch that cannot use it.
    """
    torch = require_torch()
    if torch.version.cuda is None and torch.version.hip is None:
        raise SpecError(
            f"no GPU to run on: this PyTorch ({torch.__version__}) is built without CUDA",
            hint=hint,
        )
    if not torch.cuda.is_available():
        raise SpecError("no GPU to run on: PyTorch sees none", hint=hint)
    return torch


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """Turn the allocator's refusal into one line."""
    torch = require_torch()
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        device = torch.cuda.get_device_name()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        raise SpecError(
            f"the step does not fit {device} ({total} bytes)",
            hint="fewer --layers, a shorter --seq or a smaller --batch",
        ) from error


def run_step(torch: Any, call: Callable[[], Any], autocast_dtype: Any) -> CudaStep:
    """Run forward and backward once, and read the allocator's counters around them.

    The peaks include gradients and whatever libraries take on first use (cuBLAS's workspace),
    but no optimizer.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    autocast = (
        contextlib.nullcontext()
        if autocast_dtype is None
        else torch.autocast("cuda", dtype=autocast_dtype)
    )
    with autocast:
        output = call()
    loss = loss_of(output)
    del output
    after_forward = torch.cuda.memory_allocated()
    (loss if loss.dim() == 0 else loss.sum()).backward()
    torch.cuda.synchronize()
    return CudaStep(
        device=torch.cuda.get_device_name(),
        before_bytes=before,
        after_forward_bytes=after_forward,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
    )


def measure_cuda(
    source: Mapping[str, Any] | str | Path,
    *,
    batch: int = 1,
    seq: int = 4096,
    dtype: Dtype = "bf16",
    attention: str | None = None,
    padding_mask: bool = False,
    checkpointing: bool = False,
    layers: int | None = None,
    cls: str | None = None,
    decoder_seq: int | None = None,
) -> CudaStep:
    """Run one real step of a transformers model on the GPU, with random weights.

    The arguments are those of :func:`~actcalc.measure.hf.measure_transformers`.

    Raises:
        MissingExtraError: PyTorch or transformers is not installed.
        SpecError: no GPU, an invalid configuration or option, or too little memory.
    """
    torch = require_gpu()
    require_transformers()
    parameter_dtype, autocast_dtype = torch_dtype(dtype)
    whole = build_config(source)
    config = whole if cls else text_part(whole)
    if layers is not None:
        shorten(config, layers)
    chosen = model_class(config, cls)
    prepare_config(config)
    with _fitting(), torch.device("cuda"):
        model = build_model(
            config,
            chosen,
            dtype=parameter_dtype,
            attention=attention,
            checkpointing=checkpointing,
            initialise=True,
        )
        inputs = example_batch(
            model,
            config,
            batch=batch,
            seq=seq,
            dtype=parameter_dtype,
            padding_mask=padding_mask,
            device="cuda",
            decoder_seq=decoder_seq,
        )
        with failing_as_spec_error(chosen.__name__, passing=(torch.cuda.OutOfMemoryError,)):
            return run_step(torch, lambda: model(**inputs), autocast_dtype)


def measure_module_cuda(factory: Callable[[], Any] | str, *, amp: str | None = None) -> CudaStep:
    """Run one real step of a user's module on the GPU.

    The arguments are those of :func:`~actcalc.measure.module.measure_module`.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: no GPU, a bad factory, or too little memory.
    """
    torch = require_gpu()
    build = load_factory(factory) if isinstance(factory, str) else factory
    _, autocast_dtype = torch_dtype(f"amp-{amp}" if amp else "fp32")
    with _fitting(), torch.device("cuda"):
        module, args, kwargs = build_module(build, device="cuda")
        what = type(module).__name__
        with failing_as_spec_error(what, passing=(torch.cuda.OutOfMemoryError,)):
            return run_step(torch, lambda: module(*args, **kwargs), autocast_dtype)
