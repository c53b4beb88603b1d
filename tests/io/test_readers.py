"""Public files of every kind, written anew and short, are read to the run that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from actcalc.io.readers.kinds import KINDS
from actcalc.io.runs import resolve
from actcalc.io.sources import one_source
from actcalc.specs.run import Run
from tests.conftest import DATA

CASES = [
    (path.stem, case)
    for path in sorted((DATA / "runs").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text(encoding="utf-8"))
]


def written(case: dict[str, Any], folder: Path) -> list[str]:
    """Write a case's files; what the command line would name."""
    files = case["file"] if isinstance(case["file"], list) else [case["file"]]
    texts = case["text"] if isinstance(case["text"], list) else [case["text"]]
    names = []
    for name, text in zip(files, texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
        names.append(str(folder / name))
    return [*names, *case.get("beside", [])]


def field_of(run: Run, name: str) -> Any:
    if name == "framework":
        return run.framework.name
    if name == "policy":
        return run.policies[0]
    found: Any = run
    for step in name.split("."):
        found = getattr(found, step)
    return found


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[f"{k}-{c['file']}" for k, c in CASES])
def test_a_public_file_is_read(kind, case, tmp_path):
    run = resolve(one_source(written(case, tmp_path)))
    read = {name: field_of(run, name) for name in case["reads"]}
    assert read == case["reads"]
    told = "\n".join(run.warnings)
    for note in case.get("notes", ()):
        assert note in told
    if not case.get("notes"):
        assert "not understood" not in told


def test_every_kind_has_three_public_files():
    count: dict[str, int] = {}
    for kind, _ in CASES:
        count[kind] = count.get(kind, 0) + 1
    missing = {row.name for row in KINDS if count.get(row.name, 0) < 3} - {"fsdp"}
    assert not missing
    assert all(case["source"] for _, case in CASES)
