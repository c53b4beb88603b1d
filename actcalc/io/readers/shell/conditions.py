"""Tests of bash on constants: ``-z``, ``=``, ``-lt``; and arithmetic that assigns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from actcalc.io.readers.shell.arithmetic import integer
from actcalc.io.readers.shell.expand import MARK, Variables

_NUMBERS = {
    "-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=",
}  # fmt: skip
_STEPS = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*(?P<sign>[-+*/%]?)=(?!=)(?P<value>.*)"
    r"|(?P<after>[A-Za-z_]\w*)\s*(?P<up>\+\+|--)|(?P<first>\+\+|--)(?P<before>[A-Za-z_]\w*))\s*",
    re.S,
)


def holds(words: Sequence[str]) -> bool | None:
    """Whether a test's words hold; None where they do not tell."""
    if words[:1] == ["!"]:
        truth = holds(words[1:])
        return None if truth is None else not truth
    if any(MARK in word for word in words):
        return None
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2:
        return {"-z": words[1] == "", "-n": words[1] != ""}.get(words[0])
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in ("=", "=="):
        return fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatchcase(left, right)
    operator = _NUMBERS.get(operator, operator)
    if operator in ("==", "!=", "<", "<=", ">", ">="):
        value = integer(f"{left or 0} {operator} {right or 0}", lambda name: None)
        return None if value is None else value != 0
    return None


def assigned(text: str) -> str:
    """The variable that an arithmetic statement assigns to; "" where it assigns to none."""
    found = _STEPS.fullmatch(text)
    return (found["name"] or found["after"] or found["before"]) if found else ""


def calculate(text: str, variables: Variables) -> int | None:
    """The value of an arithmetic statement, whose assignment is made; None where it has none."""
    name = assigned(text)
    if not name:
        return integer(text, variables.known)
    found = _STEPS.fullmatch(text)
    assert found
    sign, value = found["sign"], found["value"] or "1"
    if not found["name"]:
        sign = (found["up"] or found["first"])[0]
    result = integer(f"{name} {sign} ({value})" if sign else value, variables.known)
    if result is not None:
        variables.put(name, str(result))
    return result


def handed_over(words: Sequence[str]) -> str | None:
    """The text that a command gives to a shell of its own (``srun bash -c "..."``)."""
    for place, word in enumerate(words[:-1]):
        shell = words[place - 1].rsplit("/", 1)[-1] if place else ""
        if word in ("-c", "-lc", "-xc", "-ec", "-exc", "-cl") and shell in ("bash", "sh", "zsh"):
            return words[place + 1]
    return None
