"""The kinds of op whose kernel a framework profile chooses, and the kernels there are for each.

One table per family of layer builders: a kind, the kernels it may name, what each keeps for
backward or does, and where that is from. A profile (``presets/frameworks``) is checked against it
when it is loaded; the builders in ``actcalc.layers`` read the choice with ``Context.kernel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Layers = Literal["megatron", "pytorch"]
"""Families of layer builders: ``actcalc.layers.megatron``, split over ranks as Megatron-LM splits
them, and ``actcalc.layers.pytorch``, modules of plain PyTorch on one GPU."""


class Kind(NamedTuple):
    """One kind of op: what is chosen, and each kernel with what it means and its source."""

    about: str
    kernels: Mapping[str, str]
    needed: bool = False
    """Every profile states it; one that leaves out another kind has no such op, and a model that
    needs it is refused."""


# --- Megatron's layers ----------------------------------------------------------------------------

_IDEAL_NORM = {"input_only": "keeps its input, 2sbh; statistics neglected (Korthikanti 2022 §4.1)"}
_FUSED_LAYERNORM = {
    "fused_layernorm": "keeps input, fp32 mean and rstd (ATen native_layer_norm, apex, TE)"
}
_FUSED_RMSNORM = {
    "fused_rmsnorm": "keeps input and fp32 rstd (ATen _fused_rms_norm, torch.nn.RMSNorm, TE)"
}
_LAYERNORM = {**_IDEAL_NORM, **_FUSED_LAYERNORM}
_RMSNORM = {**_IDEAL_NORM, **_FUSED_RMSNORM}
_FLASH = {
    "flash": "keeps q, k, v, output and logsumexp (Dao et al. 2022 §3.1)",
    "flash_local": "ATen's flash kernel in place of Megatron-Core DotProductAttention",
    "te": "Transformer Engine DotProductAttention: flash-attn or cuDNN, a ring under cp",
}

_MEGATRON: Mapping[str, Kind] = {
    "layernorm": Kind("LayerNorm", _LAYERNORM),
    "rmsnorm": Kind("RMSNorm", _RMSNORM),
    "gemma_rmsnorm": Kind("RMSNorm times (1 + weight)", _RMSNORM),
    "nonparametric": Kind("LayerNorm without weights", _IDEAL_NORM),
    "norm_fusion": Kind(
        "whether a norm runs inside the projection that reads it",
        {
            "separate": "an op of its own (Megatron-Core models/backends.py LocalSpecProvider)",
            "fused": "in the projection (Transformer Engine LayerNormLinear, LayerNormMLP)",
        },
        needed=True,
    ),
    "qkv": Kind(
        "queries, keys and values",
        {
            "packed": "one projection, of which they are views (Megatron-Core attention.py)",
            "split": "three tensors of their own (Korthikanti 2022 §4.1)",
        },
        needed=True,
    ),
    "kv_shards": Kind(
        "key and value heads where they are fewer than tensor-parallel ranks",
        {
            "gathered": "the whole projection is gathered (Megatron-Core attention.py)",
            "replicated": "a rank projects one head at least (Korthikanti 2022 §4.2.1)",
        },
        needed=True,
    ),
    "core_eager": Kind(
        "attention with scores in memory",
        {
            "eager_fused": "keeps softmax, mask and dropped output, 5as²b (Korthikanti 2022 §4.1)",
            "eager_megatron_local": "Megatron-Core dot_product_attention.py, fused_softmax.py",
            "eager_te": "Transformer Engine UnfusedDotProductAttention",
        },
        needed=True,
    ),
    "core_flash": Kind("attention without scores in memory", _FLASH, needed=True),
    "core_sdpa": Kind("attention asked for as PyTorch's", _FLASH, needed=True),
    "attention_sinks": Kind(
        "a learned logit per head in the softmax",
        {
            "unsupported": "refused",
            "fused": "without scores in memory alone (Transformer Engine softmax_type, cuDNN)",
            "any": "as one more key, which keeps nothing of its size",
        },
    ),
    "rotary": Kind(
        "rotary position",
        {
            "tables": "keeps a cosine and a sine per tensor (Megatron-Core rope_utils.py)",
            "fused": "keeps the angles alone, once per model (Transformer Engine fused_rope)",
        },
    ),
    "activation": Kind(
        "the feed-forward's nonlinearity",
        {
            "megatron": "fused with bias and weights where Megatron-Core fuses (fusions/)",
            "fused": "keeps its input alone (Korthikanti 2022 §4.1)",
        },
        needed=True,
    ),
    "router": Kind(
        "routing of tokens to experts",
        {
            "complete": "with all it keeps (Megatron-Core moe/router.py, token_dispatcher.py)",
            "ideal": "keeps the gate's input and the probabilities (Korthikanti 2022 §4.1, rule)",
        },
    ),
    "experts": Kind(
        "the experts of a rank",
        {
            "sequential": "one after another, or the legacy GroupedMLP (Megatron-Core experts.py)",
            "te_grouped": "one grouped product (Megatron-Core TEGroupedMLP)",
            "grouped": "one grouped product, nothing beside its operands",
        },
    ),
    "mla_down": Kind(
        "the down-projections of latent attention",
        {
            "duplicated": "every rank holds them whole (gpt_layer_specs.py, TELinear)",
            "column_gathered": "split, outputs gathered (gpt_layer_specs.py, local spec)",
        },
    ),
    "mamba": Kind(
        "state-space mixers",
        {"split_conv1d_scan": "mamba_split_conv1d_scan_combined (Megatron-Core mamba_mixer.py)"},
    ),
    "ends": Kind(
        "what look-up and cross-entropy keep beside ids and softmax",
        {
            "complete": "positions, masks, shifted ids (Megatron-Core tensor_parallel/layers.py)",
            "plain": "nothing (Korthikanti 2022 §4.3)",
        },
        needed=True,
    ),
}

# --- modules of plain PyTorch ---------------------------------------------------------------------

_NONE = {"none": "refused: the framework has none"}

_PYTORCH: Mapping[str, Kind] = {
    "layernorm": Kind(
        "LayerNorm",
        {
            **_FUSED_LAYERNORM,
            "native_plus_one": "the same, weight plus one (modeling_nemotron.py)",
            "centred": "op by op in fp32 (modeling_cohere.py)",
        },
    ),
    "rmsnorm": Kind(
        "RMSNorm",
        {
            "rms": "op by op in fp32, cast back, times the weight (modeling_llama.py)",
            **_FUSED_RMSNORM,
            "rms_late_cast": "cast back after the weight (modeling_olmo2.py)",
            "rms_fp32_weight": "the weight in fp32 too (modeling_helium.py)",
            "rms_t5": "half precision kept until the variance (modeling_t5.py)",
            "rms_pow": "by a power of the mean square, the weight in fp32 (modeling_gemma3n.py)",
        },
    ),
    "gemma_rmsnorm": Kind(
        "RMSNorm times (1 + weight)", {"rms_gemma": "in fp32, then cast back (modeling_gemma2.py)"}
    ),
    "nonparametric": Kind(
        "LayerNorm without weights", {"native_fp32": "native_layer_norm in fp32 (modeling_olmo.py)"}
    ),
    "unweighted": Kind(
        "RMSNorm without weights",
        {
            "rms_unweighted": "Llama4TextL2Norm (modeling_llama4.py)",
            "rms_pow_unweighted": "by a power of the mean square (modeling_gemma3n.py)",
        },
    ),
    "qkv": Kind(
        "queries, keys and values",
        {
            "plain": "three projections, or views of one (modeling_llama.py, modeling_phi3.py)",
            "falcon": "heads of one projection, broadcast (modeling_falcon.py _split_heads)",
            "copied": "interleaved parts of one projection, each copied (modeling_codegen.py)",
            "contiguous": "three projections, each copied with heads first (modeling_whisper.py)",
        },
        needed=True,
    ),
    "qk_norm": Kind(
        "norm of queries and keys",
        {
            "before_rotary": "before the rotation (modeling_qwen3.py)",
            "after_rotary": "after it (modeling_llama4.py)",
        },
        needed=True,
    ),
    "nope": Kind(
        "layers without rotary position in a model that has it",
        {
            "plain": "the rotation is left out (modeling_smollm3.py)",
            "scaled": "queries are scaled by position instead (modeling_llama4.py)",
        },
        needed=True,
    ),
    "rotary": Kind(
        "rotary position",
        {
            "half": "x·cos + rotate_half(x)·sin (modeling_llama.py)",
            "half_layer": "the same, tables cast in every layer (torchtitan qwen3 model.py)",
            "half_cat": "always concatenated with what is not rotated (modeling_gpt_neox.py)",
            "half_fp32": "in fp32, cast back (modeling_olmo.py)",
            "half_upcast": "products in fp32, cast back (modeling_modernbert.py)",
            "half_tables": "halves apart, tables half as wide (modeling_gpt_oss.py)",
            "interleaved": "even and odd entries, before heads are transposed (modeling_gptj.py)",
            "interleaved_fp32": "the same in fp32 (modeling_codegen.py)",
            "interleaved_layer": "tables repeated in every layer (modeling_glm.py)",
            "interleaved_layer_fp32": "the same in fp32 (modeling_ernie4_5.py)",
            "half_patches": "patches alone, not the tokens before them (modeling_dinov3_vit.py)",
            "complex": "complex64, tables made per run (modeling_deepseek_v2.py)",
            "complex_buffer": "complex64, the table a buffer (torchtitan llama3 model.py)",
        },
        needed=True,
    ),
    "rotary_tables": Kind(
        "tables of sines and cosines",
        {
            "one": "one for all layers (modeling_llama.py)",
            "per_kind": "one for each kind of attention (modeling_gemma3.py)",
        },
        needed=True,
    ),
    "rotary_rows": Kind(
        "rows of those tables",
        {
            "one": "one for all sequences (modeling_llama.py)",
            "batch": "one for each: positions of images (modeling_qwen3_5.py)",
        },
        needed=True,
    ),
    "rope_scale": Kind(
        "scaling of rotated queries by position",
        {"none": "not done (modeling_llama.py)", "scaled": "done (modeling_ministral3.py)"},
        needed=True,
    ),
    "core_eager": Kind(
        "attention op by op",
        {
            "eager": "scores, softmax, values (eager_attention_forward)",
            "packed": "the same for each image or window (modeling_qwen2_5_vl.py)",
            **_NONE,
        },
        needed=True,
    ),
    "core_sdpa": Kind(
        "scaled_dot_product_attention",
        {
            "sdpa": "the kernel that ATen chooses (sdp_utils.cpp)",
            "packed": "one call for each image or window (modeling_qwen2_5_vl.py)",
            **_NONE,
        },
        needed=True,
    ),
    "core_flash": Kind(
        "the flash-attn package",
        {"flash_package": "flash-attn 2 FlashAttnFunc (integrations/flash_attention.py)", **_NONE},
        needed=True,
    ),
    "sdpa_grouped": Kind(
        "grouped keys and values before the core",
        {
            "native": "left to PyTorch where it can (sdpa_attention.py use_gqa_in_sdpa)",
            "repeated": "always repeated (torchtitan repeat_kv)",
            "repeated_whole": "the same of DTensors, which copies (torchtitan qwen3)",
            "broadcast": "one head, broadcast by the product (modeling_falcon.py)",
        },
        needed=True,
    ),
    "sdpa_mask": Kind(
        "the mask given to scaled_dot_product_attention",
        {
            "none": "never one; a run that needs it is refused (torchtitan)",
            "needed": "with padding or a short window (masking_utils.py)",
            "always": "always one (modeling_falcon.py)",
        },
        needed=True,
    ),
    "attention_sinks": Kind(
        "a learned logit per head in the softmax",
        {
            "unsupported": "refused",
            "joint": "softmax over keys and sink (modeling_gpt_oss.py)",
            "joint_fp32": "the same of sinks in fp32, and so in fp32 (modeling_deepseek_v4.py)",
        },
    ),
    "attention_output_dropout": Kind(
        "dropout after attention's projection",
        {
            "hidden": "at the hidden rate (modeling_bert.py)",
            "none": "none (modeling_distilbert.py)",
            "attention": "at the rate of its probabilities (modeling_modernbert.py)",
            "alone": "at the hidden rate, none after the feed-forward (modeling_xlm_roberta_xl.py)",
        },
        needed=True,
    ),
    "scores": Kind(
        "element type of attention scores",
        {"activations": "the activations' (modeling_llama.py)", "fp32": "fp32 (modeling_gptj.py)"},
    ),
    "softmax": Kind(
        "softmax of attention scores",
        {
            "fp32": "in fp32, cast back (modeling_llama.py)",
            "input": "in the scores' type (modeling_gpt2.py)",
            "floored": "of scores not below the smallest number (modeling_xglm.py)",
            "less_maximum": "of scores less their maximum (modeling_mimo_v2_flash.py)",
        },
    ),
    "mask": Kind(
        "the mask of eager attention",
        {"add": "added, keeps nothing (modeling_llama.py)", "fill": "kept (modeling_mpt.py)"},
    ),
    "relative_bias": Kind(
        "learned bias of relative positions", {"look_up": "T5Attention.compute_bias"}
    ),
    "linear_projections": Kind(
        "projections of linear attention",
        {
            "packed": "two, ordered by key head (modeling_qwen3_next.py)",
            "split": "four: q, k and v in one (modeling_qwen3_5.py)",
            "single": "one for each (modeling_olmo_hybrid.py, modeling_kimi_linear.py)",
        },
    ),
    "mamba": Kind(
        "state-space mixers",
        {
            "fused": "one function from mamba-ssm (modeling_mamba2.py, modeling_mamba.py)",
            "fused_scaled": "the same, of numbers' products with input and projection "
            "(modeling_falcon_h1.py)",
            "apart": "convolution, norms and scan in turn (modeling_jamba.py)",
        },
    ),
    "wkv": Kind(
        "RWKV's recurrence",
        {"cuda": "RwkvLinearAttention, kernels-community/rwkv (modeling_rwkv.py)"},
    ),
    "gated_norm": Kind(
        "the gated norm of linear attention",
        {
            "silu_cast": "cast back before the weight (modeling_qwen3_next.py)",
            "sigmoid_fp32": "in fp32 throughout (modeling_kimi_linear.py)",
        },
    ),
    "linear_norms": Kind(
        "norms of a layer of linear attention",
        {
            "as_others": "where other layers have them (modeling_qwen3_next.py)",
            "pre": "before mixer and feed-forward (modeling_olmo_hybrid.py)",
        },
    ),
    "bias": Kind(
        "the bias of linear layers",
        {"fused": "addmm (torch.nn.Linear)", "apart": "an addition (modeling_falcon.py)"},
        needed=True,
    ),
    "router_softmax": Kind(
        "softmax over all experts, then top-k",
        {
            "softmax": "in fp32 after the product (modeling_mixtral.py)",
            "softmax_cast": "weights cast to the logits' type (modeling_qwen2_moe.py)",
            "softmax_fp32": "product in fp32 (modeling_deepseek_v2.py)",
            "softmax_fp32_clamped": "the same, divided by a clamped sum (modeling_ernie4_5_moe.py)",
            "softmax_scaled": "of a normed, scaled input; a scale per expert (modeling_gemma4.py)",
            "sparsemixer": "modeling_phimoe.py sparsemixer",
        },
    ),
    "router_softmax_topk": Kind(
        "top-k, then softmax over the chosen experts",
        {
            "softmax_of_chosen": "in the logits' type (modeling_gpt_oss.py)",
            "softmax_of_chosen_fp32": "in fp32 (modeling_granitemoe.py)",
        },
    ),
    "router_sigmoid": Kind(
        "sigmoid scores",
        {
            "sigmoid": "product in fp32 (modeling_deepseek_v3.py)",
            "sigmoid_half": "product in the activations' type (modeling_minimax_m2.py)",
            "sigmoid_own": "product and scores in the activations' type (modeling_lfm2_moe.py)",
            "sigmoid_of_chosen": "of the chosen logits alone (modeling_llama4.py)",
        },
    ),
    "router_sqrtsoftplus": Kind(
        "square roots of softplus scores",
        {"half": "in the activations' type (modeling_deepseek_v4.py)"},
    ),
    "correction_bias": Kind(
        "the bias that balances experts",
        {
            "buffer": "no parameter (modeling_deepseek_v3.py)",
            "parameter": "modeling_ernie4_5_moe.py",
        },
    ),
    "experts": Kind(
        "the experts",
        {
            "grouped": "grouped products of sorted tokens (integrations/moe.py)",
            "modules": "linear layers of each, one after another (transformers below 5)",
            "every_token": "every token through every expert (modeling_llama4.py)",
            "token_choice": "dispatched, with a router of their own (torchtitan moe.py MoE)",
        },
    ),
    "embedding_projection": Kind(
        "where a narrow embedding is widened",
        {
            "first": "before positions and norm (modeling_opt.py)",
            "after_norm": "modeling_electra.py",
        },
        needed=True,
    ),
    "embedding_scale": Kind(
        "the factor of the embedding",
        {"number": "keeps nothing (modeling_gemma.py)", "tensor": "kept (modeling_minicpm3.py)"},
        needed=True,
    ),
    "position_ids": Kind(
        "ids of learned positions",
        {
            "unsupported": "refused",
            "buffer": "a buffer, which costs nothing (modeling_bert.py)",
            "one": "one row for all sequences (modeling_gpt2.py)",
            "batch": "a row for each sequence (modeling_opt.py)",
            "batch_then_one": "an encoder's for each sequence, a decoder's one (modeling_bart.py)",
        },
        needed=True,
    ),
    "token_type_ids": Kind(
        "ids of segments",
        {"one": "one row, expanded (modeling_bert.py)", "batch": "gathered (modeling_roberta.py)"},
    ),
    "final_dropout": Kind(
        "dropout after the last norm",
        {
            "none": "none (modeling_llama.py)",
            "embedding": "at the embedding's rate (modeling_t5.py)",
        },
        needed=True,
    ),
    "masked_loss": Kind(
        "the cross-entropy of a masked language model",
        {
            "plain": "logits as they are (modeling_bert.py)",
            "upcast": "fp32 logits (loss_utils.py ForMaskedLMLoss)",
        },
    ),
    "fp16_clamp": Kind(
        "a clamp to finite numbers in fp16",
        {
            "none": "none (modeling_llama.py)",
            "every_sum": "after each part of a layer (modeling_t5.py)",
            "encoder_layer": "after each layer of an encoder (modeling_mbart.py)",
        },
        needed=True,
    ),
    "loss": Kind(
        "the cross-entropy of a language model",
        {
            "shifted": "fp32 logits, labels shifted (loss_utils.py ForCausalLMLoss)",
            "upcast": "fp32 logits (torchtitan components/loss.py)",
            "biased": "a buffer of biases is added, in fp32 under autocast (modeling_bart.py)",
            "plain": "logits as they are (modeling_t5.py)",
        },
        needed=True,
    ),
}

KINDS: Mapping[Layers, Mapping[str, Kind]] = {"megatron": _MEGATRON, "pytorch": _PYTORCH}
"""Builders -> kind of op -> the kernels there are."""
