"""torchtitan's selective checkpoints, as closed forms of a Llama block."""

from __future__ import annotations

import pytest

from actcalc.api import compare
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
