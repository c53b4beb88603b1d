"""Statements of bash, followed without running them: assignments and conditions on constants.

A branch that hangs on something unknown is not followed, and every variable it would set is unknown
from there on. Loops, functions, other files and here-documents are reported with their line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from actcalc.errors import SpecError
from actcalc.io.readers.shell.arithmetic import integer
from actcalc.io.readers.shell.expand import MARK, Variables
from actcalc.io.readers.shell.lexer import Token, tokens

Mode = Literal["run", "skip", "maybe"]
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_DECLARE = ("export", "local", "declare", "readonly", "typeset")
_STOPS = ("fi", "else", "elif", "done", "esac", ";;", "}", ")", "then", "do")
_NUMBERS = {
    "-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">=",
}  # fmt: skip


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


def follow(text: str, where: str, script: Script | None = None) -> Script:
    """Follow a script; ``script`` holds the variables of files that it would have read first."""
    script = script or Script()
    try:
        _Follower(tokens(text, where), script, where).block("run", ())
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply", "name a plain launch script") from None
    return script


class _Follower:
    def __init__(self, found: list[Token], script: Script, where: str) -> None:
        self.tokens, self.script, self.where = found, script, where
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
            value = integer(token.text, self.variables.known)
            return None if value is None else value != 0
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

    def loop(self, mode: Mode) -> None:
        token = self.take()
        before = len(self.forgotten)
        if token.text in ("for", "select") and (name := self.peek()) and name.kind == "word":
            self._forget(name.text, name.line, mode)
        while (inner := self.peek()) and inner.text != "do":
            self.at += 1
        self.at += 1
        self.block("maybe" if mode == "run" else mode, ("done",))
        self.at += 1
        if mode == "run":
            self._tell_forgotten("a loop, which is not followed,", token.line, before)

    def function(self, mode: Mode) -> None:
        token = self.take()
        name = token.text if token.text != "function" else self.take().text
        while (inner := self.peek()) and inner.text not in ("{",):
            self.at += 1
        if mode == "run":
            self.tell(f"the function {name} is not followed", token.line)
        self.group("skip", "}")

    # --- simple commands --------------------------------------------------------------------------

    def simple(self, mode: Mode) -> bool | None:
        """One command up to an operator: an assignment, a test, or something that would run."""
        raw: list[Token] = []
        while (token := self.peek()) and token.kind != "operator":
            self.at += 1
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
            if mode == "run":
                self.tell(
                    f"{' '.join(each.text for each in rest)} is not read; name it first", line
                )
            return None
        if name in ("read", "printf", "mapfile", "eval", "unset", "getopts"):
            self._writes(name, words, line, mode)
            return None
        self.script.commands.append(Command(words, line, mode == "run"))
        return None

    def _writes(self, name: str, words: list[str], line: int, mode: Mode) -> None:
        names = words[1:]
        if name == "printf":
            if words[1:2] != ["-v"]:
                return
            names = words[2:3]
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

    # --- conditions -------------------------------------------------------------------------------

    def test(self, raw: list[Token]) -> bool | None:
        """``[ a = b ]``, ``[[ ... ]]``, ``test ...`` on constants; None for anything else.

        Inside [[ ]] the operators && and || are parts of the test: they come as commands of
        their own, and this sees one comparison.
        """
        words = [self.variables.joined(each.text, each.line) for each in raw]
        words = [word for word in words[1:] if word not in ("]", "]]")]
        negated = words[:1] == ["!"]
        if negated:
            words = words[1:]
        truth = _holds(words)
        return truth if truth is None or not negated else not truth


def _holds(words: list[str]) -> bool | None:
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
