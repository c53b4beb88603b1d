"""What one layer of a model is: what mixes its tokens, and its feed-forward."""

from __future__ import annotations

from typing import Literal, NamedTuple

AttentionKind = Literal["full", "sliding", "chunked", "sparse", "compressed"]
Mixer = Literal["attention", "mamba", "linear", "mamba+attention", "shared+mamba", "none"]
LayerWord = Literal[
    "full", "sliding", "chunked", "sparse", "compressed", "mamba", "linear", "mamba+attention",
    "shared+mamba", "none",
]  # fmt: skip
MlpKind = Literal["dense", "moe", "none"]
MIXERS: dict[str, Mixer] = {
    "mamba": "mamba", "linear": "linear", "mamba+attention": "mamba+attention",
    "shared+mamba": "shared+mamba", "none": "none",
}  # fmt: skip
"""Words for what mixes tokens that are no kind of attention alone."""
ATTENDS: frozenset[Mixer] = frozenset(("attention", "mamba+attention", "shared+mamba"))
"""Those that have attention."""


class LayerKind(NamedTuple):
    """What one layer is: kind of attention, its window (0: none), kind of feed-forward.

    ``mixer`` says what stands where attention is: a state-space mixer, linear attention, a
    state-space mixer beside attention or after a block that layers share, or nothing. ``mlp`` may
    be none too.
    """

    attention: AttentionKind
    window: int
    mlp: MlpKind
    rotary: bool
    cross: bool = False
    mixer: Mixer = "attention"
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes that differ from the model's, by name."""
    bare: bool = False
    """No norm before its attention: the embedding's serves."""
    block: int = 0
    """Which of the blocks that layers share it runs, from 1; 0: none."""
    keys: Literal["own", "kept", "taken"] = "own"
    """Its keys and values are its own, kept for later layers too, or an earlier layer's."""
    sparse: bool = False
    """Most of its feed-forward is set to zero."""
    opens: bool = False
    """It normalises the stream before its own norms."""

    @property
    def label(self) -> str:
        """A short name, e.g. ``dense``, ``moe``, ``sliding+moe``, ``linear+moe``, ``mamba``."""
        if self.mixer == "none":
            return {"dense": "feed-forward", "moe": "experts", "none": "nothing"}[self.mlp]
        if self.mixer != "attention":
            more = {"dense": "+dense" if self.mixer == "mamba" else "", "moe": "+moe", "none": ""}
            return ("first+" if self.opens else "") + self.mixer + more[self.mlp]
        if self.mlp == "none":
            return "attention" if self.attention == "full" else f"{self.attention} attention"
        parts: list[str] = [] if self.attention == "full" else [self.attention]
        parts += ["decoder"] if self.cross else []
        parts += ["first"] if self.bare else []
        parts += [f"{self.keys} keys"] if self.keys != "own" else []
        parts += ["sparse"] if self.sparse else []
        parts += [self.mlp] if self.mlp == "moe" else []
        return "+".join(parts) or "dense"
