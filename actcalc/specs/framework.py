"""A framework profile: which kernel runs for each kind of op, as data with its source."""

from __future__ import annotations

from dataclasses import dataclass, field

from actcalc.specs.base import Spec


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Framework(Spec):
    """Kernel choices of one training framework.

    Keys of ``kernels`` are kinds of op (norm, activation, attention core, ...), values name a
    kernel known to ``actcalc.layers``. ``families`` overrides them for single model families.
    """

    name: str
    """Profile name, as given to --framework."""
    title: str
    """One line for people."""
    kernels: dict[str, str]
    """Kind of op -> kernel."""
    families: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model family -> kernels that differ for it."""

    def kernel(self, kind: str, family: str = "") -> str:
        """The kernel for ``kind`` in models of ``family``; ``KeyError`` if the profile has none."""
        return self.families.get(family, {}).get(kind, self.kernels[kind])
