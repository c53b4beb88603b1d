"""Cross-checks between model, layout and workload: what no run could mean is refused here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from actcalc.errors import SpecError
from actcalc.specs.framework import Framework
from actcalc.specs.layout import Layout
from actcalc.specs.model import Model
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.training import Training
from actcalc.specs.workload import Workload


def divisors(number: int, limit: int = 1024) -> list[int]:
    """Divisors of ``number`` up to ``limit``, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def nearest(choices: Iterable[int], wanted: int) -> int:
    """The choice nearest to ``wanted``, the larger on a tie."""
    return min(choices, key=lambda choice: (abs(choice - wanted), -choice))


def check(model: Model, layout: Layout, workload: Workload) -> None:
    """Raise ``SpecError``, naming values and a legal choice, where the three contradict."""
    _tensor_parallel(model, layout)
    _sequence(layout, workload)
    _pipeline(model, layout)
    _experts(model, layout)
    _batch(layout, workload)
    if workload.image_tokens and not model.tower:
        raise SpecError(
            f"image_tokens {workload.image_tokens} need a vision tower, which {model.name} has not",
            "drop image_tokens, or give a model with images (tower)",
        )
    if workload.decoder_seq and not model.encoder_layers:
        raise SpecError(
            f"decoder_seq {workload.decoder_seq} is an encoder-decoder's, and {model.name} is none",
            "drop decoder_seq, or give seq",
        )
    if model.moe is None and workload.moe_imbalance != 1:
        raise SpecError(
            f"moe_imbalance {workload.moe_imbalance:g} spreads tokens over experts, but "
            f"{model.name} has none",
            "drop --moe-imbalance",
        )


def check_profile(profile: Framework, layout: Layout, workload: Workload) -> None:
    """Refuse degrees and number formats that the profile's layers do not know."""
    if workload.precision.startswith("amp") and not profile.autocast:
        raise SpecError(
            f"precision {workload.precision} is autocast, which the {profile.name} profile "
            "does not know",
            "use --precision bf16, or --framework transformers",
        )
    if workload.fp8_products and not profile.fp8:
        raise SpecError(
            f"the {profile.name} profile has no fp8 recipe",
            "use --framework megatron, or --precision bf16",
        )
    caching = workload.kernels.fp8_caching
    if caching != "engine" and not (workload.fp8_products and profile.transformer_engine):
        raise SpecError(
            f"fp8_caching {caching} is of fp8 products in the layers of Transformer Engine",
            "add --precision fp8 --framework megatron, or drop it",
        )
    split = [n for n in ("tp", "pp", "cp", "ep") if getattr(layout, n) > 1]
    if split and not profile.model_parallel:
        degrees = ", ".join(f"{name} {getattr(layout, name)}" for name in split)
        raise SpecError(
            f"the {profile.name} profile knows one GPU and data parallelism, not {degrees}",
            f"drop --{split[0]}, or use --framework megatron",
        )
    if profile.layers == "pytorch":
        _check_modules(profile, layout)


def _check_modules(profile: Framework, layout: Layout) -> None:
    """Refuse what layers of PyTorch modules do not know of parallelism."""
    if layout.tp > 1 and not layout.sp:
        raise SpecError(
            f"the {profile.name} profile runs tensor parallelism with sequence parallelism",
            "add --sp",
        )
    _check_etp(profile, layout)


def _check_etp(profile: Framework, layout: Layout) -> None:
    """Refuse tensor parallelism of experts that torchtitan has not (ParallelDims._validate)."""
    tp, ep, etp = layout.tp, layout.ep, layout.etp
    if ep > 1 and tp > 1 and etp is None:
        raise SpecError(
            f"ep {ep} with tp {tp}: the {profile.name} profile's experts are split over tp, or "
            "over ep alone, which borrows the ranks of tp",
            f"add --etp {tp}, or --etp 1 (torchtitan's default)",
        )
    if ep == 1 and etp not in (None, tp):
        raise SpecError(
            f"the {profile.name} profile splits experts over tp {tp} where ep is 1, not etp {etp}",
            "add --ep 2 or more, or drop --etp",
        )
    if etp not in (None, 1, tp):
        raise SpecError(
            f"the {profile.name} profile's experts know etp 1 or tp {tp}, not {etp}", "use --etp 1"
        )


def _check_loss(model: Model, training: Training) -> None:
    """Raise ``SpecError`` for a way to make the logits of a vocabulary where there is none."""
    named = training.loss not in ("auto", "full")
    if (named or training.compiled_loss) and not model.vocab:
        what = f"loss {training.loss}" if named else "compiled_loss"
        raise SpecError(
            f"{what} is of the logits of a vocabulary, and {model.name} has none",
            "use --loss full, or another model",
        )


def check_objective(profile: Framework, workload: Workload, training: Training) -> None:
    """Refuse objectives that a profile's trainers have not, and completions that nothing heeds."""
    if training.objective != "sft" and not profile.hub_models:
        raise SpecError(
            f"objective {training.objective} is TRL's, over models of transformers, not of "
            f"{profile.name}",
            "use --framework transformers, or drop --objective",
        )
    logits = OBJECTIVES[training.objective].head
    tiled = training.loss == "tiled" or (logits == "log-probabilities" and training.loss == "auto")
    if workload.completion and not tiled:
        raise SpecError(
            f"completion {workload.completion} changes nothing: the logits of all tokens are made",
            "add --loss tiled, or drop it",
        )


def _check_objective(model: Model, layout: Layout, training: Training) -> None:
    """Raise ``SpecError`` for an objective, or frozen layers, that a model or layout has not."""
    tuned = f"objective {training.objective}" if training.objective != "sft" else ""
    tuned = tuned or ("freeze" if training.freeze else "")
    if not tuned:
        return
    if model.head != "lm" and training.objective != "sft":
        raise SpecError(
            f"{tuned} is of a language model, and the head of {model.name} is {model.head}",
            "use --objective sft, or another model",
        )
    if layout.pp > 1:
        raise SpecError(f"{tuned} with pp {layout.pp}: PEFT and TRL run no pipeline", "drop --pp")


def check_training(
    model: Model, layout: Layout, training: Training, *, replicas_known: bool = True
) -> None:
    """Raise ``SpecError`` where how a model is trained contradicts it or its layout."""
    _check_loss(model, training)
    _check_objective(model, layout, training)
    if training.tower == "frozen" and not model.tower:
        raise SpecError(
            f"tower is frozen, and {model.name} has no vision tower",
            "drop --tower, or give a model with images",
        )
    check_sharding(layout, training, replicas_known=replicas_known)


def _check_reduction(layout: Layout, training: Training) -> None:
    """Refuse choices of data parallelism that change nothing of this run."""
    if training.keeps_gathered is not None and layout.zero < 2:
        raise SpecError(
            f"keeps_gathered changes nothing under zero {layout.zero}: weights are not gathered",
            "add --zero 3 (or 2), or drop keeps_gathered",
        )
    if training.zero_redundancy and layout.zero != 1:
        raise SpecError(
            f"zero_redundancy is a ZeRO 1, not {layout.zero}", "add --zero 1, or drop it"
        )
    sharded = layout.zero > 1 or (layout.zero == 1 and not training.zero_redundancy)
    if training.bucket_view and sharded:
        raise SpecError(
            f"bucket_view: DistributedDataParallel does not run under zero {layout.zero}",
            "use --zero 0 (or 1 with zero_redundancy), or drop bucket_view",
        )


def check_sharding(layout: Layout, training: Training, *, replicas_known: bool = True) -> None:
    """Raise ``SpecError`` for shards or instances that the replicas cannot be divided into.

    Without ``replicas_known`` (they follow later, from a number of devices) only what holds for
    any number of them is refused. PyTorch's hybrid sharding and Megatron's instances of the
    distributed optimizer are meshes: rows times columns are all the ranks.
    """
    ranks, shards = layout.dp * layout.cp, training.shards
    if shards is not None and not layout.zero:
        raise SpecError(
            f"shards {shards} changes nothing: zero is 0, nothing is sharded",
            "add --zero 1, 2 or 3, or drop --shards",
        )
    _check_reduction(layout, training)
    if not replicas_known:
        return
    what = f"dp {layout.dp}" + (f" x cp {layout.cp} = {ranks}" if layout.cp > 1 else "")
    if shards is not None and ranks % shards:
        raise SpecError(
            f"shards {shards} does not divide {what}",
            f"use --shards {nearest(divisors(ranks), shards)}, or another --dp",
        )
    if ranks % training.instances:
        raise SpecError(
            f"instances {training.instances} does not divide {what}",
            f"use {nearest(divisors(ranks), training.instances)}, or another --dp",
        )


def _tensor_parallel(model: Model, layout: Layout) -> None:
    tp = layout.tp
    if tp == 1:
        return
    widths = {"heads": model.heads, "hidden": model.hidden, "ffn": model.ffn}
    if model.moe and (layout.etp or tp) == tp:
        widths["moe.ffn"] = model.moe.ffn
    groups = {"kv_heads": model.kv_heads}
    first = {sizes: index for index, sizes in reversed(list(enumerate(model.layer_sizes)))}
    for sizes, index in first.items():
        for name in sizes.own.keys() - {"head_dim"}:
            where = groups if name == "kv_heads" else widths
            where[f"layer {index}'s {name}"] = sizes.own[name]
    legal = [
        d
        for d in divisors(model.heads)
        if all(width % d == 0 for width in widths.values())
        and all(heads % d == 0 or d % heads == 0 for heads in groups.values())
    ]
    hint = f"use --tp {nearest(legal, tp)} (legal: {', '.join(map(str, legal))})"
    for name, width in widths.items():
        if width % tp:
            raise SpecError(f"tp {tp} does not divide {name} {width}", hint)
    for name, heads in groups.items():
        if model.mla is None and heads % tp and tp % heads:
            raise SpecError(f"tp {tp} neither divides {name} {heads} nor is a multiple of it", hint)


def _sequence(layout: Layout, workload: Workload) -> None:
    seq, cp, tp = workload.seq, layout.cp, layout.tp
    if seq % cp:
        raise SpecError(
            f"cp {cp} does not divide seq {seq}", f"use --cp {nearest(divisors(seq), cp)}"
        )
    if layout.sp and (seq // cp) % tp:
        part = f"seq {seq}" if cp == 1 else f"seq {seq} / cp {cp} = {seq // cp}"
        near = max(1, round(seq / (tp * cp))) * tp * cp
        raise SpecError(
            f"sp splits the sequence: tp {tp} does not divide {part}", f"use --seq {near}"
        )


def _pipeline(model: Model, layout: Layout) -> None:
    slices, layers = layout.slices, model.depth
    if layout.layers_per_stage:
        total = sum(layout.layers_per_stage)
        if total != layers:
            raise SpecError(
                f"layers_per_stage adds up to {total}, the model has {layers} layers",
                f"change the list by {layers - total:+d}",
            )
        return
    if layers % slices:
        split = uneven_split(layers, slices)
        each = slices // layout.pp
        legal = [d // each for d in divisors(layers) if d % each == 0 and (d > each or each == 1)]
        legal = [pp for pp in legal if pp % SCHEDULES[layout.pipeline].directions == 0]
        ways = [f"--layers-per-stage {split}"] if split else []
        ways += [f"--pp {nearest(legal, layout.pp)}"] if legal else []
        raise SpecError(
            f"{layout.cut} does not divide {layers} layers",
            "use " + ", or ".join(ways) if ways else f"use at least {slices} layers, or less --pp",
        )


def uneven_split(layers: int, stages: int) -> str:
    """An uneven split in the notation of --layers-per-stage, e.g. ``7,8x14,7``; "" if impossible.

    Missing layers are taken from the last and the first stages, which also hold the head and the
    embedding (the arrangement of Llama 3 405B: 126 layers on 16 stages).
    """
    if stages > layers:
        return ""
    full = -(-layers // stages)
    short = full * stages - layers
    after, before = (short + 1) // 2, short // 2
    counts = [full - 1] * before + [full] * (stages - short) + [full - 1] * after
    runs = [(count, sum(1 for _ in group)) for count, group in groupby(counts)]
    return ",".join(f"{count}x{run}" if run > 1 else str(count) for count, run in runs)


def _experts(model: Model, layout: Layout) -> None:
    if model.moe is None:
        for name, value in (("ep", layout.ep), ("etp", layout.etp or 1)):
            if value > 1:
                raise SpecError(
                    f"{name} {value} spreads experts, but {model.name} has none",
                    f"drop --{name}",
                )
        return
    if model.moe.experts % layout.ep:
        raise SpecError(
            f"ep {layout.ep} does not divide {model.moe.experts} experts",
            f"use --ep {nearest(divisors(model.moe.experts), layout.ep)}",
        )
    etp = layout.expert_tp
    if model.moe.ffn % etp:
        raise SpecError(
            f"etp {etp} does not divide moe.ffn {model.moe.ffn}",
            f"use --etp {nearest(divisors(model.moe.ffn), etp)}",
        )


def _batch(layout: Layout, workload: Workload) -> None:
    batch = workload.global_batch
    if batch is None:
        return
    per_step = workload.micro_batch * layout.dp
    if batch % per_step:
        near = max(1, round(batch / per_step)) * per_step
        raise SpecError(
            f"global_batch {batch} is not a multiple of micro_batch {workload.micro_batch} x "
            f"dp {layout.dp} = {per_step}",
            f"use --global-batch {near}",
        )
