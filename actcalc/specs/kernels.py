"""Kernel options of a run, named after Megatron-Core's configuration fields.

They choose between kernels that compute the same thing and keep different tensors. A field whose
default is ``auto`` follows the model or the framework profile. Frameworks that have no such
switch ignore them.

Source: Megatron-Core 0.16.1 ``transformer_config.py`` and ``training/arguments.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actcalc.specs.base import Count, Spec

Fp8Recipe = Literal["auto", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]
LoadBalancing = Literal["auto", "aux_loss", "seq_aux_loss", "global_aux_loss", "none"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class KernelOptions(Spec):
    """Which kernels a Megatron run uses; the defaults are those of its training script."""

    masked_softmax_fusion: bool = True
    """Fuse scale, mask and softmax of eager attention, where the kernel supports the shape."""
    attention_softmax_in_fp32: bool = True
    """An unfused softmax runs in fp32 and is cast back."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Transformer Engine's attention: flash-attn, cuDNN, or op by op; auto follows --attention."""
    apply_rope_fusion: bool = False
    """Rotate queries and keys in one kernel, which keeps no per-layer cosine and sine tables."""
    bias_activation_fusion: bool = True
    """Fuse bias and activation (bias_gelu_fusion, bias_swiglu_fusion)."""
    activation_func_fp8_input_store: bool = False
    """A fused SwiGLU keeps its input in fp8."""
    fp8_caching: Literal["engine", "source"] = "engine"
    """What fp8 products keep: engine, an fp8 copy of what they read, as Transformer Engine does;
    source, one copy that is cast where it is made, so that a re-run module's is dropped too, SwiGLU
    reading its input from it, and attention its output at 12 bits (DeepSeek-V3 report, 3.3.3)."""
    use_fused_weighted_squared_relu: bool = False
    """Experts' squared ReLU and routing weights are one kernel, which keeps its inputs."""
    moe_grouped_gemm: Literal["auto", "on", "off"] = "auto"
    """Run all local experts as one grouped product; auto: only with Transformer Engine."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts; flex: DeepEP or HybridEP, which send a token to
    a node, and there to a rank, once, however many of its experts are there."""
    moe_shared_expert_overlap: bool = False
    """Shared experts run beside the tokens' travel (Megatron's --moe-shared-expert-overlap).
    Changes time alone."""
    overlap_moe_expert_parallel_comm: bool = False
    """Tokens of one micro-batch travel beside the work of another (Megatron's option of this name,
    DualPipe's idea). Changes time; the second micro-batch's memory is not counted."""
    moe_router_dtype: Literal["auto", "fp32"] = "auto"
    """Element type of router logits; auto is that of the activations."""
    moe_router_load_balancing_type: LoadBalancing = "auto"
    """Load-balancing loss; auto: per sequence for sigmoid routers, else per micro-batch."""
    cross_entropy_loss_fusion: bool = False
    """Fuse the vocabulary-parallel cross-entropy; what it keeps follows from the next field."""
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    """Which fused cross-entropy: Megatron's keeps the fp32 softmax like the unfused one,
    Transformer Engine's the logits in their own type, which its backward overwrites."""
    make_vocab_size_divisible_by: Count = 0
    """Pad the vocabulary to a multiple of this times tp (Megatron's own default is 128; 0: no)."""
    async_tensor_model_parallel_allreduce: bool = True
    """Reduce input gradients over tensor-parallel ranks beside the weight gradient's product; false
    (Megatron's --no-async-tensor-model-parallel-allreduce, its code before 2022, plain DTensor
    tensor parallelism): everything waits. Changes time alone."""
    tp_comm_overlap: bool = False
    """Gather and scatter beside the product that needs them, piece by piece (Megatron's
    --tp-comm-overlap with Transformer Engine's user buffers, torchtitan's async TP; both need
    sequence parallelism). Changes time alone."""
    fp8_recipe: Fp8Recipe = "auto"
    """How fp8 operands are scaled (Megatron's --fp8-recipe, torchtitan's recipe_name): by earlier
    steps, one scale a tensor, a row, 128 or 32 values; auto: delayed with Transformer Engine, else
    tensorwise. Changes time; the scales' own bytes are not counted."""
    cuda_graphs: Literal["none", "attention", "full"] = "none"
    """What is captured in CUDA graphs, so that the host launches it in one call: nothing, attention
    (with its norm and projections), everything (Megatron's --cuda-graph-impl and -modules). Changes
    time; what graphs keep of their own in memory is not counted."""
