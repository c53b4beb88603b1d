"""How weights are trained: optimizer, number formats of the states, offload, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from actcalc.errors import SpecError, suggestion
from actcalc.specs.base import Bounds, Count, Degree, Rate, Spec
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.optimizers import OPTIMIZERS, meant
from actcalc.specs.recipes import CHOOSABLE
from actcalc.specs.targets import TARGET_GROUPS, Targets

if TYPE_CHECKING:
    Optimizer = str
    Recipe = str
    ObjectiveName = str
else:  # choices are the rows of the tables, which a type checker cannot read
    Optimizer = Literal[tuple(OPTIMIZERS)]
    Recipe = Literal["auto", *CHOOSABLE]
    ObjectiveName = Literal[tuple(OBJECTIVES)]
Offload = Literal["none", "optimizer", "weights", "activations"]
Loss = Literal["auto", "full", "chunked", "recomputed", "tiled", "fused", "in-place"]

TRAINABLE = ("embeddings", "head", "norms", "layers")
"""Parts of a model that ``train`` names."""

OFFLOADABLE = (
    "qkv_linear", "core_attn", "attn_proj", "attn_norm", "expert_fc1", "moe_act", "mlp_norm",
)  # fmt: skip
"""Modules whose saved tensors Megatron offloads (transformer_config.py offload_modules).

In the order in which a layer commits their groups: a norm's is committed after the addition that
follows its block. Reloading goes through them backwards.
"""

First = Annotated[int, Bounds(-100_000, 100_000)]
"""First layers of a model; negative: all but so many."""

Bits = Annotated[int, Bounds(4, 32)]
"""Bits of one weight of a frozen base model."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Training(Spec):
    """What is kept for every parameter beside the weight itself, and where it is kept."""

    optimizer: Optimizer = "adamw"
    """Optimizer of the trained weights."""
    recipe: Recipe = "auto"
    """Number formats of weights, gradients and states; auto: the framework's."""
    gradient_fusion: bool = True
    """Weight gradients are added to the accumulated ones inside the product; false makes each one
    first (Megatron's --no-gradient-accumulation-fusion)."""
    gradients_in_16_bit: bool = False
    """Accumulate and reduce gradients in 16 bits (Megatron without
    accumulate_allreduce_grads_in_fp32, or with grad_reduce_in_bf16)."""
    whole_weights: Literal["none", "dealt", "packed"] = "none"
    """Muon's states live whole on one rank each (Megatron's layer-wise distributed optimizer):
    dealt out by size (--no-use-layer-wise-param-layout), or packed by buckets; none: no or an even
    split."""
    overlapped_reduction: bool = False
    """Gradients are reduced by buckets while backward runs (Megatron's --overlap-grad-reduce)."""
    overlapped_gather: bool = False
    """Weights that a sharded optimizer updated are gathered while the next step's first forward
    runs (Megatron's --overlap-param-gather). Changes time alone."""
    overlapped_messages: bool = True
    """An interleaved pipeline sends and receives while it computes (Megatron's overlap_p2p_comm;
    false: --no-overlap-p2p-communication)."""
    shards: Degree | None = None
    """Ranks over which ZeRO shards, when fewer than all replicas (hybrid sharding)."""
    instances: Degree = 1
    """Copies of the sharded states, each over its part of the replicas (Megatron's
    --num-distributed-optimizer-instances)."""
    instances_share_states: bool = False
    """Master weights and moments are sharded over all instances, weights and gradients inside each
    (Megatron-FSDP's --outer-dp-sharding-strategy optim)."""
    prefetch: bool = True
    """ZeRO-3 gathers the next layer's weights while one computes."""
    persistent_buffers: bool = False
    """Gathered weights and gradients of ZeRO-3 live in buffers that stay (Megatron-FSDP)."""
    fused_optimizer: bool = True
    """The optimizer step is one kernel; false makes temporaries as large as one state
    (torch.optim with foreach)."""
    foreach_optimizer: bool = True
    """An optimizer step that is not fused goes over all tensors at once; false: tensor by tensor
    (torch.optim with foreach=False)."""
    keeps_gathered: bool | None = None
    """Gathered weights stay from forward to backward (fully_shard's reshard_after_forward=False;
    torchtitan's fsdp_reshard_after_forward); None: with ZeRO 2, or in a pipeline."""
    step_in_backward: bool = False
    """Each weight is updated as soon as its gradient is there, which is then dropped: gradients of
    one layer at a time (torch's optimizer step in backward)."""
    bucket_view: bool = False
    """Gradients are views of the buckets in which replicas reduce them, which stay between steps
    (DistributedDataParallel's gradient_as_bucket_view)."""
    zero_redundancy: bool = False
    """ZeRO 1 is torch's ZeroRedundancyOptimizer beside DistributedDataParallel: whole weights'
    states on one rank each (else DeepSpeed's, an even split and one bucket)."""
    embedding_moments: Literal["optimizer", "fp32"] = "optimizer"
    """Moments of embedding tables under an 8-bit optimizer: as the optimizer has them, or fp32
    (transformers' Trainer)."""
    bucket_elements: Count = 500_000_000
    """Elements of a DeepSpeed reduction bucket (ZeRO outside Megatron)."""
    live_elements: Count = 1_000_000_000
    """Elements of gathered weights that DeepSpeed's ZeRO 3 has at once, at most
    (stage3_max_live_parameters)."""
    reuse_elements: Count = 1_000_000_000
    """Weights used again within so many elements are not released (stage3_max_reuse_distance)."""
    prefetch_elements: Count = 50_000_000
    """Elements that DeepSpeed's ZeRO 3 gathers ahead (stage3_prefetch_bucket_size)."""
    master_bytes: Count = 0
    """Bytes of a master weight, when other than the recipe's (Megatron's --main-params-dtype)."""
    moments_bytes: Count = 0
    """Bytes of all moments of one parameter, when other than the recipe's (--exp-avg-dtype)."""
    deferred_head: Count = 0
    """Micro-batches whose logit gradients wait for the head's weight gradient at the end of the
    step (Megatron's --defer-embedding-wgrad-compute)."""
    offload: Offload = "none"
    """What is kept in host memory: optimizer states; weights and optimizer states; activations."""
    offload_modules: tuple[str, ...] = ()
    """Modules whose saved tensors wait in host memory (Megatron's --offload-modules, where
    --fine-grained-activation-offloading is given)."""
    offload_elements: Count = 1024 * 1024
    """Elements a tensor must have to be offloaded with its module (--min-offloaded-tensor-size)."""
    offload_layers: Count = 0
    """First layers whose saved tensors wait in host memory (Transformer Engine's cpu_offload.py;
    Megatron's --cpu-offloading-num-layers)."""
    loss: Loss = "auto"
    """Cross-entropy: full, PyTorch's over all logits at once; chunked, its temporaries for a part
    of the tokens only (torchtune CEWithChunkedOutputLoss); recomputed, each part under a checkpoint
    of its own, which keeps no logits (TRL's chunked loss); tiled, log-probabilities of the labels
    from tiles of tokens and vocabulary, without logits (TRL's fused head, from 1.16); fused with
    the head, which makes gradients in forward and keeps no logits (Liger); in-place, a kernel that
    writes the gradient over all logits (unsloth, fms-acceleration); auto: the framework's."""
    loss_chunks: Count = 0
    """Parts of a chunked, recomputed or fused cross-entropy; 0: 8 of a chunked one, parts of 256
    tokens of a recomputed one, Liger's own number of a fused one."""
    compiled_loss: bool = False
    """The cross-entropy is compiled (torch.compile): what is fp32 lives inside its kernels, and
    the logits themselves are kept for backward."""
    loss_metrics: Count = 0
    """Further cross-entropies of every micro-batch's logits, forward only, that a trainer logs
    (Composer's LanguageCrossEntropy and LanguagePerplexity are 2). Changes time alone."""
    lora_rank: Count = 0
    """Rank of low-rank adapters; 0 trains every weight."""
    lora_targets: str = "all"
    """Which linear layers get adapters: all, attention, mlp, names of projections joined by + or
    commas (q+v; PEFT's q_proj+v_proj; lm_head), or a pattern of whole module paths."""
    lora_dtype: Literal["auto", "base", "fp32"] = "auto"
    """Type of adapters: the base's, or fp32 (PEFT's autocast_adapter_dtype over a 16-bit base);
    auto: fp32 under autocast, whose base then stays in 16 bits, else the base's."""
    lora_dropout: bool = False
    """Inputs of adapters are dropped out: each keeps its own, and a mask."""
    dora: bool = False
    """Adapters have a magnitude beside their direction (DoRA; PEFT's use_dora)."""
    base_bits: Bits = 16
    """Bits of a frozen base weight under LoRA (4 for QLoRA: nf4 with double quantisation)."""
    galore_rank: Count = 0
    """Rank to which gradients of hidden matrices are projected for their moments (GaLore); 0: they
    are not."""
    train: tuple[str, ...] = ()
    """Parts that are trained: embeddings, head, norms, layers. Beside adapters as copies of the
    frozen ones (PEFT's modules_to_save); without adapters nothing else is trained. Empty: every
    weight, or adapters alone."""
    tower: Literal["trained", "frozen"] = "trained"
    """Whether a vision tower is trained with the language model; its projector always is. Adapters,
    and a part of the model that is trained alone, leave it frozen."""
    freeze: First = 0
    """First layers that are frozen, and the embedding with them; -N: all layers but the last N."""
    objective: ObjectiveName = "sft"
    """What is trained for: next tokens, preferences (dpo, kto), a reward model, or one update of
    GRPO on completions that were generated before."""
    reference: Literal["auto", "none", "model"] = "auto"
    """The model that dpo and kto compare with: a second one, or with adapters the base; none: its
    log-probabilities were computed before (TRL's precompute_ref_log_probs). GRPO has one where
    its beta is not 0: model."""
    generation_share: Rate = 0.0
    """Share of the device that an engine of generation holds beside training (TRL's
    vllm_gpu_memory_utilization with colocated vLLM that does not sleep)."""
    deterministic: bool = False
    """Deterministic kernels, for which cuBLAS is given a workspace of 32 MiB."""
    fp8_weights: bool = False
    """Weights themselves are fp8 (Megatron's --fp8-param-gather), not only copies of them."""

    def __post_init__(self) -> None:
        ours = "" if self.optimizer in OPTIMIZERS else meant(str(self.optimizer))
        if ours:
            raise SpecError(f"training: optimizer is {self.optimizer!r}", f"it is {ours} here")
        super().__post_init__()

    def _check(self) -> None:
        optimizer = OPTIMIZERS[self.optimizer]
        if self.whole_weights != "none" and not optimizer.newton_schulz:
            whole = " or ".join(name for name, row in OPTIMIZERS.items() if row.newton_schulz)
            raise SpecError(
                f"whole_weights {self.whole_weights} is for {whole}, the optimizer is "
                f"{self.optimizer}",
                f"add --optimizer {whole}, or drop whole_weights",
            )
        if self.moments_bytes and not optimizer.moments:
            raise SpecError(
                f"moments_bytes is {self.moments_bytes}, but {self.optimizer} keeps no moments",
                "drop moments_bytes, or name another optimizer",
            )
        self._check_step(optimizer.kept == "8-bit")
        if self.galore_rank and (optimizer.moments != 2 or self.lora_rank):
            what = f"lora_rank {self.lora_rank}" if self.lora_rank else self.optimizer
            raise SpecError(
                f"galore_rank {self.galore_rank} projects the moments of Adam over whole weights, "
                f"not of {what}",
                "use --optimizer adamw or adam8bit without adapters, or drop galore_rank",
            )
        self._check_offload()
        if self.shards is not None and self.shards < 1:
            raise SpecError(f"training: shards is {self.shards}", "use a value of at least 1")
        if self.lora_targets != "all" and not self.lora_rank:
            raise SpecError(
                f"lora_targets {self.lora_targets} changes nothing: no adapter is trained",
                "add --lora-rank 16, or drop --lora-targets",
            )
        given = {
            "lora_dropout": self.lora_dropout,
            f"lora_dtype {self.lora_dtype}": self.lora_dtype != "auto",
            "dora": self.dora,
        }
        idle = [what for what, on in given.items() if on and not self.lora_rank]
        if idle:
            raise SpecError(
                f"{idle[0]} changes nothing: no adapter is trained",
                "add --lora-rank 16, or drop it",
            )
        self._check_parts()
        self._check_objective()
        if self.base_bits < 16 and not self.lora_rank:
            raise SpecError(
                f"base_bits {self.base_bits} is of a frozen base, but no adapter is trained",
                "add --lora-rank 16, or drop base_bits",
            )

    def _check_objective(self) -> None:
        """Refuse a loss, a reference or an engine that the objective does not have."""
        row = OBJECTIVES[self.objective]
        losses = {"log-probabilities": ("auto", "tiled", "full", "in-place"), "score": ("auto",)}
        known = losses.get(row.head)
        if known and self.loss not in known:
            raise SpecError(
                f"objective {self.objective} has no loss {self.loss}",
                "drop --loss, or use " + " or ".join(known),
            )
        if self.reference != "auto" and not row.reference:
            raise SpecError(
                f"objective {self.objective} has no reference model", "drop reference, or use dpo"
            )
        if self.generation_share and self.objective != "grpo":
            raise SpecError(
                f"generation_share {self.generation_share:g} is beside grpo, not {self.objective}",
                "add --objective grpo, or drop it",
            )

    @property
    def reference_runs(self) -> bool:
        """Whether log-probabilities of a reference are computed in training."""
        row = OBJECTIVES[self.objective]
        asked = row.reference == "asked" and self.reference == "model"
        return asked or (row.reference == "always" and self.reference != "none")

    @property
    def reference_model(self) -> bool:
        """Whether the reference is a second model: with adapters it is the base itself."""
        return self.reference_runs and not self.lora_rank

    def _check_parts(self) -> None:
        """Refuse unknown parts to train, and targets that read as nothing."""
        for part in self.train:
            if part not in TRAINABLE:
                raise SpecError(
                    f"train has {part!r}, no part of a model",
                    suggestion(part, TRAINABLE) or "use one of " + ", ".join(TRAINABLE),
                )
        if "layers" in self.train and self.lora_rank:
            raise SpecError(
                f"train layers beside adapters of rank {self.lora_rank}: adapters stand for them",
                "drop layers from --train, or drop --lora-rank",
            )
        foreign = self.targets.foreign
        if foreign or not self.lora_targets.strip():
            what = foreign[0] if foreign else self.lora_targets
            raise SpecError(
                f"lora_targets names {what!r}, which no model has",
                "use " + ", ".join(TARGET_GROUPS) + r", names (q+v) or a pattern ('.*\.q_proj')",
            )

    def _check_step(self, eight_bit: bool) -> None:
        """Refuse what changes nothing of the optimizer's step."""
        if self.fused_optimizer and not self.foreach_optimizer:
            raise SpecError(
                "foreach_optimizer false changes nothing: the step is one kernel",
                "add fused_optimizer=false, or drop it",
            )
        if self.embedding_moments != "optimizer" and not eight_bit:
            raise SpecError(
                f"embedding_moments {self.embedding_moments} is for an optimizer in 8 bits, not "
                f"{self.optimizer}",
                "add --optimizer adam8bit, or drop it",
            )

    @property
    def tunes(self) -> bool:
        """Whether some weights are frozen, or added."""
        return bool(self.lora_rank or self.train or self.freeze)

    @property
    def still_tower(self) -> bool:
        """Whether a vision tower keeps its weights as they are."""
        return self.tower == "frozen" or self.tunes

    @property
    def targets(self) -> Targets:
        """What ``lora_targets`` says."""
        return Targets(self.lora_targets)

    @property
    def moves_activations(self) -> bool:
        """Whether activations wait in host memory from forward to backward."""
        return bool(self.offload == "activations" or self.offload_modules or self.offload_layers)

    def _check_offload(self) -> None:
        for module in self.offload_modules:
            if module not in OFFLOADABLE:
                raise SpecError(
                    f"offload_modules has {module!r}, which is not modelled",
                    "use " + ", ".join(OFFLOADABLE),
                )
        if "attn_proj" in self.offload_modules and "core_attn" not in self.offload_modules:
            raise SpecError(
                "offload_modules has attn_proj without core_attn, whose backward needs its input",
                "add core_attn, or drop attn_proj",
            )
        given = {
            "offload_modules": bool(self.offload_modules),
            "offload_layers": bool(self.offload_layers),
            "offload activations": self.offload == "activations",
        }
        ways = [name for name, on in given.items() if on]
        if len(ways) > 1:
            raise SpecError(f"{' and '.join(ways)} exclude each other", "use one of them")
