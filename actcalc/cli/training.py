"""Options of how weights are trained, and what of it is kept in host memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

from actcalc.cli.choices import TRAINING, option
from actcalc.cli.given import only_given
from actcalc.cli.tuning import TuningOptions
from actcalc.errors import SpecError
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import CHOOSABLE
from actcalc.specs.training import Loss


@dataclass(frozen=True, eq=False, repr=False)
class TrainingOptions(TuningOptions):
    """How weights are trained; None means: as the run file or the framework says."""

    optimizer: Annotated[
        str | None,
        option(
            "--optimizer",
            help=f"{', '.join(OPTIMIZERS)}.",
            panel=TRAINING,
            words=lambda: OPTIMIZERS,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        option(
            "--recipe",
            help=f"Formats of states: {', '.join(CHOOSABLE)} (default: the framework's).",
            panel=TRAINING,
            words=lambda: CHOOSABLE,
        ),
    ] = None
    shards: Annotated[
        int | None,
        option("--shards", help="Ranks ZeRO shards over (hybrid sharding).", panel=TRAINING),
    ] = None
    loss: Annotated[
        str | None,
        option(
            "--loss",
            help="Cross-entropy: {words}.",
            panel=TRAINING,
            words=lambda: get_args(Loss),
        ),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        return self.tuning() | only_given(
            optimizer=self.optimizer,
            recipe=self.recipe,
            shards=self.shards,
            loss=self.loss,
        )


@dataclass(frozen=True, eq=False, repr=False)
class MemoryOptions(TrainingOptions):
    """The same, and what is kept in host memory."""

    offload: Annotated[
        list[str] | None,
        option(
            "--offload",
            help="To the host: optimizer, weights, activations. Repeatable.",
            panel=TRAINING,
            metavar="WHAT",
            words=lambda: ("optimizer", "weights", "activations"),
        ),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        return {**super().training(), **only_given(offload=_one_offload(self.offload))}


@dataclass(frozen=True, eq=False, repr=False)
class PlanTrainingOptions(TrainingOptions):
    """The same for a command whose --offload moves activations: states have a name of their own."""

    offload_states: Annotated[
        str | None,
        option(
            "--offload-states",
            help="States kept in host memory: optimizer, or weights (both).",
            panel=TRAINING,
            metavar="WHAT",
            words=lambda: ("optimizer", "weights"),
        ),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        states = self.offload_states
        if states not in (None, "optimizer", "weights", "none"):
            raise SpecError(
                f"--offload-states {states!r} names no states",
                "use optimizer, or weights (both); --offload moves activations",
            )
        return {**super().training(), **only_given(offload=states)}

    def given(self) -> tuple[str, ...]:
        """The flags that were given."""
        return tuple(
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) is not None
        )


def _one_offload(wanted: list[str] | None) -> str | None:
    """What is kept on the host; ``SpecError`` for several things, of which one would be lost."""
    names = set(wanted or ())
    if names == {"optimizer", "weights"}:
        return "weights"  # their optimizer states go with them
    if len(names) > 1:
        raise SpecError(
            f"--offload {' and '.join(sorted(names))}: one of them at a time is modelled",
            "name one; weights takes the optimizer's states along",
        )
    return next(iter(names), None)
