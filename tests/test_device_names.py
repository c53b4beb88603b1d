"""What --device takes: names, other names, clouds' instance types, files; figures beside it."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import yaml

from actcalc.cli.app import command_names
from actcalc.cli.schema import schema_of
from actcalc.errors import SpecError
from actcalc.io import devices, presets
from actcalc.io.devices import find_device, load_device, read_device
from actcalc.specs.device import Device

NAMES = presets.names("devices")


def all_names():
    """Every other name of every device, a pattern as one of the types that it stands for."""
    for name in NAMES:
        preset = presets.load("devices", name)
        for other in (*preset.aliases, *preset.instances):
            yield name, re.sub(r"\*", "48xlarge" if "." in other else "8g", other)


@pytest.mark.parametrize(("name", "other"), list(all_names()))
def test_every_other_name_resolves_to_its_device_alone(name, other):
    key = devices._key(other)
    found = [
        p.name for p, keys in devices._names() if any(devices.fnmatchcase(key, k) for k in keys)
    ]
    assert found == [name]
    assert find_device(other) == name
    assert load_device(other).name == name
    assert other not in command_names()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a6000", "rtx-a6000"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("H200", "h200"),
        ("p5.48xlarge", "h100-80gb"),
        ("p5en.48xlarge", "h200"),
        ("p4d.24xlarge", "a100-40gb"),
        ("p4de.24xlarge", "a100-80gb"),
        ("g5.xlarge", "a10g"),
        ("g6.xlarge", "l4"),
        ("g6e.xlarge", "l40s"),
        ("g4dn.xlarge", "t4"),
        ("trn1n.32xlarge", "trainium-1"),
        ("a3-highgpu-8g", "h100-80gb"),
        ("a3-ultragpu-8g", "h200"),
        ("a2-highgpu-1g", "a100-40gb"),
        ("a2-ultragpu-4g", "a100-80gb"),
        ("Standard_ND96isr_H100_v5", "h100-80gb"),
        ("Standard_NC40ads_H100_v5", "h100-nvl"),
        ("Standard_NC24ads_A100_v4", "a100-pcie-80gb"),
        ("standard_nc16as_t4_v3", "t4"),
        # torch.cuda.get_device_name
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        # words of the full name
        ("b200-sxm", "b200"),
        ("h200 sxm", "h200"),
        ("a100 sxm 80", "a100-80gb"),
    ],
)
def test_common_names_and_instance_types(text, name):
    assert find_device(text) == name


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("h100", {"h100-80gb", "h100-pcie", "h100-nvl"}),
        ("A100", {"a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"}),
        ("v100", {"v100-16gb", "v100-32gb", "v100-pcie-16gb", "v100-pcie-32gb"}),
        ("gaudi", {"gaudi-2", "gaudi-3"}),
        ("a100-pcie", {"a100-pcie-40gb", "a100-pcie-80gb"}),
        ("A100 SXM", {"a100-40gb", "a100-80gb"}),
        ("v100-pcie", {"v100-pcie-16gb", "v100-pcie-32gb"}),
    ],
)
def test_a_name_of_several_devices_is_an_error_that_lists_them(cli, text, members):
    done = cli("memory", "gpt2", "--device", text)
    assert done.code == 2
    assert done.err.splitlines()[0] == f"error: device '{text}' may be {len(members)} devices"
    hint = done.err.splitlines()[1]
    assert {name for name in NAMES if re.search(rf"[ ,]{name} \(", hint)} == members


@pytest.mark.parametrize(
    "name", sorted({presets.load("devices", name).family for name in NAMES} - {""})
)
def test_a_family_has_members_and_no_device_is_called_so(name):
    assert len(devices.named_devices(name)) > 1
    assert name not in NAMES


@pytest.mark.parametrize(
    ("text", "near"),
    [("l5", ""), ("t5", ""), ("x4", ""), ("h100-80g", "h100-80gb"), ("h20x", "h20")],
)
def test_only_near_misses_are_suggested(text, near):
    with pytest.raises(SpecError, match="unknown device") as caught:
        load_device(text)
    assert (caught.value.hint == f"did you mean {near}?") == bool(near)
    assert ("presets list devices" in caught.value.hint) != bool(near)


def test_a_plain_name_reads_one_preset(monkeypatch):
    read = []
    load = presets.load
    monkeypatch.setattr(presets, "load", lambda *words: read.append(words) or load(*words))
    load_device("h100-80gb")
    assert read == [("devices", "h100-80gb")]


@pytest.mark.parametrize("name", NAMES)
def test_what_show_prints_reads_back_to_the_same_device(cli, tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    path.write_text(cli("presets", "show", name).out, encoding="utf-8")
    assert read_device(path) == load_device(name)
    assert load_device(str(path)) == load_device(name)
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema_of("device"))
    preset, again = presets.load("devices", name), yaml.safe_load(path.read_text(encoding="utf-8"))
    assert presets.parse("devices", name, again).sources == preset.sources


def test_show_writes_the_file_and_takes_other_names(cli, tmp_path):
    path = tmp_path / "mine.yaml"
    assert cli("presets", "show", "a6000", "-o", path).code == 0
    assert read_device(path) == load_device("rtx-a6000").model_copy(update={"name": "mine"})
    assert cli("presets", "show", "a6000", "--json").json["name"] == "rtx-a6000"
    assert cli("presets", "show", "h100").code == 2
    assert "source" in cli("presets", "show", "a6000", "--format", "table").out


MINE = {
    "memory_nominal_bytes": "80e9",
    "peak_flops": {"bf16": "300e12"},
    "memory_bandwidth_bytes_per_second": "2e12",
}


def write(tmp_path, fields, name="mine.yaml"):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_the_least_that_a_file_must_say(tmp_path):
    found = read_device(write(tmp_path, MINE))
    assert found == Device(
        name="mine",
        title="mine",
        memory_nominal_bytes=80_000_000_000,
        peak_flops={"bf16": 300e12},
        memory_bandwidth_bytes_per_second=2e12,
    )


def test_a_file_is_a_device_on_every_command(cli, tmp_path):
    path = write(tmp_path, MINE)
    found = cli("memory", "gpt2", "--device", path, "--json").json
    assert found["device"]["name"] == "mine"
    assert found["fits"] is True
    run = tmp_path / "run.yaml"
    run.write_text(f"model: gpt2\ndevice: {path}\n", encoding="utf-8")
    assert cli(run, "--json").json["device"] == found["device"]
    used = cli("mfu", "gpt2", "--step-time", 1, "--gpus", 1, "--device", path, "--json").json
    assert used["peak_flops_per_second"] == 300e12


def test_a_file_may_name_its_shares(cli, tmp_path):
    slow = write(tmp_path, {"gemm": {"value": 0.2, "source": "measured"}, "memory": 0.3}, "s.yaml")
    path = write(tmp_path, {**MINE, "efficiency": "s.yaml"})
    plain = write(tmp_path, MINE, "plain.yaml")
    ask = ("llama-3-8b", "--layers", 2, "--policy", "none", "--json")

    def seconds(*words):
        return cli(*ask, *words).json["policies"][0]["step_seconds"]

    assert seconds("--device", path) == seconds("--device", plain, "--efficiency", slow)
    assert seconds("--device", path) > 2 * seconds("--device", plain)
    assert seconds("--device", path, "--efficiency", "gemm=0.9") < seconds("--device", path)
    wrong = write(tmp_path, {**MINE, "efficiency": "none-such"}, "wrong.yaml")
    done = cli(*ask, "--device", wrong)
    assert done.code == 2
    assert "device wrong: efficiency 'none-such'" in done.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": "lots"}, "memory_bytes is 'lots'"),
        ({"memory": 1}, "unknown key 'memory'"),
        ({"peak_flops": {"int8": 1e12}}, "peak_flops"),
        ({"peak_flops": 3e14}, "peak_flops"),
        ({"memory_nominal_bytes": -1}, "memory_nominal_bytes is -1"),
        ({"memory_bandwidth_bytes_per_second": None}, "memory_bandwidth_bytes_per_second"),
        ({"peak_flops": {"bf16": -1.0}}, "bf16 is -1"),
    ],
)
def test_a_wrong_file_is_one_clear_error(cli, tmp_path, change, words):
    done = cli("memory", "gpt2", "--device", write(tmp_path, {**MINE, **change}))
    assert done.code == 2
    assert words in done.err
    assert done.err.count("error:") == 1
    assert "hint: " in done.err


@pytest.mark.parametrize(
    "line",
    [
        "device: {name: t4}",
        "device: 7",
        "device: []",
        "device: ''",
        "framework: [megatron]",
        "framework: 1",
        "policies: 3",
        "policies: {none: 1}",
        "policies: [[none]]",
    ],
)
def test_what_is_no_name_in_a_run_file_is_one_clear_error(cli, tmp_path, line):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\n{line}\n", encoding="utf-8")
    done = cli(path)
    assert done.code == 2
    first, second, *rest = done.err.splitlines()
    assert first.startswith(f"error: {path}: {line.split(':')[0]} is ")
    assert second.startswith("hint: write ")
    assert not rest


def test_memory_and_peak_beside_a_device(cli, tmp_path):
    for device in ("t4", write(tmp_path, MINE)):
        found = cli("memory", "gpt2", "--device", device, "--device-memory", "1GiB", "--json").json
        assert found["device"]["memory_bytes"] == 2**30
        assert found["fits"] is False
        assert any("1,073,741,824" in note for note in found["notes"])
    found = cli("gpt2", "--device", "t4", "--peak", "50TFLOPS", "--json").json
    assert found["device"]["peak_flops"]["bf16"] == 50e12
    assert found["device"]["peak_flops"]["fp16"] == 65e12
    assert any("dense bf16 peak of t4 is taken as 50 TFLOP/s" in note for note in found["notes"])
    found = cli("gpt2", "--device", "l4", "--precision", "fp16", "--peak", "0.05 PFLOP/s", "--json")
    assert found.json["device"]["peak_flops"]["fp16"] == 50e12
    fp8 = ("llama-3-8b", "--framework", "megatron", "--precision", "fp8", "--device", "h200")
    peaks = cli(*fp8, "--peak", "1e15", "--json").json["device"]["peak_flops"]
    assert peaks == {**load_device("h200").peak_flops, "fp8": 1e15}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory", "gpt2", "--device-memory", "8GiB"), "is a figure of a device"),
        (("gpt2", "--peak", "8TFLOPS"), "is a figure of a device"),
        (("memory", "gpt2", "--device", "t4", "--peak", "8TFLOPS"), "memory does not depend"),
        (("breakdown", "gpt2", "--peak", "8TFLOPS"), "breakdown does not depend"),
        (("breakdown", "gpt2", "--device-memory", "8GiB"), "breakdown does not depend"),
        (("explain", "34", "--peak", "8TFLOPS"), "does not depend"),
        (("explain", "overhead", "--device-memory", "8GiB"), "does not depend"),
        (("measure", "gpt2", "--device-memory", "8GiB"), "a measurement uses what is here"),
        (("gpt2", "--device", "t4", "--device-memory", "8"), "no unit"),
        (("gpt2", "--device", "t4", "--peak", "8"), "which no device has"),
        (("gpt2", "--device", "t4", "--peak", "8 furlongs"), "does not read"),
        (("gpt2", "--device", ""), "unknown device ''"),
    ],
)
def test_a_figure_without_effect_or_sense_is_refused(cli, words, message):
    done = cli(*words)
    assert done.code == 2
    assert message in done.err


def test_devices_are_listed_side_by_side(cli):
    rows = cli("presets", "list", "devices", "--format", "csv").out.splitlines()
    assert len(rows) == len(NAMES) + 1
    assert rows[0].split(",")[:5] == [
        "name", "usable_bytes", "memory_bandwidth_bytes_per_second", "bf16", "fp8"
    ]  # fmt: skip
    found = json.loads(cli("presets", "list", "devices", "--json").out)["presets"]
    assert [entry["name"] for entry in found] == list(NAMES)
    t4 = next(entry for entry in found if entry["name"] == "t4")
    assert t4["device"]["peak_flops"]["fp16"] == 65e12
    assert "g4dn.*" in t4["aliases"]
    models = cli("presets", "list", "models", "--json").json["presets"]
    assert all(entry["device"] is None for entry in models)
