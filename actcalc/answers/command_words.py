"""The words that name a run on a command line, with some of them replaced."""

from __future__ import annotations

from collections.abc import Sequence

from actcalc.io.runs import load_run
from actcalc.io.writers.own import preset_of
from actcalc.plan.changes import difference, words
from actcalc.specs.run import Run


def run_words(run: Run) -> list[str]:
    """Words that name a run on a command line: its model, and what differs from its usual run.

    A model that is no preset is named only.
    """
    name = preset_of(run)
    usual = load_run(name, framework=str(run.framework)) if name else None
    found = [name or run.name, *(words(difference(usual, run)) if usual else [])]
    found += ["--framework", str(run.framework)]
    return [*found, "--device", run.device.name] if run.device else found


def replaced(given: Sequence[str], made: Sequence[str]) -> list[str]:
    """The words ``given``, without the flags that ``made`` gives anew, and those of ``made``."""
    names = {_key(flag, value) for flag, value in _pairs(made)}
    kept = [
        word
        for flag, value in _pairs(given)
        if _key(flag, value) not in names
        for word in (flag, value)
        if word
    ]
    return [*kept, *made]


def _pairs(line: Sequence[str]) -> list[tuple[str, str]]:
    """Flags with their values; a word that belongs to none stands alone."""
    found: list[tuple[str, str]] = []
    for word in line:
        waits = found and found[-1][0].startswith("--") and not found[-1][1]
        if waits and not word.startswith("--"):
            found[-1] = (found[-1][0], word)
        else:
            found.append((word, ""))
    return found


def _key(flag: str, value: str) -> str:
    if not flag.startswith("--"):
        return flag
    name = flag.removeprefix("--").removeprefix("no-")
    return value.partition("=")[0] if name == "set" else name.replace("-", "_")
