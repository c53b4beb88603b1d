"""``advise``: each remedy is the changed run itself, and no combination that fits is cheaper."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import fields
from functools import cache

import pytest

from actcalc.answers.advise import advise_run
from actcalc.answers.command_words import replaced
from actcalc.cli.options import RunOptions
from actcalc.cli.training import MemoryOptions
from actcalc.cost.offload import waits
from actcalc.cost.roofline import roofline_of
from actcalc.io.runs import load_run
from actcalc.plan.advice import ALIKE, Advice
from actcalc.plan.changes import _FLAGS, words
from actcalc.plan.cheapest import POLICY, Axes, Cheapest, merged
from actcalc.plan.offload import Transfer
from actcalc.plan.remedies import REMEDIES
from actcalc.plan.trials import Trials
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from tests.agreement.asking import ask
from tests.conftest import ROOT
from tests.sweeps import sampled

RUNS = {
    "one GPU": ("llama-3-8b", {"device": "rtx-4090", "workload": {"seq": 2048, "micro_batch": 4}}),
    "adapters": (
        "llama-3-8b",
        {"device": "rtx-4090", "training": {"lora_rank": 16},
         "workload": {"seq": 4096, "micro_batch": 2}},
    ),
    "a node of torchtitan": (
        "llama-3-8b",
        {"device": "a100-40gb", "framework": "torchtitan", "layout": {"dp": 8, "zero": 2}},
    ),
    "V100 without flash": (
        "gpt2-large",
        {"device": "v100-32gb", "framework": "megatron-local",
         "workload": {"precision": "fp16", "micro_batch": 8, "attention": "eager"}},
    ),
    "a pipeline": (
        "llama-2-13b",
        {"device": "a100-40gb", "framework": "megatron",
         "layout": {"tp": 2, "sp": False, "pp": 2, "vpp": 2, "dp": 2},
         "workload": {"attention": "eager", "global_batch": 16}},
    ),
    "experts": (
        "mixtral-8x7b",
        {"device": "h100-80gb", "framework": "megatron", "layout": {"dp": 16, "ep": 2}},
    ),
    "an unfused step": (
        "llama-3.2-1b",
        {"device": "rtx-4090", "layout": {"dp": 2}, "training": {"fused_optimizer": False},
         "workload": {"attention": "eager", "seq": 256, "precision": "fp32"}},
    ),
}  # fmt: skip

USUAL = {*RUNS} - {"a pipeline", "experts"}
"""Runs that every run of the tests has."""


@cache
def run_of(name: str):
    preset, changes = RUNS[name]
    return load_run(preset, **changes)


@cache
def advice(name: str) -> Advice:
    run = run_of(name)
    return Advice(Trials(run), run.budget_bytes)


@pytest.mark.parametrize("name", sampled(RUNS, USUAL))
def test_a_remedy_is_the_run_that_its_flags_make(name, cli):
    """``memory`` of the flags says the bytes that the remedy says, and whether they fit."""
    given = [*_words(name)]
    found = advise_run(run_of(name), given=given)
    assert found.remedies
    for one in found.remedies:
        if one.total_bytes is None:
            continue
        done = cli("memory", *replaced(given, shlex.split(one.change)), "--json").json
        total = max(stage["total_bytes"] for stage in done["stages"])
        assert (total, done["fits"]) == (one.total_bytes, one.enough), one.change
        assert one.freed_bytes == found.total_bytes - total


@pytest.mark.parametrize("name", sampled(RUNS, USUAL))
def test_the_command_of_a_combination_fits(name, cli):
    found = advise_run(run_of(name), given=_words(name))
    every = [found.combination, *found.alternatives, found.more_gpus]
    for one in filter(None, every):
        program, *command = shlex.split(one.command)
        assert program == "actcalc"
        done = cli(*command, "--json").json
        assert done["fits"] is True
        assert done["peak_bytes"] == one.peak_bytes
        assert done["layout"] == json.loads(json.dumps(one.layout))
        assert done["policy"] == one.policy


def _words(name: str) -> list[str]:
    """The run on a command line."""
    preset, changes = RUNS[name]
    change = {
        f"{section}.{key}": value
        for section in ("layout", "workload", "training")
        for key, value in changes.get(section, {}).items()
    }
    found = [preset, *words(change), "--device", changes["device"]]
    return [*found, "--framework", changes["framework"]] if "framework" in changes else found


# --- the cheapest ---------------------------------------------------------------------------------

FEW = ("one GPU", "adapters", "V100 without flash", "an unfused step")
"""Runs whose combinations are few enough to try every one of them."""


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4, 0.25])
@pytest.mark.parametrize("name", FEW)
def test_no_combination_that_fits_is_cheaper(name, share):
    """Every combination of options, at several budgets, against the branch and bound."""
    trials = advice(name).trials
    budget = int(share * advice(name).need.total_bytes)
    axes = Axes(trials, budget)
    remedies = [one for one in advice(name).remedies if one.keeps == "training"]
    search = Cheapest(axes, remedies, {})
    policies: list = [{}]
    for remedy in remedies:
        options = axes.options(remedy) if remedy.axis == POLICY else ()
        policies += options[:: max(1, len(options) // 3)] + options[-1:]
    best = float("inf")
    for parts in itertools.product(*search.rows, policies):
        change = merged(parts)
        if axes.size(change) <= budget:
            best = min(best, trials.seconds(change) or float("inf"))
    parts = search.parts()
    if parts is None:
        assert best == float("inf")
        return
    change = merged(parts)
    assert axes.size(change) <= budget
    assert trials.seconds(change) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", sampled(RUNS, USUAL))
def test_a_combination_needs_each_of_its_parts(name):
    """Without any one it does not fit, or is slower than the run is and than all of them are."""
    mine = advice(name)
    for one in mine.combinations:
        assert one.need.total_bytes <= mine.budget
        most = max(one.seconds or 0.0, mine.seconds or 0.0) * (1 + ALIKE)
        for part in one.parts:
            rest = merged([each for each in one.parts if each is not part])
            need, seconds = mine.trials.need(rest), mine.trials.seconds(rest)
            fits = need is not None and need.total_bytes <= mine.budget
            assert not fits or (seconds or 0.0) > most


def test_it_keeps_the_training_where_it_can():
    for name in RUNS:
        kinds = [one.keeps for one in advice(name).combinations]
        assert kinds[:1] in ([], ["training"]) or "training" not in kinds


# --- rows -----------------------------------------------------------------------------------------


def test_every_remedy_is_some_runs():
    shown = {one.remedy.name for name in RUNS for one in advice(name).singles}
    outside = {remedy.name for remedy in REMEDIES if remedy.environment}
    quiet = {
        "4-bit base", "QLoRA", "LoRA", "recompute op by op", "step in backward",
        "context parallelism",
    }  # fmt: skip
    assert {remedy.name for remedy in REMEDIES} - shown - outside <= quiet
    assert len({remedy.name for remedy in REMEDIES}) == len(REMEDIES)


def test_flags_are_those_of_the_commands():
    options = {field.name for bundle in (RunOptions, MemoryOptions) for field in fields(bundle)}
    assert {path.partition(".")[2] for path in _FLAGS} <= options


def test_words_given_anew_replace_old_ones():
    given = ["gpt2", "--tp", "2", "--sp", "--set", "seq=8", "--set", "ffn=4", "--policy", "full"]
    made = ["--no-sp", "--policy", "none", "--set", "seq=9"]
    assert replaced(given, made) == ["gpt2", "--tp", "2", "--set", "ffn=4", *made]


# --- the answer -----------------------------------------------------------------------------------


def test_the_contract_of_its_json(cli):
    done = cli("advise", "llama-3-8b", "--device", "rtx-4090", "--json")
    found = done.json
    assert done.code == 1
    assert found["schema"] == "actcalc/advise/1"
    assert {"fits", "peak_bytes", "device_bytes", "remedies", "combination"} <= found.keys()
    for one in found["remedies"]:
        assert {"change", "freed_bytes", "slowdown_ratio", "enough"} <= one.keys()
    best = found["combination"]
    assert {"changes", "command", "peak_bytes", "slowdown_ratio"} <= best.keys()
    assert best["total_bytes"] <= found["budget_bytes"] < found["device_bytes"]


def test_what_spare_memory_buys_fits_and_no_more_does(cli):
    words = ("llama-3-8b", "--device", "h100-80gb", "--lora-rank", "16", "--seq", "2048",
             "--policy", "full")  # fmt: skip
    done = cli("advise", *words, "--json")
    assert done.code == 0
    bought = {one["name"]: one for one in done.json["spare"]}
    assert set(bought) == {"less recomputation", "larger micro-batch", "longer sequence"}
    assert done.json["combination"] is None
    assert bought["less recomputation"]["gain_ratio"] > 0.2
    for one in bought.values():
        with_it = replaced(words, shlex.split(one["change"]))
        found = cli("memory", *with_it, "--json").json
        assert found["fits"]
        assert found["stages"][0]["total_bytes"] == one["total_bytes"]
    flag, value = bought["larger micro-batch"]["change"].split()
    assert not cli("memory", *words, flag, int(value) + 1, "--json").json["fits"]


def test_without_a_time_the_order_is_the_usual_one(cli):
    """A T4 has no bf16: nothing is timed, everything else is said."""
    found = cli("advise", "gpt2", "--micro-batch", 16, "--device", "t4", "--json").json
    assert found["time"] is None
    assert {one["slowdown_ratio"] for one in found["remedies"]} == {None}
    names = [one["name"] for one in found["remedies"] if one["keeps"] == "training"]
    order = [remedy.name for remedy in REMEDIES if remedy.name in names]
    assert [name for name in names if name != "expandable segments"] == [
        name for name in order if name != "expandable segments"
    ]
    assert found["combination"]["total_bytes"] <= found["budget_bytes"]


def test_flash_attention_is_not_offered_where_the_gpu_does_not_run_it(cli):
    base = ("advise", "gpt2-large", "--framework", "megatron", "--attention", "eager", "--json",
            "--precision", "fp16")  # fmt: skip

    def flags(device):
        return [one["change"] for one in cli(*base, "--device", device).json["remedies"]]

    assert "--attention flash" in flags("a100-40gb")
    assert "--attention flash" not in flags("v100-32gb")


def test_expandable_segments_are_what_the_replay_says(cli):
    """They are a remedy where the allocator then takes less, and enough where that fits."""
    run = ("llama-3-8b", "--device", "a100-80gb", "--seq", 8192, "--policy", "full",
           "--micro-batch", 2)  # fmt: skip
    found = cli("advise", *run, "--json").json
    most, least = found["reserved_bytes"], found["reserved_expandable_bytes"]
    rows = [one for one in found["remedies"] if one["name"] == "expandable segments"]
    assert bool(rows) is (most - least > 0.002 * most)
    for one in rows:
        assert one["freed_bytes"] == most - least
        assert one["total_bytes"] is None
        assert one["enough"] is (least + found["total_bytes"] - found["peak_bytes"]
                                 <= found["device_bytes"])  # fmt: skip


def test_the_range_is_that_of_published_peaks(cli):
    found = cli("advise", "llama-3-8b", "--device", "a100-80gb", "--json").json
    known = found["memory_range"]
    outside = found["total_bytes"] - found["peak_bytes"]
    assert known["metric"] == "reserved"
    assert known["predicted_bytes"] == found["reserved_bytes"] + outside
    assert known["low_bytes"] <= known["predicted_bytes"] <= known["high_bytes"]
    assert known["judged_runs"] >= 10


def test_a_whole_training_run_is_priced(cli):
    words = ("advise", "llama-3-8b", "--device", "h100-80gb", "--framework", "torchtitan",
             "--gpus", 64, "--zero", 3, "--tokens", "1T", "--price-per-gpu-hour", 2)  # fmt: skip
    found = cli(*words, "--json").json
    whole, time = found["training_run"], found["time"]
    assert found["gpus"] == 64
    assert whole["price"] == pytest.approx(2 * whole["gpu_hours"])
    assert whole["days"] == pytest.approx(1e12 / time["tokens_per_day"], rel=1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpt2",), "there is none"),
        (("gpt2", "--device", "a100-80gb", "--framework", "megatron,transformers"), "one framew"),
        (("gpt2", "--device", "a100-80gb", "--price-per-gpu-hour", 2), "--tokens"),
        (("gpt2", "--device", "a100-80gb", "--price-per-gpu-hour", -2, "--tokens", "1B"), "above"),
        (("gpt2", "--device", "a100-80gb", "--tp", 2, "--gpus", 3), "the layout takes 2"),
        (("gpt2", "--device", "t4", "--tokens", "1B"), "none can be derived"),
    ],
)
def test_what_makes_no_sense_is_refused(cli, args, message):
    done = cli("advise", *args)
    assert done.code == 2
    assert message in done.err


def test_a_changed_run_is_evaluated_once():
    trials = Trials(run_of("one GPU"))
    mine = Advice(trials, run_of("one GPU").budget_bytes)
    assert mine.singles
    assert mine.combinations
    before = trials.evaluated
    again = Advice(trials, run_of("one GPU").budget_bytes)
    assert len(again.singles) == len(mine.singles)
    assert again.combination is not None
    assert trials.evaluated == before


def test_the_page_has_every_remedy_in_its_order():
    text = (ROOT / "docs" / "advise.md").read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [remedy.name for remedy in REMEDIES]


# --- what maintainers of fine-tuning libraries say ------------------------------------------------

ON_4090 = ("llama-3-8b", "--device", "rtx-4090")


def test_all_weights_of_8b_on_24_gb_is_adapters_or_more_gpus(cli):
    """TRL, unsloth: 16 GB of weights, as much of gradients and twice that of Adam do not fit; train
    adapters with checkpointing and a fused loss, or shard over GPUs, or offload."""
    found = cli("advise", *ON_4090, "--json").json
    best = found["combination"]
    assert best["keeps"] == "adapters"
    assert set(best["changes"]) == {"--loss fused", "--lora-rank 16", "--policy full"}
    assert set(best["launch_changes"]) == {
        "--gradient_checkpointing true", "--use_liger_kernel true", "--use_peft true",
        "--lora_r 16", "--lora_target_modules all-linear",
    }  # fmt: skip
    assert [one["keeps"] for one in found["alternatives"]] == ["host"]
    assert found["more_gpus"]["layout"]["zero"] == 3
    names = [one["name"] for one in found["remedies"]]
    assert names.index("LoRA") < names.index("QLoRA") < names.index("full recompute")
    assert names.index("full recompute") < names.index("weights on the host")


def test_lora_of_8b_on_24_gb_is_checkpointing(cli):
    """TRL, unsloth: gradient checkpointing first, a fused loss, then a base in 4 bits."""
    found = cli("advise", *ON_4090, "--lora-rank", 16, "--json").json
    best = found["combination"]
    assert best["keeps"] == "training"
    assert set(best["launch_changes"]) == {
        "--gradient_checkpointing true", "--use_liger_kernel true",
    }  # fmt: skip
    assert {"fused loss", "4-bit base", "full recompute"} <= {
        one["name"] for one in found["remedies"]
    }


def test_qlora_of_8b_on_24_gb_is_checkpointing_alone(cli):
    words = ("--lora-rank", 16, "--set", "base_bits=4")
    found = cli("advise", *ON_4090, *words, "--json").json
    assert found["combination"]["launch_changes"] == ["--gradient_checkpointing true"]
    small = cli("advise", *ON_4090, *words, "--seq", 2048, "--json").json
    assert small["fits"]
    assert {one["name"] for one in small["spare"]} == {"longer sequence"}


def test_planned_recompute_is_named_where_it_is_faster():
    line = "gpt-22b --tp 8 --sp --seq 32768 --global-batch 8 --attention flash"
    line += " --framework megatron --device a100-80gb"
    found = ask("advise", *line.split())
    best, planned = found["combination"], found["planned"]
    assert 0 <= planned["slowdown_ratio"] < best["slowdown_ratio"]
    assert planned["total_bytes"] <= found["budget_bytes"]
    assert planned["changes"], "it lacks what the combination changes beside the policy"
    shown = ask(*shlex.split(planned["command"])[1:])
    assert shown["feasible"]
    assert shown["peak_bytes"] == planned["total_bytes"]


def test_no_plan_is_named_where_the_run_fits():
    assert ask("advise", *["gpt2", "--device", "a100-80gb"])["planned"] is None


def test_a_policy_that_is_none_is_refused(cli):
    done = cli("advise", "gpt2", "--device", "a100-80gb", "--policy", "1e+308")
    assert done.code == 2
    assert "unknown policy '1e+308'" in done.err


def test_offloaded_activations_wait_as_the_planner_says():
    """One layer's waits are those of the planner's transfers, to a nanosecond's rounding."""
    run = load_run("llama-3-8b", device="rtx-4090", framework="transformers")
    roofline = roofline_of(StagedRun(run))
    graph = roofline.model.layers[0]
    layer, rates = roofline.layer(graph, NONE), roofline.rates
    transfer = Transfer(
        host_rate=int(rates.host), memory_rate=int(rates.memory),
        forward=round(1e9 * layer.forward), backward=round(1e9 * layer.backward),
    )  # fmt: skip
    for moved in (10**6, 10**8, 10**9):
        found = waits(moved, layer, rates)
        assert 1e9 * (found.forward + found.backward) == pytest.approx(
            sum(transfer.waits(moved, 0)), abs=4
        )


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("llama-3-8b --framework transformers --seq 4096 --policy none", "--offload activations"),
        ("llama-3-8b --framework megatron --tp 2 --sp --seq 8192", "--set offload_modules="),
    ],
)
def test_activations_on_the_host_are_a_remedy(line, flags):
    found = ask("advise", *line.split(), "--device", "a100-40gb")
    (one,) = [each for each in found["remedies"] if each["name"] == "activation offload"]
    assert one["change"].startswith(flags)
    assert one["slowdown_ratio"] > 0
    assert not one["slowdown_at_least"]
    needed = ask("memory", *line.split(), "--device", "a100-40gb", *one["change"].split())
    assert max(stage["total_bytes"] for stage in needed["stages"]) == one["total_bytes"]
    assert one["freed_bytes"] == found["total_bytes"] - one["total_bytes"]
