"""Numbers for people: how many digits they have, and how a share is written."""

from __future__ import annotations


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


def percent(ratio: float) -> str:
    """A share in per cent: ``2.7 %``, ``70 %``."""
    value = 100 * ratio
    if value == 0:
        return "0 %"
    if abs(value) < 0.001:
        return "<0.001 %" if value > 0 else ">-0.001 %"
    if abs(value) < 0.05:
        return f"{value:.2g} %"
    one = abs(value) < 9.95 or 99.5 <= abs(value) < 100
    return f"{value:.1f} %" if one else f"{value:.0f} %"
