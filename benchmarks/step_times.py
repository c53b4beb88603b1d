"""Prints published step times beside the predicted ones, as a Markdown table.

python -m benchmarks.step_times > benchmarks/step-times.md
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.published.step_times import OUTLIER, Outcome, cause_of, outcomes


def summary(found: Sequence[Outcome], what: str) -> str:
    """How many runs, their median absolute and median error, and how many are outliers."""
    errors = [one.error for one in found]
    far = sum(abs(error) > OUTLIER for error in errors)
    return (
        f"- {len(found)} {what}: median absolute error {100 * median(map(abs, errors)):.1f} %, "
        f"median error {100 * median(errors):+.1f} %, {far} more than {100 * OUTLIER:.0f} % off"
    )


def main() -> None:
    """Print the summary, by how completely the source states a run, and the table."""
    found = sorted(outcomes(), key=lambda one: one.row["id"])
    print(summary(found, "published runs"))
    print(summary([one for one in found if one.known], "whose source states everything"))
    print(
        summary(
            [one for one in found if one.row["tier"] == 1],
            "with those that state all but the device's peak, or the model",
        )
    )
    for device in sorted({one.row["device"] for one in found}):
        chosen = [one for one in found if one.row["device"] == device]
        if len(chosen) > 4:
            print(summary(chosen, f"on {device}"))
    print()
    print("| run | device | GPUs | policy | s | b | measured s | predicted s | error | cause |")
    print("| :-- | :-- | --: | :-- | --: | --: | --: | --: | --: | :-- |")
    for one in found:
        row = one.row
        gpus = row["tp"] * row["pp"] * row["cp"] * row["dp"]
        print(
            f"| {row['id']} | {row['device']} | {gpus} | {row['policy']} | {row['seq']} | "
            f"{row['micro_batch']} | {one.measured:.3g} | {one.predicted:.3g} | "
            f"{100 * one.error:+.0f} % | {cause_of(one)} |"
        )


if __name__ == "__main__":
    main()
