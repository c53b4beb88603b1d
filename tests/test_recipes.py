"""Recipes of CONTRIBUTING.md, carried out on a copy of the package: what they say is all there is.

Those of a table's rows stand in ``test_rows.py``, a framework's in ``test_frameworks.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_rows import House


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_every_test_that_is_named_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    there = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert named
    assert not [name for name in named if f"def {name}(" not in there]
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert not [name for name in files if not (ROOT / name).exists()]


def test_a_model_preset_is_a_file(house):
    text = (house.root / "presets/models/llama-3-8b.yaml").read_text(encoding="utf-8")
    smaller = text.replace("  layers: 32\n", "  layers: 4\n").replace('"Llama 3 8B"', '"Made up"')
    (house.root / "presets/models/made-up.yaml").write_text(smaller, encoding="utf-8")
    found = house.json("made-up")
    assert found["model"]["name"] == "made-up"
    assert found["model"]["layers"] == 4
    assert "made-up" in house.run("presets", "list", "models").stdout
    house.edit("presets/models/made-up.yaml", "  hidden: 4096\n", "  hiden: 4096\n")
    refused = house.run("made-up", check=False)
    assert refused.returncode == 2
    assert "hiden" in refused.stderr


def test_a_model_type_is_a_row(house):
    config = json.loads((ROOT / "tests/data/configs/mlc_llama2_13b.json").read_text())
    config["model_type"] = "made_up"
    (house.root / "config.json").write_text(json.dumps(config), encoding="utf-8")
    unknown = house.json("config.json")
    assert unknown["model"]["qkv_bias"] is False
    assert "unknown model_type 'made_up'" in " ".join(unknown["notes"])
    house.edit(
        "actcalc/io/hub/families.py",
        '    "internlm3": more(',
        '    "made_up": replace(LLAMA, code="made up", flags={"qkv_bias": ("none", True)}),\n',
    )
    found = house.json("config.json")
    assert found["model"]["qkv_bias"] is True
    assert "made_up" not in " ".join(found["notes"])


def test_a_kernel_variant_is_a_function_a_line_and_a_profile(house):
    before = house.json("llama-3-8b", "--framework", "torchtitan", "--policy", "none")
    profile = house.root / "presets/frameworks/torchtitan.yaml"
    text = profile.read_text(encoding="utf-8")
    profile.write_text(
        text.replace("  rmsnorm: {value: fused_rmsnorm,", "  rmsnorm: {value: double,"),
        encoding="utf-8",
    )
    refused = house.run("llama-3-8b", "--framework", "torchtitan", check=False)
    assert refused.returncode == 2
    assert "double" in refused.stderr
    house.edit(
        "actcalc/layers/core/norm.py",
        "NORM_KERNELS: dict[str, NormKernel] = {",
        'def _double(n: _Norm) -> None:\n    n.saves.append(n.source)\n    n.keep("again", n.out)\n'
        "    n.keep_statistic()\n\n\n",
    )
    house.edit(
        "actcalc/layers/core/norm.py", '    "fused_rmsnorm": _fused', '    "double": _double,\n'
    )
    kinds = house.root / "actcalc/specs/kinds.py"
    whole = kinds.read_text(encoding="utf-8")
    line = '"fused_rmsnorm": "'
    kinds.write_text(whole.replace(line, '"double": "made up",\n    ' + line), encoding="utf-8")
    after = house.json("llama-3-8b", "--framework", "torchtitan", "--policy", "none")
    model, work = after["model"], after["workload"]
    more = 2 * 2 * work["seq"] * work["micro_batch"] * model["hidden"]  # two norms, 2 B each
    sizes = [found["policies"][0]["stored_bytes_per_layer"] for found in (before, after)]
    assert sizes[1] - sizes[0] == more
