"""Prints published step times beside the predicted ones, as a Markdown table.

python -m benchmarks.step_times > step-times.md
"""

from __future__ import annotations

from statistics import median

from tests.published.step_times import ROWS, outcome, outcomes


def main() -> None:
    found = outcomes()
    errors = [outcome.error for outcome in found]
    every = median(abs(outcome(row).error) for row in ROWS)
    print(
        f"{len(found)} of {len(ROWS)} published runs are judged: median absolute error "
        f"{100 * median(map(abs, errors)):.1f} %, median error {100 * median(errors):+.1f} %. "
        f"Over all {len(ROWS)}: {100 * every:.1f} %.\n"
    )
    print("| run | device | GPUs | policy | s | b | measured s | predicted s | error |")
    print("| :-- | :-- | --: | :-- | --: | --: | --: | --: | --: |")
    for one in sorted(found, key=lambda o: o.row["id"]):
        row = one.row
        gpus = row["tp"] * row["pp"] * row["cp"] * row["dp"]
        print(
            f"| {row['id']} | {row['device']} | {gpus} | {row['policy']} | {row['seq']} | "
            f"{row['micro_batch']} | {one.measured:.3g} | {one.predicted:.3g} | "
            f"{100 * one.error:+.0f} % |"
        )


if __name__ == "__main__":
    main()
