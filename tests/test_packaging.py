"""What is published: metadata, the files of wheel and sdist, workflows that are well-formed."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import actcalc
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_one():
    assert PROJECT["version"] == actcalc.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## \[(\d[\d.]*)\]", changelog, re.MULTILINE)[0]
    assert newest == PROJECT["version"]


def test_every_python_that_is_classified_is_tested():
    named = {
        name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)
    }
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = flow["jobs"]["test"]["strategy"]["matrix"]
    assert set(matrix["python"]) == named
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert PROJECT["requires-python"] == f">={min(named, key=lambda v: int(v.split('.')[1]))}"


def test_dependencies_have_lower_bounds_alone():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for one in (each for group in groups for each in group):
        assert re.fullmatch(r"[\w.-]+(\[[\w,]+\])?(>=[\d.]+)?", one), one
        assert ">=" in one or one.startswith("actcalc[")


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_are_well_formed(path):
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert flow["permissions"]["contents"] == "read"
    for job in flow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])


def test_hooks_before_a_commit_are_those_of_ci():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in ("ruff check", "ruff format", "mypy"):
        assert name in script
        assert any(name in hook["entry"] for hook in hooks["repos"][0]["hooks"])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="needs hatchling to build")
    folder: Path = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"actcalc"}
    assert "actcalc/py.typed" in names
    assert "actcalc/_presets/models/gpt3-175b.yaml" in names
    assert "actcalc/_presets/compiled/models/gpt3-175b.json" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "actcalc").rglob("*.py")}
    assert modules <= set(names)
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: MIT" in metadata
    assert "## Quick starts" in metadata


def test_the_sdist_holds_what_builds_and_tests_it(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "hatch_build.py", "README.md", "README.zh-CN.md", "LICENSE",
                   "CHANGELOG.md", "tests/conftest.py", "docs/accuracy.md", "mkdocs.yml",
                   "presets/models/gpt3-175b.yaml", "actcalc/cli/app.py"):  # fmt: skip
        assert needed in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
