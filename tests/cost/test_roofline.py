"""Properties that hold for any device and shape: what must cost more does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actcalc.cost.collective import bandwidth, collective_seconds
from actcalc.cost.gemm import Product, gemm_seconds
from actcalc.cost.optime import beside
from actcalc.cost.rates import parse_overrides, rates_of, shares_of
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.devices import load_device
from actcalc.io.runs import load_run
from actcalc.layers.core.graph import Collective
from actcalc.policy.rules import NONE, parse_policy
from actcalc.run.staged import StagedRun
from tests.sweeps import sampled

A100 = rates_of(load_device("a100-80gb"), "bf16")
sizes = st.integers(1, 20000)


@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 64))
def test_gemm_never_beats_the_peaks(m, n, k, batch):
    product = Product(m, n, k, batch)
    seconds = gemm_seconds(product, A100)
    assert seconds >= product.flops / A100.peak
    assert seconds >= 2 * batch * (m * k + k * n + m * n) / (2039e9 * A100.shares.memory) * 0.999


@given(m=sizes, n=sizes, k=sizes)
def test_gemm_grows_with_every_dimension(m, n, k):
    base = gemm_seconds(Product(m, n, k), A100)
    assert gemm_seconds(Product(2 * m, n, k), A100) >= base
    assert gemm_seconds(Product(m, 2 * n, k), A100) >= base
    assert gemm_seconds(Product(m, n, 2 * k), A100) >= base * 0.999


def test_a_last_wave_costs_as_much_as_a_full_one():
    """One tile more than the multiprocessors hold: 108 tiles of 256 x 128 are one wave."""
    one = gemm_seconds(Product(256 * 108, 128, 512), A100)
    more = gemm_seconds(Product(256 * 109, 128, 512), A100)
    assert more > 1.15 * one


def test_large_products_reach_the_stated_share():
    product = Product(256 * 108, 128 * 64, 8192)
    share = product.flops / gemm_seconds(product, A100) / A100.matrix
    assert 0.95 < share <= 1


@pytest.mark.parametrize(
    ("shape", "milliseconds", "in_fp8"),
    [
        ((8192, 8192, 8192), 1.879, 0.977),
        ((65536, 8192, 7168), 13.383, 7.108),
        ((65536, 3584, 8192), 7.044, 3.372),
    ],
)
def test_products_under_a_power_limit(shape, milliseconds, in_fp8):
    """pytorch/FBGEMM pull request 2546: H100 at 500 W, bf16, and fp8 with a scale a row."""
    limit = parse_overrides(["h100-500w"])
    h100 = load_device("h100-80gb")
    wide = gemm_seconds(Product(*shape), rates_of(h100, "bf16", limit))
    narrow = gemm_seconds(Product(*shape, operand_bytes=1), rates_of(h100, "fp8", limit))
    assert 1e3 * wide == pytest.approx(milliseconds, rel=0.06)
    assert 1e3 * narrow == pytest.approx(in_fp8, rel=0.06)


def _steps(kind, message, size):
    return collective_seconds(kind, message, size, 1, A100) - A100.shares.collective_seconds


@given(size=st.integers(2, 64), message=st.floats(1e3, 1e10))
def test_all_reduce_is_scatter_and_gather(size, message):
    """Inside a node; across nodes its steps may take a tree, which is never slower."""
    both = _steps(Collective.REDUCE_SCATTER, message, size)
    both += _steps(Collective.ALL_GATHER, message, size)
    together = _steps(Collective.ALL_REDUCE, message, size)
    assert together <= both * (1 + 1e-9)
    if size <= A100.node:
        assert together == pytest.approx(both)


def test_ring_steps_grow_with_ranks_and_tree_steps_with_their_logarithm():
    tiny = 1.0
    rings = [_steps(Collective.ALL_GATHER, tiny, size) for size in (64, 128, 256, 512)]
    trees = [_steps(Collective.ALL_REDUCE, tiny, size) for size in (64, 128, 256, 512)]
    assert rings[3] - rings[2] == pytest.approx(2 * (rings[2] - rings[1]), rel=0.05)
    assert trees[3] - trees[2] == pytest.approx(trees[2] - trees[1], rel=0.05)


def test_groups_across_nodes_share_their_network_cards():
    assert bandwidth(8, 1, A100) == A100.intra
    assert bandwidth(2, 8, A100) == A100.inter
    assert bandwidth(16, 4, A100) == 2 * A100.inter
    assert bandwidth(64, 1, A100) <= A100.intra


@given(compute=st.floats(1e-6, 1), hidden=st.floats(0, 1), share=st.floats(0.01, 1.0))
def test_beside(compute, hidden, share):
    together = beside(compute, hidden, share)
    assert max(compute, hidden) <= together <= compute + hidden + 1e-12


MODELS = ("gpt2", "gpt-22b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-2b", "bert-base")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("framework", ["paper", "megatron"])
def test_policies_cost_what_they_run_again(name, framework):
    try:
        run = load_run(name, framework=framework, device="h100-80gb", workload={"micro_batch": 1})
        staged = StagedRun(run)
    except SpecError:
        pytest.skip("the framework does not run this model")
    roofline = roofline_of(staged)
    for kind in staged.kinds:
        none = roofline.layer(kind.graph, NONE)
        full = roofline.layer(kind.graph, parse_policy("full"))
        core = roofline.layer(kind.graph, parse_policy("selective"))
        assert none.rerun == 0
        assert full.forward == none.forward == core.forward
        assert none.backward <= core.backward < full.backward
        assert full.backward == pytest.approx(none.backward + none.forward)
        assert none.weight_gradient < none.backward
        for time in roofline.ops(kind.graph):
            assert time.forward_seconds >= 0
            assert time.backward_seconds >= 0


@pytest.mark.parametrize("name", sampled(presets.names("models"), ("deberta-v3-base",)))
def test_every_preset_has_a_step(name):
    roofline = roofline_of(StagedRun(load_run(name, device="h100-80gb")))
    assert 0 < step_time(NONE, roofline).total <= step_time(parse_policy("full"), roofline).total


def test_a_product_by_weights_of_another_op_is_one():
    """DeBERTa projects its table of positions by the content's own weights."""
    staged = StagedRun(load_run("deberta-v3-base", device="a100-80gb"))
    layer = staged.main.graph
    own, borrowed = layer.op("k"), layer.op("position_k")
    assert not borrowed.weights
    assert layer.factor(borrowed) == layer.factor(own)
    assert layer.trains(borrowed)
    times = {time.name: time for time in roofline_of(staged).ops(layer)}
    assert times["position_k"].weight_gradient > 0


@settings(deadline=None, max_examples=20)
@given(batches=st.integers(1, 64))
def test_step_grows_with_microbatches(batches):
    run = load_run("gpt2", device="a100-80gb", layout={"pp": 4})
    roofline = roofline_of(StagedRun(run))
    shorter = step_time(NONE, roofline, count=batches)
    longer = step_time(NONE, roofline, count=batches + 1)
    assert longer.total > shorter.total
    assert longer.bubble_ratio <= shorter.bubble_ratio + 1e-9


@pytest.mark.parametrize("name", presets.names("devices"))
def test_every_device_has_rates_and_sources(name):
    device = load_device(name)
    shares, sources = shares_of(device)
    assert set(sources) == set(vars(shares))
    assert all(sources.values())
    for precision in [name for name in ("bf16", "fp16", "fp32") if name in device.peak_flops]:
        rates = rates_of(device, precision)
        assert 0 < rates.matrix <= rates.peak
        assert rates.intra >= 0


def test_every_file_of_shares_belongs_to_a_device_or_to_all():
    from actcalc.cost.rates import efficiency_presets

    used = {load_device(name).efficiency for name in presets.names("devices")}
    beside = {"flash-attention-1", "flash-attention-triton", "h100-500w"}
    assert used - {None} == set(efficiency_presets()) - {"default"} - beside


@pytest.mark.parametrize("bad", ["gem=0.5", "gemm", "gemm=2", "gemm=0", "gemm=x", "memory=nan"])
def test_bad_overrides(bad):
    with pytest.raises(SpecError):
        parse_overrides([bad])


def test_overrides_replace_one_share():
    device = load_device("a100-80gb")
    slow = rates_of(device, "bf16", parse_overrides(["gemm=0.4,memory=0.5"]))
    assert slow.matrix == pytest.approx(A100.matrix * 0.4 / A100.shares.gemm)
    assert slow.memory == pytest.approx(A100.memory * 0.5 / A100.shares.memory)
    assert slow.intra == A100.intra


@pytest.mark.parametrize(
    ("experts", "tokens", "measured"), [(8, 4096, 627.903e12), (16, 2048, 553.945e12)]
)
def test_grouped_products_of_experts(experts, tokens, measured):
    """Qwen3-30B-A3B's experts on an H100 in bf16, Transformer Engine 2.7 over several streams
    (NVIDIA/TransformerEngine pull request 2045)."""
    rates = rates_of(load_device("h100-80gb"), "bf16")
    product = Product(tokens, 768, 2048, experts)
    assert product.flops / gemm_seconds(product, rates) == pytest.approx(measured, rel=0.13)
