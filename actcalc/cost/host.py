"""Seconds that the host spends to run ops and launch their kernels, beside the device's own.

The host runs ahead of the device: a queue of launches hides what it spends as long as it spends
less than the device. Where it spends more, the device waits. What it spends is a figure of the
framework (``kernel_host_seconds``, ``product_host_seconds``) times the pace of the machine's host;
how often, is the number of kernels of an op. Captured in a CUDA graph, an op costs it nothing.

Kernels of Megatron-Core's experts are counted in its own code (0.16.1, one layer of 16 experts run
under a ``TorchDispatchMode`` that counts ATen ops other than views): router 27 forward and 19
backward with a load-balancing loss, 11 and 12 without, of which the gate is 2 and 2; permutation
7 and the splits that the exchange needs 12; unpermutation 5; single experts 6 and 11 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actcalc.cost.fp8 import Scaling, launches, scaling_of
from actcalc.cost.optime import OpTime
from actcalc.cost.rates import Rates
from actcalc.layers.adapters import low_rank
from actcalc.layers.core.algebra import Expr
from actcalc.layers.core.either import real
from actcalc.layers.core.graph import Graph, Op
from actcalc.run.staged import StagedRun

# Scheduling one of Transformer Engine's linear layers in fp8 takes the host more than twice as long
# as in bf16: it casts, keeps scales and updates them (NVIDIA/TransformerEngine issue 761).
_FP8_PRODUCT = 2.0
_ROUTING_BALANCED = (25, 17)
_ROUTING = (9, 10)
_DISPATCH = (21, 8)
_COMBINE = (5, 4)
_SINGLE_EXPERT = (6, 11)
_ADAPTER = (4, 6)  # two products, scaling, addition; four products, scaling, addition
# Rotating queries or keys op by op: sine, cosine, casts, halves, products, sum, concatenation
# (Megatron-Core models/common/embeddings/rope_utils.py _apply_rotary_pos_emb_bshd).
_ROTARY = (10, 8)


class Spent(NamedTuple):
    """Seconds of the host for one op."""

    forward: float
    backward: float


class Host:
    """What the host spends on the ops of a run."""

    def __init__(self, staged: StagedRun, rates: Rates) -> None:
        context, framework = staged.graph.context, staged.run.framework
        pace = rates.shares.host_pace
        self.kernel: float = framework.kernel_host_seconds * pace
        """Seconds for a kernel of its own."""
        self.product: float = framework.product_host_seconds * pace
        """Seconds for a module with a matrix product."""
        self.inner: float = rates.shares.launch_seconds * pace
        """Seconds for a further kernel that the same module launches."""
        self.captured: str = context.workload.kernels.cuda_graphs
        self.vendor: bool = framework.transformer_engine
        self.megatron: bool = framework.layers != "pytorch"
        self.kernels = context.workload.kernels
        self.scaling: Scaling | None = None
        if context.workload.fp8_products:
            self.product *= _FP8_PRODUCT
            self.scaling = scaling_of(self.kernels.fp8_recipe, vendor=self.vendor)
        self.sizes = staged.graph.sizes
        self._norms: dict[Graph, set[str]] = {}

    def waits(self, graph: Graph) -> bool:
        """Whether the host waits for the device in each forward: to learn how many tokens come.

        A dispatcher that drops no tokens copies the numbers of tokens to the host before it can
        size its buffers (Megatron-Core token_dispatcher.py cuda_sync_point).
        """
        return self.megatron and any(op.kind == "dispatch" for op in graph.ops)

    def _inside(self, graph: Graph) -> set[str]:
        """Norms that run in the module of the product that alone reads them (LayerNormLinear)."""
        if graph not in self._norms:
            readers: dict[str, list[Op]] = {}
            for op in graph.ops:
                for name in op.inputs:
                    readers.setdefault(name, []).append(op)
            self._norms[graph] = {
                op.name
                for op in graph.ops
                if op.kind == "norm"
                and [reader.kind for reader in readers.get(op.outputs[0], ())] == ["linear"]
            }
        return self._norms[graph]

    def spent(self, graph: Graph, op: Op, time: OpTime) -> Spent:
        """Seconds for one op of ``graph``, forward and backward."""
        if not self.kernel or self.captured == "full":
            return Spent(0.0, 0.0)
        if self.captured == "attention" and op.group == "attention":
            return Spent(0.0, 0.0)
        if op.kind == "linear":
            own = self._product(graph.factor(op))
            if low_rank(op.name) in op.outputs:
                return Spent(
                    own.forward + _ADAPTER[0] * self.kernel,
                    own.backward + _ADAPTER[1] * self.kernel,
                )
            return own
        if self.vendor and op.kind in ("core", "norm"):
            once = 0.0 if op.name in self._inside(graph) else self.product
            return Spent(once, once)
        forward, backward = self._launches(op, time)
        return Spent(forward * self.kernel, backward * self.kernel)

    def _product(self, shape: Sequence[Expr]) -> Spent:
        """A module with a product by a weight of that shape, or one product per local expert."""
        if len(shape) < 3:
            return Spent(self.product, self.product + self.inner)
        local = real(shape[0].value(self.sizes))
        if self.kernels.moe_grouped_gemm == "off" or not self.vendor:
            forward, backward = _SINGLE_EXPERT
            # Two projections share what an expert launches.
            return Spent(local * forward * self.kernel / 2, local * backward * self.kernel / 2)
        # Beside its product each expert has a part of the input cut out and tensors allocated
        # (NVIDIA/TransformerEngine issue 1499): as much as an op of its own.
        once = self.product + self._quantising(local)
        return Spent(once + local * self.kernel, once + 2 * local * self.kernel)

    def _quantising(self, local: float) -> float:
        """Seconds to launch what quantises the parts of so many experts, where they run in fp8."""
        if self.scaling is None or self.scaling.together:
            return 0.0  # the product's own figure has it
        return launches(self.scaling, local) * self.inner

    def _launches(self, op: Op, time: OpTime) -> tuple[float, float]:
        if not self.megatron:
            return time.kernels, time.backward_kernels
        if op.kind == "router":
            return _ROUTING_BALANCED if "aux_loss" in op.outputs else _ROUTING
        if op.kind == "dispatch":
            return _DISPATCH if op.name == "dispatch" else _COMBINE
        if op.kind == "rotary" and not self.kernels.apply_rope_fusion:
            return _ROTARY
        return time.kernels, time.backward_kernels
