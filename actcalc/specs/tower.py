"""A vision tower and the projector behind it: what a language model sees of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.base import Count, Layers, Size, Spec


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Tower(Spec):
    """A vision transformer whose patches become tokens of a language model (LLaVA, Gemma 3)."""

    family: Literal["clip_vision_model", "siglip_vision_model"]
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
    grid: Size
    """Patches of one image."""
    activation: Literal["quick_gelu", "gelu_tanh", "gelu"] = "quick_gelu"
    """Feed-forward nonlinearity."""
    unread: Count = 0
    """Layers at its end that run but whose output nobody reads (LLaVA reads the last but one)."""
    projector: Literal["mlp", "pooled"] = "mlp"
    """Two products with an activation between them (LLaVA), or patches averaged, normed and
    multiplied by one matrix (Gemma 3)."""
    tokens: Size
    """Tokens that one image takes in the sequence."""

    @property
    def class_token(self) -> bool:
        """A token without a patch leads the sequence (CLIP)."""
        return self.family == "clip_vision_model"

    @property
    def sees_itself(self) -> bool:
        """Tokens of one image attend to each other both ways, so that every layer has a mask
        (Gemma 3)."""
        return self.projector == "pooled"

    @property
    def sequence(self) -> int:
        """Positions of one image inside the tower."""
        return self.grid + self.class_token

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
        if self.projector == "mlp" and self.tokens != self.grid:
            raise SpecError(
                f"tower.tokens {self.tokens} is not tower.grid {self.grid}, a token per patch",
                "use projector pooled, or as many tokens as patches",
            )
        if self.grid % self.tokens:
            raise SpecError(
                f"tower.grid {self.grid} is not divisible by tower.tokens {self.tokens}",
                "pool whole squares of patches",
            )
