"""What an objective holds beside the trained model: a second model, an engine of generation."""

from __future__ import annotations

from collections import Counter

from actcalc.layers.core.algebra import ONE
from actcalc.layers.model import ModelGraph
from actcalc.memory.buffers import Buffer
from actcalc.memory.losses import Head
from actcalc.memory.parts import REFERENCE, Part, Timeline
from actcalc.memory.states import NO_PARAMETERS, Trained, in_units, parameters_of, replicas
from actcalc.memory.working import working
from actcalc.policy.outcome import LayerOutcome
from actcalc.run.staged import StagedRun
from actcalc.specs.numbers import percent
from actcalc.specs.recipes import Recipe
from actcalc.specs.training import Training

_WHOLE = Training(optimizer="none")


def beside_training(staged: StagedRun, rules: Recipe) -> tuple[Buffer, ...]:
    """Lines of buffers: a reference model's weights, and an engine's share of the device.

    The reference is loaded in the model's own type and sharded like it (TRL dpo_trainer.py
    create_model_from_path, prepare_fsdp; prepare_deepspeed shards at stage 3 alone). The engine
    takes its share of the whole device, weights and cache together (vLLM gpu_memory_utilization).
    """
    run, training, found = staged.run, staged.run.training, []
    if training.reference_model:
        count = _parameters(staged.base)
        sharded = run.layout.zero == 3 or in_units(staged.graph, rules)
        ranks = replicas(run.layout, training, expert=False) if sharded else 1
        size = -(-count * rules.weight // ranks)
        found.append(Buffer("reference model", size, True, True, "its weights, never updated"))
    memory = run.device.memory_bytes if run.device else None
    if training.generation_share and memory:
        size = int(training.generation_share * memory)
        share = f"{percent(training.generation_share, 0)} of the device"
        found.append(Buffer("generation engine", size, True, False, share))
    return tuple(found)


def reference_part(timeline: Timeline, base: ModelGraph) -> Part:
    """A forward of a reference model, which keeps nothing; ``base`` has its graphs."""
    options = timeline.options
    inside = [base.embedding, *(run.graph for run in base.runs)]
    alive = [
        working(base, LayerOutcome(graph, (), ONE, (), (), detached=True), options).forward
        for graph in inside
    ]
    end = Head(base, base.head, timeline.training, options)
    most = max(*alive, end.without_gradients())
    return Part(
        name=REFERENCE, count=1, first=-1, layers=0, stored=0, forward=most, backward=0,
        reruns=False, forward_at="", backward_at="", parameters=NO_PARAMETERS,
        trained=Trained(0, ()), shapes=frozenset(),
    )  # fmt: skip


def _parameters(base: ModelGraph) -> int:
    seen: set[str] = set()
    graphs = Counter(graph for graph, count in base.graphs(mtp=False) for _ in range(count))
    return sum(
        parameters_of(base, graph, _WHOLE, seen).total * count for graph, count in graphs.items()
    )
