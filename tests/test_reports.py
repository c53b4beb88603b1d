"""What people asked and hit (``tests/data/reports.json``), and the answer recorded for each.

One test a report, named by its id. Where the recorded answer is a figure it is compared; where it
is a demand (say this line apart, refuse that), the output is looked at. Where a figure cannot be
derived from what the report states, the test says which part can.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.conftest import DATA

REPORTS = {one["id"]: one for one in json.loads((DATA / "reports.json").read_text())}
GiB = 2**30


def test_every_report_has_its_test():
    asked = {name.removeprefix("test_").split("_says_")[0] for name in globals()}
    assert {one.replace("-", "_") for one in REPORTS} <= asked


@pytest.fixture
def ask(cli):
    """The JSON of a command line."""

    def run(line: str, **columns: Any) -> dict[str, Any]:
        done = cli(*shlex.split(line), "--json")
        assert done.code in (0, 1), done.err
        return done.json

    return run


def fullest(document: dict[str, Any]) -> dict[str, Any]:
    return max(document["stages"], key=lambda stage: stage["total_bytes"])


# --- does it fit, and what to change --------------------------------------------------------------

V100 = (
    "gpt2-large --framework megatron-local --device v100-32gb --precision fp16 --attention eager "
    "--micro-batch 8"
)


def test_K2_01_says_what_removes_how_much(ask, cli):
    """Scores, logits and transient apart; which switch removes what; no flash on a V100."""
    found = ask(f"advise {V100}")
    assert not found["fits"]
    assert "logits" in found["peak_at"]
    by_name = {one["name"]: one for one in found["remedies"]}
    assert "attention without scores" not in by_name
    layers, seq, heads, batch = 36, 1024, 20, 8
    selective = by_name["selective recompute"]
    # 5as²b a layer in all; one layer's scores are there while it re-runs.
    assert selective["freed_bytes"] == pytest.approx(layers * 5 * heads * seq**2 * batch, rel=0.01)
    assert by_name["smaller micro-batch"]["enough"]
    assert found["combination"]["total_bytes"] <= found["budget_bytes"]
    leaves = ask(f"breakdown {V100.replace('--device v100-32gb ', '')}")["tensors"]
    core = [leaf for leaf in leaves if leaf["bytes"] >= heads * seq**2 * batch]
    assert sum(leaf["bytes"] for leaf in core if leaf["layer"] == core[0]["layer"]) == (
        5 * heads * seq**2 * batch
    )
    moments = ask(f"memory {V100} --timeline")["stages"][0]["moments"]
    assert max(one["loss_bytes"] for one in moments) >= 4 * batch * seq * 50257


def test_K2_51_says_no_and_how_many_gpus(ask):
    """90 B parameters in 16 bytes: 180 GB of each of 8 GPUs, before any activation."""
    run = "llama-3.1-70b --layers 102 --device h100-80gb --dp 8 --zero 3 --recipe mixed --seq 2048"
    stage = fullest(ask(f"memory {run}"))
    parameters = stage["parameters"]
    assert parameters == pytest.approx(90e9, rel=0.02)
    states = stage["weights_bytes"] + stage["gradients_full_bytes"] + stage["optimizer_bytes"]
    assert states == pytest.approx(16 * parameters / 8, rel=1e-6)
    found = ask(f"advise {run}")
    assert not found["fits"]
    assert states > found["budget_bytes"]
    more = found["more_gpus"]
    # 16 bytes of a parameter, or 10 with moments in 8 bits; the step's fp32 gradients go by
    # sub-groups (DeepSpeed's sub_group_size)
    each = 10 if "adam8bit" in more["command"] else 16
    assert more["gpus"] >= each * parameters / found["budget_bytes"]
    assert more["total_bytes"] <= found["budget_bytes"]
    fewer = more["command"].replace(f"--dp {more['gpus']}", f"--dp {more['gpus'] - 8}")
    assert not ask(fewer.removeprefix("actcalc "))["fits"]


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("memory", [16, 24, 40, 80])
def test_K2_52_says_whether_and_what_to_change(ask, gpus, memory):
    """7B, all weights, fp32 under FSDP: a verdict, the largest micro-batch, the cheapest change."""
    run = (
        f"llama-2-7b --framework torchtitan --dp {gpus} --zero 3 --seq 2048 --device a100-80gb "
        f"--device-memory {memory}GiB"
    )
    found = ask(f"advise {run}")
    states = 16 * 6.74e9 / gpus  # fp32 weights, gradients and both moments
    assert found["total_bytes"] > states
    if found["fits"]:
        policies = ask(run)["policies"]
        assert max(one["largest_micro_batch"] for one in policies) >= 1
        return
    if states > found["budget_bytes"]:
        # Gradients can be dropped as they are made, and states can wait on the host.
        best = found["combination"]
        assert best is None or best["keeps"] == "host" or "step_in_backward" in best["command"]
        assert best is not None or found["more_gpus"] is not None
    else:
        assert found["combination"] is not None
    best = found["combination"] or found["more_gpus"]
    assert ask(best["command"].removeprefix("actcalc "))["fits"]


def test_K2_02_says_that_flash_keeps_no_scores(ask):
    """With flash attention the published 70 % is a few per cent at most, and it is said."""
    run = (
        "gpt3-175b --framework megatron --tp 8 --sp --attention flash --policy none "
        "--policy selective"
    )
    selective = ask(run)["policies"][1]
    assert 0 <= selective["saved_ratio"] < 0.03
    assert "flash attention keeps no s x s tensor" in selective["note"]
    unfused = ask(run.replace("flash", "eager"))["policies"]
    assert unfused[1]["saved_ratio"] > 0.65
    advised = ask(f"advise {run.split(' --policy')[0]} --device a100-80gb --pp 8")["remedies"]
    freed = [one for one in advised if one["name"] == "selective recompute"]
    assert all(one["freed_bytes"] < 0.03 * one["total_bytes"] for one in freed)


def test_K2_03_says_where_longer_segments_make_it_worse(ask):
    """peak = (L/g) inputs + g layers at work: lowest near the square root, then it grows."""
    sizes = (1, 2, 4, 8, 16)
    words = " ".join(f"--policy uniform:{g}" for g in sizes)
    found = ask(f"llama-3-8b --framework megatron --attention flash --seq 8192 {words}")
    peaks = [one["peak_bytes"] for one in found["policies"]]
    stored = [one["stored_bytes"] for one in found["policies"]]
    assert stored == sorted(stored, reverse=True)
    best = min(range(len(sizes)), key=lambda i: peaks[i])
    assert peaks[best:] == sorted(peaks[best:])
    assert peaks[-1] > peaks[0]
    optimum = found["checkpoint_optimum"]
    assert optimum["integer"] * sizes[best] >= 32


def test_K2_28_says_what_the_logits_take_and_what_helps(ask):
    """11.6 k tokens of a vocabulary of 248,320: 10.7 GiB for each fp32 copy."""
    run = "qwen3-8b --set vocab=248320 --seq 11600 --device h100-80gb"
    copy = 11_600 * 248_320 * 4
    assert copy == pytest.approx(10.7 * GiB, rel=0.01)
    found = ask(f"advise {run} --policy full")
    assert "logits" in found["peak_at"]
    fused = next(one for one in found["remedies"] if one["name"] == "fused loss")
    assert fused["freed_bytes"] > copy
    split = ask(f"memory {run} --policy full --framework megatron --attention flash --tp 8 --sp")
    whole = ask(f"memory {run} --policy full --framework megatron --attention flash")
    assert fullest(whole)["total_bytes"] - fullest(split)["total_bytes"] > 7 / 8 * copy


def test_K2_47_says_that_one_layer_is_not_helped(ask):
    """The peak keeps one block at work (and the logits): where that is all, nothing is gained, but
    for what the last norm's backward in Python has beside the block's activations."""
    run = "llama-3-8b --layers 1 --set vocab=1024 --device a100-80gb --seq 8192"
    found = ask(f"advise {run} --headroom 0.5")
    freed = [one["freed_bytes"] for one in found["remedies"] if "recompute" in one["name"]]
    activations = ask(f"memory {run}")["stages"][0]["layers_activations_bytes"]
    assert max(freed, default=0) < 0.06 * activations
    fused = ask(f"advise {run} --framework torchtitan --headroom 0.5")
    assert not [one for one in fused["remedies"] if "recompute" in one["name"]]
    deep = ask(f"advise {run.replace('--layers 1', '--layers 32')}")
    assert [one for one in deep["remedies"] if one["name"] == "full recompute"]


def test_K2_53_says_what_interleaving_adds(ask):
    """In flight grows by (p-1)/(p·v) of a chunk's layers: vpp saves nothing, and it is not said."""
    run = (
        "llama-3.1-405b --layers 120 --framework megatron --attention flash --tp 8 --sp --pp 4 "
        "--dp 8 --zero 1 --global-batch 256 --device h100-80gb"
    )
    held = {}
    for vpp in (1, 5, 10):
        stage = ask(f"memory {run} --vpp {vpp}")["stages"][0]
        held[vpp] = stage["layers_activations_bytes"]
    # L(1 + (p-1)/(pv)) layers on the first stage, L of them without interleaving
    assert held[5] / held[1] == pytest.approx(1 + 3 / 20, rel=1e-6)
    assert held[10] / held[1] == pytest.approx(1 + 3 / 40, rel=1e-6)
    found = ask(f"advise {run} --vpp 5")
    by_name = {one["name"]: one for one in found["remedies"]}
    assert "--vpp 1" in by_name["plain pipeline"]["change"]
    assert by_name["plain pipeline"]["freed_bytes"] > 0
    assert not any("--vpp 10" in one["change"] for one in found["remedies"])
    assert found["headroom_ratio"] == 0.05
    assert found["memory_range"]["low_bytes"] < found["memory_range"]["high_bytes"]


# --- mixture of experts ---------------------------------------------------------------------------


def test_K2_07_says_each_kind_of_layer(ask):
    """One dense layer by its width, 26 by top-k experts and shared ones; experts over EP·ETP."""
    run = "deepseek-v2-lite --framework megatron --tp 2 --sp --ep 8 --etp 1 --dp 8"
    layers = {one["kind"]: one["count"] for one in ask(run)["policies"][0]["layers"]}
    assert layers == {"dense": 1, "moe": 26}
    tensors = ask(f"breakdown {run}")["tensors"]
    assert {"dense", "moe"} <= {leaf["layer"].split()[0] for leaf in tensors}
    one, two = (fullest(ask(f"memory {run.replace('--ep 8', f'--ep {ep}')}")) for ep in (8, 4))
    experts = 26 * 64 * 3 * 2048 * 1408
    assert two["parameters"] - one["parameters"] == experts // 4 - experts // 8


def test_K2_08_says_three_buckets(ask):
    """Attention over TP, norms and router whole, routed experts over EP·ETP."""
    run = "mixtral-8x7b --framework megatron --tp 4 --sp --ep 1 --etp 1 --dp 1"
    found = fullest(ask(f"memory {run}"))["parameters"]
    h, ffn, layers, vocab, kv = 4096, 14336, 32, 32000, 1024
    attention = layers * (2 * h * h + 2 * h * kv) // 4
    whole = layers * (2 * h + 8 * h) + h
    experts = layers * 8 * 3 * h * ffn
    assert found == attention + whole + experts + 2 * vocab * h // 4
    # the optimizer's shards of experts are over their own replicas
    states = fullest(ask(f"memory {run.replace('--dp 1', '--dp 4')} --zero 1"))
    ours = 12 * (experts / 16 + (attention + whole + vocab * h // 2) / 4)
    assert states["optimizer_bytes"] == pytest.approx(ours, rel=1e-6)


def test_K2_40_says_total_for_memory_and_active_for_flops(ask):
    config = DATA / "configs" / "Qwen--Qwen3.5-122B-A10B.json"
    stage = fullest(ask(f"memory {config} --seq 4096"))
    assert stage["parameters"] == pytest.approx(122e9, rel=0.03)
    found = ask(f"mfu {config} --seq 4096 --device h200 --step-time 10")
    active = found["model_flops"] / (found["global_batch"] * 4096) / 6
    assert 9e9 < active < 12e9  # with the scores of attention


def test_K2_41_says_flops_of_active_parameters(ask):
    """The published pair: 8,826 tokens a second and GPU beside 203 TFLOP/s."""
    found = ask("mfu qwen3-30b-a3b --seq 2048 --device h100-80gb --step-time 1")
    each = found["model_flops"] / (found["global_batch"] * 2048)
    assert each * 8826 == pytest.approx(203e12, rel=0.01)


def test_K2_49_says_that_experts_need_sequence_parallelism(cli):
    done = cli("memory", "mixtral-8x7b", "--framework", "megatron", "--tp", 2)
    assert done.code == 2
    assert "sequence parallelism" in done.err
    alone = cli("memory", "mixtral-8x7b", "--framework", "megatron", "--sp")
    assert alone.code == 2
    assert "tp is 1" in alone.err


# --- pipelines ------------------------------------------------------------------------------------


def test_K2_09_says_each_stage_of_an_uneven_split(ask):
    run = "llama-3-8b --layers 8 --framework megatron --attention flash --pp 4"
    found = ask(f"memory {run} --layers-per-stage 1,2,2,3 --global-batch 16")
    assert [stage["layers"] for stage in found["stages"]] == [1, 2, 2, 3]
    assert found["peak_stage"] == 3
    mean = sum(stage["total_bytes"] for stage in found["stages"]) / 4
    assert found["stages"][3]["total_bytes"] > 1.3 * mean


def test_K2_11_says_how_to_split_46_layers(ask, cli):
    run = "glm-4.5-air --framework megatron --attention flash --pp 4"
    done = cli("memory", *shlex.split(run))
    assert done.code == 2
    assert "pp 4 does not divide 46 layers" in done.err
    assert "--layers-per-stage 11,12x2,11" in done.err
    found = ask(f"memory {run} --layers-per-stage 11,12x2,11")
    assert [stage["layers"] for stage in found["stages"]] == [11, 12, 12, 11]
    assert all(stage["total_bytes"] for stage in found["stages"])


# --- parameters and states ------------------------------------------------------------------------


def test_K2_17_says_141_gb(ask):
    found = ask("memory llama-3.1-70b --precision fp16")
    assert found["parameters"] == pytest.approx(70.55e9, rel=1e-3)
    assert fullest(found)["weights_bytes"] == pytest.approx(141.1e9, rel=1e-3)


def test_K2_18_says_which_bytes_are_assumed(ask):
    every = {}
    for recipe in ("mixed", "megatron", "pure"):
        found = ask(f"memory llama-3.1-70b --recipe {recipe}")
        stage = fullest(found)
        every[recipe] = (
            stage["weights_bytes"] + stage["gradients_full_bytes"] + stage["optimizer_bytes"]
        )
        assert found["recipe"]["name"] == recipe
    assert every["mixed"] == pytest.approx(1.13e12, rel=0.01)
    assert every["megatron"] == pytest.approx(1.27e12, rel=0.01)
    assert every["pure"] == pytest.approx(564e9, rel=0.01)


def test_K2_19_says_every_byte_of_a_parameter(ask):
    """2+2+12, 2+4+12, 20 with a gradient in bf16 and in fp32, 6 + 12/d sharded."""
    wanted = {"mixed": (2, 2, 4, 8), "megatron": (2, 4, 4, 8), "deepspeed": (2, 6, 4, 8)}
    for name, parts in wanted.items():
        recipe = ask(f"memory llama-2-7b --recipe {name}")["recipe"]
        found = (recipe["weight"], recipe["gradient"], recipe["master"], recipe["moments"])
        assert found == parts
    fp32 = ask("memory llama-2-7b --precision fp32")["recipe"]
    assert fp32["weight"] + fp32["master"] + fp32["moments"] == 12  # gradients of 4 beside them
    run = "memory llama-2-7b --framework megatron --attention flash --dp 8 --zero 1"
    assert fullest(ask(run))["bytes_per_parameter"] == pytest.approx(6 + 12 / 8, rel=1e-6)


def test_K2_55_says_how_many_parameters(ask):
    for name, total in (
        ("deepseek-v2-lite", 15.7e9), ("qwen3-235b-a22b", 235e9), ("llama-3.1-8b", 8.03e9),
    ):  # fmt: skip
        assert ask(f"memory {name}")["parameters"] == pytest.approx(total, rel=0.01)
    found = ask("mfu qwen3-235b-a22b --seq 512 --device h200 --step-time 10")
    assert found["model_flops"] / (found["global_batch"] * 512) / 6 == pytest.approx(22e9, rel=0.05)


def test_K2_27_says_that_a_flag_is_missing(ask):
    """Without grouped queries there are 8.8 B parameters instead of 8.03 B; logits 5.9 GiB."""
    run = "memory llama-3-8b --framework megatron --attention flash --seq 8192"
    assert ask(run)["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert ask(f"{run} --set kv_heads=32")["parameters"] == pytest.approx(8.84e9, rel=1e-3)
    assert pytest.approx(5.9 * GiB, rel=0.01) == 8192 * 128256 * (2 + 4)
    moments = ask(f"{run} --timeline")["stages"][0]["moments"]
    logits = max(one["activations_bytes"] + one["loss_bytes"] for one in moments)
    assert logits > 6 * 8192 * 128256
    assert max(one["loss_bytes"] for one in moments) > 0


# --- sharding -------------------------------------------------------------------------------------


def test_K2_21_says_every_stage_and_the_bucket(ask):
    """ZeRO 0 to 3 of 16 bytes, gradients sharded from 2 on, the bucket a line of its own."""
    found = {}
    for zero in range(4):
        run = f"memory phi-2 --framework transformers --dp 8 --zero {zero} --recipe mixed"
        stage = fullest(ask(f"{run} --seq 512"))
        found[zero] = stage
    params = found[0]["parameters"]
    assert params == pytest.approx(2.78e9, rel=0.03)
    sharded = {0: (2, 2, 12), 1: (2, 2, 12 / 8), 2: (2, 2 / 8, 12 / 8), 3: (2 / 8, 2 / 8, 12 / 8)}
    for zero, (weight, gradient, optimizer) in sharded.items():
        stage = found[zero]
        assert stage["weights_bytes"] == pytest.approx(weight * params, rel=1e-6)
        assert stage["gradients_full_bytes"] == pytest.approx(gradient * params, rel=1e-6)
        assert stage["optimizer_bytes"] == pytest.approx(optimizer * params, rel=1e-6)
        names = {line["name"] for line in stage["buffers"]}
        assert ("reduction bucket" in names) is (zero > 0)


def test_K2_22_says_more_than_the_states(ask):
    """States alone are 0 of the GPU; with all that is live it is an order more."""
    stage = fullest(ask(
        "memory opt-6.7b --dp 4 --zero 3 --recipe mixed --offload weights --seq 2048 "
        "--precision fp16 --device v100-32gb"
    ))  # fmt: skip
    assert stage["weights_bytes"] == stage["optimizer_bytes"] == 0
    lines = {line["name"] for line in stage["buffers"]}
    assert {"gathered weights", "reduction bucket", "device context"} <= lines
    assert stage["activations_bytes"] > 0
    # Observed 14.7 to 21.3 GB, of batches and versions that the report does not state.
    assert 0.49e9 * 10 < stage["total_bytes"] < 21.3e9


def test_K2_23_says_where_buckets_eat_the_savings(ask):
    """340 M parameters: what stage 3 gathers is more than what it shards; large models gain."""

    def total(model, zero):
        return fullest(ask(
            f"memory {model} --framework transformers --dp 4 --zero {zero} --recipe mixed "
            "--precision fp16 --seq 128"
        ))  # fmt: skip

    small = {zero: total("bert-large", zero) for zero in (1, 2, 3)}
    bucket = next(b for b in small[2]["buffers"] if b["name"] == "reduction bucket")
    assert bucket["bytes"] == 2 * 500_000_000
    assert small[3]["total_bytes"] > small[2]["total_bytes"]
    assert small[3]["total_bytes"] > small[1]["total_bytes"]
    large = {zero: total("opt-6.7b", zero)["total_bytes"] for zero in (1, 2, 3)}
    assert large[3] < large[2] <= large[1]


def test_K2_24_says_allocated_reserved_and_beside(ask):
    stage = fullest(ask(
        "memory llama-3-8b --framework torchtitan --tp 4 --sp --dp 2 --zero 3 --device h100-80gb"
    ))  # fmt: skip
    assert stage["total_bytes"] == stage["peak_bytes"] + stage["overhead_bytes"]
    assert 0 <= stage["reserved_at_least_bytes"] - stage["peak_bytes"] < 2**21
    assert "gathered weights" in {line["name"] for line in stage["buffers"]}


def test_K2_25_says_what_lies_outside_the_allocator(ask, tmp_path):
    run = "memory llama-3-8b --framework torchtitan --dp 32 --zero 3 --device"
    lines = {b["name"]: b for b in fullest(ask(f"{run} h100-80gb"))["buffers"]}
    assert 0.5 * GiB <= lines["device context"]["bytes"] <= GiB
    assert lines["communicators"]["bytes"] > 0
    assert not lines["device context"]["allocated"]
    own = tmp_path / "own.yaml"
    own.write_text(
        "title: mine\nmemory_nominal_bytes: 85899345920\ncompute_capability: 9\n"
        "memory_bandwidth_bytes_per_second: 3.0e+12\ncontext_bytes: 2000000000\n"
        "peak_flops: {bf16: 9.0e+14}\n"
    )
    mine = {b["name"]: b for b in fullest(ask(f"{run} {own}"))["buffers"]}
    assert mine["device context"]["bytes"] == 2_000_000_000


def test_K2_54_says_buffers_that_stay(ask):
    run = "memory llama-3-8b --framework megatron --attention flash --dp 8 --zero 3"
    lines = fullest(ask(f"{run} --set persistent_buffers=true"))["buffers"]
    kept = [line for line in lines if line["name"] in ("gathered weights", "unreduced gradients")]
    assert kept
    assert all(line["resident"] for line in kept)


# --- what is kept ---------------------------------------------------------------------------------


def test_K2_29_says_every_op_of_an_eager_llama(ask):
    """fp32 copies of norms, three matrices, rotary copies, fp32 softmax, fp32 logits.

    The reported 45.61 GB is of one version of 2023 and counts what the report does not state: what
    is derived of it from today's code is the larger part.
    """
    run = "llama-2-7b --attention eager --precision fp16 --framework transformers --seq 512"
    found = ask(f"breakdown {run} --micro-batch 8")["tensors"]
    layer = [leaf for leaf in found if leaf["layer"] == found[len(found) // 2]["layer"]]
    fp32 = [leaf for leaf in layer if leaf["dtype"] == "fp32"]
    assert any("norm" in leaf["op"] or "norm" in leaf["module"] for leaf in fp32)
    assert any("s²" in leaf["formula"] for leaf in layer)
    assert sum("f" in leaf["formula"] for leaf in layer) >= 3
    stage = fullest(ask(f"memory {run} --micro-batch 8"))
    assert 0.7 * 45.61e9 < stage["activations_bytes"] < 1.05 * 45.61e9
    paper = ask(f"{run.replace('transformers', 'paper')} --micro-batch 8 --policy none")
    assert paper["policies"][0]["stored_bytes"] < 0.75 * stage["activations_bytes"]


def test_K2_32_says_which_policy_a_formula_is_of(ask):
    """2·b·s·h·l/c keeps an input every c layers; the other keeps everything."""
    h, layers, seq, batch = 1024, 24, 512, 4
    run = f"bert-large --framework paper --seq {seq} --micro-batch {batch}"
    found = ask(f"{run} --policy none --policy uniform:2 --policy uniform:4")["policies"]
    for policy, every in zip(found[1:], (2, 4), strict=True):
        assert policy["stored_bytes"] == 2 * batch * seq * h * layers // every
    heads = 16
    least = (2 * seq * heads + 16 * h) * seq * batch * layers
    assert found[0]["stored_bytes"] > least  # that formula leaves out masks and halves of the norms


def test_K2_33_says_each_term_right(ask):
    """One weight a norm, the last norm on the last stage alone, 2 bytes of a 16-bit gradient."""
    run = "memory llama-3-8b --framework megatron --attention flash --pp 4 --set moe=null"
    run = run.replace(" --set moe=null", "")
    first, *_, last = ask(run)["stages"]
    h, vocab = 4096, 128256
    assert last["parameters"] - first["parameters"] == h
    layer = 2 * h * h + 2 * h * 1024 + 3 * h * 14336 + 2 * h
    assert first["parameters"] == 8 * layer + vocab * h
    half = ask(f"{run} --set gradients_in_16_bit=true")["stages"][0]
    assert half["gradients_full_bytes"] == 2 * half["parameters"]
    assert first["gradients_full_bytes"] == 4 * first["parameters"]
    eager = ask(run.replace("flash", "eager"))["stages"][0]
    assert eager["activations_bytes"] > 2 * first["activations_bytes"]


def test_K2_34_says_which_tensor_parallelism_is_legal(cli):
    done = cli("memory", "phi-4", "--framework", "megatron", "--tp", 4, "--sp")
    assert done.code == 2
    assert "kv_heads 10" in done.err
    assert "1, 2, 5, 10" in done.err


# --- FLOPs ----------------------------------------------------------------------------------------


def test_K2_42_says_what_a_window_reaches(ask):
    """torchtitan's 24,141,260,160 FLOPs a token at its default length of 4096 (before: 26.48e9).

    Ours leave out biases, norms and sinks, which 6 FLOPs a parameter counts: 0.03 %.
    """
    run = "mfu gpt-oss-20b --seq 4096 --device h100-80gb --step-time 1 --framework megatron"
    found = ask(f"{run} --attention flash")
    each = found["model_flops"] / (found["global_batch"] * 4096)
    assert each == pytest.approx(24_141_260_160, rel=1e-3)


def test_K2_43_says_how_scores_are_counted(ask):
    run = "mfu llama-3-8b --seq 8192 --device h100-80gb --step-time 1"
    every = {one["counting"]: one["model_flops"] for one in ask(run)["countings"]}
    tokens = 8192 * ask(run)["global_batch"]
    matrices = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # no look-up, no norms; the head counts
    assert every["full"] == tokens * (6 * matrices + 12 * 32 * 4096 * 8192)
    assert every["causal"] == tokens * (6 * matrices + 6 * 32 * 4096 * 8192)


def test_K2_45_says_flops_of_the_real_matrices(ask):
    """A gated feed-forward of 11008 and 8 key heads, matrix by matrix."""
    run = "llama-2-7b --set kv_heads=8 --seq 4096 --policy none"
    found = ask(run)
    h, ffn, kv, layers, vocab, s = 4096, 11008, 1024, 32, 32000, 4096
    products = layers * (2 * h * h + 2 * h * kv + 3 * h * ffn) + h * vocab
    assert found["forward_flops"] == 2 * s * products + layers * 4 * s * s * h
