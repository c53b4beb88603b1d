"""Documents keep their keys: one that is gone, or of another kind, needs a new number.

``python -m tests.test_schema_keys`` records keys that were added, before a release; it drops none.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from actcalc.cli.schema import OUTPUTS, schema_of
from tests.conftest import DATA

FILE = DATA / "schema_keys.json"
ADDED = "record what was added: python -m tests.test_schema_keys"


def kinds_of(field: dict[str, Any]) -> list[str]:
    """The kinds of JSON value that a key may have, null left out: one may no longer be null."""
    parts = field.get("anyOf", [field])
    found = {one.get("type") or one.get("$ref", "").rpartition("/")[2] or "any" for one in parts}
    return sorted(found - {"null"})


def keys_of(name: str) -> tuple[str, dict[str, list[str]]]:
    """A document's name with its number, and all its keys, those of parts after the part's name."""
    schema = schema_of(name)
    found = {}
    for title, part in {"": schema, **schema.get("$defs", {})}.items():
        for key, field in part.get("properties", {}).items():
            found[f"{title}.{key}".lstrip(".")] = kinds_of(field)
    return schema["properties"]["schema"]["const"], found


def recorded() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
    return found


@pytest.mark.each
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_document_keeps_its_keys_under_its_number(name):
    number, keys = keys_of(name)
    known = recorded().get(number)
    assert known is not None, f"{number}: {ADDED}"
    gone = {key: kinds for key, kinds in known.items() if keys.get(key) != kinds}
    assert not gone, f"{number} needs a new number: {gone}"


def main() -> None:
    known = recorded() if FILE.exists() else {}
    for name in OUTPUTS:
        number, keys = keys_of(name)
        known[number] = {**keys, **known.get(number, {})}
    rows = [
        f"  {json.dumps(number)}: {json.dumps(dict(sorted(keys.items())))}"
        for number, keys in sorted(known.items())
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
