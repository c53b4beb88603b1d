"""A measured layer as a file: every storage it keeps, who saves it, and what each module reads.

The format (JSON, or YAML by the file's ending; schema ``actcalc/measured-layer/1``)::

    schema: actcalc/measured-layer/1
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
      saved_by:                     empty: a module reads it, autograd does not keep it
      - {module: ln_1, op: NativeLayerNormBackward0.input}
    modules:                        every submodule that ran, in order; "" is the layer itself
    - path: ln_1
      cls: LayerNorm
      inputs: [0]                   ids of the storages it reads, parameters aside
      forward_flops: 0              with its submodules

From this follows what is stored when some modules are recomputed, by the rule of
``torch.utils.checkpoint``: what is saved outside them, and their inputs
(:meth:`MeasuredLayer.stored_bytes`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from actcalc.errors import SpecError

_SCHEMA: Literal["actcalc/measured-layer/1"] = "actcalc/measured-layer/1"
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
    """A piece of memory that an op saves or a module reads."""

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


def _inside(path: str, module: str) -> bool:
    """Say whether ``path`` is ``module`` or below it; ``""`` is above everything."""
    return module in ("", path) or path.startswith(module + ".")


class MeasuredLayer(_Frozen):
    """One layer as measured; the module's docstring describes its file."""

    schema_: Literal["actcalc/measured-layer/1"] = _SCHEMA
    name: str
    cls: str
    torch_version: str
    dtype: str
    params: int
    forward_flops: int
    storages: tuple[Storage, ...]
    modules: tuple[ModuleRun, ...]

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
            if not any(other != path and _inside(path, other) for other in wanted)
        ]

    def stored_bytes(self, recompute: Iterable[str]) -> int:
        """Return the bytes kept when the modules at these paths are checkpointed.

        Kept is every storage that an op outside them saves, and every storage they read.

        Raises:
            SpecError: no such module.
        """
        chosen = self._chosen(recompute)
        read = {storage for run in chosen for storage in run.inputs}
        return sum(
            storage.bytes
            for storage in self.storages
            if storage.id in read
            or any(
                not any(_inside(saver.module, run.path) for run in chosen)
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
    path = Path(path)
    content = layer.model_dump(mode="json")
    content = {"schema": content.pop("schema_"), **content}
    text = (
        yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
        if path.suffix in _YAML_ENDINGS
        else json.dumps(content, indent=1) + "\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"cannot write {path}: {error.strerror}", hint="choose another file"
        ) from error


def read_layer(path: str | Path) -> MeasuredLayer:
    """Read what :func:`write_layer` wrote.

    Raises:
        SpecError: the file cannot be read, or is no measured layer.
    """
    path = Path(path)
    hint = "write it with: actcalc measure ... --save FILE"
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix in _YAML_ENDINGS else json.loads(text)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (ValueError, yaml.YAMLError) as error:
        raise SpecError(f"{path} is no JSON or YAML: {error}", hint=hint) from error
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        raise SpecError(f"{path} is no measured layer (schema {_SCHEMA})", hint=hint)
    content["schema_"] = content.pop("schema")
    try:
        layer = MeasuredLayer.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {where}: {first['msg']}", hint=hint) from error
    known = {storage.id for storage in layer.storages}
    unknown = sorted({i for run in layer.modules for i in run.inputs} - known)
    if unknown:
        raise SpecError(f"{path}: modules read storages {unknown}, which it lacks", hint=hint)
    return layer
