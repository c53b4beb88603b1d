"""``actcalc schema [NAME]``: JSON Schema of the input and of each output."""

from __future__ import annotations

import json
import re
from importlib import import_module
from types import FunctionType
from typing import Annotated, Any

import typer

from actcalc.cli.choices import argument, examples
from actcalc.cli.options import OutputOptions, with_options
from actcalc.cli.output import chosen_format, emit_text
from actcalc.errors import SpecError
from actcalc.io.presets import suggestion

app = typer.Typer(add_completion=False, rich_markup_mode=None)

INPUTS = {
    "run": ("actcalc.specs.schema", "run_schema"),
    "model": ("actcalc.specs.model", "Model"),
    "layout": ("actcalc.specs.layout", "Layout"),
    "workload": ("actcalc.specs.workload", "Workload"),
    "training": ("actcalc.specs.training", "Training"),
    "framework": ("actcalc.specs.framework", "Framework"),
    "device": ("actcalc.specs.schema", "device_schema"),
}
OUTPUTS = {
    "compare": ("actcalc.answers.compare", "Comparison"),
    "breakdown": ("actcalc.answers.breakdown", "Breakdown"),
    "memory": ("actcalc.answers.memory", "MemoryReport"),
    "plan": ("actcalc.answers.plan", "RunPlan"),
    "plan-layer": ("actcalc.answers.measured_plan", "LayerPlan"),
    "plan-problem": ("actcalc.answers.plan_problem", "ProblemPlan"),
    "search": ("actcalc.answers.search", "Search"),
    "sweep": ("actcalc.answers.sweep", "Sweep"),
    "advise": ("actcalc.answers.advise", "AdviceReport"),
    "check": ("actcalc.answers.check", "Check"),
    "mfu": ("actcalc.answers.mfu", "Utilisation"),
    "explain": ("actcalc.answers.explain.terms", "Explanation"),
    "terms": ("actcalc.answers.explain.listing", "Terms"),
    "calibrate": ("actcalc.answers.device_shares", "DeviceShares"),
    "measure": ("actcalc.answers.measure.figures", "Measurement"),
    "compare-layer": ("actcalc.answers.measured_layer", "LayerComparison"),
    "presets": ("actcalc.answers.presets", "PresetList"),
    "preset": ("actcalc.answers.presets", "PresetValues"),
}
NAMES = (*INPUTS, *OUTPUTS)


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema called ``name``; ``SpecError`` if there is none."""
    if name not in NAMES:
        raise SpecError(
            f"unknown schema {name!r}", suggestion(name, NAMES) or "schemas: " + ", ".join(NAMES)
        )
    module, attribute = {**INPUTS, **OUTPUTS}[name]
    found = getattr(import_module(module), attribute)
    if isinstance(found, FunctionType):
        body = found()
    else:
        body = found.json_schema() if name in OUTPUTS else found.model_json_schema()
    worded: dict[str, Any] = _in_json_words(body)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **worded}


_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


def _in_json_words(node: Any) -> Any:
    """Descriptions come from docstrings: Python's None is JSON's null."""
    if isinstance(node, list):
        return [_in_json_words(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: re.sub(r"\b(None|True|False)\b", lambda found: _JSON_WORDS[found[0]], value)
        if key == "description" and isinstance(value, str)
        else _in_json_words(value)
        for key, value in node.items()
    }


@app.command(
    epilog=examples(
        "schema run -o run.schema.json",
        "schema compare",
    )
)
@with_options(OutputOptions)
def schema(
    output: OutputOptions,
    name: Annotated[
        str | None,
        argument(metavar="[NAME]", help="Which schema; all if none is named.", words=lambda: NAMES),
    ] = None,
) -> int:
    """JSON Schema of the input (run, model, layout, ...) and of each command's JSON."""
    form = "json" if output.output is None else chosen_format(output)
    if output.format not in (None, "json") or form != "json":
        raise SpecError(f"a schema is JSON, not {output.format or form}",
                        "drop --format" if output.format else "end the file in .json")  # fmt: skip
    document = schema_of(name) if name is not None else {each: schema_of(each) for each in NAMES}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    emit_text(text, output)
    return 0
