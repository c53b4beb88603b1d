"""Every saved tensor of one layer: who saves it, its shape, formula and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actcalc.layers.core.graph import Op
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import LayerOutcome


@dataclass(frozen=True)
class Leaf:
    """One stored tensor."""

    layer: str
    """Its kind of layer, or embedding / head."""
    module: str
    """The part of the layer: norm, attention, ffn, ..."""
    op: str
    """The op that saves it."""
    tensor: str
    """Its name."""
    shape: str
    """Its shape in named dimensions."""
    formula: str
    """Its bytes as a formula."""
    dtype: str
    """Its element type."""
    bytes: int
    """Its bytes on one rank, for one micro-batch."""
    shared_with: tuple[str, ...]
    """Other ops that save it, at no cost."""


def leaves(
    model: ModelGraph, label: str, outcome: LayerOutcome, *, shared: bool = False
) -> tuple[Leaf, ...]:
    """The stored tensors of one layer under a policy; their bytes sum to what it stores.

    With ``shared`` those that exist once for all layers instead.
    """
    graph = outcome.graph
    names = [n for n in graph.saved if n in graph.shared] if shared else outcome.stored
    found = keepers(outcome, names)
    return tuple(_leaf(model, label, outcome, name, ops) for name, ops in found.items())


def keepers(outcome: LayerOutcome, names: Sequence[str]) -> dict[str, list[Op]]:
    """For each tensor the ops that have it kept: that save it, else that read it running again."""
    graph, rerun = outcome.graph, outcome.rerun
    again = {op.name for op in rerun}
    found: dict[str, list[Op]] = {}
    for name in names:
        savers = [op for op in graph.savers.get(name, ()) if op.name not in again]
        found[name] = savers or [op for op in graph.ops if op.name in again and name in op.inputs]
    return found


def module_of(keepers: Sequence[Op]) -> str:
    """The part of the layer that a tensor with such keepers belongs to."""
    return keepers[0].group if keepers else "layer"


def _leaf(
    model: ModelGraph, label: str, outcome: LayerOutcome, name: str, keepers: Sequence[Op]
) -> Leaf:
    tensor = outcome.graph.tensors[name]
    size = tensor.bytes * outcome.copies
    return Leaf(
        layer=label,
        module=module_of(keepers),
        op=keepers[0].name if keepers else "input",
        tensor=name,
        shape=tensor.shape_text,
        formula=size.formula(),
        dtype=tensor.dtype.label,
        bytes=int(size.value(model.sizes)),
        shared_with=tuple(op.name for op in keepers[1:]),
    )
