"""Megatron-LM's flags (``megatron/training/arguments.py``), behind the launch of so many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.writers.back import balanced, grouped
from actcalc.io.writers.hugging import optimizer_word
from actcalc.io.writers.profile import check_profile
from actcalc.specs.recompute import ALIASES, MODULES
from actcalc.specs.run import Run

Flags = dict[str, Any]

_GELU = {"gelu_new": "gelu", "gelu_tanh": "gelu", "gelu_fast": "gelu"}
SAME: Mapping[str, Mapping[str, str]] = {
    # names of a family, and how reference code packs what Megatron packs its own way
    "model.family": dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2",
                                   "qwen3_moe", "deepseek_v3", "gpt_neox", "deepseek_v2", "olmo2",
                                   "qwen2_moe", "phi3", "granite", "nemotron", "kimi_k2"),
                                  "gpt"),
    "model.packed_qkv": {"False": "True"},
    "model.packed_gate": {"True": "False"},
    "model.norm_bias": {"False": "True"},
    "model.activation": _GELU,
    "model.moe.router": {"softmax": "softmax_topk"},
    "workload.attention": {"sdpa": "flash"},
    "kernels.attention_backend": {"unfused": "auto"},
    "layout.microbatch_group": {"None": "0"},
}  # fmt: skip
"""What the flags cannot tell apart because it makes no difference to Megatron's layers."""


def write(run: Run) -> str:
    """The launch with all flags; ``SpecError`` for what Megatron has none for."""
    check_profile(run, "megatron", "megatron", "megatron-local")
    flags: Flags = {
        **_model(run), **_moe(run), **_mla(run), **_layout(run), **_workload(run),
        **_training(run), **_policy(run),
    }  # fmt: skip
    devices = run.layout.devices
    each = devices if devices <= 8 else next(n for n in range(8, 0, -1) if devices % n == 0)
    nodes = devices // each
    lines = [f"torchrun --nproc_per_node {each} --nnodes {nodes} pretrain_gpt.py"]
    for name, value in flags.items():
        if value is True:
            lines.append(f"    --{name}")
        elif value not in (None, False):
            lines.append(f"    --{name} {value}")
    return " \\\n".join(lines) + "\n"


def _model(run: Run) -> Flags:
    model, dropout = run.model, run.workload.dropout
    if model.encoder_layers or not model.causal or model.pattern:
        raise SpecError(
            f"--emit megatron writes decoders of attention, which {model.name} is not",
            "use --emit yaml",
        )
    position = {"learned": "learned_absolute", "rotary": "rope"}.get(model.position, model.position)
    flags: Flags = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "group-query-attention": model.kv_heads != model.heads,
        "num-query-groups": model.kv_heads if model.kv_heads != model.heads else None,
        "kv-channels": model.head_dim or None,
        "vocab-size": model.vocab,
        "position-embedding-type": position,
        "max-position-embeddings": model.max_positions or run.workload.seq,
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(model.norm),
        "swiglu": model.gated and model.activation == "silu",
        "squared-relu": model.activation == "relu2",
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "untie-embeddings-and-output-weights": not model.tied,
        "hidden-dropout": model.hidden_dropout if dropout else "0.0",
        "attention-dropout": model.attention_dropout if dropout else "0.0",
        "qk-layernorm": model.qk_norm == "head",
        "mtp-num-layers": model.mtp_layers or None,
        "mtp-use-repeated-layer": model.mtp_shared,
    }
    for name in ("hidden-dropout", "attention-dropout"):
        flags[name] = str(flags[name])
    if model.position == "rotary" and model.rotary_dim and not model.mla:
        flags["rotary-percent"] = model.rotary_dim / model.head_dim
    return flags


def _moe(run: Run) -> Flags:
    moe, kernels = run.model.moe, run.workload.kernels
    if moe is None:
        return {}
    pattern = run.model.mlp_pattern
    listed = "+".join(f"[{int(kind == 'moe')}]*{count}" for kind, count in _runs(pattern))
    scores = "sigmoid" if moe.router == "sigmoid" else "softmax"
    return {
        "num-experts": moe.experts,
        "moe-router-topk": moe.topk,
        "moe-ffn-hidden-size": moe.ffn,
        "moe-shared-expert-intermediate-size": moe.shared_ffn or None,
        "moe-shared-expert-gate": moe.shared_gate,
        "moe-latent-size": moe.latent or None,
        "moe-router-score-function": scores,
        "moe-router-pre-softmax": moe.router == "softmax" and not moe.normalize_topk,
        "moe-router-enable-expert-bias": moe.correction_bias,
        "moe-router-num-groups": moe.groups if moe.groups > 1 else None,
        "moe-router-group-topk": moe.topk_groups if moe.topk_groups > 1 else None,
        "moe-aux-loss-coeff": "1e-2" if moe.aux_loss else "0",
        "moe-layer-freq": f'"({listed})"' if pattern else None,
        "moe-router-load-balancing-type": balanced(run),
        "moe-grouped-gemm": grouped(run) == "on",
        "moe-token-dispatcher-type": kernels.moe_token_dispatcher_type,
        "moe-router-dtype": "fp32" if kernels.moe_router_dtype == "fp32" else None,
        "moe-shared-expert-overlap": kernels.moe_shared_expert_overlap,
        "overlap-moe-expert-parallel-comm": kernels.overlap_moe_expert_parallel_comm,
    }


def _runs(pattern: tuple[str, ...]) -> list[tuple[str, int]]:
    from itertools import groupby

    return [(kind, sum(1 for _ in same)) for kind, same in groupby(pattern)]


def _mla(run: Run) -> Flags:
    mla = run.model.mla
    if mla is None:
        return {}
    return {
        "multi-latent-attention": True,
        "kv-channels": None,
        "q-lora-rank": mla.q_lora or None,
        "kv-lora-rank": mla.kv_lora,
        "qk-head-dim": mla.nope_dim,
        "qk-pos-emb-head-dim": mla.rope_dim,
        "v-head-dim": mla.v_dim,
    }


def _layout(run: Run) -> Flags:
    layout = run.layout
    if layout.pipeline not in ("1f1b", "interleaved"):
        raise SpecError(f"--emit megatron: it has no schedule {layout.pipeline}", "use 1f1b")
    flags: Flags = {
        "tensor-model-parallel-size": layout.tp,
        "sequence-parallel": layout.sp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep if layout.ep > 1 else None,
        "expert-tensor-parallel-size": layout.etp,
        "microbatch-group-size-per-virtual-pipeline-stage": layout.microbatch_group,
    }
    if layout.layers_per_stage:
        stages = ["t" * count for count in layout.layers_per_stage]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        flags["pipeline-model-parallel-layout"] = f"'{'|'.join(stages)}'"
    elif layout.vpp > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = layout.vpp
    if layout.zero == 1:
        flags["use-distributed-optimizer"] = True
    elif layout.zero:
        strategy = "optim_grads_params" if layout.zero == 3 else "optim_grads"
        flags |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy}
    return flags


def _workload(run: Run) -> Flags:
    work, kernels = run.workload, run.workload.kernels
    local = not run.framework.transformer_engine
    backend = kernels.attention_backend
    if backend == "auto" and not local and work.attention == "eager":
        backend = "unfused"
    half = "bf16" if work.precision == "fp8" else str(work.precision)
    gate = "swiglu" if run.model.gated else "gelu"
    return {
        "seq-length": work.seq,
        "micro-batch-size": work.micro_batch,
        "global-batch-size": work.global_batch,
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "fp8-format": "hybrid" if work.fp8_products else None,
        "fp8-recipe": _fp8_recipe(run),
        "transformer-impl": "local" if local else None,
        "use-flash-attn": local and work.attention != "eager",
        "attention-backend": backend,
        "no-masked-softmax-fusion": not kernels.masked_softmax_fusion,
        "no-rope-fusion": not kernels.apply_rope_fusion,
        f"no-bias-{gate}-fusion": not kernels.bias_activation_fusion,
        "activation-func-fp8-input-store": kernels.activation_func_fp8_input_store,
        "use-fused-weighted-squared-relu": kernels.use_fused_weighted_squared_relu,
        "cross-entropy-loss-fusion": kernels.cross_entropy_loss_fusion,
        "cross-entropy-fusion-impl": kernels.cross_entropy_fusion_impl,
        "make-vocab-size-divisible-by": kernels.make_vocab_size_divisible_by or 1,
        "no-async-tensor-model-parallel-allreduce": (
            not kernels.async_tensor_model_parallel_allreduce
        ),
        "tp-comm-overlap": kernels.tp_comm_overlap,
        **_GRAPHS[kernels.cuda_graphs],
    }


def _fp8_recipe(run: Run) -> str | None:
    """Megatron's word for the recipe, where it has one and it is not its default."""
    recipe = run.workload.kernels.fp8_recipe
    known = recipe in ("tensorwise", "mxfp8", "blockwise")
    return recipe if run.workload.fp8_products and known else None


_GRAPHS: Mapping[str, Flags] = {
    "none": {},
    "attention": {"cuda-graph-impl": "local", "cuda-graph-scope": "attn"},
    "full": {"cuda-graph-impl": "local", "cuda-graph-scope": "full_iteration"},
}
"""What is captured in CUDA graphs."""


def _training(run: Run) -> Flags:
    training = run.training
    sixteen = training.gradients_in_16_bit
    fp16 = run.workload.precision == "fp16"
    flags: Flags = {
        "optimizer": optimizer_word(run, "megatron", "megatron"),
        "no-gradient-accumulation-fusion": not training.gradient_fusion,
        "grad-reduce-in-bf16": sixteen and not fp16,
        "accumulate-allreduce-grads-in-fp32": fp16 and not sixteen,
        "deterministic-mode": training.deterministic,
        "no-overlap-p2p-communication": not training.overlapped_messages,
        "fp8-param-gather": training.fp8_weights,
        "fsdp-double-buffer": training.persistent_buffers,
        "optimizer-cpu-offload": training.offload == "optimizer",
        "num-distributed-optimizer-instances": (
            training.instances if training.instances > 1 else None
        ),
        "overlap-grad-reduce": training.overlapped_reduction,
        "overlap-param-gather": training.overlapped_gather,
        "no-use-layer-wise-param-layout": training.whole_weights == "dealt",
    }
    if training.instances_share_states:
        flags["outer-dp-sharding-strategy"] = "optim"
    if training.offload_layers:
        flags |= {"cpu-offloading": True, "cpu-offloading-num-layers": training.offload_layers}
    if training.offload_modules:
        flags |= {
            "fine-grained-activation-offloading": True,
            "offload-modules": " ".join(training.offload_modules),
            "min-offloaded-tensor-size": training.offload_elements,
        }
    return flags


def _policy(run: Run) -> Flags:
    policy = (run.policies or ("none",))[0]
    if policy == "none":
        return {}
    method, _, count = policy.partition(":")
    if policy in ("full", "full-sharded") or method in ("uniform", "block"):
        return {
            "recompute-granularity": "full",
            "recompute-method": method if count else "uniform",
            "recompute-num-layers": count or 1,
            "distribute-saved-activations": policy == "full-sharded",
        }
    words = [ALIASES.get(word, word) for word in policy.split("+")]
    if not all(word in MODULES and MODULES[word].megatron for word in words):
        raise SpecError(
            f"--emit megatron: it has no flags that re-run {policy}", "use none, full or selective"
        )
    names = " ".join(MODULES[word].megatron for word in words)
    return {"recompute-granularity": "selective", "recompute-modules": names}
