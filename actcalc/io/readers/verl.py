"""verl's trainers: Hydra overrides of a script or its YAML (``verl/trainer/config/``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import mcore
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import attention, element_type, targets

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
IDLE = (
    r"(actor_rollout_ref\.model\.(torch_dtype|override_config\.(max_pos|model_config|rope|attention_d).*)"
    r"|config_name|config_path|use_remove_padding|algorithm|critic|reward|reward_model|ray|ray_kwargs|custom_reward_function|global_profiler"
    r"|transfer_queue|trainer|defaults|hydra|checkpoint|profiler|distillation|model_engine"
    r"|actor_rollout_ref\.(rollout|ref|hybrid_engine|nccl_timeout)).*"
    r"|data\.(train_files|val_files|prompt_key|return|filter|truncation|shuffle|image_key|reward_fn"
    r"|custom_cls|trust|seed|dataloader|sampler|datagen|tokenizer|val_batch|messages|tools|enable"
    r"|num_workers|pad_mode|use_shm|train_max|val_max|apply|balance|multiturn|prompt|response"
    r"|train_batch_size|gen_batch|ignore).*"
    r"|actor_rollout_ref\.model\.(trust|tiled|use_shm|external|hf_config|tokenizer|custom|_target_"
    r"|lora_alpha|exclude|lora_adapter|use_remove_padding|use_fused|fused_kernel|mtp|lora\.).*"
    r"|actor_rollout_ref\.actor\.(optim\..*|clip.*|loss_.*|kl_.*|use_kl.*|entropy.*|ppo_epochs"
    r"|grad_clip|shuffle|checkpoint.*|policy_loss.*|profiler.*|_target_|use_torch_compile|tau_.*"
    r"|data_loader_seed|calculate.*|rollout_n|use_prefix.*|fsdp_config\.(wrap_policy.*|forward_prefetch"
    r"|_target_|use_orig|seed|full_det|use_torch|entropy.*|forward_only|strategy|qat.*|pad_to.*"
    r"|turbo.*).*|megatron\.(_target_|use_|vanilla|seed|override_ddp|dist_ckpt|override_transformer"
    r"_config\.(apply_rope|masked|bias|gradient_acc|deallocate|persist|moe_|distribute|account"
    r"|attention_backend|cross)|overlap|load_weight|forward_only).*)"
    r"|optim\..*|engine\.(_target_|seed).*|model\.(trust|lora_alpha|use_remove|tokenizer|_target_"
    r"|use_shm|hf_config|external).*"
)
LEFT_OUT: LeftOut = (
    (_MODEL + "enable_activation_offload", "moves saved tensors to the host", ()),
    (_ACTOR + "freeze_vision_tower", "trains no vision tower: give --set tower=frozen", ()),
    (_ACTOR + "entropy_checkpointing", "re-runs the entropy of logits: less memory", ()),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is verl's: an actor with its engine, or its SFT trainer's."""
    if isinstance(data.get("actor_rollout_ref"), Mapping):
        return True
    trainer, work = data.get("trainer"), data.get("data")
    return (
        isinstance(trainer, Mapping) and isinstance(work, Mapping)
        and ("micro_batch_size_per_gpu" in work or "max_token_len_per_gpu" in work)
        and "model" in data
    )  # fmt: skip


def read(data: Mapping[str, Any], where: Document) -> Part:
    """The update of the actor, or of supervised training; rollouts are not counted."""
    s = Settings(data, where.name)
    actor = s.has(_MODEL + "path") or isinstance(data.get("actor_rollout_ref"), Mapping)
    given: dict[str, Any] = {}
    notes: list[str] = []
    model = _MODEL if actor else "model."
    path = s.text(model + "path", model + "partial_pretrain")
    given["base"] = path or None
    _batch(s, given, notes, actor)
    on = s.flag(model + "enable_gradient_checkpointing", default=True)
    given["policy"] = "full" if on else "none"
    rank = s.number(model + "lora_rank")
    if rank:
        given["training.lora_rank"] = rank
        field, told = targets(s, model + "target_modules")
        given |= field
        notes += told
    word = s.text(model + "override_config.attn_implementation", default="flash_attention_2")
    given["workload.attention"] = attention(word) or "flash"
    _engine(s, given, notes, actor)
    nodes, each = s.number("trainer.nnodes", default=1), s.number("trainer.n_gpus_per_node")
    given["devices"] = nodes * each or None
    if actor:
        if given.get("engine") == "fsdp" and given.get("layout.cp", 1) == 1:
            # the reference's weights wait on the host (fsdp_workers.py: CPUOffload for ref)
            given["training.objective"] = "grpo"
            if s.flag(_MODEL + "use_remove_padding"):
                given["training.loss"] = "in-place"  # flash_attn's cross_entropy_loss
        notes.append(
            "The actor's update is counted: generation, log-probabilities and the reference model "
            "run at other times of a step."
        )
    notes += s.notes(IDLE, LEFT_OUT)
    return Part(
        kind="verl", name=where.name, given=given, usual={"training.optimizer": "adamw"},
        notes=tuple(notes),
    )  # fmt: skip


def _batch(s: Settings, given: dict[str, Any], notes: list[str], actor: bool) -> None:
    if not actor:
        micro = s.number("data.micro_batch_size_per_gpu", "data.micro_batch_size", default=4,
                         least=1)  # fmt: skip
        given["workload.micro_batch"] = micro
        given["workload.seq"] = s.number("data.max_length", default=1024, least=1)
        given["workload.global_batch"] = s.number("data.train_batch_size") or None
        if s.flag("data.use_dynamic_bsz"):
            _packed(s.number("data.max_token_len_per_gpu"), given, notes)
        return
    prompt = s.number("data.max_prompt_length", default=512)
    response = s.number("data.max_response_length", default=512)
    given["workload.seq"] = prompt + response
    micro = s.number(_ACTOR + "ppo_micro_batch_size_per_gpu", _ACTOR + "ppo_micro_batch_size")
    given["workload.micro_batch"] = micro or 1
    s.number(_ACTOR + "ppo_mini_batch_size")
    longest = s.number(_ACTOR + "ppo_max_token_len_per_gpu", default=16384, least=1)
    if s.flag(_ACTOR + "use_dynamic_bsz"):
        _packed(longest, given, notes)
    elif s.flag(_MODEL + "use_remove_padding"):
        notes.append("Padding is removed: the longest micro-batch there can be is counted.")


def _packed(tokens: int, given: dict[str, Any], notes: list[str]) -> None:
    """Micro-batches of so many tokens: as many whole sequences, all of the greatest length."""
    if tokens:
        given["workload.micro_batch"] = max(1, tokens // given["workload.seq"])
        notes.append(
            f"Micro-batches hold up to {tokens} tokens: {given['workload.micro_batch']} sequences "
            f"of {given['workload.seq']}."
        )


def _engine(s: Settings, given: dict[str, Any], notes: list[str], actor: bool) -> None:
    # Hydra's name of the configuration that the options override: ppo_megatron_trainer
    usual = "megatron" if "megatron" in s.text("config_name") else "fsdp"
    strategy = s.text(_ACTOR + "strategy", "engine.strategy", "model.strategy", default=usual)
    tp_named = s.has(_ACTOR + "megatron.tensor_model_parallel_size")
    if strategy == "megatron" or tp_named:
        _megatron(s, given)
        return
    if not strategy.startswith("fsdp"):
        raise SpecError(f"{s.where}: strategy {strategy} is not read", "fsdp and megatron are")
    prefix = _ACTOR + "fsdp_config." if actor else "engine."
    given |= {"framework": "transformers", "engine": "fsdp", "workload.precision": "bf16"}
    given["layout.zero"] = 3 if s.flag(prefix + "reshard_after_forward", default=True) else 2
    kept = s.text(prefix + "model_dtype", "model.fsdp_config.model_dtype", default="fp32")
    if element_type(kept, prefix + "model_dtype") == "fp32":
        given["training.recipe"] = "fsdp"  # fp32 weights (fsdp_workers.py), gathered in bf16
    size = s.number(prefix + "fsdp_size", default=-1, least=-1)
    if size > 0:
        given["training.shards"] = size
    moved = [s.flag(prefix + name) for name in ("param_offload", "optimizer_offload")]
    if any(moved):
        notes.append("param_offload and optimizer_offload free the GPU between updates: during one "
                     "everything is there.")  # fmt: skip
    if s.flag(prefix + "offload_policy"):
        given["training.offload"] = "weights"
    cp = s.number(_ACTOR + "ulysses_sequence_parallel_size", default=0) or s.number(
        prefix + "ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size",
        default=1)  # fmt: skip
    given["layout.cp"] = max(1, cp)
    for name in ("dtype", "mixed_precision"):
        s.section(prefix + name)
        s.get(prefix + name)


def _megatron(s: Settings, given: dict[str, Any]) -> None:
    prefix = _ACTOR + "megatron."
    given |= mcore.layout(s, prefix, sp=True)
    given |= {"framework": "megatron", "layout.zero": 1, "workload.precision": "bf16"}
    policy = mcore.recomputed(s, prefix + "override_transformer_config.")
    given["policy"] = policy or given["policy"]
    s.flag(prefix + "param_offload")
    s.flag(prefix + "optimizer_offload")
    s.flag(prefix + "grad_offload")
