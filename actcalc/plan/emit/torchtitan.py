"""The best plan torchtitan's settings can express: none, full, every k-th layer, or op by op.

What there is to choose from (torchtitan/distributed/activation_checkpoint.py):

- 0.2, section ``[activation_checkpoint]``: ``mode`` none, full or selective. Selective is
  ``selective_ac_option = "k"`` (each k-th layer re-runs whole) or ``"op"``: a checkpoint of every
  layer that keeps fused attention and every second product; a product whose weight has the shape
  of a module named in ``per_op_sac_force_recompute_mm_shapes_by_fqns`` always re-runs and is not
  counted.
- 0.3: the field ``activation_checkpoint`` is None, ``FullAC.Config()``, or
  ``SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=...)``; each k-th layer takes a subclass.

``memory_budget`` (0.2) and ``MemoryBudgetAC`` (0.3) leave the choice to torch.compile's partitioner
and are not among the plans compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from actcalc.layers.core.graph import Graph, Op
from actcalc.plan.named import Fit, Rivals
from actcalc.plan.options import outcome_of
from actcalc.plan.planner import RunPlanner
from actcalc.plan.ways import Measured
from actcalc.policy.rules import cached_ops, counted_products, executed
from actcalc.solve.options import Option

Shape = tuple[int, ...]

MODULES = {
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "out": "attention.wo",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "fc2": "feed_forward.w2",
    "q_down": "attention.wq_a",
    "q_up": "attention.wq_b",
    "kv_down": "attention.wkv_a",
    "kv_up": "attention.wkv_b",
    "shared_gate": "moe.shared_experts.w1",
    "shared_up": "moe.shared_experts.w3",
    "shared_fc2": "moe.shared_experts.w2",
}
"""torchtitan's module of each product (models/llama3/model/model.py, deepseek_v3, moe/moe.py)."""

_GATE = "moe.router.gate"
"""What the setting names by default: a list of one's own stands in its place."""

_MOST_SHAPES = 8


@dataclass(frozen=True)
class Setting:
    """One plan: what it is in words, the lines of 0.2's TOML, and 0.3's Python."""

    plan: str
    toml: str
    python: str
    fit: Fit


def best_setting(planner: RunPlanner, budget: int) -> Setting | None:
    """The cheapest setting that fits on every stage; None if none does."""
    fitting = [setting for setting in settings(planner, budget) if setting.fit.fits]
    return min(fitting, key=lambda one: (one.fit.cost or 0, one.fit.peak_bytes or 0), default=None)


def settings(planner: RunPlanner, budget: int) -> Iterator[Setting]:
    """Every setting, with how it fits, simple ones first."""
    rivals = Rivals(planner)
    for name, plan, toml, python in _WHOLE:
        yield Setting(plan, toml, python, rivals.single(name, budget))
    if "op" in rivals.names:
        for forced in _forced(planner):
            yield _per_op(rivals, forced, budget)
    for every in range(2, max(stage.layers for stage in planner.stages) + 1):
        yield Setting(
            f"full re-run of each {every}. layer",
            f'mode = "selective"\nselective_ac_option = "{every}"',
            _EVERY.replace("EVERY", str(every)),
            _every(rivals, every, budget),
        )


_IMPORT = "from torchtitan.distributed.activation_checkpoint import "

_WHOLE = (
    ("none", "nothing re-run", 'mode = "none"', "activation_checkpoint=None"),
    (
        "full",
        "full re-run of every layer",
        'mode = "full"',
        f"{_IMPORT}FullAC\nactivation_checkpoint=FullAC.Config()",
    ),
)

_EVERY = f"""from dataclasses import dataclass
{_IMPORT}FullAC

class EveryNth(FullAC):
    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        every: int = EVERY

    def _wrap_block(self, module, *, base_fqn=None):
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen % self.config.every:
            return module
        return super()._wrap_block(module, base_fqn=base_fqn)

activation_checkpoint=EveryNth.Config()"""


def _every(rivals: Rivals, every: int, budget: int) -> Fit:
    # torchtitan counts layers from one: the every-th, not the first, is wrapped
    # (distributed/activation_checkpoint.py, _apply_layer_sac).
    full = rivals.policy("full")
    return rivals.skipping(f"every {every}", full, lambda at: (at + 1) % every != 0, budget)


# --- op by op -------------------------------------------------------------------------------------


def _per_op(rivals: Rivals, forced: frozenset[Shape], budget: int) -> Setting:
    planner = rivals.planner
    options = {
        id(run.graph): per_op_option(planner, run.graph, forced) for run in planner.model.kinds
    }
    fit = rivals.uniform("op", lambda graph: options[id(graph)], budget)
    names = tuple(
        dict.fromkeys(
            _module_of(planner, run.graph, shape)
            for run in planner.model.kinds
            for shape in sorted(forced)
        )
    )
    routed = any("router" in op.modules for run in planner.model.kinds for op in run.graph.ops)
    listed = ", ".join(f'"{name}"' for name in (*names, *((_GATE,) if routed else ())))
    plan = "selective checkpoint, op by op"
    if names:
        plan += f", {', '.join(names)} and products of their shape re-run"
    return Setting(
        plan,
        'mode = "selective"\nselective_ac_option = "op"\n'
        f"per_op_sac_force_recompute_mm_shapes_by_fqns = [{listed}]",
        f"{_IMPORT}SelectiveAC\nactivation_checkpoint=SelectiveAC.Config(\n"
        f"    force_recompute_mm_shapes_by_fqns=[{listed}],\n)",
        fit,
    )


def _forced(planner: RunPlanner) -> Iterator[frozenset[Shape]]:
    """Sets of weight shapes whose products may be told to re-run; the empty one first."""
    shapes = {
        _shape(planner, op): None
        for run in planner.model.kinds
        for op in counted_products(run.graph)
        if op.name in MODULES
    }
    if len(shapes) > _MOST_SHAPES:
        shapes = {}
    for size in range(len(shapes) + 1):
        for chosen in combinations(shapes, size):
            yield frozenset(chosen)


def per_op_option(planner: RunPlanner, graph: Graph, forced: Iterable[Shape] = ()) -> Measured:
    """One layer under the per-op checkpoint, products of the shapes ``forced`` always re-run."""
    sizes = planner.model.sizes
    forced = frozenset(forced)
    cached = cached_ops(
        graph, {op.name for op in counted_products(graph) if _shape(planner, op) in forced}
    )
    kept = {graph.input, *(n for op in graph.ops if op.name in cached for n in op.outputs)}
    restored = [name for name in graph.saved if name not in kept and name not in graph.shared]
    again = tuple(op for op in graph.ops if op.name not in cached)
    ran = executed(graph, again, early_stop=planner.run.framework.early_stop)
    option = Option(
        sum(int(graph.tensors[name].bytes.value(sizes)) for name in kept),
        sum(int(graph.tensors[name].bytes.value(sizes)) for name in restored),
        planner.costs.total(graph, ran),
        "op",
    )
    return Measured(option, outcome_of(graph, kept, [op.name for op in ran]))


def _shape(planner: RunPlanner, op: Op) -> Shape:
    return tuple(int(dim.value(planner.model.sizes)) for dim in op.weights[0].shape)


def _module_of(planner: RunPlanner, graph: Graph, shape: Shape) -> str:
    """A module whose weight has this shape, one whose name 0.3 left alone where there is one."""
    found = [
        MODULES[op.name]
        for op in counted_products(graph)
        if op.name in MODULES and _shape(planner, op) == shape
    ]
    return max(found, key=lambda name: name[-2:] in ("wo", "w1", "w2", "w3"))


def text_of(setting: Setting) -> str:
    """The settings of 0.2, and as a comment those of 0.3."""
    newer = "\n".join(f"# {line}".rstrip() for line in setting.python.splitlines())
    return (
        f"[activation_checkpoint]\n{setting.toml}\n# torchtitan 0.3, for Trainer.Config:\n{newer}"
    )


def notes_of(planner: RunPlanner, setting: Setting) -> tuple[str, ...]:
    """What to mind about a setting."""
    notes = ["MemoryBudgetAC (torch.compile's own choice) is not among the plans compared."]
    if not planner.run.framework.per_op_policy:
        notes.append("Nor is the per-op list: --framework torchtitan counts its products.")
    if '"op"' in setting.toml:
        notes.append(
            "Counted with wq, wk and wv apart: in 0.3 build the model with fuse_qkv=False."
        )
    return tuple(notes)
