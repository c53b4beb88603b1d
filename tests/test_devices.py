"""Every device preset loads, says where each figure comes from, and makes physical sense."""

from __future__ import annotations

from itertools import pairwise

import pytest

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.specs.device import Device, Efficiency

NAMES = presets.names("devices")
ASKED = [
    "v100-16gb",
    "v100-32gb",
    "a100-40gb",
    "a100-80gb",
    "a800-80gb",
    "h100-80gb",
    "h100-pcie",
    "h100-nvl",
    "h800",
    "h20",
    "h200",
    "b200",
    "gb200",
    "b300",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
    "l40s",
    "a10",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "gaudi-2",
    "gaudi-3",
    "trainium-2",
    "ascend-910b",
]


def device(name):
    preset = presets.load("devices", name)
    return Device.model_validate({"name": name, "title": preset.title, **preset.values})


def test_all_promised_devices_are_there():
    assert set(ASKED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    preset = presets.load("devices", name)
    figures = set(preset.values) - {"peak_flops", "efficiency"}
    figures |= {f"peak_flops.{number}" for number in preset.values["peak_flops"]}
    assert figures <= set(preset.sources)
    for key in figures:
        assert len(preset.sources[key].split()) >= 3, (key, preset.sources[key])


@pytest.mark.parametrize("name", NAMES)
def test_figures_make_sense(name):
    spec = device(name)
    peaks = spec.peak_flops
    assert spec.title
    assert spec.name not in spec.title
    nominal = spec.memory_nominal_bytes
    assert nominal % 2**30 == 0
    # drivers keep back up to about 8 %; one data sheet rounds down
    assert 0.91 * nominal <= spec.usable_bytes <= 1.01 * nominal
    assert {"fp16", "bf16"} & set(peaks)
    assert 1e13 < max(peaks.values()) < 1e16
    half = peaks.get("bf16", peaks.get("fp16"))
    assert peaks.get("fp16", half) == half
    assert peaks.get("fp32", 0) < half
    assert peaks.get("fp32", 0) <= peaks.get("tf32", half) <= half
    assert half <= peaks.get("fp8", half) <= 2.05 * half
    # a FLOP per byte below 50 or above 700 is a slip of a unit or a sparse figure
    assert 30 < half / spec.memory_bandwidth_bytes_per_second < 700
    memory = spec.memory_bandwidth_bytes_per_second
    intra = spec.intra_node_bandwidth_bytes_per_second
    inter = spec.inter_node_bandwidth_bytes_per_second
    host = spec.host_bandwidth_bytes_per_second
    assert 3e11 < memory < 1e13
    if intra is not None:
        assert intra < memory
    if inter is not None:
        assert 1e9 < inter < 2e11
        assert intra is None or inter < intra
    if host is not None:
        assert 1e10 < host < 3e11
    assert spec.devices_per_node is None or spec.devices_per_node >= 4


def test_later_chips_are_not_worse():
    order = ["v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "b300"]
    specs = [device(name) for name in order]
    for earlier, later in pairwise(specs):
        assert later.memory_nominal_bytes >= earlier.memory_nominal_bytes
        assert later.peak("fp16") >= earlier.peak("fp16")
        bandwidth = "memory_bandwidth_bytes_per_second"
        assert getattr(later, bandwidth) >= getattr(earlier, bandwidth)


def test_export_variants_differ_where_they_were_cut():
    for cut, whole in (("a800-80gb", "a100-80gb"), ("h800", "h100-80gb")):
        less, more = device(cut), device(whole)
        assert less.peak_flops == more.peak_flops
        link = "intra_node_bandwidth_bytes_per_second"
        assert getattr(less, link) < getattr(more, link)


@pytest.mark.parametrize(
    ("name", "number", "flops"),
    [
        # torchtitan, tools/utils.py, get_peak_flops (bf16)
        ("a100-40gb", "bf16", 312e12),
        ("a100-80gb", "bf16", 312e12),
        ("h100-80gb", "bf16", 989e12),
        ("h100-nvl", "bf16", 835e12),
        ("h100-pcie", "bf16", 756e12),
        ("h200", "bf16", 989e12),
        ("b200", "bf16", 2.25e15),
        ("mi250x", "bf16", 191.5e12),
        ("l40s", "bf16", 362e12),
        # Lightning, fabric/utilities/throughput.py
        ("v100-16gb", "fp16", 125e12),
        ("a10", "bf16", 125e12),
        ("tpu-v4", "bf16", 275e12),
        ("tpu-v5e", "bf16", 197e12),
    ],
)
def test_peaks_agree_with_those_that_frameworks_divide_by(name, number, flops):
    assert device(name).peak(number) == pytest.approx(flops, rel=1e-3)


def test_a_missing_precision_is_an_error_that_names_the_others():
    with pytest.raises(SpecError, match="no known peak in bf16") as caught:
        device("v100-16gb").peak("bf16")
    assert "fp16" in caught.value.hint


def test_nonsense_is_refused():
    good = device("h100-80gb").model_dump()
    with pytest.raises(SpecError, match="memory_bytes is 0"):
        Device(**{**good, "memory_bytes": 0})
    with pytest.raises(SpecError, match="bf16 is -1"):
        Device(**{**good, "peak_flops": {"bf16": -1.0}})
    with pytest.raises(SpecError, match="int3"):
        Device(**{**good, "peak_flops": {"int3": 1.0}})
    with pytest.raises(SpecError, match="memory_bandwidth"):
        Device(**{**good, "memory_bandwidth_bytes_per_second": 0.0})


def test_efficiency_is_read_from_a_mapping():
    good = device("h100-80gb").model_dump()
    spec = Device(**{**good, "efficiency": {"gemm": 0.7}})
    assert spec.efficiency == Efficiency(gemm=0.7)
    assert spec == Device.model_validate({**good, "efficiency": {"gemm": 0.7}})
