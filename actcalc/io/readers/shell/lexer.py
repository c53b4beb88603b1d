"""A script of bash as tokens: words as they are written, operators, arrays, ends of lines."""

from __future__ import annotations

import re
from typing import NamedTuple

from actcalc.errors import SpecError

MOST_TOKENS = 50_000
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_PLAIN = re.compile(r"[^\s;|&<>()\\'\"`$]+")
_BEFORE = ("\n", ";", "if", "while", "for", "then", "do", "else", "&&", "||", "elif", "(")
"""Behind these two brackets open arithmetic."""
_OPERATORS = (";;", "&&", "||", "((", ";", "|", "&", "(", ")")


class Token(NamedTuple):
    """One token: a word, an operator, or an array assigned to a name (``items`` are its words)."""

    kind: str
    """word, operator, array, arithmetic or heredoc."""
    text: str
    line: int
    items: tuple[Token, ...] = ()


def tokens(text: str, where: str) -> list[Token]:
    """The tokens of a script; ``SpecError`` for a quote or bracket that is never closed."""
    reader = _Lexer(text, where)
    return reader.all()


class _Lexer:
    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text.replace("\r\n", "\n"), where
        self.at, self.line = 0, 1
        self.pending: list[str] = []  # ends of here-documents that begin on the next line

    def all(self) -> list[Token]:
        found: list[Token] = []
        while (token := self.next(found[-1].text if found else "\n")) is not None:
            found.append(token)
            if len(found) > MOST_TOKENS:
                raise SpecError(f"{self.where}: a script of more than {MOST_TOKENS} words",
                                "name the script that launches one run")  # fmt: skip
        return found

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def step(self, length: int = 1) -> str:
        piece = self.text[self.at : self.at + length]
        self.line += piece.count("\n")
        self.at += length
        return piece

    def next(self, before: str) -> Token | None:
        self._blanks()
        if self.at >= len(self.text):
            return None
        line = self.line
        if self.peek() == "\n":
            self.step()
            self._skip_documents()
            return Token("operator", "\n", line)
        if self.peek(2) == "((" and before in (
            "\n",
            ";",
            "if",
            "while",
            "for",
            "then",
            "do",
            "else",
            "&&",
            "||",
            "elif",
            "(",
        ):
            return Token("arithmetic", self._balanced("((", "))"), line)
        for operator in _OPERATORS:
            if self.peek(len(operator)) == operator and operator != "((":
                self.step(len(operator))
                return Token("operator", operator, line)
        if redirected := re.match(
            r"\d*(<<<|<<-?|&>>?|>>|>&|<&|<|>)", self.text[self.at : self.at + 8]
        ):
            return self._redirection(redirected, line)
        return self._word(line)

    def _blanks(self) -> None:
        while self.at < len(self.text):
            if self.peek(2) == "\\\n":
                self.step(2)
            elif self.peek() in " \t":
                self.step()
            elif self.peek() == "#":
                while self.at < len(self.text) and self.peek() != "\n":
                    self.step()
            else:
                return

    def _skip_documents(self) -> None:
        for end in self.pending:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[self.at : stop]
                self.step(stop - self.at + 1)
                if row.strip() == end:
                    break
        self.pending = []

    def _redirection(self, found: re.Match[str], line: int) -> Token:
        self.step(len(found[0]))
        self._blanks()
        target = self._word(line).text if self.peek() not in ("", "\n") else ""
        if found[1] == "<<<":
            return Token("herestring", target, line)
        if found[1].startswith("<<"):
            self.pending.append(target.strip("'\""))
            return Token("heredoc", target, line)
        return Token("redirection", target, line)

    def _word(self, line: int) -> Token:
        start = self.at
        while self.at < len(self.text):
            if plain := _PLAIN.match(self.text, self.at):
                self.at = plain.end()
                continue
            char = self.peek()
            if char in " \t\n;|&<>)":
                break
            if char == "(":
                written = self.text[start : self.at]
                if _ASSIGNED.fullmatch(written):
                    return Token("array", written, line, self._array())
                break
            self._piece(char)
        if self.at == start:  # a lone bracket
            self.step()
        word = self.text[start : self.at].replace("\\\n", "")
        return Token("word", word, line)

    def _piece(self, char: str) -> None:
        """Move over one character, one quoted part or one expansion."""
        if char == "\\":
            self.step(2)
        elif char == "'":
            self._until("'")
        elif char == '"':
            self._double()
        elif char == "`":
            self._until("`")
        elif self.peek(3) == "$((":
            self.step()
            self._balanced("((", "))")
        elif self.peek(2) == "$(":
            self.step()
            self._balanced("(", ")")
        elif self.peek(2) == "${":
            self.step()
            self._balanced("{", "}")
        else:
            self.step()

    def _until(self, end: str) -> None:
        line = self.line
        stop = self.text.find(end, self.at + 1)
        if stop < 0:
            raise SpecError(f"{self.where}: {end} of line {line} is never closed", "close it")
        self.step(stop + 1 - self.at)

    def _double(self) -> None:
        line = self.line
        self.step()
        while self.at < len(self.text):
            char = self.peek()
            if char == '"':
                self.step()
                return
            self._piece(char if char != "'" else "")
        raise SpecError(f'{self.where}: " of line {line} is never closed', "close it")

    def _balanced(self, opened: str, closed: str) -> str:
        """The text of brackets, which may hold such brackets."""
        line, start = self.line, self.at + len(opened)
        self.step(len(opened))
        depth = 1
        while self.at < len(self.text):
            if self.peek(len(closed)) == closed and depth == 1:
                inside = self.text[start : self.at]
                self.step(len(closed))
                return inside
            char = self.peek()
            if char in "(){}":
                depth += {opened[0]: 1, closed[0]: -1}.get(char, 0)
                self.step()
            elif char in "'\"\\" and opened != "((":
                self._piece(char)
            else:
                self.step()
        raise SpecError(f"{self.where}: {opened} of line {line} is never closed", "close it")

    def _array(self) -> tuple[Token, ...]:
        line = self.line
        self.step()
        items: list[Token] = []
        while True:
            self._blanks()
            char = self.peek()
            if not char:
                raise SpecError(f"{self.where}: ( of line {line} is never closed", "close it")
            if char == ")":
                self.step()
                return tuple(items)
            if char == "\n":
                self.step()
            elif char in ";|&<>(":
                raise SpecError(
                    f"{self.where}: {char!r} inside the array of line {line}", "quote it"
                )
            else:
                items.append(self._word(self.line))
