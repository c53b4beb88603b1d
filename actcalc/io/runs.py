"""What MODEL names, with overrides -> a run: validated and cross-checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from actcalc.errors import SpecError, visible
from actcalc.io import presets
from actcalc.io.sources import Source, hidden, source
from actcalc.specs.base import Spec
from actcalc.specs.check import check, check_objective, check_profile, check_training
from actcalc.specs.device import Device
from actcalc.specs.framework import Framework
from actcalc.specs.layout import Layout
from actcalc.specs.lengths import parse_lengths
from actcalc.specs.model import Model
from actcalc.specs.run import Run
from actcalc.specs.training import Training
from actcalc.specs.validate import build
from actcalc.specs.workload import Workload

SECTIONS: Mapping[str, type[Spec]] = {
    "model": Model,
    "layout": Layout,
    "workload": Workload,
    "training": Training,
}
"""What a run is described in, and what --set reaches the fields of."""


def settable() -> tuple[str, ...]:
    """Every field that --set takes."""
    return tuple(name for kind in SECTIONS.values() for name in kind.field_names())


def overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Turn ``key=value`` settings into field overrides of model, layout, workload and training.

    A dotted key reaches a nested field (``moe.experts=64``). Raises ``SpecError`` for a key no
    spec has, or a setting without ``=``.
    """
    result: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise SpecError(f"--set {setting!r}: no value", "write --set key=value")
        from actcalc.io.yamlfile import parse_yaml

        # YAML 1.1 reads these words as booleans; here they are choices of their own.
        word = text.strip() in ("on", "off")
        value = text.strip() if word else parse_yaml(text, f"--set {key}") if text.strip() else None
        first = key.split(".")[0]
        homes = [name for name, kind in SECTIONS.items() if first in kind.field_names()]
        if first in SECTIONS and "." in key:
            homes, key = [first], key.split(".", 1)[1]
        if not homes:
            known = settable()
            hint = presets.suggestion(first, known) or "fields: " + ", ".join(sorted(known))
            raise SpecError(f"--set {first}: no such field", hint)
        if isinstance(value, str) and _takes_words(SECTIONS[homes[0]], key):
            value = [one.strip() for one in value.split(",")]
        result[homes[0]][key] = value
    return result


def _takes_words(kind: type[Spec], key: str) -> bool:
    """Whether a field is a list of words, which commas part on a command line."""
    return get_type_hints(kind).get(key) == tuple[str, ...]


def _apply(fields: Mapping[str, Any], changes: Mapping[str, Any], what: str) -> dict[str, Any]:
    result = dict(fields)
    for key, value in changes.items():
        *path, last = key.split(".")
        target = result
        for step in path:
            inner = target.get(step)
            if inner is not None and not isinstance(inner, dict):
                raise SpecError(f"{what}: {step} has no field {last!r}", f"set {step} itself")
            target[step] = dict(inner or {})
            target = target[step]
        target[last] = value
    return result


def default_framework(origin: Source, layout: Layout) -> str:
    """The profile assumed where none is asked for.

    The presets of the paper carry their own; other models run on Megatron-Core when any of
    tp, pp, cp, ep is more than 1, else on transformers.
    """
    if origin.profile:
        return origin.profile
    split = max(layout.tp, layout.pp, layout.cp, layout.ep) > 1
    return "megatron" if split else "transformers"


def load_framework(name: str) -> Framework:
    """The framework profile called ``name``; ``SpecError`` with a did-you-mean if unknown.

    A version may be joined with @ (``transformers@4.50``).
    """
    name = name.replace("@", "-")
    preset = presets.load("frameworks", name)
    fields = {"name": name, "title": preset.title, **preset.values}
    return build(Framework, fields, f"framework {name}", vetted=True)


def resolve(
    origin: Source,
    *,
    model: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    framework: str | None = None,
    device: str | None = None,
    policies: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Run:
    """Validate a source with overrides (those win) into a :class:`Run`, cross-checked."""
    extra = overrides(settings)
    given = {**(layout or {}), **extra["layout"]}
    vetted = origin.vetted and not settings
    changes = {**(model or {}), **extra["model"]}
    tuning = {**(training or {}), **extra["training"]}
    _check_needs(origin, {"model": changes, "training": tuning, "layout": given})
    layers = changes.pop("layers", None)
    spec = build(Model, _apply(origin.model, changes, "model"), "model", vetted=vetted)
    if layers is not None and layers != spec.layers:
        cut = spec.without_patterns(layers) if isinstance(layers, int) else {"layers": layers}
        spec = build(Model, {**spec.model_dump(), **cut}, "model", vetted=vetted)
    plan, replicas_known, moved = _laid_out(origin, given, vetted=vetted)
    asked_work = {**(workload or {}), **extra["workload"]}
    step = _apply(origin.workload, asked_work, "workload")
    if origin.accumulation and step.get("global_batch") is None:
        step["global_batch"] = origin.accumulation * step.get("micro_batch", 1) * plan.dp
    step = _longest(step, origin, workload or {})
    work = build(Workload, step, "workload", vetted=vetted)
    trained = _apply(origin.training, tuning, "training")
    # Names are looked up before anything is checked: a typing error is mended first.
    profile = load_framework(framework or origin.framework or default_framework(origin, plan))
    known_device = _device(device, origin)
    spec, left_out = _language_alone(spec, work, profile)
    check(spec, plan, work)
    check_profile(profile, plan, work)
    tuned = build(Training, trained, "training", vetted=vetted) if trained else Training()
    check_training(spec, plan, tuned, replicas_known=replicas_known)
    check_objective(profile, work, tuned)
    asked = _listed(tuple(policies) or origin.policies)
    return Run(
        model=spec,
        layout=plan,
        workload=work,
        framework=profile,
        device=known_device,
        policies=asked,
        warnings=(
            *origin.warnings,
            *_still_assumed(origin, {"layout": given, "workload": asked_work, "training": tuning}),
            *moved,
            *left_out,
            *_idle_dropout(spec, work, step),
            *_padded(work),
            *_foreign_policy(profile, asked),
        ),
        training=tuned,
        title=visible(origin.title),
    )


def _laid_out(
    origin: Source, given: Mapping[str, Any], *, vetted: bool
) -> tuple[Layout, bool, tuple[str, ...]]:
    """The layout, whether its replicas were said, and what of it follows from the rest."""
    grid = _apply(origin.layout, given, "layout")
    plan, refilled = _same_devices(build(Layout, grid, "layout", vetted=vetted), origin, given)
    plan, raised = _room_for_experts(plan, "dp" in grid)
    return plan, "dp" in grid, (*refilled, *raised)


def _language_alone(
    spec: Model, work: Workload, profile: Framework
) -> tuple[Model, tuple[str, ...]]:
    """The model without a vision tower that the profile does not know and no image needs."""
    if spec.tower is None or work.image_tokens or profile.layers != "megatron":
        return spec, ()
    return spec.model_copy(update={"tower": None}), (
        f"The vision tower of {spec.name} is left out: the {profile.name} profile models the "
        "language model alone.",
    )


MAX_POLICIES = 64
"""Policies of one run, side by side."""


def _listed(policies: Sequence[str]) -> tuple[str, ...]:
    """Each policy once; ``SpecError`` for more than are compared at a time."""
    names = tuple(dict.fromkeys(name.strip() for name in policies))
    if len(names) > MAX_POLICIES:
        raise SpecError(
            f"{len(names)} policies are asked for", f"name at most {MAX_POLICIES} at a time"
        )
    return names


def _device(asked: str | None, origin: Source) -> Device | None:
    """The device asked for, else the source's; None where nobody names one."""
    name = origin.device if asked is None else asked
    if name is None:
        return None
    from actcalc.io.devices import load_device
    from actcalc.io.yamlfile import is_there

    try:
        return load_device(name)
    except SpecError:
        if asked is None and is_there(name):
            raise hidden(origin.name, name) from None
        raise


def _check_needs(origin: Source, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise the error of a field that the source lacks, and nobody gave."""
    for name, error in origin.needs.items():
        section, _, field = name.partition(".")
        if changes[section].get(field) is None:
            raise error


def _still_assumed(origin: Source, given: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Notes on what was taken for fields that no flag gave either."""
    told: list[str] = []
    for name, note in origin.assumed.items():
        section, _, field = name.partition(".")
        if field not in given.get(section, {}):
            told.append(note)
    return tuple(told)


def _foreign_policy(profile: Framework, policies: Sequence[str]) -> tuple[str, ...]:
    """What to say of a policy that the profile's framework has no option for."""
    if profile.per_op_policy or "op" not in [policy.strip() for policy in policies]:
        return ()
    return (
        f"Policy op is torchtitan's, and no option of the {profile.name} profile: it is applied to "
        "this profile's own products (use --framework torchtitan for those it counts).",
    )


def _same_devices(
    layout: Layout, origin: Source, given: Mapping[str, Any]
) -> tuple[Layout, tuple[str, ...]]:
    """The layout with as many replicas as the source's number of devices allows.

    Where the source says how many devices there are, other tp, pp or cp mean other replicas,
    unless dp is given too.
    """
    inside = layout.tp * layout.pp * layout.cp
    if origin.devices is None or "dp" in given or layout.devices == origin.devices:
        return layout, ()
    what = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {inside}"
    if origin.devices % inside:
        raise SpecError(
            f"{what} does not divide the {origin.devices} devices of {origin.name}",
            "choose degrees that do, or give --dp",
        )
    replicas = origin.devices // inside
    note = f"dp is taken as {replicas}: the {origin.devices} devices of {origin.name} over {what}."
    return layout.model_copy(update={"dp": replicas}), (note,)


def _longest(step: dict[str, Any], origin: Source, given: Mapping[str, Any]) -> dict[str, Any]:
    """The work with sequences as long as the longest of ``lengths``; seq cuts them off.

    Packed ones fill seq. In a padded batch attention is given a mask, unless a kernel drops the
    padding instead (transformers' flash attention).
    """
    text = step.get("lengths")
    if not isinstance(text, str) or not text:
        return step
    found = parse_lengths(text)
    seq = given.get("seq")
    if step.get("packed") is True:
        return step
    step = {**step, "seq": min(int(seq), found.longest) if seq else found.longest}
    unequal = len(found.cut(step["seq"]).shares) > 1 and step.get("micro_batch", 1) > 1
    if unequal and "padding_mask" not in step and step.get("attention", "sdpa") == "sdpa":
        step["padding_mask"] = True
    return step


def _padded(work: Workload) -> tuple[str, ...]:
    """What to say of sequences that are not all as long."""
    found = work.distribution
    if found is None:
        return ()
    if work.packed:
        inside = min(1.0, found.pairs / found.mean / work.seq)
        return (
            f"Sequences of {found.mean:,.0f} tokens on average are packed into {work.seq:,}: "
            f"nothing is padded. {100 * inside:.0f} % of the pairs that attention scores are in "
            "one sequence; all are counted.",
        )
    padded = found.padded(work.micro_batch)
    return (
        f"Peaks are of the longest sequences, {work.seq:,} tokens. A micro-batch of "
        f"{work.micro_batch} is padded to {padded:,.0f} on average, and "
        f"{100 * (1 - found.mean / padded):.0f} % of that is padding: mfu counts such steps, other "
        "times are of the longest.",
    )


def _idle_dropout(model: Model, workload: Workload, given: Mapping[str, Any]) -> tuple[str, ...]:
    """A note where dropout is asked for and the model has none."""
    rates = (
        model.hidden_dropout,
        model.attention_dropout,
        model.embedding_dropout,
        model.activation_dropout,
    )
    if given.get("dropout") is not True or any(rates):
        return ()
    return (
        f"--dropout changes nothing: every dropout rate of {model.name} is 0 (--set "
        "hidden_dropout=0.1 gives it one).",
    )


def _room_for_experts(layout: Layout, given: bool) -> tuple[Layout, tuple[str, ...]]:
    """Data parallelism that makes room for expert parallelism, which lives inside tp·cp·dp ranks.

    Where dp is not given it is raised to what ep·etp needs, and said so; a given dp that does not
    fit is refused.
    """
    inside = layout.ep * layout.expert_tp
    ranks = layout.tp * layout.cp * layout.dp
    if layout.ep == 1 or ranks % inside == 0:
        return layout, ()
    need = next(dp for dp in range(1, inside + 1) if layout.tp * layout.cp * dp % inside == 0)
    what = f"ep {layout.ep} x etp {layout.expert_tp}"
    if given:
        raise SpecError(
            f"{what} = {inside} does not divide tp {layout.tp} x cp {layout.cp} x dp {layout.dp} "
            f"= {ranks} ranks",
            f"use --dp {need} or a multiple of it",
        )
    note = f"dp is taken as {need}: {what} needs {inside} ranks, and tp x cp has {ranks}."
    return layout.model_copy(update={"dp": need}), (note,)


def load_run(name: str, **changes: Any) -> Run:
    """``resolve(source(name), ...)``: one call from a preset's name or a path to a run."""
    return resolve(source(name), **changes)
