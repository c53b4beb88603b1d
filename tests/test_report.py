"""A report is one page that stands alone: figures of the commands, escaped, nothing loaded."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from actcalc.render.units import digits
from tests.browser import browser

RUN = ("llama-3-8b", "--dp", 8, "--zero", 3, "--framework", "torchtitan", "--device", "h100-80gb")


class Elements(HTMLParser):
    """Every element with its attributes, and whether all that open are closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    import subprocess
    import sys

    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    command = [sys.executable, "-m", "actcalc", "report", *map(str, RUN), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return path


def words(path: Path) -> str:
    plain = re.sub(r"<[^>]*>", " ", path.read_text(encoding="utf-8").split("</style>", 1)[1])
    return " ".join(html.unescape(plain).split())


def test_it_says_what_the_commands_say(written, cli):
    text = words(written)
    memory = cli("memory", *RUN, "--policy", "none", "--json").json
    total = memory["stages"][0]["total_bytes"]
    assert f"It fits: with the policy none one GPU needs {total / 1e9:.1f} GB of" in text
    compared = cli("compare", *RUN, "--json").json
    step = next(p for p in compared["policies"] if p["policy"] == "none")["step_seconds"]
    assert f"a step takes {digits(step)} s, predicted" in text
    for name in (p["policy"] for p in compared["policies"]):
        assert f" {name} " in text
    assert "actcalc report llama-3-8b --dp 8 --zero 3" in text


def test_every_assumption_has_a_source(written):
    text = written.read_text(encoding="utf-8")
    details = re.findall(r"<details>.*?</details>", text, re.DOTALL)
    sourced = [part for part in details if "each with its source" in part]
    kinds = [name for part in sourced for name in re.findall(r"<summary>(.*?):", part)]
    device, model = "device h100-80gb", "model llama-3-8b"
    assert kinds == [device, "share of a peak", model, "profile torchtitan"]
    for part in sourced:
        rows = re.findall(r'<td class="left wrap">(.*?)</td></tr>', part)
        assert len(rows) > 5
        assert all(rows)


def test_it_stands_alone(written):
    elements = Elements(written.read_text(encoding="utf-8"))
    assert not elements.open
    tags = [tag for tag, _ in elements.found]
    assert not {"script", "link", "iframe", "object", "form", "base"} & set(tags)
    assert tags.count("h1") == 1
    assert tags.count("figure") == 5
    for _, attributes in elements.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    names = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(names) == len(set(names))
    policies = [a["content"] or "" for tag, a in elements.found if "http-equiv" in a]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policies[0]


def test_names_are_escaped(cli, tmp_path):
    hostile = "<img src=x onerror=alert(1)>&\"'</title>"
    run, page = tmp_path / "run.yaml", tmp_path / "page.html"
    run.write_text(json.dumps({"title": hostile, "model": "gpt2"}))
    assert cli("report", run, "-o", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert "<img" not in text
    assert html.escape(hostile) in text
    assert not Elements(text).open


def test_a_run_that_does_not_fit_says_so_first(cli, tmp_path):
    page = tmp_path / "page.html"
    large = ("llama-3.1-405b", "--tp", 8, "--sp", "--device", "h100-80gb")
    outcome = cli("report", *large, "-o", page)
    assert outcome.code == 1
    assert "It does not fit: even with the policy full" in words(page)


def test_what_is_no_page_is_refused(cli, tmp_path):
    for more in ((), ("--json",), ("-o", tmp_path / "x.csv"), ("-o", tmp_path / "x.svg")):
        outcome = cli("report", "gpt2", *more)
        assert outcome.code == 2
        assert "-o report.html" in outcome.err
    several = cli("report", "gpt2", "--framework", "paper,megatron", "-o", tmp_path / "x.html")
    assert several.code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_a_complaint(written, width, scheme):
    """No console message, no request, nothing wider than the window, and text that stands out."""
    with browser() as chromium:
        page = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        ).new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(written.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.locator(f"figure .{'small' if width == 390 else 'large'} svg")
        assert [shown.nth(i).is_visible() for i in range(shown.count())] == [True] * 5
        colour, back = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).background]"
        )
        ink, paper = (int(re.findall(r"\d+", text)[0]) for text in (colour, back))
        assert abs(ink - paper) > 150
        assert said == []
        assert asked == [written.as_uri()]
