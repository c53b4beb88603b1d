"""A GPU's measured shares as a sheet."""

from __future__ import annotations

from actcalc.answers.device_shares import DeviceShares
from actcalc.render.sheet import Column, Row, Sheet
from actcalc.render.units import digits


def calibrate_sheets(result: DeviceShares) -> list[Sheet]:
    """Every measured share beside the one it replaces."""
    columns = (
        Column("share", "share", align="left"),
        Column("value", "measured", digits),
        Column("before", "before", digits),
        Column("how", "how", align="left", wrap=True),
    )
    flags = ",".join(f"{share.share}={share.value:.3g}" for share in result.shares)
    return [
        Sheet(
            title=f"{result.gpu}: shares of the peaks of {result.device['name']}, "
            f"{result.precision}",
            answer=f"This GPU reaches: {flags.replace(',', ', ')}.",
            columns=columns,
            rows=tuple(
                Row((share.share, share.value, share.before, share.how)) for share in result.shares
            ),
            below=(f"--efficiency {flags}",),
            notes=result.notes,
        )
    ]
