"""Figures of a step's utilisation: ways of counting, what a prediction consists of, a whole run."""

from __future__ import annotations

from dataclasses import dataclass

from actcalc.cost.flops import Counting


@dataclass(frozen=True, kw_only=True)
class CountingFigure:
    """One step under one way of counting attention's scores."""

    counting: Counting
    """``full``: all s x s scores, as the papers do; ``causal``: those below the diagonal."""
    model_flops: int
    """FLOPs of forward and backward of one step, over all devices."""
    hardware_flops: int
    """The same with what recomputation adds."""
    mfu_ratio: float
    """Model FLOPs over what the devices could do in the step."""
    hfu_ratio: float
    """Hardware FLOPs over the same."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The step time that the roofline predicts for this layout and policy."""

    step_seconds: float
    """One optimizer step."""
    low_seconds: float
    """The step, were it as much off as the fastest tenth of published runs of its kind (of fewer
    than ten, the fastest); the predicted one where no published run is of its kind."""
    high_seconds: float
    """The same of the slowest."""
    judged_runs: int
    """Published runs of its kind (device, dense or experts or adapters) that say so; 0 if none."""
    pipeline_seconds: float
    """From the first forward to the last backward."""
    host_seconds: float
    """Of the pipeline: the device waits for the host, which runs and launches its kernels."""
    exchange_seconds: float
    """Of the pipeline: exposed exchange of tokens between expert-parallel ranks."""
    gradients_seconds: float
    """Exposed reduction of gradients over replicas, and gathering of the weights they update."""
    optimizer_seconds: float
    """The optimizer's pass over its states, as they are kept and sharded."""
    bubble_ratio: float
    """Idle share of the devices' time in the pipeline."""
    microbatches: int
    """Micro-batches each replica runs."""
    error_ratio: float | None
    """Predicted over measured time, less one; null without a measured time."""
    efficiency: dict[str, float]
    """The shares of the peaks it is computed with."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training run at this step time."""

    tokens: int
    """Tokens to train on."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Wall time."""
    days: float
    """The same in days."""
    gpu_hours: float
    """Devices times hours."""
    price: float | None
    """Price per device-hour times device-hours, in its currency; null if no price was given."""
