"""Bytes of one graph's tensors: of one run, or of many that differ in their sizes alone."""

from __future__ import annotations

from collections.abc import Iterable

from actcalc.layers.core.either import single, stacked
from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph


class Known:
    """What outcomes of one graph have in common: sizes of tensors and of temporaries in ops."""

    def __init__(self, model: ModelGraph, graph: Graph) -> None:
        self.sizes = model.tensor_bytes[graph]
        self.own = {n: 0 if n in graph.shared else size for n, size in self.sizes.items()}
        self.inside: dict[tuple[str, bool], int] = {}
        several = [size for size in self.own.values() if not single(size)]
        self._table = stacked(self.own.values()) if several else None
        self._at = {name: index for index, name in enumerate(self.own)}

    def total(self, names: Iterable[str]) -> int:
        """Bytes of tensors, those left out that exist once for all layers."""
        if self._table is None:
            return sum(map(self.own.__getitem__, names))
        rows = [self._at[name] for name in names]
        found: int = self._table[rows].sum(axis=0) if rows else 0
        return found
