"""Stand-ins for fused kernels keep what the kernels' autograd functions keep, and nothing else."""

from __future__ import annotations

import pytest

from actcalc.errors import SpecError
from actcalc.io.hub.families import ALIASES, FAMILIES
from actcalc.io.hub.refused import REFUSED
from actcalc.io.hub.transformers_types import TRANSFORMERS_TYPES
from actcalc.measure import measure_transformers
from actcalc.measure.fused import STAND_INS

pytest.importorskip("torch", reason="needs actcalc[torch]")
pytest.importorskip("transformers", reason="needs actcalc[torch]")

NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


def kept(result, function):
    """Bytes that the autograd function keeps in the first layer."""
    return [
        tensor.bytes
        for tensor in result.tensors
        if tensor.phase == "layer0" and tensor.op.startswith(function)
    ]


def test_the_delta_rule_keeps_its_inputs_decays_and_inverses():
    result = measure_transformers(NEXT, seq=128)
    queries, values, inverse = 128 * 2 * 16 * 2, 128 * 4 * 8 * 2, 128 * 4 * 64 * 2
    rstd, decays = 128 * 2 * 4, 128 * 4 * 4
    # The writing strengths are kept too: by the sigmoid that made them.
    assert kept(result, "ChunkGatedDeltaRuleFunctionBackward") == [
        queries, rstd, queries, rstd, values, decays, inverse,
    ]  # fmt: skip
    assert kept(result, "CausalConv1dFnBackward") == [128 * 2 * (2 * 2 * 16 + 4 * 8)]


def test_what_is_read_from_source_is_said():
    (note,) = measure_transformers(NEXT, seq=128).notes
    assert "flash-linear-attention" in note
    assert "read from their source" in note
    assert "ChunkGatedDeltaRuleFunction" in note


def test_backward_counts_flops_through_a_stand_in():
    dense = {key: value for key, value in NEXT.items() if "expert" not in key}
    config = {**dense, "model_type": "qwen3_5_text"}
    flops = measure_transformers(config, seq=128, flops=True).flops
    assert flops is not None
    assert flops.backward_flops > flops.forward_flops > 0


def test_afterwards_the_library_is_as_before():
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    measure_transformers(NEXT, seq=128)
    function = code.torch_chunk_gated_delta_rule
    free = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    assert free["implementation"].cell_contents is function.__wrapped__
    assert free["is_new_implementation"].cell_contents is False


RWKV = {
    "model_type": "rwkv",
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "context_length": 64,
}


def test_rwkv_keeps_what_its_own_autograd_function_saves():
    """Saved there and nowhere before: the decay in fp32; in fp16 fp32 copies of all it reads."""
    per_token, tokens = 64 * 2, 2 * 32
    result = measure_transformers(RWKV, batch=2, seq=32)
    wide = [per_token * tokens] * 3
    assert sorted(kept(result, "RwkvLinearAttentionBackward")) == [64 * 4, *wide]
    (note,) = result.notes
    assert "kernels-community/rwkv" in note
    assert "RwkvLinearAttention" in note
    half = measure_transformers(RWKV, batch=2, seq=32, dtype="fp16")
    assert sorted(kept(half, "RwkvLinearAttentionBackward")) == [
        64 * 4, 64 * 4, *(2 * size for size in wide),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"seq": 65}, "maximum of 64"),
        ({"seq": 32, "dtype": "amp-bf16"}, "expected scalar type"),
    ],
)
def test_rwkv_refuses_what_its_kernels_refuse(run, message):
    with pytest.raises(SpecError, match=message):
        measure_transformers(RWKV, **run)


def test_afterwards_rwkv_has_no_kernels():
    from transformers.models.rwkv import modeling_rwkv as code

    measure_transformers(RWKV, seq=32)
    assert code.rwkv_cuda_kernel is None


def test_every_stand_in_names_function_and_package():
    packages = {package for _, package, _ in STAND_INS.values()}
    assert packages == {"causal-conv1d", "flash-linear-attention", "mamba-ssm"}


def test_the_librarys_types_are_its_own_list():
    """Refused types that it lacks are told apart by that list, and none is taken for a Llama."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as KNOWN

    assert set(KNOWN) == TRANSFORMERS_TYPES
    assert not set(REFUSED) & {*FAMILIES, *ALIASES}
