"""``actcalc measure``, the files it keeps, and ``compare`` of such a file."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import jsonschema
import pytest
import yaml

from actcalc.answers.measure.pairs import pair
from actcalc.answers.measure.prediction import Expected
from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.hf import read_config
from actcalc.io.hub.write import differences, with_changes, without_dropout, write_config
from actcalc.io.runs import load_run
from tests.conftest import load_data

BLOCK = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.ln, self.up, self.act = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(4 * h, h), nn.Dropout(0.1))

    def forward(self, x):
        return x + self.mlp(self.act(self.up(self.ln(x))))


def factory():
    return Block(64).to(torch.bfloat16), torch.empty(2, 32, 64, dtype=torch.bfloat16)
"""
TOKENS, H = 2 * 32, 64
WITHOUT_TYPE = {
    "gpt-22b", "gpt3-175b", "gpt-530b", "gpt-1t",  # of the paper, no model on the hub
}  # fmt: skip
# published code, in keys of its own; as many heads as the width holds; a tower
UNSAID = {
    "chatglm3-6b", "mamba2-130m", "llava-1.5-7b", "llava-1.5-13b", "qwen2.5-vl-7b", "qwen3-vl-4b",
}  # fmt: skip
WITHOUT_CLASS = {"nemotron-super-49b"}  # transformers does not hold its code
# two tables of rotations, one for each kind of layer: whose is whose no shape tells
TWO_TABLES = {"deepseek-v4-flash", "mimo-v2-flash", "modernbert-base", "modernbert-large"}
UNKNOWN_TO_TRANSFORMERS = {"kimi-k2", "kimi-k2.5", "mimo-7b", "internlm2-7b", "deepseek-moe-16b"}
READS_DATA = {"dbrx"}  # its experts look for the tokens they were given


@pytest.fixture
def torch():
    pytest.importorskip("transformers", reason="needs actcalc[torch]")
    return pytest.importorskip("torch", reason="needs actcalc[torch]")


@pytest.fixture
def block(tmp_path, torch):
    path = tmp_path / "block.py"
    path.write_text(BLOCK)
    return f"{path}:factory"


@pytest.fixture
def llama(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


# Presets as configurations


@pytest.mark.parametrize("name", presets.names("models"))
def test_preset_becomes_a_config_that_reads_back(name):
    model = load_run(name).model
    if name in WITHOUT_TYPE | UNSAID | WITHOUT_CLASS:
        needs = "measure has no class" if name in WITHOUT_CLASS else r"needs a config\.json"
        with pytest.raises(SpecError, match=needs):
            write_config(model)
        return
    config = write_config(model)
    assert differences(config, model) == ()
    json.dumps(config, allow_nan=False)


@pytest.mark.parametrize("name", presets.names("models"))
def test_transformers_understands_that_config(name, torch):
    """Its own configuration class, given the keys, says the same model."""
    from actcalc.measure.hf import build_config

    if name in WITHOUT_TYPE | UNSAID | WITHOUT_CLASS:
        pytest.skip("no configuration")
    model = load_run(name).model
    if name in UNKNOWN_TO_TRANSFORMERS:
        with pytest.raises(SpecError, match="does not know model_type"):
            build_config(write_config(model))
        return
    assert differences(build_config(write_config(model)).to_dict(), model) == ()


SHORT = {"seq": 128, "micro_batch": 2, "precision": "bf16"}


@pytest.mark.parametrize("name", presets.names("models"))
def test_presets_are_predicted_to_the_byte(name, torch):
    """Every preset that transformers can build: three layers, embedding, head and parameters."""
    from actcalc.answers.measure import measure_run

    if name in WITHOUT_TYPE | UNSAID | WITHOUT_CLASS | UNKNOWN_TO_TRANSFORMERS | READS_DATA:
        pytest.skip("transformers cannot build or trace it")
    model = load_run(name).model
    length = {"seq": min(128, model.max_positions or 128)}
    own = model.patches or "whisper" in name  # as long as an image, or a sound, is
    work = {"precision": "bf16"} if own else {**SHORT, **length}
    if load_run(name).workload.attention == "flash":
        work = {**work, "attention": "sdpa"}
    layers = min(3, model.layers)
    run = load_run(name, framework="transformers", model={"layers": layers}, workload=work)
    result, _ = measure_run(run, write_config(model), layers=layers)
    if result.predicted_bytes is None:
        assert model.encoder_layers, result.notes
        assert "No prediction" in result.notes[0]
        return
    assert result.exact, result
    assert name in TWO_TABLES or all(t.predicted_tensor and t.op for t in result.tensors)


def test_set_reaches_a_config_of_the_users():
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 99}
    config["n_positions"] = 32
    old = load_run("gpt2", model=read_config(config).fields).model
    new = old.model_copy(update={"hidden": 128, "ffn": 512, "head_dim": 32})
    changed = with_changes(config, old, new)
    assert changed["n_embd"] == 128
    assert differences(changed, new) == ()
    assert with_changes(config, old, old) == config


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {}),
        ("bert-base", {}),
        ("opt-125m", {}),
        ("t5-small", {}),
        ("phi-2", {"resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.1}),
        ("mpt-7b", {"attn_config": {"attn_pdrop": 0.1}}),
    ],
)
def test_no_dropout_reaches_every_rate(name, changes):
    config = write_config(load_run(name).model) | changes
    before, after = read_config(config).fields, read_config(without_dropout(config)).fields
    rates = [key for key in before if key.endswith("_dropout")]
    assert any(before[rate] for rate in rates)
    assert not any(after[rate] for rate in rates)


def test_no_dropout_reaches_a_nested_text_model():
    text = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 99,
        "num_hidden_layers": 2, "num_attention_heads": 4, "attention_dropout": 0.1,
    }  # fmt: skip
    config = {"model_type": "qwen2_5_vl", "text_config": text}
    assert read_config(config).fields["attention_dropout"] == 0.1
    assert read_config(without_dropout(config)).fields["attention_dropout"] == 0.0
    assert text["attention_dropout"] == 0.1


# The command


def test_json(cli, llama, torch):
    outcome = cli("measure", llama, "--seq", 96, "--json", "--check")
    data = outcome.json
    assert outcome.code == 0
    assert data["schema"] == "actcalc/measure/1"
    assert data["difference_bytes"] == 0 == data["measured_bytes"] - data["predicted_bytes"]
    parts = ("all_layers", "embedding", "head")
    for side in ("measured_bytes", "predicted_bytes"):
        assert sum(data[part][side] for part in parts) == data[side]
        groups = sum(group["count"] * group[side] for group in data["layers"])
        assert groups == data["all_layers"][side]
        assert sum(t[side] for t in data["tensors"]) == data["per_layer"][side]
    assert data["parameters"]["difference"] == 0
    assert data["parameters"]["measured"] > 1000 * 64
    assert data["middle_layer"] == 2
    assert {t["module"].split(".")[0] for t in data["tensors"]} == {
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"
    }  # fmt: skip


def test_schema_of_the_json(cli, llama, torch):
    schema = cli("schema", "measure").json
    jsonschema.validate(cli("measure", llama, "--seq", 32, "--json").json, schema)


def test_schemas_are_listed(cli):
    for name in ("measure", "compare-layer"):
        schema = cli("schema", name).json
        assert schema["properties"]["schema"]["const"] == f"actcalc/{name}/1"


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits(cli, llama, torch, columns):
    outcome = cli("measure", llama, "--seq", 96, columns=columns)
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= columns
    for word in ("dense layer 0", "all layers", "embedding", "head and loss", "parameters"):
        assert word in outcome.out
    assert "predicts every part to the byte" in outcome.out


RECORDED = {
    record["case"]: record for record in load_data("transformers_saved_bytes.json")["records"]
}


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("gpt2-medium b8 s1024 bf16 eager", ("gpt2-medium", "--attention", "eager")),
        ("llama-3-8b b1 s4096 bf16 sdpa", ("llama-3-8b", "--seq", 4096)),
        ("llama-3-8b b1 s4096 bf16 sdpa ckpt", ("llama-3-8b", "--seq", 4096, "--policy", "full")),
    ],
)
def test_recorded_cases(cli, torch, case, arguments):
    record = RECORDED[case]
    data = cli("measure", *arguments, "--layers", 4, "--precision", "bf16", "--json").json
    assert data["per_layer"]["measured_bytes"] == record["per_layer_bytes"]
    assert data["head"]["measured_bytes"] == record["head_bytes"]
    assert data["per_layer"]["difference_bytes"] == data["head"]["difference_bytes"] == 0


def test_options_change_both_sides(cli, llama, torch):
    plain = cli("measure", llama, "--seq", 96, "--json").json
    full = cli("measure", llama, "--seq", 96, "--policy", "full", "--json").json
    eager = cli("measure", llama, "--seq", 96, "--attention", "eager", "--json").json
    two = cli("measure", llama, "--seq", 96, "--micro-batch", 2, "--json").json
    wide = cli("measure", llama, "--seq", 96, "--set", "ffn=320", "--json").json
    fewer = cli("measure", llama, "--seq", 96, "--layers", 2, "--json").json
    for data in (plain, full, eager, two, wide, fewer):
        assert data["difference_bytes"] == 0, data["notes"]
        assert data["parameters"]["difference"] == 0
    assert full["per_layer"]["measured_bytes"] == 96 * 64 * 2
    assert full["checkpointing"]
    assert eager["per_layer"]["measured_bytes"] > plain["per_layer"]["measured_bytes"]
    assert two["measured_bytes"] > 1.9 * plain["measured_bytes"]
    assert wide["measured_bytes"] > plain["measured_bytes"]
    assert sum(group["count"] for group in fewer["layers"]) == 2


def test_no_dropout(cli, torch):
    arguments = ("measure", "gpt2", "--layers", 2, "--seq", 64, "--json")
    with_masks, without = cli(*arguments).json, cli(*arguments, "--no-dropout").json
    assert with_masks["dropout"]
    assert not without["dropout"]
    assert without["measured_bytes"] < with_masks["measured_bytes"]
    assert without["difference_bytes"] == with_masks["difference_bytes"] == 0


def test_a_difference_is_shown_and_checked(cli, llama, torch, monkeypatch):
    """A prediction that is 8 bytes off is said to be, and --check answers no."""
    from dataclasses import replace

    from actcalc.answers import measure as measured

    honest = measured.predict

    def off(run, policy):
        found = honest(run, policy)
        middle = [replace(found.middle[0], bytes=found.middle[0].bytes + 8), *found.middle[1:]]
        return replace(found, layers=tuple(size + 8 for size in found.layers), middle=middle)

    monkeypatch.setattr(measured, "predict", off)
    outcome = cli("measure", llama, "--seq", 96, "--check")
    assert outcome.code == 1
    assert "keeps 32 B less than the transformers profile says" in outcome.out
    assert "2 tensors without a partner" in outcome.out
    assert cli("measure", llama, "--seq", 96).code == 0


def test_mask_given_to_every_checkpoint_is_named(cli, torch):
    """Eager attention's causal mask is kept by checkpoints; it is measured, or predicted too."""
    arguments = ("gpt2", "--layers", 2, "--seq", 64, "--micro-batch", 1, "--policy", "full")
    data = cli("measure", *arguments, "--json").json
    assert data["difference_bytes"] == 0 or any("a mask" in note for note in data["notes"])
    assert data["per_layer"]["difference_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["neither"]),
        (("llama-3-8b", "--module", "x.py:f"), ["both"]),
        (("llama-3-8b", "--tp", 2), ["tp 2"]),
        (("llama-3-8b", "--dp", 2), ["dp 2", "one GPU's model"]),
        (("llama-3-8b", "--policy", "selective"), ["none and full", "selective"]),
        (("llama-3-8b", "--attention", "flash"), ["flash", "sdpa"]),
        (("llama-3-8b", "--precision", "fp8"), ["fp8"]),
        (("llama-3-8b", "--framework", "megatron"), ["not megatron"]),
        (("llama-3-8b", "--device", "h100-80gb"), ["h100-80gb", "--device cuda"]),
        (("mixtral-8x7b", "--set", "moe_imbalance=2"), ["moe_imbalance"]),
        (("vit-b-16", "--seq", 100), ["197"]),
        (("gpt3-175b",), ["needs a config.json"]),
        (("no-such-model",), ["no-such-model"]),
        (("--module", "block.py"), ["path.py:factory"]),
        (("--module", "missing.py:factory"), ["missing.py"]),
        (("--module", "x.py:f", "--seq", 5), ["--seq"]),
        (("--module", "x.py:f", "--precision", "bf16"), ["bf16"]),
        (("--module", "x.py:f", "--check"), ["--check"]),
        (("llama-3-8b", "--policy", "full", "--save", "x.json"), ["--save"]),
    ],
)
def test_refusals(cli, torch, arguments, words):
    outcome = cli("measure", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    first, second = outcome.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    for word in words:
        assert word in outcome.err


def test_cuda_without_a_gpu(cli, llama, torch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome = cli("measure", llama, "--device", "cuda")
    assert outcome.code == 2
    assert "no GPU to run on" in outcome.err


def test_cuda(cli, llama, torch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    step = cli("measure", llama, "--device", "cuda", "--seq", 512, "--json").json["gpu"]
    assert step["kept_bytes"] == step["after_forward_bytes"] - step["before_bytes"] > 0
    assert step["peak_reserved_bytes"] >= step["peak_allocated_bytes"] > step["before_bytes"]


def test_real_step_is_shown(cli, llama, torch, monkeypatch):
    """What the allocator counted reaches the table and the JSON (here without a GPU)."""
    measure = import_module("actcalc.measure")
    from actcalc.measure import CudaStep

    counted = CudaStep(
        device="Some GPU", before_bytes=100, after_forward_bytes=1_100,
        peak_allocated_bytes=2_000, peak_reserved_bytes=3_000,
    )  # fmt: skip
    monkeypatch.setattr(measure, "measure_cuda", lambda *_, **__: counted)
    arguments = ("measure", llama, "--device", "cuda", "--seq", 96)
    step = cli(*arguments, "--json").json["gpu"]
    assert step["kept_bytes"] == 1_000
    assert step["peak_reserved_bytes"] == 3_000
    assert "One real step on Some GPU" in cli(*arguments).out


@pytest.mark.parametrize("arguments", [("llama-3-8b",), ("--module", "BLOCK")])
def test_without_torch(cli, tmp_path, monkeypatch, arguments):
    """A user without the extra is told how to get it."""
    path = tmp_path / "block.py"
    path.write_text(BLOCK)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    given = [f"{path}:factory" if word == "BLOCK" else word for word in arguments]
    outcome = cli("measure", *given)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "PyTorch" in outcome.err.splitlines()[0]
    hint = outcome.err.splitlines()[1]
    assert hint.startswith("hint: ")
    assert hint.endswith("[torch]' (a torch for CPUs is enough)")


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from actcalc.cli.app import run; run(['measure', '--help']);"
        "print([m for m in ('pydantic', 'numpy', 'torch', 'transformers') if m in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_type_that_no_graph_describes(cli, torch, tmp_path):
    """What compare refuses is measured without a prediction."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    path.write_text(json.dumps({"model_type": "diffllama", **sizes}), encoding="utf-8")
    assert cli("compare", path).code == 2
    data = cli("measure", path, "--layers", 2, "--seq", 64, "--json").json
    assert data["predicted_bytes"] is None
    assert data["measured_bytes"] > 0
    assert "difference of two softmaxes" in " ".join(data["notes"])
    assert cli("measure", path, "--layers", 2, "--no-dropout").code == 2
    assert "nothing predicts it" in cli("measure", path, "--layers", 2, "--seq", 64).out


# A module of the user's, kept in a file


def test_module(cli, block):
    data = cli("measure", "--module", block, "--json").json
    assert data["predicted_bytes"] is None
    assert data["difference_bytes"] is None
    # Input, statistics, norm's output, GELU's input and output, and the dropout's mask.
    kept = 2 * TOKENS * H + 2 * 4 * TOKENS + 2 * TOKENS * H + 2 * (2 * TOKENS * 4 * H) + TOKENS * H
    assert data["measured_bytes"] == kept == sum(t["measured_bytes"] for t in data["tensors"])
    assert data["parameters"]["measured"] == 2 * H + 4 * H * H + 4 * H + 4 * H * H + H


def test_module_under_autocast(cli, block):
    plain = cli("measure", "--module", block, "--json").json
    mixed = cli("measure", "--module", block, "--precision", "amp-bf16", "--json").json
    assert mixed["precision"] == "amp-bf16"
    assert plain["precision"] == "bfloat16"


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_saved_layer_is_compared(cli, block, tmp_path, ending):
    path = tmp_path / f"block.{ending}"
    saved = cli("measure", "--module", block, "--save", path, "--json")
    assert saved.code == 0
    assert str(path) in saved.err
    outcome = cli("compare", path, "--json")
    assert outcome.code == 0
    data = outcome.json
    assert data["schema"] == "actcalc/compare-layer/1"
    by_name = {policy["policy"]: policy for policy in data["policies"]}
    assert list(by_name) == ["none", "ln", "up", "act", "mlp", "mlp.0", "mlp.1", "full"]
    assert by_name["none"]["stored_bytes"] == saved.json["measured_bytes"]
    assert by_name["none"]["recompute_flops"] == 0
    assert by_name["full"]["stored_bytes"] == 2 * TOKENS * H
    flops = 2 * TOKENS * H * 4 * H
    assert by_name["up"]["recompute_flops"] == by_name["mlp"]["recompute_flops"] == flops
    assert by_name["full"]["recompute_flops"] == data["forward_flops"] == 2 * flops
    assert by_name["full"]["recompute_forward_ratio"] == 1
    # A checkpointed mlp keeps GELU's output, which it reads, and no mask.
    assert by_name["mlp"]["stored_bytes"] == by_name["none"]["stored_bytes"] - TOKENS * H


def test_saved_layer_of_a_model(cli, llama, tmp_path, torch):
    path = tmp_path / "layer.json"
    data = cli("measure", llama, "--seq", 96, "--save", path, "--json").json
    three = cli(path, "--layers", 3, "--policy", "none,mlp+self_attn", "--json").json
    none, both = three["policies"]
    assert none["stored_bytes_per_layer"] == data["per_layer"]["measured_bytes"]
    assert none["stored_bytes"] == 3 * none["stored_bytes_per_layer"]
    assert both["modules"] == ["mlp", "self_attn"]
    assert 0 < both["saved_ratio"] < 1


def test_saved_layer_table(cli, block, tmp_path):
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    outcome = cli(path)
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "a measured Block" in outcome.out


def test_saved_layer_is_planned(cli, block, tmp_path):
    """The keys of a run's plan; a budget too small exits with 1."""
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    free = cli("plan", path, "--layers", 4, "--frontier", "--points", 5, "--json").json
    assert free["schema"] == "actcalc/plan-layer/1"
    assert free["cost_flops"] == free["lower_bound"] == 0
    assert "cost_seconds" not in free
    prices = [point["cost_flops"] for point in free["frontier"]]
    assert prices == sorted(prices, reverse=True)
    middle = sum(point["memory_bytes"] for point in free["frontier"][:2]) // 2
    outcome = cli("plan", path, "--layers", 4, "--memory", middle, "--json")
    assert outcome.code == 0
    data = outcome.json
    keys = {"feasible", "optimal", "cost_flops", "lower_bound", "stored_bytes", "peak_bytes"}
    assert keys < data.keys()
    assert data["feasible"] is data["optimal"] is data["activations_only"] is True
    assert data["peak_bytes"] <= middle
    (stage,) = data["stages"]
    assert sum(layer["count"] for layer in stage["layers"]) == 4
    assert any("up.addmm" in layer["recompute"] for layer in stage["layers"])
    assert cli("plan", path, "--memory", "10B").code == 1
    pasted = cli("plan", path, "--layers", 4, "--memory", middle, "--emit", "torch")
    assert pasted.code == 0
    compile(pasted.out, "pasted", "exec")
    table = cli("plan", path, "--layers", 4, "--memory", middle)
    assert max(map(len, table.out.splitlines())) <= 80
    assert "measured Block" in table.out
    assert "--activations-only is" in table.out


@pytest.mark.parametrize(
    "wrong",
    [("--tp", 2), ("--seq", 8), ("--policy", "full"), ("--layers", 0), ("--device", "h100-80gb"),
     ("--same-on-all-stages",), ("--offload",), ("--emit", "megatron"), ("--points", 3),
     ("--method", "sqrt", "--semantics", "module")],
)  # fmt: skip
def test_plans_of_a_layer_refuse_what_they_cannot_heed(cli, block, tmp_path, wrong):
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    assert cli("plan", path, "--memory", "1GB").code == 0
    outcome = cli("plan", path, "--memory", "1GB", *wrong)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "hint: " in outcome.err


def test_files_of_the_first_schema_compare_but_do_not_plan(cli, block, tmp_path):
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    expected = cli("compare", path, "--json").json["policies"]
    data = json.loads(path.read_text())
    data["schema"] = "actcalc/measured-layer/1"
    del data["ops"], data["ops_to_last_save"]
    path.write_text(json.dumps(data))
    assert cli("compare", path, "--json").json["policies"] == expected
    outcome = cli("plan", path, "--memory", "1GB")
    assert outcome.code == 2
    assert "without its ops" in outcome.err
    assert "measure it again" in outcome.err


def test_only_compare_and_plan_take_a_measured_layer(cli, block, tmp_path):
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    for arguments in (("breakdown", path), ("measure", path)):
        outcome = cli(*arguments)
        assert outcome.code == 2
        assert "measured layer 'Block'" in outcome.err
    for wrong in (("--tp", 2), ("--seq", 8), ("--policy", "nope"), ("--layers", 0)):
        assert cli("compare", path, *wrong).code == 2


def test_broken_layer_files(cli, block, tmp_path):
    path = tmp_path / "block.yaml"
    cli("measure", "--module", block, "--save", path)
    content = yaml.safe_load(path.read_text())
    content["modules"][0]["inputs"] = [10_000]
    path.write_text(yaml.safe_dump(content))
    outcome = cli("compare", path)
    assert outcome.code == 2
    assert "10000" in outcome.err


@pytest.mark.parametrize(
    ("change", "said"),
    [(lambda d: d["ops"][0]["inputs"].append(10_000), "10000"),
     (lambda d: d.update(ops_to_last_save=99), "ops_to_last_save"),
     (lambda d: d["storages"][0].update(bytes=-1), "negative"),
     (lambda d: d["storages"].append(d["storages"][0]), "same id"),
     (lambda d: d.update(schema="actcalc/measured-layer/3"), "no measured layer"),
     (lambda d: d["ops"][0].update(flops=3), "ops")],
)  # fmt: skip
def test_broken_ops_are_refused(cli, block, tmp_path, change, said):
    path = tmp_path / "block.json"
    cli("measure", "--module", block, "--save", path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    outcome = cli("plan", path, "--memory", "1GB")
    assert outcome.code == 2
    assert said in outcome.err


def test_layer_files_are_read_with_care(cli, tmp_path):
    """No aliases that grow, no key given twice, nothing nested without end."""
    head = "schema: actcalc/measured-layer/2\n"
    for text in ("a: &a [1, 2]\nb: [*a, *a]\n", "name: one\nname: two\n", "a: " + "[" * 9999):
        path = tmp_path / "layer.yaml"
        path.write_text(head + text)
        outcome = cli("compare", path)
        assert outcome.code == 2
        assert "internal error" not in outcome.err


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_a_broken_package_is_no_missing_one(monkeypatch, name):
    from actcalc.errors import MissingExtraError
    from actcalc.measure.fake_cuda import imported

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="not installed"):
        imported(name, "this needs it")

    def broken(*_):
        raise ImportError("cannot import name 'x' from 'y'")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(SpecError, match="cannot be imported: ImportError: cannot import") as caught:
        imported(name, "this needs it")
    assert not isinstance(caught.value, MissingExtraError)


def test_only_the_named_file_is_imported(cli, tmp_path, torch):
    """A configuration's ``auto_map`` and a neighbour's code are never run."""
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "vocab_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 4,
        "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli("measure", tmp_path, "--seq", 32, "--check").code == 0


# Pairs


def _saved(op, shape, size, module="model.layers.1.attn"):
    from actcalc.measure import SavedTensor

    return SavedTensor(
        phase="layer1", module=module, cls="X", op=op, shape=shape, dtype="bfloat16", bytes=size
    )


def _expected(name, sizes, size):
    return Expected(op=f"make_{name}", tensor=name, shape="", sizes=sizes, bytes=size)


def test_pairs():
    saved = [
        _saved("Attention0.key", (2, 8), 32),
        _saved("Attention0.query", (2, 8), 32),
        _saved("Attention0.seed", (1,), 8),
        _saved("Attention0.offset", (1,), 8),
        _saved("Mul0.self", (8, 4, 1), 64),
        _saved("Extra0.self", (3,), 6, module="model.layers.1.mlp"),
    ]
    expected = [
        _expected("q", (2, 8), 32),
        _expected("k", (2, 8), 32),
        _expected("rng", (16,), 16),
        _expected("other", (2, 16), 64),
        _expected("same", (4, 8), 64),
    ]
    rows = pair(saved, expected)
    found = [(row.op, row.predicted_tensor, row.difference_bytes) for row in rows]
    assert found == [
        ("Attention0.key", "k", 0),
        ("Attention0.query", "q", 0),
        ("Attention0.seed", "rng", 0),
        ("Attention0.offset", "rng", 0),
        ("Mul0.self", "same", 0),
        ("Extra0.self", None, 6),
        (None, "other", -64),
    ]
    assert [row.module for row in rows[:6:5]] == ["attn", "mlp"]
    assert sum(row.difference_bytes for row in rows) == 6 - 64


def test_pairs_without_a_prediction():
    (row,) = pair([_saved("Mul0.self", (4,), 8)], None)
    assert row.predicted_bytes is None
    assert row.difference_bytes is None
