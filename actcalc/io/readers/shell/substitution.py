"""What a few commands print of constants, worked out here: ``$(echo ...)``, ``$(seq 1 8)``.

Nothing is run. A command that is none of these, or that reads anything but its words, has no value.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from actcalc.errors import SpecError
from actcalc.io.readers.shell.arithmetic import integer
from actcalc.io.readers.shell.lexer import Token, tokens

_MOST = 4096
"""Numbers that ``seq`` makes, at most."""
Expand = Callable[[str], Sequence[str]]
"""Makes words of one written word."""


def separator(text: str) -> tuple[str, str]:
    """What ``IFS=...;`` before a command joins the items of an array by, and the command."""
    found = re.match(r"\s*IFS=('[^']*'|\"[^\"]*\"|[^\s;]*)\s*;", text)
    if not found:
        return " ", text
    return found[1].strip("'\"")[:1], text[found.end() :]


def printed(text: str, expand: Expand, unknown: str) -> str | None:
    """What a command prints; None where that is not known. ``unknown`` marks unknown parts."""
    try:
        found: list[Token] = tokens(text, "a substitution")
    except SpecError:
        return None
    if not found or any(token.kind != "word" for token in found):
        return None
    name, *rest = (word for token in found for word in expand(token.text))
    if name in ("echo", "basename", "dirname"):
        return _TEXTS[name](rest)
    if any(unknown in word for word in rest):
        return None
    return _NUMBERS[name](rest) if name in _NUMBERS else None


def _echo(words: Sequence[str]) -> str:
    return " ".join(word for word in words if word not in ("-n", "-e"))


def _base(words: Sequence[str]) -> str | None:
    return posixpath.basename(words[0]).removesuffix("".join(words[1:2])) if words else None


def _folder(words: Sequence[str]) -> str | None:
    words = [word for word in words if word != "--"]
    return posixpath.dirname(words[0]) or "." if words else None


def _expr(words: Sequence[str]) -> str | None:
    value = integer(" ".join(words), lambda name: None)
    return None if value is None else str(value)


def _seq(words: Sequence[str]) -> str | None:
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", word) for word in words):
        return None
    first, *_, last = (1, *map(int, words)) if len(words) == 1 else tuple(map(int, words))
    step = int(words[1]) if len(words) == 3 else 1
    made = range(first, last + (1 if step > 0 else -1), step) if step else range(0)
    return "\n".join(map(str, made)) if 0 < len(made) <= _MOST else None


def formatted(words: Sequence[str]) -> str | None:
    """What ``printf`` makes of a format with %s and %d, repeated for what is left over."""
    if not words or re.search(r"%[^sd%]", words[0]):
        return None
    pieces, rest = re.split(r"%[sd]", words[0].replace("\\n", "\n")), list(words[1:])
    each = len(pieces) - 1
    rounds = max(1, -(-len(rest) // each)) if each else 1
    if rounds > _MOST:
        return None
    rest += [""] * (rounds * each - len(rest))
    made = ""
    for number in range(rounds):
        taken = [*rest[number * each : (number + 1) * each], ""]
        made += "".join(piece + value for piece, value in zip(pieces, taken, strict=True))
    return made.replace("%%", "%")


_TEXTS: dict[str, Callable[[Sequence[str]], str | None]] = {
    "echo": _echo,
    "basename": _base,
    "dirname": _folder,
}
_NUMBERS: dict[str, Callable[[Sequence[str]], str | None]] = {
    "expr": _expr,
    "seq": _seq,
    "printf": formatted,
}


def changed(value: str, operator: str, pattern: str) -> str:
    """``${x%y}``, ``${x##y}``, ``${x/y/z}`` and their kin, of a known value."""
    if operator in ("/", "//"):
        old, _, new = pattern.partition("/")
        count = 0 if operator == "//" else 1
        return re.sub(_glob(old), lambda _: new, value, count=count) if old else value
    places = range(len(value) + 1)
    if operator.startswith("%"):
        cut = [at for at in places if re.fullmatch(_glob(pattern), value[at:])]
        return value if not cut else value[: cut[0] if operator == "%%" else cut[-1]]
    cut = [at for at in places if re.fullmatch(_glob(pattern), value[:at])]
    return value if not cut else value[cut[-1] if operator == "##" else cut[0] :]


def _glob(pattern: str) -> str:
    return translate(pattern).replace(r"\Z", "").replace(r"\z", "")
