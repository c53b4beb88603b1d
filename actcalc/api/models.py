"""What the library's calls take as a model, and the source that it becomes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actcalc.errors import SpecError
from actcalc.io.sources import (
    Source,
    measured_layer,
    merged,
    one_source,
    read_layer,
    run_fields,
    source,
)
from actcalc.specs import Layout, Model, Workload

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

Path = str | os.PathLike[str]
Described = Path | Sequence[Path] | Mapping[str, Any] | Model | Source
"""A name or path, the files of one run, a run file's mapping, a ``Model``, or a read source."""
Plain = (str, os.PathLike, Sequence, Mapping, Model, Source)
"""The same to be told at run time from a measured layer."""


def load_model(name: str) -> Source:
    """What a preset's name or a path describes: a model with its usual workload.

    Raises ``SpecError`` when it names nothing.
    """
    return source(name)


def load_layer(path: Path) -> MeasuredLayer:
    """The layer that ``measure(..., save=path)`` wrote: ``compare`` and ``plan`` take it.

    Raises ``SpecError`` for a file that holds something else.
    """
    from pathlib import Path as File

    return read_layer(File(path))


def described(
    model: Described,
    layout: Layout | None = None,
    workload: Workload | None = None,
    kind: str | None = None,
) -> Source:
    """The source that ``model`` names, with what the specs given beside it name themselves.

    ``kind`` forces how files are read. Raises ``SpecError`` where it names nothing, or a measured
    layer.
    """
    found = _read(model, kind)
    parts = {
        name: spec.model_dump(exclude_unset=True)
        for name, spec in (("layout", layout), ("workload", workload))
        if spec is not None
    }
    return merged(found, **parts) if parts else found


def _read(model: Described, kind: str | None) -> Source:
    if isinstance(model, Source):
        return model
    if isinstance(model, Model):
        return Source(name=model.name, model=model.model_dump())
    if isinstance(model, Mapping):
        return run_fields(dict(model), "the mapping")
    if isinstance(model, str | os.PathLike):
        text = os.fspath(model)
        if measured_layer(text) is not None:
            raise SpecError(f"{text} is a measured layer", "load_layer reads it")
        return source(text, kind)
    return one_source([os.fspath(part) for part in model], kind)
