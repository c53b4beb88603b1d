"""Parameters that axolotl trains alone (``axolotl/utils/freeze.py``): patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_LAYERS = re.compile(r"\^?(?:model\.)?layers\.([\d|()\[\]+*?-]{1,200})\.?(?:\*|\$)?")
_PARTS = (
    (re.compile(r"\^?lm_head(\.weight)?\$?"), "head"),
    (re.compile(r"\^?(model\.)?embed_tokens(\.weight)?\$?"), "embeddings"),
    (re.compile(r"\^?model\.norm(\.weight)?\$?"), "norm"),
)
_MOST = 1000
"""Layers that a pattern is tried on."""


def unfrozen(patterns: Sequence[str]) -> dict[str, Any] | None:
    """Which layers are frozen, and what is trained beside the others; None for other patterns.

    Read are the last layers, the head, the last norm and the embedding. Dots are dots there.
    """
    first: int | None = None
    parts: set[str] = set()
    for pattern in patterns:
        plain = pattern.replace("\\.", ".").strip()
        found = _LAYERS.fullmatch(plain)
        part = next((name for form, name in _PARTS if form.fullmatch(plain)), "")
        if found and first is None:
            first = _first(found[1])
            if first is None:
                return None
        elif part:
            parts.add(part)
        else:
            return None
    if first is None:
        return None
    if "head" not in parts and "norm" not in parts:
        fields: dict[str, Any] = {"training.train": ("layers",)}
        if "embeddings" in parts:
            fields["training.train"] = ("embeddings", "layers")
        return {**fields, **({"training.freeze": first} if first else {})}
    if not {"head", "norm"} <= parts or not first:
        return None
    return {"training.freeze": first, "training.train": tuple(parts & {"embeddings"})}


def _first(numbers: str) -> int | None:
    """The first layer of a pattern that matches all layers from it on, as far as it names any."""
    try:
        form = re.compile(numbers)
    except re.error:
        return None
    named = [index for index in range(_MOST) if form.fullmatch(str(index))]
    if not named or named != list(range(named[0], named[-1] + 1)):
        return None
    return named[0]


def patterns_of(first: int, depth: int, parts: Sequence[str]) -> list[str]:
    """The patterns that train layers from ``first`` on, and parts beside them.

    A head that is the embedding has no name of its own: its pattern matches nothing.
    """
    numbers = "|".join(str(index) for index in range(first, depth))
    beside = {"head": "^lm_head.weight$", "norm": "^model.norm.weight$",
              "embeddings": "^model.embed_tokens.weight$"}  # fmt: skip
    return [f"^model.layers.({numbers}).", *(beside[part] for part in parts)]
