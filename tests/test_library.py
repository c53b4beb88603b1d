"""The library: every call answers what its command answers, typed, shown, and cheap to import."""

from __future__ import annotations

import csv
import inspect
import io
import json
import pickle
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel, ValidationError

import actcalc
from actcalc import (
    Layout,
    MissingExtraError,
    Model,
    SpecError,
    Workload,
    advise,
    breakdown,
    compare,
    explain,
    load_layer,
    load_model,
    measure,
    memory,
    mfu,
    plan,
    search,
)
from actcalc.api import keywords
from actcalc.cli.options import RunOptions
from actcalc.cli.schema import OUTPUTS, schema_of
from actcalc.cli.search import SearchRunOptions
from actcalc.cli.training import MemoryOptions, PlanTrainingOptions
from tests.agreement.asking import ask
from tests.conftest import ROOT

BLOCK = ROOT / "docs" / "examples" / "block.json"
CALLS = {
    "compare": (
        lambda: compare("gpt3-175b", tp=8, sp=True, policy="none,full"),
        "gpt3-175b --tp 8 --sp --policy none,full",
    ),
    "compare with a device": (
        lambda: compare("gpt2", device="a100-80gb", efficiency={"gemm": 0.5}, policy=["none"]),
        "gpt2 --device a100-80gb --efficiency gemm=0.5 --policy none",
    ),
    "compare-layer": (lambda: compare(load_layer(BLOCK), layers=4), f"{BLOCK} --layers 4"),
    "breakdown": (
        lambda: breakdown("llama-3-8b", policy="attention", layers=3),
        "breakdown llama-3-8b --policy attention --layers 3",
    ),
    "memory": (
        lambda: memory("llama-3-8b", device="h100-80gb", lora_rank=8, max="micro-batch"),
        "memory llama-3-8b --device h100-80gb --lora-rank 8 --max micro-batch",
    ),
    "memory in a pipeline": (
        lambda: memory("gpt3-175b", tp=8, sp=True, pp=2, layers_per_stage=[40, 56], timeline=True),
        "memory gpt3-175b --tp 8 --sp --pp 2 --layers-per-stage 40,56 --timeline",
    ),
    "mfu": (
        lambda: mfu("gpt-22b", tp=8, device="a100-80gb", step_time=1.4, gpus=8, tokens=3e11),
        "mfu gpt-22b --tp 8 --device a100-80gb --step-time 1.4 --gpus 8 --tokens 3e11",
    ),
    "plan": (
        lambda: plan("gpt2", memory="8GB", set={"dropout": False}, emit="megatron"),
        "plan gpt2 --memory 8GB --set dropout=false --emit megatron --json",
    ),
    "plan-layer": (lambda: plan(load_layer(BLOCK), memory="900MB"), f"plan {BLOCK} --memory 900MB"),
    "advise": (
        lambda: advise("llama-3-8b", device="rtx-4090", qlora=True),
        "advise llama-3-8b --device rtx-4090 --qlora",
    ),
    "search": (
        lambda: search("gpt2", gpus=8, device="a100-80gb", global_batch=64, tp="..2", top=3),
        "search gpt2 --gpus 8 --device a100-80gb --global-batch 64 --tp ..2 --top 3",
    ),
    "explain": (lambda: explain("34", "gpt2", seq=512), "explain 34 gpt2 --seq 512"),
    "explain overhead": (lambda: explain("39 %"), "explain overhead"),
    "terms": (explain, "explain"),
}  # fmt: skip
TYPED = {
    compare: (RunOptions,), breakdown: (RunOptions,), explain: (RunOptions,),
    measure: (RunOptions,), memory: (RunOptions, MemoryOptions), mfu: (RunOptions, MemoryOptions),
    plan: (RunOptions, PlanTrainingOptions), advise: (RunOptions, MemoryOptions),
    search: (SearchRunOptions, MemoryOptions),
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return {name: call() for name, (call, _) in CALLS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_answers_what_its_command_prints(name, results):
    printed = ask(*CALLS[name][1].split())
    found = json.loads(json.dumps(results[name].to_dict()))
    assert json.loads(results[name].model_dump_json()) == found
    for one in (printed, found) if name == "advise" else ():
        for part in ("combination", "planned"):  # repeat the words of the command line, if any
            (one[part] or {}).pop("command", None)
        for other in one["alternatives"]:
            other.pop("command")
    assert found == printed


@pytest.mark.parametrize("name", CALLS)
def test_a_result_is_shown_as_its_table(name, results, cli):
    line = CALLS[name][1].removesuffix(" --json").replace(" --emit megatron", "")
    printed = cli(*line.split(), columns=110).out
    shown = repr(results[name])
    assert " ".join(shown.split()[:24]) == " ".join(printed.split()[:24])
    html = results[name]._repr_html_()
    assert html.count("<table>") == html.count("</table>") > 0
    assert html.count("<td") > 3
    assert "\x1b" not in shown + html


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"search"}))  # its CSV lists all that fits
def test_a_data_frame_is_the_main_table_of_csv(name, results):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    line = CALLS[name][1].removesuffix(" --json").replace(" --emit megatron", "")
    from tests.agreement.asking import answer

    text = answer([*line.split(), "--format", "csv"]).split("\n\n")[0]
    keys, *rows = list(csv.reader(io.StringIO(text)))
    frame, other = results[name].to_pandas(), results[name].to_polars()
    assert isinstance(frame, pandas.DataFrame)
    assert isinstance(other, polars.DataFrame)
    assert list(frame.columns) == other.columns == keys
    assert frame.shape == other.shape == (len(rows), len(keys))
    assert [str(value) for value in frame.iloc[:, 0]] == [row[0] for row in rows]


def test_a_data_frame_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingExtraError, match="polars") as caught:
        explain("units").to_polars()
    assert "[polars]'" in caught.value.hint


# --- keyword arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "bundles"),
    [
        (keywords.RunKeywords, [RunOptions]),
        (keywords.MemoryKeywords, [RunOptions, MemoryOptions]),
        (keywords.PlanKeywords, [RunOptions, PlanTrainingOptions]),
        (keywords.SearchKeywords, [SearchRunOptions, MemoryOptions]),
    ],
)
def test_keywords_are_the_flags(typed, bundles):
    assert set(get_type_hints(typed)) == {f.name for each in bundles for f in fields(each)}


@pytest.mark.parametrize("call", TYPED, ids=lambda call: call.__name__)
def test_every_argument_is_documented(call):
    signature = inspect.signature(call)
    named = {f.name for each in TYPED[call] for f in fields(each)}
    assert named <= set(signature.parameters)
    for name, parameter in signature.parameters.items():
        assert f"    {name}: " in call.__doc__
        assert parameter.annotation is not inspect.Parameter.empty
    assert signature.return_annotation is not inspect.Signature.empty


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="'dievice'; did you mean 'device'"):
        memory("gpt2", dievice="h200")
    with pytest.raises(SpecError, match="several profiles"):
        compare("gpt2", framework="megatron,transformers")
    with pytest.raises(SpecError, match="measured layer"):
        compare(str(BLOCK))


def test_an_error_shows_its_hint():
    with pytest.raises(SpecError, match="tp 7") as caught:
        memory("gpt3-175b", tp=7)
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


# --- models, layouts, workloads -------------------------------------------------------------------


def test_a_workload_overrides_only_what_it_names():
    plain = memory("llama-3-8b")
    shorter = memory("llama-3-8b", workload=Workload(seq=512))
    assert shorter.workload == {**plain.workload, "seq": 512}
    assert memory("llama-3-8b", Layout(tp=2), tp=4, sp=True).layout["tp"] == 4
    eager = compare("llama-3-8b", workload=Workload(attention="eager"))
    assert eager.workload["attention"] == "eager"


def test_a_run_is_a_mapping_a_file_or_files(tmp_path):
    run = {"model": "gpt2", "layout": {"dp": 2}, "workload": {"seq": 256}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert memory(run).to_dict() == memory(path).to_dict() == memory([str(path)]).to_dict()
    with pytest.raises(SpecError, match="layuot"):
        memory({"model": "gpt2", "layuot": {}})


def test_a_source_can_be_used_again():
    source = load_model("gpt2")
    assert compare(source).to_dict() == compare("gpt2").to_dict()


def test_a_function_is_measured():
    pytest.importorskip("torch", reason="needs actcalc[torch]")

    def factory():
        import torch

        return torch.nn.Linear(8, 4), torch.ones(2, 8)

    assert measure(module=factory).measured_bytes == 2 * 8 * 4


# --- specs are what users of Pydantic expect ------------------------------------------------------


def test_specs_are_built_validated_and_dumped():
    model = Model.model_validate({"layers": 2, "hidden": 64, "heads": 4, "vocab": 100})
    assert Model.model_validate_json(model.model_dump_json()) == model
    assert Model.model_validate(model) is model
    assert model.model_fields_set == {"layers", "hidden", "heads", "vocab"}
    assert model.model_dump(exclude_unset=True)["hidden"] == 64
    assert model.model_copy(update={"layers": 3}).model_fields_set == model.model_fields_set
    assert Model.model_json_schema()["additionalProperties"] is False
    assert pickle.loads(pickle.dumps(model)) == model
    assert pickle.loads(pickle.dumps(model)).model_fields_set == model.model_fields_set


def test_specs_say_which_error_they_raise():
    """Pydantic's for what a field may not be, our own for values that contradict each other."""
    for wrong in ({"tp": 0}, {"tp": "two"}, {"tq": 1}):
        with pytest.raises(ValidationError):
            Layout.model_validate(wrong)
    with pytest.raises(SpecError):
        Model.model_validate({"layers": 2, "hidden": 63, "heads": 4, "vocab": 9})
    with pytest.raises(SpecError):
        Layout(tp=0)


def test_specs_are_fields_of_models_of_ones_own():
    class Job(BaseModel):
        layout: Layout
        workload: Workload = Workload()

    job = Job.model_validate({"layout": {"tp": 2, "sp": True}})
    assert job.layout == Layout(tp=2, sp=True)
    assert job.layout.model_dump(exclude_unset=True)["tp"] == 2


# --- the package ----------------------------------------------------------------------------------


def test_every_public_name_is_there():
    assert set(actcalc.__all__) == {*actcalc._HOMES, "__version__"}
    for name in actcalc.__all__:
        assert getattr(actcalc, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = actcalc.nothing


def test_calls_keep_their_names_beside_packages_of_the_same():
    """`actcalc.memory` is a call and a package, whichever is imported first."""
    code = (
        "import actcalc.memory.stage, actcalc.plan.planner, actcalc.measure\n"
        "from actcalc import memory, plan, measure\n"
        "import actcalc; assert actcalc.memory is memory and callable(memory), memory\n"
        "assert callable(plan) and callable(measure)\n"
        "from actcalc.memory.stage import StageMemory\n"
        "memory('gpt2')\n"
        "from actcalc import memory as again; assert again is memory\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_loads_next_to_nothing():
    code = "import sys, actcalc; print(sorted(m for m in sys.modules if m.startswith('actcalc')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['actcalc']"


def test_every_answer_can_be_drawn():
    from actcalc.render.shown import _DRAWN

    undrawn = {"preset", "presets"}  # of the command line alone
    schemas = {schema_of(name)["properties"]["schema"]["const"] for name in OUTPUTS}
    assert {f"actcalc/{name}/1" for name in undrawn} | set(_DRAWN) == schemas


def test_names_that_moved_are_still_found():
    """Scripts of 0.2 took them from specs.run."""
    from actcalc.io import runs
    from actcalc.specs import run

    for name in ("load_run", "resolve", "source", "Source"):
        assert getattr(run, name) is getattr(runs, name)
    with pytest.raises(AttributeError, match="has no attribute 'loadrun'"):
        run.loadrun  # noqa: B018
