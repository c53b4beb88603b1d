"""What is written reads back as the same run, or is refused with what cannot be said."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actcalc.answers.memory import memory_run
from actcalc.cli.memory import EMITTED
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.io.writers import TARGETS, written
from actcalc.io.writers.back import read_back
from actcalc.specs.run import Run

MODELS = ("llama-3-8b", "llama-3.1-8b", "qwen2.5-7b", "gpt3-175b", "mixtral-8x7b", "qwen3-0.6b",
          "qwen3-30b-a3b", "deepseek-v3", "gpt2", "llama-2-7b")  # fmt: skip


def test_help_names_every_target():
    assert tuple(TARGETS) == EMITTED


@st.composite
def runs(draw: Any) -> tuple[str, dict[str, Any]]:
    """A model and what it is trained with, as any of the frameworks would."""
    framework = draw(st.sampled_from(["megatron", "megatron-local", "transformers", "torchtitan"]))
    split = framework.startswith("megatron")
    layout: dict[str, Any] = {
        "dp": draw(st.sampled_from([1, 2, 4, 8])),
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
    }
    work: dict[str, Any] = {
        "seq": draw(st.sampled_from([1024, 2048])),
        "micro_batch": draw(st.sampled_from([1, 3])),
    }
    training: dict[str, Any] = {}
    policies = ["none", "full"]
    if split:
        layout["tp"] = draw(st.sampled_from([1, 2, 4]))
        layout["sp"] = layout["tp"] > 1
        layout["pp"] = draw(st.sampled_from([1, 2]))
        policies += ["selective", "uniform:2", "block:1", "layernorm+mlp"]
        work["dropout"] = draw(st.booleans())
        work["precision"] = draw(st.sampled_from(["bf16", "fp16", "fp8"]))
        work["attention"] = draw(st.sampled_from(["eager", "flash"]))
        padded = draw(st.sampled_from([0, 128]))
        work["kernels"] = {"make_vocab_size_divisible_by": padded}
    if framework == "transformers":
        work["precision"] = draw(st.sampled_from(["bf16", "amp-bf16", "amp-fp16", "fp32"]))
        work["attention"] = draw(st.sampled_from(["eager", "sdpa", "flash"]))
        training["optimizer"] = draw(st.sampled_from(["adamw", "adam8bit", "adafactor"]))
        losses = ["auto", "fused", "full", "chunked", "recomputed", "tiled", "in-place"]
        training["loss"] = draw(st.sampled_from(losses))
        work["lengths"] = draw(st.sampled_from(["", "", "256:3,1024:1"]))
        if draw(st.booleans()):
            training["lora_rank"] = draw(st.sampled_from([8, 64]))
            targets = ["all", "attention", "mlp", "q+v", "q_proj,down_proj", "all+lm_head",
                       r".*\.(q|v)_proj"]  # fmt: skip
            training["lora_targets"] = draw(st.sampled_from(targets))
            training["dora"] = draw(st.booleans())
            training["train"] = draw(st.sampled_from([(), ("norms",), ("embeddings", "head")]))
            training["base_bits"] = draw(st.sampled_from([4, 16]))
        elif draw(st.booleans()):
            training["freeze"] = draw(st.sampled_from([1, 5, -3]))
            training["train"] = draw(st.sampled_from([(), ("layers",), ("embeddings",)]))
        training["objective"] = draw(
            st.sampled_from(["sft", "sft", "dpo", "kto", "grpo", "reward"])
        )
        if training["objective"] == "grpo":
            work["completion"] = draw(st.sampled_from([0, 32]))
        if work["precision"] == "bf16":
            training["recipe"] = draw(st.sampled_from(["auto", "pure", "mixed", "fsdp"]))
            training["offload"] = draw(st.sampled_from(["none", "optimizer", "weights"]))
    if framework == "torchtitan":
        policies += ["op", "every:2"]
        training["step_in_backward"] = draw(st.booleans())
        layout["tp"] = draw(st.sampled_from([1, 2]))
        layout["sp"] = layout["tp"] > 1
        layout["pp"] = draw(st.sampled_from([1, 2]))
        if layout["pp"] > 1:
            layout["schedule"] = draw(st.sampled_from(["1f1b", "gpipe"]))
        work["precision"] = draw(st.sampled_from(["bf16", "amp-bf16"]))
    if draw(st.booleans()):
        steps = draw(st.sampled_from([1, 4]))
        work["global_batch"] = work["micro_batch"] * layout["dp"] * steps
    changes = {"layout": layout, "workload": work, "training": training, "framework": framework}
    changes["policies"] = (draw(st.sampled_from(policies)),)
    return draw(st.sampled_from(MODELS)), changes


@given(runs(), st.sampled_from(EMITTED))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_reading_back_gives_the_same_run(described, target):
    model, changes = described
    try:
        run = load_run(model, **changes)
        first = memory_run(run)
    except SpecError:
        return  # no such run
    refused, text = None, ""
    try:
        text = written(run, target)
    except SpecError as error:
        refused = error
    if refused is None:
        check_same(run, first, target, text)
    else:
        assert refused.hint
        assert target != "yaml"


def check_same(run: Run, first: Any, target: str, text: str) -> None:
    second = memory_run(read_back(run, TARGETS[target].file, text))
    assert second.microbatches == first.microbatches
    assert second.policy == first.policy or target == "megatron"
    assert [stage.total_bytes for stage in second.stages] == [
        stage.total_bytes for stage in first.stages
    ]


WRITTEN = [
    ("megatron", "gpt3-175b --framework megatron --tp 8 --sp --pp 8 --vpp 3 --dp 2 --zero 1 "
     "--global-batch 64 --policy selective --set kernels.make_vocab_size_divisible_by=128"),
    ("megatron", "deepseek-v3 --ep 8 --dp 64 --pp 16 --layers-per-stage 3,4x14,2 --policy full"),
    ("megatron", "qwen2.5-7b --framework megatron-local --tp 2 --sp --zero 0"),
    ("torchtitan", "llama-3-8b --framework torchtitan --dp 8 --zero 3 --policy op"),
    ("torchtitan", "llama-3.1-70b --framework torchtitan --tp 8 --sp --pp 4 --dp 2 --zero 2 "
     "--global-batch 32"),
    ("torchtitan", "qwen3-30b-a3b --framework torchtitan --tp 4 --sp --dp 8 --ep 16 --etp 1 "
     "--zero 3 --policy op"),
    ("deepspeed", "qwen2.5-7b --dp 8 --zero 3 --recipe mixed --offload optimizer --policy full"),
    ("transformers", "gpt2 --framework transformers --precision amp-bf16 --dp 4 --global-batch 32"),
    ("fsdp", "llama-3-8b --dp 16 --zero 3 --recipe fsdp --policy full --attention flash"),
    ("axolotl", "llama-3.1-8b --lora-rank 32 --set base_bits=4 --optimizer adam8bit --policy full "
     "--attention flash"),
    ("axolotl", "qwen2.5-7b --freeze 20 --loss chunked"),
    ("axolotl", "llama-3.1-8b --freeze -4 --train layers --policy full"),
    ("axolotl", "qwen3-0.6b --freeze 10 --train embeddings"),
    ("yaml", "qwen2.5-7b --lengths 512:3,4096:1 --micro-batch 2 --loss recomputed"),
    ("axolotl", "qwen3-0.6b --dp 8 --zero 2 --recipe fsdp --policy full"),
    ("yaml", "mixtral-8x7b --tp 4 --sp --ep 2 --dp 2 --optimizer muon --device h100-80gb"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "line"), WRITTEN)
def test_written_files(target, line, cli, tmp_path):
    """On the command line, with the file read back as a user would."""
    text = cli("memory", *line.split(), "--emit", target)
    assert text.code == 0, text.err
    path = tmp_path / TARGETS[target].file
    path.write_text(text.out)
    model = line.split()[0]
    again = cli("memory", path, "--json") if target in ("megatron", "yaml") else cli(
        "memory", path, model, "--json")  # fmt: skip
    plain = cli("memory", *line.split(), "--json")
    assert [s["total_bytes"] for s in again.json["stages"]] == [
        s["total_bytes"] for s in plain.json["stages"]
    ]


def test_asynchronous_tensor_parallelism_is_a_compilers(cli, tmp_path):
    """torchtitan distributed/tensor_parallel.py: refused there without a compiled model."""
    path = tmp_path / "job.toml"
    text = "[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true\n"
    path.write_text(f"{text}[training]\nseq_len = 4096\n")
    plain = cli("memory", path, "llama-3-8b")
    assert plain.code == 2
    assert "needs a compiled model" in plain.err
    path.write_text(f"{text}[compile]\nenable = true\n[training]\nseq_len = 4096\n")
    compiled = cli("memory", path, "llama-3-8b", "--json").json
    assert any("enable_async_tensor_parallel" in note for note in compiled["notes"])


def test_what_cannot_be_said_is_refused(cli):
    refused = cli("memory", "llama-3-8b", "--emit", "megatron")
    assert "--framework megatron" in refused.err
    refused = cli("memory", "llama-3-8b", "--zero", "3", "--dp", "8", "--emit", "deepspeed")
    assert "--recipe mixed" in refused.err
    refused = cli("memory", "gpt2", "--emit", "keras")
    assert "torchtitan" in refused.err
    assert cli("memory", "gpt2", "--emit", "yaml", "--json").code == 2


def test_transformers_own_parser_takes_what_is_written(cli):
    """Its dataclass has every argument that is not TRL's, and the values that we mean."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    line = "qwen2.5-7b --dp 8 --zero 2 --recipe mixed --policy full --micro-batch 2"
    import json

    data = json.loads(cli("memory", *line.split(), "--emit", "deepspeed").out)
    own = ("model_name_or_path", "dtype", "attn_implementation", "dataset_name", "max_length",
           "deepspeed")  # fmt: skip
    arguments = {key: value for key, value in data.items() if key not in own}
    parsed = transformers.TrainingArguments("out", use_cpu=True, **arguments)
    assert parsed.per_device_train_batch_size == 2
    assert parsed.gradient_checkpointing
    assert parsed.bf16
    assert data["deepspeed"]["train_batch_size"] == 16


def test_forms(cli):
    """Each text is what its framework's loader takes."""
    line = ["llama-3.1-8b", "--framework", "torchtitan", "--zero", "3", "--dp", "8"]
    toml = tomllib.loads(cli("memory", *line, "--emit", "torchtitan").out)
    assert toml["model"] == {"name": "llama3", "flavor": "8B"}
    assert toml["parallelism"]["data_parallel_shard_degree"] == 8
    run = yaml.safe_load(cli("memory", *line, "--emit", "yaml").out)
    assert run["model"] == "llama-3.1-8b"
    script = cli("memory", "gpt3-175b", "--framework", "megatron", "--tp", 8, "--emit", "megatron")
    assert script.out.startswith("torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\\n")


@pytest.mark.parametrize(("target", "policy"), [("fsdp", "full"), ("yaml", "block:")])
def test_a_plan_is_written_as_a_run(target, policy, cli, tmp_path):
    """The cheapest policy that fits, and the whole run with it."""
    line = ["llama-3-8b", "--dp", 8, "--zero", 3, "--recipe", "fsdp", "--seq", 4096]
    text = cli("plan", *line, "--memory", "40GB", "--emit", target)
    path = tmp_path / TARGETS[target].file
    path.write_text(text.out)
    names = [path] if target == "yaml" else [path, "llama-3-8b"]
    read = cli("memory", *names, "--json").json
    assert read["policy"].startswith(policy)
    assert read["peak_bytes"] <= 40e9
    assert cli("memory", *line, "--policy", "none", "--json").json["peak_bytes"] > 40e9


def test_a_plan_that_does_not_fit_is_no_text(cli):
    none = cli("plan", "llama-3-8b", "--memory", "4GB", "--emit", "yaml")
    assert (none.code, none.out) == (1, "")
    assert cli("plan", "llama-3-8b", "--memory", "40GB", "--emit", "yaml", "--frontier").code == 2
