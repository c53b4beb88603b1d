"""What transformers' models really save is reproduced to the byte, tensor by tensor."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.errors import SpecError
from actcalc.io.hf import read_config
from actcalc.io.runs import load_framework
from actcalc.layers.adapters import adapted
from actcalc.layers.core.context import whole
from actcalc.layers.core.graph import Graph, size_of
from actcalc.layers.model import ModelGraph, model_graph, parameters
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import parse_policy
from actcalc.specs import Layout, Model, Workload
from actcalc.specs.training import Training
from actcalc.specs.validate import build

DATA = Path(__file__).parent.parent / "data"
RECORDED: list[dict[str, Any]] = json.loads((DATA / "transformers_saved_bytes.json").read_text())[
    "records"
]
TENSORS: dict[str, list[dict[str, Any]]] = {
    record["case"]: record["tensors"]
    for record in json.loads((DATA / "transformers_saved_tensors.json").read_text())["records"]
}
TRACED: dict[str, Any] = json.loads((DATA / "transformers_traced.json").read_text())
MIXERS: dict[str, Any] = json.loads((DATA / "mixers_traced.json").read_text())
MODELS = [*TRACED["models"], *MIXERS["models"]]
CONFIGS: dict[str, dict[str, Any]] = TRACED["recorded_configs"]
SMALL = [(model, case) for model in MODELS for case in model["cases"]]
PRECISION = {"fp32 params + autocast bf16": "amp-bf16"}


class Bytes(NamedTuple):
    """Saved bytes of a whole model, each part as the measurements split it."""

    layers: list[int]
    head: int
    embedding: int
    parameters: int


def graph_of(config: dict[str, Any], framework: str = "transformers", **run: Any) -> ModelGraph:
    model = build(Model, read_config(config).fields, "model")
    return model_graph(model, Layout(), Workload(**run), load_framework(framework))


def saved(graph: Graph, names: Any, graph_sizes: Any) -> int:
    return int(size_of(graph, names, graph_sizes))


def predicted(graph: ModelGraph) -> Bytes:
    """The first layer that uses a tensor shared by layers pays for it, as in a real run."""
    layers: list[int] = []
    shared: set[str] = set()
    for run in graph.runs:
        own = [name for name in run.graph.saved if name not in run.graph.shared]
        new = [name for name in run.graph.saved if name in run.graph.shared and name not in shared]
        layers += [saved(run.graph, own, graph.sizes)] * run.count
        layers[-run.count] += saved(run.graph, new, graph.sizes)
        shared.update(new)
    return Bytes(
        layers,
        saved(graph.head, graph.head.saved, graph.sizes),
        saved(graph.embedding, graph.embedding.saved, graph.sizes),
        int(parameters(graph, whole(graph.sizes))),
    )


def recorded_graph(record: dict[str, Any]) -> ModelGraph:
    return graph_of(
        CONFIGS[record["model"]],
        seq=record["seq"],
        micro_batch=record["batch"],
        precision=PRECISION.get(record["dtype"], record["dtype"]),
        attention=record["attn"],
        padding_mask=record["padding_mask"],
    )


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["case"])
def test_recorded_bytes(record: dict[str, Any]) -> None:
    graph = recorded_graph(record)
    found = predicted(graph)
    assert found.parameters == record["params"]
    assert found.head == record["head_bytes"]
    assert found.embedding == record["embedding_bytes"]
    if record["checkpointing"]:
        tokens = record["batch"] * record["seq"]
        full = parse_policy("full")
        for run in graph.runs:
            stored = layer_outcome(graph, run.graph, full).sizes(graph).stored
            assert stored == record["per_layer_bytes"] == 2 * tokens * graph.context.model.hidden
        return
    assert found.layers[record["n_layers"] // 2] == record["per_layer_bytes"]
    every = record.get("per_layer_all", [record["per_layer_bytes"]] * record["n_layers"])
    assert found.layers == every
    assert sum(found.layers) + found.head + found.embedding == record["total_saved_bytes"]


def merged_state(sizes: Counter[int]) -> Counter[int]:
    """Random state is two or more tensors of 8 or 16 B; the graph keeps it as one."""
    state = 8 * sizes.pop(8, 0) + 16 * sizes.pop(16, 0) + 24 * sizes.pop(24, 0)
    return sizes + Counter({state: 1} if state else {})


@pytest.mark.parametrize("case", TENSORS)
def test_recorded_tensors(case: str) -> None:
    record = next(record for record in RECORDED if record["case"] == case)
    graph = recorded_graph(record)
    middle = record["n_layers"] // 2
    at = 0
    for run in graph.runs:
        if at <= middle < at + run.count:
            break
        at += run.count
    own = [name for name in run.graph.saved if name not in run.graph.shared]
    for phase, part, names in (
        (f"layer{middle}", run.graph, own),
        ("head", graph.head, graph.head.saved),
        ("embedding", graph.embedding, graph.embedding.saved),
    ):
        real = Counter(t["bytes"] for t in TENSORS[case] if t["phase"] == phase)
        ours = Counter(saved(part, [name], graph.sizes) for name in names)
        assert merged_state(ours) == merged_state(real), phase


@pytest.mark.parametrize(
    ("model", "case"),
    SMALL,
    ids=lambda value: (
        value.get("name")
        or "-".join(str(value[key]) for key in ("batch", "seq", "precision", "attention"))
        + ("-padded" if value["padding_mask"] else "")
    ),
)
def test_traced_models(model: dict[str, Any], case: dict[str, Any]) -> None:
    run = {key: case[key] for key in ("seq", "precision", "attention", "padding_mask")}
    graph = graph_of(model["config"], micro_batch=case["batch"], **run)
    found = predicted(graph)
    real = Bytes(case["layers_bytes"], case["head_bytes"], case["embedding_bytes"], model["params"])
    if (model["name"], case["precision"]) == ("electra", "amp-bf16"):
        # ELECTRA's embedding ends in a projection, so that its first layer reads a bf16 stream,
        # which the query, key and value products share: one input less to copy, 4 B per value
        # saved in three casts of 2 B, and its residual sum promotes to fp32 all the same.
        hidden = graph.context.model.hidden
        found.layers[0] -= 4 * case["batch"] * case["seq"] * hidden
    assert found == real


def test_mixers_were_measured_at_two_sizes_and_two_kernels() -> None:
    profile = load_framework("transformers")
    for model in MIXERS["models"]:
        alone = profile.kernel("core_sdpa", model["config"]["model_type"]) == "none"
        assert len({case["attention"] for case in model["cases"]}) == (1 if alone else 2)
        assert len({(case["batch"], case["seq"]) for case in model["cases"]}) > 1, model["name"]


RWKV = MIXERS["models"][-1]["config"]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"seq": 257}, "takes 2 to 256 tokens"),
        ({"seq": 1}, "takes 2 to 256 tokens"),
        ({"seq": 64, "precision": "amp-bf16"}, "no time_first in fp32"),
        ({"seq": 64, "width": 50}, "blocks of 32"),
    ],
)
def test_rwkvs_kernel_takes_no_such_run(run: dict[str, Any], reason: str) -> None:
    config = {**RWKV, "attention_hidden_size": run.pop("width", 320)}
    with pytest.raises(SpecError, match=reason):
        graph_of(config, attention="eager", **run)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gated": True}, "with a gate"),
        ({"activation": "gelu"}, "has gelu"),
        ({"linear": {"rule": "wkv", "key_heads": 2, "value_heads": 2, "key_dim": 8,
                     "value_dim": 8}}, "not 2 heads"),
    ],
)  # fmt: skip
def test_what_rwkv_is_not_is_refused(fields: dict[str, Any], reason: str) -> None:
    def described() -> ModelGraph:
        model = build(Model, {**read_config(RWKV).fields, **fields}, "model")
        return model_graph(model, Layout(), Workload(seq=64), load_framework("transformers"))

    with pytest.raises(SpecError, match=reason):
        described()


@pytest.mark.parametrize("framework", ["megatron", "megatron-local", "paper", "torchtitan"])
def test_rwkv_is_refused_elsewhere(framework: str) -> None:
    with pytest.raises(SpecError, match=framework):
        graph_of(RWKV, framework, seq=64)


@pytest.mark.parametrize(
    ("precision", "layers"),
    [("bf16", [1412224, 1311872]), ("fp32", [2817024, 2618368]), ("fp16", [2068864, 1968512])],
)
def test_rwkvs_frozen_layers_keep_no_factors_of_frozen_shares(
    precision: str, layers: list[int]
) -> None:
    """Recorded as the others, with every weight frozen but the embedding's."""
    graph = graph_of(RWKV, seq=128, micro_batch=2, attention="eager", precision=precision)
    assert predicted(adapted(graph, Training(train=("embeddings",)))).layers == layers


def test_rwkvs_flops_are_its_projections_and_its_recurrence() -> None:
    graph = graph_of(RWKV, seq=64, micro_batch=2, attention="eager")
    tokens, hidden, width, ffn = 128, 192, 320, 500
    projections = 2 * tokens * (4 * hidden * width + 2 * hidden * ffn + hidden * hidden)
    for run in graph.runs:
        flops = {op.name: op.flops.value(graph.sizes) for op in run.graph.ops}
        backward = {op.name: op.backward_flops.value(graph.sizes) for op in run.graph.ops}
        assert flops.pop("wkv") == 23 * tokens * width
        assert backward.pop("wkv") == 60 * tokens * width
        assert sum(flops.values()) == projections
        assert sum(backward.values()) == 2 * projections


FLOPS = [
    ("gpt2-medium", 8, 1024, 6_615_608_590_336, 0.2908),
    ("bert-base", 32, 512, 3_879_815_086_080, None),
    ("llama-3-8b", 1, 4096, 70_274_254_897_152, 0.2399),
]


@pytest.mark.parametrize(("name", "batch", "seq", "forward", "rerun"), FLOPS)
def test_flops(name: str, batch: int, seq: int, forward: int, rerun: float | None) -> None:
    """PyTorch's own counter; eager, whose backward costs twice the forward."""
    graph = graph_of(CONFIGS[name], seq=seq, micro_batch=batch, attention="eager")
    ops = [(op, count) for part, count in graph.graphs() for op in part.ops]
    assert sum(op.flops.value(graph.sizes) * count for op, count in ops) == forward
    backward = sum(op.backward_flops.value(graph.sizes) * count for op, count in ops)
    assert backward == 2 * forward
    if rerun is not None:
        full = parse_policy("full")
        again = sum(
            op.flops.value(graph.sizes) * run.count
            for run in graph.runs
            for op in layer_outcome(graph, run.graph, full).rerun
        )
        assert round(again / (3 * forward), 4) == rerun


def llama(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1088,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        **fields,
    }


BLOCKS = [
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
    {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.7}},
    {"attention": {"n_heads_in_group": 8}, "ffn": {"no_op": True, "ffn_mult": None}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 0.7}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
]


def test_blocks_of_sizes_of_their_own_are_layers_of_llama() -> None:
    """The blocks run Llama's code, whose bytes are the real class's, each at its own sizes."""
    config = llama(model_type="nemotron-nas", num_hidden_layers=6, block_configs=BLOCKS)
    found = predicted(graph_of(config, seq=128, micro_batch=2))

    def layer(kv_heads: int, ffn: int) -> int:
        model = llama(num_key_value_heads=kv_heads, intermediate_size=ffn)
        return predicted(graph_of(model, seq=128, micro_batch=2)).layers[1]

    tables = 2 * 2 * 128 * 64
    tokens, hidden = 128 * 2, 512
    norm = tokens * (8 * hidden + 4)
    # int(2 · 0.7 · 512 / 3) is 238, rounded up to 256.
    assert found.layers[1] == norm + tokens * 8 * 256
    assert found.layers[3] == 0
    assert found.layers[0] == layer(2, 1024) + tables
    assert found.layers[4] == layer(4, 256)
    assert found.layers[2] == layer(1, 256) - found.layers[1]
    assert found.layers[5] == layer(2, 1024)


def test_blocks_of_another_kind_are_refused() -> None:
    odd = [{"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}]
    config = llama(model_type="nemotron-nas", num_hidden_layers=1, block_configs=odd)
    with pytest.raises(SpecError, match=r"block_configs\[0\].*replace_with_linear"):
        graph_of(config, seq=128)


def test_flash_package_keeps_sixteen_bytes_of_state():
    sdpa = predicted(graph_of(llama(), seq=128, attention="sdpa"))
    flash = predicted(graph_of(llama(), seq=128, attention="flash"))
    assert [a - b for a, b in zip(sdpa.layers, flash.layers, strict=True)] == [8, 8]


def test_flash_package_needs_no_mask_for_a_window():
    config = llama(model_type="mistral", sliding_window=64)
    windowed = predicted(graph_of(config, seq=128, attention="flash"))
    masked = predicted(graph_of(config, seq=128, attention="sdpa"))
    full = predicted(graph_of(llama(), seq=128, attention="flash"))
    assert windowed.layers == full.layers
    assert masked.layers[1] - windowed.layers[1] == 2 * 128 * 128


@pytest.mark.parametrize(
    ("config", "attention", "reason"),
    [
        ({"model_type": "gemma2"}, "sdpa", "no sdpa attention"),
        ({"model_type": "bloom"}, "sdpa", "no sdpa attention"),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}, "flash",
         "sinks"),
        ({"model_type": "granite_swa"}, "eager", "sinks"),
    ],
)  # fmt: skip
def test_what_transformers_cannot_run_is_refused(
    config: dict[str, Any], attention: str, reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        graph_of(llama(**config), seq=128, attention=attention)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_torchtitan_llama(batch: int, kv_heads: int) -> None:
    """Every term of torchtitan's block, in bytes: the fused norms keep only input and rstd.

    Keys and values are repeated to all heads before the core, unless a single head's repeats
    stay a view; no rotary table is kept, for it is a buffer.
    """
    config = llama(num_key_value_heads=kv_heads)
    graph = graph_of(config, "torchtitan", seq=128, micro_batch=batch, attention="sdpa")
    tokens, hidden, heads, ffn = 128 * batch, 512, 8, 1088
    norms = 2 * (2 * hidden + 4 + 2 * hidden)
    keys_and_values = 4 * (hidden // 8 if kv_heads == 1 else hidden)
    core = 2 * hidden + keys_and_values + 2 * hidden + 4 * heads
    found = predicted(graph)
    assert found.layers == [tokens * (norms + core + 8 * ffn) + 24] * 2
    assert found.head == tokens * (2 * hidden + 4 + 2 * hidden + 4 * 1000) + 4
    assert found.embedding == 0
    assert found.parameters == predicted(graph_of(config, seq=128, attention="sdpa")).parameters


@pytest.mark.parametrize(
    ("config", "run", "reason"),
    [
        ({}, {"attention": "eager"}, "no eager attention"),
        ({}, {"attention": "sdpa", "padding_mask": True}, "no mask"),
        ({"model_type": "gemma", "num_key_value_heads": 8}, {"attention": "sdpa"}, "norm"),
        ({"model_type": "opt", "ffn_dim": 1088, "max_position_embeddings": 128},
         {"attention": "sdpa"}, "norm"),
    ],
)  # fmt: skip
def test_what_torchtitan_cannot_run_is_refused(
    config: dict[str, Any], run: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        graph_of(llama(**config), "torchtitan", seq=128, **run)


def test_flash_package_has_no_fp32_kernel():
    with pytest.raises(SpecError, match="fp32"):
        graph_of(llama(), seq=128, attention="flash", precision="fp32")


@given(
    st.sampled_from([model["config"] for model in MODELS]),
    st.integers(1, 300),
    st.integers(1, 4),
    st.sampled_from(["eager", "sdpa", "flash"]),
    st.sampled_from(["bf16", "fp16", "fp32", "amp-bf16", "amp-fp16"]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_run_is_described_or_refused(
    config: dict[str, Any], seq: int, batch: int, attention: str, precision: str, padded: bool
) -> None:
    """Sizes are never negative, and full checkpointing keeps the layer's input, whatever runs."""
    try:
        graph = graph_of(
            config,
            seq=seq,
            micro_batch=batch,
            attention=attention,
            precision=precision,
            padding_mask=padded,
        )
    except SpecError:
        return
    found = predicted(graph)
    assert min([*found.layers, found.head, found.embedding]) >= 0
    full = parse_policy("full")
    for run in graph.runs:
        outcome = layer_outcome(graph, run.graph, full).sizes(graph)
        assert outcome.stored == saved(run.graph, [run.graph.input], graph.sizes) > 0
