"""Recompute policies of one measured layer: no model, only what a trace of it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from actcalc.errors import SpecError
from actcalc.specs.result import Result

if TYPE_CHECKING:
    from actcalc.measure.layer import MeasuredLayer

_DEPTH = 2
"""Modules nested deeper are compared only when they are named."""


@dataclass(frozen=True, kw_only=True)
class ModulePolicy:
    """One policy on the measured layer, for one micro-batch."""

    policy: str
    """none, full, or the paths of the modules that are wrapped, joined with ``+``."""
    modules: tuple[str, ...]
    """Those paths; the layer itself is the empty one."""
    classes: tuple[str, ...]
    """Their classes."""
    stored_bytes_per_layer: int
    """Bytes one layer keeps from forward to backward."""
    stored_bytes: int
    """The same for all layers."""
    saved_ratio: float
    """Share of ``none``'s bytes that is freed (negative: it stores more)."""
    recompute_flops: int
    """FLOPs of running the wrapped modules once more, whole, in all layers."""
    recompute_forward_ratio: float
    """Re-run FLOPs over the forward FLOPs of the layers."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerComparison(Result):
    """Modules of one measured layer, each wrapped in a checkpoint, side by side."""

    schema_name: ClassVar[str] = "actcalc/compare-layer/1"

    name: str
    """What the layer is called."""
    layer_class: str
    """Its class."""
    torch_version: str
    """PyTorch that was traced."""
    precision: str
    """Element type it was measured in."""
    parameters: int
    """Parameters of one layer."""
    layers: int
    """How many such layers are counted."""
    forward_flops: int
    """Forward FLOPs of all of them, one micro-batch; a multiply-add is 2."""
    policies: tuple[ModulePolicy, ...]
    """One entry per policy; ratios are against ``none``."""
    notes: tuple[str, ...]
    """What was left out, and what a figure means."""


def compare_layer(
    layer: MeasuredLayer, *, layers: int = 1, policies: Sequence[str] = ()
) -> LayerComparison:
    """Compare policies on a measured layer: none, each module alone, full; or those asked for.

    A wrapped module keeps what it reads and what is saved outside it, and re-runs whole: the rule
    of ``torch.utils.checkpoint``.

    Raises ``SpecError`` for a policy that names no module of the layer, or fewer than one layer.
    """
    if layers < 1:
        raise SpecError(f"layers is {layers}", "give one or more")
    paths = [run.path for run in layer.modules if run.path]
    shown = [path for path in paths if path.count(".") < _DEPTH]
    names = list(policies) or ["none", *shown, "full"]
    notes = []
    if not policies and len(shown) < len(paths):
        notes.append(
            f"{len(paths) - len(shown)} modules nested deeper are left out: name them with "
            "--policy, joined with +."
        )
    notes.append(
        "Each module is wrapped by itself, keeps what it reads and re-runs whole; what all layers "
        "share is not counted."
    )
    return LayerComparison(
        name=layer.name,
        layer_class=layer.cls,
        torch_version=layer.torch_version,
        precision=layer.dtype,
        parameters=layer.params,
        layers=layers,
        forward_flops=layer.forward_flops * layers,
        policies=tuple(_figure(layer, name, layers) for name in names),
        notes=tuple(notes),
    )


def modules_of(layer: MeasuredLayer, policy: str) -> tuple[str, ...]:
    """Paths of the modules that ``policy`` wraps; ``SpecError`` if the layer has no such module."""
    if policy == "none":
        return ()
    if policy == "full":
        return ("",)
    known = [run.path for run in layer.modules]
    chosen = tuple(dict.fromkeys(part.strip() for part in policy.split("+")))
    for path in chosen:
        if path not in known or not path:
            raise SpecError(
                f"the measured layer {layer.name!r} has no module {path!r}",
                "policies are none, full, or modules joined with +: " + ", ".join(known[1:9]),
            )
    return chosen


def _figure(layer: MeasuredLayer, name: str, layers: int) -> ModulePolicy:
    modules = modules_of(layer, name)
    classes = {run.path: run.cls for run in layer.modules}
    none, stored = layer.saved_bytes, layer.stored_bytes(modules)
    rerun = layer.rerun_flops(modules)
    return ModulePolicy(
        policy=name,
        modules=modules,
        classes=tuple(classes[path] for path in modules),
        stored_bytes_per_layer=stored,
        stored_bytes=stored * layers,
        saved_ratio=1 - stored / none if none else 0.0,
        recompute_flops=rerun * layers,
        recompute_forward_ratio=rerun / layer.forward_flops if layer.forward_flops else 0.0,
    )
