"""Every device preset loads, says where each figure comes from, and makes physical sense."""

from __future__ import annotations

from itertools import pairwise

import pytest

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.specs.device import Device

pytestmark = pytest.mark.each

NAMES = presets.names("devices")
PROMISED = """
a10 a100-40gb a100-80gb a100-pcie-40gb a100-pcie-80gb a10g a30 a40 a800-80gb ascend-910b
ascend-910c b100 b200 b300 gaudi-2 gaudi-3 gb200 gb300 gh200 gh200-144gb h100-80gb h100-nvl
h100-pcie h20 h200 h800 l4 l40 l40s m2-ultra m3-max m3-ultra m4-max max-1550 mi100 mi210 mi250
mi250x mi300a mi300x mi325x mi350x mi355x quadro-rtx-8000 rtx-2080-ti rtx-3060 rtx-3080 rtx-3090
rtx-3090-ti rtx-4080 rtx-4080-super rtx-4090 rtx-5070-ti rtx-5080 rtx-5090 rtx-6000-ada
rtx-a4000 rtx-a5000 rtx-a6000 rtx-pro-6000 rx-7900-xtx t4 titan-rtx tpu-v3 tpu-v4 tpu-v5e
tpu-v5p tpu-v6e tpu-v7 trainium-1 trainium-2 trainium-3 v100-16gb v100-32gb v100-pcie-16gb
v100-pcie-32gb
"""


def device(name):
    preset = presets.load("devices", name)
    return Device.model_validate({"name": name, "title": preset.title, **preset.values})


def figures(preset):
    """Every figure of a preset by the key of its source."""
    plain = {key: value for key, value in preset.values.items() if key != "efficiency"}
    peaks = plain.pop("peak_flops")
    return plain | {f"peak_flops.{number}": flops for number, flops in peaks.items()}


def test_all_promised_devices_are_there():
    assert set(PROMISED.split()) <= set(NAMES)
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    preset = presets.load("devices", name)
    for key in figures(preset):
        assert len(preset.sources[key].split()) >= 3, (key, preset.sources[key])
    for pattern, source in preset.instances.items():
        assert len(source.split()) >= 3, (pattern, source)


@pytest.mark.parametrize("name", NAMES)
def test_figures_make_sense(name):
    spec = device(name)
    peaks = spec.peak_flops
    assert spec.title
    assert spec.name not in spec.title
    nominal = spec.memory_nominal_bytes
    assert nominal % 2**30 == 0
    assert {"fp16", "bf16"} & set(peaks)
    assert 1e13 < max(peaks.values()) < 2e16
    half = peaks.get("bf16", peaks.get("fp16"))
    assert peaks.get("fp32", 0) < half or name in NO_MATRIX_UNITS
    assert peaks.get("fp64", 0) <= 1.01 * peaks.get("fp32", half)
    # FLOPs per byte below 50 or above 700 are a slip of a unit or a sparse figure
    assert 30 < half / spec.memory_bandwidth_bytes_per_second < 700
    memory = spec.memory_bandwidth_bytes_per_second
    intra = spec.intra_node_bandwidth_bytes_per_second
    inter = spec.inter_node_bandwidth_bytes_per_second
    host = spec.host_bandwidth_bytes_per_second
    assert 2.9e11 < memory < 1e13
    if intra is not None:
        assert intra < memory
    if inter is not None:
        assert 1e9 < inter < 2e11
        assert intra is None or inter < intra
    if host is not None:
        assert 1e10 < host < 5e11
    assert spec.devices_per_node is None or spec.devices_per_node >= 4


UNREPORTED = """
ascend-910c b100 gaudi-3 gh200-144gb m2-ultra m3-max m4-max mi100 mi210 mi300a mi350x rtx-5070-ti
tpu-v3 tpu-v7 trainium-1 trainium-2 trainium-3 v100-pcie-16gb
"""
"""Devices of which no report of the memory that a process can use was found."""

NO_MATRIX_UNITS = ("m2-ultra", "m3-max", "m3-ultra", "m4-max")
"""Devices whose shader cores multiply matrices, in fp16 as fast as in fp32."""


@pytest.mark.parametrize("name", NAMES)
def test_less_memory_is_usable_than_is_sold(name):
    spec = device(name)
    nominal = spec.memory_nominal_bytes
    if name in UNREPORTED.split():
        assert spec.memory_bytes is None
        assert spec.usable_bytes == nominal
    elif name == "tpu-v5p":
        # its documentation rounds 95.74 GiB down to 95
        assert nominal < spec.memory_bytes < nominal + 2**30
    elif name == "m3-ultra":
        # unified memory: macOS keeps its own share
        assert spec.memory_bytes == 223338299392
    else:
        # drivers keep back up to about 9 %
        assert 0.905 * nominal <= spec.memory_bytes < nominal


RATIOS = {
    "gaudi-3": {"fp8": 1.0},  # one rate of the matrix engines for both
    "tpu-v5p": {"fp8": 1.0},  # converted to bf16
    "trainium-2": {"fp8": 1.95, "tf32": 1.0},
    "b300": {"fp4": 2.92},  # units for fp4 were added at the cost of fp64
    "gb300": {"fp4": 3.0},
    "trainium-1": {"fp8": 1.0, "tf32": 1.0},  # one rate of the matrix engine for all
    "trainium-3": {"fp8": 3.75, "fp4": 1.0, "tf32": 1.0},
    "rtx-5080": {"fp4": 4.0},
    "rtx-5090": {"fp4": 4.0},  # GeForce halves accumulation in fp32, which fp4 does not use
}
"""Ratios between formats that differ from the usual ones, each for a reason of the chip."""


@pytest.mark.parametrize("name", NAMES)
def test_dense_peaks_keep_the_ratios_of_the_formats(name):
    peaks = device(name).peak_flops
    half = peaks.get("bf16", peaks.get("fp16"))
    own = RATIOS.get(name, {})
    assert set(own) <= set(peaks)
    assert peaks.get("fp16", half) == half
    # data sheets round: 362.05 and 733 on L40S
    for number, base, usual in (("tf32", half, 0.5), ("fp8", half, 2.0), ("fp4", None, 2.0)):
        if number in peaks:
            ratio = peaks[number] / (base or peaks["fp8"])
            assert ratio == pytest.approx(own.get(number, usual), rel=0.015)
            assert number not in own or own[number] != usual


@pytest.mark.parametrize("name", NAMES)
def test_copies_reach_less_than_the_link_to_the_host(name):
    spec = device(name)
    raw, copied = spec.host_bandwidth_bytes_per_second, spec.host_copy_bandwidth_bytes_per_second
    if spec.compute_capability is not None:
        # PCIe x16, or NVLink-C2C of a Grace
        assert raw in (16e9, 32e9, 64e9) or name.startswith(("gb", "gh"))
    if copied is not None:
        assert 0.7 * raw < copied < 0.9 * raw


def test_links_that_bound_offload_are_known():
    unknown = {name for name in NAMES if device(name).host_bandwidth_bytes_per_second is None}
    assert unknown == {
        *NO_MATRIX_UNITS, "ascend-910c", "max-1550", "mi300a", "tpu-v3", "tpu-v7", "trainium-1",
        "trainium-2", "trainium-3",
    }  # fmt: skip


def test_sources_say_when_a_document_could_not_be_read():
    unread = {
        (name, key)
        for name in NAMES
        for key, source in presets.load("devices", name).sources.items()
        if all("not opened" in part for part in source.split("; "))
    }
    # what decides whether a run fits, and the peak that its MFU is measured by
    assert not {key for _, key in unread} & {
        "memory_bytes",
        "peak_flops.bf16",
        "peak_flops.fp16",
        "peak_flops.fp8",
    }
    # nearly all other figures were read too
    assert len(unread) <= 0.1 * sum(len(figures(presets.load("devices", n))) for n in NAMES)


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
        assert less.peak_flops == {n: more.peak_flops[n] for n in less.peak_flops}
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
        # verl, utils/flops_counter.py
        ("a800-80gb", "bf16", 312e12),
        ("h800", "bf16", 989e12),
        ("h20", "bf16", 148e12),
        ("gb200", "bf16", 2.5e15),
        ("ascend-910b", "bf16", 354e12),
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
