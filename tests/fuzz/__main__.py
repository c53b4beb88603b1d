"""Both fuzzers: inputs that are nearly right, and what must hold on random legal runs.

    python -m tests.fuzz --seconds 60 --seed 1
    python -m tests.fuzz --only flags:17 --seed 1

Every case follows from the seed, its kind and its number. What broke is grouped, with the first
case of each group; worst time and memory are printed. Exit 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.asking import ask, faults, most_bytes
from tests.fuzz.inputs import KINDS, case
from tests.fuzz.invariants import CHECKS, check


def main() -> int:
    """Fuzz for a time, half of it each; exit 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="KIND:NUMBER, to repeat one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if given.only:
            kind, _, number = given.only.partition(":")
            return _one(kind, given.seed, int(number), Path(folder))
        broken = _inputs(given.seconds / 2, given.seed, Path(folder))
        broken += _runs(given.seconds / 2, given.seed)
    peak = most_bytes() // 2**20
    print(f"peak memory of the process: {peak} MB")
    return 1 if broken else 0


def _one(kind: str, seed: int, number: int, folder: Path) -> int:
    if kind in CHECKS:
        found = check(kind, seed, number)
        print(kind, number, found)
        return 1 if isinstance(found, list) and found else 0
    args, files = case(kind, seed, number, folder)
    asked = ask(args)
    print(args, *files.values(), asked.code, asked.message, asked.hint, asked.out[:2000], sep="\n")
    if asked.error is not None:
        raise asked.error
    found = list(faults(asked))
    print("faults:", found)
    return 1 if found else 0


def _inputs(seconds: float, seed: int, folder: Path) -> int:
    rng, end = random.Random(seed), time.monotonic() + seconds
    tried: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    first: dict[str, str] = {}
    worst = (0.0, "")
    while time.monotonic() < end:
        kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        number = tried[kind]
        tried[kind] += 1
        args, _ = case(kind, seed, number, folder)
        asked = ask(args)
        codes[f"{kind} {'exception' if asked.error else asked.code}"] += 1
        worst = max(worst, (asked.seconds, f"{kind}:{number}"))
        for what in faults(asked):
            broken[what] += 1
            first.setdefault(
                what, f"--only {kind}:{number} --seed {seed}   {' '.join(args)[:150]!a}"
            )
    print(f"inputs, seed {seed}: {sum(tried.values())} tried {dict(tried)}")
    print(f"  outcomes {dict(sorted(codes.items()))}")
    print(f"  slowest {worst[0]:.1f} s of a processor: {worst[1]}")
    return _told(broken, first)


def _runs(seconds: float, seed: int) -> int:
    end, number = time.monotonic() + seconds, 0
    tried: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    first: dict[str, str] = {}
    while time.monotonic() < end:
        name = list(CHECKS)[number % len(CHECKS)]
        found = check(name, seed, number)
        tried[name] += 1
        if isinstance(found, str):
            refused[name] += 1
        else:
            for what in found:
                broken[what] += 1
                first.setdefault(what, f"--only {name}:{number} --seed {seed}")
        number += 1
    print(f"runs, seed {seed}: {dict(tried)}, refused {dict(refused)}")
    return _told(broken, first)


def _told(broken: Counter[str], first: dict[str, str]) -> int:
    for what, count in broken.most_common():
        print(f"{count:6}  {what}\n        {first[what]}")
    return sum(broken.values())


if __name__ == "__main__":
    sys.exit(main())
