"""The calculator in a browser: the command line's numbers, without what a browser does not have."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actcalc.cli import calculator
from tests.browser import browser
from tests.conftest import DATA, ROOT

DIST = ROOT / "web" / "dist"
ABSENT = ("numpy", "yaml", "pydantic", "typer", "rich", "click")
"""What the page has none of: they are no pure Python, or not needed."""
CONFIG_FILE = "model/config.json"
CONFIG = (DATA / "configs" / "meta-llama--Meta-Llama-3.1-70B.json").read_text(encoding="utf-8")

# What people would type: hand-picked corners, then random ones, the same on every run.
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("gpt3-175b", {"tp": 8, "sp": True}),
    ("gpt3-175b", {"tp": 8, "sp": True, "device": "a100-80gb"}),
    ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8, "dp": 8, "zero": 1, "device": "a100-80gb"}),
    ("llama-3-8b", {}),
    ("llama-3-8b", {"device": "h100-80gb", "lora_rank": 16, "policy": "full"}),
    ("llama-3-8b", {"device": "rtx-4090", "lora_rank": 16, "base_bits": 4, "seq": 4096}),
    ("llama-3.1-405b", {"tp": 8, "sp": True, "pp": 16, "dp": 8, "zero": 1, "device": "h200"}),
    ("mixtral-8x7b", {"tp": 2, "sp": True, "ep": 8, "dp": 8, "framework": "megatron"}),
    ("deepseek-v3", {"tp": 8, "sp": True, "ep": 8, "dp": 8, "device": "h100-80gb"}),
    ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8, "vpp": 2, "global_batch": 64, "device": "h200"}),
    ("gpt3-175b", {"tp": 8, "sp": True, "pp": 8, "schedule": "zb-h1", "global_batch": 64}),
    ("mixtral-8x7b", {"tp": 2, "sp": True, "ep": 4, "etp": 1, "pp": 4, "device": "h100-80gb"}),
    ("llama-3-8b", {"lora_rank": 8, "lora_targets": "attention", "recipe": "pure", "layers": 8}),
    ("llama-3-8b", {"objective": "dpo", "loss": "full", "device": "b200"}),
    ("bert-base", {"micro_batch": 32, "seq": 512, "device": "a100-40gb"}),
    ("gpt2-xl", {"attention": "flash", "optimizer": "sgd", "precision": "fp16"}),
    (CONFIG_FILE, {"tp": 8, "sp": True, "device": "h100-80gb"}),
    (CONFIG_FILE, {"seq": 8192, "policy": "selective"}),
]


def _random(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    chance = random.Random(17)
    models = ("gpt3-175b", "gpt-22b", "llama-3-8b", "gpt2-xl", "mixtral-8x7b", "bert-large")
    for _ in range(count):
        flags: dict[str, Any] = {"seq": chance.choice((512, 1024, 2048))}
        flags["micro_batch"] = chance.choice((1, 2, 4))
        if chance.random() < 0.6:
            flags |= {"tp": chance.choice((2, 4)), "sp": True}
        if chance.random() < 0.3:
            flags |= {"pp": 2, "global_batch": 64}
        if chance.random() < 0.5:
            flags |= {"dp": 4, "zero": 1}
        if chance.random() < 0.6:
            flags["device"] = chance.choice(("a100-80gb", "h100-80gb", "b200", "l40s"))
        if chance.random() < 0.5:
            flags["policy"] = chance.choice(("full", "selective", "ffn"))
        if chance.random() < 0.3:
            flags["optimizer"] = chance.choice(("adam8bit", "lion"))
        yield chance.choice(models), flags


QUESTIONS += _random(50 - len(QUESTIONS))


def question(of: str, model: str, flags: dict[str, Any]) -> str:
    config = CONFIG if model == CONFIG_FILE else None
    return json.dumps({"of": of, "model": model, "config": config, "flags": flags, "width": 720})


@pytest.mark.parametrize("of", ["memory", "compare"])
def test_the_answer_is_the_commands(cli, tmp_path, monkeypatch, of):
    """Byte for byte, for the command that the answer names; refusals are the same sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / CONFIG_FILE).write_text(CONFIG, encoding="utf-8")
    for model, flags in QUESTIONS[:25]:
        answer = json.loads(calculator.answered(question(of, model, flags)))
        if "error" in answer:
            assert answer["error"] in cli(of, model, *_words(flags)).err
            continue
        command = shlex.split(answer["command"])[1:]
        assert cli(*command, "--json").out == answer["json"]
        assert [chart["spec"]["width"] for chart in answer["charts"]] == [720] * 2


def _words(flags: dict[str, Any]) -> list[str]:
    return [
        word
        for key, value in flags.items()
        for word in ([f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]


def test_what_is_not_asked_for_is_refused():
    answer = json.loads(calculator.answered(question("memory", "gpt2", {"image_tokens": 2})))
    assert "image_tokens" in answer["error"]
    answer = json.loads(calculator.answered(question("memory", "gpt5", {})))
    assert answer["hint"].startswith("did you mean")


def test_the_pages_paths_need_neither_yaml_nor_numpy(tmp_path):
    """The wheel's own modules, with every package out of reach."""
    pytest.importorskip("hatchling", reason="needs hatchling to build the wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    asked = [question(of, *each) for each in QUESTIONS[:25] for of in ("memory", "compare")]
    code = f"""
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path.insert(0, "unpacked")
from actcalc.cli import calculator
assert calculator.__file__.endswith("unpacked/actcalc/cli/calculator.py")
calculator.choices()
for text in json.load(open("asked.json")):
    answer = json.loads(calculator.answered(text))
    assert "Error" not in answer.get("error", ""), answer
"""
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_web_says_how_to_build_the_site(cli, tmp_path):
    outcome = cli("web", "--no-open", "--folder", tmp_path)
    assert outcome.code == 2
    assert "npm ci && npm run build" in outcome.err


def test_the_lock_file_names_no_host():
    lock = json.loads((ROOT / "web" / "package-lock.json").read_text(encoding="utf-8"))
    package = json.loads((ROOT / "web" / "package.json").read_text(encoding="utf-8"))
    wanted = {**package["dependencies"], **package["devDependencies"]}
    for name, entry in lock["packages"].items():
        assert "resolved" not in entry
        assert not name or entry["integrity"].startswith("sha512-")
    assert wanted.keys() <= {name.removeprefix("node_modules/") for name in lock["packages"]}


# --- in a real browser ---------------------------------------------------------------------------


@pytest.fixture
def site() -> Iterator[str]:
    from actcalc.cli.web import serving

    if not (DIST / "index.html").is_file():
        pytest.skip("web/dist is not built: cd web && npm ci && npm run build")
    server = serving(DIST, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


def watched(page: Any, site: str) -> list[str]:
    """Everything that a page should not do: console messages, errors, requests elsewhere."""
    bad: list[str] = []
    page.on("console", lambda message: bad.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: bad.append(f"error: {error}"))

    def asked(request: Any) -> None:
        if not request.url.startswith((site, "data:", "blob:")):
            bad.append(f"request: {request.url}")

    page.on("request", asked)
    return bad


def test_numbers_in_the_browser_are_the_command_lines(site, cli, tmp_path, monkeypatch):
    """Fifty runs, memory and comparison of each, to the byte."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / CONFIG_FILE).write_text(CONFIG, encoding="utf-8")
    with browser() as chromium:
        page = chromium.new_page()
        bad = watched(page, site)
        page.goto(site)
        page.wait_for_selector("body[data-answered]", timeout=120_000)
        ask = """question => new Promise(done => {
            window.asking ??= new Worker("worker.js", {type: "module"});
            const heard = ({data}) => {
                if (data.kind !== "answer" || data.id !== question.id) return;
                window.asking.removeEventListener("message", heard);
                done(data.answer);
            };
            window.asking.addEventListener("message", heard);
            window.asking.postMessage(question);
        })"""
        every = [(of, *each) for each in QUESTIONS for of in ("memory", "compare")]
        for number, (of, model, flags) in enumerate(every, start=1):
            text = question(of, model, flags)
            answer = page.evaluate(ask, {"id": number, "of": of, "question": text})
            if "error" in answer:
                assert answer["error"] in cli("memory", model, *_words(flags)).err
            else:
                command = shlex.split(answer["command"])[1:]
                assert cli(*command, "--json").out == answer["json"], command
        assert bad == []


def violations(page: Any) -> list[str]:
    """What axe-core finds that keeps people out; nothing where it is not installed."""
    library = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
    if not library.is_file():
        return []
    page.evaluate(library.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document)")["violations"]
    return [f"{one['id']}: {[node['target'] for node in one['nodes']]}" for one in found]


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_is_used(site, width, scheme):
    """A link is opened, a field is changed by keyboard, a file is dropped, an error is read."""
    with browser() as chromium:
        page = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        ).new_page()
        bad = watched(page, site)
        page.goto(site + "#model=llama-3-8b&dp=8&zero=3&device=h100-80gb&framework=torchtitan")
        assert "Loading" in page.inner_text("#status")
        page.wait_for_selector("body[data-drawn=true][data-answered='1']", timeout=120_000)
        assert page.input_value("[name=device]") == "h100-80gb"
        assert page.inner_text("#status") == "With the policy chosen, it fits."
        assert page.locator("figure svg").count() == 4
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.focus("[name=seq]")
        page.keyboard.type("65536")
        page.wait_for_selector("text=it does not fit", timeout=60_000)
        assert "seq=65536" in page.evaluate("location.hash")
        page.fill("[name=seq]", "")
        page.fill("[name=tp]", "3")
        page.wait_for_selector("#status.bad", timeout=60_000)
        assert "3" in page.inner_text("#status")
        page.fill("[name=tp]", "")
        page.set_input_files("#file", {"name": "config.json", "mimeType": "application/json",
                                       "buffer": CONFIG.encode()})  # fmt: skip
        page.wait_for_selector("section h2:has-text('model: memory')", timeout=60_000)
        assert bad == []


def test_the_first_answer_comes_soon(site):
    """Measured on an idle machine: a few seconds cold, a fraction of one later; here with room."""
    with browser() as chromium:
        page = chromium.new_page()
        began = time.monotonic()
        page.goto(site + "#model=gpt3-175b&tp=8&sp=1")
        page.wait_for_selector("body[data-first='1']", timeout=120_000)
        cold = time.monotonic() - began
        page.wait_for_selector("body[data-answered='1']", timeout=120_000)
        began = time.monotonic()
        page.fill("[name=seq]", "4096")
        page.wait_for_selector("body[data-first='2']", timeout=60_000)
        later = time.monotonic() - began
        print(f"first answer {cold:.1f} s, a later one {later:.2f} s")
        assert cold < 60
        assert later < 10
