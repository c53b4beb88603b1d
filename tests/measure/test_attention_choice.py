"""Which kernel scaled_dot_product_attention takes on CUDA, and what that keeps.

The rules are those of PyTorch's ``sdp_utils.cpp``, tried one by one around a case that
qualifies for flash attention.
"""

from __future__ import annotations

import pytest

from actcalc.measure.fake_cuda import choose_attention

torch = pytest.importorskip("torch", reason="needs actcalc[torch]")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def choice(
    q=(2, 8, 64, 64),
    k=None,
    v=None,
    dtype=BF16,
    has_mask=False,
    is_causal=False,
    enable_gqa=False,
):
    k = q if k is None else k
    shapes = (q, k, k if v is None else v)
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return choose_attention(*tensors, has_mask=has_mask, is_causal=is_causal, enable_gqa=enable_gqa)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        ({}, "flash"),
        ({"dtype": FP16}, "flash"),
        ({"is_causal": True}, "flash"),
        ({"q": (2, 8, 64, 256)}, "flash"),
        ({"q": (2, 8, 64, 20)}, "flash"),
        ({"k": (2, 8, 96, 64)}, "flash"),
        ({"k": (2, 2, 64, 64), "enable_gqa": True}, "flash"),
        ({"has_mask": True}, "efficient"),
        ({"dtype": FP32}, "efficient"),
        ({"q": (2, 8, 64, 264)}, "efficient"),
        ({"v": (2, 8, 64, 32)}, "efficient"),
        ({"k": (2, 8, 96, 64), "is_causal": True}, "efficient"),
        ({"q": (2, 8, 64, 4), "dtype": FP32}, "efficient"),
        ({"q": (2, 8, 64, 20), "has_mask": True}, "math"),
        ({"q": (2, 8, 64, 6), "dtype": FP32}, "math"),
        ({"dtype": FP64}, "math"),
        ({"k": (2, 2, 64, 64)}, "math"),
        ({"k": (2, 3, 64, 64), "enable_gqa": True}, "math"),
        ({"k": (2, 2, 64, 64), "enable_gqa": True, "has_mask": True}, "math"),
        ({"k": (1, 8, 64, 64)}, "math"),
        ({"q": (8, 64, 64)}, "math"),
    ],
)
def test_choice(case, kernel):
    assert choice(**case) == kernel


def test_transposed_last_dimension_is_no_fused_case():
    q = torch.empty(2, 8, 64, 64, dtype=BF16, device="meta")
    kernel = choose_attention(
        q.transpose(-1, -2), q, q, has_mask=False, is_causal=False, enable_gqa=False
    )
    assert kernel == "math"


def saved(body, shape, dtype="bfloat16"):
    """Measure one attention call over inputs of a shape; return its bytes by attribute."""
    from actcalc.measure import measure_module

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, dtype)))

        def forward(self, q, k, v):
            return body(q * self.scale, k * self.scale, v * self.scale)

    inputs = lambda: tuple(  # noqa: E731
        torch.empty(shape, dtype=getattr(torch, dtype)) for _ in range(3)
    )
    result = measure_module(lambda: (Attention(), inputs()))
    return {
        tensor.op.split(".")[1]: tensor.bytes
        for tensor in result.tensors
        if "Attention" in tensor.op
    }


sdpa = torch.nn.functional.scaled_dot_product_attention


def test_flash_pads_odd_heads():
    kept = saved(lambda q, k, v: sdpa(q, k, v), (1, 4, 32, 20))
    assert kept["query"] == kept["key"] == kept["value"] == kept["output"] == 2 * 4 * 32 * 24
    assert kept["logsumexp"] == 4 * 4 * 32
    assert kept["rng_state"] + kept["unused"] == 24


def test_a_boolean_mask_becomes_a_bias_of_aligned_rows():
    # 4 rows of 20 bf16, kept in rows of 32
    kept = saved(
        lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(1, 1, 20, 20, dtype=torch.bool)),
        (1, 4, 20, 32),
    )
    assert kept["attn_bias"] == 2 * 20 * 32
    assert kept["query"] == 2 * 4 * 20 * 32


def test_math_keeps_its_probabilities_in_single_precision():
    from actcalc.measure import measure_module

    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v)

    made = (torch.empty(1, 4, 20, 12, dtype=BF16), *[torch.empty(1, 1, 20, 12, dtype=BF16)] * 2)
    result = measure_module(lambda: (Attention(), made))
    assert result.attention_kernels == {"math": 1}
    softmax = [tensor for tensor in result.tensors if "Softmax" in tensor.op]
    assert [(tensor.dtype, tensor.bytes) for tensor in softmax] == [("float32", 4 * 4 * 20 * 20)]
