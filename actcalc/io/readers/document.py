"""One file that a user names: its text, and the mapping that it holds where it holds one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.yamlfile import MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, parse_json, parse_yaml, read_text

STDIN = "-"

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x80\x02", "a pickle, which runs code when it is loaded"),
    (b"\x80\x03", "a pickle, which runs code when it is loaded"),
    (b"\x80\x04", "a pickle, which runs code when it is loaded"),
    (b"\x80\x05", "a pickle, which runs code when it is loaded"),
    (b"PK\x03\x04", "a zip archive (checkpoints of torch.save are such)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"GGUF", "weights in GGUF"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "an image"),
    (b"\x7fELF", "a program"),
)
"""How files begin that hold no description of a run, and what they are."""


@dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A file's text under the name that the user gave it."""

    name: str
    text: str
    folder: Path | None = None
    """Where paths in it are looked up first; None for standard input."""

    @property
    def stem(self) -> str:
        """A short name for what it describes."""
        return "stdin" if self.name == STDIN else Path(self.name).stem

    @cached_property
    def form(self) -> str:
        """How it is written: json, yaml, toml, or text for all else."""
        suffix = Path(self.name).suffix.lower()
        known = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
        if suffix in known:
            return known[suffix]
        if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".log", ".out", ".args"):
            return "text"
        start = self.text.lstrip()[:1]
        if start == "{":
            return "json"
        return "text"

    @cached_property
    def data(self) -> dict[str, Any]:
        """The mapping it holds; ``SpecError`` where it holds something else, or is malformed."""
        form = self.form
        if form == "toml":
            data: Any = _toml(self.text, self.name)
        elif form == "json":
            data = parse_json(self.text, self.name)
        else:
            data = parse_yaml(self.text, self.name)
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            kind = "nothing" if data is None else type(data).__name__
            raise SpecError(f"{self.name} holds {kind}, not a mapping", "write `key: value` lines")
        _bounded(data, self.name)
        return data

    @cached_property
    def mapping(self) -> dict[str, Any] | None:
        """The same, or None where it is no mapping."""
        try:
            return self.data
        except SpecError:
            return None


def document(name: str) -> Document:
    """Read what ``name`` names: a regular file, or standard input for ``-``.

    Raises ``SpecError`` for what is too large, is not text, or is not there.
    """
    if name == STDIN:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise SpecError(
                f"standard input is larger than {MAX_BYTES / 1e6:g} MB",
                "a description is a few kilobytes of text",
            )
        try:
            return Document(STDIN, raw.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise SpecError("standard input is not text", "pipe a text file into it") from error
    path = Path(name)
    _refuse_binary(path)
    if path.suffix.lower() in (".log", ".out") and path.is_file():
        with path.open("rb") as stream:  # a log's arguments come first
            head = stream.read(MAX_BYTES)
        return Document(name, head.decode("utf-8", "replace"), path.resolve().parent)
    return Document(name, read_text(path), path.resolve().parent)


def _refuse_binary(path: Path) -> None:
    """Say what a file of bytes is, rather than which byte is no text."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError:
        return
    what = next((about for magic, about in _MAGIC if head.startswith(magic)), "")
    if not what and head[8:9] == b"{" and not head[:8].isascii():
        what = "weights in safetensors"
    if not what and head[8:10] == b'{"' and b"\x00" in head[:8]:
        what = "weights in safetensors"
    if what:
        raise SpecError(
            f"{path} is {what}: nothing of it is read",
            "name the launch script, the configuration or the config.json of the run",
        )


def _toml(text: str, where: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: {error}", "check the TOML syntax") from error
    except RecursionError as error:
        raise SpecError(f"{where}: nested too deeply", "flatten it") from error


def _bounded(data: Any, where: str) -> None:
    """Refuse deep nesting and very many entries: every reader walks the whole mapping."""
    pending: list[tuple[Any, int]] = [(data, 0)]
    entries = 0
    while pending:
        node, depth = pending.pop()
        entries += 1
        if depth > MAX_DEPTH:
            raise SpecError(f"{where}: nested more than {MAX_DEPTH} levels deep", "flatten it")
        if entries > MAX_ENTRIES:
            raise SpecError(
                f"{where}: more than {MAX_ENTRIES:,} values", "name the configuration of one run"
            )
        if isinstance(node, dict):
            pending += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            pending += [(value, depth + 1) for value in node]
