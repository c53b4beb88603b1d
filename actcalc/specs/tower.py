"""A vision tower and the projector behind it: what a language model sees of an image."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.base import Count, Layers, Size, Spec


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Tower(Spec):
    """A vision transformer whose patches become tokens of a language model."""

    family: Literal[
        "clip_vision_model",
        "siglip_vision_model",
        "qwen2_vl_vision",
        "qwen2_5_vl_vision",
        "qwen3_vl_vision",
        "internvl_vision",
        "llama4_vision_model",
    ]
    """The hub's ``model_type`` of the tower."""
    layers: Layers
    """Its layers."""
    hidden: Size
    """Width of its stream."""
    heads: Size
    """Attention heads."""
    ffn: Size
    """Feed-forward width."""
    patches: Size
    """Input values of one patch (channels · patch²)."""
    grid: Count = 0
    """Patches of one image; 0 means as many as become its tokens."""
    activation: Literal["quick_gelu", "gelu_tanh", "gelu", "silu"] = "quick_gelu"
    """Feed-forward nonlinearity."""
    gated: bool = False
    """The feed-forward has a gate projection (Qwen2.5-VL)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    qkv_bias: bool = True
    """Queries, keys and values have biases (not InternVL's larger tower)."""
    qk_norm: bool = False
    """Queries and keys are normed over their whole width (InternVL's larger tower)."""
    layer_scale: bool = False
    """Each part's output is multiplied by a learned scale of every channel (InternVL)."""
    last_norm: bool = True
    """A norm follows the last layer (none in InternVL3)."""
    positions: Count = 0
    """Learned positions that are interpolated to an image's grid (Qwen3-VL); 0: the type's own."""
    window: Count = 0
    """Side in patches of the windows that layers attend in (Qwen2.5-VL); 0: none."""
    whole_layers: tuple[int, ...] = ()
    """Indices of the layers that attend to the whole image all the same."""
    deep_layers: tuple[int, ...] = ()
    """Indices of the layers whose output is merged too, for the language model's first layers
    (Qwen3-VL's DeepStack)."""
    unread: Count = 0
    """Layers at its end that run but whose output nobody reads (LLaVA reads the last but one)."""
    projector: Literal["mlp", "pooled", "merger", "shuffled", "three"] = "mlp"
    """Two products with an activation between them (LLaVA); patches averaged, normed and multiplied
    by one matrix (Gemma 3); squares of normed patches, side by side, through two products
    (Qwen-VL); such squares normed as a whole (InternVL); or squares through two products with an
    activation behind each, which are the tower's, and one more (Llama 4)."""
    projector_width: Count = 0
    """Width between the three products of Llama 4; 0: none."""
    merge: Size = 1
    """Side in patches of the square that becomes one token (Qwen-VL, InternVL, Llama 4: 2)."""
    tokens: Size
    """Tokens that one image takes in the sequence."""

    @property
    def class_token(self) -> bool:
        """A token without a patch is part of the sequence (CLIP, InternVL, Llama 4)."""
        return self.family in ("clip_vision_model", "internvl_vision", "llama4_vision_model")

    @property
    def unfolds(self) -> bool:
        """Patches are copied out of the image for a product that keeps them, not convolved, and
        queries and keys are rotated beside the learned positions (Llama 4)."""
        return self.family == "llama4_vision_model"

    @property
    def pre_norm(self) -> bool:
        """A norm precedes the layers, and patches get no bias (CLIP, Llama 4)."""
        return self.family in ("clip_vision_model", "llama4_vision_model")

    @property
    def sees_itself(self) -> bool:
        """Tokens of one image attend to each other both ways, so that every layer has a mask
        (Gemma 3)."""
        return self.projector == "pooled"

    @property
    def packed(self) -> bool:
        """Images of any size lie in one sequence, each attended to by itself (Qwen-VL)."""
        return self.projector == "merger"

    @property
    def sequence(self) -> int:
        """Positions of one image inside the tower."""
        return self.grid + self.class_token

    def __post_init__(self) -> None:
        for name in ("whole_layers", "deep_layers"):
            self._set(**{name: tuple(getattr(self, name))})
        if not self.grid:
            self._set(grid=self.tokens * self.merge**2)
        super().__post_init__()

    def _check(self) -> None:
        if self.hidden % self.heads:
            raise SpecError(
                f"tower.hidden {self.hidden} is not divisible by tower.heads {self.heads}",
                "use heads that divide it",
            )
        if self.unread >= self.layers:
            raise SpecError(
                f"tower.unread {self.unread} leaves none of {self.layers} layers", "use fewer"
            )
        if (self.projector == "three") != bool(self.projector_width):
            raise SpecError(
                f"tower.projector_width {self.projector_width} does not go with tower.projector "
                f"{self.projector}",
                "give a width with projector three, and with no other",
            )
        if self.projector == "mlp" and self.tokens != self.grid:
            raise SpecError(
                f"tower.tokens {self.tokens} is not tower.grid {self.grid}, a token per patch",
                "use projector pooled, or as many tokens as patches",
            )
        if self.packed and (isqrt(self.tokens) ** 2 != self.tokens or self.grid % self.merge**2):
            raise SpecError(
                f"tower.tokens {self.tokens} are no square image", "give the square of a number"
            )
        if self.packed and self.tokens * self.merge**2 != self.grid:
            self._set(grid=self.tokens * self.merge**2)
        if self.grid % self.tokens:
            raise SpecError(
                f"tower.grid {self.grid} is not divisible by tower.tokens {self.tokens}",
                "pool whole squares of patches",
            )
