"""How soon the calculator's page answers: a real headless browser, cold, then field after field.

    python -m benchmarks.page

Needs Playwright, Chromium and a built site (``cd web && npm ci && npm run build``). Prints seconds
from the click to the first answer on a cold cache, and for each later change of a field to the
memory's tables and to everything, as the page's own clock has them (a driver's polling adds a tenth
of a second and more), with the worker's seconds beside them.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHANGES = (
    ("seq", "4096"), ("micro_batch", "2"), ("tp", "8"), ("sp", True), ("global_batch", "64"),
    ("dp", "8"), ("zero", "1"), ("device", "h100-80gb"), ("policy", "full"), ("seq", "8192"),
    ("model", "llama-3-8b"), ("attention", "flash"), ("optimizer", "lion"), ("policy", "selective"),
    ("model", "deepseek-v3"), ("seq", "2048"),
)  # fmt: skip

# When a field changed, and when the page last said of itself what it has shown.
WATCH = """
const times = (window.times = {});
addEventListener("input", () => (times.input = performance.now()), true);
addEventListener("DOMContentLoaded", () =>
  new MutationObserver((seen) => {
    for (const { attributeName } of seen) times[attributeName] = performance.now();
  }).observe(document.body, { attributes: true }));
"""


def main() -> int:
    """Print the figures; 1 where what it needs is not installed."""
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    from actcalc.cli.web import serving
    from tests.browser import browser

    dist = root / "web" / "dist"
    if not (dist / "index.html").is_file():
        print("web/dist is not built: cd web && npm ci && npm run build")
        return 1
    server = serving(dist, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_address[1]}/"
    with browser() as chromium:
        page = chromium.new_page()
        page.add_init_script(WATCH)
        began = time.monotonic()
        page.goto(site + "#model=gpt3-175b")
        page.wait_for_selector("body[data-first='1']", timeout=120_000)
        first = time.monotonic() - began
        page.wait_for_selector("body[data-drawn=true][data-answered='1']", timeout=120_000)
        print(f"cold: first answer {first:.2f} s, everything {time.monotonic() - began:.2f} s")
        rows = [_changed(page, *change, number) for number, change in enumerate(CHANGES, start=2)]
    for (name, value), (soon, whole, worker) in zip(CHANGES, rows, strict=True):
        print(f"{name:12} {value!s:12} memory {soon:5.2f} s  everything {whole:5.2f} s  "
              f"worker {worker}")  # fmt: skip
    soon, whole = (statistics.median(row[i] for row in rows) for i in range(2))
    print(f"median: memory {soon:.2f} s, everything {whole:.2f} s")
    server.shutdown()
    return 0


def _changed(page: Any, name: str, value: str | bool, number: int) -> tuple[float, float, str]:
    """Seconds to the memory's tables and to everything drawn, and the worker's own."""
    set_value = """([name, value]) => {
        const field = document.getElementById("form").elements.namedItem(name);
        if (field.type === "checkbox") field.checked = value; else field.value = value;
        field.dispatchEvent(new Event("input", {bubbles: true}));
    }"""
    page.evaluate(set_value, [name, value])
    page.wait_for_selector(f"body[data-first='{number}']", timeout=60_000)
    page.wait_for_selector(f"body[data-drawn=true][data-answered='{number}']", timeout=60_000)
    times = page.evaluate("window.times")
    soon, whole = (
        (max(times[name] for name in names) - times["input"]) / 1000
        for names in (("data-first",), ("data-answered", "data-drawn"))
    )
    spent = page.evaluate("document.body.dataset.spent") or ""
    return soon, whole, spent


if __name__ == "__main__":
    sys.exit(main())
