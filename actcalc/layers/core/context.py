"""Named dimensions on one rank, and the choices every builder needs to see.

Legend of symbols (one letter each, as in the papers):

    s sequence      b micro-batch    h hidden         a heads       k key/value heads
    d head width    f ffn width      v vocabulary     t tp          c cp
    z key/value head shards          y attention span (window)      l layers
    E experts       K top-k          w expert width   u shared-expert width
    e ep            x etp            q query rank     n key/value rank
    p rotary width  g value width    o learned positions
    j decoder sequence
    H P N G         heads, their width, state and groups of state-space mixers; of linear
                    attention value heads, their width, key width and key heads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from actcalc.errors import SpecError
from actcalc.layers.core.algebra import ONE, Expr, symbol
from actcalc.layers.core.graph import DType
from actcalc.specs import Framework, LayerKind, Layout, Model, Workload

LEGEND: Mapping[str, str] = {
    "s": "sequence",
    "b": "micro-batch",
    "h": "hidden",
    "a": "heads",
    "k": "kv heads",
    "d": "head width",
    "f": "ffn width",
    "v": "vocabulary",
    "t": "tensor parallel",
    "c": "context parallel",
    "z": "kv-head shards",
    "y": "attention span",
    "l": "layers",
    "E": "experts",
    "K": "top-k",
    "w": "expert width",
    "u": "shared-expert width",
    "e": "expert parallel",
    "x": "expert tensor parallel",
    "q": "query rank",
    "n": "kv rank",
    "p": "rotary width",
    "g": "value width",
    "o": "positions",
    "j": "decoder sequence",
    "H": "mixer heads",
    "P": "mixer head width",
    "N": "mixer state",
    "G": "mixer groups",
}

_MIXED = {"amp-bf16": DType.BF16, "amp-fp16": DType.FP16}
_PLAIN = {"bf16": DType.BF16, "fp16": DType.FP16, "fp32": DType.FP32, "fp8": DType.BF16}


def sizes_of(model: Model, layout: Layout, workload: Workload) -> dict[str, int]:
    """Every symbol's value for one run: what the expressions of its graphs are evaluated at."""
    sizes = {
        "s": workload.seq,
        "j": workload.decoder_seq or workload.seq,
        "b": workload.micro_batch,
        "h": model.hidden,
        "a": model.heads,
        "k": model.kv_heads,
        "d": model.head_dim,
        "f": model.ffn,
        "v": padded_vocab(model, layout, workload),
        "o": model.max_positions,
        "l": model.layers,
        "t": layout.tp,
        "c": layout.cp,
        "z": min(layout.tp, model.kv_heads),
        "e": layout.ep,
        "x": layout.expert_tp,
        "y": min(workload.seq, model.window) if model.window else workload.seq,
    }
    if model.value_dim:
        sizes["g"] = model.value_dim
    if model.position == "rotary":
        sizes["p"] = model.rotary_dim or model.head_dim
    if model.moe:
        moe = model.moe
        sizes |= {"E": moe.experts, "K": moe.topk, "w": moe.ffn, "u": moe.shared_ffn}
    if model.mamba:
        mamba = model.mamba
        sizes |= {"H": mamba.heads_of(model.hidden), "P": mamba.head_dim}
        sizes |= {"N": mamba.state, "G": mamba.groups}
    if model.linear:
        linear = model.linear
        sizes |= {"H": linear.value_heads, "P": linear.value_dim}
        sizes |= {"N": linear.key_dim, "G": linear.key_heads}
    if model.mla:
        mla = model.mla
        sizes |= {
            "q": mla.q_lora,
            "n": mla.kv_lora,
            "d": mla.nope_dim,
            "p": mla.rope_dim,
            "g": mla.v_dim,
        }
    return sizes


def padded_vocab(model: Model, layout: Layout, workload: Workload) -> int:
    """Vocabulary entries with the padding that the run asks for (none by default).

    Megatron rounds up to a multiple of make-vocab-size-divisible-by · tp (``tokenizer.py``,
    ``_vocab_size_with_padding``).
    """
    multiple = workload.kernels.make_vocab_size_divisible_by * layout.tp
    return -(-model.vocab // multiple) * multiple if multiple else model.vocab


def whole(sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes`` with every parallel degree 1: the whole model on one device."""
    return {**sizes, "t": 1, "c": 1, "z": 1, "e": 1, "x": 1}


@dataclass(frozen=True, eq=False, repr=False)
class Context:
    """One run as the builders see it: shapes in named dims, kernels, dropouts, element types."""

    model: Model
    layout: Layout
    workload: Workload
    framework: Framework
    decoder: bool = False
    """It describes the decoder of an encoder-decoder, whose sequences may have another length."""

    narrow_stream: bool = False
    """Its stream has the activations' type under autocast too: a product makes it, and nothing in
    fp32 is added."""

    def of_decoder(self) -> Context:
        """The same run as its decoder sees it."""
        return Context(self.model, self.layout, self.workload, self.framework, decoder=True)

    def of_kind(self, kind: LayerKind) -> Context:
        """The same run as a layer sees it whose sizes are not the model's."""
        model = self.model.of_kind(kind)
        return Context(model, self.layout, self.workload, self.framework, decoder=self.decoder)

    def of_encoder(self) -> Context:
        """The same run as its encoder sees it."""
        return Context(self.model, self.layout, self.workload, self.framework)

    @property
    def length(self) -> int:
        """Tokens of a whole sequence on this side, as a number."""
        shorter = self.decoder and self.workload.decoder_seq
        return self.workload.decoder_seq if shorter else self.workload.seq

    @cached_property
    def sequence(self) -> Expr:
        """Tokens of a whole sequence on this side of the model."""
        return symbol("j" if self.decoder and self.workload.decoder_seq else "s")

    def kernel(self, kind: str) -> str:
        """The kernel the framework runs for ``kind`` in this model.

        Raises ``SpecError`` where the framework has none.
        """
        try:
            return self.framework.kernel(kind, self.model.family)
        except KeyError:
            raise SpecError(
                f"framework {self.framework} has no {kind.replace('_', ' ')} kernel, "
                f"which {self.model.name} needs here",
                "choose another --framework (presets list frameworks)",
            ) from None

    @property
    def tp(self) -> bool:
        """Whether tensors are split over a tensor-parallel group."""
        return self.layout.tp > 1

    @cached_property
    def t(self) -> Expr:
        """Tensor-parallel degree, 1 without tensor parallelism."""
        return symbol("t") if self.tp else ONE

    @cached_property
    def s(self) -> Expr:
        """Tokens of a sequence on one rank, inside tensor-parallel regions."""
        return self.sequence / symbol("c") if self.layout.cp > 1 else self.sequence

    @cached_property
    def s_region(self) -> Expr:
        """Tokens of a sequence on one rank between tensor-parallel regions (split under sp)."""
        return self.s / self.t if self.layout.sp else self.s

    @cached_property
    def s_keys(self) -> Expr:
        """Tokens that attention keys span: the whole sequence."""
        return self.sequence

    @property
    def b(self) -> Expr:
        """Sequences in a micro-batch."""
        return symbol("b")

    @property
    def h(self) -> Expr:
        """Hidden width."""
        return symbol("h")

    @cached_property
    def d(self) -> Expr:
        """Width of one head."""
        return symbol("d")

    @cached_property
    def heads(self) -> Expr:
        """Query heads on one rank."""
        return symbol("a") / self.t

    @cached_property
    def kv_heads(self) -> Expr:
        """Key/value heads on one rank (at least one: replicated when kv_heads < tp)."""
        if self.model.kv_heads == self.model.heads:
            return self.heads
        shards = symbol("z") if self.model.kv_heads < self.layout.tp else self.t
        return symbol("k") / shards

    @cached_property
    def v_head(self) -> Expr:
        """Width of one head's values."""
        return symbol("g") if self.model.v_dim != self.model.head_dim else self.d

    @cached_property
    def v_width(self) -> Expr:
        """Width of all heads' values on one rank."""
        return self.kv_width if self.v_head == self.d else self.kv_heads * self.v_head

    @cached_property
    def context_width(self) -> Expr:
        """Width of what all heads read on one rank: of values, for each query head."""
        return self.q_width if self.v_head == self.d else self.heads * self.v_head

    @cached_property
    def q_width(self) -> Expr:
        """Width of all query heads on one rank (h/t where heads · head_dim is hidden)."""
        whole = self.h if self.model.q_dim == self.model.hidden else symbol("a") * self.d
        return whole / self.t

    @cached_property
    def kv_width(self) -> Expr:
        """Width of all key (or value) heads on one rank."""
        if self.model.kv_heads == self.model.heads:
            return self.q_width
        return self.kv_heads * self.d

    @cached_property
    def ffn(self) -> Expr:
        """Feed-forward width on one rank (written as a multiple of h where it is one)."""
        return self.ffn_whole / self.t

    @cached_property
    def ffn_whole(self) -> Expr:
        """Feed-forward width of the whole layer."""
        ratio, rest = divmod(self.model.ffn, self.model.hidden)
        return self.h * ratio if rest == 0 and ratio <= 16 else symbol("f")

    @cached_property
    def tokens(self) -> Expr:
        """Tokens on one rank inside tensor-parallel regions."""
        return self.s * self.b

    @property
    def act(self) -> DType:
        """Element type of activations that matrix products read."""
        precision = self.workload.precision
        return _MIXED.get(precision) or _PLAIN[precision]

    @property
    def autocast(self) -> bool:
        """Weights are fp32 and each product casts its inputs (torch.autocast)."""
        return self.workload.precision in _MIXED

    @property
    def residual(self) -> DType:
        """Element type of the residual stream (fp32 under autocast)."""
        return DType.FP32 if self.autocast else self.act

    @property
    def stream(self) -> DType:
        """Element type of what one layer hands to the next."""
        if self.narrow_stream:
            return self.act
        return DType.FP32 if self.model.fp32_stream else self.residual

    @property
    def hidden_dropout(self) -> bool:
        """Dropout after attention and feed-forward runs."""
        return self.workload.dropout and self.model.hidden_dropout > 0

    @property
    def attention_dropout(self) -> bool:
        """Dropout of attention probabilities runs."""
        return self.workload.dropout and self.model.attention_dropout > 0

    @property
    def embedding_dropout(self) -> bool:
        """Dropout after the embedding runs."""
        return self.workload.dropout and self.model.embedding_dropout > 0
