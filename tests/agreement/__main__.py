"""Thousands of random runs: ``python -m tests.agreement --count 3000 --seed 1``.

Prints every kind of disagreement with how often it was found, one example, and the command lines
that repeat it. Exit 1 if there is any.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.agreement.questions import Disagreement, disagreements
from tests.agreement.runs import random_run


class Tally:
    """Kinds of disagreement, how often each was found, and the first of each."""

    def __init__(self) -> None:
        self.runs = self.refused = 0
        self.counts: Counter[str] = Counter()
        self.first: dict[str, tuple[str, Disagreement]] = {}

    def add(self, seed: str) -> None:
        """Ask about one run."""
        self.runs += 1
        found = disagreements(random_run(seed))
        if found is None:
            self.refused += 1
            return
        for one in {each.kind: each for each in reversed(found)}.values():
            self.counts[one.kind] += 1
            self.first.setdefault(one.kind, (seed, one))

    def lines(self) -> list[str]:
        """Kinds, most frequent first, each with its first example."""
        text = [f"{self.runs} runs, {self.refused} of them refused, {len(self.counts)} kinds"]
        for kind, count in self.counts.most_common():
            seed, one = self.first[kind]
            text += [f"{count:6}  {kind}", f"        {one.detail[:300]}"]
            text += [f"        {line}" for line in one.commands]
            text.append(f"        --only {seed}")
        return text


def main() -> int:
    """Ask about so many runs; 1 if any two answers differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=300, help="how many runs")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="SEED:NUMBER of one run, to repeat it")
    options = parser.parse_args()
    tally = Tally()
    seeds = (
        [options.only] if options.only else [f"{options.seed}:{n}" for n in range(options.count)]
    )
    end = time.monotonic() + (options.seconds or float("inf"))
    for seed in seeds:
        if time.monotonic() > end:
            break
        tally.add(seed)
    print("\n".join(tally.lines()))
    return 1 if tally.counts else 0


if __name__ == "__main__":
    sys.exit(main())
