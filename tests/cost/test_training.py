"""What training options cost: optimizer, gradients by recipe, adapters, loss, efficiency."""

from __future__ import annotations

import pytest

from actcalc.answers.mfu import utilisation
from actcalc.cost.optimizer import optimizer_time
from actcalc.cost.rates import default_note, efficiency_presets, parse_overrides
from actcalc.cost.roofline import roofline_of
from actcalc.cost.step import step_time
from actcalc.errors import SpecError
from actcalc.io.devices import load_device
from actcalc.io.runs import load_run
from actcalc.memory.states import parameters_of, states
from actcalc.policy.rules import NONE
from actcalc.run.staged import StagedRun
from actcalc.specs.training import Training


def parts(name="llama-3-8b", training=None, **changes):
    layout = {"dp": 1, **changes.pop("layout", {})}
    run = load_run(name, layout=layout, training=training, device="h100-80gb", **changes)
    staged = StagedRun(run)
    return run, staged.graph, roofline_of(staged)


def step(*args, count=4, efficiency=None, **changes):
    _, _, roofline = parts(*args, **changes)
    if efficiency:
        roofline = roofline_of(roofline.staged, efficiency)
    return step_time(NONE, roofline, count=count)


def optimizer_bytes(training, **changes):
    _, graph, roofline = parts(training=training, **changes)
    rates = roofline.rates
    graphs = [run.graph for run in graph.runs for _ in range(run.count)]
    time = optimizer_time(
        graph, [*graphs, graph.embedding, graph.head], Training(**training), rates
    )
    return time.memory * rates.memory, graph, graphs


def test_adam_moves_every_state_once():
    """Megatron's states: norm, clip and zero 16, gradient 4, moments 16, master 12, weight 2."""
    moved, graph, graphs = optimizer_bytes({"recipe": "megatron"})
    seen: set[str] = set()
    count = sum(
        parameters_of(graph, g, Training(), seen).total
        for g in [*graphs, graph.embedding, graph.head]
    )
    assert moved == pytest.approx(50 * count)


def test_moments_are_those_that_memory_counts():
    base, graph, graphs = optimizer_bytes({"recipe": "megatron", "optimizer": "sgd"})
    for optimizer in ("momentum", "lion", "adamw", "adam8bit"):
        moved, _, _ = optimizer_bytes({"recipe": "megatron", "optimizer": optimizer})
        training = Training(recipe="megatron", optimizer=optimizer)
        kept = 0
        for one in [*graphs, graph.embedding, graph.head]:
            found = states(graph, training, parameters_of(graph, one, training))
            kept += found.optimizer - found.master
        assert moved - base == pytest.approx(2 * kept, rel=1e-6)


def test_optimizers_differ_and_sharding_divides():
    times = {
        name: step(training={"optimizer": name}).optimizer
        for name in ("none", "sgd", "momentum", "lion", "adam8bit", "adamw", "adafactor", "muon")
    }
    assert times["none"] == 0 < times["sgd"] < times["momentum"] == times["lion"]
    assert times["momentum"] < times["adamw"] < times["adafactor"]
    assert times["sgd"] < times["adam8bit"] < times["adamw"]
    alone = step(layout={"dp": 8}).optimizer
    assert step(layout={"dp": 8, "zero": 1}).optimizer == pytest.approx(alone / 8, rel=1e-6)
    assert step(training={"fused_optimizer": False}).optimizer > 1.5 * step().optimizer


def test_muon_does_five_newton_schulz_steps():
    _, graph, roofline = parts("gpt2")
    rates = roofline.rates
    training = Training(optimizer="muon")
    layer = graph.runs[0].graph
    time = optimizer_time(graph, [layer], training, rates)
    shapes = [
        [int(dim.value(graph.sizes)) for dim in weight.shape]
        for op in layer.ops
        for weight in op.weights
        if len(weight.shape) == 2 and op.kind != "norm"
    ]
    flops = 0.0
    for shape in shapes:
        m, n = sorted(shape)
        flops += 5 * (4 * m * m * n + 2 * m**3)
    assert shapes
    assert time.products >= flops / rates.core_matrix
    assert optimizer_time(graph, [layer], Training(), rates).products == 0


def test_offloaded_states_cost_their_transfers():
    plain = step(training={"recipe": "megatron"})
    away = step(training={"recipe": "megatron", "offload": "optimizer"})
    assert away.optimizer > plain.optimizer
    run, graph, roofline = parts(training={"offload": "optimizer"})
    rates = roofline.rates
    host = optimizer_time(graph, [graph.runs[0].graph], run.training, rates).host
    assert host > 0


def test_gradients_cost_what_the_recipe_does_to_them():
    """bf16 gradients summed into fp32 ones outside the product cost more than a fused sum."""
    seconds = {
        name: step("gpt-22b", training={"recipe": name}, layout={"tp": 8}).pipeline
        for name in ("megatron", "mixed", "deepspeed")
    }
    assert seconds["deepspeed"] > 1.02 * seconds["megatron"]
    unfused = step("gpt-22b", training={"gradient_fusion": False}, layout={"tp": 8}).pipeline
    assert seconds["deepspeed"] > unfused > seconds["megatron"]


def test_frozen_weights_have_no_gradient():
    whole, adapters = step(), step(training={"lora_rank": 16})
    # two thirds of its products, norms and rotations op by op, and the adapters' own
    assert adapters.backward < 0.85 * whole.backward
    assert whole.forward < adapters.forward < 1.3 * whole.forward
    assert adapters.optimizer < 0.05 * whole.optimizer


def test_loss_kernels():
    plain = step("gpt2")
    assert step("gpt2", training={"compiled_loss": True}).pipeline < plain.pipeline
    assert step("gpt2", training={"loss_metrics": 2}).pipeline > plain.pipeline


def test_weights_in_16_bit_reduce_half_as_much():
    one = step(layout={"dp": 16, "zero": 3}, training={"recipe": "fsdp"})
    half = step(
        layout={"dp": 16, "zero": 3}, training={"recipe": "fsdp", "gradients_in_16_bit": True}
    )
    assert half.total < one.total


def test_collectives_wait_or_run_beside_the_products():
    def seconds(**kernels):
        run = load_run(
            "gpt-22b",
            layout={"tp": 8, "sp": True},
            workload={"micro_batch": 4, "kernels": kernels},
            device="a100-80gb",
        )
        staged = StagedRun(run)
        return roofline_of(staged).layer(staged.main.graph, NONE)

    usual = seconds()
    waits = seconds(async_tensor_model_parallel_allreduce=False)
    overlapped = seconds(tp_comm_overlap=True)
    assert waits.forward == usual.forward > overlapped.forward
    assert waits.backward > usual.backward
    assert overlapped.forward > 0.8 * usual.forward


def test_older_attention_kernels_are_slower():
    plain = step("gpt2", workload={"attention": "flash"})
    for name in ("flash-attention-1", "flash-attention-triton"):
        older = step("gpt2", workload={"attention": "flash"}, efficiency=parse_overrides([name]))
        assert older.pipeline > plain.pipeline


def test_sharded_ends_are_not_hidden():
    """The first gather and the last scatter of a micro-batch have nothing to run beside."""
    _, graph, roofline = parts(layout={"dp": 64, "zero": 3}, training={"recipe": "fsdp"})
    found = step_time(NONE, roofline, count=1)
    layers = sum(roofline.layer(one.graph, NONE).forward * one.count for one in graph.runs) + sum(
        roofline.ends(one).forward for one in (graph.embedding, graph.head)
    )
    assert found.forward > 1.005 * layers


def test_efficiency_by_name_file_and_number(tmp_path):
    assert parse_overrides(["h100", "gemm=0.5"])["gemm"] == 0.5
    assert {"a100", "b200", "mi300x", "flash-attention-1"} <= set(efficiency_presets())
    path = tmp_path / "mine.yaml"
    path.write_text("title: ours\ngemm: 0.5\nmemory: {value: 0.8, source: measured}\n")
    assert parse_overrides([str(path)]) == {"gemm": 0.5, "memory": 0.8}
    path.write_text("gemm: 1.5\n")
    with pytest.raises(SpecError, match="is no share"):
        parse_overrides([str(path)])
    path.write_text("gem: 0.5\n")
    with pytest.raises(SpecError, match="no such efficiency"):
        parse_overrides([str(path)])
    for text in ("a10", "gemm", "gemm=x", str(tmp_path / "absent.yaml")):
        with pytest.raises(SpecError):
            parse_overrides([text])


@pytest.mark.parametrize("name", sorted(efficiency_presets()))
def test_presets_are_shares_with_sources(name):
    values = parse_overrides([name])
    assert values
    assert all(value > 0 for key, value in values.items() if key != "multiprocessors")


def test_assumed_shares_are_named():
    assert "matrix products" in default_note(load_device("tpu-v5p"))
    assert "matrix products" not in default_note(load_device("b200"))
    assert default_note(load_device("a100-80gb")) == ""
    assert default_note(load_device("b200"), {"attention_forward": 0.5, "communication": 0.8}) == ""


def test_the_prediction_says_what_it_leaves_out():
    for training, words in (
        ({"offload": "optimizer"}, "host's own arithmetic"),
        ({"loss": "chunked"}, "does not change the time"),
        ({"lora_rank": 8}, "the step has the adapters' own products"),
    ):
        run = load_run("gpt2", device="a100-80gb", training=training)
        assert words in " ".join(utilisation(run).notes)


def test_commands(cli):
    def seconds(*words):
        return cli("mfu", "gpt2", "--device", "a100-80gb", "--json", *words).json["prediction"]

    adam, sgd = seconds(), seconds("--optimizer", "sgd")
    assert sgd["optimizer_seconds"] < adam["optimizer_seconds"]
    assert sgd["pipeline_seconds"] == adam["pipeline_seconds"]
    slow = cli("gpt2", "--device", "a100-80gb", "--efficiency", "gemm=0.3", "--json").json
    fast = cli("gpt2", "--device", "a100-80gb", "--json").json
    assert slow["policies"][0]["step_seconds"] > 1.5 * fast["policies"][0]["step_seconds"]
    outcome = cli("gpt2", "--device", "tpu-v5e")
    assert "default shares" in " ".join((outcome.out + outcome.err).split())
