"""The project's pages: their commands, what these print now, and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
PAGES = (*READMES, *sorted((ROOT / "docs").glob("*.md")))
JOURNEYS = ROOT / "docs" / "journeys.md"
"""Runs in a folder of its own: tests/test_journeys.py."""
CONSOLE = re.compile(r"```console\n\$ actcalc (.*?)(?: \| head -(\d+))?\n(.*?)```", re.DOTALL)


def lines(text: str, most: str | None = None) -> list[str]:
    """Lines of an output without what is blank at their ends, at most so many."""
    found = text.splitlines()[: int(most) if most else None]
    return "\n".join(line.rstrip() for line in found).strip("\n").splitlines()


def consoles() -> Iterator[tuple[Path, str, str | None, str]]:
    """Every command shown with its output: page, arguments, how many lines, output."""
    for page in PAGES:
        if page == JOURNEYS:
            continue
        for command, most, shown in CONSOLE.findall(page.read_text(encoding="utf-8")):
            yield page, command, most or None, shown


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as they are made of their words."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in kept}


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)
