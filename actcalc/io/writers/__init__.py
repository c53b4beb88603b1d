"""A run as files of the frameworks that train: layout, training options and policy, to paste.

The inverse of :mod:`actcalc.io.readers`. A text is handed out only if reading it back gives the
same run: what a framework's file cannot say is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from actcalc.errors import SpecError
from actcalc.io.writers import axolotl, hugging, megatron, own, torchtitan
from actcalc.io.writers.back import differences
from actcalc.specs.run import Run


class Target(NamedTuple):
    """One kind of file that a run is written as."""

    name: str
    """As given to --emit."""
    file: str
    """What such a file is called; its ending tells readers how it is written."""
    write: Callable[[Run], str]
    """The text; ``SpecError`` where the framework has no such run."""
    same: Mapping[str, Mapping[str, str]]
    """Values that mean the same there, by field: each as what it is read back as."""


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("megatron", "run.sh", megatron.write, megatron.SAME),
        Target("torchtitan", "run.toml", torchtitan.write, {}),
        Target("deepspeed", "run.json", hugging.write_deepspeed, {}),
        Target("transformers", "run.sh", hugging.write_transformers, {}),
        Target("fsdp", "run.sh", hugging.write_fsdp, {}),
        Target("axolotl", "run.yml", axolotl.write, {}),
        Target("yaml", "run.yaml", own.write, {}),
    )
}
"""Every target by its name."""


def check_target(name: str) -> None:
    """Refuse an unknown target."""
    if name not in TARGETS:
        raise SpecError(f"--emit {name!r} is not known", "use one of " + ", ".join(TARGETS))


def written(run: Run, name: str, *, vetted: bool = False) -> str:
    """The run as a file of ``name``'s; ``vetted`` reads it back without Pydantic.

    Raises ``SpecError`` naming what that framework's file cannot say.
    """
    check_target(name)
    target = TARGETS[name]
    text = target.write(run)
    lost = differences(run, target.file, text, target.same, vetted=vetted)
    if lost:
        hint = "--emit yaml writes a run file, which says everything"
        field, *_, read = lost[0].replace("(it reads ", "").rstrip(")").split()
        if field == "kernels.make_vocab_size_divisible_by":
            hint = "Megatron pads: add --set kernels.make_vocab_size_divisible_by=128"
        elif field in ("training.recipe", "workload.precision"):
            hint = f"add --{field.split('.')[1]} {read}, which is what it has there"
        raise SpecError(f"--emit {name}: its file cannot say {', '.join(lost[:4])}", hint)
    return text
