"""The highest moments of a chunk of parts, forward and backward, with their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actcalc.memory.parts import Part


class Peak(NamedTuple):
    """The highest moment of a stage beyond what stays resident."""

    bytes: int
    activations: int
    """Stored activations at that moment."""
    gradients_absent: int
    """Bytes of gradients that do not exist yet at that moment."""
    where: str
    """In words: in backward of layer 11: re-running one whole layer."""


def first_gradients(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    """For each part the parameters whose gradients its backward is the first to make.

    A pair: those of each occurrence, and those that its last occurrence makes for all (weights
    that occurrences share). Backward runs from the last part to the first, and a weight that
    several parts have (a tied table) has its gradient from the first backward on.
    """
    known: set[str] = set()
    found = []
    for part in reversed(parts):
        fresh = {scope: count for scope, count in part.trained.shared if scope not in known}
        known |= set(fresh)
        found.append((part.trained.own, sum(fresh.values())))
    return tuple(reversed(found))


@dataclass(frozen=True)
class Moments:
    """The highest moments of one chunk relative to what it stores whole, with their names."""

    stored: int
    forward: int
    forward_at: str
    backward: int
    backward_at: str
    backward_absent: int
    """Bytes of gradients not yet made at the highest moment of backward."""


def chunk_moments(
    parts: Sequence[Part],
    gradient: float,
    *,
    persistent: bool,
    made: Sequence[tuple[int, int]] | None = None,
) -> Moments:
    """The highest forward and backward moment of a chunk.

    ``gradient`` is the bytes of one parameter's gradient on a rank (a fraction if sharded). Where
    gradients are not persistent, those of parts whose backward has not ended do not exist yet.
    ``made`` is what :func:`first_gradients` says of the parts, where other chunks of the stage
    share weights with them.
    """
    whole = sum(part.stored * part.count for part in parts)
    grads = first_gradients(parts) if made is None else made
    pairs = list(zip(parts, grads, strict=True))
    most = round(sum(own * part.count + tail for part, (own, tail) in pairs) * gradient)
    forward, forward_at, backward, backward_at = 0, "", 0, ""
    # The first part's backward beats this whatever is absent then, unless there are no parts.
    before, absent, chosen = 0, 0, most + 1 if parts else 0
    for part, (own, tail) in pairs:
        prefix = before + part.stored * (part.count - 1)
        if prefix + part.forward > forward or not forward_at:
            forward = prefix + part.forward
            forward_at = _name(part, part.count - 1, "forward")
        last = 0 if persistent else round((absent + own * part.count + tail) * gradient)
        if prefix + part.backward - last > backward - chosen:
            backward, chosen = prefix + part.backward, last
            backward_at = _name(part, part.count - 1, "backward")
        if part.count > 1 and not persistent:
            missing = round((absent + own) * gradient)
            if before + part.backward - missing > backward - chosen:
                backward, chosen = before + part.backward, missing
                backward_at = _name(part, 0, "backward")
        before += part.stored * part.count
        absent += own * part.count + tail
    return Moments(whole, forward - whole, forward_at, backward - whole, backward_at, chosen)


def _name(part: Part, index: int, way: str) -> str:
    name = part.name
    if part.first >= 0 and part.layers == 1:
        name = f"layer {part.first + index}"
    if way == "forward":
        if part.first < 0:
            what = ": all logits at once" if name == "head and loss" else ""
            return f"at the end of forward, in {name}{what}"
        return f"in forward of {name}"
    if part.first < 0:
        what = ": logits and their gradient" if name == "head and loss" else ""
        return f"in backward of {name}{what}"
    if not part.reruns:
        return f"in backward of {name}"
    if part.layers > 1:
        return f"in backward of {name}: re-running {part.layers} whole layers"
    what = "one whole layer" if part.backward_at == "re-run" else "its modules"
    return f"in backward of {name}: re-running {what}"
