"""One traced training step of any module: forward, what it saved, and its FLOPs."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError
from actcalc.measure.fake_cuda import require_torch
from actcalc.measure.layer import MeasuredLayer
from actcalc.measure.notes import notes_on
from actcalc.measure.ops import OpLog
from actcalc.measure.record import (
    LiveStorages,
    Recording,
    Tracker,
    collect,
    collect_layer,
    layer_phase,
    modules_off_gpu,
    run_backward,
    storage_key,
)
from actcalc.measure.results import BETWEEN, EMBEDDING, HEAD, Flops, Measured, SavedTensor

_BACKWARD_TASK = 1
"""The identity that checkpoints see for our backward pass: any number that PyTorch's engine,
which counts from 0, is not using at the time."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one traced step left."""

    tensors: tuple[SavedTensor, ...]
    n_layers: int
    live_bytes: int
    flops: Flops | None
    layer: MeasuredLayer | None
    notes: tuple[str, ...]


def loss_of(output: Any) -> Any:
    """Return the tensor to run backward from.

    ``output.loss``, or an encoder's ``pooler_output``, or the first float tensor.

    Raises:
        SpecError: nothing in the output has a gradient.
    """
    torch = require_torch()
    from torch.utils._pytree import tree_leaves

    named = _named(output, "loss")
    if not isinstance(named, torch.Tensor):
        named = _named(output, "pooler_output")
    candidates = [named] if isinstance(named, torch.Tensor) else tree_leaves(output)
    if isinstance(output, Mapping) and not isinstance(named, torch.Tensor):
        candidates = tree_leaves(list(output.values()))
    for leaf in candidates:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            return leaf
    raise SpecError(
        "the module returned nothing that has a gradient",
        hint="the output must be a tensor, or hold one, that depends on the parameters",
    )


def _named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def storages(tensors: Sequence[Any]) -> set[int]:
    """Return the storages of tensors, as :func:`~actcalc.measure.record.storage_key`."""
    return {storage_key(tensor) for tensor in tensors}


@contextlib.contextmanager
def without_data(what: str) -> Iterator[None]:
    """Turn PyTorch's complaints about tensors that hold no data into one line each.

    ``what`` names the code that runs in the block.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise SpecError(
            f"{what} reads a tensor's values while it runs ({error.func}): "
            "without data its memory is undefined",
            hint="measure it on a GPU with --device cuda",
        ) from error
    except UnsupportedOperatorException as error:
        raise SpecError(
            f"{what} calls an operator that has no fake kernel: {error.func}",
            hint="register one with torch.library.register_fake, or measure with --device cuda",
        ) from error


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


@contextlib.contextmanager
def failing_as_spec_error(
    what: str, *, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn whatever code that is not ours raises into one line that says where.

    ``what`` names that code; exceptions in ``passing`` and our own go through unchanged.
    """
    unchanged: tuple[type[Exception], ...] = (SpecError, *passing)
    try:
        with without_data(what):
            yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:
        passed_through = (str(Path(require_torch().__file__).parent), str(Path(__file__).parent))
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(passed_through)]
        where = (own or frames)[-1]
        raise SpecError(
            f"{what} failed with {first_line(error)}",
            hint=f"see {where.filename}:{where.lineno}",
        ) from error


def traced_step(
    model: Any,
    call: Callable[[], Any],
    *,
    layers: Sequence[Any],
    inputs: Sequence[Any],
    what: str,
    autocast_dtype: Any = None,
    flops: bool = False,
    keep_layer: bool = False,
    name: str = "",
    dtype: str = "",
) -> Step:
    """Run one step of a module on fake tensors and return what it saved.

    Args:
        model: the module, in training mode.
        call: runs its forward and returns its output.
        layers: the modules that count as layers if they run.
        inputs: the batch, whose storages do not count.
        what: names the module in errors.
        autocast_dtype: run the forward under autocast to this dtype.
        flops: also run the backward pass and count FLOPs.
        keep_layer: also return the middle layer as a :class:`MeasuredLayer`.
        name: what to call that layer.
        dtype: its dtype, in words.

    Raises:
        SpecError: the module needs data, or an operator that fake tensors lack.
    """
    excluded = storages([*model.parameters(), *model.buffers(), *inputs])
    tracker = Tracker(model, layers, keep_inputs=keep_layer)
    log = OpLog(lambda: tracker.where().path) if keep_layer else None
    recording = Recording(tracker, log)
    live = LiveStorages()
    counter = _counter()
    counting = counter if flops or keep_layer else contextlib.nullcontext()
    with failing_as_spec_error(what):
        with live.watching(), counting, _autocast(autocast_dtype), recording.recording():
            output = call()
        loss = loss_of(output)
        del output
        tensors = tuple(collect(recording, loss, excluded=excluded))
        layer = None
        if keep_layer:
            each = _flops_per_module(counter, model)
            layer = _middle_layer(recording, loss, excluded, each, name, dtype)
        off_gpu = modules_off_gpu(recording)
        tracker.inputs.clear()
        if log is not None:
            log.clear()
        live_bytes = live.alive_bytes(excluded)
        counted = _both_passes(counter, loss) if flops else None
    notes = tuple(
        f"{path or what} saves a tensor that is on the CPU: its bytes are not the GPU's."
        for path in off_gpu
    )
    return Step(tensors, len(tracker.ended), live_bytes, counted, layer, notes)


def _autocast(dtype: Any) -> Any:
    """Autocast to ``dtype``; nothing for None."""
    if dtype is None:
        return contextlib.nullcontext()
    return require_torch().autocast("cuda", dtype=dtype)


def _both_passes(forward: Any, loss: Any) -> Flops:
    """Run the backward pass; return its FLOPs beside those that ``forward`` counted."""
    backward = _counter()
    with backward, _checkpoint_task():
        run_backward(_summed(loss))
    return Flops(
        forward_flops=int(forward.get_total_flops()),
        backward_flops=int(backward.get_total_flops()),
    )


def _middle_layer(
    recording: Recording,
    loss: Any,
    excluded: set[int],
    flops: dict[str, int],
    name: str,
    dtype: str,
) -> MeasuredLayer:
    """Return the middle one of the layers that ran.

    Raises:
        SpecError: no layer ran.
    """
    torch = require_torch()
    tracker = recording.tracker
    if not tracker.ended:
        raise SpecError(
            f"{name} has no stack of layers to save", hint="name one layer with --module"
        )
    module = tracker.candidates[tracker.ended[len(tracker.ended) // 2]]
    roots = {found: path for path, found in tracker.model.named_modules()}
    root = roots[module]
    # What an earlier layer was given too (rotary tables, masks, encoder states) is not this
    # layer's: the model keeps it once. A layer's own input is made after the earlier ones began.
    earlier = [tracker.candidates[index] for index in tracker.ended[: len(tracker.ended) // 2]]
    shared = storages([t for layer in earlier for t in tracker.inputs[roots[layer]]])
    return collect_layer(
        recording,
        loss,
        root=root,
        excluded=excluded | shared,
        flops=flops,
        name=name,
        torch_version=torch.__version__,
        dtype=dtype,
        params=sum(parameter.numel() for parameter in module.parameters()),
    )


def _flops_per_module(counter: Any, model: Any) -> dict[str, int]:
    """Return forward FLOPs per module path. The counter calls the model by its class."""
    top = type(model).__name__
    flops: dict[str, int] = {}
    for path, per_op in counter.get_flop_counts().items():
        if path == top or path.startswith(top + "."):
            flops[path.removeprefix(top).removeprefix(".")] = int(sum(per_op.values()))
    return flops


def _summed(output: Any) -> Any:
    """Return one number to start backward from."""
    return output if output.dim() == 0 else output.sum()


def _counter() -> Any:
    """PyTorch's counter, with the grouped products of experts, which it has no rule for."""
    from torch.utils.flop_counter import FlopCounterMode

    grouped = getattr(require_torch().ops.aten, "_grouped_mm", None)
    rules = {} if grouped is None else {grouped: _grouped_flops}
    return FlopCounterMode(display=False, custom_mapping=rules)


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of products of groups: rows, columns or inner widths of all groups lie side by side."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])


@contextlib.contextmanager
def _checkpoint_task() -> Iterator[None]:
    """Let checkpoints take the block for one backward pass, so that each re-runs once."""
    torch = require_torch()
    original = torch._C._current_graph_task_id
    torch._C._current_graph_task_id = lambda: _BACKWARD_TASK
    try:
        yield
    finally:
        torch._C._current_graph_task_id = original


def facts_of(model: Any, trace: Any, fused: Set[str] = frozenset()) -> dict[str, Any]:
    """Return what :func:`summarise` takes of a model that ran under ``trace``.

    ``fused`` are the fused kernels whose stand-ins ran.
    """
    return {
        "torch_version": require_torch().__version__,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "attention_kernels": dict(trace.attention_kernels),
        "notes": notes_on(model, fused),
    }


def summarise(step: Step, *, notes: tuple[str, ...], **facts: Any) -> Measured:
    """Return a step's tensors with their sums per phase; ``facts`` fill the other fields."""
    sums: Counter[str] = Counter()
    for tensor in step.tensors:
        sums[tensor.phase] += tensor.bytes
    n_layers = step.n_layers
    layers = tuple(sums[layer_phase(index)] for index in range(n_layers))
    return Measured(
        n_layers=n_layers,
        total_bytes=sum(sums.values()),
        per_layer_bytes=layers[n_layers // 2] if layers else 0,
        layers_bytes=layers,
        head_bytes=sums[HEAD],
        embedding_bytes=sums[EMBEDDING],
        between_bytes=sums[BETWEEN],
        live_bytes=step.live_bytes,
        flops=step.flops,
        layer=step.layer,
        notes=(*notes, *step.notes),
        tensors=step.tensors,
        **facts,
    )
