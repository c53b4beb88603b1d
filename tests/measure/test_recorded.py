"""What is measured now equals what was recorded, to the byte.

The recorded models are built with three layers: a layer's tensors do not depend on how many
others there are, which ``test_whole_model`` holds on full models.
"""

from __future__ import annotations

import functools

import pytest

from actcalc.measure import measure_transformers
from tests.measure.conftest import measured, records
from tests.published.test_transformers import graph_of
from tests.sweeps import sampled

pytest.importorskip("torch", reason="needs actcalc[torch]")
pytest.importorskip("transformers", reason="needs actcalc[torch]")

LAYERS = 3
BYTES = records("transformers_saved_bytes.json")
TENSORS = records("transformers_saved_tensors.json")
BY_CASE = {record["case"]: record for record in BYTES}


@functools.cache
def shortened(case):
    return measured(BY_CASE[case], layers=LAYERS)


@pytest.mark.parametrize("record", BYTES, ids=lambda record: record["case"])
def test_bytes(record):
    result = shortened(record["case"])
    assert result.n_layers == LAYERS
    assert result.per_layer_bytes == record["per_layer_bytes"]
    assert result.head_bytes == record["head_bytes"]
    assert result.embedding_bytes == record["embedding_bytes"]
    assert result.between_bytes == record["between_bytes"]
    recorded = record.get("per_layer_all")
    if recorded is not None:
        assert list(result.layers_bytes) == recorded[:LAYERS]
    assert set(result.attention_kernels) == set(record["sdpa"])
    missing = (record["n_layers"] - LAYERS) * record["per_layer_bytes"]
    assert result.total_bytes + missing == record["total_saved_bytes"]


@pytest.mark.parametrize("record", TENSORS, ids=lambda record: record["case"])
def test_tensors(record):
    case = BY_CASE[record["case"]]
    result = shortened(record["case"])
    now = [tensor for tensor in result.tensors if not tensor.phase.startswith("layer")]
    middle, recorded_middle = f"layer{LAYERS // 2}", f"layer{case['n_layers'] // 2}"
    now += result.of_phase(middle)

    def key(phase, module, cls, op, shape, dtype, size):
        # The recording did not know the module of a loss that the model calls for itself.
        place = ("?", "?") if phase == "head" and op in LOSS_OPS else (module, cls)
        return (phase, *place, op, tuple(shape), dtype, size)

    def renamed(tensor):
        own = f".{LAYERS // 2}"
        module = tensor.module
        if tensor.phase == middle:
            module = module.replace(own, f".{case['n_layers'] // 2}", 1)
        return key(
            recorded_middle if tensor.phase == middle else tensor.phase,
            module,
            tensor.cls,
            tensor.op,
            tensor.shape,
            tensor.dtype,
            tensor.bytes,
        )

    expected = [
        key(*(tensor[name] for name in ("phase", "module", "cls", "op", "shape", "dtype", "bytes")))
        for tensor in record["tensors"]
    ]
    order = ["embedding", recorded_middle, "between", "head"]
    found = sorted(map(renamed, now), key=lambda tensor: order.index(tensor[0]))
    assert found == expected


LOSS_OPS = {
    "LogSoftmaxBackward0.result",
    "NllLossBackward0.target",
    "NllLossBackward0.total_weight",
}

WHOLE = [
    "bert-base b32 s512 bf16 sdpa",
    "gpt2-small b8 s1024 bf16 eager ckpt",
    "qwen2.5-7b b1 s4096 bf16 sdpa ckpt",
    "mixtral-8x7b b1 s4096 bf16 sdpa",
    "vit-l-16 b32 s197 bf16 eager",
]


@pytest.mark.parametrize("case", sampled(WHOLE, WHOLE[:2]))
def test_whole_model(case):
    record = BY_CASE[case]
    result = measured(record)
    assert result.params == record["params"]
    assert result.n_layers == record["n_layers"]
    assert result.total_bytes == record["total_saved_bytes"]
    assert result.live_bytes == record["live_bytes_after_forward"]
    assert result.attention_kernels == record["sdpa"]
    assert sum(tensor.bytes for tensor in result.tensors) == result.total_bytes


# Forward FLOPs of the whole model, as PyTorch's counter gave them when recorded.
FLOPS = {
    "gpt2-medium b8 s1024 bf16 eager": 6_615_608_590_336,
    "bert-base b32 s512 bf16 eager": 3_879_815_086_080,
    "llama-3-8b b1 s4096 bf16 eager": 70_274_254_897_152,
}


@pytest.mark.parametrize("case", sampled(FLOPS, ("bert-base b32 s512 bf16 eager",)))
def test_flops(case):
    flops = measured(BY_CASE[case], flops=True).flops
    assert flops.forward_flops == FLOPS[case]
    assert flops.backward_flops == 2 * FLOPS[case]


@pytest.mark.parametrize(
    ("case", "percent"),
    [
        ("gpt2-medium b8 s1024 bf16 eager ckpt", 29.1),
        pytest.param("llama-3-8b b1 s4096 bf16 eager ckpt", 24.0, marks=pytest.mark.sweep),
    ],
)
def test_checkpointing_stops_early(case, percent):
    # The last projection of a Llama layer is not re-run; GPT-2 has a dropout after its own.
    flops = measured(BY_CASE[case], flops=True).flops
    ratio = (flops.forward_flops + flops.backward_flops) / (3 * flops.forward_flops)
    assert round(100 * (ratio - 1), 1) == percent


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "intermediate_size": 96, "decoder_sparse_step": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_flops_of_experts(name):
    """Grouped products count, and gradients reach the element type of what they belong to."""
    config = {
        "model_type": name, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 99, **EXPERTS[name],
    }  # fmt: skip
    flops = measure_transformers(config, seq=32, attention="eager", flops=True).flops
    graph = graph_of(config, seq=32, attention="eager")
    ours = sum(op.flops.value(graph.sizes) * n for part, n in graph.graphs() for op in part.ops)
    assert flops.forward_flops == ours
    assert flops.backward_flops == 2 * ours
