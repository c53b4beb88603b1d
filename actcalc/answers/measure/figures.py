"""What a measurement says: real bytes beside predicted ones, part by part, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from actcalc.specs.result import Result


@dataclass(frozen=True, kw_only=True)
class BytesBeside:
    """One part of the model: measured, predicted, and what lies between."""

    measured_bytes: int
    """Bytes that autograd keeps."""
    predicted_bytes: int | None
    """Bytes that the layer graph says; null where it describes no such model."""
    difference_bytes: int | None
    """Measured less predicted."""


@dataclass(frozen=True, kw_only=True)
class LayersBeside(BytesBeside):
    """Layers that keep equally much. A first one also pays for what all share."""

    kind: str
    """What they are: dense, moe, sliding, ..."""
    count: int
    """How many there are; the bytes are of one of them."""
    first: int
    """Index of the first of them."""


@dataclass(frozen=True, kw_only=True)
class CountBeside:
    """Parameters: measured, predicted, and what lies between."""

    measured: int
    """Parameters of the built model; a tied matrix counts once."""
    predicted: int | None
    """Parameters that the layer graphs say."""
    difference: int | None
    """Measured less predicted."""


@dataclass(frozen=True, kw_only=True)
class TensorBeside:
    """One saved tensor of the middle layer, and the predicted tensor that it is; null where
    it has no partner of the same size.
    """

    module: str | None
    """Module that saves it, inside the layer."""
    op: str | None
    """Autograd node and attribute that hold it."""
    shape: tuple[int, ...] | None
    """Shape of the saved view."""
    dtype: str | None
    """Its element type."""
    measured_bytes: int
    """Bytes of its storage (0 without a measured one)."""
    also_saved_by: tuple[str, ...]
    """Later ops that keep the same storage, at no cost."""
    predicted_op: str | None
    """Op of the layer graph that saves it."""
    predicted_tensor: str | None
    """Its name in the layer graph."""
    predicted_shape: str | None
    """Its shape in named dimensions."""
    predicted_bytes: int | None
    """Bytes that the graph says (0 without a predicted one; null without a prediction)."""
    difference_bytes: int | None
    """Measured less predicted."""


@dataclass(frozen=True, kw_only=True)
class RealStep:
    """One real step on a GPU, by the caching allocator's own counters."""

    device: str
    """The GPU."""
    before_bytes: int
    """Allocated before the step: parameters, buffers and inputs."""
    after_forward_bytes: int
    """Allocated between forward and backward."""
    kept_bytes: int
    """What the forward left allocated: the difference of the two."""
    peak_allocated_bytes: int
    """Highest allocation of forward and backward, gradients included, without an optimizer."""
    peak_reserved_bytes: int
    """Highest reservation of the allocator in that time."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(Result):
    """Real saved bytes of one training step, beside the prediction.

    Storages count once; parameters, buffers and the batch itself do not.
    """

    schema_name: ClassVar[str] = "actcalc/measure/1"

    name: str
    """The model's or the module's name."""
    model_class: str
    """Class that was built."""
    framework: str | None
    """The framework profile of the prediction; null without one."""
    torch_version: str
    """PyTorch that was traced."""
    transformers_version: str | None
    """transformers that built the model; null for a module of the user's."""
    seq: int | None
    """Tokens per sequence; null where the module brings its own inputs."""
    micro_batch: int | None
    """Sequences in the micro-batch; null where the module brings its own inputs."""
    precision: str
    """Parameters' element type, or autocast over fp32 ones."""
    attention: str | None
    """transformers' attention implementation."""
    attention_kernels: dict[str, int]
    """How often scaled_dot_product_attention took each kernel."""
    dropout: bool | None
    """Whether a dropout rate was in use; null for a module of the user's."""
    checkpointing: bool
    """Whether every layer was checkpointed (policy full)."""
    measured_bytes: int
    """Bytes that autograd keeps for the whole model."""
    predicted_bytes: int | None
    """Bytes that the layer graphs say; null without a prediction."""
    difference_bytes: int | None
    """Measured less predicted."""
    per_layer: BytesBeside
    """The middle layer."""
    layers: tuple[LayersBeside, ...]
    """All layers, in groups of equal ones."""
    all_layers: BytesBeside
    """Sum over the layers."""
    embedding: BytesBeside
    """Before the first layer, and between an encoder and its decoder."""
    head: BytesBeside
    """After the last layer, the loss included."""
    parameters: CountBeside
    """Parameters of the model."""
    live_bytes: int
    """Everything still allocated after the forward, but for the model's output."""
    middle_layer: int
    """Index of the layer whose tensors are listed."""
    tensors: tuple[TensorBeside, ...]
    """That layer's saved tensors (of a module without layers: all of them), in order."""
    gpu: RealStep | None
    """With ``--device cuda``: one real step."""
    notes: tuple[str, ...]
    """What was left out, or could not be reproduced."""

    @property
    def exact(self) -> bool | None:
        """Whether every part agrees to the byte; None without a prediction."""
        if self.predicted_bytes is None:
            return None
        parts = (self.per_layer, *self.layers, self.embedding, self.head)
        return not any(part.difference_bytes for part in parts) and not self.parameters.difference


def difference(measured: int, predicted: Any) -> dict[str, Any]:
    """The three fields of every figure: measured, predicted and what lies between."""
    return {
        "measured_bytes": measured,
        "predicted_bytes": predicted,
        "difference_bytes": None if predicted is None else measured - predicted,
    }
