"""Ring attention's temporaries are those of PyTorch's own code, traced on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun

torch = pytest.importorskip("torch")

SEQ, HEADS, WIDTH = 256, 32, 128


def traced(degree: int, rank: int, groups: int) -> tuple[int, int, int]:
    """Most bytes alive in forward and in backward beside what the op takes, and what it makes.

    Of one rank's piece of ``SEQ`` tokens, without the keys and values that are gathered.
    """
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    class Live(TorchDispatchMode):
        """Bytes of all live storages; a collective's wait is no tensor of its own."""

        def __init__(self, known: list[Any]) -> None:
            super().__init__()
            self.live: dict[int, int] = {}
            self.now = self.most = 0
            for tensor in known:
                self.see(tensor)
            self.start = self.now

        def see(self, tensor: Any) -> None:
            if not isinstance(tensor, torch.Tensor):
                return
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.live:
                return
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key)

        def gone(self, key: int) -> None:
            self.now -= self.live.pop(key, 0)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if "wait_tensor" in str(func):
                return args[0]
            made = func(*args, **(kwargs or {}))
            torch.utils._pytree.tree_map(self.see, made)
            return made

    def piece(heads: int) -> Any:
        shape = (1, SEQ, heads, WIDTH)
        return torch.empty(shape, dtype=torch.bfloat16).transpose(1, 2)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degree)
    try:
        mesh = init_device_mesh("cpu", (degree,))
        with FakeTensorMode():
            q, k, v = piece(HEADS), piece(groups), piece(groups)
            gathered = 2 * 2 * k.numel() * degree
            ahead = Live([q, k, v])
            with ahead:
                out, lse, *rest = _attention._scaled_dot_product_ring_flash_attention(
                    mesh, q, k, v, is_causal=True
                )
            made = 2 * q.numel() + 4 * SEQ * HEADS
            gradient = piece(HEADS)
            back = Live([q, k, v, out, lse, gradient])
            with back:
                _attention._scaled_dot_product_ring_flash_attention_backward(
                    mesh, grad_out=gradient, query=q, key=k, value=v, out=out, logsumexp=lse,
                    cum_seq_q=None, cum_seq_k=None, max_q=SEQ, max_k=SEQ, dropout_p=0.0,
                    is_causal=True, philox_seed=rest[0], philox_offset=rest[1],
                )  # fmt: skip
        forward = ahead.most - ahead.start - gathered - made
        own = 2 * (q.numel() + 2 * k.numel())
        return forward, back.most - back.start - gathered - own, out.stride(1)
    finally:
        dist.destroy_process_group()


def cases() -> Iterator[tuple[int, int]]:
    for degree in (2, 3, 4, 8):
        for groups in (1, 4, 8, 16, 32):
            yield degree, groups


@pytest.mark.parametrize(("degree", "groups"), list(cases()))
def test_temporaries_are_the_traced_ones(degree: int, groups: int) -> None:
    """To half a logsumexp, of which backward makes a copy at one of its moments."""
    run = load_run(
        "llama-3-8b",
        model={"heads": HEADS, "kv_heads": groups, "hidden": 4096, "head_dim": WIDTH},
        workload={"seq": SEQ * degree, "micro_batch": 1, "attention": "sdpa"},
        layout={"cp": degree, "dp": 2, "zero": 3},
        framework="torchtitan-0.2.2",
    )
    graph = StagedRun(run).graph
    (op,) = (op for op in graph.runs[0].graph.ops if op.kernel == "ring flash")
    sizes = graph.sizes
    forward, backward, head = traced(degree, degree - 2, groups)
    assert head == SEQ * WIDTH  # the result lies in head order, so that token order is a copy
    assert "core_out" in op.outputs
    assert abs(int(op.forward_scratch.value(sizes)) - forward) <= 64
    assert 0 <= backward - int(op.backward_scratch.value(sizes)) <= 2 * SEQ * HEADS + 64
