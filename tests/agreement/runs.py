"""Random legal runs: a model, a layout, what is trained, and the policies to ask about."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from tests.agreement.asking import Args


class Kind(NamedTuple):
    """Presets that are alike, and the profiles that describe them."""

    models: tuple[str, ...]
    splitting: tuple[str, ...] = ()
    """Profiles of frameworks that split a model over GPUs."""
    alone: tuple[str, ...] = ("transformers",)
    """Profiles for data parallelism alone."""


_ALL = ("megatron", "megatron-local", "paper")
KINDS: dict[str, Kind] = {
    "gpt": Kind(("gpt-22b", "gpt3-175b", "gpt2-medium", "opt-1.3b"), _ALL,
                ("transformers", "paper")),
    "gpt of another shape": Kind(("pythia-1.4b", "bloom-7b1", "falcon-40b", "dbrx", "command-r7b"),
                                 ("paper",)),
    "bert": Kind(("bert-base", "bert-large", "distilbert-base", "roberta-large"), ("paper",)),
    "llama": Kind(("llama-3-8b", "llama-2-70b", "qwen2.5-7b", "mistral-7b-v0.1"), _ALL,
                  ("transformers", "torchtitan", "paper")),
    "moe": Kind(("mixtral-8x7b", "qwen3-30b-a3b", "glm-4.5-air", "llama-4-scout"), _ALL),
    "mla": Kind(("deepseek-v2-lite", "deepseek-v3", "kimi-k2"), ("megatron",)),
    "hybrid": Kind(("nemotron-h-56b", "nemotron-3-nano-30b-a3b", "mamba2-130m"), ("megatron",),
                   ("megatron",)),
    "encoder-decoder": Kind(("t5-base", "t5-3b", "flan-t5-xxl"), ("megatron",)),
    "sliding": Kind(("gpt-oss-20b", "smollm3-3b"), ("megatron",)),
    "sandwich": Kind(("gemma-3-4b", "gemma-2-9b"), ("paper",)),
    "vision": Kind(("vit-b-16", "vit-l-16"), ("paper",)),
}  # fmt: skip
"""Models by what is special about their layers."""

DEVICES = ("a100-80gb", "a100-40gb", "h100-80gb", "h200", "b200", "mi300x", "tpu-v5p")

TRAINING: tuple[tuple[str, ...], ...] = (
    ("optimizer=adam8bit",), ("optimizer=sgd",), ("optimizer=momentum",), ("optimizer=adafactor",),
    ("optimizer=lion",), ("optimizer=muon",), ("recipe=megatron",), ("recipe=mixed",),
    ("recipe=amp",), ("recipe=fsdp",), ("recipe=pure",), ("loss=full",), ("loss=chunked",),
    ("loss=fused",), ("gradient_fusion=false",), ("gradients_in_16_bit=true",),
    ("step_in_backward=true",), ("fused_optimizer=false",), ("prefetch=false",),
    ("overlapped_reduction=true",), ("offload=optimizer",), ("offload=weights",),
    ("master_bytes=2",), ("moments_bytes=4",), ("deterministic=true",), ("loss_metrics=2",),
)  # fmt: skip
"""What may be changed about training, each as fields of --set."""

LORA: tuple[tuple[str, ...], ...] = (
    ("lora_rank=16",), ("lora_rank=8", "lora_targets=attention"),
    ("lora_rank=64", "lora_targets=mlp"), ("lora_rank=16", "base_bits=4"),
)  # fmt: skip


@dataclass
class RandomRun:
    """One run as flags of the command line, in the parts that commands differ in."""

    kind: str
    model: Args
    layout: Args
    settings: Args
    policies: list[str]
    device: Args = field(default_factory=list)

    @property
    def flags(self) -> Args:
        """The run without its device and policies."""
        return [*self.model, *self.layout, *self.settings]

    @property
    def timed(self) -> Args:
        """The run on its device."""
        return [*self.flags, *self.device]

    def value(self, flag: str, default: int) -> int:
        """The number that a flag has."""
        flags = self.flags
        return int(flags[flags.index(flag) + 1]) if flag in flags else default

    def has(self, *words: str) -> bool:
        """Whether any of some words is among the flags."""
        return any(word in self.flags for word in words)


@cache
def model_of(name: str) -> Any:
    """The model that a preset describes."""
    from actcalc.io.runs import load_run

    return load_run(name).model


def random_run(seed: object) -> RandomRun:
    """The run that follows from ``seed``; legal, but for a few that the product refuses."""
    rng = random.Random(f"run {seed}")
    kind = rng.choice(list(KINDS))
    name = rng.choice(KINDS[kind].models)
    layers = rng.choice((2, 3, 4, 6, 8, 8, 12, 16))
    layout = _layout(rng, kind, name, layers)
    model = [name, "--layers", str(layers)]
    if kind != "vision":  # a picture has as many patches as it has
        model += ["--seq", str(rng.choice((256, 512, 1024, 4096)))]
    micro_batch = rng.choice((1, 1, 1, 2, 3))
    model += ["--micro-batch", str(micro_batch)]
    if "--cp" in layout:  # only flash attention passes keys and values round
        model += ["--attention", "flash"]
    elif rng.random() < 0.4:
        model += ["--attention", rng.choice(("eager", "sdpa", "flash"))]
    if rng.random() < 0.3:
        model.append(rng.choice(("--dropout", "--no-dropout")))
    device = rng.choice(DEVICES) if rng.random() < 0.5 else None
    if rng.random() < 0.2 and "flash" not in model and device != "tpu-v5p":  # bf16 alone
        model += ["--precision", rng.choice(("fp16", "fp32", "bf16"))]
    run = RandomRun(kind, model, layout, _settings(rng), [])
    if rng.random() < 0.4:
        run.layout += ["--global-batch", str(_global_batch(rng, run, micro_batch))]
    if device is not None:
        run.device = ["--device", device]
    run.policies = _policies(rng, run, model_of(name), layers)
    return run


def _layout(rng: random.Random, kind: str, name: str, layers: int) -> Args:
    _, splitting, alone = KINDS[kind]
    if rng.random() < 0.25:
        layout = ["--framework", rng.choice(alone)]
    else:
        layout = ["--framework", rng.choice(splitting), *_grid(rng, kind, model_of(name), layers)]
    if "--ep" not in layout and rng.random() < 0.5:
        layout += ["--dp", str(rng.choice((2, 4, 8))), "--zero", str(rng.choice((0, 1, 2, 3)))]
    return layout


def _grid(rng: random.Random, kind: str, model: Any, layers: int) -> Args:
    """tp, sp, pp with its schedule, cp and ep that divide the model."""
    tp = rng.choice([t for t in (1, 2, 4, 8) if _splits(model, t)])
    grid = ["--tp", str(tp)]
    # Megatron trains experts over tensor parallel ranks with sequence parallelism alone
    if tp > 1 and kind != "vision" and (model.moe or rng.random() < 0.7):
        grid.append("--sp")
    if kind not in ("encoder-decoder", "vision"):
        if rng.random() < 0.6:
            grid += _pipeline(rng, layers)
        if rng.random() < 0.15 and kind != "hybrid":
            grid += ["--cp", rng.choice(("2", "4"))]
    if model.moe and rng.random() < 0.6:
        ep = rng.choice([e for e in (2, 4, 8, 16) if model.moe.experts % e == 0])
        grid += ["--ep", str(ep), "--dp", str(ep)]
    return grid


def _splits(model: Any, tp: int) -> bool:
    return bool(
        model.heads % tp == 0
        and model.ffn % tp == 0
        and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
        and (model.moe is None or model.moe.ffn % tp == 0)
    )


def _pipeline(rng: random.Random, layers: int) -> Args:
    """Stages, a schedule and how layers are dealt out to them."""
    pp = rng.choice([p for p in (2, 3, 4, 8) if p <= layers])
    flags = ["--pp", str(pp)]
    way = rng.choice(
        ("1f1b", "1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "interleaved",
         "interleaved")
    )  # fmt: skip
    slices = pp
    if way == "interleaved":
        vpp = rng.choice((2, 3, 4))
        slices = pp * vpp
        flags += ["--vpp", str(vpp)]
    elif way != "1f1b" or rng.random() < 0.3:
        flags += ["--schedule", way]
        slices = 2 * pp if way in ("zb-v", "dualpipe-v") else pp
    if layers % slices or (rng.random() < 0.3 and slices <= layers):
        flags += ["--layers-per-stage", ",".join(map(str, _uneven(rng, layers, slices)))]
    return flags


def _uneven(rng: random.Random, layers: int, slices: int) -> list[int]:
    """``layers`` dealt out to ``slices``, unevenly; none empty where there are enough."""
    counts = [1 if layers >= slices else 0] * slices
    for _ in range(layers - sum(counts)):
        counts[rng.randrange(slices)] += 1
    return counts


def _settings(rng: random.Random) -> Args:
    chosen: list[str] = []
    if rng.random() < 0.4:
        chosen += rng.choice(TRAINING)
    if rng.random() < 0.2:
        chosen += rng.choice(LORA)
    return [word for each in chosen for word in ("--set", each)]


def _global_batch(rng: random.Random, run: RandomRun, micro_batch: int) -> int:
    """So many sequences that every schedule can run: whole rounds of 2·pp micro-batches."""
    rounds = run.value("--pp", 1) * 2
    return micro_batch * run.value("--dp", 1) * rounds * rng.choice((1, 2, 4))


def _policies(rng: random.Random, run: RandomRun, model: Any, layers: int) -> list[str]:
    """none, and two others of different families."""
    modules = ["core_attn", "mlp", "layernorm", "attention"]
    if model.moe:
        modules += ["moe", "moe_act"]
        modules += ["shared_experts"] if model.moe.shared_ffn else []
    if model.mla:
        modules.append("mla_up_proj")
    number = rng.randint(1, max(1, layers // max(1, run.value("--pp", 1))))
    families = [
        "selective",
        "full",
        "full" if rng.random() < 0.5 else "full-sharded",
        "sqrt",
        f"uniform:{number}",
        f"block:{number}",
        f"every:{number}",
        "+".join(rng.sample(modules, 2)),
        rng.choice(modules),
        "op",
    ]
    return ["none", *dict.fromkeys(rng.sample(families, 2))]
