"""transformers' TrainingArguments and TRL's configurations, as JSON, YAML or options of a script.

Names and defaults are those of ``transformers/training_args.py`` (5.24, and 4.x where it differs)
and of ``trl/trainer/*_config.py`` with ``trl/trainer/model_config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.readers import deepspeed, sharding
from actcalc.io.readers.beside import beside, missing
from actcalc.io.readers.document import Document
from actcalc.io.readers.objective import objective
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import LeftOut, Settings
from actcalc.io.readers.words import (
    attention,
    element_type,
    optimizer,
    precision,
    saved_modules,
    targets,
)
from actcalc.specs.objectives import OBJECTIVES

OWN = (
    "per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "num_train_epochs", "lr_scheduler_type", "save_strategy",
    "logging_steps", "optim", "per_device_eval_batch_size",
)  # fmt: skip
TRL = (
    "max_completion_length", "num_generations", "use_peft", "max_prompt_length", "loss_type",
    "precompute_ref_log_probs", "assistant_only_loss", "completion_only_loss", "padding_free",
    "dataset_num_proc", "lora_task_type", "model_init_kwargs.dtype", "desirable_weight",
)  # fmt: skip
IDLE = (
    r"output_dir|overwrite_output_dir|do_(train|eval|predict)|(num_train_|num_)?epochs|max_steps"
    r"|learning_rate|(lr|adam|warmup|weight|logging|save|eval|hub|dataloader|ddp|push_to_hub"
    r"|report|run|include|label|metric|greater|load_best|ignore_data|resume|log|disable|tf32|seed"
    r"|data_seed|full_determinism|max_grad_norm|neftune|length_column|group_by_length|jit_mode"
    r"|per_device_eval|per_gpu_eval|prediction_loss|remove_unused|project|trackio|torch_empty_cache"
    r"|accelerator_config|average_tokens|use_cache|use_cpu|no_cuda|local_rank|debug|tpu|past_index"
    r"|bf16_full_eval|fp16_full_eval|fp16_opt_level|fp16_backend|half_precision|train_sampling"
    r"|skip_memory|split_batches|include_for|batch_eval|evaluation|restore_callback|enable_jit"
    r"|optim_args|hf_token|use_auth|cache_dir|token$|trust_remote|use_fast|revision|model_revision)"
    r".*|(dataset|data|train|validation|test|template|preprocessing|max_(train|eval)_samples"
    r"|overwrite_cache|shuffle|streaming|eos_token|pad_token|chat_template|truncation_mode"
    r"|config_name|config_overrides|tokenizer|low_cpu_mem|text_column|config).*"
    r"|gradient_checkpointing_kwargs.*|activation_checkpointing_kwargs.*|auto_find_batch_size"
    r"|lora_(alpha|dropout|task_type|r|target_modules)|use_rslora|bnb_4bit_quant_type"
    r"|use_bnb_nested_quant|bnb_4bit_.*|beta|epsilon.*|delta|temperature|top_[pk]|min_p"
    r"|reward_.*|scale_rewards|loss_(type|weights)|num_(generations|iterations|completions).*"
    r"|repetition_penalty|generation_.*|vllm_(mode|server|guided|structured|importance|model_impl"
    r"|group_port|tensor_parallel|max_model|enable_sleep).*|mask_truncated.*|steps_per_generation"
    r"|importance_sampling_level|router_aux_loss_coef|label_smoothing.*|completion_only_loss"
    r"|assistant_only_loss|ds3_gather_for_generation|max_prompt_length|max_completion_length"
    r"|eval_packing|packing_strategy|pad_to_multiple_of|disable_dropout|sync_ref.*|ref_model_.*"
    r"|desirable_weight|undesirable_weight|entropy_coef.*|top_entropy_quantile|is_encoder_decoder"
    r"|use_weighting|rpo_alpha|ld_alpha|f_.*|discopop.*|parallelism_config|fsdp_transformer.*"
    r"|fsdp_min_num_params|deepspeed.*|with_tracking|dispatch_batches|liger_kernel_config.*"
    r"|num_warmup_steps|num_padding_at_beginning|enable_tensorboard|tensorboard_.*|task_name|dropout"
    r"|lora_module_name|only_optimize_lora|system_prompt|pass_rate.*|code_.*|wandb_.*|callbacks"
    r"|benchmarks|max_answer.*|max_prompt_seq.*|actor_.*|critic_.*|print_.*|compute_fp32_loss"
    r"|model_init_kwargs\.(use_cache|trust_remote_code|device_map|revision)"
)
LEFT_OUT: LeftOut = (
    ("torch_compile", "fuses kernels: less memory and time", ()),
    ("activation_offloading", "moves saved tensors to the host: give --offload activations", ()),
    ("lora_target_parameters", "puts adapters on parameters of experts", ()),
    ("cast_lm_head_to_fp32", "keeps the head in fp32", ()),
    ("neftune_noise_alpha", "adds noise to the embedding", ()),
    ("optim_target_modules", "trains some modules with another optimizer", ()),
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has the Trainer's arguments."""
    return sum(name in data for name in OWN) >= 2 or "per_device_train_batch_size" in data


def recognises_trl(data: Mapping[str, Any]) -> bool:
    """Whether it is a configuration of TRL's: the Trainer's arguments and some that only TRL has.

    Its scripts read model, data and training from one file.
    """
    if any(name in data for name in TRL[:3]) and ("model_name_or_path" in data or recognises(data)):
        return True
    named = "model_name_or_path" in data and ("dataset_name" in data or "datasets" in data)
    if any(name in data for name in ("do_train", "block_size", "train_file")):
        named = False  # transformers' own examples
    return named or (recognises(data) and any(name in data for name in TRL))


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What arguments of the Trainer say."""
    return _Arguments(data, where, trl=False).part()


def read_trl(data: Mapping[str, Any], where: Document) -> Part:
    """The same with the defaults of TRL."""
    return _Arguments(data, where, trl=True).part()


class _Arguments:
    def __init__(self, data: Mapping[str, Any], where: Document, *, trl: bool) -> None:
        plain = {key: value for key, value in data.items() if key != "deepspeed"}
        self.deepspeed = data.get("deepspeed")
        self.s = Settings(plain, where.name, hyphens=True)
        self.where, self.trl = where, trl
        self.given: dict[str, Any] = {}
        self.notes: list[str] = []
        self.needs: dict[str, SpecError] = {}
        self.assumed: dict[str, str] = {}
        self.more: list[Part] = []

    def part(self) -> Part:
        s, given = self.s, self.given
        micro = s.number("per_device_train_batch_size", "per_gpu_train_batch_size", least=0)
        given["workload.micro_batch"] = micro or None
        given["accumulation"] = s.number("gradient_accumulation_steps") or None
        self._checkpointing()
        self._optimizer()
        self._model()
        self._types()
        self._adapters()
        self._sequence()
        if s.flag("use_liger_kernel", "use_liger", "use_liger_loss"):
            self._liger()
        else:
            self._head()
        self._sharding()
        usual = {
            "framework": "transformers",
            "workload.micro_batch": 8,
            "accumulation": 1,
            "policy": "full" if self.trl else "none",
            "training.optimizer": "adamw",
        }
        notes = (*self.notes, *s.notes(f"{IDLE}|{sharding.IDLE}", LEFT_OUT))
        return Part(
            kind="trl" if self.trl else "transformers", name=self.where.name, given=given,
            usual=usual, notes=notes, assumed=self.assumed, needs=self.needs, more=tuple(self.more),
        )  # fmt: skip

    def _head(self) -> None:
        """TRL's supervised trainer made all logits before 1.16, and tiles of them since."""
        if self.trl and self.given.get("training.objective", "sft") == "sft":
            self.assumed.setdefault(
                "training.loss",
                "All logits are counted, as TRL made them before 1.16 (--loss tiled for 1.16, that "
                "makes none).",
            )

    def _liger(self) -> None:
        """Liger's head: fused for next tokens; for log-probabilities TRL's tiles, as alike."""
        objective = self.given.get("training.objective", "sft")
        if OBJECTIVES[objective].head == "logits":
            self.given["training.loss"] = "fused"
        else:
            self.notes.append(f"Liger's loss of {objective} is counted as TRL's own.")

    def _checkpointing(self) -> None:
        if self.s.has("gradient_checkpointing", "activation_checkpointing"):
            on = self.s.flag("gradient_checkpointing", "activation_checkpointing")
            self.given["policy"] = "full" if on else "none"

    def _optimizer(self) -> None:
        s = self.s
        name = "adafactor" if s.flag("adafactor") else s.text("optim")
        if name:
            field, notes, needs = optimizer(name, "transformers", f"{self.where.name}: optim")
            rank = re.search(r"rank=(\d+)", s.text("optim_args"))
            if rank and "training.galore_rank" in field:
                field["training.galore_rank"] = int(rank[1])
            self.given |= field
            self.notes += notes
            self.needs |= needs

    def _model(self) -> None:
        s = self.s
        base = s.text("model_name_or_path", "model_name", "model_id", "config_name")
        self.given["base"] = base or None
        word = s.text("attn_implementation", "model_init_kwargs.attn_implementation",
                      "model_kwargs.attn_implementation")  # fmt: skip
        if s.flag("use_flash_attention_2", "use_flash_attn"):
            word = "flash_attention_2"
        if word:
            kernel = attention(word)
            self.given["workload.attention"] = kernel
            if kernel is None:
                self.notes.append(f"attn_implementation {word} is not known: sdpa is counted.")

    def _types(self) -> None:
        s = self.s
        fp16 = s.flag("fp16")
        bf16 = s.flag("bf16", default=self.trl and not fp16)
        if bf16 and fp16:
            raise SpecError(
                f"{self.where.name}: bf16 and fp16 are both on: transformers refuses it",
                "keep one of them",
            )
        default = "float32" if self.trl and s.has("model_name_or_path") else ""
        word = s.text("dtype", "torch_dtype", "model_init_kwargs.dtype",
                      "model_init_kwargs.torch_dtype", default=default)  # fmt: skip
        weights = element_type(word, f"{self.where.name}: dtype")
        self.given["workload.precision"] = precision(bf16=bf16, fp16=fp16, weights=weights)
        if (bf16 or fp16) and not word:
            kept = "fp32 under autocast (fp16 needs it)" if fp16 else "bf16"
            self.assumed["training.recipe"] = (
                f"The type weights are loaded in is not said: {kept} is taken "
                "(--precision amp-bf16 for fp32 weights under autocast)."
            )

    def _adapters(self) -> None:
        s = self.s
        four, eight = s.flag("load_in_4bit"), s.flag("load_in_8bit")
        bits = 4 if four else 8 if eight else 16
        rank = s.number("lora_r", "lora_rank", "peft_config.r", "lora.r", "lora_dim")
        if not s.flag("use_peft", "use_lora", "lora", default=bool(rank) and not self.trl):
            return
        self.given["training.lora_rank"] = rank or 16
        names = ("lora_target_modules", "peft_config.target_modules", "lora.target_modules")
        if s.has(*names):
            field, notes = targets(s, *names)
            self.given |= field
            self.notes += notes
        if bits < 16:
            self.given["training.base_bits"] = bits
        if s.flag("use_dora", "peft_config.use_dora"):
            self.given["training.dora"] = True
        field, notes = saved_modules(s, "lora_modules_to_save", "peft_config.modules_to_save")
        self.given |= field
        self.notes += notes

    def _sequence(self) -> None:
        s = self.s
        length = s.number("max_length", "max_seq_length", "block_size", "model_max_length",
                          "max_source_length", "cutoff_len", "max_sequence_length",
                          "max_seq_len")  # fmt: skip
        fields, notes = objective(s, trl=self.trl)
        self.given |= fields
        self.notes += notes
        if "workload.seq" in fields:
            return
        if length:
            self.given["workload.seq"] = length
        elif self.trl:
            self.given["workload.seq"] = 1024
        else:
            self.assumed["workload.seq"] = (
                "The arguments say no length of sequences: the model's usual one is taken (--seq)."
            )
        s.has("packing", "padding_free")

    def _sharding(self) -> None:
        value = self.deepspeed
        if self.s.has("zero_stage"):  # DeepSpeed-Chat (training/utils/ds_utils.py)
            zero = {"stage": self.s.number("zero_stage")}
            if self.s.flag("offload"):
                both = {"device": "cpu"}
                zero |= {"offload_param": both, "offload_optimizer": both}  # type: ignore[dict-item]
            self.more.append(deepspeed.part_of({"zero_optimization": zero}, self.where.name))
        if isinstance(value, Mapping):
            self.more.append(deepspeed.part_of(value, f"{self.where.name}: deepspeed"))
        elif isinstance(value, str) and value:
            found = beside(self.where, value)
            if found is not None:
                self.more.append(deepspeed.read(found.data, found))
            else:
                self.assumed["engine"] = missing(self.where, value, "deepspeed")
        section = self.s.section("fsdp_config")
        words = self.s.words("fsdp")
        if self.s.get("fsdp") in (False, "False", "false") or not words:
            return
        fields, notes, _ = sharding.fsdp(section, words, self.where.name)
        self.given |= fields
        if str(self.given.get("workload.precision")).endswith(("bf16", "fp16")):
            self.given["training.recipe"] = "fsdp"
        self.notes += notes
