"""What is written and read, against the frameworks' own parsers where they are installed."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib

import pytest
import yaml

from actcalc.io.runs import load_run, resolve
from actcalc.io.sources import one_source
from actcalc.io.writers import written

LLAMA = "llama-3.1-8b"


def hub(**changes):
    base = {"framework": "transformers", "policies": ("full",),
            "workload": {"seq": 2048, "micro_batch": 2, "global_batch": 32}}  # fmt: skip
    return load_run(LLAMA, **{**base, **changes})


def words_of(text: str) -> list[str]:
    """Options of the one command that a script is."""
    words = shlex.split(text.replace("\\\n", " "))
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


@pytest.mark.parametrize(
    ("objective", "config", "training"),
    [
        ("sft", "SFTConfig", {"lora_rank": 16, "lora_targets": "q+v", "base_bits": 4}),
        ("sft", "SFTConfig", {"loss": "fused", "optimizer": "adam8bit"}),
        ("dpo", "DPOConfig", {"reference": "none"}),
        ("reward", "RewardConfig", {}),
        ("grpo", "GRPOConfig", {"reference": "model"}),
    ],
)
def test_trl_parses_what_is_written(objective, config, training):
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    work = {"seq": 2048, "micro_batch": 8, "global_batch": 32}
    if objective == "grpo":
        work["completion"] = 512
    run = hub(training={"objective": objective, **training}, workload=work)
    parser = transformers.HfArgumentParser(
        (trl.ScriptArguments, getattr(trl, config), trl.ModelConfig)
    )
    # bf16 needs a device that has it, which is no matter of names
    options = words_of(written(run, "transformers"))
    place = options.index("--bf16")
    options = [*options[:place], *options[place + 2 :], "--use_cpu", "true"]
    _, arguments, model = parser.parse_args_into_dataclasses(options)
    assert arguments.per_device_train_batch_size == 8
    assert arguments.gradient_accumulation_steps == 4
    assert arguments.gradient_checkpointing is True
    assert model.model_name_or_path == "meta-llama/Llama-3.1-8B"
    if objective == "sft":
        assert arguments.max_length == 2048
    if "lora_rank" in training:
        assert (model.use_peft, model.lora_r, model.load_in_4bit) == (True, 16, True)
        assert model.lora_target_modules == ["q_proj", "v_proj"]
    if objective == "dpo":
        assert arguments.precompute_ref_log_probs is True
    if objective == "grpo":
        assert arguments.max_completion_length == 512
        assert arguments.beta > 0


@pytest.mark.parametrize(
    ("zero", "offload"), [(1, "none"), (2, "optimizer"), (3, "weights"), (3, "none")]
)
def test_deepspeed_validates_what_is_written(zero, offload):
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    run = hub(layout={"dp": 8, "zero": zero}, training={"recipe": "mixed", "offload": offload})
    data = json.loads(written(run, "deepspeed"))["deepspeed"]
    parsed = config.DeepSpeedZeroConfig(**data["zero_optimization"])
    assert int(parsed.stage) == zero
    assert (parsed.offload_optimizer is not None) == (offload != "none")
    assert (parsed.offload_param is not None) == (offload == "weights")
    assert parsed.reduce_bucket_size == run.training.bucket_elements
    assert not set(parsed.model_extra or {})


ACCELERATE = {
    "fsdp": {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP",
        "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "machine_rank": 0,
        "main_training_function": "main", "use_cpu": False, "rdzv_backend": "static",
        "same_network": True,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
    "deepspeed": {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16", "num_machines": 1, "num_processes": 4, "machine_rank": 0,
        "main_training_function": "main", "use_cpu": False,
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu",
                             "gradient_accumulation_steps": 2, "zero3_init_flag": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ACCELERATE)
def test_accelerate_loads_what_is_read(kind, tmp_path):
    """Its own loader takes the file, and has the processes and stage that are read from it."""
    loader = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(ACCELERATE[kind]))
    loaded = loader.load_config_from_file(str(path))
    run = resolve(one_source([str(path), LLAMA]))
    assert run.layout.dp == loaded.num_processes
    assert run.layout.zero == 3
    if kind == "deepspeed":
        assert loaded.deepspeed_config["zero_stage"] == run.layout.zero
        assert run.training.offload == "optimizer"


def test_torchtitan_has_the_degrees_that_are_written():
    configs = pytest.importorskip("torchtitan.config.configs")
    layout = {"tp": 8, "sp": True, "pp": 4, "dp": 2, "zero": 2}
    run = load_run("llama-3.1-70b", framework="torchtitan", layout=layout, policies=("op",),
                   workload={"global_batch": 32})  # fmt: skip
    parallelism = tomllib.loads(written(run, "torchtitan"))["parallelism"]
    fields = {field.name for field in dataclasses.fields(configs.ParallelismConfig)}
    assert set(parallelism) <= fields | {"pipeline_parallel_microbatch_size"}
