"""What PyTorch really keeps for backward, beside what the layer graphs predict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from actcalc.answers.header import run_notes
from actcalc.errors import SpecError
from actcalc.layers.core.graph import Graph, size_of
from actcalc.layers.model import ModelGraph
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import Policy
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.result import Result
from actcalc.specs.run import Run
from actcalc.specs.workload import Workload

if TYPE_CHECKING:
    from actcalc.measure.results import CudaStep, Measured, SavedTensor

_ARGUMENTS = ("query", "key", "value")
FRAMEWORK = "transformers"
"""The profile that a measured transformers model is compared with."""


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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True)
class Prediction:
    """The layer graphs' figures for the parts that a measurement tells apart, in bytes."""

    layers: tuple[int, ...]
    kinds: tuple[str, ...]
    embedding: int
    head: int
    parameters: int
    middle: Sequence[Expected]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """One predicted tensor of the middle layer."""

    op: str
    tensor: str
    shape: str
    sizes: tuple[int, ...]
    bytes: int


def predict(run: Run, policy: str) -> Prediction:
    """What the run's layer graphs say about each part of the model, under the policy named.

    The first layer that saves a tensor shared by all pays for it, as autograd has it.
    """
    staged = StagedRun(run)
    graph, sizes, chosen = staged.graph, staged.graph.sizes, staged.policy(policy)
    layers: list[int] = []
    kinds: list[str] = []
    paid: set[str] = set()
    for group in graph.runs:
        outcome = staged.under(chosen).outcome(group.graph)
        own = outcome.sizes(graph).stored
        kept = {name for name in group.graph.saved if name in group.graph.shared}
        if chosen.whole:
            kept = set()
        for _ in range(group.count):
            new, paid = kept - paid, paid | kept
            layers.append(own + int(size_of(group.graph, new, sizes)))
            kinds.append(group.kind.label)
    middle = staged.layers[len(layers) // 2]
    return Prediction(
        layers=tuple(layers),
        kinds=tuple(kinds),
        embedding=int(size_of(graph.embedding, graph.embedding.saved, sizes)),
        head=int(size_of(graph.head, graph.head.saved, sizes)),
        parameters=staged.parameters,
        middle=_expected(graph, middle, chosen),
        notes=tuple(run_notes(staged)),
    )


def _expected(graph: ModelGraph, layer: Graph, policy: Policy) -> list[Expected]:
    outcome = layer_outcome(graph, layer, policy)
    found = []
    for name in outcome.stored:
        tensor = layer.tensors[name]
        savers = layer.savers.get(name, ())
        found.append(
            Expected(
                op=savers[0].name if savers and not policy.whole else "input",
                tensor=name,
                shape=tensor.shape_text,
                sizes=tuple(int(dim.value(graph.sizes)) for dim in tensor.shape),
                bytes=int((tensor.bytes * outcome.copies).value(graph.sizes)),
            )
        )
    return found


def check_measurable(run: Run) -> bool:
    """Whether the run asks for checkpointing; ``SpecError`` for what no measurement can answer.

    Measured is one GPU's model as transformers builds it: no parallel layout, no policy but
    none and full (``gradient_checkpointing_enable``), no attention that needs another package.
    """
    default, layout = Layout().model_dump(), run.layout.model_dump()
    split = [key for key, value in layout.items() if value != default[key]]
    if split:
        named = ", ".join(f"{key} {layout[key]}" for key in split)
        raise SpecError(
            f"measure builds one GPU's model and knows no layout: {named}",
            "drop those options; `actcalc breakdown` takes them",
        )
    if run.training.lora_rank:
        raise SpecError(
            "measure builds the model itself, without adapters",
            "drop lora_rank; `actcalc breakdown` takes it",
        )
    full = asks_checkpointing(run.policies)
    _check_workload(run.workload)
    patches = run.model.max_positions
    if run.model.patches and run.workload.seq != patches:
        raise SpecError(
            f"seq is {run.workload.seq}, but an image makes {patches} tokens of its patches",
            "leave --seq out",
        )
    return full


def asks_checkpointing(policies: Sequence[str]) -> bool:
    """Whether the policy is full (else none); ``SpecError`` for any other."""
    policies = tuple(policies) or ("none",)
    if len(policies) > 1 or policies[0] not in ("none", "full"):
        raise SpecError(
            f"measure knows the policies none and full, not {', '.join(policies)}",
            "full is transformers' gradient checkpointing; for others: --save FILE, then "
            "`actcalc compare FILE`",
        )
    return policies[0] == "full"


def _check_workload(work: Workload) -> None:
    if work.attention == "flash":
        raise SpecError(
            "--attention flash needs a package and a GPU that a trace does without",
            "use --attention sdpa: PyTorch's own flash kernel keeps the same tensors",
        )
    if work.fp8_products:
        raise SpecError("measure knows no fp8 kernels", "use --precision bf16")
    settings, plain = work.model_dump(), Workload().model_dump()
    for key in ("moe_imbalance", "kernels"):
        if settings[key] != plain[key]:
            raise SpecError(f"{key} has no effect on what PyTorch runs", f"drop --set {key}")


def measure_run(
    run: Run,
    config: Mapping[str, Any],
    *,
    layers: int | None = None,
    real: bool = False,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """Measure the transformers model that ``config`` describes, beside the run's prediction.

    Args:
        run: what to predict with; its model is the one of ``config``, with ``layers`` layers.
        config: a ``config.json`` as a mapping.
        layers: build fewer layers than the configuration says.
        real: also run one step on the GPU.
        keep_layer: keep the middle layer, to be saved.

    Raises:
        MissingExtraError: PyTorch or transformers is not installed.
        SpecError: a run that cannot be measured, a configuration that transformers refuses, or
            no GPU for a real step.
    """
    from actcalc.measure import measure_cuda, measure_transformers

    checkpointing = check_measurable(run)
    work = run.workload
    if not work.dropout:
        from actcalc.io.hub.write import without_dropout

        config = without_dropout(config)
    if layers is not None and run.model.encoder_layers:
        # The layers of the spec are the decoder's; transformers would cut the encoder.
        config, layers = {**config, "num_decoder_layers": layers}, None
    options = {**_options(work, layers), "checkpointing": checkpointing}
    step = measure_cuda(config, **options) if real else None
    measured = measure_transformers(config, **options, keep_layer=keep_layer, name=run.model.name)
    prediction, notes = _predicted(run, "full" if checkpointing else "none")
    if run.workload.global_batch is not None:
        notes.append("No effect on this table: global batch (one micro-batch is measured).")
    result = beside(
        measured,
        prediction,
        step=step,
        dropout=_drops(run),
        notes=notes,
        framework=run.framework.name,
    )
    return result, measured


def _options(work: Workload, layers: int | None) -> dict[str, Any]:
    """Arguments that a trace and a real step share."""
    return {
        "batch": work.micro_batch,
        "seq": work.seq,
        "dtype": work.precision,
        "attention": work.attention,
        "padding_mask": work.padding_mask,
        "layers": layers,
    }


def measure_undescribed(
    config: Mapping[str, Any],
    work: Workload,
    *,
    name: str,
    reason: str,
    attention: str | None = None,
    checkpointing: bool = False,
    layers: int | None = None,
    real: bool = False,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """Measure a model that no layer graph describes; ``reason`` says why there is no prediction.

    Without ``attention`` transformers chooses (the workload's is not heeded).

    Raises the same as :func:`measure_run`.
    """
    from actcalc.measure import measure_cuda, measure_transformers

    options = _options(work, layers) | {"attention": attention, "checkpointing": checkpointing}
    step = measure_cuda(config, **options) if real else None
    measured = measure_transformers(config, **options, keep_layer=keep_layer, name=name)
    return beside(measured, None, step=step, notes=[f"No prediction: {reason}."]), measured


def _drops(run: Run) -> bool:
    """Whether any dropout rate is in use."""
    rates = (value for key, value in run.model.model_dump().items() if key.endswith("_dropout"))
    return run.workload.dropout and any(rates)


def _predicted(run: Run, policy: str) -> tuple[Prediction | None, list[str]]:
    """The prediction, or none and the reason why there is none."""
    try:
        return predict(run, policy), []
    except SpecError as error:
        return None, [f"No prediction: {error}."]


def measure_own_module(
    reference: str, *, amp: str | None = None, real: bool = False, keep_layer: bool = False
) -> tuple[Measurement, Measured]:
    """Measure the module that ``path.py:factory`` returns; nothing predicts it.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: a bad reference, a module that fails, or no GPU for a real step.
    """
    from actcalc.measure import measure_module, measure_module_cuda

    step = measure_module_cuda(reference, amp=amp) if real else None
    measured = measure_module(reference, amp=amp, keep_layer=keep_layer)
    return beside(measured, None, step=step), measured


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
        **_difference(
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


def _difference(measured: int, predicted: Any) -> dict[str, Any]:
    return {
        "measured_bytes": measured,
        "predicted_bytes": predicted,
        "difference_bytes": None if predicted is None else measured - predicted,
    }


def _bytes(measured: int, predicted: Any) -> BytesBeside:
    return BytesBeside(**_difference(measured, predicted))


def _groups(measured: Sequence[int], prediction: Prediction | None) -> tuple[LayersBeside, ...]:
    """Layers of one kind with the same figures, in order of first appearance."""
    predicted = prediction.layers if prediction else (None,) * len(measured)
    kinds = prediction.kinds if prediction else ("layer",) * len(measured)
    groups: dict[tuple[str, int, int | None], list[int]] = {}
    for index, key in enumerate(zip(kinds, measured, predicted, strict=True)):
        groups.setdefault(key, []).append(index)
    return tuple(
        LayersBeside(kind=kind, count=len(found), first=found[0], **_difference(size, expected))
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


def pair(
    measured: Sequence[SavedTensor], expected: Sequence[Expected] | None
) -> tuple[TensorBeside, ...]:
    """Measured tensors with the predicted ones that they are; ``None`` predicts nothing.

    Two can be the same if their sizes in bytes are. Where both sides have as many of a size, they
    are paired in the order of the ops; else those of the same shape first (whatever the order of
    its dimensions). A predicted one may also be several neighbours that one op saves (seed and
    offset of its random state). What is left over has no partner.
    """
    partners: dict[int, Expected] = {}
    left = list(expected or ())
    ordered = sorted(range(len(measured)), key=lambda index: _place(measured, index))
    for amount in dict.fromkeys(tensor.bytes for tensor in measured):
        mine = [index for index in ordered if measured[index].bytes == amount]
        theirs = [candidate for candidate in left if candidate.bytes == amount]
        found = dict(zip(mine, theirs, strict=False))
        if len(mine) != len(theirs):
            found = _by_shape(mine, theirs, measured)
        partners |= found
        left = [candidate for candidate in left if candidate not in found.values()]
    for candidate in tuple(left):
        parts = _parts_of(candidate, measured, partners)
        if parts:
            partners |= dict.fromkeys(parts, candidate)
            left.remove(candidate)
    prefix = _layer_path(measured)
    rows = [
        _row(tensor, partners.get(index), prefix, expected is not None)
        for index, tensor in enumerate(measured)
    ]
    return (*rows, *(_missing(each) for each in left))


def _place(measured: Sequence[SavedTensor], index: int) -> tuple[int, int]:
    """Where a tensor stands: autograd lists an attention's inputs by name, graphs q, k, v."""
    tensor = measured[index]
    node, _, attribute = tensor.op.partition(".")
    if attribute not in _ARGUMENTS:
        return index, 0
    first = index
    while first and measured[first - 1].op.partition(".")[0] == node:
        first -= 1
    return first, _ARGUMENTS.index(attribute) - len(_ARGUMENTS)


def _by_shape(
    mine: Sequence[int], theirs: Sequence[Expected], measured: Sequence[SavedTensor]
) -> dict[int, Expected]:
    """Pairs of one size in bytes, first those of the same shape, then the rest in order."""
    found: dict[int, Expected] = {}
    for same_shape in (True, False):
        for index in mine:
            for candidate in theirs:
                alike = _form(candidate.sizes) == _form(measured[index].shape)
                free = index not in found and candidate not in found.values()
                if free and (alike or not same_shape):
                    found[index] = candidate
    return found


def _parts_of(
    expected: Expected, measured: Sequence[SavedTensor], taken: Mapping[int, Expected]
) -> tuple[int, ...]:
    """Indices of neighbouring free tensors of one op that together have the expected size."""
    for start in range(len(measured)):
        parts: list[int] = []
        for index in range(start, len(measured)):
            node = measured[index].op.partition(".")[0]
            if index in taken or node != measured[start].op.partition(".")[0]:
                break
            parts.append(index)
            if sum(measured[each].bytes for each in parts) == expected.bytes:
                return tuple(parts)
    return ()


def _form(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without the order of its dimensions and those of size 1."""
    return tuple(sorted(size for size in shape if size != 1))


def _layer_path(tensors: Sequence[SavedTensor]) -> str:
    """Path of the layer that all these tensors belong to: through the index in their paths."""
    paths = [tensor.module.split(".") for tensor in tensors if tensor.module]
    if not paths or tensors[0].phase[:5] != "layer":
        return ""
    index = tensors[0].phase[5:]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
        if parts[0].isdigit() and (parts[0] == index or len(common) > 1):
            return ".".join(common) + "."
    return ""


def _row(
    tensor: SavedTensor, partner: Expected | None, prefix: str, predicted: bool
) -> TensorBeside:
    expected = tensor.bytes if partner else 0 if predicted else None
    return TensorBeside(
        module=tensor.module.removeprefix(prefix),
        op=tensor.op,
        shape=tensor.shape,
        dtype=tensor.dtype,
        also_saved_by=tuple(each.removeprefix(prefix) for each in tensor.also_saved_by),
        predicted_op=partner.op if partner else None,
        predicted_tensor=partner.tensor if partner else None,
        predicted_shape=partner.shape if partner else None,
        **_difference(tensor.bytes, expected),
    )


def _missing(expected: Expected) -> TensorBeside:
    return TensorBeside(
        module=None,
        op=None,
        shape=None,
        dtype=None,
        also_saved_by=(),
        predicted_op=expected.op,
        predicted_tensor=expected.tensor,
        predicted_shape=expected.shape,
        **_difference(0, expected.bytes),
    )


__all__ = [
    "BytesBeside",
    "CountBeside",
    "LayersBeside",
    "Measurement",
    "RealStep",
    "TensorBeside",
    "beside",
    "check_measurable",
    "measure_own_module",
    "measure_run",
    "measure_undescribed",
    "pair",
    "predict",
]
