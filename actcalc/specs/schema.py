"""JSON Schemas of the files that people write: a run, a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.specs.device import Device
from actcalc.specs.layout import Layout
from actcalc.specs.model import Model
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import CHOOSABLE, RECIPES
from actcalc.specs.schedules import SCHEDULES
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

    def explain(spec: str, field: str, rows: Mapping[str, Any]) -> None:
        """Say what each choice of a field is, in the words of its row."""
        described = definitions[spec]["properties"][field]
        words = "; ".join(f"{name}: {row.title}" for name, row in rows.items())
        described["description"] = f"{described['description']} {words}."

    model = part(Model, "Model")
    definitions["Model"]["properties"]["preset"] = {
        "type": "string",
        "description": "preset whose fields these change",
    }
    parts = {
        "layout": part(Layout, "Layout"),
        "workload": part(Workload, "Workload"),
        "training": part(Training, "Training"),
    }
    explain("Layout", "schedule", SCHEDULES)
    explain("Training", "optimizer", OPTIMIZERS)
    explain("Training", "recipe", {name: RECIPES[name] for name in CHOOSABLE})
    return {
        "title": "Run",
        "type": "object",
        "additionalProperties": False,
        "required": ["model"],
        "properties": {
            "title": {"type": "string"},
            "source": {"type": "string"},
            "model": {"anyOf": [{"type": "string", "description": "preset name"}, model]},
            **parts,
            "framework": {"type": "string"},
            "device": {"type": "string", "description": "name of a device, or path to its file"},
            "policies": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
            },
        },
        "$defs": definitions,
    }


def device_schema() -> dict[str, Any]:
    """JSON Schema of what a device's file may hold: the fields of a device, each with a source.

    The name is the file's, and a title is not needed; every value may be written as
    ``{value: ..., source: ...}``.
    """
    schema: dict[str, Any] = Device.model_json_schema()
    text = {"type": "string"}

    def sourced(plain: Mapping[str, Any]) -> dict[str, Any]:
        with_source = {
            "type": "object",
            "additionalProperties": False,
            "required": ["value"],
            "properties": {"value": plain, "source": text},
        }
        return {"anyOf": [plain, with_source]}

    fields = schema["properties"]
    peaks = fields["peak_flops"]
    one_peak = sourced(peaks.pop("additionalProperties"))
    names = peaks.pop("propertyNames")["enum"]
    peaks |= {
        "additionalProperties": False,
        "properties": {"source": text, **dict.fromkeys(names, one_peak)},
    }
    for key, field in fields.items():
        if key not in ("name", "title", "peak_flops"):
            about = {k: field.pop(k) for k in ("description", "title", "default") if k in field}
            fields[key] = {**about, **sourced(field)}
    fields["source"] = {"type": "string", "description": "Of every value that states no other."}
    schema["required"] = [key for key in schema["required"] if key not in ("name", "title")]
    return schema
