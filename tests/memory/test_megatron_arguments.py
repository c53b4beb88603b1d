"""Megatron's options as a flat mapping: defaults, derived values, refusals."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.errors import SpecError
from actcalc.io.megatron import is_arguments, read_arguments

BASE: dict[str, Any] = {
    "num-layers": 12,
    "hidden-size": 768,
    "num-attention-heads": 12,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "micro-batch-size": 4,
    "vocab-size": 50257,
    "bf16": True,
}


def test_defaults_are_megatron_s() -> None:
    found = read_arguments(BASE)
    assert found.model["ffn"] == 4 * 768
    assert found.model["hidden_dropout"] == found.model["attention_dropout"] == 0.1
    assert found.model["tied"]
    assert found.model["position"] == "learned"
    assert found.workload["precision"] == "bf16"
    assert found.workload["kernels"]["make_vocab_size_divisible_by"] == 128
    assert found.framework == "megatron"
    assert found.policies == ("none",)
    assert found.layout["zero"] == 0


def test_swiglu_narrows_the_default_width_to_a_multiple_of_64() -> None:
    assert read_arguments({**BASE, "swiglu": True}).model["ffn"] == 2048


def test_world_size_gives_the_replicas() -> None:
    sizes = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "world-size": 16}
    assert read_arguments({**BASE, **sizes}).layout["dp"] == 4


def test_replicas_that_the_batch_cannot_feed_are_not_taken() -> None:
    found = read_arguments({**BASE, "world-size": 8, "global-batch-size": 4})
    assert found.layout["dp"] == 1
    assert any("8 replicas" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({"recompute-granularity": "selective"}, ("core_attn",)),
        (
            {"recompute-granularity": "selective", "recompute-modules": "[moe_act layernorm]"},
            ("moe_act+layernorm",),
        ),
        ({"recompute-granularity": "full"}, ("full",)),
        ({"recompute-granularity": "full", "recompute-num-layers": 3}, ("uniform:3",)),
        (
            {
                "recompute-granularity": "full",
                "recompute-method": "block",
                "recompute-num-layers": 2,
            },
            ("block:2",),
        ),
    ],
)
def test_recompute_options_become_a_policy(
    options: dict[str, Any], policies: tuple[str, ...]
) -> None:
    assert read_arguments({**BASE, **options}).policies == policies


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num-layers-per-virtual-pipeline-stage": 1}, {"vpp": 3}),
        ({"num-virtual-stages-per-pipeline-rank": 3}, {"vpp": 3}),
        ({"decoder-first-pipeline-num-layers": 2, "decoder-last-pipeline-num-layers": 2},
         {"layers_per_stage": (2, 4, 4, 2)}),
        ({"pipeline-model-parallel-layout": "Et*2|(t*3|)*3tL", "num-layers": 12},
         {"layers_per_stage": (2, 3, 3, 3, 1)}),
    ],
)  # fmt: skip
def test_pipeline_splits(options: dict[str, Any], expected: dict[str, Any]) -> None:
    stages = len(expected.get("layers_per_stage", range(4)))
    found = read_arguments({**BASE, "pipeline-model-parallel-size": stages, **options})
    assert expected.items() <= found.layout.items()


def test_embedding_and_loss_counted_as_layers() -> None:
    options = {
        "pipeline-model-parallel-size": 4,
        "num-layers": 14,
        "account-for-embedding-in-pipeline-split": True,
        "account-for-loss-in-pipeline-split": True,
    }
    assert read_arguments({**BASE, **options}).layout["layers_per_stage"] == (3, 4, 4, 3)


@pytest.mark.parametrize(("text", "dense"), [("([0]*3+[1]*9)", 3), ("2", 6), ("[0,1,1]*4", 4)])
def test_moe_layer_frequency(text: str, dense: int) -> None:
    options = {"num-experts": 8, "moe-layer-freq": text}
    assert read_arguments({**BASE, **options}).model["mlp_pattern"].count("dense") == dense


@pytest.mark.parametrize(
    "options",
    [
        {"cuda-graph-impl": "transformer_engine"}, {"cuda-graph-impl": "local"},
        {"external-cuda-graph": True}, {"enable-cuda-graph": True},
    ],
)  # fmt: skip
def test_cuda_graphs_are_said_to_be_left_out(options: dict[str, Any]) -> None:
    assert any("CUDA graphs" in text for text in read_arguments({**BASE, **options}).warnings)
    assert not any("CUDA graphs" in text for text in read_arguments(BASE).warnings)
    off = read_arguments({**BASE, "cuda-graph-impl": "none"})
    assert not any("CUDA graphs" in text for text in off.warnings)


def test_bert_has_segments_with_its_second_head() -> None:
    options = {**BASE, "model-family": "bert", "vocab-size": None}
    both, one = (
        read_arguments({**options, "bert-no-binary-head": off}).model for off in (False, True)
    )
    assert (both["token_types"], both["sentence_head"]) == (2, True)
    assert (one["token_types"], one["sentence_head"]) == (0, False)
    assert both["vocab"] == 30522 + 2


def test_a_sharding_strategy_is_megatron_fsdp_s() -> None:
    strategy = {"data-parallel-sharding-strategy": "optim_grads_params"}
    distributed = {"use-distributed-optimizer": True}
    assert read_arguments({**BASE, **strategy, **distributed}).layout["zero"] == 1
    fsdp = {"use-megatron-fsdp": True}
    assert read_arguments({**BASE, **strategy, **distributed, **fsdp}).layout["zero"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"hybrid-layer-pattern": "MG"},
        {"experimental-attention-variant": "dsa"},
        {"hidden-size": "wide"},
        {"num-layers": -1},
        {"num-experts": 8, "moe-layer-freq": "([0]*3)"},
        {"num-experts": 8, "moe-layer-freq": "__import__('os')"},
        {"world-size": 7, "tensor-model-parallel-size": 2},
        {"pipeline-model-parallel-size": 4, "pipeline-model-parallel-layout": "Etttt|L"},
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        read_arguments({**BASE, **options})
    assert caught.value.hint


def test_options_that_are_not_read_are_named_once() -> None:
    odd = {"num-layer": 3, "frobnicate": True, "lr": 1e-4, "train-iters": 5, "log-interval": 1}
    told = [text for text in read_arguments({**BASE, **odd}).warnings if "not read" in text]
    assert told == [
        "Options not read, taken to change neither memory nor FLOPs: frobnicate, num-layer (is it "
        "num-layers?)."
    ]
    assert not any("not read" in text for text in read_arguments(BASE).warnings)
    many = read_arguments({**BASE, **{f"unknown-{index}": 1 for index in range(100)}})
    assert "and 76 more." in many.warnings[-1]


def test_a_missing_vocabulary_is_said_to_be_assumed() -> None:
    found = read_arguments({**BASE, "vocab-size": None})
    assert found.model["vocab"] == 50257
    assert any("50257 entries are taken" in text for text in found.warnings)


def test_overlap_of_tensor_parallel_messages_reaches_the_kernel_options() -> None:
    plain = read_arguments(BASE).workload["kernels"]
    assert plain["async_tensor_model_parallel_allreduce"]
    assert not plain["tp_comm_overlap"]
    options = {"no-async-tensor-model-parallel-allreduce": True, "tp-comm-overlap": True}
    kernels = read_arguments({**BASE, **options}).workload["kernels"]
    assert not kernels["async_tensor_model_parallel_allreduce"]
    assert kernels["tp_comm_overlap"]
    # user buffers are Transformer Engine's
    local = read_arguments({**BASE, **options, "transformer-impl": "local"})
    assert not local.workload["kernels"]["tp_comm_overlap"]


def test_dashes_and_underscores_read_the_same() -> None:
    spelled = {f"--{key.replace('-', '_')}": value for key, value in BASE.items()}
    assert read_arguments(spelled) == read_arguments(BASE)
    assert is_arguments(BASE)
    assert not is_arguments({"hidden_size": 768, "model_type": "gpt2"})
    assert is_arguments({key.replace("-", "_"): value for key, value in BASE.items()})
    assert not is_arguments({"hidden_size": 768, "num_layers": 12, "num_heads": 12})


@given(
    st.dictionaries(
        st.sampled_from([
            "num-layers", "swiglu", "moe-layer-freq", "num-experts", "world-size",
            "pipeline-model-parallel-size", "num-query-groups", "group-query-attention",
            "recompute-granularity", "recompute-num-layers", "hidden-dropout", "fp8-format",
            "pipeline-model-parallel-layout", "recompute-modules", "optimizer",
            "hybrid-layer-pattern", "decoder-num-layers", "encoder-num-layers",
            "decoder-seq-length", "tokenizer-type", "vocab-extra-ids", "cuda-graph-impl",
        ]),
        st.one_of(st.integers(-3, 10**9), st.text(max_size=12), st.booleans(), st.none(),
                  st.floats(allow_nan=True), st.lists(st.text(max_size=3), max_size=3)),
    )
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_nothing_but_an_answer_or_a_spec_error(options: dict[str, Any]) -> None:
    with contextlib.suppress(SpecError):
        assert read_arguments({**BASE, **options}).model["hidden"] == 768
