"""Megatron's options as a flat mapping: defaults, derived values, refusals."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.errors import SpecError
from actcalc.io import megatron
from actcalc.io.megatron import is_arguments, read_arguments
from actcalc.io.runs import resolve
from actcalc.io.sources import arguments_source
from actcalc.memory.stage import StageFigure
from actcalc.specs import Layout

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


def test_a_batch_that_replicas_do_not_divide_is_refused() -> None:
    """num_microbatches_calculator.py asserts it; the hint names the sizes next to it."""
    with pytest.raises(SpecError) as error:
        read_arguments({**BASE, "world-size": 8, "micro-batch-size": 1, "global-batch-size": 12})
    assert "12 is not divisible by micro-batch-size 1 x 8" in str(error.value)
    assert error.value.hint == "use global-batch-size 8 or 16"
    with pytest.raises(SpecError) as error:
        read_arguments({**BASE, "world-size": 8, "micro-batch-size": 3, "global-batch-size": 16})
    assert error.value.hint == "use global-batch-size 24, or micro-batch-size 2"
    with pytest.raises(SpecError):
        read_arguments({**BASE, "micro-batch-size": 3, "global-batch-size": 16})


def test_a_world_larger_than_the_batch_feeds_is_cut_with_a_note() -> None:
    """Published arguments come with the machine's GPUs, of which a small run used some."""
    found = read_arguments({**BASE, "world-size": 8, "micro-batch-size": 2, "global-batch-size": 2})
    assert found.layout["dp"] == 1
    assert any("feeds 1" in warning for warning in found.warnings)
    found = read_arguments({**BASE, "world-size": 4, "global-batch-size": 16})
    assert (found.layout["dp"], found.workload["global_batch"]) == (4, 16)


@pytest.mark.parametrize(
    "option",
    ["tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
     "micro-batch-size", "num-attention-heads"],
)  # fmt: skip
def test_nothing_is_divided_by_a_size_of_zero(option: str) -> None:
    with pytest.raises(SpecError) as error:
        read_arguments({**BASE, "world-size": 8, "global-batch-size": 8, option: 0})
    assert f"{option} is 0" in str(error.value)


def test_the_reading_s_source_names_the_options_that_it_asks_for() -> None:
    """A fuzzer outside collects them from the package's own source."""
    source = inspect.getsource(megatron)
    asked = set(
        re.findall(r"""o\.(?:has|flag|text|number|real|words)\(\s*"([a-z0-9-]+)\"""", source)
    )
    assert {"hidden-size", "tensor-model-parallel-size", "moe-router-topk"} <= asked
    assert len(asked) > 100


def test_an_unknown_attention_backend_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        read_arguments({**BASE, "attention-backend": "banana"})
    assert "flash, fused" in error.value.hint
    found = read_arguments({**BASE, "attention-backend": "AttnBackend.flash"})
    assert found.workload["attention"] == "flash"


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
        {"decoder-last-pipeline-num-layers": 2},
        {"recompute-granularity": "selective", "recompute-method": "uniform"},
        {"pipeline-model-parallel-size": 4, "pipeline-model-parallel-layout": "Etttt|L"},
        {"optimizer": "soap"},
        {"cross-entropy-fusion-impl": "liger"},
        {"num-experts": 8, "moe-aux-loss-coeff": "[much]"},
        {"use-precision-aware-optimizer": True, "exp-avg-dtype": "int4"},
        {"enable-hyper-connections": True},
        {"flextron": True},
        {"export-kd-teacher-load": "teacher"},
        {"disable-vision-class-token": True},
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        read_arguments({**BASE, **options})
    assert caught.value.hint


def test_a_world_that_degrees_do_not_divide_needs_dp() -> None:
    options = {**BASE, "world-size": 7, "tensor-model-parallel-size": 2}
    origin = arguments_source(read_arguments(options), "run")
    with pytest.raises(SpecError) as caught:
        resolve(origin)
    assert "world-size 7 is not a multiple" in str(caught.value)
    assert resolve(origin, layout={"dp": 3}).layout.dp == 3


def test_options_that_are_not_read_are_named_once() -> None:
    odd = {"num-layer": 3, "frobnicate": True, "lr": 1e-4, "train-iters": 5, "log-interval": 1}
    told = [text for text in read_arguments({**BASE, **odd}).warnings if "not understood" in text]
    assert told == [
        "Options not understood, and so not counted: frobnicate, num-layer (is it num-layers?)."
    ]
    assert not any("not understood" in text for text in read_arguments(BASE).warnings)
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


def test_fields_of_the_parsed_arguments_read_like_their_switches() -> None:
    """What a checkpoint keeps of a run's arguments: names of fields, values of every one."""
    switches = {
        "disable-bias-linear": True, "no-rope-fusion": True, "no-masked-softmax-fusion": True,
        "no-gradient-accumulation-fusion": True, "no-overlap-p2p-communication": True,
        "fp8-format": "hybrid", "num-virtual-stages-per-pipeline-rank": 3,
        "pipeline-model-parallel-size": 4,
    }  # fmt: skip
    fields = {
        "add_bias_linear": False, "apply_rope_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "overlap_p2p_comm": False, "fp8": "hybrid",
        "virtual_pipeline_model_parallel_size": 3, "pipeline_model_parallel_size": 4,
        "bias_swiglu_fusion": True, "bias_gelu_fusion": True, "retro_project_dir": None,
        "moe_expert_capacity_factor": None, "optimizer_offload_fraction": 1.0,
        "main_grads_dtype": "torch.float32", "num_experts": "None", "flextron": False,
    }  # fmt: skip
    assert read_arguments({**BASE, **fields}) == read_arguments({**BASE, **switches})
    plain = read_arguments({**BASE, "add_bias_linear": True, "fp8": None, "padded_vocab_size": 9})
    assert plain == read_arguments(BASE)
    padded = read_arguments({**BASE, "vocab-size": None, "padded_vocab_size": 50304})
    assert padded.model["vocab"] == 50304


@pytest.mark.parametrize(
    "layout", ["Et*2\\\\|\\\\(tt\\\\|\\\\)*5L", "'Et*2|(tt|)*5L'", "Et*2|(tt|)*5L"]
)
def test_a_shell_s_escapes_of_a_layout_are_left_aside(layout: str) -> None:
    options = {"pipeline-model-parallel-size": 7, "pipeline-model-parallel-layout": layout}
    found = read_arguments({**BASE, **options})
    assert found.layout["layers_per_stage"] == (2, 2, 2, 2, 2, 2, 0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"activation-offload-fraction": 0.5}, "offloaded modules"),
        ({"fp32-residual-connection": True}, "fp32"),
        ({"moe-expert-capacity-factor": 1.0}, "drops tokens"),
        ({"main-grads-dtype": "bf16"}, "another type"),
    ],
)
def test_what_changes_memory_and_is_not_modelled_is_said(
    options: dict[str, Any], word: str
) -> None:
    (name,) = options
    told = [text for text in read_arguments({**BASE, **options}).warnings if name in text]
    assert len(told) == 1
    assert word in told[0]
    assert "not understood" not in told[0]


def test_bert_s_local_layers_are_megatron_s_own() -> None:
    assert read_arguments({**BASE, "spec": "local"}).framework == "megatron-local"
    with pytest.raises(SpecError, match=r"some\.module a_spec"):
        read_arguments({**BASE, "spec": ["some.module", "a_spec"]})


def test_one_coefficient_for_each_kind_of_loss() -> None:
    experts = {**BASE, "num-experts": 8}
    for value, kept in (("1e-2", True), ([1e-2, 1e-3], True), ("[0.0 0.1]", True), (0.0, False)):
        found = read_arguments({**experts, "moe-aux-loss-coeff": value})
        assert found.model["moe"]["aux_loss"] is kept


def test_engine_s_cross_entropy_keeps_logits_in_their_own_type() -> None:
    """Transformer Engine's keeps 2 bytes a logit and writes the gradient over them; Megatron's
    compiled one makes two fp32 tensors of them."""
    fused = {**BASE, "cross-entropy-loss-fusion": True, "no-gradient-accumulation-fusion": True}
    native, engine = (
        _peak({**fused, "cross-entropy-fusion-impl": how}) for how in ("native", "te")
    )
    logits = 4 * 1024 * 50304
    assert native - engine >= 4 * logits
    # it needs the fused option, and Transformer Engine
    for without in ({"cross-entropy-loss-fusion": False}, {"transformer-impl": "local"}):
        options = {**fused, **without}
        assert _peak({**options, "cross-entropy-fusion-impl": "te"}) == _peak(options)


def test_hybrid_sharding_with_optimizer_states_over_all_instances() -> None:
    """Megatron-FSDP: weights and gradients inside an instance, states over all of them."""
    options = {
        **BASE, "use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads_params",
        "world-size": 8, "num-distributed-optimizer-instances": 2,
    }  # fmt: skip
    copied, shared, whole = (
        _report({**options, **more})
        for more in (
            {},
            {"outer-dp-sharding-strategy": "optim"},
            {"num-distributed-optimizer-instances": 1},
        )
    )
    assert copied.weights_bytes == shared.weights_bytes == 2 * whole.weights_bytes
    assert copied.gradients_full_bytes == shared.gradients_full_bytes
    assert copied.optimizer_bytes == 2 * whole.optimizer_bytes
    assert shared.optimizer_bytes == whole.optimizer_bytes


def _report(options: dict[str, Any]) -> StageFigure:
    run = resolve(arguments_source(read_arguments(options), "run"))
    return memory_run(run).stages[-1]


def _peak(options: dict[str, Any]) -> int:
    return _report(options).peak_bytes


def test_groups_of_micro_batches_order_an_interleaved_pipeline() -> None:
    """Five micro-batches over four stages run in one group of five; in groups of four they do not
    fit. Larger groups hold more micro-batches of the first chunk."""
    option = "microbatch-group-size-per-virtual-pipeline-stage"
    options = {
        **BASE, "pipeline-model-parallel-size": 4, "num-layers-per-virtual-pipeline-stage": 1,
        "global-batch-size": 20,
    }  # fmt: skip
    with pytest.raises(SpecError, match="5 microbatches in groups of 4"):
        _report(options)
    assert _report({**options, option: 5}).in_flight > 0
    eight = {**options, "global-batch-size": 32}
    assert _report({**eight, option: 8}).in_flight > _report(eight).in_flight
    assert _report({**eight, option: 4}).peak_bytes == _report(eight).peak_bytes
    plain = {**BASE, "pipeline-model-parallel-size": 4, "global-batch-size": 20}
    assert _report({**plain, option: 5}).peak_bytes == _report(plain).peak_bytes
    with pytest.raises(SpecError, match="microbatch_group 5"):
        Layout(pp=4, microbatch_group=5)


def test_the_former_switch_of_rotary_positions() -> None:
    found = read_arguments({**BASE, "use-rotary-position-embeddings": True})
    assert found.model["position"] == "rotary"


def test_each_kind_of_activation_has_its_fusion_switch() -> None:
    def fused(options: dict[str, Any]) -> bool:
        kernels = read_arguments({**BASE, **options}).workload["kernels"]
        return bool(kernels["bias_activation_fusion"])

    gelu, swiglu = {"no-bias-gelu-fusion": True}, {"no-bias-swiglu-fusion": True}
    assert [fused(gelu), fused(swiglu), fused({"bias_gelu_fusion": False})] == [False, True, False]
    gated = {"swiglu": True}
    assert [fused({**gated, **gelu}), fused({**gated, **swiglu})] == [True, False]


def test_the_parsed_arguments_of_a_run_without_experts_name_nothing_unread() -> None:
    fields = {
        "moe_router_topk": 2, "moe_layer_freq": 1, "kv_lora_rank": 32, "mamba_state_dim": 128,
        "exp_avg_dtype": "torch.float32", "img_h": 224, "patch_dim": 16, "retro_encoder_layers": 2,
        "inference_max_seq_length": 2560, "encoder_seq_length": 1024, "mask_type": "random",
        "num_query_groups": 1, "data_parallel_size": 4, "params_dtype": "torch.bfloat16",
        "transformer_pipeline_model_parallel_size": 1, "attention_backend": "AttnBackend.flash",
    }  # fmt: skip
    found = read_arguments({**BASE, **fields})
    assert not any("not understood" in text for text in found.warnings)
    assert found.workload["kernels"]["attention_backend"] == "flash"
    experts = read_arguments({**BASE, "num-experts": 8, "moe-frobnicate": True})
    assert any("moe-frobnicate" in text for text in experts.warnings)
