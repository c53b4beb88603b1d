"""torchtitan's selective checkpoints, as closed forms of a Llama block; its blocks with experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actcalc.api import compare, memory
from actcalc.errors import SpecError
from actcalc.io.runs import load_run
from actcalc.layers.core.graph import size_of
from actcalc.policy.rules import cached_ops
from actcalc.run.staged import StagedRun
from actcalc.specs import Workload


@pytest.mark.parametrize(("seq", "batch"), [(8192, 1), (2048, 4), (96, 3)])
def test_per_op_checkpoint_keeps_every_second_product_and_attention(seq, batch):
    """distributed/activation_checkpoint.py: wq, wv, w1, w2 and sdpa's outputs, and the input."""
    workload = Workload(seq=seq, micro_batch=batch, attention="sdpa")
    result = compare("llama-3-8b", workload=workload, framework="torchtitan", policies=["op"])
    tokens, h, q, kv, f, heads = seq * batch, 4096, 4096, 1024, 14336, 32
    products = 2 * tokens * (q + kv + f + h)
    attention = 2 * tokens * q + 4 * tokens * heads + 24
    assert result.policies[0].stored_bytes_per_layer == 2 * tokens * h + products + attention


@pytest.mark.parametrize(("every", "wrapped"), [(1, 32), (2, 16), (3, 10), (32, 1)])
def test_every_nth_layer_is_wrapped(every, wrapped):
    """Layers are counted from 1 and wrapped when the number divides theirs."""
    names = ["none", "full", f"every:{every}"]
    none, full, some = (
        p.stored_bytes
        for p in compare("llama-3-8b", framework="torchtitan", policies=names).policies
    )
    assert some * 32 == none * (32 - wrapped) + full * wrapped


EXPERTS = json.loads((Path(__file__).parents[1] / "data" / "torchtitan_experts.json").read_text())
SCALED = {
    "experts": 16, "topk": 1, "ffn": 4096, "shared_ffn": 4096, "router": "sigmoid",
    "normalize_topk": False, "scale_input": True,
}  # fmt: skip


def block_with_experts(case, **more):
    scaled = case["model"] == "scaled"
    run = load_run(
        "qwen3-30b-a3b" if scaled else case["model"],
        model={"moe": SCALED} if scaled else {},
        layout={k: case[k] for k in ("tp", "ep", "etp")} | {"sp": case["tp"] > 1, "dp": 8},
        workload={k: case[k] for k in ("seq", "micro_batch")} | {"attention": "sdpa"},
        framework="torchtitan",
    )
    staged = StagedRun(run)
    kinds = [kind.graph for kind in staged.kinds if kind.graph.parameters().symbols() & {"E"}]
    return kinds[0], staged.graph.sizes


@pytest.mark.parametrize(
    "case", EXPERTS["blocks"], ids=lambda case: "-".join(map(str, case.values()))
)
def test_blocks_with_experts_keep_what_their_code_does(case):
    """Router, dispatch over ep and etp, experts and their sum, to the byte."""
    graph, sizes = block_with_experts(case)
    saved = [name for name in graph.saved if name not in graph.shared]
    assert size_of(graph, saved, sizes) == case["saved_bytes"]


def test_per_op_checkpoint_leaves_router_and_grouped_products_out():
    """mm of router and grouped products re-run; exchanges are kept (_op_sac_save_list)."""
    graph, _ = block_with_experts(EXPERTS["blocks"][2])
    names = {"q", "v", "sdpa_flash", "expert_arrived", "expert_returned"}
    assert cached_ops(graph) == names


@pytest.mark.parametrize(
    ("model", "layout", "word"),
    [
        ("qwen3-30b-a3b", {"tp": 4, "sp": True, "dp": 2, "ep": 8}, "etp"),
        ("qwen3-30b-a3b", {"tp": 4, "sp": True, "dp": 2, "etp": 1}, "etp 1"),
        ("qwen3-30b-a3b", {"tp": 4, "sp": True, "dp": 2, "ep": 2, "etp": 2}, "etp 1 or tp 4"),
        ("qwen1.5-moe-a2.7b", {}, "a gate of the shared expert"),
    ],
)
def test_what_its_experts_have_not_is_refused(model, layout, word):
    with pytest.raises(SpecError, match=word):
        memory(model, framework="torchtitan", **layout)


def test_experts_are_sharded_over_what_expert_parallelism_leaves():
    """ParallelDims: efsdp is fsdp times tp over ep times etp, fsdp for the rest."""
    whole = memory("qwen3-30b-a3b", framework="torchtitan", dp=8, zero=3).stages[0]
    apart = memory("qwen3-30b-a3b", framework="torchtitan", dp=8, zero=3, ep=8).stages[0]
    assert abs(whole.weights_bytes - apart.weights_bytes) <= 8
    assert apart.parameters < whole.parameters
