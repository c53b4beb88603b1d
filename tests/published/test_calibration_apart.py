"""The rule of docs/step-times.md: what a constant was taken from never judges it."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.conftest import ROOT
from tests.published.step_times import ROWS

# First part of a judged run's id -> how a constant's source would name where it is from.
JUDGED = {
    "bloom": r"bloom|tr11-176B|bigscience",
    "bridge": r"Megatron-Bridge|performance-summary",
    "bridge-moe": r"Megatron-Bridge",
    "bridge-rc": r"Megatron-Bridge",
    "hf-bertlarge": r"perf_train_gpu_one|Efficient training on a single GPU",
    "internevo": r"internevo|internlm",
    "korth22": r"Korthikanti.*(table [45]|Table [45])|2205\.05198",
    "llmfoundry": r"llm-?foundry|mosaic",
    "mds-1.3B": r"Megatron-DeepSpeed",
    "mtnlg": r"MT-NLG|2201\.11990",
    "narayanan21": r"Narayanan|2104\.04473",
    "titan": r"torchtitan.*(benchmark|performance)",
    "titan-old": r"torchtitan.*(benchmark|performance)",
    "torchtune": r"torchtune",
}
FILES = sorted((ROOT / "presets" / "efficiency").glob("*.yaml")) + sorted(
    (ROOT / "presets" / "devices").glob("*.yaml")
)


def sources(path):
    """Every ``source`` under a preset, with where it is."""
    found = []

    def walk(node, where):
        if isinstance(node, dict):
            if "source" in node:
                found.append((where, str(node["source"])))
            for key, value in node.items():
                walk(value, f"{where}.{key}")

    walk(yaml.safe_load(path.read_text(encoding="utf-8")), path.name)
    return found


def test_every_judged_source_is_known():
    assert {row["id"].split("/")[0] for row in ROWS} == set(JUDGED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_constant_is_from_a_judged_source(path):
    for where, source in sources(path):
        judged = [name for name, words in JUDGED.items() if re.search(words, source, re.I)]
        assert not judged, f"{where}: {source}"


def test_every_constant_has_a_source():
    for path in sorted((ROOT / "presets" / "efficiency").glob("*.yaml")):
        if path.name == "families.yaml":
            continue
        for key, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            assert key == "title" or entry["source"], f"{path.name}: {key}"


def test_ranges_are_those_of_the_benchmark():
    """``python -m benchmarks.step_times --errors > presets/accuracy/step-times.yaml``."""
    from benchmarks.step_times import errors_yaml
    from tests.published.step_times import outcomes

    kept = yaml.safe_load((ROOT / "presets" / "accuracy" / "step-times.yaml").read_text("utf-8"))
    found = yaml.safe_load(errors_yaml(outcomes()))
    assert set(kept) == set(found)
    for name in set(kept) - {"title"}:
        assert kept[name] == pytest.approx(found[name], abs=0.011), name
