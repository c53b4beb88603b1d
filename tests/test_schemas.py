"""Every command's JSON is what ``actcalc schema`` says, whatever options change its shape."""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import pytest
import yaml

from actcalc.answers.explain.terms import TERMS
from actcalc.cli.app import COMMANDS
from actcalc.cli.schema import INPUTS, NAMES, OUTPUTS, schema_of
from actcalc.io import presets
from actcalc.plan.emit.targets import TARGETS
from tests.agreement.asking import answer, ask
from tests.conftest import DATA, ROOT, load_data

BLOCK = str(ROOT / "docs" / "examples" / "block.json")
LOG = str(DATA / "logs" / "megatron.log")
GPT3 = "gpt3-175b --tp 8 --sp"
A100 = "--device a100-80gb"


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads(answer(["schema", name]))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def check(name: str, document: dict) -> None:
    faults = [
        f"{fault.json_path}: {fault.message}" for fault in validator(name).iter_errors(document)
    ]
    assert not faults, "\n".join(faults)[:2000]


LINES: dict[str, list[str]] = {
    "compare": [
        GPT3,
        f"{GPT3} --pp 8 --vpp 3 --policy none,selective,full-sharded,uniform:2",
        f"{GPT3} --pp 4 {A100}",
        f"gpt-530b {A100}",  # no micro-batch fits
        "llama-3-8b --framework megatron,transformers,torchtitan",
        f"llama-3-8b --framework megatron,transformers {A100} --policy full",
        "gpt2 llama-3-8b mixtral-8x7b --policy none,full",
        f"gpt2 llama-3-8b {A100}",
        "deepseek-v3 --ep 8 --dp 8",
        "nemotron-h-56b",
        "t5-base",
        "llama-3-8b --set lora_rank=16",
    ],
    "compare-layer": [BLOCK, f"{BLOCK} --layers 4 --policy none,full"],
    "breakdown": [
        "breakdown gpt2",
        "breakdown llama-3-8b --framework megatron,transformers",
        f"breakdown {GPT3} --policy selective",
        "breakdown deepseek-v3 --policy mla_up_proj+moe_act",
        "breakdown smollm3-3b",
        "breakdown t5-base",
        "breakdown mamba2-130m",
    ],
    "memory": [
        f"memory {GPT3} --pp 4",
        f"memory {GPT3} --pp 4 --policy full {A100}",
        f"memory llama-3-8b {A100} --max micro-batch --max seq --policy full",
        f"memory gpt2 llama-3-8b {A100}",
        "memory llama-3-8b --framework megatron,transformers",
        "memory llama-3-8b --optimizer adam8bit --dp 8 --zero 3 --offload optimizer",
        "memory llama-3-8b --lora-rank 16 --set base_bits=4",
        "memory gpt3-175b --tp 8 --sp --pp 8 --vpp 3 --optimizer muon",
        "memory llama-3-8b --framework torchtitan --dp 8 --zero 3 --timeline",
    ],
    "plan": [
        f"plan {GPT3} --memory 20GB --activations-only",
        f"plan {GPT3} --memory 1GB --activations-only",  # none fits
        f"plan {GPT3} --pp 8 --memory 80GB",
        f"plan {GPT3} --memory 2GB",  # with what to change
        f"plan gpt2 {A100}",
        f"plan llama-3-8b --seq 2048 --memory 60GB {A100} --offload",
        f"plan llama-3-8b --memory 30GB {A100}",  # none fits
        "plan llama-3-8b --memory 100GB --frontier --points 3",
        f"plan gpt2 {A100} --frontier --points 3",
        "plan llama-3-8b --memory 100GB --semantics module",
        "plan llama-3-8b --memory 100GB --method sqrt",
        "plan llama-3-8b --memory 100GB --method greedy --memory-model stored",
        "plan llama-3-8b --memory 100GB --memory-model timeline",
        "plan llama-3-8b --memory 100GB --memory-model stored+working",
        f"plan {GPT3} --pp 4 --memory 200GB --same-on-all-stages",
        "plan mixtral-8x7b --memory 20GB --activations-only --lora-rank 8",
        *(f"plan llama-3-8b --seq 2048 --memory 70GB --emit {target}" for target in TARGETS),
        f"plan llama-3-8b --seq 2048 --memory 70GB {A100} --emit megatron",
    ],
    "plan-layer": [
        f"plan {BLOCK} --memory 200MB",
        f"plan {BLOCK} --memory 1MB",
        f"plan {BLOCK} --memory 300MB --layers 4 --semantics module",
        f"plan {BLOCK} --memory 300MB --layers 4 --frontier --points 3",
        f"plan {BLOCK} --memory 200MB --emit torch",
        f"plan {BLOCK} --memory 200MB --method sqrt",
    ],
    "sweep": [
        f"sweep gpt2 {A100} --vary seq=512,1024 --vary tp=1,5",
        f"sweep gpt2 {A100} --vary micro-batch=1,4000 --tokens 1T --price-per-gpu-hour 2",
        "sweep gpt2 --vary hidden_dropout=0,0.1 --group-by hidden_dropout",
        "sweep gpt2 --vary model=gpt2,gpt2-xl --vary device=a100-80gb,t4 --watts-per-gpu 500"
        " --tokens 1T",
    ],
    "search": [
        f"search gpt2 --gpus 8 {A100} --global-batch 16 --micro-batch 1",
        f"search gpt2 --gpus 4 {A100} --global-batch 8 --tp 1 --pareto time,memory --top 2",
        f"search gpt3-175b --gpus 8 {A100} --global-batch 8 --tp 8",  # none fits
    ],
    "advise": [
        "advise llama-3-8b --device rtx-4090",
        f"advise {GPT3} --pp 8 --dp 4 --framework megatron {A100} --tokens 300e9",
        f"advise gpt2 {A100} --policy full",
        "advise gpt2 --device t4",
    ],
    "check": [
        f"check gpt2 --framework megatron --log {LOG}",
        f"check gpt2 --framework megatron --global-batch 64 --dp 8 --log {LOG} {A100}",
    ],
    "mfu": [
        f"mfu {GPT3} {A100}",
        f"mfu {GPT3} {A100} --step-time 2 --gpus 16 --global-batch 8",
        f"mfu gpt2 {A100} --tokens 300e9",
        f"mfu gpt2 {A100} --tokens 300e9 --price-per-gpu-hour 2",
        f"mfu gpt2 {A100} --mfu 0.4 --flops causal",
        f"mfu bert-base {A100} --step-time 1",
    ],
    "presets": ["presets list", *(f"presets list {kind}" for kind in presets.KINDS)],
    "preset": [
        f"presets show {name}"
        for name in ("gpt2", "deepseek-v3", "nemotron-h-56b", "h100-80gb", "tpu-v5p", "megatron")
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines]
)
def test_json_is_what_its_schema_says(name, line):
    document = ask(*line.split())
    assert document["schema"] == f"actcalc/{name}/1"
    check(name, document)


EXPLAINED = {
    "lora": "llama-3-8b", "offload": "llama-3-8b --device h100-80gb",
    "overhead": "mixtral-8x7b --device h100-80gb --policy full", "peak": f"{GPT3} --pp 4",
}  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
def test_every_term_is_what_its_schema_says(term):
    check("explain", ask("explain", term))
    if term in EXPLAINED:
        check("explain", ask("explain", term, *EXPLAINED[term].split()))


def test_the_list_of_terms_is_what_its_schema_says():
    check("terms", ask("explain"))


def test_efficiencies_fitted_to_runs(tmp_path):
    run = {"model": "gpt-22b", "layout": {"tp": 8}, "workload": {"global_batch": 4},
           "device": "a100-80gb", "policy": "full", "step_seconds": 1.4}  # fmt: skip
    path = tmp_path / "runs.yaml"
    path.write_text(yaml.safe_dump({"runs": [run]}))
    check("mfu", ask("mfu", "gpt-22b", *A100.split(), "--calibrate", path))


@pytest.mark.parametrize("method", ["optimal", "sqrt", "greedy"])
@pytest.mark.parametrize("number", [0, 3])
def test_problems_of_ones_own(tmp_path, number, method):
    problem = dict(load_data("planner_instances.json")["instances"][number])
    for budget in (problem["budget_bytes"], 1):
        path = tmp_path / "problem.json"
        path.write_text(json.dumps({**problem, "budget_bytes": budget}))
        check("plan-problem", ask("plan", path, "--method", method))


def test_arguments_of_megatron(tmp_path):
    path = tmp_path / "arguments.yaml"
    path.write_text(
        yaml.safe_dump(
            {"num-layers": 8, "hidden-size": 1024, "num-attention-heads": 16, "seq-length": 1024,
             "micro-batch-size": 1, "vocab-size": 32000, "world-size": 8,
             "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2}
        )
    )  # fmt: skip
    check("memory", ask("memory", path))
    check("compare", ask("compare", path))


def test_measurements(tmp_path):
    pytest.importorskip("torch", reason="needs actcalc[torch]")
    pytest.importorskip("transformers", reason="needs actcalc[torch]")
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
              "vocab_size": 99, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2}  # fmt: skip
    path.write_text(json.dumps(config))
    for flags in ("", "--policy full", "--attention eager --precision amp-bf16"):
        check("measure", ask("measure", path, "--seq", 32, *flags.split()))
    block = ROOT / "docs" / "examples" / "block.py"
    check("measure", ask("measure", "--module", f"{block}:factory"))


# --- the schemas themselves -----------------------------------------------------------------------


def test_every_command_has_a_schema():
    pages = {"schema", "help", "report", "web"}  # which print no answer of their own as JSON
    assert set(COMMANDS) - pages <= set(OUTPUTS)
    assert set(LINES) | {"explain", "terms", "plan-problem", "measure", "calibrate"} == set(OUTPUTS)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas(name):
    jsonschema.Draft202012Validator.check_schema(schema_of(name))


def test_schemas_say_null_where_python_says_none():
    text = json.dumps({name: schema_of(name) for name in NAMES})
    assert not re.search(r"\bNone\b", text)
    assert "null: with ZeRO 2" in text


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_key_is_undocumented(name):
    schema = schema_of(name)
    for title, part in {"": schema, **schema.get("$defs", {})}.items():
        assert part["additionalProperties"] is False
        if title == "LayersBeside":  # its bytes are described where they are inherited from
            continue
        for key, field in part["properties"].items():
            assert "description" in field or key in ("schema", "version"), key


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_schema_can_fail(name):
    """A document that lacks a key, or has one more, is not what the schema describes."""
    line = LINES.get(name, ["explain 34"])[0].split()
    if name in ("plan-problem", "measure", "calibrate"):
        pytest.skip("made from files, above, or of a GPU")
    document = ask(*line)
    for broken in ({**document, "extra": 1}, dict(list(document.items())[:-1])):
        assert not validator(name).is_valid(broken)


RUN_FILE = {
    "title": "a run", "source": "nowhere",
    "model": {"preset": "llama-3-8b", "layers": 4}, "layout": {"tp": 2, "sp": True},
    "workload": {"seq": 1024, "global_batch": 8, "kernels": {}},
    "training": {"optimizer": "adamw"}, "framework": "megatron", "device": "h100-80gb",
    "policies": ["none", "full"],
}  # fmt: skip


def test_run_files_are_what_their_schema_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN_FILE))
    ask(path)
    assert validator("run").is_valid(RUN_FILE)
    for wrong in ({"layout": {"tp": "two"}}, {"layouts": {}}, {"layout": {"tq": 1}}):
        assert not validator("run").is_valid({**RUN_FILE, **wrong})


@pytest.mark.parametrize("name", INPUTS)
def test_what_a_command_prints_of_its_input_is_that_input(name):
    if name in ("run", "framework"):
        pytest.skip("printed by no command as it was read")
    printed = ask("memory", "deepseek-v3", "--layers", 4, "--device", "h200")[name]
    check(name, printed)
