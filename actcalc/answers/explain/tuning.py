"""Fine-tuning beyond adapters: frozen layers, objectives with a second model, everyday words."""

from __future__ import annotations

from dataclasses import replace

from actcalc.answers.explain.term import Body, Term, gb
from actcalc.io.runs import load_framework
from actcalc.memory.stage import StageMemory
from actcalc.run.staged import StagedRun
from actcalc.specs.layout import Layout
from actcalc.specs.lengths import parse_lengths
from actcalc.specs.numbers import percent
from actcalc.specs.objectives import OBJECTIVES
from actcalc.specs.run import Run

_DPO = "Rafailov et al. 2023, Direct Preference Optimization, arXiv:2305.18290"


def _plain(run: Run) -> Run:
    """The run on one device under transformers, which TRL and PEFT train."""
    return replace(run, layout=Layout(dp=run.layout.dp), framework=load_framework("transformers"))


def _objective(staged: StagedRun) -> Body:
    run = _plain(staged.run)
    name = run.training.objective if run.training.objective != "sft" else "dpo"
    lines = [] if name == run.training.objective else ["No --objective given: dpo is taken."]
    lines += [
        f"{row.name}: {row.title}; {row.sequences} sequence{'s' * (row.sequences > 1)} an example, "
        f"{row.head}" + _reference(row.reference)
        for row in OBJECTIVES.values()
    ]
    figures = []
    for objective in dict.fromkeys(("sft", name)):
        changes = {"objective": objective}
        if objective == "sft":
            changes |= {"reference": "auto"}
        training = run.training.model_copy(update=changes)
        if objective == "sft":
            training = training.model_copy(update={"generation_share": 0.0, "loss": "tiled"})
        figure = StageMemory.of(replace(run, training=training)).figure(0)
        figures.append(figure)
        beside = sum(b.bytes for b in figure.buffers if b.name == "reference model")
        second = f", {gb(beside)} of it a second model" if beside else ""
        lines.append(f"{objective}: peak {gb(figure.peak_bytes)}{second}, {figure.peak_at}")
    lines += [
        "Chosen and rejected go through the model together: a micro-batch of b pairs keeps what 2b "
        "sequences keep.",
        "A reference is a second model that is never updated. With adapters it is the base with "
        "them switched off; --reference none leaves its log-probabilities to an earlier pass.",
        "TRL makes no logits: tiles of 4,096 tokens and 32,768 entries of the vocabulary become "
        "log-probabilities, and are made again in backward (--loss tiled). --completion N scores "
        "the last N tokens of a sequence alone.",
        "GRPO's generation runs before the update: what an engine holds meanwhile is "
        "--generation-share of the device.",
    ]
    grown = figures[-1].peak_bytes / figures[0].peak_bytes
    return Body(
        title="Objectives: pairs, reference models, scores, completions",
        result=f"{name} needs {grown:.3g} times the peak of next tokens at the same micro-batch.",
        lines=tuple(lines),
        source=f"{_DPO}; huggingface/trl trainer/dpo_trainer.py, grpo_trainer.py, "
        "kernels/chunked_logprob.py",
    )


def _reference(which: str) -> str:
    return {"always": ", beside a reference", "asked": ", a reference where beta is not 0"}.get(
        which, ""
    )


def _freeze(staged: StagedRun) -> Body:
    run = _plain(staged.run)
    half = run.training.freeze or run.model.depth // 2
    lines = [] if run.training.freeze else [f"No --freeze given: {half} layers are taken."]
    plain = StageMemory.of(replace(run, training=run.training.model_copy(update={"freeze": 0})))
    tuned = StageMemory.of(replace(run, training=run.training.model_copy(update={"freeze": half})))
    before, after = plain.figure(0), tuned.figure(0)
    lines += [
        "A weight without a gradient has no optimizer states either, and a product with it keeps "
        "no input for one.",
        "Up to the first trained weight nothing needs a gradient: autograd saves nothing in those "
        "layers, and they have no backward.",
        f"trained here: {plain.parameters(0).trained:,} -> {tuned.parameters(0).trained:,}",
        f"activations {gb(before.activations_bytes)} -> {gb(after.activations_bytes)}, gradients "
        f"{gb(before.gradients_full_bytes)} -> {gb(after.gradients_full_bytes)}, optimizer "
        f"{gb(before.optimizer_bytes)} -> {gb(after.optimizer_bytes)}",
        "An embedding that is trained (--train embeddings) lets gradients through frozen layers; "
        "so does PEFT where layers re-run whole (enable_input_require_grads).",
    ]
    saved = 1 - after.peak_bytes / before.peak_bytes
    return Body(
        title="Frozen layers: no gradients, no states, nothing kept",
        result=f"The peak is {gb(after.peak_bytes)} instead of {gb(before.peak_bytes)}: "
        f"{percent(saved, 0)} less.",
        lines=tuple(lines),
        source="torch/csrc/autograd (requires_grad of outputs); huggingface/peft peft_model.py "
        "_prepare_model_for_gradient_checkpointing",
    )


def _lengths(staged: StagedRun) -> Body:
    run = _plain(staged.run)
    work, text = run.workload, run.workload.lengths or "512:70,2048:25,8192:5"
    found = parse_lengths(text)
    lines = [] if work.lengths else [f"No --lengths given: {text} is taken."]
    each = ", ".join(f"{percent(share, 0)} of {length:,}" for length, share in found.shares[:6])
    lines.append(f"tokens of a sequence: {each}; mean {found.mean:,.0f}")
    for batch in (1, 4, 16):
        padded = found.padded(batch)
        lines.append(
            f"micro-batch {batch}: padded to {padded:,.0f} on average, "
            f"{percent(1 - found.mean / padded, 0)} of it padding"
        )
    peaks = []
    for seq in (max(1, round(found.padded(work.micro_batch))), found.longest):
        changes = {"seq": seq, "lengths": "", "packed": False, "completion": 0}
        figure = StageMemory.of(replace(run, workload=work.model_copy(update=changes))).figure(0)
        peaks.append(figure.peak_bytes)
        lines.append(f"peak at {seq:,} tokens: {gb(figure.peak_bytes)}")
    lines += [
        "A batch is padded to its longest sequence: the mean of a maximum of b draws. Sooner or "
        "later one holds the longest there is, and the allocator's peak is that batch's.",
        "mfu counts steps of the mean; --seq cuts sequences off. --packed puts sequences one "
        "behind the other instead: --seq tokens each, no padding.",
    ]
    return Body(
        title="Lengths of sequences: padding, packing, and whose the peak is",
        result=f"The longest sequences need {peaks[-1] / peaks[0]:.3g} times the peak of the mean.",
        lines=tuple(lines),
        source="transformers data/data_collator.py pad; order statistics of independent draws",
    )


TERMS = (
    Term(
        "lengths",
        "sequences of different lengths, padded or packed",
        _lengths,
        words=("padding", "packing", "length distribution", "padding_free", "sample_packing"),
        flags=("lengths", "packed"),
        model="llama-3-8b",
        layout={},
    ),
    Term(
        "objective",
        "training for preferences, rewards or on completions",
        _objective,
        words=("dpo", "kto", "grpo", "reward", "reference model", "preference", "rlhf", "trl"),
        flags=("objective", "reference", "generation_share", "completion"),
        model="llama-3-8b",
        layout={},
    ),
    Term(
        "freeze",
        "layers that are not trained",
        _freeze,
        words=("frozen", "frozen layers", "requires_grad"),
        flags=("freeze",),
        model="llama-3-8b",
        layout={},
    ),
)
"""The terms of this module."""
