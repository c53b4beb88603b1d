"""What a user describes: model, layout, workload, framework, device."""

from actcalc.specs.framework import Framework
from actcalc.specs.kernels import KernelOptions
from actcalc.specs.layer import LayerKind
from actcalc.specs.layout import Layout
from actcalc.specs.model import Model
from actcalc.specs.parts import (
    AltUp,
    Compression,
    Disentangled,
    Indexer,
    Linear,
    Mamba,
    Mla,
    Moe,
    PerLayer,
    Shared,
    Sizes,
)
from actcalc.specs.tower import Tower
from actcalc.specs.workload import Workload

__all__ = [
    "AltUp",
    "Compression",
    "Disentangled",
    "Framework",
    "Indexer",
    "KernelOptions",
    "LayerKind",
    "Layout",
    "Linear",
    "Mamba",
    "Mla",
    "Model",
    "Moe",
    "PerLayer",
    "Shared",
    "Sizes",
    "Tower",
    "Workload",
]
