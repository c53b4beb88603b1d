"""JSON Schema of a run file."""

from __future__ import annotations

from typing import Any

from actcalc.specs.layout import Layout
from actcalc.specs.model import Model
from actcalc.specs.training import Training
from actcalc.specs.workload import Workload


def run_schema() -> dict[str, Any]:
    """JSON Schema of what a YAML run file may hold."""
    definitions: dict[str, Any] = {}

    def part(spec: type[Any], name: str) -> dict[str, Any]:
        schema = spec.model_json_schema()
        definitions.update(schema.pop("$defs", {}))
        schema.pop("required", None)
        definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    model = part(Model, "Model")
    definitions["Model"]["properties"]["preset"] = {
        "type": "string",
        "description": "preset whose fields these change",
    }
    return {
        "title": "Run",
        "type": "object",
        "additionalProperties": False,
        "required": ["model"],
        "properties": {
            "title": {"type": "string"},
            "source": {"type": "string"},
            "model": {"anyOf": [{"type": "string", "description": "preset name"}, model]},
            "layout": part(Layout, "Layout"),
            "workload": part(Workload, "Workload"),
            "training": part(Training, "Training"),
            "framework": {"type": "string"},
            "device": {"type": "string"},
            "policies": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
            },
        },
        "$defs": definitions,
    }
