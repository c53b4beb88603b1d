"""Sizes as polynomials over named dimensions, so that one definition gives number and formula.

An :class:`Expr` is a Laurent polynomial (integer or rational coefficients, negative powers for
sharding degrees) over one-letter symbols. ``Expr.value`` evaluates it exactly over Python ints,
or element-wise over NumPy arrays; ``Expr.formula`` prints it in the notation of the papers,
e.g. ``sbh(34+5as/h)/t``.

Symbols: s sequence, b micro-batch, h hidden, a heads, k key/value heads, d head dimension,
f feed-forward width, v vocabulary, t tensor-parallel, c context-parallel; the graph builders
document the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    from fractions import Fraction

Monomial: TypeAlias = tuple[tuple[str, int], ...]
Coefficient: TypeAlias = Union[int, "Fraction"]
Operand: TypeAlias = Union["Expr", int, "Fraction"]

# The order in which symbols are written inside a product: head counts first, as in "5as²b".
_ORDER = {symbol: index for index, symbol in enumerate("KEGakqrnsbhdpwfuvxyz")}
_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _rank(symbol: str) -> tuple[int, str]:
    return _ORDER.get(symbol, len(_ORDER)), symbol


class Expr:
    """An immutable Laurent polynomial over named dimensions."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, Coefficient]) -> None:
        self.terms: dict[Monomial, Coefficient] = {m: c for m, c in terms.items() if c}

    @staticmethod
    def of(value: Operand) -> Expr:
        """Return ``value`` as an expression (a plain number becomes a constant)."""
        return value if isinstance(value, Expr) else Expr({(): value})

    def __add__(self, other: Operand) -> Expr:
        terms = dict(self.terms)
        for monomial, coefficient in Expr.of(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Expr(terms)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Operand) -> Expr:
        return self + (-Expr.of(other))

    def __mul__(self, other: Operand) -> Expr:
        if not isinstance(other, Expr):
            return Expr({m: c * other for m, c in self.terms.items()})
        terms: dict[Monomial, Coefficient] = {}
        for left, p in self.terms.items():
            for right, q in other.terms.items():
                monomial = _multiply(left, right)
                terms[monomial] = terms.get(monomial, 0) + p * q
        return Expr(terms)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Expr:
        """Divide by a single monomial or number; raises ``ValueError`` for a sum."""
        divisor = Expr.of(other)
        if len(divisor.terms) != 1:
            raise ValueError(f"can only divide by one term, not by {divisor}")
        ((monomial, coefficient),) = divisor.terms.items()
        number: Coefficient = 1
        if coefficient != 1:
            from fractions import Fraction

            inverse = Fraction(1) / coefficient
            number = inverse.numerator if inverse.denominator == 1 else inverse
        return self * Expr({tuple((s, -p) for s, p in monomial): number})

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expr):
            return self.terms == other.terms
        number: Any = other
        if hasattr(number, "numerator"):
            return self.terms == Expr({(): number}).terms
        return NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __repr__(self) -> str:
        return f"Expr({self.formula()})"

    def __str__(self) -> str:
        return self.formula()

    def symbols(self) -> frozenset[str]:
        """The symbols that occur."""
        return frozenset(symbol for monomial in self.terms for symbol, _ in monomial)

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """Evaluate at ``sizes`` (symbol -> int, or NumPy array for many layouts at once).

        Exact over Python ints. A term that does not divide evenly is rounded up: a shard of a
        tensor holds whole elements.
        """
        total: Any = 0
        for monomial, coefficient in self.terms.items():
            above: Any = coefficient.numerator
            below: Any = coefficient.denominator
            for symbol, power in monomial:
                size = sizes[symbol]
                for _ in range(abs(power)):
                    if power > 0:
                        above = above * size
                    else:
                        below = below * size
            total = total + -(-above // below)
        return total

    def at(self, values: Mapping[str, Operand]) -> Expr:
        """The expression with some symbols replaced by others, or by numbers."""
        result = Expr({})
        for monomial, coefficient in self.terms.items():
            term = Expr({(): coefficient})
            for symbol, power in monomial:
                value = Expr.of(values.get(symbol, Expr({((symbol, 1),): 1})))
                for _ in range(abs(power)):
                    term = term * value if power > 0 else term / value
            result = result + term
        return result

    def formula(self) -> str:
        """The expression in the papers' notation, common factors taken out."""
        return _formula(self.terms)


ZERO = Expr({})
ONE = Expr({(): 1})


def symbol(name: str) -> Expr:
    """The expression that is the one symbol ``name``."""
    return Expr({((name, 1),): 1})


def product(factors: Iterable[Operand]) -> Expr:
    """The product of ``factors``; the empty product is 1."""
    result = ONE
    for factor in factors:
        result = result * factor
    return result


def total(parts: Iterable[Operand]) -> Expr:
    """The sum of ``parts``; the empty sum is 0."""
    terms: dict[Monomial, Coefficient] = {}
    for part in parts:
        for monomial, coefficient in Expr.of(part).terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
    return Expr(terms)


def added(parts: Iterable[Any]) -> Any:
    """The sum of numbers, or of arrays, added one after the other.

    What ``sum`` makes of floats depends on the Python: from 3.12 on it carries rounding errors
    along. The same run has the same digits everywhere.
    """
    whole: Any = 0
    for part in parts:
        whole = whole + part
    return whole


def most(left: Any, right: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays."""
    if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        return max(left, right)
    import numpy

    return numpy.maximum(left, right)


def least(left: Any, right: Any) -> Any:
    """The smaller of two numbers, or of each pair of two arrays."""
    return -most(-left, -right)


_NUMBERS = (int, float)


@lru_cache(maxsize=4096)
def _multiply(left: Monomial, right: Monomial) -> Monomial:
    if not left:
        return right
    if not right:
        return left
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted((n, p) for n, p in powers.items() if p))


def _divide(left: Monomial, right: Monomial) -> Monomial:
    return _multiply(left, tuple((name, -power) for name, power in right))


_SBH: Monomial = (("b", 1), ("h", 1), ("s", 1))
_SB: Monomial = (("b", 1), ("s", 1))


def _formula(terms: Mapping[Monomial, Coefficient]) -> str:
    if not terms:
        return "0"
    factored = {m: c for m, c in terms.items() if dict(m).get("s", 0) and dict(m).get("b", 0)}
    rest = {m: c for m, c in terms.items() if m not in factored}
    parts = [_factored(factored)] if factored else []
    parts += [_term(m, c) for m, c in _sorted(rest)]
    return "+".join(parts).replace("+-", "-")


def _factored(terms: Mapping[Monomial, Coefficient]) -> str:
    """Terms that all contain s·b: ``sbh(...)/t`` if that reads well, else ``sb(...)``."""
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        return _term(monomial, coefficient)
    shards = [{n for n, p in m if p < 0} for m in terms]
    common = tuple((name, -1) for name in sorted(set.intersection(*shards)))
    for base in (_SBH, _SB):
        factor = _multiply(base, common)
        inner = {_divide(m, factor): c for m, c in terms.items()}
        over_h = sum(1 for m in inner if dict(m).get("h", 0) < 0)
        if base is _SB or (factor in terms and over_h <= 1) or (over_h == 0):
            break
    body = "+".join(_term(m, c) for m, c in _sorted(inner)).replace("+-", "-")
    if len(inner) == 1:
        ((monomial, coefficient),) = inner.items()
        return _term(_multiply(monomial, factor), coefficient)
    above = _letters((n, p) for n, p in factor if p > 0)
    below = _letters((n, -p) for n, p in factor if p < 0)
    return f"{above}({body})" + _over(below)


def _sorted(terms: Mapping[Monomial, Coefficient]) -> list[tuple[Monomial, Coefficient]]:
    """Plain numbers first, then numbers over shards, then the rest, each in symbol order."""

    def key(item: tuple[Monomial, Coefficient]) -> tuple[bool, int, list[tuple[int, str]]]:
        above = [n for n, p in item[0] if p > 0]
        return bool(above), len(item[0]), sorted(_rank(n) for n in above)

    return sorted(terms.items(), key=key)


def _letters(powers: Iterable[tuple[str, int]]) -> str:
    return "".join(
        name + (str(power).translate(_SUPERSCRIPT) if power > 1 else "")
        for name, power in sorted(powers, key=lambda item: _rank(item[0]))
    )


def _over(below: str) -> str:
    if not below:
        return ""
    return f"/{below}" if len(below) == 1 else f"/({below})"


def _term(monomial: Monomial, coefficient: Coefficient) -> str:
    above = _letters((n, p) for n, p in monomial if p > 0)
    below = _letters((n, -p) for n, p in monomial if p < 0)
    number = "" if coefficient == 1 and above else _number(coefficient)
    return f"{number}{above or ''}" + _over(below)


def _number(coefficient: Coefficient) -> str:
    if coefficient.denominator != 1:
        return f"({coefficient.numerator}/{coefficient.denominator})"
    return str(coefficient)
