"""The base of every result: frozen, typed, and printed as JSON under its schema's name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from actcalc import __version__


class Result:
    """An answer; subclasses are ``@dataclass(frozen=True, kw_only=True)`` that Pydantic knows.

    Every renderer reads this one object. ``document`` is what JSON prints.
    """

    __pydantic_config__: ClassVar[Any] = {"use_attribute_docstrings": True}
    schema_name: ClassVar[str] = ""

    def document(self) -> dict[str, Any]:
        """The result as plain data: the schema's name, the version, then the fields."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {"schema": self.schema_name, "version": __version__, **fields}

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of ``document``."""
        from pydantic import TypeAdapter

        schema: dict[str, Any] = TypeAdapter(cls).json_schema(mode="serialization")
        head = {"schema": {"const": cls.schema_name}, "version": {"type": "string"}}
        schema["properties"] = {**head, **schema.get("properties", {})}
        schema["required"] = [*head, *schema.get("required", [])]
        return schema
