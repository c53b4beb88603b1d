"""A builder that puts a prefix before every name, so that a block can occur twice in a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actcalc.layers.core.algebra import Operand
from actcalc.layers.core.graph import DType, GraphBuilder


class Scoped(GraphBuilder):
    """Adds to the graph of another builder; tensors shared by layers keep their plain names."""

    def __init__(self, parent: GraphBuilder, prefix: str) -> None:
        super().__init__(parent.name, parent._tensors, parent._ops, parent._shared, parent._notes)
        self._prefix = prefix

    def tensor(self, name: str, shape: Iterable[Operand], dtype: DType) -> str:
        """Declare a tensor under the prefix and return its whole name."""
        return super().tensor(f"{self._prefix}{name}", shape, dtype)

    def shared(self, name: str, shape: Iterable[Operand], dtype: DType) -> str:
        """Declare a tensor that exists once for all layers, without the prefix."""
        if name not in self._tensors:
            super().tensor(name, shape, dtype)
            self._shared.add(name)
        return name

    def op(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Append an op under the prefix."""
        super().op(f"{self._prefix}{name}", *args, **kwargs)
