"""Numbers for people: three significant digits, and units that say what they are."""

from __future__ import annotations

DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def scale(largest: float, units: str) -> tuple[float, str]:
    """Divisor and unit in which ``largest`` bytes reads well (1 to 1000, 1 to 1024 for GiB)."""
    base, names = (1000.0, DECIMAL) if units == "GB" else (1024.0, BINARY)
    power = 0
    while power + 1 < len(names) and abs(largest) >= 0.9995 * base ** (power + 1):
        power += 1
    return base**power, names[power]


def digits(value: float) -> str:
    """Three significant digits, without an exponent: 34.4, 107, 0.604, 0."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    if size >= 0.0005:
        return f"{value:.3f}"
    return f"{value:.1g}"


def size(value: float, units: str) -> str:
    """Bytes with their own unit: ``359 MB`` or ``342 MiB``."""
    divisor, unit = scale(value, units)
    return f"{digits(value / divisor)} {unit}"


def percent(ratio: float) -> str:
    """A share in per cent: ``2.7 %``, ``70 %``."""
    value = 100 * ratio
    if value == 0:
        return "0 %"
    if abs(value) < 0.05:
        return f"{value:.2g} %"
    one = abs(value) < 9.95 or 99.5 <= abs(value) < 100
    return f"{value:.1f} %" if one else f"{value:.0f} %"


def count(value: float) -> str:
    """A large count: ``174.6 B`` (billions), ``340 M``."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g} {letter}"
    return f"{value:g}"


def flops(value: float) -> str:
    """FLOPs with a prefix: ``2.17 PFLOP``."""
    for limit, prefix in (
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
    ):
        if value >= limit:
            return f"{digits(value / limit)} {prefix}FLOP"
    return f"{value:g} FLOP"
