"""Files that users have, read into runs: launch scripts, configurations, printed arguments.

One module for each framework, with what it knows of that framework's options: which change memory
or time, and how; which change neither. Everything else is listed as not understood. Nothing that a
file holds is run, and only JSON, YAML, TOML and text are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actcalc.errors import SpecError
from actcalc.io.readers.combine import Read, runs
from actcalc.io.readers.document import STDIN, Document, document
from actcalc.io.readers.kinds import kind_called, read_document, scripts
from actcalc.io.sources import Source, config_source, named, refuse_measured_layer


def read(texts: Sequence[str], kind: str | None = None) -> list[Source]:
    """The runs that names, paths and ``-`` describe, in their order.

    ``kind`` forces how files are read. Raises ``SpecError`` for what cannot be read as a run.
    """
    if kind is not None:
        kind_called(kind)
    if list(texts).count(STDIN) > 1:
        raise SpecError("standard input is named twice", "name - once")
    found = [_named(text) for text in texts]
    files = [text for text, each in zip(texts, found, strict=True) if each is None]
    if kind is not None and not files:
        raise SpecError(f"--from {kind} reads files, and none is named", "drop --from")
    documents = {}
    for text in files:
        if Path(text).is_dir():
            continue
        refuse_measured_layer(Path(text))
        documents[text] = document(text)
    joined = scripts(list(documents.values()), kind)
    result: list[Read] = []
    for text, each in zip(texts, found, strict=True):
        if each is not None:
            result.append(each)
        elif text not in documents:
            result.append(Read(text, "a folder", config_source(Path(text)), model=True))
        elif text in joined:
            script = joined[text]
            result += [script] if script else []
        else:
            result.append(read_document(documents[text], kind))
    return runs(result)


def read_text(name: str, text: str, model: Source) -> Source:
    """The run that a text describes under a file's name; ``model`` is what it may only name."""
    doc = Document(name, text)
    found = scripts([doc], None).get(name) or read_document(doc, None)
    beside = [Read(model.name, "a model", model, model=True)] if found.names_only else []
    (run,) = runs([found, *beside])
    return run


def _named(text: str) -> Read | None:
    found = named(text)
    return None if found is None else Read(text, "a model", found, model=not found.layout)
