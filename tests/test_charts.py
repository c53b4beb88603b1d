"""Charts say what the answers say, compile as Vega-Lite, and are drawn in every format."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from actcalc.render.formats import FORMATS
from tests.conftest import DATA, ROOT

vl_convert = pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert-python")

GPT3 = ("gpt3-175b", "--tp", 8, "--sp")
PIPED = (*GPT3, "--pp", 4, "--dp", 8, "--zero", 1, "--global-batch", 128)
LOG = ("gpt2", "--framework", "megatron", "--log", DATA / "logs" / "megatron.log")
DRAWN = {
    "layer": GPT3,
    "timeline": (*GPT3, "--device", "a100-80gb"),
    "stages": ("memory", *PIPED, "--device", "a100-80gb"),
    "step": ("memory", *PIPED, "--device", "a100-80gb"),
    "frontier": ("plan", *GPT3, "--memory", "16GB", "--activations-only"),
    "check": ("check", *LOG),
    "pareto": ("search", "gpt-22b", "--gpus", 32, "--device", "a100-80gb", "--global-batch", 64),
}


@pytest.fixture
def spec(cli, tmp_path):
    """The Vega-Lite specification of a chart of a command."""

    def made(name: str, *args: object) -> Any:
        path = tmp_path / f"{name}.vl.json"
        outcome = cli(*(args or DRAWN[name]), "--plot", name, "-o", path)
        assert outcome.code in (0, 1), outcome.err
        return json.loads(path.read_text(encoding="utf-8"))

    return made


def values(spec: Any, layer: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = spec["layer"][layer]["data"]["values"]
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_every_chart_compiles_and_names_its_units(spec, name):
    made = spec(name)
    vega = vl_convert.vegalite_to_vega(made, "6.4")
    titles = [axis.get("title") for axis in vega["axes"] if axis.get("title")]
    assert titles
    assert made["description"].startswith(made["title"]["text"][0])
    words = " ".join(str(title) for title in titles)
    assert re.search(r"\b(MB|GB|TFLOP|ms)\b|%|, s,", words)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("width", [350, 720])
def test_every_chart_keeps_its_width(spec, name, width):
    made = {**spec(name), "width": width}
    drawn = vl_convert.vegalite_to_svg(made, "6.4")
    root = ElementTree.fromstring(drawn)
    assert float(root.get("width", "0")) <= width + 1


def test_the_layer_chart_has_the_papers_units(spec, cli):
    """34 and 80 for GPT-3, 34 where attention re-runs, and two bytes of the input."""
    made = spec("layer")
    texts = {(row["policy"], row["text"]) for row in values(made, 1)}
    assert {("none", "34"), ("none", "80"), ("selective", "34")} <= texts
    for policy, units in (("full", 16), ("full-sharded", 2)):
        (row,) = [row for row in values(made, 0) if row["policy"] == policy]
        assert (row["part"], row["start"], row["end"]) == ("layer input", 0, units)
    stored = {
        p["policy"]: p["stored_bytes_per_layer"] for p in cli(*GPT3, "--json").json["policies"]
    }
    for policy in ("none", "selective", "full", "ffn", "attention", "norm"):
        rows = [row for row in values(made, 0) if row["policy"] == policy]
        assert sum(row["bytes"] for row in rows) == stored[policy]
    squared = {row["part"] for row in values(made, 0) if row["part"].endswith("s × s")}
    assert squared == {"attention, s × s"}


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "bert-base"])
def test_the_layer_chart_is_the_breakdown(spec, cli, model):
    made = spec("layer", model, "--policy", "none", "--policy", "full")
    for policy in ("none", "full"):
        stored = cli("breakdown", model, "--policy", policy, "--json").json
        rows = [row for row in values(made, 0) if row["policy"] == policy]
        assert sum(row["bytes"] for row in rows) == stored["stored_bytes_per_layer"]


def test_the_time_line_is_two_four_and_two_more(spec, cli):
    made = spec("timeline", *GPT3)
    rows = values(made, 0)
    kinds = [(r["kind"], r["layer"]) for r in rows if r["policy"] == "full"]
    forward = [("forward", 1), ("forward", 2), ("forward", 3)]
    back = [(kind, at) for at in (3, 2, 1) for kind in ("re-run", "backward")]
    assert kinds == forward + back
    lengths = {r["kind"]: r["end"] - r["start"] for r in rows if r["policy"] == "full"}
    assert lengths["backward"] == pytest.approx(2 * lengths["forward"])
    assert lengths["re-run"] == pytest.approx(lengths["forward"])
    ends = {row["policy"]: row["text"] for row in values(made, 2)}
    assert (ends["full"], ends["none"]) == ("+33 %", "")
    timed = spec("timeline")
    policies = cli(*DRAWN["timeline"], "--json").json["policies"]
    for policy in policies:
        rows = [r for r in values(timed, 0) if r["policy"] == policy["policy"]]
        total = sum(r["end"] - r["start"] for r in rows) / 3
        both = policy["layer_forward_seconds"] + policy["layer_backward_seconds"]
        assert total == pytest.approx(1e3 * both)


def test_the_stages_chart_sums_to_the_totals(spec, cli):
    made = spec("stages")
    report = cli(*DRAWN["stages"], "--json").json
    for stage in report["stages"]:
        rows = [row for row in values(made, 0) if row["stage"] == stage["stage"]]
        assert sum(row["bytes"] for row in rows) == stage["total_bytes"]
    limit = values(made, 1)[0]["value"] * 1e9
    top = report["stages"][0]
    assert limit == pytest.approx(top["total_bytes"] + top["margin_bytes"])


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--pp", 4, "--global-batch", 16),
        ("--pp", 4, "--global-batch", 200),
        ("--pp", 4, "--vpp", 3, "--global-batch", 16),
        ("--pp", 4, "--schedule", "gpipe", "--global-batch", 8),
        ("--pp", 4, "--schedule", "zb-h1", "--global-batch", 12),
    ],
)
def test_the_highest_moment_of_a_step_is_the_peak(cli, layout):
    from actcalc.answers.step_memory import step_memory
    from actcalc.io.runs import resolve
    from actcalc.io.sources import source

    args = ("memory", "gpt2", "--micro-batch", 1, *layout, "--policy", "selective")
    report = cli(*args, "--json").json
    keys = ("layout", "workload")
    given = {key: {k: v for k, v in report[key].items() if v is not None} for key in keys}
    made = step_memory(resolve(source("gpt2"), **given, policies=("selective",)))
    stage = report["stages"][report["peak_stage"]]
    assert made.stage == report["peak_stage"]
    assert max(moment.total_bytes for moment in made.moments) == stage["peak_bytes"]
    assert max(moment.held for moment in made.moments) == stage["in_flight"]
    passes = {moment.work for moment in made.moments}
    assert not (len(passes) - 1) % made.microbatches_shown  # the optimizer step is the other one


def test_one_forward_one_backward_is_a_staircase(spec):
    made = spec("step", "memory", "gpt2", "--micro-batch", 1, "--pp", 4, "--global-batch", 16)
    points = values(made, 1)
    held = [int(found[1]) for p in points if (found := re.search(r"(\d+) in flight", p["about"]))]
    steady = (len(held) - 6) // 2
    assert 4 < steady <= 13  # the middle may be shortened
    assert held == [1, 2, 3] + [4, 4] * steady + [3, 2, 1]


def test_named_policies_lie_on_or_above_the_frontier(spec, cli):
    made = spec("frontier")
    line = [(row["memory"], row["share"]) for row in values(made, 0)]
    assert line == sorted(line, key=lambda point: (point[0], -point[1]))
    names = {name for row in values(made, 1) for name in row["name"].split(", ")}
    assert {"none", "selective", "full", "sqrt"} <= names
    for row in values(made, 1):
        better = [share for memory, share in line if memory <= row["memory"]]
        assert row["share"] >= min(better, default=0) - 15  # twenty points of a convex line
    document = cli(*DRAWN["frontier"], "--frontier", "--json").json
    assert len(document["frontier"]) == len(line)
    peaks = {one["name"]: one["peak_bytes"] for one in document["named"]}
    assert peaks["none"] == 34426847232


def test_a_budget_that_nothing_fits_is_drawn_beside_the_frontier(spec):
    """On the same axis, and the words say so: it once was drawn left of the whole chart."""
    made = spec("frontier", "plan", *GPT3, "--memory", "0.1GB", "--activations-only")
    budget, line = values(made, -1)[0]["memory"], values(made, 0)
    first, last = made["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert first <= budget < min(row["memory"] for row in line) < last
    assert "No plan fits the budget" in " ".join(made["title"]["subtitle"])
    drawn = ElementTree.fromstring(vl_convert.vegalite_to_svg({**made, "width": 720}, "6.4"))
    assert float(drawn.get("width", "0")) <= 721


def test_check_draws_the_range_that_it_states(spec, cli):
    figures = cli(*DRAWN["check"], "--json").json["figures"]
    rows = spec("check")["data"]["values"]
    assert [row["difference"] for row in rows] == [100 * f["difference_ratio"] for f in figures]
    assert [row["within"] == "in the stated range" for row in rows] == [
        f["within"] for f in figures
    ]


def test_the_front_of_a_search_is_topped_by_nothing(spec, cli):
    made = spec("pareto")
    front = [(row["memory"], row["time"]) for row in values(made, 1)]
    assert len(front) > 1
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(front))
    for row in values(made, 0):
        assert any(m <= row["memory"] and t <= row["time"] for m, t in front)
    listed = cli(*DRAWN["pareto"], "--pareto", "memory,time", "--top", 1000, "--json").json
    assert len(listed["results"]) == len(front)
    assert min(t for _, t in front) == listed["results"][0]["step_seconds"]


# --- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_svg_is_well_formed_and_every_mark_says_its_value(cli, tmp_path, name):
    path = tmp_path / "chart.svg"
    cli(*DRAWN[name], "--plot", name, "-o", path)
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert titles
    assert all(titles)
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"<script|href=\"http|style=\"", text)


def test_png_has_twice_the_pixels(cli, tmp_path):
    path = tmp_path / "chart.png"
    assert cli(*GPT3, "-o", path).code == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 2 * 720


def test_a_chart_is_refused_where_there_is_none(cli, tmp_path):
    for args in (
        ("explain", "34", "-o", tmp_path / "x.svg"),
        ("presets", "list", "--format", "png"),
    ):
        outcome = cli(*args)
        assert outcome.code == 2
        assert "no chart" in outcome.err
    unknown = cli(*GPT3, "--plot", "pie", "-o", tmp_path / "x.svg")
    assert unknown.code == 2
    assert "layer, timeline" in unknown.err
    for more in ((), ("--json",), ("-o", tmp_path / "x.csv")):
        refused = cli(*GPT3, "--plot", "layer", *more)
        assert refused.code == 2
        assert "-o layer.svg" in refused.err
    pasted = cli("plan", *GPT3, "--memory", "16GB", "--emit", "torch", "--plot", "frontier")
    assert pasted.code == 2
    assert not list(tmp_path.iterdir())


def test_without_the_extra_it_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for ending in ("svg", "png"):
        outcome = cli(*GPT3, "-o", tmp_path / f"x.{ending}")
        assert outcome.code == 2
        assert "[charts]'" in outcome.err
    assert cli(*GPT3, "-o", tmp_path / "x.vl.json").code == 0


def test_pages_hold_real_tables_and_run_nothing(cli, tmp_path):
    path = tmp_path / "x.html"
    assert cli(*DRAWN["stages"], "-o", path).code in (0, 1)  # whether it fits is not the matter
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'sha256-" in text
    assert "<script" not in text
    assert text.count("<table>") >= 1
    assert text.count("<figure>") == 2
    assert '<th scope="col"' in text
    identifiers = re.findall(r'\bid="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_names_are_escaped_in_pages_and_pictures(cli, tmp_path):
    run, hostile = tmp_path / "run.yaml", "<script>alert(1)</script>&\"'"
    run.write_text(json.dumps({"title": hostile, "model": "gpt2"}))
    for ending in ("html", "svg"):
        path = tmp_path / f"x.{ending}"
        assert cli(run, "-o", path).code == 0
        text = path.read_text(encoding="utf-8")
        assert "<script>" not in text
        assert "&lt;script&gt;alert(1)" in text
        if ending == "svg":
            ElementTree.fromstring(text)


def test_every_format_of_the_contract_is_there():
    assert set(FORMATS) >= {"table", "json", "csv", "markdown", "svg", "png", "vl.json", "html"}


# --- pictures of the documentation ---------------------------------------------------------------


@pytest.mark.sweep
def test_pictures_of_the_documentation_are_what_is_drawn_now():
    """``python -m benchmarks.pictures`` draws them anew."""
    from actcalc.render.charts.draw import vega_lite
    from benchmarks.pictures import FOLDER, PICTURES

    assert {path.name.split(".")[0] for path in FOLDER.glob("*.svg")} == set(PICTURES)
    for name, make in PICTURES.items():
        kept = (FOLDER / f"{name}.vl.json").read_text(encoding="utf-8")
        assert kept == vega_lite(make()), name
        svg = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        for line in json.loads(kept)["title"]["text"]:
            assert line in svg.replace("&#39;", "'")


def test_every_picture_is_shown_somewhere():
    from benchmarks.pictures import PICTURES

    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for name in PICTURES:
        assert f"images/{name}.svg" in text


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "count"), [(2, 2), (4, 6), (4, 40)])
def test_the_plain_order_is_the_schedules(schedule, pp, count):
    """What needs no NumPy runs the same work as the schedules that do."""
    from actcalc.run.placement import plain_order
    from actcalc.run.schedule import sequence

    for stage in range(pp):
        made = sequence(schedule, pp, count, stage=stage)
        expected = [(one.kind, sum(one.held.activations)) for one in made.moments]
        assert list(plain_order(schedule, pp, made.microbatches, stage)) == expected
