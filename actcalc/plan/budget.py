"""A memory budget as text: ``70GiB``, ``6GB``, ``24G`` (as 24GB), ``500MB``, plain bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from actcalc.errors import SpecError

_HINT = "write bytes, or a number with B, kB, MB, GB, TB (1000) or KiB, MiB, GiB, TiB (1024)"
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST = 2**50
"""No budget may be larger: a pebibyte per GPU is a typing error."""
LEAST_BARE = 2**20
"""A number without a unit below this is taken for a forgotten unit: no GPU has so little."""


def parse_bytes(text: str, what: str = "--memory", *, bare: int = LEAST_BARE) -> int:
    """The number of bytes ``text`` names, rounded down.

    Raises ``SpecError`` for anything that is not a positive amount below a pebibyte, and for a
    number without a unit below ``bare``, whose unit is missing.
    """
    shown = text if len(text) <= 40 else text[:37] + "..."
    found = re.fullmatch(
        r"\s*([+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,2})?)"
        r"\s*(?:([kKmMgGtT])(i?)[bB]?|[bB])?\s*",
        text,
    )
    if not found:
        raise SpecError(f"{what} {shown!r} is no amount of memory", _HINT)
    base = 1024 if found[3] else 1000
    size = Fraction(found[1]) * base ** _POWER[(found[2] or "").lower()]
    if size < 1:
        raise SpecError(f"{what} {shown!r} is not above 0 bytes", "give the memory of one GPU")
    if size < bare and text.strip()[-1] in "0123456789.":
        number, prefix = text.strip(), "G" if size < 1000 else "M"
        raise SpecError(
            f"{what} {shown!r} has no unit, and would be {size.__ceil__():,} bytes",
            f"did you mean {number}{prefix}B or {number}{prefix}iB? (for bytes: {number}B)",
        )
    if size >= MOST:
        raise SpecError(f"{what} {shown!r} is more than any GPU has", _HINT)
    return int(size)
