"""How many checkpoints: the continuous optimum c*, and the best split into whole layers.

memory(c) = c·A_in + (l/c)·A_int, least at c* = √(l·A_int/A_in) (Chen et al. 2016 §4.3; Narayanan et
al. 2021 §3.5). With m microbatches in flight their checkpoints all stay, the working segment is
one: memory(c) = m·c·A_in + (l/c)·A_int and c* = √(l·A_int/(m·A_in)). c checkpoints of whole layers
need segments of ⌈l/c⌉ layers, so the continuous optimum is rarely a plan. The working segment's
first layer saves its input, which is the checkpoint itself: it is counted once (a constant, which
moves no optimum).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointOptimum:
    """The continuous optimum and the best realisable plan; all sizes in bytes on one rank."""

    layers: int
    input_bytes: int
    layer_bytes: int
    in_flight: int | Fraction
    counted_bytes: int
    continuous: float
    continuous_bytes: float
    integer: int
    layers_per_segment: int
    stored_bytes: int
    segment_bytes: int

    @property
    def total_bytes(self) -> int:
        """memory(c) of the realisable plan: its checkpoints and one working segment."""
        return self.stored_bytes + self.segment_bytes

    @property
    def ratio(self) -> float:
        """A_int / A_in."""
        return self.layer_bytes / self.input_bytes


def segment_memory(
    segments: int,
    *,
    layers: int,
    input_bytes: int,
    layer_bytes: int,
    counted_bytes: int = 0,
    in_flight: int | Fraction = 1,
) -> int:
    """memory(c) for ``segments`` segments of whole layers: the largest has ⌈layers/segments⌉.

    Stages of several chunks hold a mean over their layers in flight, which may be a fraction.
    ``counted_bytes`` of the working segment are its checkpoint, and not counted twice.
    """
    longest = -(-layers // segments)
    return round(in_flight * segments * input_bytes) + longest * layer_bytes - counted_bytes


def checkpoint_optimum(
    *,
    layers: int,
    input_bytes: int,
    layer_bytes: int,
    counted_bytes: int = 0,
    in_flight: int | Fraction = 1,
) -> CheckpointOptimum:
    """Minimise memory(c) over real c, and over whole segments (fewest segments on a tie)."""
    held = float(in_flight)
    continuous: float = (layers * layer_bytes / (held * input_bytes)) ** 0.5
    least = held * continuous * input_bytes + layers / continuous * layer_bytes - counted_bytes

    def memory(segments: int) -> int:
        return segment_memory(
            segments,
            layers=layers,
            input_bytes=input_bytes,
            layer_bytes=layer_bytes,
            counted_bytes=counted_bytes,
            in_flight=in_flight,
        )

    # Only the fewest segments for each segment length can be best.
    candidates = sorted({-(-layers // length) for length in range(1, layers + 1)})
    best = min(candidates, key=lambda segments: (memory(segments), segments))
    longest = -(-layers // best)
    return CheckpointOptimum(
        layers=layers,
        input_bytes=input_bytes,
        layer_bytes=layer_bytes,
        in_flight=in_flight,
        counted_bytes=counted_bytes,
        continuous=continuous,
        continuous_bytes=least,
        integer=best,
        layers_per_segment=longest,
        stored_bytes=round(in_flight * best * input_bytes),
        segment_bytes=longest * layer_bytes - counted_bytes,
    )
