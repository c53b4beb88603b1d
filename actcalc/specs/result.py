"""The base of every result: frozen, typed, and printed as JSON under its schema's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from actcalc import __version__
from actcalc.errors import MissingExtraError, SpecError, install


class Shown(Protocol):
    """What draws a result: the library hands it over, since results know no renderer."""

    def text(self, result: Result) -> str:
        """The result as the terminal shows it."""

    def html(self, result: Result) -> str:
        """The result as a notebook shows it."""

    def table(self, result: Result) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Keys and raw rows of its main table, as CSV holds them."""


class Result:
    """An answer; subclasses are ``@dataclass(frozen=True, kw_only=True, repr=False)``.

    Every renderer reads this one object. ``document`` is what JSON prints.
    """

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}
    schema_name: ClassVar[str] = ""
    lists: ClassVar[Mapping[str, str]] = {}
    """Keys under which the first of several answers lists all of them, each with its meaning."""

    shown: ClassVar[Shown | None] = None
    """Draws results, once the library is loaded."""

    def __repr__(self) -> str:
        return self.shown.text(self) if self.shown else f"{type(self).__name__}(...)"

    def _repr_html_(self) -> str | None:
        """The tables, for a notebook."""
        return self.shown.html(self) if self.shown else None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: what ``--json`` prints."""
        return self.document()

    def model_dump_json(self, *, indent: int | None = 2) -> str:
        """The same as JSON text."""
        import json

        return json.dumps(self.document(), indent=indent, ensure_ascii=False, allow_nan=False)

    def to_pandas(self) -> Any:
        """Its main table as a pandas ``DataFrame``: the raw values, and keys, of ``--format csv``.

        Raises ``MissingExtraError`` without pandas.
        """
        keys, rows = self._table()
        return _extra("pandas").DataFrame([list(row) for row in rows], columns=list(keys))

    def to_polars(self) -> Any:
        """The same as a polars ``DataFrame``. Raises ``MissingExtraError`` without polars."""
        keys, rows = self._table()
        columns = {key: [row[at] for row in rows] for at, key in enumerate(keys)}
        return _extra("polars").DataFrame(columns, strict=False)

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        if self.shown is None:
            raise SpecError("nothing draws results yet", "import actcalc.api, which does")
        return self.shown.table(self)

    def document(self) -> dict[str, Any]:
        """The result as plain data: the schema's name, the version, then the fields."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {"schema": self.schema_name, "version": __version__, **fields}

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of ``document``: every key is always there, and there are no others."""
        from pydantic import TypeAdapter

        schema: dict[str, Any] = TypeAdapter(cls).json_schema(mode="serialization")
        for base in filter(is_dataclass, cls.__mro__[1:]):
            # Pydantic reads a field's meaning from the class that declares it, and no other.
            declared = TypeAdapter(base).json_schema(mode="serialization")["properties"]
            schema["properties"] |= {k: v for k, v in declared.items() if "description" in v}
        head = {"schema": {"const": cls.schema_name}, "version": {"type": "string"}}
        schema["properties"] = {**head, **schema["properties"]}
        for part in (schema, *schema.get("$defs", {}).values()):
            if "properties" in part:
                part["required"] = list(part["properties"])
                part["additionalProperties"] = False
        for key, about in cls.lists.items():
            several = {"type": "array", "items": {"$ref": "#"}, "minItems": 2}
            schema["properties"][key] = {"description": about, **several}
        return schema


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtraError(f"{name} is not installed", install(name)) from None


def joined(results: Sequence[Result], key: str) -> dict[str, Any]:
    """One document: the only result, or the first with all of them under ``key``."""
    document = results[0].document()
    if len(results) > 1:
        document[key] = [result.document() for result in results]
    return document
