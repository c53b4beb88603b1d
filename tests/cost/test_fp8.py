"""Scaling of fp8 operands, and products on Blackwell, against measurements of them alone."""

from __future__ import annotations

import pytest

from actcalc.cost.fp8 import SCALINGS, launches, scaling_of
from actcalc.cost.gemm import Product, gemm_seconds, misaligned
from actcalc.cost.rates import rates_of
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.io.devices import load_device
from actcalc.io.megatron import read_arguments
from actcalc.io.runs import load_run
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun

# NVIDIA/TransformerEngine docs/examples/gemm_profiling/gemm_profiling.rst: a layer 4096 wide (16384
# inside) with 15872 tokens, milliseconds of forward products, input and weight gradients.
TOKENS, HIDDEN, WIDE = 15872, 4096, 16384
B300_BF16 = (4.196, 4.290, 4.272)
B300_CURRENT_ALONE = (2.158, 2.329, 2.325)
B300 = {"tensorwise": (9.147, 6.812), "mxfp8": (8.984, 7.161)}  # with quantisation, and without
B300_DELAYED = 7.802
H200 = {"tensorwise": (20.285, 16.785), "delayed": 18.978, "blockwise": 22.882}


def products():
    """The four products of each pass: rows, columns and what is summed over."""
    forward = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)]
    return (
        [(TOKENS, n, k) for n, k in forward],
        [(TOKENS, k, n) for n, k in forward],
        [(n, k, TOKENS) for n, k in forward],
    )


@pytest.mark.parametrize(
    ("precision", "operand", "measured"), [("bf16", 2, B300_BF16), ("fp8", 1, B300_CURRENT_ALONE)]
)
def test_products_of_a_layer_on_a_b300(precision, operand, measured):
    rates = rates_of(load_device("b300"), precision)
    for shapes, milliseconds in zip(products(), measured, strict=True):
        seconds = sum(gemm_seconds(Product(*s, operand_bytes=operand), rates) for s in shapes)
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("size", "microseconds"), [(4096, 97.4), (6144, 319), (8192, 774)])
def test_products_on_a_b200(size, microseconds):
    """pytorch/ao pull request 2427."""
    seconds = gemm_seconds(Product(size, size, size), rates_of(load_device("b200"), "bf16"))
    assert 1e6 * seconds == pytest.approx(microseconds, rel=0.05)


def test_recipes_are_as_far_apart_as_measured():
    quantising = {name: whole - alone for name, (whole, alone) in B300.items()}
    delayed = B300_DELAYED - B300["tensorwise"][1]
    moved = {name: row.moved for name, row in SCALINGS.items()}
    assert moved["mxfp8"] / moved["delayed"] == pytest.approx(
        quantising["mxfp8"] / delayed, rel=0.05
    )
    # Looking for the largest values reads everything once more, in kernels of their own.
    assert 1 < moved["tensorwise"] / moved["delayed"] < quantising["tensorwise"] / delayed
    alone = B300["tensorwise"][1] / B300["mxfp8"][1]
    assert SCALINGS["mxfp8"].speed == pytest.approx(alone, rel=0.01)
    one = H200["tensorwise"][1]
    blocks = H200["blockwise"] - (H200["delayed"] - one)
    assert SCALINGS["blockwise"].speed == pytest.approx(one / blocks, rel=0.01)


def test_auto_is_what_the_framework_does():
    assert scaling_of("auto", vendor=True) == SCALINGS["delayed"]
    assert scaling_of("auto", vendor=False).moved == SCALINGS["tensorwise"].moved + 1


def seconds(recipe, **more):
    run = load_run(
        "llama-3-8b",
        framework="megatron",
        device="h100-80gb",
        workload={"precision": "fp8", "global_batch": 8, "kernels": {"fp8_recipe": recipe}, **more},
    )
    return step_time(NONE, roofline_of(StagedRun(run))).total


def test_a_step_takes_longer_the_finer_its_scales():
    assert seconds("auto") == seconds("delayed") < seconds("tensorwise") < seconds("mxfp8")
    assert seconds("mxfp8") < seconds("blockwise")


def test_weights_are_quantised_once_a_step():
    """By a step of one micro-batch once, and no oftener by a step of eight."""
    more = 8 * seconds("tensorwise", global_batch=1) - seconds("tensorwise", global_batch=8)
    less = 8 * seconds("delayed", global_batch=1) - seconds("delayed", global_batch=8)
    assert more > less


def test_experts_are_quantised_one_by_one():
    """Transformer Engine pytorch/csrc/extensions/cast.cpp multi_tensor_quantize_impl."""
    assert launches(SCALINGS["delayed"], 16) == 1
    assert launches(SCALINGS["tensorwise"], 16) == 3 * 16

    def host(recipe, **more):
        run = load_run(
            "qwen3-30b-a3b", framework="megatron", device="h100-80gb", layout={"dp": 8, **more},
            workload={"precision": "fp8", "kernels": {"fp8_recipe": recipe}},
        )  # fmt: skip
        roofline = roofline_of(StagedRun(run))
        (kind,) = roofline.staged.kinds
        return roofline.layer(kind.graph, NONE).host_forward

    # Two products of 16 or of 32 local experts, three launches each from compiled code.
    launch = rates_of(load_device("h100-80gb"), "fp8").shares.launch_seconds
    for ranks, local in ((8, 16), (4, 32)):
        found = host("tensorwise", ep=ranks) - host("delayed", ep=ranks)
        assert found == pytest.approx(2 * 3 * local * launch)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "blockwise", "delayed", "custom"])
def test_megatrons_option(recipe):
    options = {
        "num-layers": 2, "hidden-size": 1024, "num-attention-heads": 8, "seq-length": 1024,
        "max-position-embeddings": 1024, "micro-batch-size": 1, "bf16": True,
        "fp8-format": "hybrid", "fp8-recipe": recipe,
    }  # fmt: skip
    kernels = read_arguments(options).workload["kernels"]
    assert kernels["fp8_recipe"] == ("auto" if recipe == "custom" else recipe)


@pytest.mark.parametrize(
    ("width", "missed"), [(128, 0), (140, 8), (450, 4), (150, 12), (50257, 2), (50304, 0)]
)
def test_rows_that_miss_multiples_of_16_bytes(width, missed):
    assert misaligned(2, width) == missed
    assert misaligned(1, width) == 0


def test_heads_that_are_not_aligned_on_an_a100():
    """pytorch/pytorch issue 83272: heads of 128 and 140, products of 1024 tokens."""
    rates = rates_of(load_device("a100-80gb"), "bf16")
    aligned = gemm_seconds(Product(1024, 1024, 128, 512), rates)
    narrow = gemm_seconds(Product(1024, 1024, 140, 384, unaligned=misaligned(2, 140)), rates)
    assert narrow / aligned == pytest.approx(1.314 / 1.038, rel=0.05)


def test_a_padded_vocabulary_is_faster():
    def step(vocab):
        run = load_run(
            "gpt2", framework="transformers", device="a100-80gb", model={"vocab": vocab},
            workload={"micro_batch": 16, "attention": "sdpa"},
        )  # fmt: skip
        return step_time(NONE, roofline_of(StagedRun(run))).total

    assert step(50257) > 1.1 * step(50304)
