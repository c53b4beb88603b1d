"""A measurement put beside its prediction, or alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from actcalc.answers.measure.figures import (
    BytesBeside,
    CountBeside,
    LayersBeside,
    Measurement,
    RealStep,
    difference,
)
from actcalc.answers.measure.pairs import pair
from actcalc.answers.measure.prediction import Prediction

if TYPE_CHECKING:
    from actcalc.measure.results import CudaStep, Measured, SavedTensor


def beside(
    measured: Measured,
    prediction: Prediction | None,
    *,
    step: CudaStep | None = None,
    dropout: bool | None = None,
    framework: str | None = None,
    notes: Iterable[str] = (),
) -> Measurement:
    """Put a measurement beside a prediction (or alone), part by part and tensor by tensor."""
    notes = [*notes, *measured.notes, *(prediction.notes if prediction else ())]
    if prediction and len(prediction.layers) != measured.n_layers:
        notes.append(
            f"No prediction: {measured.n_layers} layers ran, the layer graphs describe "
            f"{len(prediction.layers)}."
        )
        prediction = None
    if prediction and measured.checkpointing:
        notes += _given_to_all(measured, prediction)
    middle = measured.n_layers // 2
    predicted = prediction.layers if prediction else ()
    return Measurement(
        name=measured.name,
        model_class=measured.model_class,
        framework=framework if prediction else None,
        torch_version=measured.torch_version,
        transformers_version=measured.transformers_version,
        seq=measured.seq,
        micro_batch=measured.batch,
        precision=measured.dtype,
        attention=measured.attention,
        attention_kernels=dict(measured.attention_kernels),
        dropout=dropout,
        checkpointing=measured.checkpointing,
        **difference(
            measured.total_bytes,
            prediction and sum(prediction.layers) + prediction.embedding + prediction.head,
        ),
        per_layer=_bytes(
            measured.per_layer_bytes, predicted[middle] if middle < len(predicted) else None
        ),
        layers=_groups(measured.layers_bytes, prediction),
        all_layers=_bytes(
            sum(measured.layers_bytes), sum(prediction.layers) if prediction else None
        ),
        embedding=_bytes(
            measured.embedding_bytes + measured.between_bytes, prediction and prediction.embedding
        ),
        head=_bytes(measured.head_bytes, prediction and prediction.head),
        parameters=CountBeside(
            measured=measured.params,
            predicted=prediction.parameters if prediction else None,
            difference=measured.params - prediction.parameters if prediction else None,
        ),
        live_bytes=measured.live_bytes,
        middle_layer=middle,
        tensors=pair(_middle_tensors(measured), prediction.middle if prediction else None),
        gpu=_real(step),
        notes=tuple(dict.fromkeys(notes)),
    )


def _given_to_all(measured: Measured, prediction: Prediction) -> list[str]:
    """A sentence on what checkpoints keep once for all layers, where the prediction has it not."""
    first = measured.of_phase("layer0")
    shared = [tensor for tensor in first if tensor.also_saved_by]
    if not first or measured.layers_bytes[0] == prediction.layers[0] or not shared:
        return []
    shapes = ", ".join("×".join(map(str, tensor.shape)) for tensor in shared)
    return [
        f"Layer 0 pays for what every checkpoint is given and keeps, {shapes} "
        f"({sum(tensor.bytes for tensor in shared):,} B: a mask); the prediction leaves it out."
    ]


def _bytes(measured: int, predicted: Any) -> BytesBeside:
    return BytesBeside(**difference(measured, predicted))


def _groups(measured: Sequence[int], prediction: Prediction | None) -> tuple[LayersBeside, ...]:
    """Layers of one kind with the same figures, in order of first appearance."""
    predicted = prediction.layers if prediction else (None,) * len(measured)
    kinds = prediction.kinds if prediction else ("layer",) * len(measured)
    groups: dict[tuple[str, int, int | None], list[int]] = {}
    for index, key in enumerate(zip(kinds, measured, predicted, strict=True)):
        groups.setdefault(key, []).append(index)
    return tuple(
        LayersBeside(kind=kind, count=len(found), first=found[0], **difference(size, expected))
        for (kind, size, expected), found in groups.items()
    )


def _real(step: CudaStep | None) -> RealStep | None:
    if step is None:
        return None
    return RealStep(
        device=step.device,
        before_bytes=step.before_bytes,
        after_forward_bytes=step.after_forward_bytes,
        kept_bytes=step.after_forward_bytes - step.before_bytes,
        peak_allocated_bytes=step.peak_allocated_bytes,
        peak_reserved_bytes=step.peak_reserved_bytes,
    )


def _middle_tensors(measured: Measured) -> tuple[SavedTensor, ...]:
    """The middle layer's tensors; all there are where no layer ran."""
    if not measured.n_layers:
        return measured.tensors
    return measured.of_phase(f"layer{measured.n_layers // 2}")
