"""The frozen base of every spec, and the bounds that keep sizes sane.

A spec is a frozen dataclass that Pydantic knows. Its constructor checks bounds and choices by
itself, so that a run made of presets and typed flags never loads Pydantic (which costs as much as
everything else together); whatever comes from files and free text goes through
:meth:`Spec.model_validate`, where Pydantic checks types, unknown keys and nested specs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
)

from actcalc.errors import SpecError, suggestion, visible


class Bounds(NamedTuple):
    """The closed interval a number must lie in; Pydantic and the constructor both read it."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Add the bounds to the number's schema."""
        schema = {**handler(source), "strict": True}
        kind = int if schema["type"] == "int" else float
        return {**schema, "ge": kind(self.low), "le": kind(self.high)}


# Upper bounds are far above anything built, and low enough that a typo such as 1e30 is refused
# rather than priced.
Degree = Annotated[int, Bounds(1, 2**20)]
"""A parallel degree or a count of devices."""

Size = Annotated[int, Bounds(1, 2**32)]
"""A width, length or count of tokens."""

Count = Annotated[int, Bounds(0, 2**32)]
"""A size that may be absent (0)."""

MAX_LAYERS = 1024
"""Layers of a model, far more than any has (the deepest trained have 1000)."""

MAX_SLICES = 256
"""Slices that a pipeline may cut a model into: stages times the chunks of each."""

Layers = Annotated[int, Bounds(1, MAX_LAYERS)]
"""A number of layers."""

MoreLayers = Annotated[int, Bounds(0, MAX_LAYERS)]
"""Layers beside the model's own, which may be none."""

Rate = Annotated[float, Bounds(0.0, 0.999999)]
"""A dropout probability."""

Cap = Annotated[float, Bounds(0.0, 1e6)]
"""A soft cap; 0 means none."""

Factor = Annotated[float, Bounds(1.0, 1e3)]
"""A factor that makes something larger."""


class Spec:
    """Base of the frozen specs.

    Subclasses are ``@dataclass(frozen=True, kw_only=True, repr=False, eq=False)``: what those two
    would generate for each class stands here once.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "use_attribute_docstrings": True}

    def __new__(cls, **given: Any) -> Self:
        """A spec that remembers which fields were given."""
        made = super().__new__(cls)
        made._set(_given=frozenset(given))
        return made

    def __post_init__(self) -> None:
        for name in self.field_names():
            value = getattr(self, name)
            if isinstance(value, str) and not value.isprintable():
                self._set(**{name: visible(value)})
        for name, annotation in _checked(type(self)):
            value = getattr(self, name)
            if value is not None or name not in _optional(type(self)):
                _check_value(type(self).__name__.lower(), name, annotation, value)
        self._check()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), str(self._values())))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.field_names())

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.field_names())
        return f"{type(self).__name__}({inside})"

    def _check(self) -> None:
        """Hook for a spec's own cross-checks; raises ``SpecError``."""

    def _set(self, **values: Any) -> None:
        """Fill in a derived default while constructing."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def model_fields_set(self) -> frozenset[str]:
        """Names of the fields that were given, not left at their defaults."""
        given: frozenset[str] | None = self.__dict__.get("_given")
        return frozenset(self.field_names()) if given is None else given

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of the spec's fields."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def model_validate(cls, data: Mapping[str, Any] | Self) -> Self:
        """Validate a plain mapping with Pydantic (or take a spec as it is).

        Raises Pydantic's ``ValidationError`` for a wrong type, an unknown key or a number out of
        bounds, and ``SpecError`` for values that contradict each other.
        """
        if isinstance(data, cls):
            return data
        fields: dict[str, Any] = dict(cast(Mapping[str, Any], data))
        for name, annotation in _checked(cls):
            if get_origin(annotation) is Literal and isinstance(fields.get(name), bool | float):
                # Pydantic takes True for 1 and 2.0 for 2.
                _check_value(cls.__name__.lower(), name, annotation, fields[name])
        result: Self = _adapter(cls).validate_python(fields)
        result._set(_given=frozenset(fields))
        return result

    @classmethod
    def model_validate_json(cls, data: str | bytes) -> Self:
        """Validate JSON text; raises as :meth:`model_validate`."""
        from pydantic_core import from_json

        return cls.model_validate(from_json(data))

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The spec's JSON Schema."""
        schema: dict[str, Any] = _adapter(cls).json_schema()
        return schema

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        """The fields as plain data, nested specs as mappings; all, or those that were given."""
        names = [n for n in self.field_names() if not exclude_unset or n in self.model_fields_set]
        values = ((name, getattr(self, name)) for name in names)
        return {
            n: v.model_dump(exclude_unset=exclude_unset) if isinstance(v, Spec) else v
            for n, v in values
        }

    def model_dump_json(self, *, indent: int | None = None, exclude_unset: bool = False) -> str:
        """The same as JSON text."""
        import json

        return json.dumps(
            self.model_dump(exclude_unset=exclude_unset), indent=indent, ensure_ascii=False
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with some fields changed, checked again."""
        made: Self = replace(self, **(update or {}))  # type: ignore[type-var]
        made._set(_given=self.model_fields_set | frozenset(update or {}))
        return made


def _make_adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


_adapter: Callable[[Any], Any] = cache(_make_adapter)


def _find_checked(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Fields whose annotation bounds a number or lists choices, with the resolved annotation."""
    found: list[tuple[str, Any]] = []
    for field in fields(cls):
        annotation: Any = field.type
        if isinstance(annotation, str):
            annotation = eval(annotation, vars(sys.modules[cls.__module__]))
        origin = get_origin(annotation)
        if origin in (Union, UnionType):
            inner = [each for each in get_args(annotation) if each is not type(None)]
            annotation = inner[0] if len(inner) == 1 else annotation
            origin = get_origin(annotation)
        if origin is Annotated or origin is Literal or annotation is bool:
            found.append((field.name, annotation))
    return tuple(found)


_checked: Callable[[Any], tuple[tuple[str, Any], ...]] = cache(_find_checked)


def _find_optional(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(cls) if field.default is None)


_optional: Callable[[Any], frozenset[str]] = cache(_find_optional)


def _check_value(what: str, name: str, annotation: Any, value: Any) -> None:
    if annotation is bool:
        if not isinstance(value, bool):
            raise SpecError(f"{what}: {name} is {value!r}, not true or false", "use true or false")
        return
    choices = get_args(annotation)
    if get_origin(annotation) is Literal:
        if not any(value == each and type(value) is type(each) for each in choices):
            known = list(map(str, choices))
            close = suggestion(str(value), known)
            raise SpecError(
                f"{what}: {name} is {value!r}", f"{close} use one of {', '.join(known)}".lstrip()
            )
        return
    kind, bounds = choices[0], choices[1]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (kind is int and not isinstance(value, int)):
        noun = "a whole number" if kind is int else "a number"
        raise SpecError(f"{what}: {name} is {value!r}, not {noun}", f"give {noun}")
    if not bounds.low <= value <= bounds.high:
        low, high = kind(bounds.low), kind(bounds.high)
        raise SpecError(
            f"{what}: {name} is {value}, not between {low} and {high}",
            f"use a value of at least {low}" if value < low else f"use a value of at most {high}",
        )
