"""A framework profile: how a training framework runs a model, as data with its sources.

A profile states which builders make its layers, which kernel runs for each kind of op
(:mod:`actcalc.specs.kinds`), and *traits*: what the framework does beside its kernels. Every trait
is stated by every profile, so that none is forgotten in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from actcalc.errors import SpecError, shorten, suggestion
from actcalc.specs.base import Bounds, Spec
from actcalc.specs.kinds import KINDS, Layers
from actcalc.specs.recompute import COUNTED, MODULES, WHOLE
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.training import Recipe

Seconds = Annotated[float, Bounds(0.0, 1.0)]
"""Seconds of the host for one op."""

LOSSES: Mapping[str, Mapping[str, Any]] = {
    "fused": {"training.loss": "fused"},
    "chunked": {"training.loss": "chunked"},
    "compiled": {"training.compiled_loss": True},
    "native": {"workload.kernels.cross_entropy_loss_fusion": True},
    "te": {
        "workload.kernels.cross_entropy_loss_fusion": True,
        "workload.kernels.cross_entropy_fusion_impl": "te",
    },
}
"""Ways of a cross-entropy that a framework may offer, and the fields of a run that ask for each."""

PROCESS_GROUPS = ("world", "tp", "pp", "cp", "dp", "ep", "norm", "loss", "ends")
"""Process groups that a framework may communicate over: all ranks, those of each degree, those that
share the norm of gradients, those that share the loss, first and last stage of a tied table."""

_LISTS: Mapping[str, tuple[Any, ...]] = {
    "schedules": tuple(SCHEDULES),
    "losses": tuple(LOSSES),
    "zero_stages": (1, 2, 3),
    "offloads_states": ("optimizer", "weights"),
    "quantised_bits": (4, 8),
    "process_groups": PROCESS_GROUPS,
    "launch_files": (
        "megatron", "torchtitan", "transformers", "fsdp", "deepspeed", "axolotl", "yaml",
    ),
}  # fmt: skip
"""What each list of a profile may hold."""

_ONLY: Mapping[Layers, tuple[str, ...]] = {
    "megatron": ("multi_token_prediction", "transformer_engine"),
    "pytorch": ("autocast", "hub_models"),
}
"""Traits that the builders of one family alone know."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Framework(Spec):
    """Kernels and traits of one training framework.

    Raises ``SpecError`` for a kind of kernel or a kernel that the layers do not know, for a kind
    that every profile must state and this one does not, and for a trait of other layers.
    """

    name: str
    """Profile name, as given to --framework."""
    title: str
    """One line for people."""
    layers: Layers
    """Builders of its layers: Megatron's, which tensor parallelism splits, or PyTorch modules."""
    recipe: Recipe
    """Precision recipe of a 16-bit run that names none."""
    kernels: dict[str, str]
    """Kind of op -> kernel."""
    families: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model family -> kernels that differ for it."""

    # --- what its layers are ---
    idealised: bool
    """Korthikanti et al.'s counting: any architecture by one rule, statistics and workspaces
    neglected, and the paper's own equations where they apply."""
    transformer_engine: bool
    """Layers are Transformer Engine's: its attention, workspaces, fp8 products and loss."""
    op_by_op: bool
    """Modules are plain PyTorch: element-wise chains run op by op, each an op of ATen."""
    hub_models: bool
    """The modelling code is the transformers package's, which ``measure`` builds."""

    # --- which runs it knows ---
    model_parallel: bool
    """Knows tensor and pipeline parallelism, and with Megatron's layers context and expert
    parallelism."""
    autocast: bool
    """Knows torch.autocast over fp32 weights."""
    fp8: bool
    """Knows fp8 products."""
    multi_token_prediction: bool
    """Trains the model's multi-token-prediction layers (else they are left out)."""
    schedules: tuple[str, ...]
    """Pipeline schedules that it has: what a search of layouts tries."""

    # --- recomputation and offload ---
    recompute_settings: tuple[str, ...]
    """Policies that its own options say: modules by their names, ``full``, and of those that count
    layers the word before the colon. Others can be computed, and run with code of one's own."""
    early_stop: bool
    """A re-run ends with the last tensor backward needs (non-reentrant torch checkpoint)."""
    full_input: Literal["own", "replicated"]
    """Input kept by a layer that re-runs whole: as the layer gets it, split under sequence
    parallelism, or on every tensor-parallel rank."""
    discards_outputs: bool
    """Can discard a re-run module's output (Megatron-Core's ``CheckpointWithoutOutput``)."""
    per_op_policy: bool
    """Has a checkpoint that keeps every second matrix product (policy ``op``)."""
    offloads_modules: bool
    """Can send modules' activations to host memory (Megatron's fine-grained offload)."""
    offloads_activations: bool
    """Can send all that layers store to host memory between forward and backward."""
    recomputes: Literal["layers", "ops", "modules"]
    """Which policies its options can say: all layers or none; those, every n-th layer and every
    second product; modules, segments of layers and the first layers of a chunk."""
    offloads_states: tuple[str, ...]
    """States that it can keep in host memory: optimizer, or weights and optimizer."""

    # --- what a user of it can ask for ---
    losses: tuple[str, ...]
    """Ways of a cross-entropy beside its own (:data:`LOSSES`)."""
    optimizer_names: Literal["megatron", "torchtitan", "transformers"]
    """Column of the table of optimizers that lists those it has."""
    zero_stages: tuple[int, ...]
    """Stages of ZeRO that it has (FSDP is 3; sharded gradients without weights 2)."""
    trains_adapters: bool
    """Trains low-rank adapters over a frozen base: runs under it are fine-tuning."""
    quantised_bits: tuple[int, ...]
    """Bits of a frozen base's weights that it can quantise to."""
    steps_in_backward: bool
    """Can update each weight as soon as its gradient is there."""
    launch_files: tuple[str, ...]
    """Files that a run of it is written as (``--emit``), the plainest first."""

    # --- gradients ---
    main_gradients: bool
    """Backward adds weight gradients to buffers of their own (Megatron's ``main_grad``); what a
    product makes outside them exists apart. Else it becomes the parameter's ``grad``."""
    persistent_gradients: bool
    """fp32 gradients keep their buffer between steps (else ``zero_grad`` drops them)."""
    reduction_buckets: bool
    """Replicas reduce gradients in buckets: DistributedDataParallel's, DeepSpeed's under ZeRO."""
    overlaps_reduction: bool
    """Replicas reduce gradients beside the last backward."""

    ends_in_root: bool
    """Where weights are sharded in units, embedding and head lie in the outermost one, which stays
    gathered."""

    sharded_units: Literal["flat", "apart", "buffer", "listed"]
    """How a unit of sharded weights lies once it is gathered: as one flat tensor, whose gradient a
    kernel divides before it is reduced (FullyShardedDataParallel); in tensors of their own, copied
    out of what was gathered (fully_shard); in a buffer that is used as it is; each weight by
    itself, waited for, in a list of one tensor a rank (DeepSpeed 0.3)."""

    # --- buffers and messages ---
    sequence_first: bool
    """Tensors are [sequence, batch, width]: parts of sequences that ranks gather or scatter lie in
    order. Else a copy puts those of several sequences in order."""
    gather_buffer: Literal["none", "head", "all"]
    """Products whose gathered sequence-parallel input goes to one buffer that stays."""
    loss_in_place: bool
    """The cross-entropy computes in the fp32 logits it keeps."""
    overlaps_messages: bool
    """An interleaved pipeline sends and receives while it computes."""
    drops_sent_outputs: bool
    """A stage's output is dropped once it is sent."""

    process_groups: tuple[str, ...]
    """Process groups that it communicates over, each of which has a communicator of its own."""

    # --- the host ---
    kernel_host_seconds: Seconds
    """Seconds that the host of an H100 server spends on an op of one kernel; 0: it never waits."""
    product_host_seconds: Seconds
    """Seconds that it spends on a module with a matrix product."""

    def __str__(self) -> str:
        return self.name

    def kernel(self, kind: str, family: str = "") -> str:
        """The kernel for ``kind`` in models of ``family``; ``KeyError`` if the profile has none."""
        return self.families.get(family, {}).get(kind) or self.kernels[kind]

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            self._set(**{name: tuple(value) if isinstance(value, list | tuple) else value})
        super().__post_init__()

    def _check(self) -> None:
        what = f"framework {self.name}"
        for name, known in _LISTS.items():
            value = getattr(self, name)
            if not isinstance(value, tuple) or any(one not in known for one in value):
                raise SpecError(
                    f"{what}: {name} is {shorten(value)}",
                    "write a list of " + ", ".join(map(str, known)),
                )
        if self.recipe == "auto":
            raise SpecError(f"{what}: recipe auto asks the framework", "name the recipe itself")
        _check_settings(f"{what}: recompute_settings", self.recompute_settings)
        for layers, traits in _ONLY.items():
            wrong = [trait for trait in traits if layers != self.layers and getattr(self, trait)]
            if wrong:
                raise SpecError(
                    f"{what}: {wrong[0]} is not known to {self.layers} layers",
                    f"set {wrong[0]}: false, or layers: {layers}",
                )
        _check_kernels(f"{what}: kernels", self.layers, self.kernels)
        for family, changed in self.families.items():
            _check_kernels(f"{what}: families.{family}", self.layers, changed)
        missing = [
            k for k, row in KINDS[self.layers].items() if row.needed and k not in self.kernels
        ]
        if missing:
            about = KINDS[self.layers][missing[0]]
            raise SpecError(
                f"{what}: kernels.{missing[0]} is missing ({about.about})",
                "use one of " + ", ".join(about.kernels),
            )


def _check_settings(where: str, named: Any) -> None:
    """Refuse what is no list of policies."""
    known = (*MODULES, *WHOLE, *COUNTED)
    words = list(named) if isinstance(named, (list, tuple)) else [named]
    for word in words:
        if word not in known:
            raise SpecError(
                f"{where}: {shorten(word)} is no policy",
                suggestion(str(word), known) or "use some of " + ", ".join(known),
            )


def _check_kernels(where: str, layers: Layers, chosen: Any) -> None:
    """Refuse what is no mapping of known kinds to kernels of theirs."""
    if not isinstance(chosen, dict):
        raise SpecError(f"{where} holds {shorten(chosen)}, not a mapping", "write `kind: kernel`")
    kinds = KINDS[layers]
    for kind, kernel in chosen.items():
        if kind not in kinds:
            hint = suggestion(str(kind), list(kinds)) or "kinds: " + ", ".join(kinds)
            raise SpecError(f"{where}: {layers} layers have no kernels of kind {kind!r}", hint)
        known = kinds[kind].kernels
        if not isinstance(kernel, str) or kernel not in known:
            hint = suggestion(str(kernel), list(known)) or "use one of " + ", ".join(known)
            raise SpecError(f"{where}.{kind} is {shorten(kernel)}, no such kernel", hint)
