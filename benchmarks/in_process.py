"""Milliseconds of an answer in process, and the same at another commit, measured in one run.

    python -m benchmarks.in_process [--against REV] [--rounds 7]

The other commit is checked out into a temporary work tree; both trees answer in turn, each round
in a fresh process, and the least time of a call counts. Nothing is checked against a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Where an answer is made has moved between commits: the first home that exists is taken.
PROBE = r"""
import importlib, json, time

def found(name, *homes):
    for home in homes:
        try:
            return getattr(importlib.import_module(home), name)
        except ImportError:
            continue
    raise ImportError(name)

load_run = found("load_run", "actcalc.io.runs", "actcalc.specs.run")
compare = found("compare_run", "actcalc.answers.compare", "actcalc.planner.compare")
memory = found("memory_run", "actcalc.answers.memory", "actcalc.memory.report")
mfu = found("utilisation", "actcalc.answers.mfu", "actcalc.cost.mfu")
gpt = {"layout": {"tp": 8, "sp": True}}
llama = {"layout": {"tp": 8, "sp": True, "pp": 8, "dp": 4, "zero": 1}}
timed = {**llama, "device": "h100-80gb"}
CASES = {
    "compare gpt3-175b --tp 8 --sp": (compare, load_run("gpt3-175b", **gpt)),
    "compare llama-3-70b --pp 8": (compare, load_run("llama-3-70b", **llama)),
    "compare llama-3-70b --pp 8 --device": (compare, load_run("llama-3-70b", **timed)),
    "memory llama-3-70b --pp 8": (memory, load_run("llama-3-70b", **llama)),
    "memory llama-3-70b --pp 8 --device": (memory, load_run("llama-3-70b", **timed)),
    "mfu llama-3-70b --pp 8 --device": (mfu, load_run("llama-3-70b", **timed)),
}

def least(call, run):
    best, stop = float("inf"), time.perf_counter() + 1.0
    while time.perf_counter() < stop:
        start = time.perf_counter()
        call(run)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best

print(json.dumps({name: least(*case) for name, case in CASES.items()}))
"""


def times(tree: Path) -> dict[str, float]:
    """Milliseconds of each case in one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, cwd=tree, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", help="a commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    trees = [ROOT]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.against:
            other = Path(folder) / "other"
            add = ["git", "worktree", "add", "--detach", str(other), arguments.against]
            subprocess.run(add, cwd=ROOT, check=True, capture_output=True)
            trees.append(other)
        rounds = [[times(tree) for tree in trees] for _ in range(arguments.rounds)]
        if arguments.against:
            remove = ["git", "worktree", "remove", "--force", str(trees[1])]
            subprocess.run(remove, cwd=ROOT, check=True, capture_output=True)
    for name in rounds[0][0]:
        least = [min(row[at][name] for row in rounds) for at in range(len(trees))]
        line = f"{name:40s} {least[0]:9.2f} ms"
        if arguments.against:
            line += f"   before {least[1]:9.2f} ms   {least[0] / least[1]:5.2f} of it"
        print(line)


if __name__ == "__main__":
    main()
