"""Record what autograd saves while a model runs, and who saved it.

Every tensor saved for backward passes through a hook (``torch.autograd.graph.
saved_tensors_hooks``) that wraps it in a holder of our own. After the forward the autograd graph
is walked from the loss, and each holder found in it gets the name of its node and attribute.
Holders that nobody holds any more belong to parts of the graph that were thrown away, as their
memory would be. A checkpointed layer installs hooks of its own over ours, so what it discards
never arrives here, and what it keeps (its inputs) does.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actcalc.measure.fake_cuda import require_torch
from actcalc.measure.layer import MeasuredLayer, ModuleRun, Saver, Storage
from actcalc.measure.ops import OpLog, ops_below
from actcalc.measure.results import BETWEEN, EMBEDDING, HEAD, SavedTensor

CHECKPOINT_INPUT = "Checkpoint.input"
"""The op name of a tensor that a checkpoint keeps as its input: no node holds it."""

_RAW = "_raw_saved_"


class _Holder:
    """A tensor as autograd holds it, with the module that was running when it was saved."""

    __slots__ = ("__weakref__", "cls", "layer", "module", "path", "position", "tensor")

    def __init__(self, tensor: Any, where: _Where) -> None:
        self.tensor = tensor
        self.path = where.path
        self.cls = where.cls
        self.module = where.module
        self.layer = where.layer
        self.position = where.position


@dataclass(frozen=True, slots=True)
class _Where:
    """A point in the run of a model."""

    module: Any
    path: str
    cls: str
    layer: int | None
    """Index into the list of layers, ``None`` outside them."""
    position: int
    """How many layers had ended by then."""


@dataclass(slots=True)
class Tracker:
    """Follows which module runs. ``candidates`` are the modules that count as layers if run."""

    model: Any
    candidates: Sequence[Any]
    ended: list[int] = field(default_factory=list)
    """Candidates in the order they ended: one that never ran (a vision tower given no image) is
    no layer of this run."""
    keep_inputs: bool = False
    """Also keep the tensors that each module reads (they stay alive meanwhile)."""
    inputs: dict[str, list[Any]] = field(default_factory=dict)
    """Tensors read, per path of a module that ran, in the order the modules began."""
    _stack: list[Any] = field(default_factory=list)
    _paths: dict[Any, str] = field(default_factory=dict)
    _layer_of: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths = {module: path for path, module in self.model.named_modules()}
        self._layer_of = {module: index for index, module in enumerate(self.candidates)}

    def where(self) -> _Where:
        """Return the present point of the run."""
        module = self._stack[-1] if self._stack else self.model
        layer = next((self._layer_of[m] for m in self._stack if m in self._layer_of), None)
        return _Where(module, self._paths[module], type(module).__name__, layer, len(self.ended))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Follow the model's modules for the length of the block."""

        torch = require_torch()
        from torch.utils._pytree import tree_leaves

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            self._stack.append(module)
            if self.keep_inputs:
                read = self.inputs.setdefault(self._paths[module], [])
                read += [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]

        def leave(module: Any, *_: Any) -> None:
            self._stack.pop()
            if module in self._layer_of:
                self.ended.append(self._layer_of[module])

        with contextlib.ExitStack() as stack:
            for module in self._paths:
                hook = module.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield


@dataclass(slots=True)
class Recording:
    """The holders of one forward pass, in the order they were saved."""

    tracker: Tracker
    log: OpLog | None = None
    """Where the ops go too, if they are wanted."""
    _holders: list[weakref.ref[_Holder]] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record every save of the block."""
        torch = require_torch()

        def pack(tensor: Any) -> _Holder:
            # Detached, since an op's own output leads back to the op: a cycle nobody can free.
            holder = _Holder(tensor.detach(), self.tracker.where())
            self._holders.append(weakref.ref(holder))
            if self.log is not None:
                self.log.saved(holder.path)
            return holder

        def unpack(holder: _Holder) -> Any:
            return holder.tensor

        with (
            self.tracker.following(),
            self.log.logging() if self.log is not None else contextlib.nullcontext(),
            torch.autograd.graph.saved_tensors_hooks(pack, unpack),
        ):
            yield

    def alive(self) -> list[_Holder]:
        """Return the holders that autograd still keeps."""
        return [holder for ref in self._holders if (holder := ref()) is not None]


def modules_off_gpu(recording: Recording) -> list[str]:
    """Return the paths of modules that saved a tensor which is not on the traced device.

    Single numbers do not count: PyTorch lets them stay on the CPU.
    """
    return sorted(
        {
            holder.path
            for holder in recording.alive()
            if holder.tensor.device.type != "cuda" and holder.tensor.dim() > 0
        }
    )


def storage_key(tensor: Any) -> int:
    """Return what is equal for two tensors that share memory, as long as either lives."""
    return int(tensor.untyped_storage()._cdata)


def _node_names(root: Any) -> dict[int, str]:
    """Return ``id(holder) -> Node.attribute`` over the graph that hangs on a node.

    Python-defined functions have no named attributes: theirs are numbered.
    """
    names: dict[int, str] = {}
    seen = {root}
    queue = [root]
    while queue:
        node = queue.pop()
        label = node.name().removesuffix("()").rsplit("::", 1)[-1]
        for attribute in dir(node):
            if not attribute.startswith(_RAW):
                continue
            raw = getattr(node, attribute)
            several = isinstance(raw, list | tuple)
            for index, saved in enumerate(raw if several else [raw]):
                # An optional argument that was not given is an empty save without data.
                with contextlib.suppress(RuntimeError):
                    name = attribute.removeprefix(_RAW)
                    if name == "tensors":
                        name = f"saved{index}"
                    names[id(saved.data)] = f"{label}.{name}"
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return names


def layer_stacks(model: Any) -> list[list[Any]]:
    """Return the model's stacks of layers: its outermost lists of composite modules.

    A list inside a layer is part of the layer, a list of single operators (several embeddings)
    is no stack, and neither are experts, which run side by side.
    """
    torch = require_torch()

    def walk(module: Any) -> Iterator[list[Any]]:
        for name, child in module.named_children():
            if "expert" in name:
                continue
            items = list(child.children())
            is_list = isinstance(child, torch.nn.ModuleList | torch.nn.Sequential)
            composite = [item for item in items if next(item.children(), None) is not None]
            if is_list and composite and _repeats(items, composite):
                yield composite
            else:
                yield from walk(child)

    return list(walk(model))


def _repeats(items: Sequence[Any], composite: Sequence[Any]) -> bool:
    """Say whether the composite ones of a list's modules are layers of one kind.

    Else they are parts of one layer: one beside single operators, as in diffusers' feed-forward
    (a projection with its activation, dropout, a projection), or each of another class.
    """
    if len(composite) == 1:
        return len(items) == 1
    return len({type(item) for item in composite}) < len(composite)


def layer_phase(index: int) -> str:
    """Return the phase of the layer that ran ``index``-th."""
    return f"layer{index}"


def _phase(holder: _Holder, ended: Sequence[int]) -> str:
    """Return the phase of a save, given the layers that ran in the whole run."""
    if holder.layer is not None:
        return layer_phase(ended.index(holder.layer))
    if holder.position == 0 and ended:
        return EMBEDDING
    return HEAD if holder.position >= len(ended) else BETWEEN


def collect(
    recording: Recording,
    loss: Any,
    *,
    excluded: set[int],
) -> list[SavedTensor]:
    """Return the saved storages, each once, in the order they were first saved.

    Args:
        recording: of the forward pass that made ``loss``.
        loss: the tensor that backward would start from.
        excluded: storages (:func:`storage_key`) that exist anyway.
    """
    holders = recording.alive()
    names = _node_names(loss.grad_fn)
    first: dict[int, SavedTensor] = {}
    later: dict[int, list[str]] = {}
    for holder in holders:
        key = storage_key(holder.tensor)
        if key in excluded:
            continue
        op = names.get(id(holder), CHECKPOINT_INPUT)
        if key in first:
            later[key].append(f"{holder.path}:{op}")
            continue
        later[key] = []
        first[key] = SavedTensor(
            phase=_phase(holder, recording.tracker.ended),
            module=holder.path,
            cls=holder.cls,
            op=op,
            shape=tuple(int(n) for n in holder.tensor.shape),
            dtype=str(holder.tensor.dtype).removeprefix("torch."),
            bytes=int(holder.tensor.untyped_storage().nbytes()),
        )
    return [
        tensor.model_copy(update={"also_saved_by": tuple(later[key])})
        for key, tensor in first.items()
    ]


def collect_layer(
    recording: Recording,
    loss: Any,
    *,
    root: str,
    excluded: set[int],
    flops: Mapping[str, int],
    **facts: Any,
) -> MeasuredLayer:
    """Return the module at ``root`` as a measured layer.

    Args:
        recording: of a forward pass whose tracker kept inputs, with a log of its ops.
        loss: see :func:`collect`.
        root: path of the layer's module.
        excluded: see :func:`collect`.
        flops: forward FLOPs per module path.
        facts: the other fields of :class:`MeasuredLayer`.
    """
    tracker = recording.tracker
    inner = {path: path.removeprefix(root).removeprefix(".") for path in tracker.inputs}
    paths = [path for path in tracker.inputs if root == "" or _below(path, root)]
    inside = set(paths)
    views, savers = _storages_of(recording, loss, paths, inner, excluded)
    log = recording.log or OpLog(lambda: "")
    ids = {key: index for index, key in enumerate(views)}
    classes = {path: type(module).__name__ for path, module in tracker.model.named_modules()}
    given = {path: {storage_key(tensor) for tensor in tracker.inputs[path]} for path in paths}
    ops, before = ops_below(log, inside.__contains__, ids, excluded, inner.__getitem__)
    return MeasuredLayer(
        cls=classes[root],
        forward_flops=flops.get(root, 0),
        storages=tuple(
            Storage(
                id=ids[key],
                bytes=int(view.untyped_storage().nbytes()),
                shape=tuple(int(n) for n in view.shape),
                dtype=str(view.dtype).removeprefix("torch."),
                saved_by=tuple(savers.get(key, ())),
            )
            for key, view in views.items()
        ),
        modules=tuple(
            ModuleRun(
                path=inner[path],
                cls=classes[path],
                inputs=tuple(sorted({ids[key] for key in given[path] if key in ids})),
                forward_flops=flops.get(path, 0),
            )
            for path in paths
        ),
        ops=ops,
        ops_to_last_save=before,
        **facts,
    )


def _storages_of(
    recording: Recording,
    loss: Any,
    paths: Sequence[str],
    inner: Mapping[str, str],
    excluded: set[int],
) -> tuple[dict[int, Any], dict[int, list[Saver]]]:
    """A view of each storage that the modules at ``paths`` use, and who of them saves it."""
    inside, tracker = set(paths), recording.tracker
    names = _node_names(loss.grad_fn)
    savers: dict[int, list[Saver]] = {}
    views: dict[int, Any] = {}
    for holder in recording.alive():
        key = storage_key(holder.tensor)
        if key in excluded or holder.path not in inside:
            continue
        views.setdefault(key, holder.tensor)
        op = names.get(id(holder), CHECKPOINT_INPUT)
        savers.setdefault(key, []).append(Saver(module=inner[holder.path], op=op))
    for path in paths:
        for tensor in tracker.inputs[path]:
            if storage_key(tensor) not in excluded:
                views.setdefault(storage_key(tensor), tensor)
    log = recording.log or OpLog(lambda: "")
    for entry in log.entries:
        if entry.path in inside:
            for key in (*entry.inputs, *entry.outputs):
                if key not in excluded:
                    views.setdefault(key, log.views[key])
    return views, savers


def _below(path: str, root: str) -> bool:
    """Say whether a module's path is ``root`` or below it."""
    return path == root or path.startswith(root + ".")


@dataclass(slots=True)
class LiveStorages:
    """Knows which storages of a run still exist, whoever holds them."""

    _storages: dict[int, tuple[Any, int]] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every tensor that an op of the block returns."""
        torch = require_torch()
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        storages = self._storages

        class Watch(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        storage = leaf.untyped_storage()
                        ref = StorageWeakRef(storage)
                        storages[ref.cdata] = (ref, int(storage.nbytes()))
                return result

        with Watch():
            yield

    def alive_bytes(self, excluded: set[int]) -> int:
        """Return the bytes of the storages that still exist, less the excluded ones."""
        gc.collect()
        return sum(
            nbytes
            for key, (ref, nbytes) in self._storages.items()
            if key not in excluded and not ref.expired()
        )


def _gradients(node: Any, inputs: list[Any]) -> tuple[Any, ...]:
    """Run a node's backward; return a gradient, or None, for each of its ``next_functions``.

    A function defined in Python returns one for every argument of its forward, tensor or not.
    """
    if not hasattr(node, "needs_input_grad"):
        result = node(*inputs)
        return result if isinstance(result, tuple) else (result,)
    result = node.apply(*inputs)
    made = result if isinstance(result, tuple) else (result,)
    wanted = iter(x for x, needed in zip(made, node.needs_input_grad, strict=True) if needed)
    return tuple(None if parent is None else next(wanted) for parent, _ in node.next_functions)


def _conformed(gradient: Any, expected: Any) -> Any:
    """The gradient as the engine hands it on: summed to what was broadcast, in its element type
    (``validate_outputs`` in torch/csrc/autograd/engine.cpp)."""
    shape = tuple(expected.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)


def run_backward(loss: Any) -> None:
    """Run the backward pass node by node, without PyTorch's engine.

    The engine asks the accelerator's driver for its devices, and there is none. The order is
    the engine's: a node runs when every node that feeds it has run. Leaves are not written.

    Args:
        loss: a tensor of one element.
    """
    torch = require_torch()
    root = loss.grad_fn
    waiting: dict[Any, int] = {root: 0}
    queue = [root]
    while queue:
        node = queue.pop()
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            if parent not in waiting:
                waiting[parent] = 0
                queue.append(parent)
            waiting[parent] += 1

    gradients: dict[Any, dict[int, Any]] = {root: {0: torch.ones_like(loss)}}
    ready = [root]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            given = gradients.pop(node, {})
            parents = node.next_functions
            if parents and given:
                inputs = [given.get(index) for index in range(len(node._input_metadata))]
                outputs = _gradients(node, inputs)
            else:
                outputs = (None,) * len(parents)
            for (parent, slot), gradient in zip(parents, outputs, strict=False):
                if parent is None:
                    continue
                if gradient is not None:
                    gradient = _conformed(gradient, parent._input_metadata[slot])
                    slots = gradients.setdefault(parent, {})
                    slots[slot] = slots[slot] + gradient if slot in slots else gradient
                waiting[parent] -= 1
                if waiting[parent] == 0:
                    ready.append(parent)
