"""How weights are trained, in one or two lines for the head of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def training_lines(
    training: Mapping[str, Any],
    recipe: Mapping[str, Any],
    layout: Mapping[str, Any],
    workload: Mapping[str, Any],
) -> tuple[str, ...]:
    """Optimizer, bytes of each copy of a parameter and ZeRO; then what else was asked for.

    All four are fields of a memory report; ``recipe`` has bytes per parameter.
    """
    zero = f"  ZeRO {layout['zero']}" if layout["zero"] else ""
    moments = f", moments {recipe['moments']:.3g}" if recipe["moments"] else ""
    master = training["master_bytes"] or recipe["master"]
    fp8 = workload["fp8"] or workload["precision"] == "fp8"
    copies = " + 2 in fp8" if fp8 and not training["fp8_weights"] else ""
    states = (
        f"{training['optimizer']}  {recipe['name']} states: weight {recipe['weight']}{copies}, "
        f"gradient {recipe['gradient']}, master {master}{moments} B{zero}"
    )
    extra = extra_words(training)
    return (states, "  ".join(extra)) if extra else (states,)


def extra_words(training: Mapping[str, Any]) -> list[str]:
    """Adapters, offload and cross-entropy, where they are not the defaults."""
    words = [] if training["objective"] == "sft" else [training["objective"].upper()]
    if training["lora_rank"]:
        base = f", base in {training['base_bits']} bits" if training["base_bits"] < 16 else ""
        kind = "DoRA" if training["dora"] else "LoRA"
        words.append(f"{kind} r {training['lora_rank']} on {training['lora_targets']}{base}")
    if training["train"]:
        also = "also trained" if training["lora_rank"] else "trained alone"
        words.append(f"{', '.join(training['train'])} {also}")
    if training["freeze"]:
        first = training["freeze"]
        which = f"first {first} layers" if first > 0 else f"all layers but the last {-first}"
        words.append(f"{which} and embedding frozen")
    if training["tower"] == "frozen":
        words.append("vision tower frozen")
    if training["galore_rank"]:
        words.append(f"GaLore r {training['galore_rank']}")
    if training["offload"] != "none":
        words.append(f"{training['offload']} offloaded")
    if training["loss"] != "auto":
        words.append(f"{training['loss']} cross-entropy")
    return words
