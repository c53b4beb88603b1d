"""The algebra of sizes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actcalc.layers.core.algebra import ONE, ZERO, Expr, product, symbol, total

s, b, h, a, t, f = (symbol(letter) for letter in "sbhatf")
SIZES = {"s": 12, "b": 5, "h": 16, "a": 4, "t": 2, "f": 44}


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (s * b * h * 34 + a * s * s * b * 5, "sbh(34+5as/h)"),
        ((s * b * h * 34 + a * s * s * b * 5) / t, "sbh(34+5as/h)/t"),
        (s * b * h * 10 + s * b * h * 24 / t + a * s * s * b * 5 / t, "sbh(10+24/t+5as/(ht))"),
        (s * b * h * 2, "2sbh"),
        (s * b * h * 2 / t, "2sbh/t"),
        (a * s * s * b, "as²b"),
        (s * b * (h * 8 + f * 6 + 8), "sb(8+8h+6f)"),
        (s * h * 8 + 24, "24+8sh"),
        (ZERO, "0"),
        (ONE, "1"),
        (h / 2, "(1/2)h"),
        (s * b - s * b, "0"),
    ],
)
def test_formula(expr, text):
    assert expr.formula() == text


def test_division_by_a_sum_is_refused():
    with pytest.raises(ValueError, match="one term"):
        s / (b + h)


def test_an_uneven_shard_is_rounded_up():
    assert (s / symbol("k")).value({"s": 10, "k": 4}) == 3


exprs = st.recursive(
    st.sampled_from([s, b, h, a, ONE]) | st.integers(-9, 9).map(Expr.of),
    lambda inner: (
        st.tuples(inner, inner).map(lambda p: p[0] + p[1])
        | st.tuples(inner, inner).map(lambda p: p[0] * p[1])
    ),
    max_leaves=8,
)


@given(exprs, exprs)
def test_ring(left, right):
    assert left + right == right + left
    assert left * right == right * left
    assert (left + right) * left == left * left + right * left
    assert (left + right).value(SIZES) == left.value(SIZES) + right.value(SIZES)
    assert (left * right).value(SIZES) == left.value(SIZES) * right.value(SIZES)
    assert left - left == ZERO


@given(st.lists(exprs, max_size=5))
def test_sum_and_product(parts):
    assert total(parts).value(SIZES) == sum(part.value(SIZES) for part in parts)
    expected = 1
    for part in parts:
        expected *= part.value(SIZES)
    assert product(parts).value(SIZES) == expected


def test_fractions_stay_exact():
    third = s * Fraction(1, 3)
    assert third * 3 == s
    assert third.value({"s": 9}) == 3
