"""Buffers that are neither states nor activations: workspaces, gather buffers, buckets, context.

Each is one named line with what it is for. Sizes that a library fixes are data
(``presets/memory/overheads.yaml``, each with its source); the rest follows from the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from math import prod
from typing import NamedTuple, Protocol

from actcalc.layers.core.algebra import ONE, symbol
from actcalc.layers.core.either import each, exact, greatest, nothing, single
from actcalc.layers.model import ModelGraph
from actcalc.memory.parts import Part
from actcalc.memory.states import Parameters, States, replicas
from actcalc.run.staged import StagedRun
from actcalc.specs.device import Device
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training

_HOPPER = 9


@cache
def overheads() -> Mapping[str, int]:
    """Fixed sizes of library buffers, in bytes (and counts of them)."""
    from actcalc.io.presets import built_in

    data = built_in("memory", "overheads")
    return {key: int(value["value"]) for key, value in data.items() if isinstance(value, dict)}


class Piece(Protocol):
    """Part of a stage, as far as its weights are gathered for it."""

    @property
    def parameters(self) -> Parameters:
        """Its parameters on one rank, once."""

    @property
    def layers(self) -> int:
        """Layers in one occurrence; 0 of an end."""

    @property
    def count(self) -> int:
        """How many times in a row it occurs."""


class Buffer(NamedTuple):
    """One buffer of one stage."""

    name: str
    bytes: int
    resident: bool
    """It stays between steps."""
    inside: bool
    """It comes from the framework's allocator (else from the driver or a library)."""
    about: str


def buffers(
    model: ModelGraph,
    training: Training,
    rules: Recipe,
    device: Device | None,
    parts: Sequence[Part],
    held: States,
    *,
    head: bool,
    gathers: bool = False,
) -> tuple[Buffer, ...]:
    """Every buffer of one stage; an empty stage has the fixed ones only.

    What is gathered of sharded weights belongs to moments where ``gathers`` says so
    (:mod:`actcalc.memory.around`).
    """
    found = [
        *workspaces(model, training, device, {shape for part in parts for shape in part.shapes}),
        *passing(model, training, head=head),
        *data_parallel(model, training, rules, parts, held, gathers=gathers),
        *of_inputs(model),
    ]
    if device is not None:
        found += outside(model, device)
    return tuple(buffer for buffer in found if buffer.bytes)


def passing(model: ModelGraph, training: Training, *, head: bool) -> list[Buffer]:
    """Buffers of what passes through a stage: gathered inputs, put-off logits, messages."""
    return [
        *_gather(model, head=head),
        *_deferred(model, training, head=head),
        *_messages(model, training),
    ]


def of_inputs(model: ModelGraph) -> list[Buffer]:
    """The batch, and tables that belong to the model."""
    return [*_batch(model), *_rotary(model)]


def workspaces(
    model: ModelGraph, training: Training, device: Device | None, shapes: Iterable[tuple[int, ...]]
) -> list[Buffer]:
    """Workspaces of cuBLAS, held by PyTorch and by Transformer Engine.

    PyTorch keeps one for each pair of handle and stream, and a handle for each thread
    (CUDAContextLight.h, CublasHandlePool.cpp): autograd runs backward in a thread of its own.
    Without a device Hopper's sizes are taken. Deterministic runs set CUBLAS_WORKSPACE_CONFIG to
    :4096:8, 8 buffers of 4096 KiB (NVIDIA cuBLAS, results reproducibility).
    """
    major = _HOPPER if device is None else (device.compute_capability or 0)
    framework = model.context.framework
    if not major or framework.idealised:
        return []  # no CUDA device, or the idealised profile
    sizes = overheads()
    new = "hopper" if major >= _HOPPER else "older"
    torch = sizes["cublas_deterministic" if training.deterministic else f"cublas_{new}"]
    engine = sizes[f"engine_{new}"] if framework.transformer_engine else 0
    streams = 1
    grouped = model.context.workload.kernels.moe_grouped_gemm != "off"
    if model.context.model.moe and model.context.kernel("experts") == "te_grouped" and grouped:
        streams += sizes["engine_streams"]
    return [
        Buffer(
            "cuBLAS workspace",
            sizes["cublas_threads"] * torch,
            True,
            True,
            "PyTorch's, in forward's and in backward's thread",
        ),
        Buffer("GEMM workspace", engine * streams, True, True, "Transformer Engine's"),
        Buffer(
            "placeholder gradients",
            _placeholders(model, training, list(shapes)),
            True,
            True,
            "one per shape of weight, where gradients are added inside the product",
        ),
    ]


def _placeholders(model: ModelGraph, training: Training, shapes: Sequence[tuple[int, ...]]) -> int:
    """Gradients handed to autograd in place of those already added to the accumulated ones.

    Transformer Engine keeps one tensor for every shape and type of weight (module/_common.py
    get_dummy_wgrad), and Megatron's own layers take theirs from it wherever it is installed
    (tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication); autograd's hooks
    want a gradient although the product has added it to main_grad.
    """
    if not model.context.framework.main_gradients or not training.gradient_fusion:
        return 0
    ends = list(accumulate(map(len, shapes), initial=0))

    def elements(*sides: int) -> int:
        return sum(map(prod, {sides[start:end] for start, end in pairwise(ends)}))

    found: int = each(elements, *chain(*shapes)) * model.context.act.itemsize
    return found


def _gather(model: ModelGraph, *, head: bool) -> list[Buffer]:
    """Megatron gathers a sequence-parallel input into one buffer that it keeps.

    ``tensor_parallel/layers.py`` takes it from ``get_global_memory_buffer`` under the name "mpu";
    only Megatron's own linear layers do so: all of them in the local implementation, the output
    head alone with Transformer Engine.
    """
    context = model.context
    gathers = context.framework.gather_buffer if context.layout.sp else "none"
    if gathers == "none" or (gathers == "head" and not head):
        return []
    size = exact((context.tokens * context.h * context.act.itemsize).value(model.sizes))
    return [Buffer("gathered sequence", size, True, True, "Megatron's global memory buffer")]


def _deferred(model: ModelGraph, training: Training, *, head: bool) -> list[Buffer]:
    """Logit gradients and head inputs of micro-batches whose weight gradient is put off.

    ``tensor_parallel/layers.py`` appends them to grad_output_buffer and
    embedding_activation_buffer until the end of the step.
    """
    if not head or not training.deferred_head:
        return []
    context = model.context
    width = symbol("v") / context.t + context.h / (context.t if context.layout.sp else ONE)
    size = exact((context.tokens * width * context.act.itemsize).value(model.sizes))
    about = f"of {training.deferred_head} micro-batches, for the head's weight gradient"
    return [Buffer("deferred logits", size * training.deferred_head, False, True, about)]


def _messages(model: ModelGraph, training: Training) -> list[Buffer]:
    """Pipeline messages that travel while an interleaved pipeline computes.

    While one chunk runs forward, the next backward's gradient arrives and the last backward's
    leaves; while it runs backward, the same holds for inputs and outputs (schedules.py
    forward_backward_pipelining_with_interleaving under overlap_p2p_comm: outputs are dropped once
    the wait for their sending is over). Without overlap nothing travels meanwhile: a received input
    is the first layer's stored one, a received gradient that of the last layer's output.
    """
    context = model.context
    layout = context.layout
    travels = context.framework.overlaps_messages and training.overlapped_messages
    if not travels or layout.pp == 1 or layout.vpp == 1:
        return []
    message = context.s_region * context.b * context.h * context.residual.itemsize
    size = exact(message.value(model.sizes))
    return [
        Buffer("pipeline receive", size, False, True, "the next chunk's message, ahead of time"),
        Buffer("pipeline send", size, False, True, "the last chunk's message, until it has left"),
    ]


def sent_outputs(staged: StagedRun, stage: int) -> tuple[Buffer, ...]:
    """Outputs of a stage that stay after they were sent, where the run keeps them.

    One of each chunk that sends, for every micro-batch that it holds; what an op saves of them is
    an activation already.
    """
    if not staged.run.layout.keep_sent_outputs:
        return ()
    sizes = []
    for chunk, (_, last) in zip(staged.places[stage], staged.ends[stage], strict=True):
        size = 0
        if chunk and not last:
            graph = staged.layers[chunk.stop - 1]
            kept = graph.output in graph.saved
            size = 0 if kept else staged.graph.tensor_bytes[graph][graph.output]
        sizes.append(size)
    most = max(
        sum(n * size for n, size in zip(work.held, sizes, strict=True))
        for work in staged.work(stage)
    )
    found = Buffer("sent outputs", most, False, True, "of micro-batches in flight")
    return (found,) if most else ()


def data_parallel(
    model: ModelGraph,
    training: Training,
    rules: Recipe,
    parts: Sequence[Piece],
    held: States,
    *,
    gathers: bool,
) -> list[Buffer]:
    """Buckets in which replicas reduce gradients, and weights gathered from their shards."""
    layout = model.context.layout
    if gathers and rules.units:
        return []
    buckets = model.context.framework.reduction_buckets
    ranks = replicas(layout, training, expert=False)
    away = training.offload == "weights"
    split = layout.zero == 3 and not nothing(ranks > 1)
    if (away or split) and not gathers:
        found = _sharded(training, rules, parts)
        return found if split else found[:1]
    torch = layout.zero == 0 or (layout.zero == 1 and training.zero_redundancy)
    if buckets and torch:
        if training.bucket_view:
            return []
        return [
            Buffer(
                "gradient buckets",
                held.gradients * (layout.dp > 1),
                True,
                True,
                "DistributedDataParallel reduces copies of the gradients",
            )
        ]
    if (buckets or rules.flattens) and layout.zero and layout.pp == 1:
        return [
            Buffer(
                "reduction bucket",
                training.bucket_elements * rules.weight * (layout.dp > 1),
                True,
                True,
                "DeepSpeed reduce_bucket_size, allocated whole whatever the model's size",
            )
        ]
    return []


def _sharded(training: Training, rules: Recipe, parts: Sequence[Piece]) -> list[Buffer]:
    """Weights gathered for the layer at work (and the next), whether they are sharded over ranks or
    wait in host memory, and its unreduced gradients.

    Gradients are made in the gathered type and copied to the type they are reduced in
    (torch.distributed.fsdp fully_shard: _fsdp_collectives.py foreach_reduce).
    """
    if not parts:
        return []
    depth = 2 if training.prefetch else 1
    ahead: list[int] = []
    for part in parts:
        one = part.parameters.total // max(1, part.layers)
        ahead += [one] * min(part.count * max(1, part.layers), depth)
    starts = range(max(1, len(ahead) - depth + 1))
    window = greatest(sum(ahead[i : i + depth]) for i in starts)
    largest = greatest(p.parameters.trained // max(1, p.layers) for p in parts)
    gradient = largest * (rules.gathered + rules.gradient)
    stays = training.persistent_buffers
    return [
        Buffer("gathered weights", window * rules.gathered, stays, True, f"{depth} layers"),
        Buffer("unreduced gradients", gradient, stays, True, "one layer, and its copy to reduce"),
    ]


def _batch(model: ModelGraph) -> list[Buffer]:
    """Images or sounds of a batch; token ids count for nothing beside their activations."""
    spec, embedding = model.context.model, model.embedding
    if not spec.sensed:
        return []
    size = exact(embedding.tensors[embedding.input].bytes.value(model.sizes))
    name = "images" if spec.patches else "sounds"
    return [Buffer(name, size, False, True, "the batch itself, in the type of the weights")]


def _rotary(model: ModelGraph) -> list[Buffer]:
    """The table of rotary positions where it is a buffer of the model, of all positions.

    complex64 (torchtitan models/llama3/model/model.py precompute_freqs_cis), or cosines and sines
    in fp32 (models/qwen3/model/model.py precompute_rope_cache), of max_seq_len, the sequence.
    """
    context = model.context
    if context.model.position != "rotary" or context.framework.layers != "pytorch":
        return []
    each = _BUFFERED.get(context.kernel("rotary"))
    if each is None:
        return []
    mla = context.model.mla
    width = mla.rope_dim if mla else context.model.rotary_dim or context.model.head_dim
    size = context.workload.seq * width * each
    return [Buffer("rotary table", size, True, True, "a buffer of the model")]


_BUFFERED = {"complex_buffer": 4, "half_layer": 8}
"""Bytes of a rotary table that is a buffer, of each position and dimension."""


def _process_groups(count: int) -> str:
    if not single(count):
        return "NCCL"  # of many runs
    return "NCCL, 1 process group" if count == 1 else f"NCCL, {count} process groups"


def outside(model: ModelGraph, device: Device) -> list[Buffer]:
    """What the driver and libraries take beside the framework's allocator."""
    sizes = overheads()
    context = device.context_bytes or (sizes["context"] if device.compute_capability else 0)
    groups, ends = communicators(model)
    size = groups * sizes["communicator"] + ends * sizes["communicator_pair"]
    return [
        Buffer("device context", context, True, False, "CUDA context and loaded kernels"),
        Buffer(
            "communicators", size, True, False,
            _process_groups(groups + ends),
        ),
    ]  # fmt: skip


def communicators(model: ModelGraph) -> tuple[int, int]:
    """Process groups that the framework communicates over: of a degree, and of a pipeline's ends.

    A communicator belongs to a group, also where several groups have the same ranks (PyTorch's
    ProcessGroupNCCL makes it with the first collective).
    """
    layout = model.context.layout
    world = layout.tp * layout.cp * layout.pp * layout.dp
    known = {
        "world": world,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "dp": layout.dp,
        "ep": layout.ep,
        "norm": world if layout.zero else layout.tp * layout.pp,
        "loss": layout.dp * layout.cp,
    }
    named = model.context.framework.process_groups
    ends = "ends" in named and layout.pp > 1 and model.context.model.tied
    return sum((known[name] > 1) * 1 for name in named if name in known), int(ends)
