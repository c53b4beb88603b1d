"""From plain mappings to frozen specs, with errors that name the value and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from actcalc.errors import SpecError, shorten, suggestion
from actcalc.specs.base import Spec
from actcalc.specs.numbers import whole

if TYPE_CHECKING:
    from pydantic import ValidationError

S = TypeVar("S", bound=Spec)


def build(kind: type[S], fields: Mapping[str, Any], what: str, *, vetted: bool = False) -> S:
    """Validate ``fields`` as ``kind``; ``SpecError`` names the first bad value and a remedy.

    ``vetted`` fields come from a shipped preset and typed flags: names and types are known to be
    right, the constructor's own checks are enough, and Pydantic is not loaded.
    """
    if vetted:
        _check_names(kind, fields, what)
        return kind(**fields)
    from pydantic import ValidationError

    try:
        return kind.model_validate(_counted(kind, fields))
    except ValidationError as error:
        raise _explain(kind, error, what) from None


_COUNTS = ("Size", "Count", "Degree", "Layers")


def _counted(kind: type[Spec], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with counts as people write them (``seq: 8k``) as numbers."""
    kinds = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]

    def read(key: str, value: Any) -> Any:
        if (
            not isinstance(value, str)
            or value[-1:] not in "kKmM"
            or not kinds.get(key, "").startswith(_COUNTS)
        ):
            return value
        try:
            return whole(value)
        except ValueError:
            return value

    return {key: read(key, value) for key, value in given.items()}


def _check_names(kind: type[Spec], given: Mapping[str, Any], what: str) -> None:
    """Refuse unknown keys and missing ones, as Pydantic would."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise _unknown(kind, key, key, what)
    for name, field in known.items():
        if name not in given and field.default is field.default_factory is MISSING:
            raise SpecError(f"{what}: {name} is missing", f"give {name}")


def _unknown(kind: type[Spec], key: str, path: str, what: str) -> SpecError:
    names = kind.field_names()
    hint = suggestion(key, names) or f"{what} has: " + ", ".join(names)
    return SpecError(f"{what}: unknown key {path!r}", hint)


def _explain(kind: type[Spec], error: ValidationError, what: str) -> SpecError:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    shown = shorten(first.get("input"))
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        kind = _inside(kind, first["loc"][:-1])
        return _unknown(kind, str(first["loc"][-1]), path, what)
    if first["type"] == "missing":
        return SpecError(f"{what}: {path} is missing", f"give {path}")
    message = str(first["msg"])
    plain = message[0].lower() + message[1:]
    return SpecError(f"{what}: {path} is {shown}: {plain}", _remedy(first))


def _inside(kind: type[Spec], path: Sequence[Any]) -> type[Spec]:
    """The nested spec that ``path`` leads to, or ``kind`` itself."""
    from actcalc.specs.kernels import KernelOptions
    from actcalc.specs.model import PARTS

    nested: dict[Any, type[Spec]] = {**PARTS, "kernels": KernelOptions}
    return nested.get(path[-1], kind) if path else kind


def _remedy(first: Mapping[str, Any]) -> str:
    context = first.get("ctx") or {}
    if "expected" in context:
        return f"use {context['expected']}"
    for bound, word in (
        ("ge", "at least"),
        ("gt", "more than"),
        ("le", "at most"),
        ("lt", "less than"),
    ):
        if bound in context:
            return f"use a value of {word} {context[bound]}"
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    for word, noun in wanted.items():
        if str(first["type"]).startswith(word):
            return f"give {noun}"
    return "correct the value"
