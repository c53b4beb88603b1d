"""Analytic memory and FLOPs of transformer training.

Every command is a function, with keyword arguments named like its flags; everything is loaded on
first use::

    from actcalc import compare, memory

    memory("llama-3-8b", device="h100-80gb").fits
    compare("gpt3-175b", tp=8, sp=True)
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # as typing has it, which a console script that is interrupted need not load
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from actcalc.api import (
        breakdown,
        compare,
        explain,
        load_layer,
        load_model,
        measure,
        memory,
        mfu,
        plan,
    )
    from actcalc.api.choose import advise, search
    from actcalc.errors import MissingExtraError, SpecError
    from actcalc.specs import Framework, Layout, Mla, Model, Moe, Workload

_HOMES = {
    "advise": "actcalc.api.choose",
    "breakdown": "actcalc.api",
    "compare": "actcalc.api",
    "explain": "actcalc.api",
    "load_layer": "actcalc.api",
    "load_model": "actcalc.api",
    "measure": "actcalc.api",
    "memory": "actcalc.api",
    "mfu": "actcalc.api",
    "plan": "actcalc.api",
    "search": "actcalc.api.choose",
    "MissingExtraError": "actcalc.errors",
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
    "MissingExtraError",
    "Mla",
    "Model",
    "Moe",
    "SpecError",
    "Workload",
    "__version__",
    "advise",
    "breakdown",
    "compare",
    "explain",
    "load_layer",
    "load_model",
    "measure",
    "memory",
    "mfu",
    "plan",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'actcalc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


class _Front(ModuleType):
    """The package. Some calls have the name of the package that does their work.

    Importing ``actcalc.memory`` would put that package where the call of this name is looked up.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Front
