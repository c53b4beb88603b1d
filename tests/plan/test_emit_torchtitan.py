"""torchtitan's settings: what each keeps, the best of them, and text that its versions read."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from actcalc.io.runs import load_run
from actcalc.plan.emit.targets import emitted, optimum
from actcalc.plan.emit.torchtitan import best_setting, per_op_option, settings
from actcalc.plan.named import Rivals
from actcalc.plan.options import policy_option
from actcalc.plan.planner import RunPlanner
from actcalc.plan.settings import PlanSettings
from actcalc.policy.rules import parse_policy

SEQ = 2048
GB = 10**9


def llama(framework: str = "torchtitan", **settings: Any) -> RunPlanner:
    run = load_run("llama-3-8b", framework=framework, workload={"seq": SEQ})
    return RunPlanner(run, PlanSettings(activations_only=True, **settings))


def test_per_op_is_the_policy_of_that_name() -> None:
    planner = llama()
    graph = planner.model.runs[0].graph
    own = per_op_option(planner, graph).option
    policy = policy_option(planner.model, graph, planner.costs, parse_policy("op"))
    assert (own.stored, own.working, own.cost) == (policy.stored, policy.working, policy.cost)


def test_forced_shapes_leave_the_count_to_the_others() -> None:
    """w1 and w3 have one shape: without them q, v and w2 are the first, third and fifth product."""
    planner = llama()
    graph = planner.model.runs[0].graph
    tokens, h, kv, f, heads = SEQ, 4096, 1024, 14336, 32
    attention = 2 * tokens * h + 4 * tokens * heads + 24
    forced = per_op_option(planner, graph, [(f, h)]).option
    assert forced.stored == 2 * tokens * (h + h + kv + h) + attention
    every = per_op_option(planner, graph, [(f, h), (h, f), (h, h), (kv, h)]).option
    assert every.stored == 2 * tokens * h + attention
    plain = per_op_option(planner, graph).option
    flops = [planner.costs.value(option.cost) for option in (plain, forced, every)]
    assert flops == [
        2 * tokens * h * (kv + h + f),  # k, out, w3
        2 * tokens * h * (kv + h + 2 * f),  # k, out, w1, w3
        2 * tokens * h * (2 * kv + 2 * h + 3 * f),  # all but attention
    ]


@pytest.mark.parametrize("model", ["stored", "stored+working", "timeline"])
def test_the_best_of_all_settings(model: Any) -> None:
    planner = llama(memory_model=model)
    low, high = planner.smallest, planner.free
    seen = set()
    for share in (0, 1, 3, 5, 7, 9, 10):
        budget = low + (high - low) * share // 10
        every = list(settings(planner, budget))
        fitting = [one.fit.cost for one in every if one.fit.fits]
        best = best_setting(planner, budget)
        if best is None:
            assert not fitting
            continue
        assert best.fit.cost == min(cost for cost in fitting if cost is not None)
        assert best.fit.peak_bytes is not None
        assert best.fit.peak_bytes <= budget
        least = optimum(planner, budget)
        assert least is not None
        assert best.fit.cost >= least
        seen.add(best.toml.split("\n")[1] if "\n" in best.toml else best.toml)
    assert 'selective_ac_option = "op"' in seen
    assert any(word[-2].isdigit() for word in seen)
    assert best_setting(planner, 2**50).toml == 'mode = "none"'  # type: ignore[union-attr]


def test_every_setting_is_what_the_policy_of_its_name_keeps() -> None:
    planner = llama(memory_model="stored")
    rivals = Rivals(planner)
    found = {one.toml: one.fit for one in settings(planner, 2**50)}
    assert found['mode = "full"'].peak_bytes == rivals.single("full", 2**50).peak_bytes
    for every in (2, 5, 32):
        fit = found[f'mode = "selective"\nselective_ac_option = "{every}"']
        assert fit.peak_bytes == rivals.single(f"every:{every}", 2**50).peak_bytes
        assert fit.cost == rivals.single(f"every:{every}", 2**50).cost


def test_only_its_own_profile_has_the_per_op_list() -> None:
    assert "op" in Rivals(llama()).names
    assert "op" not in Rivals(llama("megatron")).names
    found = emitted("torchtitan", llama("megatron"), 20 * GB)
    assert '"op"' not in found.text
    assert any("per-op" in note for note in found.notes)


class FullAC:
    """Stands for torchtitan's: a block that it wraps is "wrapped"."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __init__(self, config: Any) -> None:
        self.config = config

    def _wrap_block(self, module: Any, *, base_fqn: str | None = None) -> str:
        return "wrapped"


class SelectiveAC:
    """Stands for torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        force_recompute_mm_shapes_by_fqns: list[str]


def test_both_versions_read_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2 reads TOML, 0.3 Python; both say the same."""
    name = "torchtitan.distributed.activation_checkpoint"
    stand_in: Any = ModuleType(name)
    stand_in.FullAC, stand_in.SelectiveAC = FullAC, SelectiveAC
    for part in ("torchtitan", "torchtitan.distributed", "pasted"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, name, stand_in)
    planner = llama(memory_model="stored")
    kinds = set()
    for budget in (3 * GB // 2, 3 * GB, 4 * GB, 6 * GB, 10 * GB, 14 * GB, 100 * GB):
        found = emitted("torchtitan", planner, budget)
        if not found.feasible:
            continue
        section = tomllib.loads(found.text)["activation_checkpoint"]
        newer = found.text.split("# torchtitan 0.3, for Trainer.Config:\n")[1]
        code = "\n".join(line.removeprefix("#").removeprefix(" ") for line in newer.splitlines())
        space: dict[str, Any] = {"__name__": "pasted"}
        exec(compile(code, "pasted", "exec"), space)
        made = space["activation_checkpoint"]
        option = section.get("selective_ac_option")
        kinds.add("op" if option == "op" else "every" if option else section["mode"])
        if section["mode"] == "none":
            assert made is None
        elif section["mode"] == "full":
            assert isinstance(made, FullAC.Config)
        elif option == "op":
            assert (
                made.force_recompute_mm_shapes_by_fqns
                == section["per_op_sac_force_recompute_mm_shapes_by_fqns"]
            )
        else:
            policy = space["EveryNth"](made)
            blocks = [policy._wrap_block("plain", base_fqn=f"layers.{i}") for i in range(32)]
            every = int(option)
            wrapped = [i for i, block in enumerate(blocks) if block == "wrapped"]
            assert wrapped == list(range(every - 1, 32, every))
    assert {"none", "op", "every"} <= kinds
