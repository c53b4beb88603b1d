"""What one file says of a run, and how several files make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actcalc.errors import SpecError, shorten

SECTIONS = ("model", "layout", "workload", "training")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Part:
    """Fields of a run by dotted name (``workload.seq``), and what to tell the user.

    Beside fields of the four specs there are ``base`` (the preset, hub id or path that it names as
    its model), ``framework``, ``policy``, ``device``, ``devices`` (processes in all),
    ``accumulation`` (micro-batches of a replica in a step) and ``engine`` (deepspeed).
    """

    kind: str
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the file says."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """What its framework takes where the file says nothing."""
    notes: tuple[str, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    """Notes on what was taken for a field that nobody gave, by the field's name."""
    needs: Mapping[str, SpecError] = field(default_factory=dict)
    """Fields without which there is no run, and the error that says so."""
    more: tuple[Part, ...] = ()
    """What files that it names say."""

    @property
    def whole(self) -> bool:
        """Whether it says which model is trained."""
        named = (key for key, value in self.given.items() if value is not None)
        return any(key == "base" or key.startswith("model.") for key in named)


def merged(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is given and what is usual in all parts; ``SpecError`` where two of them disagree.

    Of two things that are usual the later part's holds.
    """
    given: dict[str, tuple[Any, Part]] = {}
    usual: dict[str, Any] = {}
    engine = any("engine" in part.given for part in parts)
    for part in parts:
        usual |= part.usual
        for key, value in part.given.items():
            if value is None:
                continue
            if engine and key == "workload.precision":
                # DeepSpeed and FSDP cast the weights that layers read: nothing is left to autocast
                value = str(value).removeprefix("amp-")
            if key in given and given[key][0] != value:
                before, other = given[key]
                raise SpecError(
                    f"{other.name} says {_words(key)} is {shorten(before)}, {part.name} "
                    f"{shorten(value)}",
                    "make them agree, or name one of the files",
                )
            given[key] = (value, part)
    return {key: value for key, (value, _) in given.items()}, usual


def _words(key: str) -> str:
    """A field's name as the command line calls it."""
    return {"base": "the model", "devices": "the number of processes"}.get(key, key.split(".")[-1])


def sections(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dotted fields as one mapping for each spec."""
    result: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in fields.items():
        section, dot, name = key.partition(".")
        if dot and value is not None:
            result[section][name] = value
    return result


def dotted(**parts: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of specs by dotted name; the inverse of :func:`sections`."""
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
