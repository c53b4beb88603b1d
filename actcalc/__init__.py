"""Analytic memory and FLOPs of transformer training.

The library's surface; everything is loaded on first use::

    from actcalc import Layout, compare, load_model

    result = compare(load_model("gpt3-175b"), Layout(tp=8, sp=True))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from actcalc.api import breakdown, compare, load_model
    from actcalc.errors import SpecError
    from actcalc.specs import Framework, Layout, Mla, Model, Moe, Workload

_HOMES = {
    "breakdown": "actcalc.api",
    "compare": "actcalc.api",
    "load_model": "actcalc.api",
    "SpecError": "actcalc.errors",
    "Framework": "actcalc.specs",
    "Layout": "actcalc.specs",
    "Mla": "actcalc.specs",
    "Model": "actcalc.specs",
    "Moe": "actcalc.specs",
    "Workload": "actcalc.specs",
}

__all__ = [
    "Framework",
    "Layout",
    "Mla",
    "Model",
    "Moe",
    "SpecError",
    "Workload",
    "__version__",
    "breakdown",
    "compare",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'actcalc' has no attribute {name!r}")
