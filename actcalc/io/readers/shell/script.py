"""Statements of bash, followed without running them: assignments and conditions on constants.

Loops over constants, functions, ``eval`` and ``bash -c`` of known texts are followed too, so many
rounds in all. A branch that hangs on something unknown is not followed, and every variable it would
set is unknown from there on; it and here-documents are reported with their line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from actcalc.errors import SpecError
from actcalc.io.readers.shell.conditions import assigned, calculate, handed_over, holds
from actcalc.io.readers.shell.expand import MARK, Variables
from actcalc.io.readers.shell.lexer import Token, tokens
from actcalc.io.readers.shell.substitution import formatted

Mode = Literal["run", "skip", "maybe"]
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_DECLARE = ("export", "local", "declare", "readonly", "typeset")
_STOPS = ("fi", "else", "elif", "done", "esac", ";;", "}", ")", "then", "do")
_MOST_STEPS = 20_000
_DEEPEST = 12
_LEAVES = ("break", "continue", "return", "exit")
Source = Callable[[str], str | None]
"""The text of a script that another reads in, by its path; None where it is not read."""


@dataclass
class Command:
    """A command as its words would be, and whether it surely runs."""

    words: list[str]
    line: int
    sure: bool = True


@dataclass
class Script:
    """What following a script found."""

    variables: Variables = field(default_factory=Variables)
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: dict[str, list[Token]] = field(default_factory=dict)
    """Bodies of functions, by name."""
    source: Source | None = None
    """Looks up scripts that this one reads in."""
    steps: int = 0
    """Rounds of loops, calls and texts followed so far."""


def follow(text: str, where: str, script: Script | None = None) -> Script:
    """Follow a script; ``script`` holds the variables of files that it would have read first."""
    script = script or Script()
    try:
        _Follower(tokens(text, where), script, where).block("run", ())
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply", "name a plain launch script") from None
    return script


class _Follower:
    def __init__(self, found: list[Token], script: Script, where: str, depth: int = 0) -> None:
        self.tokens, self.script, self.where, self.depth = found, script, where, depth
        self.variables = script.variables
        self.at = 0
        self.forgotten: list[str] = []

    # --- reading ----------------------------------------------------------------------------------

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def skip_ends(self) -> None:
        while (token := self.peek()) and token.kind == "operator" and token.text in ("\n", ";"):
            self.at += 1

    def tell(self, text: str, line: int) -> None:
        self.script.notes.append(f"{self.where}, line {line}: {text}")

    # --- statements -------------------------------------------------------------------------------

    def block(self, mode: Mode, stops: Sequence[str]) -> None:
        """Statements up to one of ``stops``, which is left where it is."""
        while True:
            self.skip_ends()
            token = self.peek()
            if token is None or (token.text in stops and token.kind in ("word", "operator")):
                return
            before = self.at
            self.chain(mode)
            if self.at == before:
                self.at += 1  # a stray bracket or word

    def chain(self, mode: Mode) -> bool | None:
        """Commands joined by && and ||; the truth of the last, None where it is not known."""
        truth = self.pipeline(mode)
        while (token := self.peek()) and token.kind == "operator" and token.text in ("&&", "||"):
            self.at += 1
            self.skip_ends()
            wanted = token.text == "&&"
            inner = mode
            if mode == "run":
                inner = "maybe" if truth is None else "run" if truth == wanted else "skip"
            after = self.pipeline(inner)
            if inner == "run":
                truth = after
            elif inner == "maybe":
                truth = None
        return truth

    def pipeline(self, mode: Mode) -> bool | None:
        truth = self.statement(mode)
        while (token := self.peek()) and token.kind == "operator" and token.text in ("|", "&"):
            self.at += 1
            if token.text == "&":
                return truth
            self.skip_ends()
            self.statement("skip")
            truth = None
        return truth

    def statement(self, mode: Mode) -> bool | None:
        token = self.peek()
        if token is None:
            return None
        if token.kind == "word":
            compound = {
                "if": self.conditional, "case": self.case, "for": self.loop, "while": self.loop,
                "until": self.loop, "select": self.loop, "function": self.function,
            }.get(token.text)  # fmt: skip
            if compound:
                compound(mode)
                return None
            if token.text == "{":
                return self.group(mode, "}")
            if token.text == "!":
                self.at += 1
                truth = self.statement(mode)
                return None if truth is None else not truth
            after = self.tokens[self.at + 1 : self.at + 3]
            if [each.text for each in after] == ["(", ")"]:
                self.function(mode)
                return None
        if token.kind == "operator" and token.text == "(":
            return self.group(mode, ")")
        if token.kind == "arithmetic":
            self.at += 1
            return self.arithmetic(token, mode)
        if token.kind == "operator":
            return None
        return self.simple(mode)

    def group(self, mode: Mode, end: str) -> bool | None:
        self.at += 1
        truth: bool | None = None
        while (token := self.peek()) and token.text != end:
            before = self.at
            self.skip_ends()
            if (token := self.peek()) and token.text != end:
                truth = self.chain(mode)
            if self.at == before:
                self.at += 1
        self.at += 1
        return truth

    def conditional(self, mode: Mode) -> None:
        """If, elif, else: the first branch whose condition holds; none where one is unknown."""
        line = self.take().line
        before = len(self.forgotten)
        self._branches(mode)
        if mode == "run":
            self._tell_forgotten("a condition on what only the run knows", line, before)

    def _tell_forgotten(self, what: str, line: int, before: int) -> None:
        names = list(dict.fromkeys(self.forgotten[before:]))
        if names:
            told = ", ".join(names[:6]) + (" and others" if len(names) > 6 else "")
            self.tell(f"{what} decides {told}, not known from here on", line)

    def _branches(self, mode: Mode) -> None:
        left: Mode = mode
        while True:
            truth = self.condition(left)
            branch: Mode = left
            if left == "run":
                branch = "maybe" if truth is None else "run" if truth else "skip"
                left = "maybe" if truth is None else "skip" if truth else "run"
            self.block(branch, ("elif", "else", "fi"))
            token = self.peek()
            if token is None:
                return
            self.at += 1
            if token.text == "else":
                self.block(left, ("fi",))
                self.at += 1
                return
            if token.text == "fi":
                return

    def condition(self, mode: Mode) -> bool | None:
        truth: bool | None = None
        while (token := self.peek()) and token.text not in ("then", "do"):
            before = self.at
            self.skip_ends()
            if (token := self.peek()) and token.text not in ("then", "do"):
                truth = self.chain(mode)
            if self.at == before:
                self.at += 1
        self.at += 1
        return truth

    def case(self, mode: Mode) -> None:
        line = self.take().line
        raw = self.take().text if self.peek() else ""
        subject = self.variables.joined(raw, line)
        known = MARK not in subject
        self.skip_ends()
        self.at += 1  # in
        chosen, before = False, len(self.forgotten)
        while True:
            self.skip_ends()
            token = self.peek()
            if token is None or token.text == "esac":
                self.at += 1
                if mode == "run":
                    self._tell_forgotten(f"case {raw}, which is not known,", line, before)
                return
            patterns: list[str] = []
            while (token := self.peek()) and token.text != ")":
                if token.kind == "word":
                    patterns.append(self.variables.joined(token.text, token.line))
                self.at += 1
            self.at += 1
            branch: Mode = mode
            if mode == "run":
                fits = known and any(fnmatchcase(subject, pattern) for pattern in patterns)
                branch = "maybe" if not known else "run" if fits and not chosen else "skip"
                chosen = chosen or fits
            self.block(branch, (";;", "esac"))
            if (token := self.peek()) and token.text == ";;":
                self.at += 1

    def arithmetic(self, token: Token, mode: Mode) -> bool | None:
        """``(( ... ))``: whether it is not 0, with what it assigns."""
        if mode == "run":
            value = calculate(token.text, self.variables)
            if value is not None:
                return value != 0
        if name := assigned(token.text):
            self._forget(name, token.line, mode)
        return None

    def loop(self, mode: Mode) -> None:
        """A loop whose rounds are known is followed; else what it sets is unknown."""
        token = self.take()
        header: list[Token] = []
        while (inner := self.peek()) and inner.text != "do":
            header.append(self.take())
        self.at += 1
        body = self.at
        self.block("skip", ("done",))
        end = self.at
        plain = not any(each.text in _LEAVES for each in self.tokens[body:end])
        rounds = self._rounds(token.text, header) if mode == "run" and plain else None
        if rounds is None:
            self._unfollowed(token, header, mode, body)
        else:
            for _ in rounds:
                self.at = body
                self._step()
                self.block(mode, ("done",))
        self.at = end + 1

    def _unfollowed(self, token: Token, header: list[Token], mode: Mode, body: int) -> None:
        before = len(self.forgotten)
        if token.text != "while" and header and header[0].kind == "word":
            self._forget(header[0].text, token.line, mode)
        self.at = body
        self.block("maybe" if mode == "run" else mode, ("done",))
        if mode == "run":
            self._tell_forgotten("a loop, which is not followed,", token.line, before)

    def _step(self) -> None:
        self.script.steps += 1
        if self.script.steps > _MOST_STEPS:
            raise SpecError(f"{self.where}: loops of more than {_MOST_STEPS} rounds",
                            "name the script that launches one run")  # fmt: skip

    def _rounds(self, kind: str, header: list[Token]) -> Iterator[None] | None:
        """Sets a loop's variable for each of its rounds; None where they are not known."""
        header = [each for each in header if each.text not in (";", "\n")]
        if kind != "for" or not header:
            return None
        if header[0].kind == "arithmetic":
            parts = header[0].text.split(";")
            known = len(parts) == 3 and calculate(parts[0], self.variables) is not None
            return self._counted(parts) if known else None
        if [each.text for each in header[1:2]] != ["in"]:
            return None
        words = [w for each in header[2:] for w in self.variables.words(each.text, each.line)]
        if any(MARK in word or "*" in word for word in words):
            return None
        return self._listed(header[0].text, words)

    def _counted(self, parts: Sequence[str]) -> Iterator[None]:
        while calculate(parts[1], self.variables):
            yield
            if calculate(parts[2], self.variables) is None:
                return

    def _listed(self, name: str, words: Sequence[str]) -> Iterator[None]:
        for word in words:
            self.variables.put(name, word)
            yield

    def function(self, mode: Mode) -> None:
        """A function's body is kept for its calls."""
        token = self.take()
        name = token.text if token.text != "function" else self.take().text
        while (inner := self.peek()) and inner.text not in ("{",):
            self.at += 1
        start = self.at + 1
        self.group("skip", "}")
        if mode != "skip":
            self.script.functions[name] = self.tokens[start : self.at - 1]

    def call(self, words: Sequence[str], mode: Mode) -> None:
        """Follow a function with its arguments."""
        before = self.variables.pass_on(words[1:])
        self.nested(self.script.functions[words[0]], mode)
        self.variables.pass_on(before)

    def nested(self, found: list[Token], mode: Mode) -> None:
        """Follow the tokens of a function, or of a text that the script would hand to a shell."""
        self._step()
        if self.depth < _DEEPEST:
            inner = _Follower(found, self.script, self.where, self.depth + 1)
            inner.block(mode, ())
            self.forgotten += inner.forgotten

    def text(self, text: str, line: int, mode: Mode) -> None:
        """Follow a text that ``eval`` or ``bash -c`` takes."""
        try:
            found = tokens(text, self.where)
        except SpecError:
            self.tell("what eval or bash -c is given does not read", line)
            return
        self.nested([each._replace(line=line) for each in found], mode)

    def read_in(self, words: Sequence[str], written: str, line: int, mode: Mode) -> None:
        """Follow a file that the script reads in, where it lies beside it; else tell."""
        found = self.script.source(words[1]) if self.script.source and len(words) > 1 else None
        if found is not None and mode == "run":
            self.text(found, line, mode)
        elif mode == "run":
            self.tell(f"{written} is not read; name it first", line)

    # --- simple commands --------------------------------------------------------------------------

    def simple(self, mode: Mode) -> bool | None:
        """One command up to an operator: an assignment, a test, or something that would run."""
        raw: list[Token] = []
        given: Token | None = None
        while (token := self.peek()) and token.kind != "operator":
            self.at += 1
            given = token if token.kind == "herestring" else given
            if token.kind == "heredoc" and mode != "skip":
                self.tell("a here-document is not read", token.line)
            if token.kind in ("word", "array"):
                raw.append(token)
        if mode == "skip" or not raw:
            return None
        rest = self.assignments(raw, mode)
        if not rest:
            return True
        words = [w for each in rest for w in self.variables.words(each.text, each.line)]
        line = rest[0].line
        name = words[0] if words else ""
        if name in ("[", "[[", "test"):
            return self.test(rest)
        if rest[-1].text == "]]":  # what follows && or || inside [[ ]]
            return self.test([rest[0], *rest])
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name in ("source", "."):
            self.read_in(words, " ".join(each.text for each in rest), line, mode)
        elif name in self.script.functions:
            self.call(words, mode)
        elif name == "shift":
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            self.variables.pass_on(self.variables.arrays.get("@", [])[count:])
        elif name == "eval":
            self.text(" ".join(words[1:]), line, mode)
        elif (inner := handed_over(words)) is not None:
            self.text(inner, line, mode)
        elif name == "read" and given and mode == "run":
            self.variables.read(words[1:], self.variables.joined(given.text, given.line))
        elif name == "unset" and mode == "run":
            for word in words[1:]:
                self.variables.drop(word)
        elif name in ("read", "printf", "mapfile", "unset", "getopts"):
            self._writes(name, words, line, mode)
        else:
            self.script.commands.append(Command(words, line, mode == "run"))
        return None

    def _writes(self, name: str, words: list[str], line: int, mode: Mode) -> None:
        names = words[1:]
        if name == "printf":
            if words[1:2] != ["-v"]:
                return
            names = words[2:3]
            made = None if any(MARK in word for word in words) else formatted(words[3:])
            if mode == "run" and names and made is not None:
                self.variables.put(names[0], made)
                return
        if mode == "run":
            self.tell(f"{name} is not followed", line)
        for each in names:
            if re.fullmatch(r"[A-Za-z_]\w*", each):
                self._forget(each, line, mode)

    def assignments(self, raw: list[Token], mode: Mode) -> list[Token]:
        """Make the assignments that a command begins with; the rest of its words."""
        declared = raw[0].kind == "word" and raw[0].text in _DECLARE
        place = 1 if declared else 0
        while place < len(raw):
            token = raw[place]
            found = _ASSIGN.fullmatch(token.text)
            if token.kind == "array":
                self.array(token, mode)
            elif found:
                self.assign(found, token.line, mode)
            elif not declared:
                break
            place += 1
        return [] if declared else raw[place:]

    def assign(self, found: re.Match[str], line: int, mode: Mode) -> None:
        name, more, raw = found.groups()
        if mode == "maybe":
            self._forget(name, line, mode, more=bool(more))
            return
        value = self.variables.joined(raw, line)
        if more and name in self.variables.arrays:
            first, *rest = self.variables.arrays[name] or [""]
            self.variables.arrays[name] = [first + value, *rest]
            return
        self.variables.arrays.pop(name, None)
        self.variables.texts[name] = (self.variables.texts.get(name, "") if more else "") + value

    def array(self, token: Token, mode: Mode) -> None:
        name = token.text.rstrip("=").rstrip("+")
        if mode == "maybe":
            self._forget(name, token.line, mode, more=token.text.endswith("+="))
            return
        items = [w for each in token.items for w in self.variables.words(each.text, each.line)]
        before: list[str] = []
        if token.text.endswith("+="):
            before = list(self.variables.arrays.get(name, ()))
            if not before and name in self.variables.texts:
                before = [self.variables.texts[name]]
        self.variables.texts.pop(name, None)
        self.variables.arrays[name] = [*before, *items]

    def _forget(self, name: str, line: int, mode: Mode, *, more: bool = False) -> None:
        if mode == "skip":
            return
        self.forgotten.append(name)
        if more:
            self.variables.maybe_more(name, line)
        else:
            self.variables.forget(name, line)

    def test(self, raw: list[Token]) -> bool | None:
        """``[ a = b ]``, ``[[ ... ]]``, ``test ...`` on constants; None for anything else.

        Inside [[ ]] the operators && and || are parts of the test: they come as commands of
        their own, and this sees one comparison.
        """
        words = [self.variables.joined(each.text, each.line) for each in raw]
        return holds([word for word in words[1:] if word not in ("]", "]]")])
