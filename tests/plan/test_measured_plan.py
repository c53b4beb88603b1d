"""Plans of a user's own module, carried out by PyTorch: same gradients, and the bytes promised."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from actcalc.answers.measured_plan import plan_measured
from actcalc.errors import SpecError
from actcalc.io.sources import read_layer
from actcalc.plan.emit.measured import KeptOps, selective_options
from actcalc.plan.measured.ops import MeasuredOps, measured_ops, plan_layer_of
from actcalc.plan.measured.planner import LayerPlanner, module_option
from actcalc.plan.settings import PlanSettings

torch = pytest.importorskip("torch")

from actcalc.measure import measure_module  # noqa: E402
from actcalc.measure.layer import MeasuredLayer  # noqa: E402
from actcalc.measure.ops import flops_of  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.plan import measured_modules as modules  # noqa: E402
from tests.plan.replay import Replay, key  # noqa: E402
from tests.sweeps import sampled  # noqa: E402


def measured(factory: Any) -> MeasuredLayer:
    layer = measure_module(factory, layers="", keep_layer=True, name="mine").layer
    assert layer is not None
    return layer


def random_module(seed: int) -> Any:
    return lambda: (modules.Random(seed), torch.randn(modules.B, modules.T, modules.H))


def step(run: Any, module: Any, x: Any) -> dict[str, Any]:
    """Gradients of one step, with the random generator at the same place each time."""
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    run(x).square().sum().backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def numbers(ops: MeasuredOps, recompute: tuple[str, ...]) -> set[int]:
    """Numbers of the ops that an option runs again (merged ones are joined with a plus)."""
    names = {name for label in recompute for name in label.split(" + ")}
    return {index for index, name in enumerate(ops.names) if name in names}


# Modules whose step on a CPU is the traced one, op by op (a dropout's kernels differ there).
OWN = [
    modules.plain,
    modules.inplace,
    modules.routed,
    modules.counting,
    *(random_module(seed) for seed in range(12)),
]


@pytest.mark.parametrize("number", sampled(range(len(OWN)), (0, 1, 2, 3, 4, 8)))
def test_every_kind_of_plan_can_be_carried_out(number: int) -> None:
    """Op by op: the ops that run again and the tensors kept suffice, and take the bytes planned."""
    factory = OWN[number]
    layer = measured(factory)
    ops = measured_ops(layer)
    planner = LayerPlanner(layer)
    options = planner.groups[0].options
    torch.manual_seed(0)
    module, x = factory()
    module.train()
    reference = step(module, module, x)
    every = range(len(options))
    for index in sorted({0, len(options) - 1, *every[:: max(1, len(options) // 12)]}):
        option: Any = options.source(index)
        outside = {key(t) for t in (*module.parameters(), *module.buffers())}
        replay = Replay(numbers(ops, option.recompute), outside)

        def run(value: Any, replay: Replay = replay) -> Any:
            with replay.running():
                return module(value)

        same(reference, step(run, module, x))
        assert replay.count == len(layer.ops)
        assert replay.kept_bytes == option.stored


def backward_flops(layers: Any, x: Any) -> int:
    """FLOPs of one backward pass, what runs again included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: list[int] = []

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        # PyTorch's own counter takes ops apart, which a selective checkpoint would notice.
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            counted.append(flops_of(func, args, kwargs or {}, result))
            return result

    loss = layers(x.detach().clone().requires_grad_()).sum()
    with Counter():
        loss.backward()
    return sum(counted)


@contextmanager
def caches(space: dict[str, Any], found: list[Any]) -> Iterator[None]:
    """Collect the contexts of the selective checkpoints that the emitted code runs."""
    name = "create_selective_checkpoint_contexts"
    original = space[name]

    def recording(*args: Any, **more: Any) -> Any:
        first, second = original(*args, **more)
        found.append(first)
        return first, second

    space[name] = recording
    yield
    space[name] = original


def tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
    elif hasattr(value, "val"):
        yield from tensors(value.val)


def stored(layers: Any, x: Any, space: dict[str, Any]) -> int:
    """Bytes of storages that a stack of layers keeps for backward, parameters left out."""
    outside = {key(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, Any] = {}
    found: list[Any] = []

    def keep(tensor: Any) -> Any:
        if key(tensor) not in outside:
            kept[key(tensor)] = tensor.untyped_storage()
        return tensor

    with caches(space, found), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = x
        for layer in layers:
            out = layer(out)
    for context in found:
        for tensor in tensors(context.storage):
            keep(tensor)
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    return size


@pytest.mark.parametrize("share", sampled([0.0, 0.25, 0.5, 0.75, 1.0], (0.0, 1.0)))
@pytest.mark.parametrize("name", ["plain", "inplace", "dropout", "routed"])
def test_emitted_code_saves_what_was_promised(name: str, share: float) -> None:
    """Six layers under PyTorch's selective checkpoint, as pasted."""
    factory, count = getattr(modules, name), 6
    layer = measured(factory)
    settings = PlanSettings(memory_model="stored", semantics="module")
    space_of = LayerPlanner(layer, count, settings, options=selective_options)
    budget = space_of.smallest + int(share * (space_of.free - space_of.smallest))
    found = plan_measured(
        layer, budget, PlanSettings(memory_model="stored"), count=count, emit="torch"
    ).emitted
    assert found is not None
    assert found.feasible
    assert found.peak_bytes is not None
    assert found.peak_bytes <= budget
    ratio = found.cost_per_optimum_cost_ratio
    assert ratio is None or ratio >= 1
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(factory()[0].train() for _ in range(count)))
    x = torch.randn(modules.B, modules.T, modules.H)
    reference = step(layers, layers, x)
    planned = copy.deepcopy(layers)
    space: dict[str, Any] = {}
    exec(compile(found.text, "emitted", "exec"), space)
    space["apply"](list(planned))
    if share < 1:
        assert any(kept is not None for _, kept in space["PLAN"][0])
    else:
        assert space["PLAN"][0] == [(count, None)]
    same(reference, step(planned, planned, x))
    assert backward_flops(planned, x) - backward_flops(layers, x) == found.cost_flops
    if name != "dropout":
        x.requires_grad_()
        assert stored(list(planned), x, space) == found.peak_bytes


def test_a_layer_that_changes_its_input_takes_no_checkpoint() -> None:
    """The second run would see what the first one left; single ops can still be planned."""
    layer = measure_module(modules.spoiling, layers="", keep_layer=True).layer
    inner = measure_module(modules.spoiling, keep_layer=True).layer
    assert layer is not None
    assert inner is not None
    assert inner.cls == "Spoiling"
    assert not measured_ops(layer).changes_input
    assert measured_ops(inner).changes_input
    for one, choices in ((inner, {False}), (layer, {True, False})):
        options = selective_options(measured_ops(one))
        payloads: list[Any] = [options.source(i) for i in range(len(options))]
        assert {payload.payload.calls is not None for payload in payloads} == choices
    found = plan_measured(inner, 10**9, count=2, emit="torch").emitted
    assert found is not None
    assert found.plan == "no checkpoint"
    assert any("in place" in note for note in found.notes)


def test_a_buffer_that_counts_steps_is_not_counted_twice() -> None:
    """No checkpoint can keep an update in place; op by op it is never planned to run again."""
    ops = measured_ops(measured(modules.counting))
    assert len(selective_options(ops)) == 1
    found = plan_measured(ops.layer, 10**9, emit="torch").emitted
    assert found is not None
    assert any("add_" in note for note in found.notes)


def test_batch_norm_is_never_run_again() -> None:
    def factory() -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        return module, torch.randn(4, 8)

    fixed = [op.op for op in measured(factory).ops if not op.rerunnable]
    assert any("batch_norm" in name for name in fixed)


def test_costs_and_bytes_are_those_of_the_measurement() -> None:
    """The op graph adds up to what the trace counted, with and without wrapped modules."""
    for factory in (modules.plain, modules.inplace, modules.dropout, modules.routed):
        layer = measured(factory)
        ops = measured_ops(layer, 4)
        assert sum(op.forward_flops for op in layer.ops) == layer.forward_flops
        assert plan_layer_of(ops).total_saved_bytes == layer.saved_bytes
        for run in layer.modules:
            option = module_option(ops, (run.path,))
            assert option.stored == layer.stored_bytes([run.path])
            assert ops.rates.value(option.cost) == layer.rerun_flops([run.path])
        assert module_option(ops, ()).stored == layer.saved_bytes


def test_only_what_may_run_twice_runs_twice() -> None:
    """Top-k and the update of a buffer are never planned; the top-k is always kept."""
    layer = measured(modules.routed)
    ops = measured_ops(layer)
    fixed = [name for name, op in zip(ops.names, layer.ops, strict=True) if not op.rerunnable]
    assert any("topk" in name for name in fixed)
    options = LayerPlanner(layer).groups[0].options
    for index in range(len(options)):
        option: Any = options.source(index)
        assert not numbers(ops, option.recompute) & {ops.names.index(name) for name in fixed}
    selective = selective_options(ops)
    payloads: list[Any] = [selective.source(i) for i in range(len(selective))]
    kept = [one.payload for one in payloads if one.payload.calls is not None]
    assert kept
    assert all(isinstance(one, KeptOps) and "topk" in dict(one.calls or ()) for one in kept)


@pytest.mark.parametrize("model", ["stored", "stored+working", "timeline"])
@pytest.mark.parametrize("semantics", ["minimal", "module"])
def test_more_memory_never_costs_more(model: Any, semantics: Any) -> None:
    layer = measured(modules.plain)
    settings = PlanSettings(memory_model=model, semantics=semantics)
    result = plan_measured(layer, None, settings, count=8, points=9)
    prices = [point.cost_flops for point in result.frontier]
    assert prices == sorted(prices, key=lambda price: -(price or 0))
    assert prices[-1] == 0 == result.cost_flops
    assert result.optimal
    assert all(point.peak_bytes <= point.memory_bytes for point in result.frontier)
    least = result.frontier[0].memory_bytes
    assert plan_measured(layer, least, settings, count=8).feasible
    short = plan_measured(layer, least - 1, settings, count=8)
    assert not short.feasible
    assert short.smallest_memory_bytes == least
    for rival in plan_measured(layer, (least + result.memory_bytes) // 2, settings, count=8).rivals:
        assert rival.cost_per_plan_cost_ratio is None or rival.cost_per_plan_cost_ratio >= 1


@pytest.mark.parametrize("method", ["sqrt", "greedy"])
def test_other_methods_never_beat_the_optimum(method: Any) -> None:
    layer = measured(modules.plain)
    free = plan_measured(layer, None, count=9, points=2)
    budget = (free.frontier[0].memory_bytes + free.memory_bytes) // 2
    best = plan_measured(layer, budget, PlanSettings(memory_model="stored"), count=9)
    other = plan_measured(
        layer, budget, PlanSettings(memory_model="stored", method=method), count=9
    )
    assert best.cost_flops is not None
    assert other.cost_flops is not None
    assert other.cost_flops >= best.cost_flops
    assert other.peak_bytes is not None
    assert other.peak_bytes <= budget


def test_old_files_are_told_apart() -> None:
    layer = measured(modules.plain)
    old = layer.model_copy(update={"schema_": "actcalc/measured-layer/1", "ops": ()})
    with pytest.raises(SpecError, match="without its ops") as caught:
        plan_measured(old, 10**9)
    assert "measure" in (caught.value.hint or "")


def test_other_targets_are_refused() -> None:
    with pytest.raises(SpecError, match="module of your own"):
        plan_measured(measured(modules.plain), 10**9, emit="megatron")


def test_the_example_is_what_the_measurement_says() -> None:
    """docs/examples/block.json is block.py's, as this version of PyTorch runs it."""
    folder = ROOT / "docs" / "examples"
    kept = read_layer(folder / "block.json")
    if kept.torch_version != torch.__version__:
        pytest.skip(f"kept from torch {kept.torch_version}")
    assert measure_module(f"{folder / 'block.py'}:factory", keep_layer=True).layer == kept
