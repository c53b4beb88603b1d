"""Carry out an op-by-op plan with PyTorch: keep what it keeps, run again what it runs again.

Ops of one layer are numbered as a measurement numbers them. Saved tensors that the plan does not
keep are dropped after the forward and made again, from kept storages only, by running the planned
ops once more when backward asks for the first of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from actcalc.measure.ops import draws, written


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Spec:
    """A tensor without its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.key, self.form = key(tensor), (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.dtype = tensor.dtype

    def on(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype)
        size, stride, offset = self.form
        return made.set_(storages[self.key], offset, size, stride)


class Replay:
    """One layer's forward under a plan; ``again`` are the numbers of the ops to run again."""

    def __init__(self, again: set[int], outside: set[int]) -> None:
        self.again, self.outside = again, outside
        self.count = 0
        self.made: set[int] = set()
        self.alive: list[Any] = []  # while the forward runs: no key may be used twice
        self.log: list[tuple[Any, Any, Any, list[Any], Any]] = []
        self.kept: dict[int, torch.UntypedStorage] = {}
        self.storages: dict[int, torch.UntypedStorage] | None = None

    @contextmanager
    def running(self):
        replay = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                state = torch.get_rng_state() if draws(func, args, kwargs) else None
                result = func(*args, **kwargs)
                replay.note(func, args, kwargs, result, state)
                return result

        def pack(tensor):
            self.alive.append(tensor.detach())
            if key(tensor) in self.made:
                return Spec(tensor)
            if key(tensor) not in self.outside:
                self.kept[key(tensor)] = tensor.untyped_storage()
            return tensor.detach()

        def unpack(saved):
            if not isinstance(saved, Spec):
                return saved
            if self.storages is None:
                self.run_again()
            return saved.on(self.storages)

        with Mode(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.alive.clear()

    def note(self, func, args, kwargs, result, state) -> None:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        changed = [t for t in tree_leaves(written(func, args, kwargs))
                   if isinstance(t, torch.Tensor)]  # fmt: skip
        out = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.alive += [t.detach() for t in (*read, *out)]
        fresh = {key(t) for t in out} - {key(t) for t in read}
        touched = (fresh | {key(t) for t in changed}) - self.outside
        if not touched and not any(key(t) in self.outside for t in changed):
            return
        number, self.count = self.count, self.count + 1
        if number not in self.again:
            return
        for tensor in read:
            if key(tensor) not in self.made | self.outside:
                self.kept[key(tensor)] = tensor.untyped_storage()
        self.made |= fresh
        blank = tree_map(lambda v: Spec(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        hold = {key(t): t.untyped_storage() for t in read if key(t) in self.outside}
        self.log.append((func, blank, hold, [Spec(t) for t in out], state))

    def run_again(self) -> None:
        storages = self.storages = dict(self.kept)
        before = torch.get_rng_state()
        with torch.no_grad():
            for func, blank, hold, outputs, state in self.log:
                known = {**storages, **hold}
                args, kwargs = tree_map(
                    lambda v, known=known: v.on(known) if isinstance(v, Spec) else v, blank
                )
                if state is not None:
                    torch.set_rng_state(state)
                result = func(*args, **kwargs)
                made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
                for spec, tensor in zip(outputs, made, strict=True):
                    if spec.key not in known:
                        storages[spec.key] = tensor.untyped_storage()
        torch.set_rng_state(before)

    @property
    def kept_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())
