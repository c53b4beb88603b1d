"""What is known of Megatron-LM's options beside those that are read: by name, in tables.

Names are those of ``megatron/training/arguments.py`` and of the configuration classes that newer
versions make them from, without leading dashes and with hyphens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Options that change neither memory nor FLOPs, or by far less than a per cent, by the groups of
# training/arguments.py: logging, checkpoints, learning rate and regularisation, initialisation,
# data, validation, fault tolerance. CUDA graphs have a warning of their own.
IDLE = re.compile(
    r"(no-)?(log|tensorboard|wandb|timing|profile|save|load|ckpt|dist-ckpt|async-save|use-dist-ckpt"
    r"|auto-detect-ckpt|use-persistent-ckpt|non-persistent|finetune|use-checkpoint|exit|rerun|check"
    r"|verify|error|inprocess|manual-gc|eval|test-mode|valid|lr|min-lr|decoupled|override-opt"
    r"|train|step-batch|rampup|start-weight|end-weight|weight-decay|clip-grad|loss-scale"
    r"|initial-loss|hysteresis|adam-(beta1|beta2|eps)|sgd-momentum|muon-(momentum|extra|scale|num)"
    r"|calculate-per-token|init-method|norm-epsilon|seed|te-rng|data-(path|cache|args)|split|fim|num"
    r"-(workers|dataset)|dataloader-type|mock-data|vocab-file|merge-file|tokenizer|tiktoken|hf-"
    r"|reset|eod-mask|create-attention-mask|rotary-(base|scaling)|mscale|use-mcore|use-tp-pp"
    r"|disable-gloo|distributed-(backend|timeout)|local-rank|high-priority|nccl"
    r"|ddp-(average|pad|num-buckets|bucket)|enable-exper|apply-query-key|apply-layernorm-1p"
    r"|apply-wd|overlap-(grad-reduce|param-gather)|max-position-embeddings|fp16$|bf16$"
    r"|use-flash-attn|accumulate-allreduce|mtp-loss|attention-softmax-in-fp32|persist-layer-norm"
    r"|rotary-interleaved|use-distributed-optimizer|num-layers$|is-hybrid-model|mmap-bin|use-mup"
    r"|mup-|params-dtype|data-parallel-size|transformer-pipe|megatron-fsdp-version|delay-wgrad|bias-dropout-fusion"
    r"|moe-router-(bias|topk-scaling|pre-softmax)|moe-(permute-fusion|enable-deepep|deepep)"
    r"|moe-(flex-dispatcher|hybridep)|cuda-graph|optimizer-cuda-graph|fp8-(margin|amax)"
    r"|num-layers-at-(start|end)-in-bf16|offload-modules|min-offloaded|activation-offload"
    r"|delay-offload|cpu-offloading-(double|retain)|moe-router-(fusion|padding)|moe-shared-expert-overlap|moe-token-drop|moe-z-loss"
    r"|add-position-embedding|clone-scatter|scatter-gather|fp8-wgrad|tp-comm-(bulk|overlap-)|rank$"
    r"|seq-length$|consumed|inference-|retro-|biencoder|ict-|bert-(load|embedder)|vision-|img-|dino-"
    r"|mask-(type|factor)|iter-per|patch-dim|num-c(hannels|lasses)|overlap-p2p-communication-warmup|cp-comm-type|rope-type|use-rope-scaling|qk-clip).*"
)

OF_A_SWITCH = (
    ("num-experts", "moe-"),
    ("multi-latent-attention", "kv-lora-rank"),
    ("multi-latent-attention", "q-lora-rank"),
    ("multi-latent-attention", "qk-head-dim"),
    ("multi-latent-attention", "qk-pos-emb-head-dim"),
    ("multi-latent-attention", "v-head-dim"),
    ("hybrid-layer-pattern", "mamba-"),
    ("use-precision-aware-optimizer", "exp-avg-"),
    ("use-precision-aware-optimizer", "main-params-dtype"),
    ("group-query-attention", "num-query-groups"),
)
"""Switches, and how the options begin that say nothing where they are off."""

LEFT_OUT: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("activation-offload-fraction", "keeps part of the offloaded modules: more memory", (1,)),
    ("delta-offload-bytes-across-pp-ranks", "keeps more on later stages: more memory", (0,)),
    ("cpu-offloading-weights", "moves nothing in today's Transformer Engine", ()),
    ("optimizer-offload-fraction", "leaves part of the optimizer on the device: more", (1,)),
    ("overlap-moe-expert-parallel-comm", "runs two micro-batches side by side: more memory", ()),
    ("moe-expert-capacity-factor", "drops tokens of experts chosen too often: less memory", ()),
    ("moe-pad-expert-input-to-capacity", "pads each expert's tokens to its capacity: more", ()),
    ("use-transformer-engine-op-fuser", "keeps other tensors of the feed-forward part", ()),
    ("first-last-layers-bf16", "keeps fp8 out of the first and last layers", ()),
    ("reuse-grad-buf-for-mxfp8-param-ag", "gathers weights into the gradients' buffer: less", ()),
    ("fp4-format", "runs products in 4 bits: what it keeps is less", ()),
    ("main-grads-dtype", "accumulates gradients in another type", ("fp32", "torch.float32")),
    ("fp32-residual-connection", "keeps the stream between layers in fp32: more memory", ()),
    ("window-size", "limits what attention sees: fewer FLOPs", ()),
)
"""Options that change memory or FLOPs and are not modelled: name, what they do, idle values."""

REFUSED = (
    ("experimental-attention-variant", "attention other than that of GPT or DeepSeek-V3"),
    ("linear-attention-freq", "linear attention"),
    ("linear-attention-type", "linear attention"),
    ("linear-conv-kernel-dim", "linear attention"),
    ("linear-key-head-dim", "linear attention"),
    ("linear-value-head-dim", "linear attention"),
    ("linear-num-key-heads", "linear attention"),
    ("linear-num-value-heads", "linear attention"),
    ("attention-output-gate", "a gate of attention's output"),
    ("use-gated-attention", "a gate of attention's output"),
    ("dsa-indexer-topk", "attention that picks keys by a learned indexer"),
    ("heterogeneous-layers-config-path", "layers that differ by a file"),
    ("enable-hyper-connections", "several residual streams"),
    ("enable-mhc-connections", "several residual streams"),
    ("flextron", "elastic layers with a router of widths"),
    ("export-kd-teacher-load", "a teacher beside the trained model"),
    ("retro-project-dir", "layers that attend to retrieved text"),
    ("vision-model-type", "a vision tower beside the decoder"),
    ("language-model-checkpoint", "a vision tower beside the decoder"),
    ("dataloader-seq-length", "a vision tower beside the decoder"),
    ("disable-vision-class-token", "a vision tower beside the decoder"),
    ("perform-rl-step", "an inference engine beside the trained model"),
    ("inference-dynamic-batching", "inference, not training"),
    ("num-tokens-to-generate", "inference, not training"),
)
"""Options that name what the megatron profile does not describe."""

KNOWN_SPECIFICATIONS = (
    "local", "mamba_stack", "hybrid_stack", "gpt_layer_specs", "bert_layer_specs", "t5_spec",
    "glm4 get_glm_spec",
)  # fmt: skip
"""What a ``--spec`` is known by: Megatron-LM's own, and slime's norms before and after each part
(slime_plugins/models/glm4.py)."""

NEGATED: Mapping[str, str] = {
    "add-bias-linear": "disable-bias-linear",
    "apply-rope-fusion": "no-rope-fusion",
    "async-tensor-model-parallel-allreduce": "no-async-tensor-model-parallel-allreduce",
    "bert-binary-head": "bert-no-binary-head",
    "bias-gelu-fusion": "no-bias-gelu-fusion",
    "bias-swiglu-fusion": "no-bias-swiglu-fusion",
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
    "masked-softmax-fusion": "no-masked-softmax-fusion",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
}
"""Fields of the parsed arguments (as checkpoints and W&B keep them) that a switch turns off."""

RENAMED: Mapping[str, str] = {
    "fp8": "fp8-format",
    "fp8-param": "fp8-param-gather",
    "fp4": "fp4-format",
    "moe-router-padding-for-fp8": "moe-router-padding-for-quantization",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "padded-vocab-size": "vocab-size",
    "use-custom-fsdp": "use-megatron-fsdp",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
}
"""Fields of the parsed arguments, and former names, of options that are called otherwise."""
