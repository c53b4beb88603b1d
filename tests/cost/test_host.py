"""The host's stream of launches, the ways tokens reach experts, and what options hide."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actcalc.cost.collective import distinct
from actcalc.cost.roofline import LayerTime, roofline_of
from actcalc.cost.step import step_time
from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun
from tests.sweeps import examples

MOE = (
    "mfu", "qwen3-30b-a3b", "--ep", 8, "--etp", 1, "--dp", 8, "--zero", 1, "--seq", 4096,
    "--global-batch", 64, "--attention", "flash", "--framework", "megatron",
)  # fmt: skip
WIDE = (*MOE[:2], "--ep", 16, "--etp", 1, "--dp", 16, *MOE[8:], "--device", "h100-80gb")


def predicted(cli, *args):
    return cli(*args, "--json").json["prediction"]


def paced(forward, backward, host_forward, host_backward, stalled=0.0):
    """Forward, backward and what only the first forward waits."""
    time = LayerTime(
        forward, 0.0, backward, 0.0, host_forward=host_forward, host_backward=host_backward,
        stalled=stalled,
    ).paced()  # fmt: skip
    return time.forward, time.backward, time.lead


def test_the_host_sets_the_pace_where_it_is_slower():
    assert paced(3, 5, 2, 3) == (3, 5, 0)  # the device needs longer: launches cost nothing
    assert paced(1, 2, 4, 3) == (4, 3, 0)
    assert paced(3, 5, 2, 7) == (3, 6, 0)  # one second ahead when backward begins
    assert paced(3, 5, 4, 3) == (4, 5, 1)  # two ahead when the next forward begins: it waits none
    assert paced(3, 4, 6, 3) == (6, 4, 1)
    assert paced(3, 5, 4, 3, stalled=1) == (4, 5, 0)


KERNELS = 2000
SECONDS = st.floats(0.1, 10.0)


@settings(max_examples=examples(60), deadline=None)
@given(SECONDS, SECONDS, SECONDS, SECONDS, st.integers(1, 4))
def test_a_queue_of_launches(forward, backward, host_forward, host_backward, count):
    """Against kernels that run one after the other, each once the host has launched it."""
    device = launched = 0.0
    first_forward = None
    for work, host in ((forward, host_forward), (backward, host_backward)) * count:
        for _ in range(KERNELS):
            launched += host / KERNELS
            device = max(device, launched) + work / KERNELS
        first_forward = first_forward or device
    first, again, lead = paced(forward, backward, host_forward, host_backward)
    assert first == pytest.approx(first_forward, rel=0.01)
    assert first + again + (count - 1) * (first - lead + again) == pytest.approx(device, rel=0.01)


LADDER = ("none", "selective", "attention", "ffn", "full")


@settings(max_examples=examples(120), deadline=None)
@given(
    model=st.sampled_from(("gpt2", "qwen3-30b-a3b")),
    device=st.sampled_from(("rtx-3090-ti", "b200")),
    framework=st.sampled_from((("transformers", 1), *(("megatron", pp) for pp in (1, 2, 4)))),
    seq=st.sampled_from((64, 128, 256)),
    dp=st.sampled_from((1, 2, 8, 16)),
    batches=st.integers(1, 4),
    pace=st.sampled_from((0.5, 1.0, 1.5, 2.0, 3.0)),
    overlapped=st.booleans(),
)
@example(
    model="dinov2-base", device="rtx-3090-ti", framework=("transformers", 1), seq=128, dp=8,
    batches=1, pace=1.0, overlapped=False,
)  # fmt: skip
def test_running_more_again_is_never_faster(
    model, device, framework, seq, dp, batches, pace, overlapped
):
    """Where launches take as long as kernels, and gradients are reduced beside backward."""
    workload = {"seq": seq, "micro_batch": 1, "global_batch": batches * dp}
    layout = {"pp": framework[1], "dp": dp, "zero": 1 if dp > 1 else 0}
    run = load_run(
        model, framework=framework[0], device=device, workload=workload, layout=layout,
        training={"overlapped_reduction": overlapped and framework[0] == "megatron"},
    )  # fmt: skip
    staged = StagedRun(run)
    roofline = roofline_of(staged, {"host_pace": pace})
    none, selective, attention, ffn, full = (
        step_time(staged.policy(name), roofline).total for name in LADDER
    )
    slack = 1 + 1e-12
    assert none <= min(selective, ffn) * slack
    assert selective <= attention * slack
    assert max(attention, ffn) <= full * slack


def test_small_kernels_wait_for_the_host(cli):
    eager = cli(*MOE, "--device", "b200", "--precision", "fp8")
    assert "The host launches kernels more slowly" in eager.out + eager.err
    assert "--cuda-graphs attention" in " ".join((eager.out + eager.err).split())
    steps = [
        predicted(cli, *MOE, "--device", "b200", "--precision", "fp8", "--cuda-graphs", graphs)
        for graphs in ("none", "attention", "full")
    ]
    seconds = [step["step_seconds"] for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert steps[0]["host_seconds"] > steps[1]["host_seconds"] > steps[2]["host_seconds"] == 0
    assert seconds[0] - seconds[2] == pytest.approx(steps[0]["host_seconds"])


def test_a_slower_host_costs_more(cli):
    slow = predicted(cli, *MOE, "--device", "b200", "--efficiency", "host_pace=2.75")
    assert slow["host_seconds"] > 2 * predicted(cli, *MOE, "--device", "b200")["host_seconds"]


def test_large_kernels_hide_the_host(cli):
    dense = ("mfu", "llama-3-8b", "--framework", "megatron", "--device", "h100-80gb")
    assert predicted(cli, *dense, "--global-batch", 8)["host_seconds"] == 0


@pytest.mark.parametrize(("parts", "experts", "chosen"), [(2, 8, 2), (4, 8, 3), (8, 8, 2)])
def test_nodes_that_a_token_reaches(parts, experts, chosen):
    """Against every choice there is."""
    each = experts // parts
    found = [len({one // each for one in some}) for some in combinations(range(experts), chosen)]
    assert distinct(parts, experts, chosen) == pytest.approx(sum(found) / len(found))


def test_dispatchers(cli):
    """Sent once per node, tokens take less time than once per expert, and hidden they take less."""

    def exchange(*settings):
        flags = [word for one in settings for word in ("--set", f"kernels.{one}")]
        return predicted(cli, *WIDE, *flags)["exchange_seconds"]

    plain = exchange()
    once = exchange("moe_token_dispatcher_type=flex")
    merged = exchange("overlap_moe_expert_parallel_comm=true")
    assert 0 < once < plain / 2
    assert merged < plain / 2
    assert exchange("moe_token_dispatcher_type=allgather") > 0


def test_shared_experts_hide_part_of_the_exchange(cli):
    run = ("mfu", "deepseek-v2-lite", "--ep", 16, "--etp", 1, "--dp", 16, *MOE[8:])
    run = (*run, "--device", "h100-80gb")
    beside = predicted(cli, *run, "--set", "kernels.moe_shared_expert_overlap=true")
    alone = predicted(cli, *run)
    assert beside["exchange_seconds"] < alone["exchange_seconds"]
    assert beside["step_seconds"] < alone["step_seconds"]


def test_overlapped_gradients_and_weights(cli):
    run = ("mfu", "llama-3-8b", "--tp", 2, "--sp", "--dp", 32, "--zero", 1, "--global-batch", 64,
           "--framework", "megatron", "--device", "h100-80gb")  # fmt: skip
    exposed = [
        predicted(cli, *run, *(word for one in flags for word in ("--set", one)))[
            "gradients_seconds"
        ]
        for flags in (
            (),
            ("training.overlapped_reduction=true",),
            ("training.overlapped_reduction=true", "training.overlapped_gather=true"),
        )
    ]
    assert exposed[0] > exposed[1] > exposed[2] >= 0
    assert exposed[2] < 0.4 * exposed[0]


def test_megatrons_options_are_read(cli, tmp_path):
    import json

    arguments = {
        "num-layers": 4, "hidden-size": 2048, "num-attention-heads": 16, "seq-length": 4096,
        "micro-batch-size": 1, "global-batch-size": 16, "world-size": 8, "vocab-size": 32000,
        "num-experts": 16, "moe-router-topk": 2, "expert-model-parallel-size": 8, "bf16": True,
        "moe-token-dispatcher-type": "flex", "moe-shared-expert-overlap": True,
        "overlap-moe-expert-parallel-comm": True, "overlap-grad-reduce": True,
        "overlap-param-gather": True, "cuda-graph-impl": "transformer_engine",
        "cuda-graph-scope": "attn moe_router moe_preprocess", "moe-grouped-gemm": True,
    }  # fmt: skip
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps(arguments))
    done = cli("memory", path, "--json").json
    kernels = done["workload"]["kernels"]
    assert kernels["moe_token_dispatcher_type"] == "flex"
    assert kernels["overlap_moe_expert_parallel_comm"] is True
    assert kernels["moe_shared_expert_overlap"] is True
    assert kernels["cuda_graphs"] == "attention"
    assert done["training"]["overlapped_reduction"] is True
    assert done["training"]["overlapped_gather"] is True


LORA = ("mfu", "mistral-7b", "--framework", "transformers", "--device", "h100-80gb", "--seq", 2048,
        "--attention", "flash")  # fmt: skip


def test_adapters_take_time_of_their_own(cli):
    """Their FLOPs are a hundredth; their narrow products and additions move the wide tensors."""
    whole = predicted(cli, *LORA)["pipeline_seconds"]
    adapted = predicted(cli, *LORA, "--lora-rank", 16)["pipeline_seconds"]
    narrow = predicted(cli, *LORA, "--lora-rank", 16, "--lora-targets", "attention")
    quantised = predicted(cli, *LORA, "--lora-rank", 16, "--set", "base_bits=4")
    assert 2 / 3 * whole < adapted < whole  # two thirds of the products, and the adapters
    assert narrow["pipeline_seconds"] < adapted < quantised["pipeline_seconds"]


def test_a_quantised_base_is_read_and_made_whole():
    from actcalc.cost.adapters import whole_again_seconds
    from actcalc.cost.rates import rates_of
    from actcalc.io.runs import load_run

    run = load_run("gpt2", device="a100-80gb")
    rates = rates_of(run.device, "bf16")
    found = whole_again_seconds(1e9, 4, 2.0, rates) - rates.shares.kernel_seconds
    assert found == pytest.approx(2.5e9 / rates.memory)
    assert whole_again_seconds(1e9, 16, 2.0, rates) == 0


def test_a_predicted_time_has_its_range(cli):
    """From published runs of its kind, and as many digits as that allows."""
    done = cli(
        "mfu", "llama-3-8b", "--device", "h100-80gb", "--zero", 3, "--dp", 8, "--policy", "full"
    )
    assert "published runs of this kind (h100 dense)" in " ".join((done.out + done.err).split())
    guess = predicted(cli, "mfu", "llama-3-8b", "--device", "h100-80gb", "--zero", 3, "--dp", 8)
    assert guess["low_seconds"] <= guess["step_seconds"] < guess["high_seconds"]
    assert guess["judged_runs"] >= 50
    shown = next(line for line in done.out.splitlines() if line.startswith(" step time"))
    assert len(shown.split()[2].replace(".", "").lstrip("0")) == 2
    none = cli(
        "mfu", "llama-3-8b", "--device", "mi300x", "--zero", 3, "--dp", 8, "--policy", "full"
    )
    assert "No published run of this kind (mi300x dense)" in " ".join((none.out + none.err).split())


def test_weights_that_are_not_prefetched_are_waited_for(cli):
    run = ("mfu", "llama-3-8b", "--device", "h100-80gb", "--zero", 3, "--dp", 64, "--framework",
           "megatron")  # fmt: skip
    waited = predicted(cli, *run, "--set", "training.prefetch=false")["pipeline_seconds"]
    assert waited > predicted(cli, *run)["pipeline_seconds"]
