"""Gradients while one layer's backward runs: those of tensors, by storage, and those of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from actcalc.layers.core.either import rounded, same
from actcalc.layers.core.graph import Op
from actcalc.memory.known import Known

_ALIASING = ("add", "view")
# The fused softmax writes its gradient over that of its output (Transformer Engine
# pytorch/csrc/extensions/softmax.cpp, Megatron-LM fused_kernels of old and Apex).
_IN_PLACE = ("softmax", "fused")


class Gradients(NamedTuple):
    """How weight gradients come to be where they are no part of their product's kernel.

    A product makes one in the activations' type; it is then cast to the type in which gradients
    are summed. Where none was there before, autograd takes it over as it is, so that those of the
    layer at work stay from their own op on (torch/csrc/autograd/functions/accumulate_grad.h).
    """

    summed: int = 0
    """Bytes per parameter of the type in which gradients are summed."""
    kept: float = 0.0
    """Bytes per parameter that stay once the op is done: 0 where they are added to others."""
    tied: frozenset[str] = frozenset()
    """Scopes of weights whose first gradient waits for a second one in the same backward."""


NO_GRADIENTS = Gradients()


class OfTensors:
    """Gradients alive, by storage: views and sums hand a storage on."""

    def __init__(self, known: Known, *, op_by_op: bool) -> None:
        """``op_by_op``: autograd sums gradients of single ops."""
        self.known, self.op_by_op = known, op_by_op
        self.storage: dict[str, int] = {}
        self.names: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0
        self.total = 0

    def add(self, name: str) -> None:
        """A gradient of its own for ``name``."""
        known = self.known
        if name in known.without_gradient:
            return
        self.count += 1
        self.storage[name] = self.count
        self.names[self.count] = 1
        self.sizes[self.count] = known.sizes[name]
        self.total = self.total + known.sizes[name]

    def seen(self) -> tuple[int, Mapping[int, int]]:
        """Bytes of all, and of each storage."""
        return self.total, dict(self.sizes)

    def pass_on(self, op: Op) -> int:
        """Make (or hand on) the gradients of the op's inputs; bytes of those only to be added."""
        handing = op.kind in _ALIASING
        aliasing = handing or (op.kind, op.kernel) == _IN_PLACE
        outputs = op.outputs if aliasing else ()
        given = next((self.storage[n] for n in outputs if n in self.storage), None)
        added = 0
        for name in op.inputs:
            if name in self.storage:
                # summed in place into the gradient that is there
                # (torch/csrc/autograd/input_buffer.cpp can_accumulate_inplace)
                if self.op_by_op and not handing:
                    added += self.known.sizes[name]
            elif given is not None and same(self.sizes[given], self.known.sizes[name]):
                self.storage[name] = given
                self.names[given] += 1
            else:
                self.add(name)
        return added

    def drop(self, names: Iterable[str]) -> None:
        """Forget the gradients of ``names``; a storage goes with its last name."""
        for name in names:
            number = self.storage.pop(name, None)
            if number is None:
                continue
            self.names[number] -= 1
            if not self.names[number]:
                self.total = self.total - self.sizes.pop(number)


class OfWeights:
    """Gradients of one layer's weights, as autograd makes and keeps them.

    Those of a tied table wait for one another: the product's is a view (its weight is read
    transposed), so that the look-up's is added out of place; a cast one is added to in place.
    """

    def __init__(self, known: Known, rule: Gradients, act: int, *, op_by_op: bool) -> None:
        """``act``: bytes of an activation's element, the type in which products make them."""
        self.known, self.rule, self.act, self.active = known, rule, act, op_by_op
        self.kept = 0
        self._seen: set[str] = set()

    def pass_on(self, op: Op) -> tuple[int, int]:
        """Bytes of weight gradients while ``op`` runs backward, and while its own are summed."""
        if not self.active or not op.weights:
            return self.kept, self.kept
        rule = self.rule
        first = rule.summed if op.kind == "embedding" else min(self.act, rule.summed)
        made = summed = stays = 0
        for weight, count in zip(op.weights, self.known.parameters(op), strict=True):
            if weight.frozen:
                continue
            made += count * first
            summed += count * (rule.summed if first != rule.summed else 0)
            if weight.scope in rule.tied and op.kind == "embedding":
                if weight.scope not in self._seen and self.act == rule.summed:
                    summed += count * rule.summed
            elif weight.scope not in self._seen:
                stays += rounded(count * rule.kept)
            self._seen.add(weight.scope) if weight.scope else None
        now = self.kept + made
        self.kept = self.kept + stays
        return now, now + summed
