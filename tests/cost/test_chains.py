"""Bytes of norms and rotations that run op by op, counted in the code they name."""

from __future__ import annotations

import pytest

from actcalc.cost.chains import CHAINS
from actcalc.cost.roofline import roofline_of
from actcalc.io.runs import load_run
from actcalc.run.staged import StagedRun
from actcalc.specs.kinds import KINDS

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

VIEWS = {
    "view", "_unsafe_view", "expand", "slice", "unsqueeze", "detach", "alias", "view_as_real",
    "view_as_complex", "_conj", "_reshape_alias",
}  # fmt: skip


class Counted(TorchDispatchMode):
    """Bytes in and out of ATen ops, and their number."""

    moved = kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] not in VIEWS:
            tensors = [one for one in tree_leaves((args, out)) if isinstance(one, torch.Tensor)]
            self.moved += sum(map(size, tensors))
            self.kernels += 1
        return out


def size(tensor):
    """Bytes that a tensor really has: what is expanded counts once."""
    own = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(own).numel() * tensor.element_size()


def counted(function, x, *others):
    """Bytes of an element and kernels, forward and backward."""
    with Counted() as forward:
        out = function(x, *others)
    wanted = [one for one in (x, *others) if one.requires_grad]
    ones = torch.ones_like(out)
    with Counted() as backward:
        torch.autograd.grad(out, wanted, ones)
    return (
        forward.moved / x.numel(), forward.kernels, backward.moved / x.numel(), backward.kernels,
    )  # fmt: skip


def normed(x):
    """In fp32: the input, and over its root mean square."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


NORMS = {
    "rms": lambda x, weight: weight * normed(x).to(x.dtype),
    "rms_late_cast": lambda x, weight: (weight * normed(x)).to(x.dtype),
    "rms_gemma": lambda x, weight: (normed(x) * (1.0 + weight.float())).to(x.dtype),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    x = torch.randn(256, 4096, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
    known = CHAINS["norm", name]
    assert counted(NORMS[name], x, weight) == pytest.approx(tuple(known[:4]), rel=0.01)
    _, _, moved, kernels = counted(NORMS[name], x, weight.detach())
    assert moved == pytest.approx(known.backward - known.weight, rel=0.01)
    assert kernels == known.backward_kernels - known.weight_kernels


def test_rotations():
    x = torch.randn(1, 16, 64, 128, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(1, 1, 64, 128, dtype=torch.bfloat16)
    turns = torch.polar(torch.ones(64, 64), torch.randn(64, 64))

    def half(x):
        left, right = x[..., :64], x[..., 64:]
        return x * table + torch.cat((-right, left), -1) * table

    def turned(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], 64, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    assert counted(half, x) == pytest.approx(tuple(CHAINS["rotary", "half"][:4]), rel=0.02)
    assert counted(turned, x)[:2] == pytest.approx(CHAINS["rotary", "complex"][:2], rel=0.1)


def test_each_chain_is_a_kernel_of_the_pytorch_layers():
    kernels = KINDS["pytorch"]
    norms = {*kernels["rmsnorm"].kernels, *kernels["gemma_rmsnorm"].kernels}
    for kind, name in CHAINS:
        assert name in (norms if kind == "norm" else kernels["rotary"].kernels)


def test_a_layer_takes_them():
    """LlamaRMSNorm of 4,096 tokens of width 4,096 in 16 bits."""
    run = load_run(
        "llama-3-8b",
        framework="transformers",
        device="a100-80gb",
        workload={"seq": 4096, "micro_batch": 1},
        training={"recipe": "pure"},
    )
    roofline = roofline_of(StagedRun(run))
    graph = roofline.model.runs[0].graph
    (norm,) = [one for one in roofline.ops(graph) if one.name == "norm1"]
    rates = roofline.rates
    moved = 36 * 4096 * 4096 / rates.memory
    assert norm.forward == pytest.approx(moved + 8 * rates.shares.kernel_seconds)
    assert norm.kernels == 8
