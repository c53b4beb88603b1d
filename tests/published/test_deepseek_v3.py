"""DeepSeek-V3 as its report says it was trained (arXiv:2412.19437, sections 3.2.3 and 3.3)."""

from __future__ import annotations

from typing import Any

import pytest

from actcalc.api import breakdown, memory
from actcalc.errors import SpecError

LAYOUT: dict[str, Any] = {
    "pp": 16, "ep": 64, "dp": 128, "zero": 1, "schedule": "dualpipe",
    "layers_per_stage": [3, *[4] * 14, 2],
}  # fmt: skip
"""2048 GPUs, of which 64 hold the experts of a layer, without tensor parallelism (3.2)."""
RECIPE: dict[str, Any] = {
    "precision": "fp8", "global_batch": 15360,
    "set": ["moments_bytes=4", "fp8_weights=true", "kernels.fp8_caching=source"],
}  # fmt: skip
RERUN = "layernorm+mla_up_proj+moe_act"
"""RMSNorm, up-projections of latent attention, SwiGLU (3.2.3)."""


def needed(**changes: Any) -> int:
    found = memory("deepseek-v3", device="h800", **LAYOUT, **{**RECIPE, "policy": RERUN, **changes})
    return max(stage.total_bytes for stage in found.stages)


def test_its_recipe_fits_80_gb() -> None:
    """It was trained on H800 of 80 GB, with no costly tensor parallelism."""
    found = memory("deepseek-v3", device="h800", **LAYOUT, **RECIPE, policy=RERUN)
    assert found.fits
    assert max(stage.in_flight for stage in found.stages) == 17  # PP + 1 (table 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "none"},
        {"precision": "bf16", "set": []},
        {"set": ["moments_bytes=4", "fp8_weights=true"]},
    ],
)
def test_every_part_of_it_is_needed(changes: dict[str, Any]) -> None:
    assert needed(**changes) > 85e9 > needed()


def test_what_is_cached_of_a_layer() -> None:
    """3.3.3: attention's output at 12 bits, SwiGLU's and the products' inputs in fp8, once."""
    found = breakdown(
        "deepseek-v3", ep=64, dp=64, precision="fp8", set=["kernels.fp8_caching=source"],
        policy=RERUN,
    )  # fmt: skip
    tokens = 4096
    sizes = {t.tensor: t.bytes for t in found.tensors if t.layer == "moe"}
    assert sizes["context_fp8"] == tokens * 128 * 128 * 3 // 2
    assert sizes["expert_fc1_out_fp8"] == tokens * 8 * 2 * 2048
    assert sizes["expert_input_fp8"] == tokens * 8 * 7168
    gone = {"context", "norm1_out", "norm1_out_fp8", "norm2_out_fp8", "expert_activation_out_fp8"}
    assert not gone & set(sizes)


def test_caching_at_the_source_is_of_fp8_products() -> None:
    with pytest.raises(SpecError, match="fp8_caching source"):
        memory("deepseek-v3", set=["kernels.fp8_caching=source"])


def test_pools_of_graphs_are_said_to_be_left_out() -> None:
    found = memory("llama-3-8b", framework="megatron", cuda_graphs="attention")
    assert any("private pools" in note for note in found.notes)
