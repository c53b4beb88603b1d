"""Which framework profiles a target's files can state."""

from __future__ import annotations

from actcalc.errors import SpecError
from actcalc.specs.run import Run


def check_profile(run: Run, target: str, *profiles: str) -> None:
    """Refuse a run whose profile is none of ``profiles``: the target runs other kernels."""
    if str(run.framework) not in profiles:
        raise SpecError(
            f"--emit {target} writes runs of the {profiles[0]} profile; this one is of "
            f"{run.framework}",
            f"add --framework {profiles[0]}, or --emit yaml",
        )
