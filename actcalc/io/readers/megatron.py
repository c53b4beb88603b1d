"""Megatron-LM's arguments in all their forms: mappings, printed blocks, options of a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from actcalc.errors import SpecError
from actcalc.io.megatron import Arguments, is_arguments, read_arguments
from actcalc.io.megatron.options import plain
from actcalc.io.readers.document import Document
from actcalc.io.readers.part import Part, dotted

_PRINTED = re.compile(r"(?:^|[\]:]) *([A-Za-z][A-Za-z0-9_]{0,80}) \.{2,} (.*)$")
"""A line of the block that Megatron prints: a name, dots, its value; ranks may stand before it."""

SLIME = (
    r"(rollout|actor|sglang|prompt|eval|rm|num-(rollout|steps|epoch)|input-key|label-key|colocate|n-"
    r"|samples|balance-data|advantage|use-(kl|tis|dynamic|rollout|opsm|routing)|kl-|entropy|eps"
    r"|ref-|apply-chat|over-sampling|dynamic-sampling|partial|custom|offload-(train|rollout)|critic"
    r"|debug|max-tokens-per-gpu|hf-checkpoint|megatron-to-hf|update-weight|train-memory|loss-|ci-"
    r"|gamma|lambd|normalize|reward|tool|metadata|group-rm|router|buffer|save-|wandb|get-|freeze"
    r"|train-env|dump|check|keep|only-train|log-probs|qkv-format|pad-token|calculate).*"
)
"""Options of slime and of Megatron-DeepSpeed's launchers, which move neither memory nor time."""
DEEPSPEED = (
    r"(deepspeed|deepspeed-config|zero-(allgather|reduce|contigous)|memory-centric|curriculum|aml"
    r"|ds-|create-moe-param|moe-expert-parallel-size|data-efficiency|random-ltd|universal"
    r"|no-pipeline-parallel|cpu-optimizer|remote-device|distill|kd|abort|sync-tp|repeated"
    r"|deepspeed-activation-checkpointing|profile-backward|hidden-size-teacher|checkpoint-in-cpu"
    r"|contigious-checkpointing|synchronize-each-layer|scattered|use-pin-memory|codecarbon"
    r"|skip-train|kill-switch|embed-layernorm|multiprocessing|local-rank|node-rank|nnodes|nproc"
    r"|master|rdzv|use-hf|hf-).*"
)


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is Megatron's arguments, alone or under MODEL_ARGS."""
    if isinstance(data.get("MODEL_ARGS"), Mapping):
        return True
    return is_arguments(data)


def read(data: Mapping[str, Any], where: Document) -> Part:
    """What a mapping of arguments says; ``SpecError`` for what Megatron refuses.

    Under ``MODEL_ARGS`` (Megatron-MoE-ModelZoo, Megatron's tests) other sections may give
    ``ENV_VARS`` and the like.
    """
    name = where.stem
    options = dict(data)
    nested = options.pop("MODEL_ARGS", None)
    if isinstance(nested, Mapping):
        options = {k: v for k, v in nested.items() if not isinstance(v, Mapping)}
    _slime(options)
    return part_of(read_arguments(options, name, f"{SLIME}|{DEEPSPEED}"), name, "megatron", ())


def part_of(found: Arguments, name: str, kind: str, notes: tuple[str, ...]) -> Part:
    """Megatron's fields as a part of a run."""
    fields = dotted(
        model=found.model, layout=found.layout, workload=found.workload, training=found.training
    )
    return Part(
        kind=kind,
        name=name,
        given={
            "model.name": name, **fields, "framework": found.framework,
            "policy": found.policies[0], "devices": found.devices,
        },
        notes=(*found.warnings, *notes),
        assumed=found.assumed,
        needs=found.needs,
    )  # fmt: skip


def _slime(options: dict[str, Any]) -> None:
    """What slime sets: processes of its actor, bf16, micro-batches of so many tokens.

    ``slime/backends/megatron_utils/arguments.py`` sets bf16 unless fp16 is given.
    """
    plain_ = {plain(key): key for key in options}
    if "rollout-batch-size" not in plain_ and "actor-num-gpus-per-node" not in plain_:
        return
    if "fp16" not in plain_:
        options["bf16"] = True
    nodes, each = (plain_.get(f"actor-num-{name}") for name in ("nodes", "gpus-per-node"))
    if each and "world-size" not in plain_:
        count = str(options[each]), str(options[nodes]) if nodes else "1"
        if all(word.isdigit() for word in count):
            options["world-size"] = int(count[0]) * int(count[1])
    if "max-tokens-per-gpu" in plain_ and "seq-length" not in plain_:
        longest = str(options[plain_["max-tokens-per-gpu"]])
        if longest.isdigit():
            options["seq-length"] = int(longest)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Names and values of the block, in the order of their lines."""
    lines = (line for line in text[:400_000].splitlines() if " .." in line and len(line) < 2000)
    found = (_PRINTED.search(line.rstrip()) for line in lines)
    return [(match[1], match[2].strip()) for match in found if match]


def is_printed(text: str) -> bool:
    """Whether a text holds the block of arguments that Megatron prints when it starts."""
    return len(_pairs(text)) >= 20


def printed(text: str) -> dict[str, Any]:
    """The arguments of the first such block, with the types that they print as."""
    found: dict[str, Any] = {}
    for name, value in _pairs(text):
        if name in found:
            continue
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    if text in ("True", "False", "None") or re.fullmatch(r"[\[(]?-?\d[\d.,\s\])e+-]{0,40}", text):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
        return list(value) if isinstance(value, tuple) else value
    return text


def read_printed(where: Document) -> Part:
    """What a log's block of arguments says."""
    data = printed(where.text)
    if not is_arguments(data):
        raise SpecError(
            f"{where.name}: the arguments printed in it are not Megatron's",
            "name the log of a run of Megatron-LM, or its launch script",
        )
    return read(data, where)
