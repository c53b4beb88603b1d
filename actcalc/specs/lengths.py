"""Lengths of sequences and how often each occurs: what padding or packing makes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from actcalc.errors import SpecError, shorten

_MOST = 1000
_WORD = re.compile(r"(\d{1,9})(?::(\d{1,12}(?:\.\d{1,12})?|\.\d{1,12}))?")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, the shortest first."""

    shares: tuple[tuple[int, float], ...]
    """Each length with its share of the sequences; shares sum to 1."""

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return self.shares[-1][0]

    @property
    def mean(self) -> float:
        """Tokens of a sequence on average."""
        return sum(length * share for length, share in self.shares)

    @property
    def pairs(self) -> float:
        """Pairs of tokens of a sequence on average: the mean of squares."""
        return sum(length**2 * share for length, share in self.shares)

    def padded(self, micro_batch: int) -> float:
        """Tokens of a sequence on average once ``micro_batch`` drawn ones are as long as the
        longest of them: the mean of a maximum of so many independent draws.
        """
        below, before, result = 0.0, 0.0, 0.0
        for length, share in self.shares:
            below = min(1.0, below + share)
            result += length * (below**micro_batch - before**micro_batch)
            before = below
        return result

    def cut(self, longest: int) -> Lengths:
        """The same with sequences cut off at ``longest`` tokens."""
        kept = [(min(length, longest), share) for length, share in self.shares]
        whole = dict.fromkeys((length for length, _ in kept), 0.0)
        for length, share in kept:
            whole[length] += share
        return Lengths(tuple(sorted(whole.items())))


def parse_lengths(text: str) -> Lengths:
    """Lengths with weights: ``512:70,2048:25,8192:5``; without weights all are as frequent.

    Raises ``SpecError`` for what is no such list.
    """
    words = [word.strip() for word in text.split(",")]
    found = [_WORD.fullmatch(word) for word in words]
    if not 0 < len(words) <= _MOST or not all(found):
        raise SpecError(
            f"lengths is {shorten(text)}, no list of lengths",
            "write tokens with how often they occur: 512:70,2048:25,8192:5",
        )
    weights = [(int(each[1]), float(each[2] or 1)) for each in found if each]
    total = sum(weight for _, weight in weights)
    if not total or any(length == 0 for length, _ in weights):
        raise SpecError(
            f"lengths is {shorten(text)}: a length or all weights are 0", "give numbers"
        )
    kept = sorted((length, weight / total) for length, weight in weights if weight)
    return Lengths(tuple(kept)).cut(kept[-1][0])
