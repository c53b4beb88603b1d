"""Numbers of people: as they write them, and as they read them."""

from __future__ import annotations

_TIMES = {"k": 2**10, "m": 2**20}


def whole(text: str) -> int:
    """A whole number as it is written; ``8k`` is 8192 and ``1M`` 1048576, as sequences are named.

    Raises ``ValueError`` for anything else.
    """
    word = text.strip()
    times = _TIMES.get(word[-1:].lower())
    if times is None:
        return int(word, 10)
    value = float(word[:-1]) * times
    if not 0 <= value < 2**53 or value != int(value):
        raise ValueError(text)
    return int(value)


def digits(value: float) -> str:
    """Three significant digits, without an exponent: 34.4, 1,555, 0.604, <0.001, 0."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    if size >= 0.0005:
        return f"{value:.3f}"
    return "<0.001" if value > 0 else ">-0.001"


def percent(ratio: float, places: int | None = None) -> str:
    """A share in per cent: ``2.7 %``, ``70 %``; with so many ``places`` where they are given."""
    value = 100 * ratio
    if places is not None:
        return f"{value:.{places}f} %"
    if value == 0:
        return "0 %"
    if abs(value) < 0.001:
        return "<0.001 %" if value > 0 else ">-0.001 %"
    if abs(value) < 0.05:
        return f"{value:.2g} %"
    one = abs(value) < 9.95 or 99.5 <= abs(value) < 100
    return f"{value:.1f} %" if one else f"{value:.0f} %"
