"""Parts that some models have: experts, latent and linear attention, state-space mixers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.base import Count, Size, Spec


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` nearest to ``wanted`` (the smaller on a tie)."""
    divisors = [d for d in range(1, min(number, 65536) + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Sizes(Spec):
    """Sizes of one layer that differ from the model's; 0: as the model's."""

    heads: Count = 0
    """Attention (query) heads."""
    kv_heads: Count = 0
    """Key/value heads."""
    head_dim: Count = 0
    """Width of one head."""
    ffn: Count = 0
    """Feed-forward width."""

    @property
    def own(self) -> dict[str, int]:
        """What differs, by field name."""
        return {name: getattr(self, name) for name in self.field_names() if getattr(self, name)}


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Moe(Spec):
    """A mixture-of-experts feed-forward (Mixtral, Qwen-MoE, DeepSeek, gpt-oss, Llama 4)."""

    experts: Size
    """Routed experts in one layer."""
    topk: Size
    """Experts that each token is sent to."""
    ffn: Size
    """Width of one routed expert."""
    shared_ffn: Count = 0
    """Summed width of the experts every token passes (0: none)."""
    latent: Count = 0
    """Width that tokens are projected to before their experts and back from after them (Nemotron
    3's latent experts); 0: none, experts read the hidden width."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a learned sigmoid gate (Qwen2-MoE)."""
    router: Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"] = "softmax"
    """softmax over all experts then top-k; top-k then softmax; sigmoid scores (DeepSeek-V3); or
    square roots of softplus (DeepSeek-V4)."""
    normalize_topk: bool = True
    """The chosen experts' weights are scaled to sum to one (``norm_topk_prob``)."""
    router_bias: bool = False
    """The router's projection has a bias (gpt-oss)."""
    correction_bias: bool = False
    """A per-expert score bias that balances load (DeepSeek-V3); a buffer or a parameter."""
    groups: Size = 1
    """Expert groups for group-limited routing."""
    topk_groups: Size = 1
    """Groups that a token may be routed to."""
    bias: bool = False
    """Expert projections have biases (gpt-oss)."""
    scale_input: bool = False
    """Tokens are scaled by their routing weight before the expert, not after (Llama 4)."""
    beside_dense: bool = False
    """Experts run beside the dense feed-forward, of the stream before it (Gemma 4)."""
    aux_loss: bool = True
    """A load-balancing loss keeps the router's probabilities for backward."""

    def _check(self) -> None:
        if self.topk > self.experts:
            raise SpecError(
                f"topk {self.topk} is more than experts {self.experts}",
                f"use a topk of at most {self.experts}",
            )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Mla(Spec):
    """Multi-head latent attention (DeepSeek-V2/V3, Kimi-K2): low-rank queries, keys and values."""

    q_lora: Count = 0
    """Rank of the query projection (0: full-rank queries)."""
    kv_lora: Size
    """Rank of the joint key/value projection."""
    nope_dim: Size
    """Per-head width of queries and keys without position."""
    rope_dim: Size
    """Per-head width of queries and keys with rotary position; the key's is shared by all heads."""
    v_dim: Size
    """Per-head width of values."""

    @property
    def qk_dim(self) -> int:
        """Per-head width of queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Indexer(Spec):
    """What picks the keys that latent attention reads (DeepSeek-V3.2's sparse attention, GLM-5).

    It has no gradient: its scores are ranked, and trained apart.
    """

    heads: Size
    """Heads of its queries."""
    head_dim: Size
    """Width of one head, and of its one key."""
    topk: Size
    """Keys that a query attends to."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Compression(Spec):
    """Attention of one key/value head over a window and compressed keys (DeepSeek-V4).

    Layers called ``sparse`` pick among keys of a few tokens each by an indexer, ``compressed`` ones
    read all keys of many tokens each; ``sliding`` ones have the window alone.
    """

    q_lora: Size
    """Rank of the query projection."""
    sparse_rate: Size = 4
    """Tokens that become one key of a sparse layer; windows of twice as many overlap."""
    heavy_rate: Size = 128
    """Tokens that become one key of a compressed layer."""
    groups: Size = 1
    """Groups of heads whose outputs are projected apart."""
    group_rank: Size
    """Width that each group is projected to."""
    index_heads: Size
    """Heads of the indexer's queries."""
    index_dim: Size
    """Width of one of them, and of the indexer's keys."""
    index_topk: Size
    """Compressed keys that a query attends to."""

    def rate(self, attention: str) -> int:
        """Tokens that become one key in a layer of that kind; 0: none do."""
        return {"sparse": self.sparse_rate, "compressed": self.heavy_rate}.get(attention, 0)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Mamba(Spec):
    """A state-space mixer: Mamba-2 (Dao and Gu 2024; the defaults are Megatron-Core's), or the
    first Mamba (Gu and Dao 2023), whose every channel is a head of width 1."""

    version: Literal[1, 2] = 2
    """Which of the two."""
    rank: Count = 0
    """Width that the step of version 1 is projected from."""
    bias: bool = False
    """The projections in and out have biases."""
    conv_bias: bool = True
    """The short convolution has a bias."""
    norm: bool = True
    """Version 2: a gated norm precedes the output projection (Falcon-H1 may leave it out)."""
    state: Size = 128
    """Width of the state of one head."""
    head_dim: Size = 64
    """Width of one head."""
    groups: Size = 8
    """Groups of heads that share input and output matrices."""
    heads: Count = 0
    """Heads; 0 means as many as twice the hidden width holds."""
    conv: Size = 4
    """Tokens that the short convolution spans."""
    chunk: Size = 128
    """Tokens that the scan handles at once."""

    def _check(self) -> None:
        if self.version == 1 and not self.rank:
            raise SpecError("mamba.rank is missing", "give the rank of version 1's step")
        if self.version == 1 and self.head_dim != 1:
            self._set(head_dim=1)

    def heads_of(self, hidden: int) -> int:
        """Heads in a model of that width."""
        return self.heads or 2 * hidden // self.head_dim


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Shared(Spec):
    """Blocks of attention and feed-forward, each run by several layers before a state-space mixer
    of their own (Zamba2, Glorioso et al. 2024, arXiv:2411.15242).

    A block reads the stream beside the embedding's output, twice the hidden width.
    """

    blocks: Size = 1
    """Blocks, which layers run by turns."""
    rank: Size
    """Rank of what each layer adds to the projections of a block."""
    in_attention: bool = False
    """Layers add to the projections of queries, keys and values too."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Disentangled(Spec):
    """Attention that scores content and relative position apart (He et al. 2020, arXiv:2006.03654;
    DeBERTa-v2 and v3)."""

    span: Size
    """Relative positions on each side: the table has twice as many rows of the model's width."""
    shared: bool = False
    """Positions pass the projections of queries and keys instead of their own."""
    content_to_position: bool = True
    """Queries score positions (c2p)."""
    position_to_content: bool = True
    """Keys score positions (p2c)."""
    normed: bool = False
    """The table passes a normalisation, once for all layers."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Linear(Spec):
    """Linear attention: a state per head that a delta rule writes (gated delta nets, KDA), or that
    fades at a fixed rate (lightning attention); or a gated short convolution alone (LFM2); or a
    state per channel (RWKV-4)."""

    rule: Literal["gated_delta", "kimi_delta", "lightning", "short_conv", "wkv"] = "gated_delta"
    """A decay per head (Yang et al. 2024, arXiv:2412.06464; Qwen3-Next), one per channel of the
    keys, made by a projection of low rank (Kimi Linear), or none that is learned (Qin et al. 2024,
    arXiv:2405.17381; MiniMax-01); a short convolution has no state, and one head. ``wkv`` is
    RWKV-4's time mix, of one head (Peng et al. 2023, arXiv:2305.13048): layers with it have channel
    mix for a feed-forward."""
    key_heads: Size
    """Heads of queries and keys."""
    value_heads: Size
    """Heads of values, each with a state; consecutive ones share a key head."""
    key_dim: Size
    """Width of one head's queries and keys."""
    value_dim: Size
    """Width of one head's values."""
    conv: Size = 4
    """Tokens that the short convolution of queries, keys and values spans; lightning attention
    and RWKV have none."""
    block: Size = 256
    """Tokens that lightning attention handles at once; the most that RWKV's kernel takes."""
    bias: bool = False
    """Projections and convolution have biases (LFM2's ``conv_bias``)."""
    doubled: bool = False
    """Writing strengths reach up to 2, so that eigenvalues may be negative (OLMo Hybrid)."""

    @property
    def opens(self) -> bool:
        """The first layer normalises the stream before its own norms (RWKV's ``pre_ln``)."""
        return self.rule == "wkv"

    def _check(self) -> None:
        if self.value_heads % self.key_heads:
            raise SpecError(
                f"linear.value_heads {self.value_heads} is not divisible by key_heads "
                f"{self.key_heads}",
                f"use {nearest_divisor(self.value_heads, self.key_heads)} key_heads",
            )
        if self.rule == "wkv" and (self.value_heads > 1 or self.key_dim != self.value_dim):
            raise SpecError(
                f"linear: wkv has one state per channel, not {self.value_heads} heads of "
                f"{self.key_dim} and {self.value_dim}",
                "give one head, and key_dim as wide as value_dim",
            )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PerLayer(Spec):
    """An embedding of every token for each layer, which a gate of the stream multiplies at the end
    of the layer (Gemma 3n, Gemma 4)."""

    dim: Size
    """Width of one layer's embedding."""
    vocab: Size
    """Rows of its table, each as wide as all layers' embeddings together."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AltUp(Spec):
    """Alternating updates: a layer works on one of several residual streams and predicts the
    others (Baykal et al. 2023, arXiv:2301.13310; Gemma 3n)."""

    laurel: Size
    """Rank of the low-rank product beside attention (LAuReL, arXiv:2411.07501)."""
    scaled: bool = True
    """The corrected stream is scaled by a learned vector (``altup_correct_scale``)."""
    clipped: bool = True
    """Coefficients are clamped in training (``altup_coef_clip``)."""
