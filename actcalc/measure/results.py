"""What a measurement returns: frozen objects, exact integers, units in the names."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actcalc.measure.layer import MeasuredLayer

Dtype = Literal["bf16", "fp16", "fp32", "amp-bf16", "amp-fp16"]
"""Parameters' dtype; ``amp-*`` keeps fp32 parameters and runs the forward under autocast."""

EMBEDDING = "embedding"
HEAD = "head"
BETWEEN = "between"


class _Frozen(BaseModel):
    """A result: nothing in it changes after it was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SavedTensor(_Frozen):
    """One storage that autograd keeps for backward, named after the first op that saved it."""

    phase: str
    """``embedding``, ``layer<i>``, ``between`` (two stacks of layers) or ``head``."""
    module: str
    """Path of the innermost module that was running, ``""`` for the model itself."""
    cls: str
    """That module's class."""
    op: str
    """Autograd node and attribute, for example ``MmBackward0.self``."""
    shape: tuple[int, ...]
    """Shape of the saved view; a slice can be smaller than the storage it keeps alive."""
    dtype: str
    bytes: int
    """Bytes of the whole storage, which is what stays allocated."""
    also_saved_by: tuple[str, ...] = ()
    """``module:op`` of every later save of the same storage; these cost nothing more."""


class Flops(_Frozen):
    """Floating point operations of one step, by PyTorch's own counter (a multiply-add is 2)."""

    forward_flops: int
    backward_flops: int
    """Includes what checkpointing re-runs."""


class CudaStep(_Frozen):
    """One real step on a GPU, by the caching allocator's own counters."""

    device: str
    before_bytes: int
    """Allocated before the step: parameters, buffers and inputs."""
    after_forward_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """With gradients, without an optimizer."""


class Measured(_Frozen):
    """What autograd keeps between the forward and the backward pass of one training step.

    Storages are counted once. Parameters, buffers and the batch itself are excluded: they are
    there anyway.
    """

    name: str
    model_class: str
    torch_version: str
    transformers_version: str | None
    batch: int | None
    seq: int | None
    dtype: str
    attention: str | None
    padding_mask: bool
    checkpointing: bool
    params: int
    """Number of parameters; a tied matrix counts once."""
    n_layers: int
    total_bytes: int
    per_layer_bytes: int
    """Of the middle layer (index ``n_layers // 2``); 0 if the model has no stack of layers."""
    layers_bytes: tuple[int, ...]
    """Of every layer. The first one also pays for what all share (rotary tables, masks)."""
    head_bytes: int
    embedding_bytes: int
    between_bytes: int
    live_bytes: int
    """Everything still allocated after the forward, once the model's output is dropped except
    the loss. More than ``total_bytes`` where a checkpoint's closure holds tensors that autograd
    knows nothing of."""
    attention_kernels: dict[str, int]
    """How often scaled_dot_product_attention took each kernel."""
    flops: Flops | None = None
    cuda: CudaStep | None = None
    layer: MeasuredLayer | None = Field(default=None, repr=False)
    """The middle layer with its modules, when it was asked for, to be saved as a file."""
    notes: tuple[str, ...] = ()
    """What the measurement could not reproduce, in sentences."""
    tensors: tuple[SavedTensor, ...] = Field(repr=False)
    """In the order they were saved."""

    def of_phase(self, phase: str) -> tuple[SavedTensor, ...]:
        """Return the tensors of one phase, in the order they were saved."""
        return tuple(tensor for tensor in self.tensors if tensor.phase == phase)
