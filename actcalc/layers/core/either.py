"""What a rule needs to take one run's numbers, or arrays of many runs' at once.

Sizes are Python integers, exact however large they get, or NumPy arrays of 64-bit ones. A rule made
of sums, products, quotients and these functions is written once for both; a rule that cannot be
(it tries tilings, it takes logarithms) goes through ``each``. NumPy is loaded only where arrays
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

from actcalc.layers.core.algebra import least, most


class MixedError(Exception):
    """Runs that were to be worked out together differ in more than their sizes."""


def single(value: Any) -> bool:
    """Whether a value is one number, not an array of them."""
    return not hasattr(value, "ndim") or value.ndim == 0


def exact(value: Any) -> Any:
    """A size as an integer; arrays hold integers already."""
    return int(value) if single(value) else value


def real(value: Any) -> Any:
    """A size as a floating-point number, or an array of them."""
    return float(value) if single(value) else value.astype(float)


def wide(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sizes whose products may go beyond 64 bits (FLOPs do): arrays become floating-point."""
    if all(map(single, sizes.values())):
        return sizes
    return {name: value if single(value) else value.astype(float) for name, value in sizes.items()}


def nothing(value: Any) -> bool:
    """Whether a value is 0, or an array of zeros."""
    return not (value if single(value) else value.any())


def greatest(values: Iterable[Any], default: Any = 0) -> Any:
    """The largest of some numbers, or of arrays run by run; ``default`` if there are none."""
    found = list(values)
    return reduce(most, found) if found else default


def smallest(values: Iterable[Any]) -> Any:
    """The smallest of some numbers, or of arrays run by run."""
    return reduce(least, values)


def same(left: Any, right: Any) -> bool:
    """Whether two sizes are equal; raises ``MixedError`` where some runs say yes and some no."""
    equal = left == right
    if single(equal):
        return bool(equal)
    if equal.all():
        return True
    if equal.any():
        raise MixedError
    return False


def largest_of(names: Iterable[str], size: Callable[[str], Any]) -> str:
    """The first name with the largest size; raises ``MixedError`` where runs differ in it."""
    best, *others = names
    for name in others:
        if not single(size(name)):
            larger = size(name) > size(best)
            if larger.any() and not larger.all():
                raise MixedError
            best = name if larger.all() else best
        elif size(name) > size(best):
            best = name
    return best


def each(rule: Callable[..., Any], *values: Any) -> Any:
    """``rule`` of numbers; of arrays, of each different combination of their elements once."""
    if all(map(single, values)):
        return rule(*values)
    import numpy

    columns = numpy.broadcast_arrays(*values)
    rows = list(zip(*(column.ravel().tolist() for column in columns), strict=True))
    known = {row: rule(*row) for row in dict.fromkeys(rows)}
    return numpy.array([known[row] for row in rows]).reshape(columns[0].shape)


def rounded(value: Any) -> Any:
    """The nearest integer, halves to the even one."""
    return round(value) if single(value) else value.round().astype(int)


def stacked(values: Iterable[Any]) -> Any:
    """Sizes one below the other: a table with a column for each run."""
    import numpy

    return numpy.stack(numpy.broadcast_arrays(*values)).astype(numpy.int64)
