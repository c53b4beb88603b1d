"""Measure a user's own ``nn.Module``, from a function in a file the user names.

The function takes no arguments and returns the module with example inputs::

    def factory():
        return Block(4096), torch.empty(1, 2048, 4096, dtype=torch.bfloat16)

The inputs are one tensor, a tuple of positional arguments, or a mapping of keyword arguments.
Everything made inside the function is fake and lives on a CUDA device, so a model of any size
costs nothing. Floating-point inputs are taken as the output of the layer before: they require a
gradient, and count when an op saves them. Other inputs (token ids) are the batch and do not.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actcalc.errors import SpecError
from actcalc.measure.fake_cuda import DEVICE, fake_cuda, require_torch
from actcalc.measure.record import layer_stacks
from actcalc.measure.results import Measured
from actcalc.measure.run import facts_of, failing_as_spec_error, summarise, traced_step

_HINT = "the function takes nothing and returns (module, inputs)"


def load_factory(reference: str) -> Callable[[], Any]:
    """Return the function that ``path.py:name`` names. Runs that file, and no other.

    Raises:
        SpecError: the reference, the file or the function is not there, or the file fails.
    """
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text or not name:
        raise SpecError(
            f"{reference!r} names no function in a file", hint="write it as path.py:factory"
        )
    path = Path(path_text)
    if not path.is_file():
        raise SpecError(f"there is no file {path}", hint="write it as path.py:factory")
    spec = importlib.util.spec_from_file_location(f"_actcalc_measured_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is no Python file", hint="write it as path.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    with failing_as_spec_error(str(path)):
        spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise SpecError(f"{path} has no function {name!r}", hint=_HINT)
    return factory  # type: ignore[no-any-return]


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, list | tuple):
        return tuple(inputs), {}
    return (inputs,), {}


def build_module(
    build: Callable[[], Any], *, device: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call a factory and return (module, positional, keyword arguments), ready to train.

    Raises:
        SpecError: the factory fails, or returns something else.
    """
    torch = require_torch()
    from torch.utils._pytree import tree_map

    label = f"{getattr(build, '__name__', 'the factory')}()"
    with failing_as_spec_error(label):
        made = build()
    if not isinstance(made, tuple) or len(made) != 2:
        raise SpecError(f"{label} returned {type(made).__name__}, not (module, inputs)", hint=_HINT)
    module, inputs = made
    if not isinstance(module, torch.nn.Module):
        raise SpecError(
            f"{label} returned a {type(module).__name__} where a module belongs", hint=_HINT
        )

    def prepared(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach().to(device)
        return moved.requires_grad_(moved.is_floating_point())

    args, kwargs = tree_map(prepared, _arguments(inputs))
    return module.to(device).train(), args, kwargs


def _layers(module: Any, path: str | None) -> list[Any]:
    """Return the modules to count as layers.

    Raises:
        SpecError: there is no list of modules at ``path``.
    """
    if path == "":
        return [module]
    if path is None:
        return [block for stack in layer_stacks(module) for block in stack] or [module]
    found = dict(module.named_modules()).get(path)
    blocks = [] if found is None else list(found.children())
    if not blocks:
        raise SpecError(
            f"{type(module).__name__} has no list of layers at {path!r}",
            hint="name a ModuleList, for example transformer.h",
        )
    return blocks


def measure_module(
    factory: Callable[[], Any] | str,
    *,
    name: str | None = None,
    amp: str | None = None,
    layers: str | None = None,
    flops: bool = False,
    keep_layer: bool = False,
) -> Measured:
    """Measure what one training step of a module keeps for backward.

    Args:
        factory: the function described in this module's docstring, or ``path.py:name`` of it.
        name: what to call the result; the module's class if absent.
        amp: ``bf16`` or ``fp16`` to run the forward under autocast.
        layers: path of the list of layers inside the module, ``""`` to count the module as one
            layer. By default its outermost lists of blocks, or itself if it has none.
        flops: also count FLOPs of forward and backward.
        keep_layer: also return :attr:`Measured.layer`, to be saved. It is the whole module,
            or the middle layer if the module holds a stack of layers.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: a bad reference or return value, or a module that cannot run without data.
    """
    torch = require_torch()
    if amp not in (None, "bf16", "fp16"):
        raise SpecError(f"unknown autocast dtype {amp!r}", hint="one of bf16, fp16")
    build = load_factory(factory) if isinstance(factory, str) else factory
    with fake_cuda() as trace:
        module, args, kwargs = build_module(build, device=DEVICE)
        dtype = f"amp-{amp}" if amp else _dtypes(module)
        step = traced_step(
            module,
            lambda: module(*args, **kwargs),
            layers=_layers(module, layers),
            inputs=_indices(args, kwargs),
            what=type(module).__name__,
            autocast_dtype=amp and {"bf16": torch.bfloat16, "fp16": torch.float16}[amp],
            flops=flops,
            keep_layer=keep_layer,
            name=name or type(module).__name__,
            dtype=dtype,
        )
        facts = facts_of(module, trace)
    return summarise(
        step,
        name=name or type(module).__name__,
        model_class=type(module).__name__,
        transformers_version=None,
        batch=None,
        seq=None,
        dtype=dtype,
        attention=None,
        padding_mask=False,
        checkpointing=False,
        **facts,
    )


def _indices(*inputs: Any) -> list[Any]:
    """Tensors of integers among the inputs: the batch itself, which is nobody's activation."""
    from torch.utils._pytree import tree_leaves

    tensor = require_torch().Tensor
    leaves = tree_leaves(inputs)
    return [leaf for leaf in leaves if isinstance(leaf, tensor) and not leaf.is_floating_point()]


def _dtypes(module: Any) -> str:
    """The element types of a module's parameters, in words."""
    found = {str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()}
    return "+".join(sorted(found)) or "none"
