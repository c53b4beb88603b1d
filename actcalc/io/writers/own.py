"""A run file of this product's own: everything a run says, without what goes without saying."""

from __future__ import annotations

from typing import Any

from actcalc.io import presets
from actcalc.specs.base import Spec
from actcalc.specs.run import Run
from actcalc.specs.validate import build


def write(run: Run) -> str:
    """The run file's text."""
    import yaml

    data: dict[str, Any] = {"title": run.title} if run.title else {}
    data["model"] = _model(run)
    data["layout"] = _changed(run.layout)
    data["workload"] = _workload(run, isinstance(data["model"], str))
    data["training"] = _changed(run.training)
    data["framework"] = str(run.framework)
    if run.device:
        data["device"] = run.device.name
    if run.policies:
        data["policies"] = list(run.policies)
    kept = {key: _plain(value) for key, value in data.items() if value not in ({}, None)}
    text: str = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=96)
    return text


def preset_of(run: Run) -> str:
    """The preset that the run's model is; "" where it is none, or one with changes."""
    name = run.model.name
    return name if presets.exists("models", name) and same_model(run, name) else ""


def same_model(run: Run, preset: str) -> bool:
    """Whether the run's model is a preset's in all but its name."""
    fields = presets.load("models", preset).values.get("model") or {}
    if fields.get("layers") != run.model.layers or fields.get("hidden") != run.model.hidden:
        return False
    made = build(type(run.model), {**fields, "name": run.model.name}, "model", vetted=True)
    return made == run.model


def _model(run: Run) -> str | dict[str, Any]:
    return preset_of(run) or _changed(run.model)


def _changed(spec: Spec) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    from dataclasses import MISSING, fields

    result: dict[str, Any] = {}
    for field in fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        factory = field.default_factory
        default = field.default if factory is MISSING else factory()
        if value != default:
            result[field.name] = _changed(value) if isinstance(value, Spec) else value
    return result


def _workload(run: Run, named: bool) -> dict[str, Any]:
    """The same of the workload, and every field that the preset has a value of its own for."""
    result = _changed(run.workload)
    if named:
        usual = presets.load("models", run.model.name).values.get("workload") or {}
        result |= {key: getattr(run.workload, key) for key in usual if key != "kernels"}
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
