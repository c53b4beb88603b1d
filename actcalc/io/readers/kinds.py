"""Kinds of files, one row each: how each is told from the others, and who reads it.

``--from`` takes a row's name. Order matters: the first row that recognises a mapping reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from actcalc.errors import SpecError, shorten, suggestion
from actcalc.io.readers import (
    accelerate,
    axolotl,
    deepspeed,
    llamafactory,
    llamafactory_v1,
    megatron,
    nemo,
    torchtitan,
    torchtune,
    trainer,
    verl,
)
from actcalc.io.readers.beside import beside, beside_script
from actcalc.io.readers.combine import Read
from actcalc.io.readers.document import Document
from actcalc.io.readers.interpolate import interpolated
from actcalc.io.readers.named import absent, configurations, launcher_files, overridden
from actcalc.io.readers.objective import PROGRAM
from actcalc.io.readers.part import Part
from actcalc.io.readers.settings import nested
from actcalc.io.readers.shell.launch import Launch, launches, of_place, unknown_note
from actcalc.io.readers.shell.script import Script, follow
from actcalc.io.sources import RUN_KEYS, Source, run_fields


class Kind(NamedTuple):
    """One kind of file."""

    name: str
    """As given to --from."""
    title: str
    """What such a file is, in words."""
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a mapping is one."""
    read: Callable[[Mapping[str, Any], Document], Part]
    """What it says."""


KINDS: tuple[Kind, ...] = (
    Kind("torchtune", "a torchtune recipe", torchtune.recognises, torchtune.read),
    Kind("verl", "verl's configuration", verl.recognises, verl.read),
    Kind("llamafactory-v1", "a LLaMA-Factory configuration of plugins",
         llamafactory_v1.recognises, llamafactory_v1.read),
    Kind("axolotl", "an axolotl configuration", axolotl.recognises, axolotl.read),
    Kind("llamafactory", "a LLaMA-Factory configuration", llamafactory.recognises,
         llamafactory.read),
    Kind("deepspeed", "a DeepSpeed configuration", deepspeed.recognises, deepspeed.read),
    Kind("accelerate", "an accelerate configuration", accelerate.recognises, accelerate.read),
    Kind("torchtitan", "a torchtitan configuration", torchtitan.recognises, torchtitan.read),
    Kind("nemo", "a NeMo or Megatron-Bridge configuration", nemo.recognises, nemo.read),
    Kind("trl", "a TRL configuration", trainer.recognises_trl, trainer.read_trl),
    Kind("transformers", "the Trainer's arguments", trainer.recognises, trainer.read),
    Kind("fsdp", "a configuration of FSDP", accelerate.recognises_fsdp, accelerate.read_fsdp),
    Kind("megatron", "Megatron's arguments", megatron.recognises, megatron.read),
)  # fmt: skip
OWN = ("run", "config")
"""Kinds of this product's own and of the hub: a run file, a model's config.json."""
NAMES = (*OWN, *(kind.name for kind in KINDS))

_NOT_RUNS: tuple[tuple[Callable[[Mapping[str, Any]], bool], str, str], ...] = (
    (lambda d: "weight_map" in d, "an index of weights", "the config.json beside it"),
    (lambda d: "added_tokens" in d or "tokenizer_class" in d or "bos_token" in d,
     "a tokenizer's configuration", "the model's config.json"),
    (lambda d: "peft_type" in d, "an adapter's configuration",
     "the configuration of the run that trained it"),
    (lambda d: "log_history" in d, "the state of a Trainer",
     "the run that wrote it, as `actcalc check RUN --log trainer_state.json`"),
    (lambda d: "_from_model_config" in d or {"do_sample", "max_new_tokens"} & set(d) != set(),
     "a configuration of generation", "the model's config.json"),
    (lambda d: "nbformat" in d, "a notebook", "the configuration that it launches"),
    (lambda d: "apiVersion" in d and "kind" in d, "a Kubernetes manifest",
     "the launch script inside it"),
    (lambda d: "services" in d and ("version" in d or "volumes" in d), "a compose file",
     "the launch script inside it"),
    (lambda d: "dependencies" in d and ("scripts" in d or "name" in d), "a package manifest",
     "a launch file of the run"),
    (lambda d: "jobs" in d and ("on" in d or "runs-on" in str(d)[:2000]), "a workflow of CI",
     "a launch file"),
    (lambda d: "build-system" in d or ("project" in d and "tool" in d), "a pyproject.toml",
     "a launch file of the run"),
)  # fmt: skip
_HINT = (
    "read are run files, config.json, Megatron's arguments and scripts, and the files of "
    "torchtitan, DeepSpeed, transformers, accelerate, axolotl, LLaMA-Factory, torchtune, TRL, NeMo "
    "and verl (--from names one)"
)


def kind_called(name: str) -> Kind | None:
    """The row called ``name``; None for this product's own, ``SpecError`` for no kind."""
    if name not in NAMES:
        raise SpecError(
            f"--from {name!r} is no kind of input",
            suggestion(name, NAMES) or "use one of " + ", ".join(NAMES),
        )
    return next((kind for kind in KINDS if kind.name == name), None)


def read_document(doc: Document, kind: str | None) -> Read:
    """What one file is and says; ``SpecError`` with what it is where that is no run."""
    if kind in (None, "megatron") and doc.form == "text" and megatron.is_printed(doc.text):
        return Read(doc.name, "a log of Megatron", part=megatron.read_printed(doc))
    data = doc.mapping
    if kind is not None and not (data and _is_config(data)):
        return _forced(doc, kind)
    if data is None:
        _refuse_text(doc)
        data = doc.data  # raises what is wrong with it
    return _recognised(doc, data)


_TEXTS = (
    (r"\A(#.*\n)*\s*(import|from) \w+|^def \w+\(", "Python code, which is not run",
     "the configuration or the options that it is started with"),
    (r"(?i)step: +\d+ .*loss: .*memory: ", "a log of torchtitan", "the run, with --log for this"),
    (r"elapsed time per iteration \(ms\)", "a log of Megatron without its arguments",
     "the launch script, with `actcalc check SCRIPT --log` for this"),
    (r"CUDA out of memory|OutOfMemoryError", "the message of a run that ran out of memory",
     "the run, with `actcalc check RUN --log` for this"),
    (r"\A[^\n,]+(,[^\n,]+){2,}\n", "a table", "the configuration of one run"),
    (r"\A\s*<(!|html|\?xml)", "a web page", "a launch file"),
    (r"\A\s*#+ \w", "a document", "a launch file"),
)  # fmt: skip


def _refuse_text(doc: Document) -> None:
    """Say what a text is that holds no mapping, where that can be told."""
    if doc.form in ("json", "toml", "yaml"):
        return
    if not doc.text.strip():
        raise SpecError(f"{doc.name} is empty", _HINT)
    for pattern, what, instead in _TEXTS:
        if re.search(pattern, doc.text[:200_000], re.M):
            raise SpecError(f"{doc.name} is {what}", f"name {instead}")


def _forced(doc: Document, kind: str) -> Read:
    row = kind_called(kind)
    data = doc.data
    if row is None:
        return _model_of(doc, data) if kind == "config" else _run_of(doc, data)
    return _read_as(row, data, doc)


_DECIDES = re.compile(
    r"--\S*(size|length|len|layers|hidden|heads|parallel|precision|dtype|batch|recompute|vocab|expert"
    r"|seq|rank|optim|zero|stage|degree|nodes|devices|gpus|processes)"
)
"""Names of what decides memory or time, whoever's they are."""


def _read_as(row: Kind, data: Mapping[str, Any], doc: Document) -> Read:
    """What a mapping says as one kind, with the references in it followed."""
    if "${" not in doc.text and "???" not in doc.text:
        return Read(doc.name, row.title, part=row.read(data, doc))
    followed, unknown = interpolated(data)
    told = unknown_note([each for each in unknown if _DECIDES.match(each) and not of_place(each)])
    try:
        part = row.read(followed, doc)
    except SpecError as error:
        raise SpecError(str(error), "; ".join((error.hint, *told))) from error
    return Read(doc.name, row.title, part=replace(part, notes=(*told, *part.notes)))


def _recognised(doc: Document, data: dict[str, Any]) -> Read:
    if _is_run(data):
        return _run_of(doc, data)
    if _is_config(data):
        return _model_of(doc, data)
    for row in KINDS:
        if row.recognises(data):
            return _read_as(row, data, doc)
    for holds, what, instead in _NOT_RUNS:
        if holds(data):
            raise SpecError(f"{doc.name} is {what}, which describes no run", f"name {instead}")
    if doc.form == "json":
        return _model_of(doc, data)
    if not data or any(get_close_matches(name, RUN_KEYS) for name in data):
        return _run_of(doc, data)
    names = ", ".join(shorten(name) for name in list(data)[:3])
    raise SpecError(
        f"{doc.name} is no description of a run that is known: it begins with {names}", _HINT
    )


def _is_run(data: Mapping[str, Any]) -> bool:
    allowed = (*RUN_KEYS, "title", "source", "parameters")
    model = data.get("model")
    if isinstance(model, Mapping) and ("_component_" in model or "_target_" in model):
        return False
    if isinstance(model, Mapping) and ("flavor" in model or "num_layers" in model):
        return False
    return "model" in data and all(key in allowed for key in data)


def _is_config(data: Mapping[str, Any]) -> bool:
    return ("model_type" in data or "architectures" in data) and "base_model" not in data


def _run_of(doc: Document, data: dict[str, Any]) -> Read:
    return Read(doc.name, "a run file", run_fields(data, doc.name))


def _model_of(doc: Document, data: dict[str, Any]) -> Read:
    from pathlib import Path

    from actcalc.io.hf import read_config
    from actcalc.io.sources import config_source

    if doc.folder is not None:
        return Read(doc.name, "a config.json", config_source(Path(doc.name)), model=True)
    imported = read_config(data)
    fields = {"name": "config", **imported.fields}
    found = Source("config", fields, workload=imported.workload, warnings=imported.warnings)
    return Read(doc.name, "a config.json", found, model=True)


# --- scripts --------------------------------------------------------------------------------------

_SCRIPT = re.compile(
    r"\A#!|^\s*(torchrun|deepspeed|accelerate launch|srun|python3? )|^\s*(export )?[A-Z_]+=\S*\s*$"
    r"|(^|\s)--[a-z][a-z0-9_.-]+([ =]|\s*\\?$)",
    re.M,
)


def is_script(doc: Document) -> bool:
    """Whether a text is a launch script or a string of options rather than a mapping."""
    if doc.form in ("json", "toml"):
        return False
    if re.search(r"\.(sh|bash|slurm|sbatch)$", doc.name):
        return True
    if doc.form == "yaml" or megatron.is_printed(doc.text):
        return False
    return _SCRIPT.search(doc.text) is not None and (
        doc.text.startswith("#!") or doc.mapping is None or doc.text.lstrip().startswith("--")
    )


def _one_line(doc: Document) -> Document:
    """Options on several lines without a command are one string of options."""
    lines = [line for line in doc.text.splitlines() if line.strip()]
    if lines and all(line.lstrip().startswith(("-", "#")) for line in lines):
        lines = [line.rstrip().removesuffix("\\") for line in lines if line.lstrip()[0] != "#"]
        return replace(doc, text=" ".join(lines))
    return doc


def scripts(documents: Sequence[Document], kind: str | None) -> dict[str, Read | None]:
    """What the scripts among several files say, by the file's name.

    A script that launches nothing sets variables for one that does, where both are named: it says
    nothing of its own then (None).
    """
    found = [_one_line(doc) for doc in documents if is_script(doc)]
    result: dict[str, Read | None] = {}
    held: list[Document] = []
    for doc in found if len(found) > 1 else ():
        script = follow(doc.text, doc.name, Script(source=beside_script(doc)))
        if not any(launch.program for launch in launches(script, doc.text)):
            held.append(doc)
    for doc in found:
        if doc in held and len(held) < len(found):
            result[doc.name] = None
            continue
        script = Script(source=beside_script(doc))
        for before in held if doc not in held else ():
            follow(before.text, before.name, script)
        result[doc.name] = _script(doc, follow(doc.text, doc.name, script), kind, held)
    return result


def _script(doc: Document, script: Script, kind: str | None, held: Sequence[Document]) -> Read:
    every = launches(script, doc.text)
    found = [launch for launch in every if _trains(launch)]
    found = found or [launch for launch in every if configurations(launch)]
    if not found:
        raise SpecError(
            f"{doc.name} is a script that launches no training that is known",
            "read are launches of Megatron, torchtitan, verl, slime, transformers and TRL",
        )
    launch = max(found, key=lambda each: (each.sure, bool(each.program), len(each.options)))
    row, data = _row(launch, kind, doc)
    told = (*unknown_note(launch.unknown), *_others(launch, found), *absent(launch, doc))
    try:
        part = row.read(data, doc)
    except SpecError as error:
        raise SpecError(str(error), "; ".join((error.hint, *told))) from error
    sourced = {each.name.rsplit("/", 1)[-1] for each in held}
    notes = [n for n in script.notes if not any(name in n for name in sourced)]
    notes = [n for n in notes if _matters(n, launch)]
    given = dict(part.given)
    if launch.devices and not given.get("devices") and "world-size" not in data:
        given["devices"] = launch.devices
    part = replace(part, given=given, notes=(*notes, *told, *part.notes))
    return Read(
        doc.name, f"a script that launches {row.title}", part=_with_launcher(part, launch, doc)
    )


def _with_launcher(part: Part, launch: Launch, doc: Document) -> Part:
    """A launch with what accelerate's file says; the number of processes is the launch's own."""
    for name in launcher_files(launch):
        found = beside(doc, name)
        read = read_document(found, "accelerate").part if found else None
        if read:
            known = {**read.given, **({"devices": None} if launch.devices else {})}
            part = replace(part, more=(*part.more, replace(read, given=known), *read.more))
    return part


def _matters(note: str, launch: Launch) -> bool:
    """Whether a note on variables that are not known names one that the launch uses."""
    names = re.search(r" decides (.*), not known from here on", note)
    used = " ".join(launch.unknown)
    return not names or any(
        re.search(rf"\$\{{?{re.escape(name)}\b", used) for name in names[1].split(", ")
    )


def _others(launch: Launch, found: Sequence[Launch]) -> tuple[str, ...]:
    """A note where a script launches several runs."""
    runs = [each for each in found if each.sure and each.program]
    if sum(each.options != launch.options for each in runs) == 0:
        return ()
    return (f"{len(runs)} runs are launched; the one with the most options is read.",)


_OPTIONS = (
    "num-layers", "hidden-size", "micro-batch-size", "tensor-model-parallel-size", "seq-length",
    "global-batch-size", "per-device-train-batch-size", "model-name-or-path",
    "recompute-granularity",
    "job.config-file", "training.seq-len", "training.local-batch-size", "cutoff-len",
)  # fmt: skip


_SECTIONS = ("actor-rollout-ref.", "parallelism.", "train.micro-batch", "train.global-batch",
             "model.tensor-model-parallel")  # fmt: skip
"""How options begin that verl, torchtitan and Megatron-Bridge train with."""

_TRL = ("sft.py", "dpo.py", "grpo.py", "kto.py", "reward.py")
"""Scripts of TRL (``trl/scripts/``)."""


def _trains(launch: Launch) -> bool:
    names = {name.replace("_", "-") for name in (*launch.options, *launch.lacking)}
    if launch.program.startswith("verl.") and re.search(r"generation|eval|merger", launch.program):
        return False
    if names & set(_OPTIONS) or launch.program.startswith(("verl.", "torchtitan.")):
        return True
    return any(name.startswith(_SECTIONS) for name in names)


def _row(launch: Launch, kind: str | None, doc: Document) -> tuple[Kind, dict[str, Any]]:
    """Who reads the options of a launch, and the options as that reader takes them."""
    rows = {row.name: row for row in KINDS}
    plain = {name.replace("-", "_"): value for name, value in launch.options.items()}
    data = overridden(launch, nested(plain), doc)
    if kind is not None:
        row = kind_called(kind)
        if row is None:
            raise SpecError(f"{doc.name} is a script, and --from {kind} reads none",
                            "drop --from")  # fmt: skip
    elif launch.program.startswith("trl ") or launch.program in _TRL:
        row, data = rows["trl"], {**data, PROGRAM: launch.program}
    elif launch.program.startswith("verl."):
        row = rows["verl"]
    elif any("." in name for name in plain) and "job.config_file" in plain:
        row = rows["torchtitan"]
    else:
        row = next((each for each in KINDS if each.recognises(data)), None)
        names = {name.replace("_", "-") for name in (*launch.options, *launch.lacking)}
        if row is None:
            row = rows["megatron"] if names & set(_OPTIONS[:6]) else rows["transformers"]
    if row.name in ("megatron", "nemo") and not any("." in name for name in plain):
        options = dict(launch.options)
        if launch.devices and not any("world" in name for name in options):
            options.setdefault("world-size", launch.devices)
        return rows["megatron"], options
    if row.name == "torchtitan":
        data.pop("job", None)
    return row, data
