"""Every option that is written, and that marks a kind of file, is one of the framework's own.

``tests/data/option_names.json`` has the names as each framework's source declares them, with
versions; nothing in it is made from what is written here.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from actcalc.io.readers import trainer
from actcalc.io.runs import load_run
from actcalc.io.writers import written
from tests.conftest import DATA

NAMES: dict[str, dict[str, Any]] = json.loads(
    (DATA / "option_names.json").read_text(encoding="utf-8")
)
HUB = {"framework": "transformers", "workload": {"seq": 2048, "micro_batch": 2}}
ADAPTERS = {"lora_rank": 16, "lora_targets": "q+v", "base_bits": 4, "dora": True,
            "train": ("embeddings",)}  # fmt: skip


def run_of(model="llama-3.1-8b", **changes):
    return load_run(model, policies=("full",), **{**HUB, **changes})


def flags(text):
    return set(re.findall(r"--([a-z][a-z0-9_-]+)", text)) - {"num_processes", "nproc_per_node"}


@pytest.mark.parametrize(
    ("objective", "training", "work"),
    [
        ("sft", {**ADAPTERS, "loss": "fused"}, {}),
        ("dpo", {"reference": "none"}, {}),
        ("kto", {"optimizer": "adam8bit"}, {}),
        ("reward", {}, {}),
        ("grpo", {"reference": "model", "generation_share": 0.3}, {"completion": 512}),
    ],
)
def test_arguments_of_trl(objective, training, work):
    run = run_of(
        training={"objective": objective, **training}, workload={**HUB["workload"], **work}
    )
    text = written(run, "transformers")
    assert f"trl/scripts/{objective}.py" in text
    own = NAMES["trl"]
    assert flags(text) <= {*own["common"], *own[objective]}


def test_marks_of_trl_are_its_own():
    own = NAMES["trl"]
    every = {name for key, names in own.items() if isinstance(names, list) for name in names}
    older = {"lora_task_type", "model_init_kwargs.dtype", "max_prompt_length"}
    assert set(trainer.TRL) - every <= older


@pytest.mark.parametrize("layout", [{"zero": 3, "dp": 8}, {"zero": 2, "dp": 2}])
def test_sections_of_deepspeed(layout):
    training = {"recipe": "mixed", "offload": "weights" if layout["zero"] == 3 else "optimizer"}
    data = json.loads(written(run_of(layout=layout, training=training), "deepspeed"))
    own, config = NAMES["deepspeed"], data.pop("deepspeed")
    assert set(data) <= {*NAMES["trl"]["common"], *NAMES["trl"]["sft"]}
    assert set(config) <= {*own["top"], "bf16", "fp16", "zero_optimization"}
    zero = config["zero_optimization"]
    assert set(zero) <= set(own["zero_optimization"])
    for section in ("offload_optimizer", "offload_param"):
        assert set(zero.get(section, {})) <= set(own["offload"])
    assert set(config["bf16"]) <= set(own["precision"])


def test_fsdp_of_the_trainer():
    run = run_of(layout={"zero": 3, "dp": 8}, training={"recipe": "fsdp", "offload": "weights"})
    assert flags(written(run, "fsdp")) <= {*NAMES["trl"]["common"], *NAMES["trl"]["sft"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"training": ADAPTERS},
        {"training": {"loss": "fused"}},
        {"training": {"objective": "dpo", "reference": "none"}},
        {"layout": {"zero": 3, "dp": 8}, "training": {"recipe": "fsdp"}},
        {"layout": {"zero": 2, "dp": 8}, "training": {"recipe": "mixed"}},
    ],
)
def test_keys_of_axolotl(changes):
    data = yaml.safe_load(written(run_of(**changes), "axolotl"))
    own = NAMES["axolotl"]
    assert set(data) <= set(own["names"])
    assert set(data.get("fsdp_config", {})) <= set(own["fsdp_config"])


def test_sections_of_torchtitan():
    layout = {"tp": 8, "sp": True, "pp": 4, "dp": 2, "zero": 2}
    run = load_run("llama-3.1-70b", framework="torchtitan", layout=layout, policies=("op",),
                   workload={"global_batch": 32})  # fmt: skip
    data = tomllib.loads(written(run, "torchtitan"))
    said = {f"{section}.{name}" for section, values in data.items() for name in values}
    assert said <= set(NAMES["torchtitan"]["names"])


@pytest.mark.parametrize(
    ("model", "layout", "policy"),
    [
        ("llama-3.1-8b", {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "dp": 2, "zero": 1}, "selective"),
        ("deepseek-v3", {"ep": 8, "dp": 64, "pp": 16}, "full"),
        ("mixtral-8x7b", {"tp": 2, "sp": True, "ep": 4, "dp": 4, "cp": 2}, "mlp+layernorm"),
        ("gpt3-175b", {"tp": 8, "sp": True}, "uniform:2"),
    ],
)
def test_flags_of_megatron(model, layout, policy):
    split = {"layers_per_stage": (3, *(4,) * 14, 2)} if model == "deepseek-v3" else {}
    run = load_run(model, framework="megatron", layout={**layout, **split}, policies=(policy,),
                   workload={"kernels": {"make_vocab_size_divisible_by": 128}})  # fmt: skip
    own = NAMES["megatron"]
    assert flags(written(run, "megatron")) - {"nnodes"} <= {*own["names"], *own["made"]}
