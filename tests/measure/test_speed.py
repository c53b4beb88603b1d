"""What calibrate times and fits, on CPU tensors: the code that runs on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
import yaml

from actcalc.answers.device_shares import (
    DeviceShares,
    MeasuredShare,
    fit_shares,
    measured,
    shares_file,
)
from actcalc.cli.schema import schema_of
from actcalc.cost.rates import parse_overrides, rates_of, shares_of
from actcalc.errors import SpecError
from actcalc.io.devices import load_device
from actcalc.measure import speed
from actcalc.measure.speed import LARGE, Sample, Sizes, bus_bytes, fitting, seconds_of, span_of
from actcalc.render.calibrate import calibrate_sheets
from actcalc.specs.device import Device

torch = pytest.importorskip("torch")

SMALL = Sizes(
    products=((64, 32, 16), (128, 64, 32)),
    attention=((1, 2, 64, 16),),
    copies=(2**16, 2**18),
    collectives=(2**12,),
    sustained_seconds=0.02,
    calls=2,
    repeats=3,
)
CPU = Device(
    name="cpu",
    title="a processor",
    memory_nominal_bytes=2**33,
    # Out of reach; fp8 is emulated, thousands of times slower.
    peak_flops={"fp32": 1e14, "bf16": 1e14, "fp8": 1e11},
    memory_bandwidth_bytes_per_second=1e13,
    intra_node_bandwidth_bytes_per_second=1e12,
)
KINDS = {"product", "product_sustained", "attention_forward", "attention_backward", "copy"}


def test_a_time_is_the_median_of_calls_in_a_row_less_the_warm_up():
    log = []
    slow = iter([9.0, 0.011, 5.0, 0.012])

    def span(call, calls):
        for _ in range(calls):
            call()
        return next(slow)

    spent = seconds_of(lambda: log.append("call"), span, calls=4, repeats=3)
    assert spent == 0.012
    assert len(log) == 4 * 4


def test_the_host_times_what_runs_on_it():
    now = [0.0]

    def call():
        now[0] += 0.5

    assert span_of(torch, "cpu", clock=lambda: now[0])(call, 4) == 0.5


class Event:
    """torch.cuda.Event of a GPU whose every call takes a millisecond."""

    at = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.recorded = Event.at

    def synchronize(self):
        Event.waited = True

    def elapsed_time(self, other):
        return other.recorded - self.recorded


class Cuda:
    """torch.cuda of a machine with one H100."""

    Event = Event
    free = 80 * 2**30

    def mem_get_info(self, index):
        return self.free, 80 * 2**30

    def get_device_name(self, index):
        return "NVIDIA H100 80GB HBM3"

    def get_device_capability(self, index):
        return (9, 0)

    def device_count(self):
        return 1

    def empty_cache(self):
        pass


class Gpu:
    """torch whose GPU is the processor: what is asked of it is what a GPU would be asked."""

    def __init__(self):
        self.cuda = Cuda()

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("randn", "ones", "empty"):
            return found

        def made(*sizes, device, **options):
            assert device == "cuda"
            return found(*sizes, **options)

        return made


def test_a_gpu_times_itself_between_two_events():
    def call():
        Event.at += 1.0

    Event.waited = False
    assert span_of(Gpu(), "cuda")(call, 5) == pytest.approx(1e-3)
    assert Event.waited


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU answers, as slow as the processor under it."""
    import time

    from actcalc.answers import device_shares

    machine = Gpu()
    monkeypatch.setattr(Event, "record", lambda self: setattr(self, "recorded", _now()))
    monkeypatch.setattr(device_shares, "require_gpu", lambda hint: machine)
    monkeypatch.setattr(device_shares, "LARGE", SMALL)

    def _now():
        return 1e3 * time.perf_counter()

    return machine


def test_a_whole_calibration_of_a_gpu(gpu, cli, tmp_path):
    path, plain, own = (tmp_path / f"{name}.yaml" for name in ("mine", "plain", "own"))
    given = CPU.model_dump()
    figures = {key: given[key] for key in given if given[key] is not None and key != "name"}
    plain.write_text(yaml.safe_dump(figures), encoding="utf-8")
    own.write_text(yaml.safe_dump({**figures, "efficiency": "mine.yaml"}), encoding="utf-8")
    done = cli("calibrate", "--device", plain, "--save", path, "--json")
    assert done.json["gpu"] == "NVIDIA H100 80GB HBM3"
    assert {sample["kind"] for sample in done.json["samples"]} == KINDS | {"product_fp8"}
    assert any(note.startswith("One GPU: nothing was sent") for note in done.json["notes"])
    shares = parse_overrides([str(path)])
    assert {"gemm", "memory", "attention_forward", "gemm_fp8"} <= set(shares)
    # what was measured changes times: directly, and as the shares of a device of one's own

    def seconds(*words):
        ask = ("llama-3-8b", "--layers", 2, "--policy", "none", "--json", "--device")
        return cli(*ask, *words).json["policies"][0]["step_seconds"]

    slow = seconds(plain, "--efficiency", path)
    assert slow > 3 * seconds(plain)
    assert seconds(own) == pytest.approx(slow)


def test_what_a_gpu_cannot_run_is_left_out_and_said(gpu, monkeypatch):
    from actcalc.answers import device_shares

    def broken(*words):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(device_shares, "products_fp8", broken)
    monkeypatch.setattr(device_shares, "attention", broken)
    found = device_shares.measure_gpu(H100, "bf16")
    assert {share.share for share in found.shares} == {"gemm", "sustained_clock", "memory"}
    said = "could not be measured here: RuntimeError: no kernel image"
    assert [note for note in found.notes if said in note] == [
        f"Products in fp8 {said}", f"Attention {said}"
    ]  # fmt: skip


def test_a_gpu_that_is_full_is_one_clear_error(gpu, monkeypatch):
    from actcalc.answers import device_shares

    monkeypatch.setattr(Cuda, "free", 2**10)
    with pytest.raises(SpecError, match="GiB free, too little"):
        device_shares.measure_gpu(H100, "bf16")


def test_clocks_settle_before_anything_is_timed():
    import time

    begin = time.perf_counter()
    speed.settle(torch, "cpu", torch.float32, replace(SMALL, settling_seconds=0.02))
    assert time.perf_counter() - begin >= 0.02


def test_products_count_a_multiply_and_an_add():
    found = speed.products(torch, "cpu", torch.float32, SMALL)
    assert [sample.shape for sample in found] == list(SMALL.products)
    for sample in found:
        m, n, k = sample.shape
        assert sample.rate == pytest.approx(2 * m * n * k / sample.seconds)


def test_fp8_products_run():
    found = speed.products_fp8(torch, "cpu", SMALL)
    assert {sample.kind for sample in found} == {"product_fp8"}
    assert all(sample.rate > 0 for sample in found)


def test_attention_counts_half_the_scores_and_backward_two_and_a_half_times_that():
    forward, backward = speed.attention(torch, "cpu", torch.float32, SMALL)
    (batch, heads, seq, width) = forward.shape
    flops = 4 * batch * heads * seq * seq * width / 2
    assert forward.rate * forward.seconds == pytest.approx(flops)
    assert backward.rate * backward.seconds == pytest.approx(2.5 * flops)


def test_copies_read_and_write_every_byte():
    for sample in speed.copies(torch, "cpu", SMALL):
        assert sample.rate * sample.seconds == pytest.approx(2 * sample.shape[0])


def test_the_sustained_product_runs_as_long_as_it_is_told():
    import time

    begin = time.perf_counter()
    sample = speed.sustained_product(torch, "cpu", torch.float32, (64, 32, 16), SMALL)
    assert time.perf_counter() - begin >= SMALL.sustained_seconds
    assert sample.kind == "product_sustained"


def test_collectives_run_over_processes():
    found = speed.collectives(torch, "cpu", 2, SMALL)
    assert [sample.kind for sample in found] == ["all_gather", "all_reduce"]
    for sample in found:
        moved = bus_bytes(sample.kind, 2**12, 2)
        assert sample.rate * sample.seconds == pytest.approx(moved)


def test_bus_bytes_are_those_of_a_ring():
    assert bus_bytes("all_gather", 800, 8) == 700
    assert bus_bytes("all_reduce", 800, 8) == 1400
    assert bus_bytes("all_reduce", 800, 1) == 0


def test_what_does_not_fit_is_left_out():
    assert fitting(LARGE, 2**40) == LARGE
    small = fitting(LARGE, 2**31)
    assert set(small.products) < set(LARGE.products)
    assert small.copies
    assert all(2 * size <= 2**30 for size in small.copies)
    assert small.products


def sample(kind, rate, shape=(1, 1, 1)):
    return Sample(kind=kind, shape=shape, seconds=1.0, rate=rate)


H100 = load_device("h100-80gb")


def test_shares_are_the_best_of_their_kind_over_the_peak():
    peak, bandwidth = H100.peak("bf16"), H100.memory_bandwidth_bytes_per_second
    link = H100.intra_node_bandwidth_bytes_per_second
    found = fit_shares(
        [
            sample("product", 0.5 * peak),
            sample("product", 0.75 * peak),
            sample("product_sustained", 0.6 * peak),
            sample("product_fp8", 0.7 * H100.peak("fp8")),
            sample("attention_forward", 0.4 * peak),
            sample("attention_backward", 0.3 * peak),
            sample("copy", 0.9 * bandwidth),
            sample("all_gather", 0.8 * link),
            sample("all_reduce", 1.04 * link),
        ],
        H100,
        "bf16",
    )
    assert {name: round(value, 6) for name, (value, _) in found.items()} == {
        "gemm": 0.75,
        "gemm_fp8": 0.7,
        "sustained_clock": 0.8,
        "attention_forward": 0.4,
        "attention_backward": 0.3,
        "memory": 0.9,
        "communication": 0.8,
        "all_reduce": 1.3,
    }


def test_a_warmer_run_is_no_share_above_one():
    rate = 0.5 * H100.peak("bf16")
    found = fit_shares(
        [sample("product", rate), sample("product_sustained", 1.01 * rate)], H100, "bf16"
    )
    assert found["sustained_clock"][0] == 1.0


def test_a_clock_a_little_above_the_vendors_is_a_share_of_one():
    found = fit_shares([sample("product", 1.03 * H100.peak("bf16"))], H100, "bf16")
    assert found["gemm"][0] == 1.0


def test_faster_than_the_peak_is_the_wrong_device():
    with pytest.raises(SpecError, match="more than the peak of h100-80gb"):
        fit_shares([sample("product", 1.1 * H100.peak("bf16"))], H100, "bf16")
    with pytest.raises(SpecError, match="no known peak in bf16"):
        fit_shares([], load_device("t4"), "bf16")


@pytest.fixture(scope="module")
def result():
    return measured(torch, "cpu", CPU, "fp32", SMALL, ranks=1, gpu="a processor", fp8=True)


def test_a_whole_calibration(result):
    assert {sample.kind for sample in result.samples} == KINDS | {"product_fp8"}
    found = {share.share: share for share in result.shares}
    assert set(found) == {
        "gemm", "gemm_fp8", "sustained_clock", "attention_forward", "attention_backward", "memory"
    }  # fmt: skip
    assert all(0 < share.value <= 1 for share in result.shares)
    assert found["gemm"].before == shares_of(CPU)[0].gemm
    jsonschema.validate(json.loads(json.dumps(result.document())), schema_of("calibrate"))
    (sheet,) = calibrate_sheets(result)
    assert len(sheet.rows) == len(result.shares)


def test_the_file_is_what_efficiency_and_a_device_read(result, tmp_path):
    path = tmp_path / "shares.yaml"
    path.write_text(shares_file(result), encoding="utf-8")
    shares = parse_overrides([str(path)])
    assert shares == {share.share: pytest.approx(share.value, rel=1e-3) for share in result.shares}
    own = CPU.model_copy(update={"efficiency": str(path)})
    given = rates_of(CPU, "fp32", shares)
    assert rates_of(own, "fp32").matrix == given.matrix
    assert rates_of(own, "fp32").memory == given.memory
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert all("a processor" in entry["source"] for key, entry in data.items() if key != "title")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_clear_error(cli, tmp_path):
    done = cli("calibrate", "--save", tmp_path / "shares.yaml")
    assert done.code == 2
    assert done.err.startswith("error: no GPU to run on")
    assert "hint: run it where the GPU is" in done.err
    assert not (tmp_path / "shares.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "int8"), "--precision 'int8' is not measured"),
        (("--device", "h100"), "may be 3 devices"),
        (("--save", "shares.json"), "shares are kept as YAML"),
    ],
)
def test_bad_options(cli, words, message):
    done = cli("calibrate", *words)
    assert done.code == 2
    assert message in done.err


class OneGpu:
    """A machine whose GPU answers, for what is asked before anything is timed."""

    def __init__(self, name):
        self.name = name

    def get_device_name(self, index):
        return self.name

    def device_count(self):
        return 1


@pytest.mark.parametrize(
    ("name", "message"), [("Unheard X1", "of which no preset"), ("", "of which")]
)
def test_a_gpu_without_a_preset_needs_its_peaks(cli, monkeypatch, name, message):
    from types import SimpleNamespace

    from actcalc.answers import device_shares

    machine = SimpleNamespace(cuda=OneGpu(name))
    monkeypatch.setattr(device_shares, "require_gpu", lambda hint: machine)
    done = cli("calibrate")
    assert done.code == 2
    assert message in done.err
    monkeypatch.setattr(device_shares, "measure_gpu", lambda *words: FAKE)
    assert cli("calibrate", "--device", "h100-80gb").code == 0


FAKE = DeviceShares(
    device=H100.model_dump(),
    gpu="NVIDIA H100 80GB HBM3",
    gpus=1,
    precision="bf16",
    shares=(MeasuredShare(share="gemm", value=0.7, before=0.8, how="a sample"),),
    samples=(),
    notes=(),
)


def test_save_writes_the_file_beside_the_answer(cli, monkeypatch, tmp_path):
    from types import SimpleNamespace

    from actcalc.answers import device_shares

    machine = SimpleNamespace(cuda=OneGpu("NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(device_shares, "require_gpu", lambda hint: machine)
    asked = []
    monkeypatch.setattr(device_shares, "measure_gpu", lambda *words: asked.append(words) or FAKE)
    path = tmp_path / "shares.yaml"
    done = cli("calibrate", "--save", path, "--precision", "fp16", "--json")
    assert done.json["shares"][0]["value"] == 0.7
    assert asked == [(H100, "fp16", None)]
    assert parse_overrides([str(path)]) == {"gemm": 0.7}


def test_more_gpus_than_there_are_is_an_error(monkeypatch):
    from types import SimpleNamespace

    from actcalc.answers import device_shares

    machine = SimpleNamespace(cuda=OneGpu("x"))
    monkeypatch.setattr(device_shares, "require_gpu", lambda hint: machine)
    with pytest.raises(SpecError, match="--gpus 2: this machine has 1"):
        device_shares.measure_gpu(H100, "bf16", 2)
