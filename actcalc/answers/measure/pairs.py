"""Which predicted tensor each measured one is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from actcalc.answers.measure.figures import TensorBeside, difference
from actcalc.answers.measure.prediction import Expected

if TYPE_CHECKING:
    from actcalc.measure.results import SavedTensor

_ARGUMENTS = ("query", "key", "value")


def pair(
    measured: Sequence[SavedTensor], expected: Sequence[Expected] | None
) -> tuple[TensorBeside, ...]:
    """Measured tensors with the predicted ones that they are; ``None`` predicts nothing.

    Two can be the same if their sizes in bytes are. Where both sides have as many of a size, they
    are paired in the order of the ops; else those of the same shape first (whatever the order of
    its dimensions). A predicted one may also be several neighbours that one op saves (seed and
    offset of its random state). What is left over has no partner.
    """
    partners: dict[int, Expected] = {}
    left = list(expected or ())
    ordered = sorted(range(len(measured)), key=lambda index: _place(measured, index))
    for amount in dict.fromkeys(tensor.bytes for tensor in measured):
        mine = [index for index in ordered if measured[index].bytes == amount]
        theirs = [candidate for candidate in left if candidate.bytes == amount]
        found = dict(zip(mine, theirs, strict=False))
        if len(mine) != len(theirs):
            found = _by_shape(mine, theirs, measured)
        partners |= found
        left = [candidate for candidate in left if candidate not in found.values()]
    for candidate in tuple(left):
        parts = _parts_of(candidate, measured, partners)
        if parts:
            partners |= dict.fromkeys(parts, candidate)
            left.remove(candidate)
    prefix = _layer_path(measured)
    rows = [
        _row(tensor, partners.get(index), prefix, expected is not None)
        for index, tensor in enumerate(measured)
    ]
    return (*rows, *(_missing(each) for each in left))


def _place(measured: Sequence[SavedTensor], index: int) -> tuple[int, int]:
    """Where a tensor stands: autograd lists an attention's inputs by name, graphs q, k, v."""
    tensor = measured[index]
    node, _, attribute = tensor.op.partition(".")
    if attribute not in _ARGUMENTS:
        return index, 0
    first = index
    while first and measured[first - 1].op.partition(".")[0] == node:
        first -= 1
    return first, _ARGUMENTS.index(attribute) - len(_ARGUMENTS)


def _by_shape(
    mine: Sequence[int], theirs: Sequence[Expected], measured: Sequence[SavedTensor]
) -> dict[int, Expected]:
    """Pairs of one size in bytes, first those of the same shape, then the rest in order."""
    found: dict[int, Expected] = {}
    for same_shape in (True, False):
        for index in mine:
            for candidate in theirs:
                alike = _form(candidate.sizes) == _form(measured[index].shape)
                free = index not in found and candidate not in found.values()
                if free and (alike or not same_shape):
                    found[index] = candidate
    return found


def _parts_of(
    expected: Expected, measured: Sequence[SavedTensor], taken: Mapping[int, Expected]
) -> tuple[int, ...]:
    """Indices of neighbouring free tensors of one op that together have the expected size."""
    for start in range(len(measured)):
        parts: list[int] = []
        for index in range(start, len(measured)):
            node = measured[index].op.partition(".")[0]
            if index in taken or node != measured[start].op.partition(".")[0]:
                break
            parts.append(index)
            if sum(measured[each].bytes for each in parts) == expected.bytes:
                return tuple(parts)
    return ()


def _form(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without the order of its dimensions and those of size 1."""
    return tuple(sorted(size for size in shape if size != 1))


def _layer_path(tensors: Sequence[SavedTensor]) -> str:
    """Path of the layer that all these tensors belong to: through the index in their paths."""
    paths = [tensor.module.split(".") for tensor in tensors if tensor.module]
    if not paths or tensors[0].phase[:5] != "layer":
        return ""
    index = tensors[0].phase[5:]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
        if parts[0].isdigit() and (parts[0] == index or len(common) > 1):
            return ".".join(common) + "."
    return ""


def _row(
    tensor: SavedTensor, partner: Expected | None, prefix: str, predicted: bool
) -> TensorBeside:
    expected = tensor.bytes if partner else 0 if predicted else None
    return TensorBeside(
        module=tensor.module.removeprefix(prefix),
        op=tensor.op,
        shape=tensor.shape,
        dtype=tensor.dtype,
        also_saved_by=tuple(each.removeprefix(prefix) for each in tensor.also_saved_by),
        predicted_op=partner.op if partner else None,
        predicted_tensor=partner.tensor if partner else None,
        predicted_shape=partner.shape if partner else None,
        **difference(tensor.bytes, expected),
    )


def _missing(expected: Expected) -> TensorBeside:
    return TensorBeside(
        module=None,
        op=None,
        shape=None,
        dtype=None,
        also_saved_by=(),
        predicted_op=expected.op,
        predicted_tensor=expected.tensor,
        predicted_shape=expected.shape,
        **difference(0, expected.bytes),
    )
