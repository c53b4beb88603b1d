"""Prints published step times beside the predicted ones, as Markdown: by family, then each run.

python -m benchmarks.step_times > benchmarks/step-times.md
python -m benchmarks.step_times --errors > presets/accuracy/step-times.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles

from actcalc.answers.judged import kind_of
from tests.published.step_times import OUTLIER, Outcome, cause_of, outcomes, run_of

_SOURCES = {
    "bloom": "Megatron-DeepSpeed of 2021, launches that wait",
    "bridge": "Megatron-Bridge, dense",
    "bridge-moe": "Megatron-Bridge, experts",
    "bridge-rc": "Megatron-Bridge, recomputation",
    "hf-bertlarge": "transformers, op by op, one GPU",
    "internevo": "InternEvo",
    "korth22": "Megatron-LM 2022, Table 4 and 5",
    "llmfoundry": "llm-foundry, FSDP",
    "mds-1.3B": "Megatron-DeepSpeed script",
    "mtnlg": "Megatron-LM 2022, MT-NLG",
    "narayanan21": "Megatron-LM 2021 and its ZeRO-3 rival",
    "titan": "torchtitan",
    "titan-old": "torchtitan of 2024",
    "torchtune": "torchtune, one GPU",
}


def grouped(found: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    """Outcomes by ``key``, in its order."""
    result: dict[str, list[Outcome]] = {}
    for one in found:
        result.setdefault(key(one), []).append(one)
    return dict(sorted(result.items()))


def kind(one: Outcome) -> str:
    """What the product calls the kind of such a run."""
    return kind_of(run_of(one.row))


_FEW = 10


def factors(found: Sequence[Outcome]) -> tuple[float, float]:
    """Between which factors of the prediction measured times lie: tenths, or all of a few.

    A prediction lies within its own range.
    """
    ratios = sorted(one.measured / one.predicted for one in found)
    low, high = ratios[0], ratios[-1]
    if len(ratios) >= _FEW:
        low, *_, high = quantiles(ratios, n=10)
    return min(1.0, round(low, 2)), max(1.0, round(high, 2))


def errors_yaml(found: Sequence[Outcome]) -> str:
    """The file that gives a predicted step its range.

    A few runs on one device say little of the next: their range is that of such layers everywhere.
    """
    alike = grouped(found, lambda one: kind(one).split()[-1])
    lines = ['title: "measured over predicted step time of published runs, by kind"']
    for name, chosen in grouped(found, kind).items():
        low, high = factors(chosen)
        if len(chosen) < _FEW:
            wide = factors(alike[name.split()[-1]])
            low, high = min(low, wide[0]), max(high, wide[1])
        lines.append(f"{name}: {{runs: {len(chosen)}, low: {low}, high: {high}}}")
    return "\n".join(lines)


def summary(found: Sequence[Outcome], what: str) -> str:
    """How many runs, their median absolute and median error, and how many are outliers."""
    errors = [one.error for one in found]
    far = sum(abs(error) > OUTLIER for error in errors)
    return (
        f"- {len(found)} {what}: median absolute error {100 * median(map(abs, errors)):.1f} %, "
        f"bias {100 * median(errors):+.1f} %, {far} more than {100 * OUTLIER:.0f} % off"
    )


def family(one: Outcome) -> str:
    """The source and the device of a run."""
    source = one.row["id"].split("/")[0]
    return f"{_SOURCES[source]} | {one.row['device']}"


def _print_families(found: Sequence[Outcome]) -> None:
    print("| family | device | runs | median error | bias | worst | causes of those far off |")
    print("| :-- | :-- | --: | --: | --: | --: | :-- |")
    for name, chosen in grouped(found, family).items():
        errors = [one.error for one in chosen]
        causes = "; ".join(dict.fromkeys(filter(None, map(cause_of, chosen))))
        print(
            f"| {name} | {len(chosen)} | {100 * median(map(abs, errors)):.1f} % | "
            f"{100 * median(errors):+.1f} % | {100 * max(errors, key=abs):+.0f} % | {causes} |"
        )


def _print_runs(found: Sequence[Outcome]) -> None:
    print("| run | device | GPUs | policy | s | b | measured s | predicted s | error |")
    print("| :-- | :-- | --: | :-- | --: | --: | --: | --: | --: |")
    for one in found:
        row = one.row
        gpus = row["tp"] * row["pp"] * row["cp"] * row["dp"]
        print(
            f"| {row['id']} | {row['device']} | {gpus} | {row['policy']} | {row['seq']} | "
            f"{row['micro_batch']} | {one.measured:.3g} | {one.predicted:.3g} | "
            f"{100 * one.error:+.0f} % |"
        )


def main() -> None:
    """Print the summary, by how completely the source states a run, and the tables."""
    found = sorted(outcomes(), key=lambda one: one.row["id"])
    if "--errors" in sys.argv[1:]:
        print(errors_yaml(found))
        return
    print("# Predicted step times beside published ones\n")
    print("What judges them, and what constants may be taken from: docs/step-times.md.\n")
    print(summary(found, "published runs"))
    print(summary([one for one in found if one.known], "whose source states everything"))
    print(
        summary(
            [one for one in found if one.row["tier"] == 1],
            "with those that state all but the device's peak, or the model",
        )
    )
    print("\n## By family\n")
    _print_families(found)
    print("\n## By run\n")
    _print_runs(found)


if __name__ == "__main__":
    main()
