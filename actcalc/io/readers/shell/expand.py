"""Words of bash expanded: quotes, variables with defaults, arrays, arithmetic.

What only running the script could tell (a variable nobody sets, a command's output) becomes a mark
in the word, which says why and on which line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.io.readers.shell.arithmetic import integer
from actcalc.io.readers.shell.substitution import changed, printed, separator

MARK = "\x00"
_LONGEST = 200_000
_DEEPEST = 20
_MOST_MADE = 500_000
_MOST_WORDS = 20_000
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_PLAIN, _QUOTED = re.compile(r"[^\\'\"`$]+"), re.compile(r"[^\\\"`$]+")
_CHANGES = ("%", "%%", "#", "##", "/", "//")
_BRACED = re.compile(
    r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?(?:(:?[-=+?]|,,|\^\^|%%?|##?|//?|:)(.*))?", re.S
)


class Unknown(NamedTuple):
    """A part of a word that only running the script would tell."""

    what: str
    """What is written, as in ``$DATA_PATH``."""
    line: int


class Variables:
    """The variables of a script: texts, arrays, and why parts of them are not known."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.unknown: list[Unknown] = []
        self.depth = 0
        self.made = 0
        self.separator = " "

    def mark(self, what: str, line: int) -> str:
        """A mark that stands in a word for what is not known."""
        self.unknown.append(Unknown(what if len(what) < 40 else what[:37] + "...", line))
        return f"{MARK}{len(self.unknown) - 1}{MARK}"

    def reasons(self, word: str) -> list[Unknown]:
        """What is not known in a word."""
        return [self.unknown[int(each)] for each in re.findall(rf"{MARK}(\d+){MARK}", word)]

    def forget(self, name: str, line: int) -> None:
        """Let a variable be unknown from here on: a branch nobody can decide may have set it."""
        if self.arrays.pop(name, None) is None:
            self.texts[name] = self.mark(f"${name}", line)
        else:
            self.arrays[name] = [self.mark(f"${{{name}[@]}}", line)]

    def maybe_more(self, name: str, line: int) -> None:
        """The same where such a branch adds to it: what it holds already is known."""
        mark = self.mark(f"${{{name}[@]}}", line)
        if name in self.arrays:
            self.arrays[name] = [*self.arrays[name], mark]
        else:
            self.texts[name] = f"{self.texts.get(name, '')} {mark}"

    def put(self, name: str, value: str) -> None:
        """Let a variable be a text."""
        self.arrays.pop(name, None)
        self.texts[name] = value

    def drop(self, name: str) -> None:
        """Let a variable be unset."""
        self.arrays.pop(name, None)
        self.texts.pop(name, None)

    def read(self, words: Sequence[str], text: str) -> None:
        """``read [-r] [-a] NAME... <<< text``: the last name takes what is left over."""
        names = [word for word in words if not word.startswith("-")]
        mark = self.texts.pop("IFS", "").strip() or None
        if "-a" in words and names:
            self.texts.pop(names[0], None)
            self.arrays[names[0]] = text.split(mark)
            return
        pieces = text.split(mark, len(names) - 1) if len(names) > 1 else [text.strip()]
        for name, piece in zip_longest(names, pieces[: len(names)], fillvalue=""):
            self.put(name, piece)

    def pass_on(self, words: Sequence[str] | None) -> list[str] | None:
        """Let the arguments (``$1``, ``$@``, ``$#``) be these; those before (None: none)."""
        before = self.arrays.pop("@", None)
        for name in [name for name in self.texts if name.isdigit() or name == "#"]:
            del self.texts[name]
        if words is not None:
            self.arrays["@"] = list(words)
            self.texts |= {str(number): word for number, word in enumerate(words, 1)}
            self.texts["#"] = str(len(words))
        return before

    def text(self, name: str) -> str | None:
        """A variable's value as text; None where it is not set."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        return self.texts.get(name)

    def known(self, name: str) -> str | None:
        """The same, for arithmetic: what is unknown has no value."""
        value = self.text(name)
        return None if value is None or MARK in value else value

    # --- expansion --------------------------------------------------------------------------------

    def words(self, raw: str, line: int) -> list[str]:
        """The words that one written word becomes: unquoted values are split at blanks."""
        out = _Fields()
        self._expand(raw, line, out, quoted=False)
        return self._counted(out)

    def joined(self, raw: str, line: int) -> str:
        """One text, as an assignment takes it."""
        out = _Fields()
        self._expand(raw, line, out, quoted=False, split=False)
        return " ".join(self._counted(out))

    def _counted(self, out: _Fields) -> list[str]:
        """The words made; ``SpecError`` once a script has made absurdly many."""
        made = out.done()
        self.made += len(made) + out.size
        if self.made > _MOST_MADE:
            raise SpecError("a script that expands to millions of words",
                            "name the script that launches one run")  # fmt: skip
        return made

    def _expand(
        self, raw: str, line: int, out: _Fields, *, quoted: bool, split: bool = True
    ) -> None:
        at = 0
        while at < len(raw):
            if plain := (_QUOTED if quoted else _PLAIN).match(raw, at):
                out.add(plain[0])
                at = plain.end()
                continue
            char = raw[at]
            if char == "\\" and at + 1 < len(raw):
                keep = quoted and raw[at + 1] not in '$`"\\'
                out.add(("\\" if keep else "") + raw[at + 1])
                at += 2
            elif char == "'" and not quoted:
                stop = _end(raw, "'", at)
                out.add(raw[at + 1 : stop], quoted=True)
                at = stop + 1
            elif char == '"' and not quoted:
                stop = _closing(raw, at)
                if not self._nothing(raw[at + 1 : stop]):
                    out.add("", quoted=True)
                self._expand(raw[at + 1 : stop], line, out, quoted=True, split=split)
                at = stop + 1
            elif char == "`":
                stop = _end(raw, "`", at)
                self._output(raw[at + 1 : stop], raw[at : stop + 1], line, out, quoted or not split)
                at = stop + 1
            elif char == "$" and at + 1 < len(raw):
                at = self._dollar(raw, at, line, out, quoted or not split)
            else:
                out.add(char)
                at += 1

    def _nothing(self, inside: str) -> bool:
        """Whether a quoted part is no word at all: an empty array, or a script's arguments."""
        if inside in ("$@", "${@}", "$*"):
            return not self.arrays.get("@")
        found = re.fullmatch(r"\$\{(\w+)\[@\]\}", inside)
        return bool(found and self.arrays.get(found[1]) == [])

    def _dollar(self, raw: str, at: int, line: int, out: _Fields, quoted: bool) -> int:
        """Expand what begins with a dollar at ``at``; returns where it ends."""
        if raw.startswith("$((", at):
            stop = _bracket(raw, at + 1, "(", ")")
            value = integer(raw[at + 3 : stop - 2], self.known)
            out.add(self.mark(raw[at:stop], line) if value is None else str(value), quoted=True)
            return stop
        if raw.startswith("$(", at):
            stop = _bracket(raw, at + 1, "(", ")")
            self._output(raw[at + 2 : stop - 1], raw[at:stop], line, out, quoted)
            return stop
        if raw.startswith("${", at):
            stop = _bracket(raw, at + 1, "{", "}")
            self._braced(raw[at + 2 : stop - 1], line, out, quoted)
            return stop
        found = _NAME.match(raw, at + 1)
        if not found:
            out.add("$")
            return at + 1
        self._value(found[0], line, out, quoted)
        return found.end()

    def _output(self, text: str, written: str, line: int, out: _Fields, quoted: bool) -> None:
        """What a command would print, where that follows from its words."""
        before, (self.separator, rest) = self.separator, separator(text)
        self.depth += 1
        value = None
        if self.depth < _DEEPEST and len(text) < _LONGEST:
            value = printed(rest, lambda raw: self.words(raw, line), MARK)
        self.depth -= 1
        self.separator = before
        out.value(self.mark(written, line) if value is None else value, quoted)

    def _value(self, name: str, line: int, out: _Fields, quoted: bool) -> None:
        if name in ("@", "*"):  # arguments: of the script none are given
            out.items(self.arrays.get("@", []), quoted)
            return
        value = self.text(name)
        out.value(self.mark(f"${name}", line) if value is None else value, quoted)

    def _braced(self, inside: str, line: int, out: _Fields, quoted: bool) -> None:
        found = _BRACED.fullmatch(inside)
        if not found:
            out.add(self.mark("${" + inside + "}", line), quoted=True)
            return
        length, name, index, operator, rest = found.groups()
        if index is not None:
            self._indexed(length, name, index.strip("[]\"'"), inside, line, out, quoted)
            return
        value = self.text(name)
        if operator and operator.strip(":") in ("-", "=", "+") and operator != ":":
            self._default(name, value, operator, rest, line, out, quoted)
        elif operator in (",,", "^^") and value is not None and MARK not in value:
            out.value(value.lower() if operator == ",," else value.upper(), quoted)
        elif (
            operator in ("%", "%%", "#", "##", "/", "//")
            and value is not None
            and MARK not in value + rest
        ):
            out.value(changed(value, operator, self.joined(rest, line)), quoted)
        elif length and value is not None and MARK not in value:
            out.add(str(len(value)))
        elif (operator and not (operator.endswith("?") and value)) or length:
            out.add(self.mark("${" + inside + "}", line), quoted=True)
        else:
            self._value(name, line, out, quoted)

    def _default(
        self, name: str, value: str | None, operator: str, rest: str, line: int,
        out: _Fields, quoted: bool,
    ) -> None:  # fmt: skip
        absent = value is None or (operator.startswith(":") and value == "")
        self.depth += 1
        if operator.endswith("+"):
            absent = not absent
        if absent and self.depth < _DEEPEST:
            inner = rest
            if operator.endswith("="):
                self.texts[name] = self.joined(rest, line)
            self._expand(inner, line, out, quoted=quoted and not inner.startswith('"'))
        elif not operator.endswith("+") and value is not None:
            out.value(value, quoted)
        self.depth -= 1

    def _indexed(
        self, length: str, name: str, index: str, inside: str, line: int, out: _Fields, quoted: bool
    ) -> None:
        items = self.arrays.get(name)
        if items is None and name in self.texts:
            items = [self.texts[name]]
        if items is None:
            out.add(self.mark("${" + inside + "}", line), quoted=True)
        elif length:
            out.add(str(len(items)))
        elif index == "*" and quoted:
            out.add(self.separator.join(items), quoted=True)
        elif index in "@*":
            out.items(items, quoted)
        else:
            place = integer(index, self.known)
            there = place is not None and -len(items) <= place < len(items)
            out.value(items[place] if there and place is not None else "", quoted)


class _Fields:
    """Words in the making."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.open: str | None = None
        self.size = 0

    def add(self, piece: str, *, quoted: bool = False) -> None:
        self.size += len(piece)
        if self.size > _LONGEST:
            return
        if piece or quoted:
            self.open = (self.open or "") + piece

    def value(self, text: str, quoted: bool) -> None:
        """Add a variable's value, split at blanks unless it is quoted."""
        if quoted:
            self.add(text, quoted=True)
            return
        pieces = text.split()
        if text[:1].isspace():
            self.close()
        for number, piece in enumerate(pieces):
            if number:
                self.close()
            self.add(piece)
        if text[-1:].isspace():
            self.close()

    def items(self, items: list[str], quoted: bool) -> None:
        """Add every item of an array as words of their own."""
        for number, item in enumerate(items):
            if number:
                self.close()
            self.value(item, quoted)

    def close(self) -> None:
        if self.open is not None and len(self.made) < _MOST_WORDS:
            self.made.append(self.open)
        self.open = None

    def done(self) -> list[str]:
        self.close()
        return self.made


def _end(raw: str, mark: str, at: int) -> int:
    """Where what opens at ``at`` is closed by the same sign; the end where it never is."""
    stop = raw.find(mark, at + 1)
    return len(raw) if stop < 0 else stop


def _closing(raw: str, at: int) -> int:
    """Where the double quote that opens at ``at`` is closed."""
    place = at + 1
    while place < len(raw):
        if raw[place] == "\\":
            place += 2
        elif raw.startswith("${", place):
            place = _bracket(raw, place + 1, "{", "}")
        elif raw.startswith("$(", place):
            place = _bracket(raw, place + 1, "(", ")")
        elif raw[place] == '"':
            return place
        else:
            place += 1
    return len(raw)


def _bracket(raw: str, at: int, opened: str, closed: str) -> int:
    """Just behind the bracket that closes the one at ``at``."""
    depth = 0
    for place in range(at, len(raw)):
        depth += {opened: 1, closed: -1}.get(raw[place], 0)
        if depth == 0:
            return place + 1
    return len(raw)
