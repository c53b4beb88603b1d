"""The memory of one stage as figures: what answers print."""

from __future__ import annotations

from dataclasses import dataclass

from actcalc.memory.table import MomentFigure


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BufferFigure:
    """One buffer of a stage."""

    name: str
    """What it is called."""
    bytes: int
    """Its size."""
    resident: bool
    """It stays between steps."""
    allocated: bool
    """The framework's allocator holds it; false for what driver and libraries take beside it."""
    about: str
    """What it is for."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StageFigure:
    """One pipeline stage: bytes on one of its ranks at the highest moment of a step."""

    stage: int
    """Number of the stage, from 0."""
    layers: int
    """Transformer layers on it."""
    embedding: bool
    """It holds the embedding."""
    head: bool
    """It holds output head and loss."""
    parameters: int
    """Parameters on one rank, before ZeRO shards them."""
    stage_parameters: int
    """Parameters of the stage over all its tensor- and expert-parallel ranks."""
    weights_bytes: int
    """Weights."""
    gradients_bytes: int
    """Gradients that exist at the highest moment."""
    gradients_full_bytes: int
    """All gradients, as they are when backward has ended."""
    optimizer_bytes: int
    """Optimizer states, fp32 master weights included."""
    bytes_per_parameter: float
    """Weights, all gradients and optimizer states over the parameters on the rank."""
    in_flight: int
    """Chunk activations held at once, at most: each of one micro-batch on one of the stage's
    chunks, of which there are vpp (2 under zb-v, dualpipe and dualpipe-v)."""
    activations_bytes: int
    """Stored activations of all micro-batches in flight: the most that is held, or, where backward
    has freed some of it by the highest moment, what is left then (0 in the optimizer step)."""
    layers_activations_bytes: int
    """What transformer layers store of all micro-batches in flight, at most."""
    transient_bytes: int
    """What the highest moment holds beyond all that is listed here: working set and re-run, or the
    temporaries of the optimizer step."""
    gradients_absent_bytes: int
    """Gradients that do not exist yet at that moment, which the total is without:
    gradients_full_bytes less gradients_bytes."""
    buffers_bytes: int
    """Workspaces, gathered weights, buckets inside the framework's allocator."""
    overhead_bytes: int
    """Device context and communicators, outside the allocator (with a device)."""
    buffers: tuple[BufferFigure, ...]
    """Both, line by line."""
    static_bytes: int
    """What stays between steps in the allocator: weights, optimizer states and workspaces; where
    gradients keep their buffers from step to step (recipe.persistent) those too, with the fp32
    copies of 16-bit ones, which the next step drops first."""
    last_rank_spare_bytes: int
    """What the stage's last rank holds less than these figures, which are of the fullest: 0 unless
    the optimizer gives whole weights to ranks."""
    peak_bytes: int
    """The highest moment in the framework's allocator (torch's max_memory_allocated): weights,
    gradients, optimizer, activations, transient and buffers, without overhead_bytes."""
    reserved_at_least_bytes: int
    """The least that PyTorch's allocator has taken from the device at that moment: the peak in
    whole segments of 2 MiB."""
    reserved_bytes: int | None
    """Of the fullest stage the most that it has reserved in two steps (torch's
    max_memory_reserved), their requests replayed by its published rules; null where they are too
    many. With overhead_bytes it is what the driver shows."""
    reserved_expandable_bytes: int | None
    """The same with its option expandable_segments."""
    total_bytes: int
    """The highest moment with what lies outside the allocator, peak_bytes + overhead_bytes: the
    sum of weights_bytes, gradients_bytes, optimizer_bytes, activations_bytes, transient_bytes,
    buffers_bytes and overhead_bytes. What has to fit the device."""
    peak_at: str
    """When it is, in words."""
    fits: bool | None
    """It fits the device, with the headroom left free (null without a device)."""
    margin_bytes: int | None
    """Device memory less the headroom and the total (null without a device)."""
    moments: tuple[MomentFigure, ...] = ()
    """The moments of a step, where asked for (--timeline): the first one and later ones. The peak
    is the highest total of those of a later step."""
