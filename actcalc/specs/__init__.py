"""What a user describes: model, layout, workload, framework, device."""

from actcalc.specs.framework import Framework
from actcalc.specs.kernels import KernelOptions
from actcalc.specs.layout import Layout
from actcalc.specs.model import LayerKind, Model
from actcalc.specs.parts import Compression, Disentangled, Indexer, Linear, Mamba, Mla, Moe, Sizes
from actcalc.specs.tower import Tower
from actcalc.specs.workload import Workload

__all__ = [
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
    "Sizes",
    "Tower",
    "Workload",
]
