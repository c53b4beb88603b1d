"""Several files, one run: who says which model is trained, and who says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actcalc.errors import SpecError
from actcalc.io import presets
from actcalc.io.readers.part import Part, merged, sections
from actcalc.io.sources import Source, hidden, source
from actcalc.io.yamlfile import is_there

Role = Literal["model", "run", "part"]


@dataclass(frozen=True, eq=False, repr=False)
class Read:
    """One thing that was named: what it is, and what it says."""

    name: str
    title: str
    """What kind of file it is, in words."""
    source: Source | None = None
    part: Part | None = None
    model: bool = False
    """Whether it describes a model and nothing of how it is trained."""

    @property
    def role(self) -> Role:
        """model: a model alone; run: a whole run; part: how some model is trained."""
        if self.model:
            return "model"
        return "run" if self.source or (self.part and self.part.whole) else "part"

    @property
    def names_only(self) -> bool:
        """Whether it names its model and says nothing of what that is made of."""
        return self.part is not None and "base" in self.part.given


def runs(found: Sequence[Read]) -> list[Source]:
    """The runs that all of them describe: one of all where some are parts, else one each."""
    models = [each for each in found if each.role == "model"]
    joined = any(each.role == "part" for each in found) or (
        len(models) == 1 and len(found) > 1 and all(e.names_only for e in found if not e.model)
    )
    if not joined:
        return [_one([each]) for each in found]
    whole = [each for each in found if each.role == "run"]
    for several, what in ((models, "a model"), (whole, "a run")):
        if len(several) > 1:
            raise SpecError(
                f"{several[0].name} and {several[1].name} both describe {what}, and the other "
                "files are parts of one",
                "name one of the two",
            )
    if not models and not whole:
        told = " and ".join(f"{each.name} is {each.title}" for each in found[:2])
        raise SpecError(
            f"{told}: it says how a model is trained, not which" if len(found) == 1
            else f"{told}: they say how a model is trained, not which",
            "name the model beside it: a config.json, a preset or a hub id",
        )  # fmt: skip
    return [_one(found)]


def _one(found: Sequence[Read]) -> Source:
    parts = [part for each in found if each.part for part in (each.part, *each.part.more)]
    given, usual = merged(parts)
    base = next((each.source for each in found if each.source), None)
    named = given.pop("base", None)
    if base is None and named:
        base = _named(str(named), parts)
    if base is None:
        base = Source(name=parts[0].name, model={"name": parts[0].name})
    if not parts:
        return base
    title = next((each.source.title for each in found if each.source), "")
    return replace(_filled(base, parts, given, usual), title=title)


def _named(name: str, parts: Sequence[Part]) -> Source:
    """The model that a file names: a preset, a hub id, a folder with a config.json."""
    where = parts[0].name
    try:
        return source(name)
    except SpecError as error:
        found = hidden(where, name) if is_there(name) else error
        raise SpecError(
            f"{where} names the model {name}: {found}",
            f"give its config.json beside: `{where} config.json`"
            + (f"; {found.hint}" if found.hint else ""),
        ) from error


def _filled(
    base: Source, parts: Sequence[Part], given: dict[str, Any], usual: dict[str, Any]
) -> Source:
    """The base with what the parts say over it."""
    fields = {**usual, **given}
    precision = fields.get("workload.precision") or base.workload.get("precision")
    if fields.get("engine") and fields.get("workload.precision", precision) == "fp32":
        fields.pop("training.recipe", None)
    parted = sections(fields)
    layout = {**base.layout, **parted["layout"]}
    devices = fields.get("devices") or base.devices
    assumed = {**base.assumed}
    for part in parts:
        assumed |= {key: note for key, note in part.assumed.items() if fields.get(key) is None}
    layout, devices = _replicas(layout, devices, assumed, fields)
    framework, notes = _profile(fields.get("framework") or base.framework, layout)
    policy = fields.get("policy")
    return Source(
        name=base.name,
        model={**base.model, **parted["model"]},
        layout=layout,
        workload={**base.workload, **parted["workload"]},
        training={**base.training, **parted["training"]},
        framework=framework,
        profile=base.profile,
        device=fields.get("device") or base.device,
        policies=(policy,) if policy else base.policies,
        warnings=(*base.warnings, *(note for part in parts for note in part.notes), *notes),
        devices=devices,
        accumulation=fields.get("accumulation") or base.accumulation,
        assumed=assumed,
        needs={**base.needs, **{k: v for part in parts for k, v in part.needs.items()}},
    )


def _replicas(
    layout: dict[str, Any], devices: int | None, assumed: dict[str, str], fields: dict[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """Replicas from a number of processes, or a note that one is taken."""
    inside = 1
    for degree in ("tp", "pp", "cp"):
        inside *= int(layout.get(degree) or 1)
    if layout.get("dp") is None and devices:
        if devices % inside:
            raise SpecError(
                f"{devices} processes are no multiple of tp x pp x cp = {inside}",
                "check the parallel sizes and the number of processes",
            )
        layout = {**layout, "dp": devices // inside}
    if layout.get("dp") is None and not fields.get("layout.dp"):
        assumed.setdefault(
            "layout.dp", "How many processes run is not said: one replica is taken (--dp)."
        )
    return layout, devices


def _profile(name: str | None, layout: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The profile, unless the layout splits layers in a way that its own do not know."""
    if name is None:
        return None, ()
    split = [f"{d} {layout[d]}" for d in ("tp", "pp", "cp", "ep") if (layout.get(d) or 1) > 1]
    if not split or presets.load("frameworks", name).values["model_parallel"]:
        return name, ()
    return None, (
        f"The {name} profile does not know {', '.join(split)}: Megatron's layers stand for them.",
    )
