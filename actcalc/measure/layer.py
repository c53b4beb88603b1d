"""A measured layer as a file: every storage it keeps, who saves it, and what each module reads.

The format (JSON, or YAML by the file's ending; schema ``actcalc/measured-layer/2``)::

    schema: actcalc/measured-layer/2
    name: my_block                  what the user calls it
    cls: Block                      class of the layer's module
    torch_version: 2.13.0+cpu
    dtype: bf16
    params: 12596224                parameters of the layer
    forward_flops: 103079215104     of one micro-batch; a multiply-add is 2
    storages:                       each once; what all layers share is left out
    - id: 0
      bytes: 16777216
      shape: [1, 2048, 4096]        of the first saved view
      dtype: bfloat16
      saved_by:                     empty: only read or made, autograd does not keep it
      - {module: ln_1, op: NativeLayerNormBackward0.input}
    modules:                        every submodule that ran, in order; "" is the layer itself
    - path: ln_1
      cls: LayerNorm
      inputs: [0]                   ids of the storages it reads, parameters aside
      forward_flops: 0              with its submodules
    ops:                            every ATen op that made or changed a storage, in order
    - op: aten.native_layer_norm.default
      module: ln_1                  innermost module it ran in
      inputs: [0]                   storages it reads; parameters and buffers aside
      outputs: [1, 2, 3]            storages it makes or changes
      writes: []                    those of them that existed before: changed in place
      forward_flops: 0
      random: false                 draws random numbers
      rerunnable: true              false: routes by order, or changes a buffer of the model
    ops_to_last_save: 41            so many ops had run when autograd saved its last tensor

From this follows what is stored when some modules are recomputed, by the rule of
``torch.utils.checkpoint``: what is saved outside them, and their inputs
(:meth:`MeasuredLayer.stored_bytes`). The ops are what ``actcalc plan`` chooses from. Files of
schema 1 have no ops: they can be compared, not planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from actcalc.errors import SpecError, file_error, visible

Schema = Literal["actcalc/measured-layer/1", "actcalc/measured-layer/2"]
_SCHEMA: Schema = "actcalc/measured-layer/2"
_YAML_ENDINGS = (".yaml", ".yml")


class _Frozen(BaseModel):
    """Part of a measured layer: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Saver(_Frozen):
    """An op that keeps a storage for backward."""

    module: str
    """Path of the innermost module it ran in, relative to the layer."""
    op: str
    """Autograd node and attribute."""


class Storage(_Frozen):
    """A piece of memory that an op makes, changes or saves, or a module reads."""

    id: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    saved_by: tuple[Saver, ...]


class ModuleRun(_Frozen):
    """One submodule of the layer, with what it reads."""

    path: str
    cls: str
    inputs: tuple[int, ...]
    forward_flops: int


class OpRun(_Frozen):
    """One ATen op of the layer's forward that made a storage or changed one.

    Ops that only look at a storage in another shape (views) are left out: they take no memory.
    """

    op: str
    """Its name with overload, ``aten.addmm.default``."""
    module: str
    """Path of the innermost module it ran in, relative to the layer."""
    inputs: tuple[int, ...]
    """Storages it reads, without parameters, buffers and what all layers share."""
    outputs: tuple[int, ...]
    """Storages it makes or changes."""
    writes: tuple[int, ...] = ()
    """Those of ``outputs`` that were there before."""
    forward_flops: int = 0
    """A multiply-add is 2."""
    random: bool = False
    """Whether it draws random numbers."""
    rerunnable: bool = True
    """False where a second run could differ (top-k, sort) or changes the model's buffers."""


def inside(path: str, module: str) -> bool:
    """Say whether ``path`` is ``module`` or below it; ``""`` is above everything."""
    return module in ("", path) or path.startswith(module + ".")


class MeasuredLayer(_Frozen):
    """One layer as measured; the module's docstring describes its file."""

    schema_: Schema = _SCHEMA
    name: str
    cls: str
    torch_version: str
    dtype: str
    params: int
    forward_flops: int
    storages: tuple[Storage, ...]
    modules: tuple[ModuleRun, ...]
    ops: tuple[OpRun, ...] = ()
    ops_to_last_save: int = 0

    @property
    def has_ops(self) -> bool:
        """Whether its ops were recorded (files of schema 1 have none)."""
        return self.schema_ == _SCHEMA

    @property
    def saved_bytes(self) -> int:
        """Bytes that the layer keeps for backward without recomputation."""
        return self.stored_bytes(())

    def _chosen(self, recompute: Iterable[str]) -> list[ModuleRun]:
        """Return the recomputed modules, without those inside another one.

        Raises:
            SpecError: no such module.
        """
        by_path = {run.path: run for run in self.modules}
        wanted = list(dict.fromkeys(recompute))
        for path in wanted:
            if path not in by_path:
                raise SpecError(
                    f"the measured layer {self.name!r} has no module {path!r}",
                    hint="one of " + ", ".join(repr(known) for known in by_path),
                )
        return [
            by_path[path]
            for path in wanted
            if not any(other != path and inside(path, other) for other in wanted)
        ]

    def stored_bytes(self, recompute: Iterable[str]) -> int:
        """Return the bytes kept when the modules at these paths are checkpointed.

        Kept is every storage that an op outside them saves, and every storage they read.

        Raises:
            SpecError: no such module.
        """
        return sum(storage.bytes for storage in self.stored(recompute))

    def stored(self, recompute: Iterable[str]) -> tuple[Storage, ...]:
        """Return the storages that :meth:`stored_bytes` counts, in order.

        Raises:
            SpecError: no such module.
        """
        chosen = self._chosen(recompute)
        read = {storage for run in chosen for storage in run.inputs}
        return tuple(
            storage
            for storage in self.storages
            if storage.id in read
            or any(
                not any(inside(saver.module, run.path) for run in chosen)
                for saver in storage.saved_by
            )
        )

    def rerun_flops(self, recompute: Iterable[str]) -> int:
        """Return the FLOPs of running the modules at these paths once more, whole.

        Raises:
            SpecError: no such module.
        """
        return sum(run.forward_flops for run in self._chosen(recompute))


def write_layer(layer: MeasuredLayer, path: str | Path) -> None:
    """Write a measured layer: YAML if the name ends so, else JSON.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        Path(path).write_text(layer_text(layer, path), encoding="utf-8")
    except OSError as error:
        raise file_error(f"write {path}", error) from error


def layer_text(layer: MeasuredLayer, path: str | Path) -> str:
    """A measured layer as the text of a file of that name: YAML if it ends so, else JSON."""
    content = layer.model_dump(mode="json")
    content = {"schema": content.pop("schema_"), **content}
    if Path(path).suffix in _YAML_ENDINGS:
        text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
        return text
    return json.dumps(content, indent=1) + "\n"


def _visible(node: Any) -> Any:
    """The same data with every text on one line: it is shown, and put into comments of code."""
    if isinstance(node, str):
        return visible(node)
    if isinstance(node, dict):
        return {_visible(key): _visible(value) for key, value in node.items()}
    return [_visible(each) for each in node] if isinstance(node, list) else node


def layer_of(content: dict[str, Any], path: Path) -> MeasuredLayer:
    """The layer in what :func:`write_layer` wrote to ``path``.

    Raises:
        SpecError: it is no measured layer.
    """
    hint = "write it with: actcalc measure ... --save FILE"
    content = _visible(content)
    if content.get("schema") not in get_args(Schema):
        raise SpecError(f"{path} is no measured layer (schema {_SCHEMA})", hint=hint)
    content["schema_"] = content.pop("schema")
    try:
        layer = MeasuredLayer.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {where}: {first['msg']}", hint=hint) from error
    _check_ids(layer, path, hint)
    return layer


def _check_ids(layer: MeasuredLayer, path: Path, hint: str) -> None:
    known = {storage.id for storage in layer.storages}
    if len(known) < len(layer.storages):
        raise SpecError(f"{path}: two storages have the same id", hint=hint)
    unknown = sorted({i for run in layer.modules for i in run.inputs} - known)
    if unknown:
        raise SpecError(f"{path}: modules read storages {unknown}, which it lacks", hint=hint)
    unknown = sorted({i for op in layer.ops for i in (*op.inputs, *op.outputs)} - known)
    if unknown:
        raise SpecError(f"{path}: ops use storages {unknown}, which it lacks", hint=hint)
    if not 0 <= layer.ops_to_last_save <= len(layer.ops):
        raise SpecError(
            f"{path}: ops_to_last_save is {layer.ops_to_last_save} of {len(layer.ops)} ops",
            hint=hint,
        )
    numbers = [n for storage in layer.storages for n in (storage.bytes, *storage.shape)]
    numbers += [op.forward_flops for op in layer.ops]
    numbers += [layer.params, layer.forward_flops]
    numbers += [run.forward_flops for run in layer.modules]
    if min(numbers, default=0) < 0:
        raise SpecError(f"{path}: a size or a number of FLOPs is negative", hint=hint)
