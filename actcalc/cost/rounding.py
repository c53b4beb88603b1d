"""Differences of floats, where those that are only rounding are none."""

from __future__ import annotations

ROUNDING = 1e-12
"""Relative; sums of floats that are equal in exact arithmetic differ by less."""


def difference(one: float, other: float, *, of: float = 0.0) -> float:
    """``one - other``; 0 where that is rounding of the two, or of a sum ``of`` that has them."""
    found = one - other
    return 0.0 if abs(found) <= ROUNDING * max(abs(one), abs(other), abs(of)) else found


def growth(one: float, other: float) -> float:
    """``one / other - 1``, how much more the one is; 0 where they differ by rounding."""
    return difference(one, other) / other
