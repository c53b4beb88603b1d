"""A row per thing: what is added to a table is known everywhere, what is forgotten is noticed.

Rows are added to a copy of the package, so that nothing but the edited file can have been touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from actcalc.cost.rates import Shares, entries_of, parse_overrides
from actcalc.errors import SpecError
from actcalc.io.megatron import read_arguments
from actcalc.io.presets import presets_root
from actcalc.io.runs import resolve
from actcalc.io.sources import source
from actcalc.io.yamlfile import read_mapping
from actcalc.layers.model import model_graph
from actcalc.render.formats import ENDINGS, FORMATS, Format
from actcalc.run.schedule.orders import BUILDERS
from actcalc.specs.kernels import KernelOptions
from actcalc.specs.optimizers import FRAMEWORKS, OPTIMIZERS, Optimizer, meant
from actcalc.specs.recipes import RECIPES, Recipe
from actcalc.specs.recompute import ALIASES, MODULES, Module
from actcalc.specs.schedules import SCHEDULES, PipelineSchedule
from actcalc.specs.workload import Workload
from tests.conftest import ROOT

pytestmark = pytest.mark.each

ROW_CLASSES = (Optimizer, Recipe, Module, PipelineSchedule, Format)
TABLES = {
    "optimizers": OPTIMIZERS,
    "recipes": RECIPES,
    "modules": MODULES,
    "schedules": SCHEDULES,
    "formats": FORMATS,
}


class House:
    """A copy of the package and its presets that may be edited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("actcalc", "presets"):
            kept = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, root / folder, ignore=kept)

    def edit(self, path: str, before: str, text: str) -> None:
        """Put ``text`` before the only place where ``before`` stands."""
        file = self.root / path
        whole = file.read_text(encoding="utf-8")
        assert whole.count(before) == 1, (path, before)
        file.write_text(whole.replace(before, text + before), encoding="utf-8")

    def run(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``actcalc`` with ``arguments``, out of the copy."""
        return subprocess.run(
            [sys.executable, "-m", "actcalc", *map(str, arguments)],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=check,
        )

    def json(self, *arguments: object) -> dict:
        """The answer of a command as JSON."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def shown(self, *arguments: object) -> str:
        """The answer of a command with its blanks merged."""
        return " ".join(self.run(*arguments).stdout.split())


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# --- what is forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROW_CLASSES, ids=lambda row: row.__name__)
def test_a_forgotten_column_is_an_error(row):
    """A row without one, or with one too many, is a TypeError when the table is imported."""
    every = dict.fromkeys(row.columns())
    assert row(**every)
    for name in every:
        with pytest.raises(TypeError, match=name):
            row(**{key: value for key, value in every.items() if key != name})
    with pytest.raises(TypeError, match="colour"):
        row(**every, colour="red")


@pytest.mark.parametrize("table", TABLES)
def test_rows_stand_under_their_own_names(table):
    rows = TABLES[table]
    assert [row.name for row in rows.values()] == list(rows)
    if table != "formats":
        assert all(row.source for row in rows.values())


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("specs/optimizers.py", OPTIMIZERS),
        ("specs/recipes.py", RECIPES),
        ("specs/recompute.py", MODULES),
        ("specs/schedules.py", SCHEDULES),
    ],
)
def test_no_row_hides_another(path, table):
    """Two rows of one name would be one row."""
    text = (ROOT / "actcalc" / path).read_text(encoding="utf-8")
    assert re.findall(r'^        name="([^"]+)"', text, re.MULTILINE) == list(table)


def test_no_name_means_two_things():
    for column in FRAMEWORKS:
        names = [name.lower() for row in OPTIMIZERS.values() for name in getattr(row, column)]
        assert len(names) == len(set(names)), column
    megatron = [row.megatron for row in MODULES.values() if row.megatron]
    assert len(megatron) == len(set(megatron))
    assert not set(ALIASES) & set(MODULES)
    assert len(ENDINGS) == sum(len(row.endings) for row in FORMATS.values())


def test_every_column_of_an_optimizer_is_consistent():
    for row in OPTIMIZERS.values():
        assert row.updates or not row.moments
        assert row.matrix_moments == row.moments or row.newton_schulz
        assert not row.eight_bit or OPTIMIZERS[row.eight_bit].kept == "8-bit"
        assert row.passes or row.kept == "8-bit" or not row.updates


def test_every_optimizer_is_a_choice_with_states_of_its_own(cli):
    """Typing a name into a list of choices alone is impossible: choices are the rows."""
    base = ("memory", "gpt2", "--framework", "megatron", "--json")
    schema = cli("schema", "training").json["properties"]["optimizer"]["enum"]
    assert schema == list(OPTIMIZERS)
    help_text = " ".join(cli("memory", "--help").out.split())
    assert ", ".join(OPTIMIZERS) + "." in help_text
    for name, row in OPTIMIZERS.items():
        recipe = cli(*base, "--optimizer", name).json["recipe"]
        assert bool(recipe["moments"]) is bool(row.moments), name


def test_recipes_are_choices(cli):
    enum = cli("schema", "training").json["properties"]["recipe"]["enum"]
    assert enum == ["auto", *(name for name, row in RECIPES.items() if row.choosable)]
    for name in enum[1:]:
        found = cli("memory", "gpt2", "--framework", "megatron", "--recipe", name, "--json").json
        shown = {key: value for key, value in found["recipe"].items() if key != "moments"}
        assert shown == RECIPES[name].figures()


def test_schedules_are_choices_and_have_an_order(cli):
    assert list(BUILDERS) == list(SCHEDULES)
    schema = cli("schema", "layout").json["properties"]["schedule"]
    assert schema["anyOf"][0]["enum"] == list(SCHEDULES)
    assert ", ".join(SCHEDULES) in " ".join(cli("memory", "--help").out.split())
    explained = cli("explain", "bubble", "gpt3-175b", "--pp", 4).out
    for name in SCHEDULES:
        assert re.search(rf"^ *{name}(, v = 2)?(, m = [0-9]+)?: ", explained, re.MULTILINE), name


def test_every_module_is_a_tag_of_some_layer():
    """A module no layer has an op of would be a policy that does nothing."""
    found = set()
    for model, framework in (
        ("gpt3-175b", "megatron-local"),
        ("deepseek-v3", "megatron"),
        ("mixtral-8x7b", "megatron"),
    ):
        run = resolve(source(model), framework=framework)
        graph = model_graph(run.model, run.layout, run.workload, run.framework)
        found |= {tag for kind in graph.kinds for op in kind.graph.ops for tag in op.modules}
    assert {row.tag for row in MODULES.values()} <= found


def test_every_ending_is_written(cli, tmp_path):
    refused = cli("gpt2", "-o", tmp_path / "answer.pdf")
    assert refused.code == 2
    assert ".svg" in refused.err
    assert cli("gpt2", "--format", "pdf").code == 2
    for ending in ENDINGS:
        assert cli("gpt2", "-o", tmp_path / f"answer{ending}").code == 0
        assert (tmp_path / f"answer{ending}").stat().st_size > 100


# --- shares of a device --------------------------------------------------------------------------


def test_every_share_has_a_default_with_its_source():
    default = read_mapping(presets_root() / "efficiency" / "default.yaml")
    assert list(default)[1:] == [field.name for field in fields(Shares)]
    assert all(entry["source"] for key, entry in default.items() if key != "title")


def test_an_unknown_share_is_refused(tmp_path):
    text = "title: x\natention_forward: {value: 0.5, source: nobody}\n"
    path = tmp_path / "shares.yaml"
    path.write_text(text)
    read = read_mapping(path)
    for ask in (lambda: entries_of(read, path.name), lambda: parse_overrides([str(path)])):
        with pytest.raises(SpecError) as caught:
            ask()
        assert "atention_forward" in str(caught.value)
        assert "attention_forward" in caught.value.hint


# --- fp8 and the router are one fact each --------------------------------------------------------


def test_fp8_is_asked_in_one_way(cli):
    base = ("compare", "llama-3-8b", "--framework", "megatron", "--device", "h100-80gb", "--json")
    one, other = cli(*base, "--precision", "fp8"), cli(*base, "--set", "fp8=true")
    assert one.json == other.json
    assert one.json["policies"][0] != cli(*base).json["policies"][0]
    for precision in ("fp16", "fp32"):
        plain = cli(*base, "--precision", precision).json["policies"][0]
        fp8 = cli(*base, "--precision", precision, "--set", "fp8=true").json["policies"][0]
        assert fp8["step_seconds"] < plain["step_seconds"]
    assert Workload(fp8=True) == Workload(precision="fp8") == Workload(precision="fp8", fp8=True)
    assert Workload(precision="fp32", fp8=True).arithmetic == "fp32+fp8"


@pytest.mark.parametrize("before", [False, True])
def test_megatrons_router_is_a_fact_of_the_model(before):
    """A softmax over all experts, whose weights stay as they are, or one over those chosen."""
    options = {
        "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64,
        "micro-batch-size": 1, "vocab-size": 128, "bf16": True, "world-size": 1,
        "num-experts": 8, "moe-router-topk": 2, "moe-router-pre-softmax": before,
    }  # fmt: skip
    moe = read_arguments(options).model["moe"]
    assert (moe["router"], moe["normalize_topk"]) == (
        ("softmax", False) if before else ("softmax_topk", True)
    )
    assert "moe_router_pre_softmax" not in KernelOptions.field_names()


def test_states_that_do_not_exist_have_no_bytes(cli):
    refused = cli("memory", "gpt2", "--optimizer", "sgd", "--set", "moments_bytes=4")
    assert refused.code == 2
    assert "sgd keeps no moments" in refused.err


def test_a_comparison_names_its_schedule(cli):
    base = ("gpt3-175b", "--tp", 8, "--pp", 4)
    assert "(zb-v)" in cli(*base, "--schedule", "zb-v").out
    assert "(1F1B)" in cli(*base).out


def test_an_optimizer_may_be_named_as_frameworks_do(cli):
    assert meant("adamw_bnb_8bit") == "adam8bit"
    assert meant("paged_nothing") == ""
    refused = cli("memory", "gpt2", "--optimizer", "AdamW8bit")
    assert refused.code == 2
    assert "adam8bit" in refused.err


# --- what is added -------------------------------------------------------------------------------

ADOPT = """    Optimizer(
        name="adopt", title="made up", updates=True,
        moments=3, matrix_moments=3, kept="recipe",
        fused=True, passes=9, newton_schulz=0, eight_bit="adam8bit",
        megatron=("adopt",), torchtitan=(), deepspeed=(),
        transformers=("adopt_torch",), torch=(), bitsandbytes=(),
        source="nobody",
    ),
"""


def test_an_optimizer_is_a_row(house, tmp_path):
    house.edit("actcalc/specs/optimizers.py", '    Optimizer(\n        name="none"', ADOPT)
    found = house.json("memory", "llama-3-8b", "--framework", "megatron", "--optimizer", "adopt")
    assert found["recipe"]["moments"] == 12
    weights = found["stages"][0]["weights_bytes"]
    assert found["stages"][0]["optimizer_bytes"] == weights // 2 * (4 + 3 * 4)
    assert "adopt," in house.shown("memory", "--help")
    enum = house.json("schema", "training")["properties"]["optimizer"]["enum"]
    assert "adopt" in enum
    assert "adopt: made up" in house.run("schema", "run").stdout
    timed = [
        house.json("mfu", "llama-3-8b", "--device", "h200", "--optimizer", name)["prediction"]
        for name in ("adamw", "adopt")
    ]
    assert timed[1]["optimizer_seconds"] > timed[0]["optimizer_seconds"]
    options = tmp_path / "args.yaml"
    options.write_text(
        "num-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\nseq-length: 64\n"
        "max-position-embeddings: 64\nmicro-batch-size: 1\nvocab-size: 128\nbf16: true\n"
        "tensor-model-parallel-size: 1\nworld-size: 1\noptimizer: adopt\n"
    )
    read = house.json("memory", options, "--from", "megatron")
    assert read["training"]["optimizer"] == "adopt"
    hint = house.run("memory", "gpt2", "--optimizer", "adopt_torch", check=False)
    assert "adopt here" in hint.stderr


def test_an_optimizer_with_a_forgotten_column_is_no_optimizer(house):
    row = ADOPT.replace("moments=3, matrix_moments=3, ", "matrix_moments=3, ")
    house.edit("actcalc/specs/optimizers.py", '    Optimizer(\n        name="none"', row)
    failed = house.run("memory", "gpt2", check=False)
    assert failed.returncode != 0
    assert "moments" in failed.stderr


def test_a_recompute_module_is_a_row_and_its_tag(house):
    house.edit(
        "actcalc/specs/recompute.py",
        '    Module(\n        name="mla_up_proj"',
        '    Module(\n        name="out_proj", aliases=("out",), tag="out_proj",\n'
        '        discards_output=False, about="made up", megatron="o_proj", source="nobody",\n'
        "    ),\n",
    )
    layers = house.root / "actcalc" / "layers" / "megatron" / "attention.py"
    text = layers.read_text(encoding="utf-8")
    before, op, rest = text.partition('"out_proj"')
    tagged = rest.replace("modules=MODULE,", 'modules=(*MODULE, "out_proj"),', 1)
    layers.write_text(before + op + tagged, encoding="utf-8")
    base = ("gpt3-175b", "--framework", "megatron")
    policies = {row["policy"]: row for row in house.json(*base)["policies"]}
    assert 0 < policies["out_proj"]["recompute_flops"] < policies["attention"]["recompute_flops"]
    alone = house.json(*base, "--policy", "out")["policies"][0]
    assert alone["recompute_flops"] == policies["out_proj"]["recompute_flops"]
    assert "out_proj" in house.shown("compare", "--help")
    emitted = house.run("plan", *base, "--memory", "10TB", "--emit", "megatron").stdout
    assert "no recompute flags" in emitted


def test_a_schedule_is_a_row_and_an_order(house):
    house.edit(
        "actcalc/specs/schedules.py",
        '    PipelineSchedule(\n        name="zb-h1"',
        '    PipelineSchedule(\n        name="backwards", title="made up",\n'
        '        chunks=1, way="straight", grouped=False, splits_backward=False,\n'
        '        phased=True, depth=2, least=3, instead="gpipe", source="nobody",\n    ),\n',
    )
    house.edit(
        "actcalc/run/schedule/orders.py", '    "zb-h1": _zb_h1,', '    "backwards": _gpipe,\n'
    )
    base = ("memory", "gpt3-175b", "--pp", 4, "--schedule", "backwards")
    found = house.json(*base)
    assert found["microbatches"] == 12
    assert found["stages"][0]["in_flight"] == 12
    assert "backwards" in house.shown("memory", "--help")
    few = house.run(*base, "--global-batch", 4, check=False)
    assert few.returncode == 2
    assert "3·pp = 12" in few.stderr
    assert "gpipe" in few.stderr


def test_an_output_format_is_a_row(house, tmp_path):
    house.edit(
        "actcalc/render/formats.py",
        "_ROWS = (",
        "def _titles(parts: Parts) -> bytes:\n"
        '    return b"\\x00" + "+".join(sheet.title for sheet in parts.sheets()).encode()\n\n\n',
    )
    house.edit(
        "actcalc/render/formats.py",
        '    Format(name="html"',
        '    Format(name="titles", endings=(".titles",), drawn=False, write=_titles,\n'
        "           brief=True, escape=ascii_text),\n",
    )
    path = tmp_path / "answer.titles"
    house.run("gpt2", "-o", path)
    assert path.read_bytes().startswith(b"\x00")
    assert house.run("gpt2", "--format", "titles").stdout == path.read_text(encoding="utf-8")
    assert "titles" in house.shown("compare", "--help")


def test_a_device_is_a_file(house):
    house.edit(
        "presets/devices/h100-80gb.yaml",
        (house.root / "presets/devices/h100-80gb.yaml").read_text(encoding="utf-8"),
        "",
    )
    text = (house.root / "presets/devices/h100-80gb.yaml").read_text(encoding="utf-8")
    plain = re.sub(r"^title:.*$", 'title: "Made up"', text, flags=re.MULTILINE)
    renamed = plain.replace("efficiency: h100\n", "")
    assert renamed != plain
    (house.root / "presets/devices/z100.yaml").write_text(renamed, encoding="utf-8")
    found = house.json("compare", "gpt2", "--device", "z100")
    assert found["device"]["name"] == "z100"
    assert "default shares" in " ".join(found["notes"])
    (house.root / "presets/devices/z100.yaml").write_text(plain, encoding="utf-8")
    again = house.json("compare", "gpt2", "--device", "z100")
    assert "default shares" not in " ".join(again["notes"])
