"""The comparison of policies as a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actcalc.answers.compare import Comparison
from actcalc.answers.header import RunAnswer
from actcalc.render.names import distinct_names
from actcalc.render.room import room
from actcalc.render.sheet import (
    SPARE,
    Column,
    Row,
    Sheet,
    bytes_column,
    fits_column,
    ranked,
    rows_of,
    share_column,
    sizes_column,
)
from actcalc.render.training import extra_words
from actcalc.render.units import SBH_T, Multiple, count, digits, percent, size


def compare_sheets(result: Comparison, units: str, advice: tuple[str, ...] = ()) -> list[Sheet]:
    """One sheet: inputs above, policies, the c* line and a sentence of advice below.

    ``advice`` is what to change, where no policy fits.
    """
    units = in_units(result, units)
    policies = result.policies
    where = "all layers" if result.stage_layers == result.model["layers"] else "stage 0"
    columns = (
        Column("policy", "policy", align="left"),
        ranked(3, sizes_column("stored_bytes_per_layer", "per layer", policies, units)),
        sizes_column("stored_bytes", where, policies, units),
        share_column("saved_ratio", "saved\n "),
        ranked(1, share_column("recompute_forward_ratio", "re-run:\nof fwd")),
        ranked(4, share_column("recompute_flops_per_model_flops_ratio", "of step\nFLOPs")),
        ranked(2, sizes_column("peak_bytes", "peak with\ntransient", policies, units)),
        Column("formula", "one layer keeps", align="left", rank=SPARE),
    )
    notes = [f"{p.policy} {p.note}" for p in policies if p.note]
    answer, fits = _answer(result, units)
    return [
        Sheet(
            title=f"{result.title}: activations kept for backward, per GPU",
            columns=columns,
            rows=rows_of(columns, policies),
            answer=answer,
            fits=fits,
            advice=advice,
            above=_inputs(result),
            below=_optimum(result, units),
            notes=(*notes, *result.notes),
        ),
        *([_times(result, "GB" if units == SBH_T else units)] if result.device else []),
        *([_largest(result)] if result.device else []),
    ]


def in_units(result: RunAnswer, units: str) -> str:
    """``units``, with sbh/t as this run has it: bytes per element of a layer's input on a rank."""
    if units != SBH_T:
        return units
    work = result.workload
    elements = work["seq"] * work["micro_batch"] * result.model["hidden"]
    return Multiple(units, elements / result.layout["tp"])


def _answer(result: Comparison, units: str) -> tuple[str, bool | None]:
    """What to do, in one sentence, and whether anything fits; without a device that is advice."""
    if result.device is None:
        return result.advice, None
    if any(p.fits for p in result.policies):
        return _cheapest(result), True
    least = min(result.policies, key=lambda p: p.device_bytes or 0)
    needs = over_memory(least.device_bytes or 0, result, units)
    smaller = max(p.largest_micro_batch or 0 for p in result.policies)
    remedy = f"; micro-batch {smaller} fits" if smaller else ""
    return f"Does not fit: {least.policy}, the smallest, {needs}{remedy}.", False


def _times(result: Comparison, units: str) -> Sheet:
    """What each policy costs in time on the device, and whether it fits."""
    policies = result.policies
    device = result.device or {}
    columns = (
        Column("policy", "policy", align="left"),
        Column("layer_forward_seconds", "layer fwd\nms", _milliseconds, rank=4),
        Column("layer_backward_seconds", "layer bwd\nms", _milliseconds, rank=3),
        Column("step_seconds", "step\ns", digits),
        ranked(1, share_column("slowdown_ratio", "slower\n ")),
        Column("tokens_per_second_per_gpu", "tokens/s\nper GPU", _whole, rank=2),
        ranked(1, sizes_column("device_bytes", "whole GPU", policies, units)),
        fits_column("fits"),
    )
    return Sheet(
        title=f"time on {device.get('name')}, predicted by a roofline per op",
        columns=columns,
        rows=rows_of(columns, policies),
        notes=(
            "A layer is timed for one micro-batch on one rank; its backward includes the re-run.",
        ),
    )


def over_memory(needed: int, result: RunAnswer, units: str) -> str:
    """``needs X of Y per GPU``: why a run does not fit its device."""
    device = result.device or {}
    room_text = room(device, result.headroom_ratio, units)
    return f"needs {size(needed, units)} of {room_text} per GPU ({device['name']})"


def _cheapest(result: Comparison) -> str:
    """Which policy to run at this micro-batch: the fastest of those that fit."""
    fitting = [p for p in result.policies if p.fits and p.step_seconds is not None]
    best = min(fitting, key=lambda p: (p.step_seconds or 0.0, p.device_bytes or 0))
    slower = best.slowdown_ratio or 0.0
    how = "not slower than none" if slower < 5e-4 else f"{percent(slower)} slower than none"
    return (
        f"Fits: {best.policy} is the fastest policy that does, "
        f"{digits(best.step_seconds or 0.0)} s per step ({how})."
    )


def _largest(result: Comparison) -> Sheet:
    """Each policy at the largest micro-batch that fits; for machines alone where none does."""
    policies = result.policies
    known = [p for p in policies if p.largest_samples_per_second]
    below = []
    if len(known) > 1:
        best = max(known, key=lambda p: p.largest_samples_per_second or 0.0)
        below.append(
            f"Highest throughput: {best.policy} at micro-batch {best.largest_micro_batch}, "
            f"{digits(best.largest_samples_per_second or 0.0)} sequences/s."
        )
    columns = (
        Column("policy", "policy", align="left"),
        Column("largest_micro_batch", "micro-\nbatch"),
        Column("largest_step_seconds", "step\ns", digits, rank=3),
        Column("largest_samples_per_second", "sequences\nper s", digits),
        Column("largest_tokens_per_second_per_gpu", "tokens/s\nper GPU", _whole, rank=2),
        Column("relative_throughput_ratio", f"throughput\nof {policies[0].policy}", _times_of),
    )
    rows = rows_of(columns, policies)
    if not any(p.largest_micro_batch for p in policies):
        hidden = tuple(replace(column, shown=False) for column in columns)
        return Sheet(title="", columns=hidden, rows=rows)
    return Sheet(
        title="at the largest micro-batch that fits",
        columns=columns,
        rows=rows,
        below=tuple(below),
        notes=_grown(result),
    )


def _grown(result: Comparison) -> tuple[str, ...]:
    """A note that the global batch grows with the micro-batch, where one was given."""
    batch = result.workload["global_batch"]
    kept = f"Micro-batches per step stay as many: the global batch grows from {batch}."
    return (kept,) if batch is not None else ()


def model_sheets(results: Sequence[Comparison], units: str) -> list[Sheet]:
    """The same policies for several models: what they store and, with a device, what they cost."""
    names = distinct_names(results)
    pairs = [(n, r, policy) for n, r in zip(names, results, strict=True) for policy in r.policies]
    stored = [policy.stored_bytes for _, _, policy in pairs]
    columns = [
        Column("model", "model", align="left"),
        Column("policy", "policy", align="left"),
        bytes_column("stored_bytes", "stored", stored, units),
        share_column("saved_ratio", "saved\n "),
    ]
    timed = all(result.device for result in results)
    if timed:
        columns += [
            Column("largest_micro_batch", "largest\nbatch"),
            Column("largest_step_seconds", "step\ns", digits),
            Column("largest_samples_per_second", "seq.\nper s", digits),
            Column("relative_throughput_ratio", "of first\npolicy", _times_of),
        ]
    else:
        columns.append(share_column("recompute_forward_ratio", "re-run:\nof fwd"))
    rows = []
    for name, result, p in pairs:
        values: list[Any] = [name, p.policy, p.stored_bytes, p.saved_ratio]
        if timed:
            values += [
                p.largest_micro_batch,
                p.largest_step_seconds,
                p.largest_samples_per_second,
                p.relative_throughput_ratio,
            ]
        else:
            values.append(p.recompute_forward_ratio)
        rows.append(Row(tuple(values), rule_after=p is result.policies[-1]))
    where = f" on {results[0].device['name']}" if timed and results[0].device else ""
    return [
        Sheet(
            answer=_of_models(names, results, units),
            title=f"recompute policies of {len(results)} models{where}",
            columns=tuple(columns),
            rows=tuple(rows),
            above=tuple(f"{n}: {_short(r)}" for n, r in zip(names, results, strict=True)),
            below=tuple(map(_best, names, results)) if timed else (),
            notes=(
                ("Batch is the largest micro-batch that fits; time and throughput are at it.",)
                if timed
                else ()
            ),
        )
    ]


def _of_models(names: Sequence[str], results: Sequence[Comparison], units: str) -> str:
    """The model with the highest throughput; without a device, what each keeps."""
    rates = [
        (policy.largest_tokens_per_second_per_gpu, name, policy)
        for name, result in zip(names, results, strict=True)
        for policy in result.policies
        if policy.largest_tokens_per_second_per_gpu
    ]
    if rates:
        rate, name, policy = max(rates, key=lambda each: each[0] or 0.0)
        return f"Most tokens: {name} under {policy.policy}, {rate:,.0f} a second and GPU."
    if all(result.device for result in results):
        return "Does not fit: no policy of any of these models, not even with one sequence."
    kept = [
        f"{name} keeps {size(result.policies[0].stored_bytes, units)}"
        for name, result in zip(names, results, strict=True)
    ]
    return f"Under {results[0].policies[0].policy} {', '.join(kept)}."


def _short(result: Comparison) -> str:
    work = result.workload
    return (
        f"s {work['seq']:,} b {work['micro_batch']} {work['precision']} {work['attention']} "
        f"attention, {result.framework} kernels"
        + "".join(f", {word}" for word in extra_words(result.training))
    )


def _best(name: str, result: Comparison) -> str:
    known = [p for p in result.policies if p.largest_samples_per_second]
    if not known:
        return f"{name}: no policy fits, not even one sequence."
    best = max(known, key=lambda p: p.largest_samples_per_second or 0.0)
    return (
        f"{name}: {best.policy} has the highest throughput, "
        f"{digits(best.largest_samples_per_second or 0.0)} sequences/s at micro-batch "
        f"{best.largest_micro_batch}."
    )


def _milliseconds(seconds: float) -> str:
    return digits(1e3 * seconds)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _times_of(ratio: float) -> str:
    return f"{ratio:.2f} x"


def run_lines(
    model: dict[str, Any], layout: dict[str, Any], workload: dict[str, Any], framework: str
) -> tuple[str, ...]:
    """The inputs of a run in two or three short lines."""
    encoder = f"{model['encoder_layers']} + " if model["encoder_layers"] else ""
    shape = [
        f"{encoder}{model['layers']} layers",
        f"h {model['hidden']:,}",
        *_parts(model),
        f"v {model['vocab']:,}",
    ]
    dropout = workload["dropout"] and (model["hidden_dropout"] or model["attention_dropout"])
    work = [
        f"s {workload['seq']:,}",
        *(
            f"{name} {workload[field]:,}"
            for name, field in (
                ("decoder", "decoder_seq"),
                ("image tokens", "image_tokens"),
                ("scored", "completion"),
            )
            if workload[field]
        ),
        f"b {workload['micro_batch']}",
        workload["precision"],
        *([f"{workload['attention']} attention"] if _has(model, "*") else []),
        "dropout" if dropout else "no dropout",
    ]
    degrees = [
        f"{name} {layout[name]}"
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        if (layout[name] or 1) > 1
    ]
    degrees += ["sp"] if layout["sp"] else []
    split = "  " + " ".join(degrees) if degrees else "  one GPU"
    return (
        "  ".join(shape),
        "  ".join(work) + split + f"  {framework} kernels",
    )


def _has(model: dict[str, Any], letters: str) -> bool:
    """Whether some layer is of these letters of a hybrid's pattern; other models have all kinds."""
    return not model["pattern"] or any(letter in model["pattern"] for letter in letters)


def _parts(model: dict[str, Any]) -> list[str]:
    """Heads and feed-forward width, where the model has layers with them."""
    heads, kv = model["heads"], model["kv_heads"]
    parts = [f"a {heads}", *([f"kv {kv}"] if kv != heads else [])] if _has(model, "*") else []
    return [*parts, *([f"ffn {model['ffn']:,}"] if _has(model, "-E") else [])]


def _inputs(result: Comparison) -> tuple[str, ...]:
    lines = run_lines(result.model, result.layout, result.workload, result.framework)
    first = f"{count(result.parameters)} parameters  {lines[0]}"
    stage: tuple[str, ...] = ()
    if result.layout["pp"] > 1:
        schedule = result.layout["schedule"] or _schedule(result)
        stage = (
            f"first stage: {result.stage_layers} layers, {result.in_flight} microbatches in "
            f"flight ({schedule})",
        )
        if result.chunks > 1:
            stage = (
                f"first stage: {result.stage_layers} layers in {result.chunks} chunks ({schedule})",
                f"in flight: {result.in_flight} activations, each of one microbatch on one chunk",
            )
    extra = extra_words(result.training)
    return (first, *lines[1:], *(["  ".join(extra)] if extra else []), *stage)


def _schedule(result: Comparison) -> str:
    return result.layout["schedule"] or ("interleaved" if result.layout["vpp"] > 1 else "1F1B")


def _optimum(result: Comparison, units: str) -> tuple[str, ...]:
    best = result.checkpoint_optimum
    inside = f"{best.layers}·{digits(best.layer_bytes_per_input_bytes_ratio)}"
    formula = "√(l·A_int/A_in)"
    if best.in_flight > 1:
        formula = "√(l·A_int/(m·A_in))"
        inside += f"/{best.in_flight:.4g}"
    every = (
        "every layer"
        if best.layers_per_segment == 1
        else f"one per {best.layers_per_segment} layers"
    )
    return (
        f"c* = {formula} = √({inside}) = {best.continuous:.2f} checkpoints, "
        f"{size(best.continuous_bytes, units)}: a bound, not a plan.",
        f"Best plan of whole layers: {best.integer} checkpoints ({every}), "
        f"{size(best.stored_bytes, units)} stored + {size(best.segment_bytes, units)} working "
        f"= {size(best.total_bytes, units)}.",
    )


def side_by_side(results: Sequence[Comparison], units: str) -> list[Sheet]:
    """The same run under several framework profiles: one table, a pair of columns a profile."""
    first = results[0]
    units = in_units(first, units)
    names = list(dict.fromkeys(p.policy for result in results for p in result.policies))
    found = [{p.policy: p for p in result.policies} for result in results]
    layer = [p.stored_bytes_per_layer for result in results for p in result.policies]
    peak = [p.peak_bytes for result in results for p in result.policies]
    columns = [Column("policy", "policy", align="left")]
    for result in results:
        columns += [
            bytes_column(
                f"{result.framework}_stored_bytes_per_layer",
                f"{result.framework}\nper layer",
                layer,
                units,
            ),
            bytes_column(f"{result.framework}_peak_bytes", "\npeak", peak, units),
        ]
    rows = []
    for name in names:
        values: list[Any] = [name]
        for policies in found:
            figure = policies.get(name)
            values += [figure.stored_bytes_per_layer, figure.peak_bytes] if figure else [None, None]
        rows.append(Row(tuple(values)))
    lines = run_lines(first.model, first.layout, first.workload, "")
    above = (
        f"{count(first.parameters)} parameters  {lines[0]}",
        *(line.removesuffix("   kernels") for line in lines[1:]),
        *extra_words(first.training),
    )
    formulas = tuple(f"{r.framework}: one layer keeps {_formula(r)}" for r in results)
    notes = dict.fromkeys(
        f"{r.framework}: {note}"
        for r in results
        for note in (*(f"{p.policy} {p.note}" for p in r.policies if p.note), *r.notes)
    )
    timed = all(result.device for result in results)
    answer, fits = _fastest_profiles(results) if timed else (_of_profiles(results, units), None)
    return [
        Sheet(
            answer=answer,
            fits=fits,
            title=f"{first.title}: activations kept for backward, per GPU, by profile",
            columns=tuple(columns),
            rows=tuple(rows),
            above=above,
            below=(*formulas, "peak: all layers stored, and the transient of one re-run."),
            notes=tuple(notes),
        ),
        *([_profile_times(results, names, units)] if timed else []),
    ]


def _fastest_profiles(results: Sequence[Comparison]) -> tuple[str, bool]:
    """The fastest policy that fits under each profile, and whether there is one at all."""
    told = []
    for result in results:
        fitting = [p for p in result.policies if p.fits and p.step_seconds is not None]
        best = min(fitting, key=lambda p: p.step_seconds or 0.0, default=None)
        what = f"{best.policy}, {digits(best.step_seconds or 0.0)} s a step" if best else "none"
        told.append(f"{result.framework} {what}")
    fits = any(p.fits for result in results for p in result.policies)
    if not fits:
        return "Does not fit: no policy does, under any of these profiles.", False
    return f"Fastest that fits: {'; '.join(told)}.", True


def _profile_times(results: Sequence[Comparison], names: Sequence[str], units: str) -> Sheet:
    """A step of each policy under each profile, what the GPU needs, and whether it fits."""
    units = "GB" if units == SBH_T else units
    needs = [p.device_bytes or 0 for result in results for p in result.policies]
    columns = [Column("policy", "policy", align="left")]
    for result in results:
        key = result.framework
        columns += [
            Column(f"{key}_step_seconds", f"{key}\nstep s", digits),
            ranked(1, bytes_column(f"{key}_device_bytes", "\nGPU", needs, units)),
            replace(fits_column(f"{key}_fits"), title="\nfits"),
        ]
    found = [{p.policy: p for p in result.policies} for result in results]
    rows = []
    for name in names:
        values: list[Any] = [name]
        for policies in found:
            one = policies.get(name)
            values += [one.step_seconds, one.device_bytes, one.fits] if one else [None] * 3
        rows.append(Row(tuple(values)))
    device = results[0].device or {}
    return Sheet(
        title=f"time on {device.get('name')}, predicted by a roofline per op",
        columns=tuple(columns),
        rows=tuple(rows),
    )


def _of_profiles(results: Sequence[Comparison], units: str) -> str:
    """What one layer keeps under each profile, for the first policy that all of them have."""
    name = results[0].policies[0].policy
    kept = [
        f"{result.framework} keeps {size(policy.stored_bytes_per_layer, units)}"
        for result in results
        for policy in result.policies
        if policy.policy == name
    ]
    return f"Of one layer under {name}, {', '.join(kept)}."


def _formula(result: Comparison) -> str:
    none = next((p for p in result.policies if p.policy == "none"), result.policies[0])
    return none.formula
