"""Bytes per parameter of every recipe, ZeRO stage and optimizer, against published counts."""

from __future__ import annotations

from typing import Any

import pytest

from actcalc.answers.memory import MemoryReport, memory_run
from actcalc.errors import SpecError
from actcalc.io.runs import load_run


def report(name: str, **changes: Any) -> MemoryReport:
    return memory_run(load_run(name, **changes))


def test_megatron_keeps_18_bytes_per_parameter() -> None:
    result = report("gpt3-175b", layout={"tp": 8, "pp": 8, "sp": True})
    for stage in result.stages:
        assert stage.weights_bytes == 2 * stage.parameters
        assert stage.gradients_bytes == 4 * stage.parameters
        assert stage.optimizer_bytes == 12 * stage.parameters


@pytest.mark.parametrize("dp", [2, 8, 64])
def test_distributed_optimizer_keeps_6_and_12_over_dp(dp: int) -> None:
    result = report("gpt3-175b", layout={"tp": 8, "pp": 8, "sp": True, "dp": dp, "zero": 1})
    stage = result.stages[0]
    assert stage.weights_bytes + stage.gradients_bytes == 6 * stage.parameters
    assert stage.optimizer_bytes == -(-12 * stage.parameters // dp) or (
        abs(stage.optimizer_bytes - 12 * stage.parameters / dp) <= 2
    )


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)],
)
def test_zero_stages_shard_what_rajbhandari_says(
    zero: int, weights: int, gradients: int, optimizer: int
) -> None:
    """Rajbhandari et al. 2020, figure 1: with K = 12, stages 1 to 3."""
    layout = {"dp": 8, "zero": zero}
    stage = report("llama-3-8b", layout=layout, training={"recipe": "mixed"}).stages[0]
    count = stage.parameters
    assert count == 8_030_261_248
    assert stage.weights_bytes == -(-2 * count // weights)
    assert stage.gradients_full_bytes == -(-2 * count // gradients)
    assert abs(stage.optimizer_bytes - 12 * count / optimizer) <= 2


@pytest.mark.parametrize(
    ("recipe", "precision", "per_parameter"),
    [
        ("megatron", "bf16", 18),
        ("mixed", "bf16", 16),
        ("deepspeed", "bf16", 20),
        ("pure", "bf16", 8),
        ("auto", "fp32", 16),
        ("auto", "amp-bf16", 16),
    ],
)
def test_bytes_per_parameter(recipe: str, precision: str, per_parameter: int) -> None:
    result = report("llama-3-8b", workload={"precision": precision}, training={"recipe": recipe})
    assert result.stages[0].bytes_per_parameter == per_parameter


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adamw", 8), ("momentum", 4), ("lion", 4), ("sgd", 0)]
)
def test_optimizer_moments(optimizer: str, moments: int) -> None:
    stage = report("llama-3-8b", training={"recipe": "mixed", "optimizer": optimizer}).stages[0]
    assert stage.optimizer_bytes == (4 + moments) * stage.parameters


def test_eight_bit_adam_keeps_two_bytes_and_a_scale_per_block() -> None:
    stage = report("llama-3-8b", training={"optimizer": "adam8bit"}).stages[0]
    assert stage.optimizer_bytes == pytest.approx(2 * stage.parameters * (1 + 4 / 256), rel=1e-3)


def test_adafactor_keeps_rows_and_columns() -> None:
    """BERT's word table: 30522 + 768 statistics instead of 30522 x 768."""
    full = report("bert-base", training={"recipe": "pure"}).stages[0]
    factored = {"recipe": "pure", "optimizer": "adafactor"}
    small = report("bert-base", training=factored).stages[0]
    assert small.optimizer_bytes < full.optimizer_bytes / 100


def test_muon_keeps_one_moment_of_hidden_matrices() -> None:
    adam = report("llama-3-8b", training={"recipe": "mixed"}).stages[0]
    muon = report("llama-3-8b", training={"recipe": "mixed", "optimizer": "muon"}).stages[0]
    table = 2 * 128256 * 4096
    norms = 65 * 4096
    hidden = adam.parameters - table - norms
    assert adam.optimizer_bytes - muon.optimizer_bytes == 4 * hidden


def test_experts_are_sharded_over_their_own_replicas() -> None:
    """8 experts on ep 8: each rank holds one, which no other rank has a copy of."""
    base = {"tp": 1, "ep": 8, "dp": 8}
    whole = report("mixtral-8x7b", layout={**base, "zero": 0}, framework="megatron").stages[0]
    shard = report("mixtral-8x7b", layout={**base, "zero": 1}, framework="megatron").stages[0]
    experts = 32 * 3 * 4096 * 14336
    dense = whole.parameters - experts
    assert shard.optimizer_bytes == 12 * experts + 12 * dense // 8


def test_hybrid_sharding_divides_by_the_shard_group() -> None:
    layout = {"dp": 64, "zero": 3}
    full = report("llama-3-8b", layout=layout).stages[0]
    hybrid = report("llama-3-8b", layout=layout, training={"shards": 8}).stages[0]
    assert hybrid.weights_bytes == pytest.approx(8 * full.weights_bytes, rel=1e-6)


def test_offload_takes_states_off_the_device() -> None:
    stage = report("llama-3-8b", training={"offload": "optimizer"}).stages[0]
    assert (stage.weights_bytes, stage.optimizer_bytes) == (2 * stage.parameters, 0)
    stage = report("llama-3-8b", training={"offload": "weights"}).stages[0]
    assert stage.weights_bytes == stage.optimizer_bytes == 0


def test_offloaded_activations_leave_the_device() -> None:
    plain = report("llama-3-8b").stages[0]
    moved = report("llama-3-8b", training={"offload": "activations"}).stages[0]
    assert moved.layers_activations_bytes == 0 < plain.layers_activations_bytes


def test_lora_trains_r_times_in_plus_out() -> None:
    """Llama 3 8B, rank 16 on q, k, v, o of 32 layers."""
    result = report("llama-3-8b", training={"lora_rank": 16, "lora_targets": "attention"})
    stage = result.stages[0]
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert stage.gradients_full_bytes == 2 * adapters
    assert stage.parameters == 8_030_261_248 + adapters


def test_a_frozen_linear_keeps_no_input() -> None:
    """Adapters on attention alone: the feed-forward's matrices keep nothing for their weights."""
    full = report("llama-3-8b").stages[0]
    lora = report("llama-3-8b", training={"lora_rank": 8, "lora_targets": "attention"}).stages[0]
    tokens = 8192
    # norm2's output (read by gate and up) and the product that fc2 reads
    freed = 32 * tokens * 2 * (4096 + 14336)
    # what both norms multiply with their weights
    freed += 32 * tokens * 2 * (4096 + 4096)
    # six inner products less the ones outside attention: q, k, v, o
    added = 32 * tokens * 2 * 8 * 4
    assert full.layers_activations_bytes - lora.layers_activations_bytes == freed - added


def test_qlora_base_takes_4_127_bits_in_hidden_matrices_alone() -> None:
    """Dettmers et al. 2023, section 3: double quantisation costs 0.127 bits per weight."""
    full = report("llama-3-8b", training={"lora_rank": 8}).stages[0]
    packed = report("llama-3-8b", training={"lora_rank": 8, "base_bits": 4}).stages[0]
    hidden = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    saved = full.weights_bytes - packed.weights_bytes
    assert saved == pytest.approx(hidden * (2 - 4.127 / 8), rel=1e-4)


def test_an_optimizer_in_backward_keeps_gradients_of_one_layer() -> None:
    stage = report("llama-3-8b", training={"step_in_backward": True}).stages[0]
    assert stage.gradients_bytes == 2 * (128256 * 4096 + 4096)


def test_base_bits_without_adapters_is_refused() -> None:
    with pytest.raises(SpecError, match="base_bits 4"):
        load_run("llama-3-8b", training={"base_bits": 4})


def test_tied_table_lives_on_both_ends_of_a_pipeline_and_once_on_one_stage() -> None:
    one = report("gpt3-175b", layout={"tp": 8}).stages[0]
    many = report("gpt3-175b", layout={"tp": 8, "pp": 8}).stages
    table = 51200 * 12288 // 8
    assert sum(stage.parameters for stage in many) - one.parameters == table


def test_experts_are_packed_where_they_are_linear_layers() -> None:
    """transformers below 5: a ModuleList of torch.nn.Linear, which bitsandbytes replaces."""
    asked = {"training": {"lora_rank": 16, "base_bits": 4}, "layout": {"dp": 2, "zero": 3}}
    new, old = (
        report("mixtral-8x7b", framework=name, **asked).stages[0]
        for name in ("transformers", "transformers@4.50")
    )
    experts = 32 * 8 * 3 * 4096 * 14336
    assert new.weights_bytes > experts * 2 // 2
    # half a byte and a 64th for its scales (an fp32 one for each 256 of those), over two ranks
    packed = (experts // 2 + experts // 64 * (1 + 4 / 256)) / 2
    more = (new.weights_bytes - experts) - (old.weights_bytes - packed)
    assert abs(more) < 0.01 * experts  # adapters of the experts alone
