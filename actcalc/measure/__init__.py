"""Real saved bytes from PyTorch, without a GPU (extra ``actcalc[torch]``).

:func:`measure_transformers` measures a model by its configuration, :func:`measure_module` a
user's own module; both return a :class:`Measured`. :func:`measure_cuda` adds one real step on a
GPU. Nothing of PyTorch is imported before one of them is called.
"""

from actcalc.measure.cuda import measure_cuda, measure_module_cuda
from actcalc.measure.hf import measure_transformers
from actcalc.measure.layer import MeasuredLayer, layer_of, write_layer
from actcalc.measure.module import load_factory, measure_module
from actcalc.measure.results import CudaStep, Flops, Measured, SavedTensor

__all__ = [
    "CudaStep",
    "Flops",
    "Measured",
    "MeasuredLayer",
    "SavedTensor",
    "layer_of",
    "load_factory",
    "measure_cuda",
    "measure_module",
    "measure_module_cuda",
    "measure_transformers",
    "write_layer",
]
