"""Nothing is silently ignored, taken for something else, or half read."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT
from tests.fuzz.asking import BROKEN, leaves

GPT = {
    "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128,
    "micro-batch-size": 1, "vocab-size": 1000, "max-position-embeddings": 128, "bf16": True,
}  # fmt: skip
MOE = {"num-experts": 4}


def refused(found, *words):
    assert (found.code, found.out) == (2, ""), found
    assert "internal error" not in found.err
    assert "Traceback" not in found.err
    assert "hint: " in found.err
    assert all(word in found.err for word in words), found.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bf16": "maybe"}, ["bf16", "neither on nor off"]),
        ({"recompute-granularity": "Full"}, ["'Full'", "full"]),
        ({"recompute-granularity": "full", "recompute-method": "Uniform"}, ["'Uniform'"]),
        ({"normalization": "rmsnrm"}, ["rmsnrm", "did you mean"]),
        ({"transformer-impl": "lcoal"}, ["lcoal", "did you mean local"]),
        ({"fp8-format": "hybird"}, ["hybird", "did you mean hybrid"]),
        ({**MOE, "moe-token-dispatcher-type": "altoall"}, ["altoall", "alltoall"]),
        ({**MOE, "moe-router-load-balancing-type": "auxloss"}, ["auxloss", "aux_loss"]),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grad"},
         ["optim_grad", "optim_grads"]),
        ({"outer-dp-sharding-strategy": "optm"}, ["optm"]),
        ({"position-embedding-type": "ropee"}, ["ropee", "rope"]),
        ({"cuda-graph-impl": "locl"}, ["locl"]),
        ({**MOE, "moe-router-dtype": "fp23"}, ["fp23"]),
        ({"micro-batch-size": 4294967297}, ["4294967297", "at most"]),
        ({"num-layers": 10**12}, ["num-layers", "at most 1024"]),
        ({"hidden-dropout": "nan"}, ["hidden-dropout", "not a number"]),
        ({"position-embedding-type": "rope", "rotary-percent": 1e300}, ["rotary-percent"]),
        ({"moe-layer-freq": "+".join(["[0]*9999"] * 500), **MOE}, ["moe-layer-freq"]),
        ({"pipeline-model-parallel-size": 2, "world-size": 2,
          "pipeline-model-parallel-layout": "(t)*9999" * 2000}, ["layout"]),
        *(({name: 0}, [name, "at least 1"]) for name in
          ("num-attention-heads", "vocab-size", "kv-channels", "ffn-hidden-size",
           "make-vocab-size-divisible-by", "expert-model-parallel-size", "context-parallel-size")),
    ],
)  # fmt: skip
def test_megatron_s_words_and_sizes(changes, words, cli, tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({**GPT, **changes}))
    refused(cli("memory", path), *words)


@pytest.mark.parametrize(
    ("option", "word", "meant"),
    [("bf16", "on", True), ("swiglu", "on", True), ("swiglu", "No", False),
     ("normalization", "rmsnorm", "RMSNorm"), ("sequence-parallel", "YES", True)],
)  # fmt: skip
def test_megatron_s_words_are_read_as_meant(option, word, meant, cli, tmp_path):
    answers = []
    for value in (word, meant):
        path = tmp_path / "args.json"
        path.write_text(json.dumps({**GPT, option: value}))
        answers.append(cli("memory", path, "--json"))
    assert answers[0].code == 0
    assert answers[0].out == answers[1].out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((f"{key}: {value}", [key]) for key, value in (
            ("device", "7"), ("device", "[]"), ("device", "{a: 1}"), ("framework", "[x]"),
            ("framework", "{}"), ("policies", "true"), ("policies", "false"),
            ("policies", "{a: b}"), ("workload", "0"), ("workload", "[]"), ("layout", "false"),
            ("training", "''"), ("title", "[a]"))),
        ("layout: {zero: true}", ["zero is True"]),
        ("layout: {zero: 1.0}", ["zero is 1.0"]),
        ("workload: {micro_batch: 1:30}", ["1:30"]),
        ("workload: {seq: 0x" + "9" * 5000 + "}", ["5002 digits"]),
        ("workload: {global_batch: [4]}", ["global_batch"]),
        ("policies: [" + ", ".join(f"block:{n}" for n in range(1, 90)) + "]", ["89 policies"]),
        ("policies: [ffn+ffn]", ["twice"]),
        ("layout: {pp: 4, pp: 2}", ["'pp' is given twice"]),
        ("recipe: gpt2_recipe", ["NeMo", "name the model beside it"]),
    ],
)  # fmt: skip
def test_run_files(line, words, cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\n{line}\n")
    refused(cli(path), *words)


@pytest.mark.parametrize("value", [7, True, {"a": 1}])
def test_lists_of_a_config_are_lists(value, cli, tmp_path):
    path = tmp_path / "config.json"
    config = {"model_type": "deberta-v2", "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 1000,
              "relative_attention": True, "pos_att_type": value}  # fmt: skip
    path.write_text(json.dumps(config))
    refused(cli("memory", path), "pos_att_type", "not a list")


def test_a_policy_named_twice_is_one(cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\npolicies: [full, full]\n")
    found = json.loads(cli(path, "--json").out)
    assert [policy["policy"] for policy in found["policies"]].count("full") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["schema", "run", "--units", "XX"], ["unknown units"]),
        (["presets", "list", "models", "--units", "XX"], ["unknown units"]),
        (["explain", "34", "gpt2", "--units", "XX"], ["unknown units"]),
        (["schema", "run", "-o", "x.csv"], ["a schema is JSON"]),
        (["gpt2", "--policy", "ffn+ffn"], ["twice"]),
        (["gpt2", "--set", "zero=true"], ["zero is True"]),
        (["gpt2", "--set", "hidden=0x" + "9" * 5000], ["5002 digits", "no size"]),
        (["gpt2", "--layers", "2147483648"], ["at most 1024"]),
        (["gpt3-175b", "--layers", "1000", "--pp", "500", "--vpp", "2"], ["1000 slices", "256"]),
        (["mfu", "gpt2", "--device", "h100-80gb", "--step-time", "1e-300"], ["--step-time"]),
        (["mfu", "gpt2", "--device", "h100-80gb", "--step-time", "5e-324", "--json"],
         ["--step-time"]),
        *((["gpt2", "--device", "h100-80gb", "--policy", "full", "--efficiency", each],
           ["--efficiency"]) for each in
          ("gemm=inf", "gemm=0", "gemm=1e-320", "multiprocessors=inf", "hop_seconds=1e300",
           "gemm=" + "a" * 2000, "gemm=x\ny", "gemm=\x1b[31m")),
        (["plan", "gpt2", "--memory", "1GB", "--time-limit", "0"], ["--time-limit 0"]),
    ],
)  # fmt: skip
def test_flags(args, words, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = cli(*args)
    refused(found, *words)
    assert len(found.err.splitlines()) == 2
    assert all(len(line) < 1000 for line in found.err.splitlines())
    assert not list(tmp_path.iterdir())


def test_what_a_breakdown_does_not_heed_is_told(cli):
    found = json.loads(cli("breakdown", "gpt2", "--dp", 8, "--zero", 1, "--json").out)
    assert any("--dp and --zero change nothing" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs: [{model: gpt2, step_seconds: 1}]\nfoo: 1\n", ["unknown key 'foo'"]),
        ("runs: [{model: gpt2, device: a100-80gb, step_seconds: 1, workload: 0}]\n",
         ["workload is 0"]),
        ("runs: [{model: gpt2, device: a100-80gb, step_seconds: .inf}]\n", ["step_seconds is inf"]),
        ("runs: [{model: gpt2, device: a100-80gb, step_seconds: 1.0e-300}]\n", ["step_seconds"]),
        ("runs: [{model: gpt2, device: a100-80gb, step_seconds: 1, "
         "workload: {global_batch: [4]}}]\n", ["global_batch"]),
    ],
)  # fmt: skip
def test_files_of_measured_runs(text, words, cli, tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    refused(cli("mfu", "gpt2", "--device", "a100-80gb", "--calibrate", path), *words)


def test_an_unknown_type_of_weights_is_told(cli, tmp_path):
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
              "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
    path.write_text(json.dumps({**config, "torch_dtype": "bflaot16"}))
    found = json.loads(cli(path, "--json").out)
    assert any("bflaot16" in note for note in found["notes"])


@pytest.mark.parametrize("field", ["params", "forward_flops"])
def test_a_measured_layer_has_no_negative_numbers(field, cli, tmp_path):
    path = tmp_path / "layer.json"
    layer = {
        "schema": "actcalc/measured-layer/2", "name": "L", "cls": "L", "torch_version": "2",
        "dtype": "int8", "params": 10, "forward_flops": 10, "storages": [],
        "modules": [{"path": "", "cls": "L", "inputs": [], "forward_flops": 10}],
    }  # fmt: skip
    path.write_text(json.dumps({**layer, field: -10}))
    refused(cli("compare", path), "negative")


@pytest.mark.parametrize(
    "text",
    ['{"layer_types": {}, "layer_types": {}}', '{"stack": [], "budget_bytes": 1, "stack": 2}'],
)
def test_a_planning_problem_names_each_key_once(text, cli, tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(text)
    refused(cli("plan", path), "is given twice")


@pytest.mark.parametrize("value", [".inf", "0", "1.0e-320", ".nan", "-0.5", "true", "'much'"])
def test_shares_of_a_peak_are_shares(value, cli, tmp_path):
    path = tmp_path / "shares.yaml"
    path.write_text(f"gemm: {value}\nsource: here\n")
    refused(cli("gpt2", "--device", "a100-80gb", "--efficiency", path), "gemm")


@pytest.mark.parametrize(
    ("name", "megabytes", "args"),
    [
        *((f"run{ending}", size, ["memory", "FILE"]) for ending, size in
          ((".yaml", 2), (".json", 5), (".sh", 2), (".toml", 2))),
        ("problem.json", 5, ["plan", "FILE"]),
        ("shares.yaml", 2, ["gpt2", "--device", "a100-80gb", "--efficiency", "FILE"]),
        ("device.yaml", 2, ["gpt2", "--device", "FILE"]),
        ("runs.yaml", 2, ["mfu", "gpt2", "--device", "a100-80gb", "--calibrate", "FILE"]),
        ("train.log", 64, ["check", "gpt2", "--log", "FILE"]),
    ],
)  # fmt: skip
def test_every_reader_states_its_limit(name, megabytes, args, cli, tmp_path):
    """A file that is larger is refused with the limit that docs/security.md states."""
    path = tmp_path / name
    path.write_text("x" * (megabytes * 1_000_000 + 1))
    found = cli(*(path if word == "FILE" else word for word in args))
    refused(found, f"larger than {megabytes} MB")
    assert f"{megabytes} MB |" in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    ["gpt3-175b --tp 8 --sp --device a100-80gb", "breakdown gpt3-175b --tp 8 --sp --policy full",
     "memory llama-3-8b --pp 4 --dp 8 --zero 3", "plan gpt3-175b --tp 8 --sp --memory 300GB",
     "advise llama-3-8b --device a100-80gb",
     "search gpt2 --gpus 4 --device a100-80gb --global-batch 8",
     "sweep gpt2 --vary tp=1,2", "explain peak llama-3-8b"],
)  # fmt: skip
def test_bytes_are_whole_numbers(line, cli):
    found = cli(*line.split(), "--json")
    assert found.code in (0, 1), found.err
    sizes = [(k, v) for k, v in leaves(json.loads(found.out)) if k.endswith("_bytes")]
    assert sizes or line.startswith("explain")
    assert not [each for each in sizes if isinstance(each[1], float) and each[0] not in BROKEN]


def test_limits_are_those_of_the_page():
    """Each is read from where the code has it."""
    from actcalc.answers.calibrate import MAX_RUNS
    from actcalc.cli import plan, search, sweep
    from actcalc.cli.given import _DAY
    from actcalc.errors import LONGEST_LINE
    from actcalc.io import logs, yamlfile
    from actcalc.io.runs import MAX_POLICIES
    from actcalc.memory.replay import _MOST, _PIECES
    from actcalc.solve.frontier import MAX_POINTS
    from actcalc.solve.problem import MAX_LAYERS
    from actcalc.specs import base

    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    cells = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|"))
    page = {what.strip(): most.strip() for what, most in cells}
    del page["what"], page[":--"]
    longest = f"up to {_DAY:,}"
    assert page == {
        "a file, standard input": f"{yamlfile.MAX_BYTES // 10**6} MB",
        "a `.json` file": f"{yamlfile.MAX_JSON_BYTES // 10**6} MB",
        "a measured layer, a log": f"{logs.MAX_BYTES // 10**6} MB",
        "lines and values of a YAML file, values of any": f"{yamlfile.MAX_ENTRIES:,}",
        "levels of nesting": f"{yamlfile.MAX_DEPTH}",
        "digits of a whole number": f"{yamlfile.MAX_DIGITS}",
        "layers of a model, of its encoder, of its prediction layers": f"{base.MAX_LAYERS} each",
        "slices of a pipeline (stages times chunks)": f"{base.MAX_SLICES}",
        "any parallel degree": "2^20",
        "sequence, batch, width": "2^32",
        "policies side by side": f"{MAX_POLICIES}",
        "measured runs in one file": f"{MAX_RUNS}",
        "layers of a planning problem": f"{MAX_LAYERS:,}",
        "seconds of a plan (`--time-limit`)": f"{plan.SECONDS:g}, or what is given, up to 3600",
        "seconds of a search (`--time-limit`)": f"{search.SECONDS:g}, or what is given, {longest}",
        "seconds of a sweep (`--time-limit`)": f"{sweep.SECONDS:g}, or what is given, {longest}",
        "rows of a sweep": f"{sweep.MOST_ROWS:,}",
        "ways to run one layer that a plan chooses from": f"{MAX_POINTS}",
        "passes of layers in a step that the allocator's replay looks at": f"{_MOST}",
        "requests inside one op, in that replay": f"{_PIECES}",
        "characters of an error or a hint": f"{LONGEST_LINE}",
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan gpt2 --memory 10GB --time-limit 3601", ["3600"]),
        ("search gpt2 --gpus 2 --device h100-80gb --time-limit 86401", ["86,400"]),
        ("sweep gpt2 --vary tp=1,2 --time-limit 86401", ["86,400"]),
        (f"memory gpt2 --dp {2**20 + 1}", ["dp", f"{2**20}"]),
        (f"memory gpt2 --seq {2**32 + 1}", ["seq", f"{2**32}"]),
        (f"memory gpt2 --micro-batch {2**32 + 1}", ["micro_batch", f"{2**32}"]),
        (f"memory gpt2 --set hidden={2**32 + 1}", ["hidden", f"{2**32}"]),
        ("memory gpt2 --layers 1025", ["1024"]),
        ("memory flan-t5-small --set encoder_layers=1025", ["1024"]),
        ("memory deepseek-v3 --set mtp_layers=1025", ["1024"]),
        ("memory gpt3-175b --layers 514 --pp 257", ["257", "256"]),
    ],
)
def test_what_is_above_a_limit_is_refused(line, words, cli):
    refused(cli(*line.split()), *words)
