"""Start-up: the main job against importing its own libraries, interleaved in one run.

Prints the median ratio of CPU time and the main job's peak memory.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 15
MAIN = [str(Path(sys.executable).with_name("actcalc")), "gpt3-175b", "--tp", "8", "--sp"]
IMPORTS = [sys.executable, "-c", "import typer, rich, pydantic, yaml"]
TABLES = [sys.executable, "-c", "import typer, rich.console, rich.table, pydantic, yaml"]


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak_memory_mb() -> float:
    code = (
        "import resource, subprocess, sys;"
        f"subprocess.run({MAIN!r}, check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    for command in (MAIN, IMPORTS, TABLES):
        cpu_seconds(command)
    rows = [
        tuple(cpu_seconds(command) for command in (MAIN, IMPORTS, TABLES)) for _ in range(ROUNDS)
    ]
    ours, bare, tables = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"actcalc gpt3-175b --tp 8 --sp            {ours * 1e3:6.0f} ms CPU")
    print(f"import typer, rich, pydantic, yaml       {bare * 1e3:6.0f} ms CPU")
    print(f"  the same with rich's console and table {tables * 1e3:6.0f} ms CPU")
    print(
        f"ratio {statistics.median(a / b for a, b, _ in rows):.2f}, "
        f"{statistics.median(a / c for a, _, c in rows):.2f} with console and table"
    )
    print(f"peak memory {peak_memory_mb():.0f} MB")


if __name__ == "__main__":
    main()
