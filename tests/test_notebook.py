"""docs/examples/library.ipynb runs from its first cell to its last, and shows what it shows.

``python -m tests.test_notebook`` runs it and keeps what its cells print now.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "library.ipynb"


def executed(path: Path) -> Any:
    import nbformat
    from nbclient import NotebookClient

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["COLUMNS"] = "80"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


def shown(notebook: Any) -> list[list[str]]:
    """What each cell shows: text and tables, without what differs from run to run."""
    found = []
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            outputs.append(output.get("text") or data.get("text/html") or data.get("text/plain"))
        found.append(["".join(text) for text in outputs])
    return found


@pytest.mark.sweep
def test_the_notebook_runs_and_shows_what_it_shows():
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    for package in ("nbclient", "ipykernel", "pandas"):
        pytest.importorskip(package, reason=f"needs {package}")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    assert shown(executed(NOTEBOOK)) == shown(kept)


def test_every_call_is_in_the_notebook():
    text = NOTEBOOK.read_text(encoding="utf-8")
    for name in ("compare", "breakdown", "memory", "plan", "mfu", "search", "advise", "explain"):
        assert f"{name}(" in text


if __name__ == "__main__":
    import nbformat

    nbformat.write(executed(NOTEBOOK), NOTEBOOK)
