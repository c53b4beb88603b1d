"""What a transformer is made of: widths, layer kinds, norms, attention, feed-forward, head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.base import MAX_LAYERS, Cap, Count, Layers, MoreLayers, Rate, Size, Spec
from actcalc.specs.layer import ATTENDS, MIXERS, AttentionKind, LayerKind, LayerWord, Mixer, MlpKind
from actcalc.specs.parts import (
    AltUp,
    Compression,
    Disentangled,
    Indexer,
    Linear,
    Mamba,
    Mla,
    Moe,
    PerLayer,
    Shared,
    Sizes,
    nearest_divisor,
)
from actcalc.specs.tower import Tower

Activation = Literal[
    "gelu",
    "gelu_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "relu2",
    "silu",
    "swiglu_oai",
]

PARTS: dict[str, type[Spec]] = {
    "moe": Moe, "mla": Mla, "compression": Compression, "indexer": Indexer, "mamba": Mamba,
    "tower": Tower, "shared": Shared, "disentangled": Disentangled, "linear": Linear,
    "per_layer": PerLayer, "altup": AltUp,
}  # fmt: skip
"""Fields of a model that are specs of their own."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Model(Spec):
    """A transformer's architecture. Defaults describe a GPT-3-like decoder."""

    name: str = "model"
    """What the user calls it."""
    family: str = "gpt"
    """The hub's ``model_type``, or the family of the paper; frameworks may pick kernels by it."""
    layers: Layers
    """Number of transformer layers (l). An encoder-decoder's decoder layers."""
    hidden: Size
    """Width of the residual stream (h)."""
    heads: Size
    """Attention (query) heads (a); 1 where no layer has attention."""
    kv_heads: Count = 0
    """Key/value heads (k); 0 means as many as heads."""
    head_dim: Count = 0
    """Width of one head (d); 0 means hidden / heads."""
    value_dim: Count = 0
    """Width of one head's values where it is not that of its keys (MiMo-V2); 0 means head_dim."""
    ffn: Count = 0
    """Feed-forward width (f); 0 means 4 · hidden."""
    vocab: Count = 0
    """Vocabulary entries (v), as in the embedding table, before tensor-parallel padding (0: none,
    for a model that reads patches)."""
    max_positions: Count = 0
    """Learned positions in the table (0: none); of rotary image models the tokens of an image."""
    decoder_positions: Count = 0
    """Learned positions in a decoder's own table (0: as many as ``max_positions``)."""
    position: Literal["learned", "rotary", "alibi", "relative", "none"] = "learned"
    """How positions enter."""
    relative_buckets: Count = 0
    """Buckets of the table of relative-position biases (T5: 32); one table in a stack's first
    layer, shared by its others."""
    relative_every_layer: bool = False
    """Every layer has a table of relative-position biases of its own (UMT5)."""
    rotary_dim: Count = 0
    """Per-head width that is rotated; 0 means head_dim."""
    token_types: Count = 0
    """Segment embeddings (BERT: 2)."""
    embedding_norm: bool = False
    """A normalisation right after the embedding (BERT, BLOOM)."""
    embedding_dim: Count = 0
    """Width of the token embedding when it differs from hidden (OPT-350m); 0 means hidden."""

    norm: Literal["layernorm", "rmsnorm", "gemma_rmsnorm", "nonparametric"] = "layernorm"
    """Kind of normalisation; gemma_rmsnorm multiplies by (1 + weight) in fp32."""
    norm_bias: bool = True
    """A LayerNorm has a bias (ignored by the other kinds)."""
    norm_placement: Literal["pre", "normed_stream", "post", "sandwich", "post_sublayer"] = "pre"
    """pre; normed_stream (MiniMax-01: parts are added to what the norm before them gives); post
    (BERT: after the residual); sandwich (Gemma 2: both); post_sublayer (OLMo 2)."""
    first_norm: bool = True
    """The first layer has a norm before its attention (ModernBERT: the embedding's serves)."""
    fp32_stream: bool = False
    """The stream between layers is kept in fp32 (Mamba's ``residual_in_fp32``)."""
    layer_scale: bool = False
    """Each part of a layer is multiplied by a learned vector before it is added (DINOv2)."""
    parallel: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and feed-forward read the same input, after one shared or two norms."""
    final_norm: bool = True
    """A normalisation before the head."""

    activation: Activation = "gelu"
    """Feed-forward nonlinearity."""
    gated: bool = False
    """The feed-forward has a gate projection (SwiGLU, GeGLU)."""
    clamped_gate: bool = False
    """Gate and up projection are clamped (DeepSeek-V4)."""
    packed_gate: bool = False
    """Gate and up are one projection in the reference code (Phi-3, GLM-4)."""
    packed_qkv: bool = False
    """Query, key and value are one projection in the reference code (GPT-2, NeoX, Phi-3)."""
    qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    key_bias: bool = True
    """The key projection has a bias where the others have (Whisper: false)."""
    out_bias: bool = True
    """Bias of the attention output projection."""
    mlp_bias: bool = True
    """Biases of the feed-forward projections."""
    qk_norm: Literal["none", "head", "heads", "full", "unweighted"] = "none"
    """Normalisation of queries and keys: per head (Qwen 3), per head with weights of each head's
    own (Command R+), over the full width (OLMo 2), or per head without weights (Llama 4)."""
    attention_gate: Literal["none", "packed", "own"] = "none"
    """Attention's output is scaled by a sigmoid of the layer's input, whose projection is packed
    with the queries' (Qwen3-Next) or of its own (AFMoE)."""
    values_scaled: bool = False
    """Values are multiplied by a number (MiMo-V2)."""
    v_norm: bool = False
    """Values are normalised too (Gemma 3n/4)."""
    attention_sinks: bool = False
    """A learned per-head logit joins the softmax (gpt-oss)."""
    sinks_in: Literal["every", "windowed"] = "every"
    """Which layers have sinks, if any: every one, or those with a window (MiMo-V2)."""
    attention_softcap: Cap = 0.0
    """tanh cap of the attention scores (Gemma 2); 0 means none."""
    logit_softcap: Cap = 0.0
    """tanh cap of the output logits (Gemma 2); 0 means none."""
    clip_qkv: bool = False
    """Queries, keys and values are clamped (DBRX, OLMo 1 7B)."""
    causal: bool = True
    """A token sees only those before it."""
    window: Count = 0
    """Sliding-window or chunk length for the layers that have one (0: none)."""
    attention_pattern: tuple[LayerWord, ...] = ()
    """What mixes tokens in each layer: a kind of attention, mamba, both side by side, mamba after
    a shared block, linear, or none; empty means all full attention, or sliding if window is set."""
    mlp_pattern: tuple[MlpKind, ...] = ()
    """Kind of feed-forward per layer, none included; empty means all dense, or all moe if ``moe``
    is given."""
    layer_sizes: tuple[Sizes, ...] = ()
    """Sizes of each layer that differ from the model's (Nemotron-NAS's blocks, MiMo-V2's windowed
    layers); empty: none do."""
    no_rope_layers: tuple[int, ...] = ()
    """Indices of layers without rotary position (Llama 4, SmolLM 3)."""
    kv_shared_layers: MoreLayers = 0
    """Last layers that read the keys and values of an earlier one of their kind (Gemma 3n, 4)."""
    keys_as_values: bool = False
    """In layers without a window values are the keys before their norm (Gemma 4)."""
    sparse_layers: tuple[int, ...] = ()
    """Indices of layers whose gates below a cut-off are set to zero (Gemma 3n)."""
    per_layer: PerLayer | None = None
    """An embedding of every token for each layer, if used."""
    altup: AltUp | None = None
    """Alternating updates of the residual streams, if used."""
    moe: Moe | None = None
    """Mixture of experts, if any layer has one."""
    mla: Mla | None = None
    """Multi-head latent attention, if used."""
    indexer: Indexer | None = None
    """Picks the keys that latent attention reads, in every layer."""
    compression: Compression | None = None
    """Attention over compressed keys, if used."""
    streams: Size = 1
    """Residual streams, which every part reads and writes by learned mixtures (DeepSeek-V4's
    hyper-connections)."""
    sinkhorn_iterations: Count = 0
    """Rounds that make the mixing of several streams doubly stochastic."""
    mtp_layers: MoreLayers = 0
    """Multi-token-prediction layers after the last one (DeepSeek-V3: 1)."""
    mamba: Mamba | None = None
    """State-space mixer, if any layer is one."""
    shared: Shared | None = None
    """Blocks that several layers run, if any does."""
    disentangled: Disentangled | None = None
    """Attention scores of content and of position apart, if used."""
    linear: Linear | None = None
    """Linear attention, if any layer is one."""
    pattern: str = ""
    """Layers of a hybrid, a letter each as in Megatron's --hybrid-layer-pattern: M state-space
    mixer, * attention, - feed-forward, E experts; empty: attention and feed-forward in each."""
    mtp_pattern: str = ""
    """Layers inside each prediction layer of a hybrid, in the same letters."""
    mtp_shared: bool = False
    """All prediction layers share one set of weights (--mtp-use-repeated-layer)."""

    tied: bool = True
    """The output head shares the embedding's weight."""
    head: Literal["lm", "mlm", "classifier", "score", "pooled", "none"] = "lm"
    """What follows the last layer: language model, masked LM (BERT), classifier, a score of every
    token of which the last counts (a reward model), a sequence's tokens made one for a loss outside
    (CLIP), nothing."""
    pooling: Literal["first", "last", "picked", "mean", "first_and_mean", "attention"] = "first"
    """What a classifier or a pooled output reads of a sequence: one token, first, last or picked by
    its id (CLIP), the mean of tokens, both side by side (DINOv2), or what a learned query finds
    (SigLIP)."""
    pooled_norm: bool = False
    """The last normalisation is of the pooled token alone (CLIP's vision tower)."""
    sentence_head: bool = False
    """A second head beside that of a masked language model: a dense layer over the first token and
    a classifier of the order of two sentences (Megatron's BERT)."""
    transform_bias: bool = True
    """The dense layer of a masked language model's head has a bias."""
    head_bias: bool = False
    """The output projection has a bias."""
    labels: Count = 0
    """Classes of a classifier head; width of a pooled output's projection (0: none)."""
    patches: Count = 0
    """Input values of one patch of a vision transformer (channels · patch²); 0: text."""
    prefix_tokens: Count = 1
    """Learned tokens before an image's patches: class token, registers (SigLIP: 0)."""
    registers: Count = 0
    """Those of the prefix tokens that have no position (DINOv2 with registers)."""
    patch_bias: bool = True
    """The projection of patches has a bias."""
    mask_token: bool = False
    """A token in place of hidden patches, which supervised training leaves alone (DINOv2)."""
    mel_bins: Count = 0
    """Frequencies of a spectrogram that an encoder reads through two convolutions (Whisper); 0:
    it reads tokens."""
    tower: Tower | None = None
    """Vision tower and projector, where images are part of the sequence."""
    encoder_layers: MoreLayers = 0
    """Layers of the encoder of an encoder-decoder (0: none); ``layers`` is then the decoder's."""

    hidden_dropout: Rate = 0.0
    """Dropout after attention and after the feed-forward, in training."""
    attention_dropout: Rate = 0.0
    """Dropout of the attention probabilities, in training."""
    embedding_dropout: Rate = 0.0
    """Dropout after the embedding, in training."""
    activation_dropout: Rate = 0.0
    """Dropout after the feed-forward's activation function, in training (T5, BioGPT)."""

    def __post_init__(self) -> None:
        for name, kind in PARTS.items():
            if isinstance(value := getattr(self, name), dict):
                self._set(**{name: kind(**value)})
        for name in ("attention_pattern", "mlp_pattern", "no_rope_layers", "sparse_layers"):
            self._set(**{name: tuple(getattr(self, name))})
        each = (Sizes(**sizes) if isinstance(sizes, dict) else sizes for sizes in self.layer_sizes)
        self._set(layer_sizes=tuple(each))
        super().__post_init__()

    def _check(self) -> None:
        """Fill the gaps with what they mean, then refuse what contradicts itself."""
        if not self.vocab and not self.patches:
            raise SpecError("model: vocab is missing", "give vocab (patches, for images)")
        if not self.kv_heads:
            self._set(kv_heads=self.heads)
        if not self.head_dim and self.mla is None:
            if self.hidden % self.heads:
                near = nearest_divisor(self.hidden, self.heads)
                raise SpecError(
                    f"hidden {self.hidden} is not divisible by heads {self.heads}",
                    f"use {near} heads, or give head_dim",
                )
            self._set(head_dim=self.hidden // self.heads)
        if not self.ffn:
            self._set(ffn=4 * self.hidden)
        if self.heads % self.kv_heads:
            raise SpecError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}",
                f"use kv_heads {nearest_divisor(self.heads, self.kv_heads)}",
            )
        for name in ("attention_pattern", "mlp_pattern", "layer_sizes"):
            length = len(getattr(self, name))
            if length not in (0, self.layers):
                raise SpecError(
                    f"{name} has {length} entries for {self.layers} layers",
                    "give one entry per layer, or none",
                )
        self._check_chosen()
        if self.pattern or self.mtp_pattern:
            self._check_pattern()
        self._check_sizes()
        if self.indexer is not None and not (self.mla and self.mla.q_lora):
            raise SpecError(
                "indexer is given but mla.q_lora is not: it reads the queries' latent",
                "describe mla with a q_lora",
            )
        if "moe" in self.mlp_pattern and self.moe is None:
            raise SpecError("mlp_pattern names moe layers but moe is missing", "describe moe")
        if self.compression is None and {"sparse", "compressed"} & set(self.attention_pattern):
            raise SpecError(
                "attention_pattern names compressed layers but compression is missing",
                "describe compression",
            )
        for name in ("mamba", "linear", "shared"):
            used = any(name in word.split("+") for word in self.attention_pattern)
            if used and getattr(self, name) is None:
                raise SpecError(
                    f"attention_pattern names {name} layers but {name} is missing",
                    f"describe {name}",
                )
        if self.position == "rotary" and self.rotary_dim > max(self.head_dim, 1) and not self.mla:
            raise SpecError(
                f"rotary_dim {self.rotary_dim} is wider than head_dim {self.head_dim}",
                f"use a rotary_dim of at most {self.head_dim}",
            )

    def _check_chosen(self) -> None:
        """Layers that are named are there; each kind of attention has one with keys of its own."""
        for name in ("no_rope_layers", "sparse_layers"):
            if len(getattr(self, name)) > self.layers:
                raise SpecError(
                    f"{name} has {len(getattr(self, name))} entries for {self.layers} layers",
                    "name each layer once",
                )
        first = self.layers - self.kv_shared_layers
        words = self.attention_pattern or ("full",)
        if first < 1 or not set(words[first:]) <= set(words[:first]):
            raise SpecError(
                f"kv_shared_layers is {self.kv_shared_layers} of {self.layers} layers: the first "
                f"{max(first, 0)} do not have every kind of attention",
                "leave layers of each kind with keys of their own",
            )

    def _check_sizes(self) -> None:
        """Each layer's own sizes are sizes that a model could have."""
        if self.layer_sizes and (self.mla or self.encoder_layers or self.pattern):
            raise SpecError(
                "layer_sizes are given beside mla, encoder_layers or pattern",
                "give each layer's sizes in a decoder with plain attention",
            )
        for own in dict.fromkeys(self.layer_sizes):
            heads, kv_heads = own.heads or self.heads, own.kv_heads or self.kv_heads
            if heads % kv_heads:
                raise SpecError(
                    f"layer_sizes: heads {heads} is not divisible by kv_heads {kv_heads}",
                    f"use kv_heads {nearest_divisor(heads, kv_heads)}",
                )

    def _check_pattern(self) -> None:
        if len(self.mtp_pattern) > MAX_LAYERS:
            raise SpecError(
                f"mtp_pattern has {len(self.mtp_pattern)} letters",
                f"use at most {MAX_LAYERS}",
            )
        letters = set(self.pattern + self.mtp_pattern)
        if letters - set("M*-E"):
            raise SpecError(
                f"pattern has the letters {''.join(sorted(letters - set('M*-E')))!r}",
                "write M (state-space), * (attention), - (feed-forward) or E (experts) per layer",
            )
        if len(self.pattern) != self.layers:
            raise SpecError(
                f"pattern has {len(self.pattern)} letters for {self.layers} layers",
                "give one letter per layer",
            )
        for letter, needed in (("M", "mamba"), ("E", "moe")):
            if letter in letters and getattr(self, needed) is None:
                raise SpecError(
                    f"pattern has {letter} layers but {needed} is missing", f"describe {needed}"
                )

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * (self.mla.qk_dim if self.mla else self.head_dim)

    @property
    def v_dim(self) -> int:
        """Width of one head's values."""
        return self.mla.v_dim if self.mla else self.value_dim or self.head_dim

    @property
    def sensed(self) -> bool:
        """Whether the first layer reads an image or a sound, not tokens."""
        return bool(self.patches or self.mel_bins)

    @property
    def depth(self) -> int:
        """Layers of the whole model: the encoder's, then the decoder's."""
        return self.encoder_layers + self.layers

    def kind(self, index: int) -> LayerKind:
        """What layer ``index`` (from 0, an encoder's first) is."""
        if index < self.encoder_layers:
            return LayerKind("full", 0, "dense", self.position == "rotary")
        index -= self.encoder_layers
        if self.pattern:
            return self.part(self.pattern[index])
        word: LayerWord = "sliding" if self.window else "full"
        if self.attention_pattern:
            word = self.attention_pattern[index]
        mlp: MlpKind = "moe" if self.moe else "dense"
        if self.mlp_pattern:
            mlp = self.mlp_pattern[index]
        mixer = MIXERS.get(word, "attention")
        attention: AttentionKind = "full"
        if word in ("sliding", "chunked", "sparse", "compressed"):
            attention = word
        rotary = mixer in ATTENDS and self.position == "rotary"
        return LayerKind(
            attention=attention,
            window=0 if attention == "full" else self.window,
            mlp=mlp,
            rotary=rotary and index not in self.no_rope_layers,
            cross=self.encoder_layers > 0,
            mixer=mixer,
            sizes=self._own(index, mixer, mlp),
            bare=index == 0 and not self.first_norm,
            block=self._block(index) if mixer == "shared+mamba" else 0,
            keys=self._keys(index),
            sparse=index in self.sparse_layers,
            opens=index == 0 and bool(self.linear and self.linear.opens),
        )

    def _block(self, index: int) -> int:
        """Which block of those that layers share by turns is that layer's, from 1."""
        before = self.attention_pattern[:index].count("shared+mamba")
        return 1 + before % self.shared.blocks if self.shared else 0

    def _keys(self, index: int) -> Literal["own", "kept", "taken"]:
        """Whose keys and values a layer reads: the last layer of its kind that has its own keeps
        them for those that share."""
        if not self.kv_shared_layers:
            return "own"
        first = self.layers - self.kv_shared_layers
        if index >= first:
            return "taken"
        words = self.attention_pattern or ("full",) * self.layers
        return "own" if words[index] in words[index + 1 : first] else "kept"

    def _own(self, index: int, mixer: Mixer, mlp: MlpKind) -> tuple[tuple[str, int], ...]:
        """Sizes of a layer's parts that differ from the model's."""
        if not self.layer_sizes:
            return ()
        parts = {"ffn": mlp == "dense" or (self.moe is not None and self.moe.beside_dense)}
        return tuple(
            (name, size)
            for name, size in self.layer_sizes[index].own.items()
            if size != getattr(self, name) and parts.get(name, mixer in ATTENDS)
        )

    def of_kind(self, kind: LayerKind) -> Model:
        """The model as a layer of that kind sees it, with the layer's sizes for its own."""
        if not kind.sizes:
            return self
        return self.model_copy(update={**dict(kind.sizes), "layer_sizes": ()})

    def part(self, letter: str) -> LayerKind:
        """What a hybrid's layer of that letter is."""
        kinds: dict[str, Literal["dense", "moe"]] = {"-": "dense", "E": "moe"}
        mixers: dict[str, Literal["attention", "mamba"]] = {"*": "attention", "M": "mamba"}
        return LayerKind(
            attention="full",
            window=0,
            mlp=kinds.get(letter, "none"),
            rotary=letter == "*" and self.position == "rotary",
            mixer=mixers.get(letter, "none"),
        )

    @cached_property
    def _runs(self) -> tuple[tuple[LayerKind, int], ...]:
        groups = groupby(self.kind(i) for i in range(self.depth))
        return tuple((kind, sum(1 for _ in group)) for kind, group in groups)

    def runs(self) -> Iterator[tuple[LayerKind, int]]:
        """Consecutive equal layers in order, as (kind, how many)."""
        yield from self._runs

    def without_patterns(self, layers: int) -> dict[str, object]:
        """Updates that set another number of layers and cut or repeat per-layer lists to fit."""
        updates: dict[str, object] = {"layers": layers}
        if layers > MAX_LAYERS:  # refused when the model is made
            return updates
        for name in ("attention_pattern", "mlp_pattern", "layer_sizes"):
            pattern = getattr(self, name)
            if pattern:
                updates[name] = tuple(pattern[i % len(pattern)] for i in range(layers))
        if self.pattern:
            updates["pattern"] = "".join(self.pattern[i % len(self.pattern)] for i in range(layers))
        for name in ("no_rope_layers", "sparse_layers"):
            updates[name] = tuple(i for i in getattr(self, name) if i < layers)
        if self.kv_shared_layers:
            own = self.layers - self.kv_shared_layers
            updates["kv_shared_layers"] = max(0, layers - own)
        return updates
