"""What can be changed where a run does not fit its device: one row each, in the order of its cost.

The order is that of the time they usually cost: what costs none first, whole-layer recomputation
and host memory last. A row says how it changes a run, which frameworks offer it and where it is
from; what it frees and costs on a given run is found by building the changed run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Literal

from actcalc.plan.changes import Change
from actcalc.policy.offload import region
from actcalc.run.staged import StagedRun
from actcalc.specs.check import divisors
from actcalc.specs.framework import LOSSES, Framework
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recompute import MODULES
from actcalc.specs.row import Row
from actcalc.specs.run import Run
from actcalc.specs.training import OFFLOADABLE, Training

Keeps = Literal["training", "adapters", "moved", "host", "data", "gpus"]
"""What a remedy leaves as it is: how the model is trained; or it trains adapters alone; takes host
memory, for activations that move or for states; shorter sequences of data; more GPUs. Later ones
are looked at where earlier do not do."""

ADAPTER_RANK = 16
"""Rank of the adapters that are proposed; Hu et al. 2021 use 1 to 64, PEFT's examples 16."""
_AMPERE = 8  # major compute capability from which flash-attention 2 runs (its README)
_DOUBLINGS = 3
NODE = 8
"""Devices of a node where the device does not say."""


class Remedy(Row):
    """One way to need less memory."""

    name: str
    """In a few words."""
    about: str
    """What it does, in a clause."""
    axis: str
    """Remedies of one axis exclude each other."""
    keeps: Keeps
    """What of the run stays as it is."""
    offered: Callable[[Framework], bool]
    """Whether a framework has it."""
    options: Callable[[StagedRun], tuple[Change, ...]]
    """The changes that make it on a run, mildest first; none where it is so already."""
    ordered: bool
    """The options are in the order of their time; else they are put so, the useless left out."""
    environment: str
    """Set outside the run: it changes what the allocator cannot use, and no byte counted here."""
    source: str
    """Where it is from."""


def _any(framework: Framework) -> bool:
    return True


def _splits(framework: Framework) -> bool:
    return framework.model_parallel


def _re_runs_modules(framework: Framework) -> bool:
    return framework.recomputes == "modules"


def _attention(staged: StagedRun) -> tuple[Change, ...]:
    """Kernels without scores in memory: PyTorch's own, or flash-attention where the GPU runs it."""
    run = staged.run
    if run.workload.attention != "eager":
        return ()
    unfused = run.workload.kernels.attention_backend == "unfused"
    backend = {"workload.kernels.attention_backend": "auto"} if unfused else {}
    major = run.device.compute_capability if run.device else None
    words = ["sdpa"] if run.framework.layers == "pytorch" else []
    words += ["flash"] if major is None or major >= _AMPERE else []
    return tuple({"workload.attention": word, **backend} for word in words)


def _loss(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    training = run.training
    own = training.loss in ("auto", "full") and not training.compiled_loss
    if not own or not run.model.vocab or run.workload.kernels.cross_entropy_loss_fusion:
        return ()
    return tuple(LOSSES[name] for name in run.framework.losses)


def _kernel_of_the_step(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    if run.training.fused_optimizer or not OPTIMIZERS[run.training.optimizer].fused:
        return ()
    return ({"training.fused_optimizer": True, "training.foreach_optimizer": True},)


def _sequence(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    return ({"layout.sp": True},) if run.layout.tp > 1 and not run.layout.sp else ()


def _zero(*stages: int) -> Callable[[StagedRun], tuple[Change, ...]]:
    def options(staged: StagedRun) -> tuple[Change, ...]:
        run, layout = staged.run, staged.run.layout
        if layout.dp * layout.cp == 1:
            return ()
        offered = [n for n in stages if n > layout.zero and n in run.framework.zero_stages]
        return tuple({"layout.zero": stage} for stage in offered)

    return options


def _sixteen(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    return () if run.training.gradients_in_16_bit else ({"training.gradients_in_16_bit": True},)


def _eight_bit(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    name = OPTIMIZERS[run.training.optimizer].eight_bit
    if not name or not getattr(OPTIMIZERS[name], run.framework.optimizer_names):
        return ()
    return ({"training.optimizer": name},)


def _in_backward(staged: StagedRun) -> tuple[Change, ...]:
    """Each gradient is dropped at once: nothing accumulates, so one micro-batch is a step."""
    run = staged.run
    work, layout = run.workload, run.layout
    one = work.global_batch in (None, work.micro_batch * layout.dp) and layout.pp == 1
    if run.training.step_in_backward or not one:
        return ()
    return ({"training.step_in_backward": True},)


def _micro_batch(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    size = run.workload.micro_batch
    smaller = sorted((d for d in divisors(size) if d < size), reverse=True)
    kept = smaller[:_DOUBLINGS] + smaller[_DOUBLINGS:][-1:]
    return tuple({"workload.micro_batch": one} for one in kept)


def _adapters(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    training = run.training
    if not _trains_all(training):
        return ()
    return ({"training.lora_rank": ADAPTER_RANK},)


def _trains_all(training: Training) -> bool:
    """Whether every weight is trained, by a plain optimizer."""
    whole = not (training.tunes or training.galore_rank)
    return whole and OPTIMIZERS[training.optimizer].updates


def _quantised(staged: StagedRun) -> tuple[Change, ...]:
    """Adapters over a quantised base, in place of training every weight."""
    if not _trains_all(staged.run.training):
        return ()
    bits = min(staged.run.framework.quantised_bits)
    return ({"training.lora_rank": ADAPTER_RANK, "training.base_bits": bits},)


def _in_four_bits(staged: StagedRun) -> tuple[Change, ...]:
    """A quantised base of an adapter run: it trains what was trained before."""
    training = staged.run.training
    if not training.lora_rank or training.base_bits < 16:
        return ()
    return ({"training.base_bits": min(staged.run.framework.quantised_bits)},)


def _doubled(name: str, limit: Callable[[Run], int]) -> Callable[[StagedRun], tuple[Change, ...]]:
    """A degree of parallelism doubled, once and again, on as many devices as the run has."""

    def options(staged: StagedRun) -> tuple[Change, ...]:
        run, layout = staged.run, staged.run.layout
        now, most = getattr(layout, name), limit(run)
        found: list[Change] = []
        for power in range(1, _DOUBLINGS + 1):
            degree = now << power
            if degree > most:
                break
            more = {"layout.sp": True} if name == "tp" and not layout.sp else {}
            found.append({f"layout.{name}": degree, **more})
        return tuple(found)

    return options


def _within_node(run: Run) -> int:
    each = run.device.devices_per_node if run.device else None
    return min(each or NODE, run.layout.tp * run.layout.dp)


def _stages(run: Run) -> int:
    layout = run.layout
    return 0 if layout.layers_per_stage else min(run.model.depth, layout.pp * layout.dp)


def _contexts(run: Run) -> int:
    return run.layout.cp * run.layout.dp


def _experts(run: Run) -> int:
    return run.model.moe.experts if run.model.moe else 0


def _plain_pipeline(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    layout = run.layout
    if layout.vpp == 1 or layout.layers_per_stage:
        return ()
    schedule = {"layout.schedule": None} if layout.schedule else {}
    return ({"layout.vpp": 1, "layout.microbatch_group": None, **schedule},)


def _offload(what: str) -> Callable[[StagedRun], tuple[Change, ...]]:
    def options(staged: StagedRun) -> tuple[Change, ...]:
        run = staged.run
        training = run.training
        free = training.offload == "none" or (training.offload, what) == ("optimizer", "weights")
        updates = OPTIMIZERS[training.optimizer].updates
        if not free or not updates or what not in run.framework.offloads_states:
            return ()
        return ({"training.offload": what},)

    return options


def _activations(staged: StagedRun) -> tuple[Change, ...]:
    """Whole layers' activations, or those of every set of modules that Megatron's hooks know."""
    run = staged.run
    training = run.training
    if training.moves_activations or training.offload != "none":
        return ()
    if not run.framework.offloads_modules:
        return ({"training.offload": "activations"},)
    there = [name for name in OFFLOADABLE if any(region(kind.graph, name) for kind in staged.kinds)]
    sets = (chosen for n in range(1, len(there) + 1) for chosen in combinations(there, n))
    legal = (chosen for chosen in sets if "core_attn" in chosen or "attn_proj" not in chosen)
    return tuple({"training.offload_modules": chosen} for chosen in legal)


def _replicas(staged: StagedRun) -> tuple[Change, ...]:
    """A node of replicas where there is one GPU's worth of them, over which states are sharded."""
    run, layout = staged.run, staged.run.layout
    if layout.dp * layout.cp > 1:
        return ()
    stages = [n for n in run.framework.zero_stages if n >= max(1, layout.zero)]
    return tuple({"layout.dp": NODE, "layout.zero": stage} for stage in stages)


def _twice(name: str) -> Callable[[StagedRun], tuple[Change, ...]]:
    """Twice the degree on twice the GPUs."""

    def options(staged: StagedRun) -> tuple[Change, ...]:
        layout = staged.run.layout
        if name == "pp" and layout.layers_per_stage:
            return ()
        more = {"layout.sp": True} if name == "tp" and not layout.sp else {}
        return ({f"layout.{name}": 2 * getattr(layout, name), **more, "layout.dp": layout.dp},)

    return options


def _shorter(staged: StagedRun) -> tuple[Change, ...]:
    run = staged.run
    seq = run.workload.seq
    return tuple({"workload.seq": seq >> n} for n in (1, 2, 3) if not seq % (1 << n))


def _selective(staged: StagedRun) -> tuple[Change, ...]:
    return tuple({"policy": name} for name in ("selective",) if "core_attn" in _tags(staged))


def _modules(staged: StagedRun) -> tuple[Change, ...]:
    """Every set of modules but the attention core alone, which has a row of its own."""
    known = [name for name, row in MODULES.items() if row.megatron and row.tag in _tags(staged)]
    sets = (chosen for n in range(1, len(known) + 1) for chosen in combinations(known, n))
    names = ["+".join(chosen) for chosen in sets]
    return tuple({"policy": name} for name in names if name != "core_attn")


def _tags(staged: StagedRun) -> set[str]:
    return {tag for kind in staged.kinds for op in kind.graph.ops for tag in op.modules}


def _some_layers(staged: StagedRun) -> tuple[Change, ...]:
    longest = staged.longest
    if staged.run.framework.recomputes == "ops":
        return tuple({"policy": f"every:{n}"} for n in range(longest, 1, -1))
    return tuple({"policy": f"block:{n}"} for n in range(1, longest))


def _whole(staged: StagedRun) -> tuple[Change, ...]:
    """Every layer; where a framework says so also in segments, up to two sizes."""
    counts: list[int] = []
    if staged.run.framework.recomputes == "modules":
        counts = [n for n in divisors(staged.longest) if 1 < n * n <= staged.longest][:2]
    return ({"policy": "full"}, *({"policy": f"uniform:{n}"} for n in counts))


_SHARDS = "Rajbhandari et al. 2020, arXiv:1910.02054, section 5"
_ROWS = (
    Remedy(
        name="attention without scores", axis="attention", keeps="training",
        environment="", ordered=True,
        about="no s x s scores are kept",
        offered=_any, options=_attention, source="Dao et al. 2022, section 3.1",
    ),
    Remedy(
        name="fused loss", axis="loss", keeps="training",
        environment="", ordered=True,
        about="the loss does not keep all logits in fp32",
        offered=lambda framework: bool(framework.losses), options=_loss,
        source="Liger Kernel ops/fused_linear_cross_entropy.py; Megatron-LM "
        "--cross-entropy-loss-fusion; torchtitan compile.components",
    ),
    Remedy(
        name="fused optimizer", axis="step", keeps="training",
        environment="", ordered=True,
        about="the step makes no temporary as large as a state",
        offered=_any, options=_kernel_of_the_step, source="torch.optim AdamW(fused=True)",
    ),
    Remedy(
        name="sequence parallelism", axis="sequence", keeps="training",
        environment="", ordered=True,
        about="norms and dropouts are split over tp as well",
        offered=_splits, options=_sequence,
        source="Korthikanti et al. 2022, section 4.2.2",
    ),
    Remedy(
        name="distributed optimizer", axis="sharding", keeps="training",
        environment="", ordered=True,
        about="optimizer states are sharded over replicas (ZeRO 1)",
        offered=lambda framework: 1 in framework.zero_stages, options=_zero(1), source=_SHARDS,
    ),
    Remedy(
        name="expandable segments", axis="allocator", keeps="training",
        ordered=True, environment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        about="fragments less: needs no such headroom, changes no byte counted here",
        offered=lambda framework: not framework.idealised, options=lambda staged: (),
        source="PyTorch notes on CUDA memory management, expandable_segments",
    ),
    Remedy(
        name="gradients in 16 bits", axis="gradients", keeps="training",
        environment="", ordered=True,
        about="gradients are accumulated and reduced in 16 bits",
        offered=lambda framework: framework.main_gradients, options=_sixteen,
        source="Megatron-LM training/arguments.py accumulate_allreduce_grads_in_fp32",
    ),
    Remedy(
        name="8-bit optimizer", axis="optimizer", keeps="training",
        environment="", ordered=True,
        about="moments are kept in 8 bits",
        offered=_any, options=_eight_bit, source="Dettmers et al. 2021, section 2",
    ),
    Remedy(
        name="step in backward", axis="gradients", keeps="training",
        environment="", ordered=True,
        about="each weight is updated as soon as its gradient is there",
        offered=lambda framework: framework.steps_in_backward, options=_in_backward,
        source="torchtitan components/optimizer.py OptimizersInBackwardContainer",
    ),
    Remedy(
        name="smaller micro-batch", axis="micro-batch", keeps="training",
        environment="", ordered=True,
        about="as many sequences in a step, in more micro-batches",
        offered=_any, options=_micro_batch, source="gradient accumulation",
    ),
    Remedy(
        name="selective recompute", axis="policy", keeps="training",
        environment="", ordered=True,
        about="the attention core runs again in backward",
        offered=_re_runs_modules, options=_selective,
        source="Korthikanti et al. 2022, section 5",
    ),
    Remedy(
        name="recompute of modules", axis="policy", keeps="training",
        environment="", ordered=False,
        about="chosen modules run again in backward",
        offered=_re_runs_modules, options=_modules,
        source="Megatron-Core transformer_config.py recompute_modules",
    ),
    Remedy(
        name="recompute op by op", axis="policy", keeps="training",
        environment="", ordered=True,
        about="every second product is kept",
        offered=lambda framework: framework.per_op_policy, options=lambda s: ({"policy": "op"},),
        source="torchtitan distributed/activation_checkpoint.py _apply_op_sac",
    ),
    Remedy(
        name="recompute of some layers", axis="policy", keeps="training",
        environment="", ordered=True,
        about="as few layers as do run again in backward",
        offered=lambda framework: framework.recomputes != "layers", options=_some_layers,
        source="Megatron-Core transformer_block.py recompute_method block; torchtitan "
        "selective_ac_option",
    ),
    Remedy(
        name="4-bit base", axis="adapters", keeps="training",
        environment="", ordered=True,
        about="the frozen base is quantised",
        offered=lambda framework: bool(framework.quantised_bits), options=_in_four_bits,
        source="Dettmers et al. 2023, section 3",
    ),
    Remedy(
        name="LoRA", axis="adapters", keeps="adapters",
        environment="", ordered=True,
        about="adapters are trained, the model's own weights stay as they are",
        offered=lambda framework: framework.trains_adapters, options=_adapters,
        source="Hu et al. 2021, section 4.1",
    ),
    Remedy(
        name="QLoRA", axis="adapters", keeps="adapters",
        environment="", ordered=True,
        about="adapters over a base in 4 bits",
        offered=lambda framework: framework.trains_adapters and bool(framework.quantised_bits),
        options=_quantised,
        source="Dettmers et al. 2023, section 3",
    ),
    Remedy(
        name="sharded weights", axis="sharding", keeps="training",
        environment="", ordered=True,
        about="gradients and weights are sharded over replicas (ZeRO 2, ZeRO 3, FSDP)",
        offered=lambda framework: max(framework.zero_stages, default=0) > 1, options=_zero(2, 3),
        source=_SHARDS,
    ),
    Remedy(
        name="tensor parallelism", axis="tp", keeps="training",
        environment="", ordered=True,
        about="layers are split over more GPUs of a node, with fewer replicas",
        offered=_splits, options=_doubled("tp", _within_node),
        source="Shoeybi et al. 2019, section 3",
    ),
    Remedy(
        name="plain pipeline", axis="chunks", keeps="training",
        environment="", ordered=True,
        about="1f1b holds fewer layers in flight than an interleaved pipeline",
        offered=_splits, options=_plain_pipeline,
        source="Narayanan et al. 2021, section 2.2",
    ),
    Remedy(
        name="pipeline parallelism", axis="pp", keeps="training",
        environment="", ordered=True,
        about="fewer layers on a GPU, with fewer replicas",
        offered=_splits, options=_doubled("pp", _stages),
        source="Narayanan et al. 2021, section 2.2",
    ),
    Remedy(
        name="context parallelism", axis="cp", keeps="training",
        environment="", ordered=True,
        about="fewer tokens of a sequence on a GPU, with fewer replicas",
        offered=_splits, options=_doubled("cp", _contexts),
        source="Liu et al. 2023, arXiv:2310.01889",
    ),
    Remedy(
        name="expert parallelism", axis="ep", keeps="training",
        environment="", ordered=True,
        about="fewer experts on a GPU",
        offered=_splits, options=_doubled("ep", _experts),
        source="Lepikhin et al. 2020, section 3",
    ),
    Remedy(
        name="full recompute", axis="policy", keeps="training",
        environment="", ordered=True,
        about="every layer runs again in backward",
        offered=_any, options=_whole, source="Chen et al. 2016, arXiv:1604.06174",
    ),
    Remedy(
        name="activation offload", axis="offload", keeps="moved",
        environment="", ordered=False,
        about="saved tensors wait in host memory from forward to backward",
        offered=lambda framework: framework.offloads_modules or framework.offloads_activations,
        options=_activations,
        source="Megatron-Core pipeline_parallel/fine_grained_activation_offload.py; TRL "
        "models/activation_offloading.py; torchtune training/_activation_offloading.py",
    ),
    Remedy(
        name="optimizer on the host", axis="offload", keeps="host",
        environment="", ordered=True,
        about="optimizer states are kept in host memory",
        offered=lambda framework: "optimizer" in framework.offloads_states,
        options=_offload("optimizer"), source="Ren et al. 2021, ZeRO-Offload",
    ),
    Remedy(
        name="weights on the host", axis="offload", keeps="host",
        environment="", ordered=True,
        about="weights and optimizer states are kept in host memory",
        offered=lambda framework: "weights" in framework.offloads_states,
        options=_offload("weights"), source="Rajbhandari et al. 2021, ZeRO-Infinity, section 5",
    ),
    Remedy(
        name="shorter sequence", axis="seq", keeps="data",
        environment="", ordered=True,
        about="fewer tokens of each sequence",
        offered=_any, options=_shorter, source="activations grow with s, scores with s x s",
    ),
)  # fmt: skip

REMEDIES: tuple[Remedy, ...] = _ROWS
"""Every remedy on as many GPUs, in the order of its usual cost."""

WITH_MORE_GPUS = (
    Remedy(
        name="shards over a node", axis="sharding", keeps="gpus",
        environment="", ordered=True, about="states are sharded over the replicas of a node",
        offered=lambda framework: bool(framework.zero_stages), options=_replicas, source=_SHARDS,
    ),
    *(
        Remedy(
            name=f"twice {name}", axis=name, keeps="gpus",
            environment="", ordered=True, about=f"{name} is doubled, and so are the GPUs",
            offered=_splits, options=_twice(name), source="as on as many GPUs",
        )
        for name in ("tp", "pp", "cp")
    ),
)  # fmt: skip
"""What takes more GPUs than the run has."""
