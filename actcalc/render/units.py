"""Numbers for people: three significant digits, and units that say what they are."""

from __future__ import annotations

from actcalc.specs.numbers import digits as digits
from actcalc.specs.numbers import percent as percent

DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


SBH_T = "sbh/t"
"""A unit of a run's own, in which the paper's 34 and 80 can be seen."""


class Multiple(str):
    """A unit made of the run's own sizes: its name, and the bytes of one."""

    bytes: float

    def __new__(cls, name: str, size_bytes: float) -> Multiple:
        """The unit called ``name``, of ``size_bytes``."""
        unit = super().__new__(cls, name)
        unit.bytes = size_bytes
        return unit


def scale(largest: float, units: str) -> tuple[float, str]:
    """Divisor and unit in which ``largest`` bytes reads well (1 to 1000, 1 to 1024 for GiB)."""
    if isinstance(units, Multiple):
        return units.bytes, str(units)
    base, names = (1000.0, DECIMAL) if units == "GB" else (1024.0, BINARY)
    power = 0
    while power + 1 < len(names) and abs(largest) >= 0.9995 * base ** (power + 1):
        power += 1
    return base**power, names[power]


def size(value: float, units: str) -> str:
    """Bytes with their own unit: ``359 MB`` or ``342 MiB``."""
    divisor, unit = scale(value, units)
    return f"{amount(value, divisor, units)} {unit}"


def amount(value: float, divisor: float, units: str) -> str:
    """Bytes over ``divisor``: three digits, but a multiple that is whole as it is (34)."""
    whole = isinstance(units, Multiple) and value % divisor == 0
    return f"{value / divisor:,.0f}" if whole else digits(value / divisor)


def count(value: float) -> str:
    """A large count: ``174.6 B`` (billions), ``340 M``."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g} {letter}"
    return f"{value:g}"


def flops_scale(largest: float) -> tuple[float, str]:
    """Divisor and unit in which ``largest`` FLOPs read well."""
    for limit, prefix in (
        (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"),
    ):  # fmt: skip
        if largest >= limit:
            return limit, f"{prefix}FLOP"
    return 1.0, "FLOP"


def flops(value: float) -> str:
    """FLOPs with a prefix: ``2.17 PFLOP``."""
    divisor, unit = flops_scale(value)
    return f"{digits(value / divisor) if divisor > 1 else f'{value:g}'} {unit}"


def seconds_scale(largest: float) -> tuple[float, str]:
    """Divisor and unit in which ``largest`` seconds read well."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(largest) >= limit:
            return limit, unit
    return 1e-9, "ns"


def seconds(value: float) -> str:
    """Seconds with a unit that suits: ``1.3 ms``."""
    divisor, unit = seconds_scale(value)
    return f"{digits(value / divisor)} {unit}" if value else "0"
