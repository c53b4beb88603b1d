"""The base of every result: frozen, typed, and printed as JSON under its schema's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar

from actcalc import __version__


class Result:
    """An answer; subclasses are ``@dataclass(frozen=True, kw_only=True)`` that Pydantic knows.

    Every renderer reads this one object. ``document`` is what JSON prints.
    """

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}
    schema_name: ClassVar[str] = ""
    lists: ClassVar[Mapping[str, str]] = {}
    """Keys under which the first of several answers lists all of them, each with its meaning."""

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


def joined(results: Sequence[Result], key: str) -> dict[str, Any]:
    """One document: the only result, or the first with all of them under ``key``."""
    document = results[0].document()
    if len(results) > 1:
        document[key] = [result.document() for result in results]
    return document
