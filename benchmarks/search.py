"""Layouts a second: what `actcalc search` evaluates, alone and beside other calculators.

``python -m benchmarks.search`` prints one line per grid: layouts, seconds on one core, rate, peak
memory of the process, and the share of the target. Every layout has its memory with the true peak
of its fullest stage; the time of its step has every one (``everything``) or every one that fits.
With ``--peers`` calculon, llm-analysis and SimuMax are timed, too, where they are installed
(:mod:`benchmarks.peers`).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import NamedTuple

from actcalc.io.runs import load_run
from actcalc.search.find import find
from actcalc.search.space import Space
from benchmarks import peers


class Grid(NamedTuple):
    name: str
    model: str
    device: str
    gpus: tuple[int, ...]
    global_batches: tuple[int, ...]
    target: int
    """Layouts a second on one core."""
    everything: bool = True


GPT3, DEEPSEEK = ("gpt3-175b", "a100-80gb"), ("deepseek-v3", "h800")
MANY = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
RAMP = (3072, 6144, 9216, 12288, 15360)
"""Sequences of a step while DeepSeek-V3's batch grew (arXiv:2412.19437, section 4.2: from 3072 to
15360), in steps of the first."""

GRIDS = (
    Grid("gpt3-175b, 1,024 GPUs", *GPT3, (1024,), (1536,), 1_000_000),
    Grid("gpt3-175b, 64 to 12,288 GPUs", *GPT3, MANY, (1536, 3072, 6144), 1_000_000),
    Grid("gpt3-175b, ten million", *GPT3, MANY, tuple(range(1536, 1536 * 17, 1536)), 1_000_000),
    Grid("deepseek-v3, 2,048 GPUs, one batch", *DEEPSEEK, (2048,), (15360,), 300_000),
    Grid("deepseek-v3, 2,048 GPUs, its batches", *DEEPSEEK, (2048,), RAMP, 300_000),
)
COMMANDS = (
    "search gpt3-175b --gpus 1024 --device a100-80gb --global-batch 1536",
    "search deepseek-v3 --gpus 2048 --device h800 --global-batch 15360 --framework megatron",
)
"""Whole processes that are timed."""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(grid: Grid) -> tuple[int, int, float]:
    """Layouts, how many were kept, and CPU seconds of this process."""
    steps = [(gpus, batch) for gpus in grid.gpus for batch in grid.global_batches]
    began = time.process_time()
    workload = {"global_batch": steps[0][1], "attention": "flash"}
    run = load_run(grid.model, workload=workload, device=grid.device, framework="megatron")
    space = Space(gpus=steps[0][0], more=tuple(steps[1:]))
    found = find(run, space, everything=grid.everything)
    return found.considered, len(found.peak), time.process_time() - began


def report(grid: Grid) -> None:
    layouts, kept, seconds = timed(grid)
    what = "all timed" if grid.everything else f"{kept:,} that fit timed"
    print(
        f"{grid.name}: {layouts:,} layouts ({what}) in {seconds:.2f} s of one core, "
        f"{layouts / seconds:,.0f}/s, {layouts / seconds / grid.target:.2f} of the target; "
        f"process {peak_bytes() / 1e6:.0f} MB at most"
    )


def report_commands() -> None:
    for command in COMMANDS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "actcalc", *command.split(), "--json"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"actcalc {command}: {seconds:.2f} s of one core, the whole process")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", nargs="*", help="words of the grids' names; all if none is given")
    parser.add_argument("--commands", action="store_true", help="time whole processes, too")
    parser.add_argument("--peers", action="store_true")
    asked = parser.parse_args()
    for grid in GRIDS:
        if not asked.grids or any(word in grid.name for word in asked.grids):
            report(grid)
    if asked.commands:
        report_commands()
    if asked.peers:
        for line in peers.lines():
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
