"""Runs on which commands once disagreed, each by itself, and figures that decide who is right."""

from __future__ import annotations

import csv
import io
import re

import pytest

from tests.agreement.asking import Args, answer, ask

GPT3 = ("gpt3-175b", "--tp", "8", "--sp")
LORA = ("llama-3-8b", "--set", "lora_rank=16")
GPT3_LAYER = 358_612_992
"""Bytes that a layer of GPT-3 keeps with tp 8 and sp (Korthikanti et al. 2022, table 2)."""


def words(text: str) -> Args:
    return text.split()


def policy(document: dict, name: str) -> dict:
    (found,) = [each for each in document["policies"] if each["policy"] == name]
    return found


def need(*args: object) -> int:
    return max(stage["total_bytes"] for stage in ask("memory", *args)["stages"])


def first_stage(*args: object) -> int:
    return ask("memory", *args)["stages"][0]["layers_activations_bytes"]


# --- how many micro-batches a step has ------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("--framework megatron --tp 2 --sp --pp 4", "full"),
        ("--framework megatron --tp 2 --sp --pp 4 --vpp 2", "full"),
        ("--framework megatron --pp 4 --dp 2 --zero 1 --schedule zb-v", "selective"),
        ("--framework megatron --pp 2 --schedule dualpipe", "none"),
    ],
)
def test_a_step_without_a_global_batch_takes_as_long_everywhere(layout, name):
    args = ["llama-3-8b", *layout.split(), "--device", "h100-80gb", "--policy", name]
    seconds = policy(ask(*args), name)["step_seconds"]
    assert ask("mfu", *args)["step_seconds"] == pytest.approx(seconds, rel=1e-9)
    (found,) = ask("explain", "overhead", *args)["overhead"]["policies"]
    assert found["step_seconds"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(("pp", "vpp"), [(8, 3), (4, 2), (4, 3), (8, 2)])
def test_an_interleaved_pipeline_is_full(pp, vpp):
    """Its first stage keeps L(1 + (p-1)/(p m)) layers (Korthikanti et al. 2022, section 4.2.3)."""
    args = [*GPT3, "--pp", str(pp), "--vpp", str(vpp), "--policy", "none"]
    document = ask(*args)
    layers = 96 + 96 * (pp - 1) // (pp * vpp)
    assert policy(document, "none")["stored_bytes"] == layers * GPT3_LAYER
    assert first_stage(*args) == layers * GPT3_LAYER


def test_the_interleaved_gpt3_of_the_paper():
    args = [*GPT3, "--pp", "8", "--vpp", "3", "--policy", "none"]
    document = ask(*args)
    assert round(policy(document, "none")["stored_bytes"] / 1e9, 1) == 44.5
    count = ask("memory", *args)["microbatches"]
    said = [note for note in document["notes"] if re.search(rf"\b{count} micro-?batches", note)]
    assert said, "no note says which number of micro-batches was taken"


# --- adapters -------------------------------------------------------------------------------------


def test_adapters_are_in_every_list_of_a_layer():
    stored = policy(ask(*LORA, "--policy", "none"), "none")["stored_bytes_per_layer"]
    broken = ask("breakdown", *LORA)
    assert broken["stored_bytes_per_layer"] == stored
    assert sum(tensor["bytes"] for tensor in broken["tensors"]) == stored
    assert f"{stored:,} B" in "\n".join(ask("explain", "34", *LORA)["lines"])


@pytest.mark.parametrize("name", ["none", "full", "selective"])
def test_adapters_are_in_every_time(name):
    args = [*LORA, "--device", "h100-80gb", "--policy", name]
    document = ask(*args)
    figure, used = policy(document, name), ask("mfu", *args)
    assert used["step_seconds"] == pytest.approx(figure["step_seconds"], rel=1e-9)
    assert used["model_flops"] == document["model_flops"]
    assert used["hardware_flops"] / used["model_flops"] == pytest.approx(
        figure["hardware_flops_per_model_flops_ratio"], rel=1e-9
    )
    (found,) = ask("explain", "overhead", *args)["overhead"]["policies"]
    assert found["step_seconds"] == pytest.approx(figure["step_seconds"], rel=1e-9)
    assert found["slowdown_ratio"] == pytest.approx(figure["slowdown_ratio"], rel=1e-9)


# --- policies -------------------------------------------------------------------------------------

UNEVEN = (*GPT3, "--pp", "4", "--layers-per-stage", "16,27,27,26")


@pytest.mark.parametrize("name", ["sqrt", "uniform:4", "uniform:27", "block:27", "block:20"])
def test_segments_of_uneven_stages(name):
    figure = policy(ask(*UNEVEN, "--policy", name), name)
    assert figure["stored_bytes"] == first_stage(*UNEVEN, "--policy", name)


def test_segments_keep_the_input_that_full_keeps():
    document = ask(*GPT3, "--policy", "full", "--policy", "sqrt", "--policy", "uniform:4")
    (full,), (sqrt,), (uniform,) = (each["layers"] for each in document["policies"])
    assert full["stored_bytes"] == sqrt["stored_bytes"] == uniform["stored_bytes"]


@pytest.mark.parametrize("args", [GPT3, ("llama-3-8b",)], ids=["gpt3", "llama"])
def test_sqrt_means_one_thing(args):
    plan = ask("plan", *args, "--memory", "1000TB", "--method", "sqrt")
    named = policy(ask(*args, "--policy", "sqrt"), "sqrt")
    assert plan["cost_flops"] == named["recompute_flops"]
    assert plan["peak_bytes"] == need(*args, "--policy", "sqrt")


def test_two_kinds_of_layer_stay_two():
    args = ("smollm3-3b", "--layers", "4", "--seq", "1024")
    broken = ask("breakdown", *args)
    names = [each["layer"] for each in broken["layers"]]
    assert len(set(names)) == 2
    for kind in broken["layers"]:
        leaves = [t["bytes"] for t in broken["tensors"] if t["layer"] == kind["layer"]]
        assert sum(leaves) == kind["bytes"] == 134_291_480
    assert names == [each["kind"] for each in ask(*args)["policies"][0]["layers"]]


# --- fp8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "full"])
def test_fp8_is_one_thing_however_it_is_asked_for(name):
    args = words("llama-3-8b --framework megatron --tp 2 --sp --device h100-80gb --policy")
    one = policy(ask(*args, name, "--precision", "fp8"), name)
    other = policy(ask(*args, name, "--set", "fp8=true"), name)
    assert one == other


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_best_whole_plan_counts_a_layers_input_once():
    document = ask(*GPT3, "--policy", "full-sharded")
    best = document["checkpoint_optimum"]
    assert best["layers_per_segment"] == 1
    assert best["total_bytes"] == policy(document, "full-sharded")["peak_bytes"]


def test_what_is_called_a_bound_is_one():
    names = ["full", "sqrt", *(f"uniform:{n}" for n in (1, 2, 3, 4, 6, 8))]
    args = ["gpt-22b", "--tp", "8", *(word for name in names for word in ("--policy", name))]
    document = ask(*args)
    best = document["checkpoint_optimum"]
    least = min(each["peak_bytes"] for each in document["policies"])
    assert best["total_bytes"] <= least
    if "bound" in answer(args):
        assert best["continuous_bytes"] <= best["total_bytes"]


@pytest.mark.parametrize("layout", ["--pp 4", "--pp 8 --vpp 3", "--pp 4 --global-batch 2"])
def test_the_best_checkpoints_are_those_of_the_layout(layout):
    args = [*GPT3, *layout.split()]
    best = ask(*args)["checkpoint_optimum"]
    text = "\n".join(ask("explain", "c*", *args)["lines"])
    assert f"{best['total_bytes']:,} B" in text
    assert f"{best['continuous']:.2f}" in text


# --- plans ----------------------------------------------------------------------------------------


def test_nothing_runs_again_where_none_fits():
    args = words("llama-3-8b --seq 2048 --device h100-80gb")
    assert need(*args, "--policy", "none") <= 70_000_000_000
    plan = ask("plan", *args, "--memory", "70GB")
    assert plan["feasible"]
    assert plan["cost_seconds"] == plan["lower_bound"] == 0


@pytest.mark.parametrize(
    "flags",
    ["--schedule dualpipe-v", "--schedule zb-v", "--vpp 2"],
)
def test_no_row_of_a_plans_table_beats_it(flags):
    args = words(
        "opt-1.3b --layers 12 --seq 256 --micro-batch 1 --attention eager --tp 1 --pp 3 "
        f"--framework megatron --dp 2 --zero 2 {flags}"
    )
    full = need(*args, "--policy", "full")
    for budget in (3_774_714_112, full):
        plan = ask("plan", *args, "--memory", f"{budget}B")
        costs = [rival["cost_flops"] for rival in plan["rivals"] if rival["cost_flops"] is not None]
        assert not plan["feasible"] or plan["cost_flops"] <= min(costs, default=0)
        assert plan["feasible"] or budget < full


SMALL_GPT2 = words(
    "gpt2-medium --layers 4 --seq 1024 --micro-batch 1 --attention flash --no-dropout"
)


def test_a_plan_is_found_where_segments_fit_exactly():
    budget = need(*SMALL_GPT2, "--policy", "sqrt")
    assert budget == 2_169_356_288
    plan = ask("plan", *SMALL_GPT2, "--memory", f"{budget}B")
    assert plan["feasible"]
    cost = policy(ask(*SMALL_GPT2, "--policy", "sqrt"), "sqrt")["recompute_flops"]
    assert plan["cost_flops"] <= cost


PLANNED: dict[str, Args] = {
    "gpt": [*GPT3, "--pp", "8"],
    "llama": ["llama-3-8b", "--seq", "4096"],
    "moe": ["mixtral-8x7b", "--tp", "2", "--sp", "--ep", "4", "--dp", "4", "--zero", "1"],
    "step is the peak": [*SMALL_GPT2, "--set", "fused_optimizer=false"],
}


@pytest.mark.parametrize("name", ["none", "selective", "full"])
@pytest.mark.parametrize("args", PLANNED.values(), ids=PLANNED)
@pytest.mark.parametrize("model", ["default", "timeline"])
def test_a_plans_peaks_are_those_of_memory(args, name, model):
    flags = [] if model == "default" else ["--memory-model", model]
    total = need(*args, "--policy", name)
    plan = ask("plan", *args, "--memory", "1000TB", *flags)
    (rival,) = [each for each in plan["rivals"] if each["name"] == name]
    assert rival["peak_bytes"] == total
    tight = ask("plan", *args, "--memory", f"{total}B", *flags)
    assert tight["feasible"]
    cost = policy(ask(*args, "--policy", name), name)["recompute_flops"]
    assert tight["cost_flops"] <= cost


# --- one model in several layouts -----------------------------------------------------------------


@pytest.fixture
def layouts(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    names = []
    for name, tp in (("one", 2), ("two", 4), ("three", 8)):
        path = tmp_path / f"{name}.yaml"
        layout = f"layout: {{tp: {tp}, sp: true}}"
        path.write_text(f"title: Run {name}\nmodel: {{preset: llama-3.1-70b}}\n{layout}\n")
        names.append(path.name)
    return names


TITLES = ("Run one", "Run two", "Run three")
FIGURES = ("_bytes", "_flops", "_seconds", "_ratio", "_bytes_per_layer")


def test_runs_of_one_model_are_told_apart_in_csv(layouts):
    rows = list(csv.reader(io.StringIO(answer([*layouts, "--policy", "none", "--format", "csv"]))))
    labels = [i for i, name in enumerate(rows[0]) if not name.endswith(FIGURES)]
    assert len({tuple(row[i] for i in labels) for row in rows[1:]}) == 3


@pytest.mark.parametrize("form", ["table", "csv", "markdown", "html"])
def test_titles_are_in_every_format(layouts, form):
    text = answer([*layouts, "--policy", "none", "--format", form])
    for title in TITLES:
        assert title in text, title


def test_titles_are_on_every_row_and_header(layouts):
    lines = answer([*layouts, "--policy", "none,full"]).splitlines()
    for title in TITLES:
        rows = [line for line in lines if line.startswith(f" {title} ")]
        assert len(rows) >= 1, title
        assert any(line.startswith(f"{title}:") for line in lines), title


@pytest.mark.parametrize(
    "command", [[], ["breakdown"], ["memory"]], ids=["compare", "breakdown", "memory"]
)
def test_a_title_heads_its_own_answer(layouts, command):
    lines = answer([*command, layouts[0]]).splitlines()
    assert any(line.startswith("Run one") for line in lines[:2])


def test_two_runs_of_memory_are_told_apart(layouts):
    text = answer(["memory", *layouts[:2]])
    assert "Run one" in text
    assert "Run two" in text


def test_layouts_without_titles_are_told_apart(layouts, tmp_path):
    for name in layouts:
        path = tmp_path / name
        path.write_text("\n".join(path.read_text().splitlines()[1:]))
    rows = list(csv.reader(io.StringIO(answer([*layouts, "--policy", "none", "--format", "csv"]))))
    labels = [i for i, name in enumerate(rows[0]) if not name.endswith(FIGURES)]
    assert len({tuple(row[i] for i in labels) for row in rows[1:]}) == 3
