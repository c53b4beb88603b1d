"""What one training step does: sequence, micro-batch, precision, attention, dropout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.base import Count, Factor, Size, Spec
from actcalc.specs.kernels import KernelOptions
from actcalc.specs.lengths import Lengths, parse_lengths

Attention = Literal["eager", "sdpa", "flash"]
Precision = Literal["bf16", "fp16", "fp32", "amp-bf16", "amp-fp16", "fp8"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Workload(Spec):
    """One micro-batch on one rank, and how a step is made of them."""

    seq: Size = 2048
    """Tokens in one sequence (s)."""
    decoder_seq: Count = 0
    """Tokens in one sequence of an encoder-decoder's decoder; 0 means as many as ``seq``."""
    image_tokens: Count = 0
    """Tokens of each sequence that are an image's, behind a vision tower; 0 runs without images."""
    micro_batch: Size = 1
    """Sequences in one micro-batch on one data-parallel rank (b)."""
    global_batch: Size | None = None
    """Sequences in one optimizer step over all ranks."""
    precision: Precision = "bf16"
    """Element type of activations; amp-* is autocast over fp32 weights."""
    attention: Attention = "sdpa"
    """eager materialises the s x s scores; flash never does; sdpa lets PyTorch choose."""
    dropout: bool = True
    """Use the model's dropout rates; false sets all of them to 0."""
    completion: Count = 0
    """Tokens at the end of every sequence that a loss in tiles scores (completions); 0: all."""
    lengths: str = ""
    """Lengths of sequences with how often each occurs (512:70,2048:30): peaks are of ``seq``, the
    longest; steps of the mean that micro-batches are padded to. Empty: all have ``seq`` tokens."""
    packed: bool = False
    """Sequences of these lengths are put one behind the other: nothing is padded."""
    padding_mask: bool = False
    """A mask of padded positions is passed to attention (forces sdpa off its flash kernel)."""
    moe_imbalance: Factor = 1.0
    """Tokens that the busiest expert-parallel rank receives, over the balanced number."""
    fp8: bool = False
    """Products of the layers run in fp8 over activations of another type than bf16 (Megatron's
    --fp8-format beside --fp16 or neither); over bf16 that is precision fp8, and set as such."""
    kernels: KernelOptions = field(default_factory=KernelOptions)
    """Kernel options named after Megatron's (masked_softmax_fusion, moe_router_dtype, ...)."""

    def __post_init__(self) -> None:
        if isinstance(self.kernels, dict):
            self._set(kernels=KernelOptions(**self.kernels))
        if self.fp8 is True and self.precision in ("bf16", "fp8"):
            self._set(precision="fp8", fp8=False)
        super().__post_init__()

    def _check(self) -> None:
        batch = self.global_batch
        if batch is not None and not 1 <= batch <= 2**32:
            raise SpecError(f"workload: global_batch is {batch}", "use a value of at least 1")
        if self.lengths:
            parse_lengths(self.lengths)
        if self.packed and not self.lengths:
            raise SpecError(
                "packed changes nothing: all sequences are taken to be full",
                "say how long they are, as in --lengths 512:70,2048:30, or drop it",
            )
        if self.completion >= self.seq:
            raise SpecError(
                f"completion is {self.completion} of seq {self.seq}: a prompt comes before it",
                "give fewer tokens, or drop completion (all are scored)",
            )

    @property
    def fp8_products(self) -> bool:
        """Whether the layers' matrix products read fp8 copies."""
        return self.fp8 or self.precision == "fp8"

    @property
    def arithmetic(self) -> str:
        """Number formats of the products, as :data:`actcalc.cost.rates.FORMATS` names them."""
        return f"{self.precision}+fp8" if self.fp8 else self.precision

    @property
    def distribution(self) -> Lengths | None:
        """Lengths of sequences, cut off at ``seq``; None where all are as long."""
        return parse_lengths(self.lengths).cut(self.seq) if self.lengths else None

    @property
    def mean_seq(self) -> int:
        """Tokens of a sequence in an average micro-batch, padding among them."""
        found = self.distribution
        if found is None or self.packed:
            return self.seq
        return max(1, round(found.padded(self.micro_batch)))

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch."""
        return self.seq * self.micro_batch
