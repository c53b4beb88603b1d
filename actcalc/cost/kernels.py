"""Seconds of each op of a graph: products by their shapes, other kernels by the bytes they move.

Collectives run beside products where the framework lets them; what is left is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from actcalc.cost import attention
from actcalc.cost.adapters import Beside, adapter_seconds, whole_again_seconds
from actcalc.cost.chains import CHAINS, Chain
from actcalc.cost.collective import collective_seconds, group_of, sent_once_seconds
from actcalc.cost.exchange import beside_exchange
from actcalc.cost.flops import core_share
from actcalc.cost.fp8 import launches, scaling_of
from actcalc.cost.gemm import Product, gemm_seconds, misaligned
from actcalc.cost.optime import OpTime, beside
from actcalc.cost.rates import Rates
from actcalc.cost.sequences import gathered_share, in_order, stacked
from actcalc.layers.adapters import low_rank
from actcalc.layers.core.algebra import ONE, added, least, most
from actcalc.layers.core.either import largest_of, nothing, real, wide
from actcalc.layers.core.graph import Collective, Comm, DType, Graph, Op
from actcalc.layers.model import ModelGraph
from actcalc.memory.states import recipe
from actcalc.run.staged import StagedRun
from actcalc.specs.training import Training

_INTEGERS = (DType.BOOL, DType.UINT8, DType.INT32, DType.INT64)
# Bytes per logit of Megatron's vocabulary-parallel cross-entropy, op by op: cast to fp32 2+4,
# maximum 4, subtraction in place 4+4, exponential 4+4, sum 4, division 4+4 (tensor_parallel/
# cross_entropy.py); backward scales the softmax in place 4+4 and casts it back 4+2.
_LOSS_FORWARD = 38
_LOSS_BACKWARD = 14
# The same of a kernel that keeps fp32 in registers (compiled, flash-attn's or apex's): logits read
# twice forward; read and overwritten by their gradient backward.
_FUSED_LOSS_FORWARD = 4
_FUSED_LOSS_BACKWARD = 4
# A cross-entropy that is only logged (torch.nn.functional.cross_entropy): cast to fp32 2+4,
# log-softmax 4+4 read, 4 written.
_METRIC = 18


class GradientBytes(NamedTuple):
    """Bytes per weight that its gradient moves in one micro-batch."""

    product: float
    """By the product that makes it."""
    after: float
    """By kernels after it: sums, casts and copies."""


def _gradient_bytes(staged: StagedRun) -> GradientBytes:
    """How the framework stores and sums weight gradients, as its recipe says.

    - fused: added into an fp32 (or 16-bit) buffer inside the product (gradient_accumulation_
      fusion), or made first and added then.
    - twice: autograd sums into a zeroed 16-bit gradient (three passes), which is cast and added
      to an fp32 one and zeroed (runtime/bf16_optimizer.py update_hp_grads).
    - collected: copied into the reduction's buffer and cast to its type (torch
      distributed/fsdp/_runtime_utils.py _post_backward_hook; fully_shard's chunk_cat).
    - cast: to fp32, then added where several micro-batches are.
    - own type: added where several micro-batches are.
    """
    training, context = staged.run.training, staged.graph.context
    rules = recipe(staged.graph, training)
    item = float(context.act.itemsize)
    several = staged.microbatches > 1
    if rules.summed == "fused":
        size = rules.gradient
        if training.gradient_fusion:
            return GradientBytes(2.0 * size, 0.0)
        return GradientBytes(item, item + 2.0 * size)
    if rules.summed == "twice":
        return GradientBytes(item, 3 * item + (item + 4) + 12 + item)
    if rules.summed == "collected":
        cast = 0.0 if training.gradients_in_16_bit else item + 4.0
        return GradientBytes(item, 2 * item + cast)
    if rules.summed == "cast":
        return GradientBytes(item, item + 4 + (12.0 if several else 0.0))
    return GradientBytes(item, 3 * item if several else 0.0)


class Kernels:
    """What the times of a run's ops depend on beside their graph."""

    def __init__(self, staged: StagedRun, rates: Rates) -> None:
        model, framework = staged.graph, staged.run.framework
        self.model: ModelGraph = model
        self.rates = rates
        self.training: Training = staged.run.training
        self.microbatches: int = staged.microbatches
        self.eager: bool = framework.op_by_op
        """Element-wise chains run op by op (torch modules without fused kernels)."""
        self.vendor: bool = framework.transformer_engine
        """The vendor's own kernels run (Transformer Engine)."""
        self.attention: tuple[float, float] = (rates.attention_forward, rates.attention_backward)
        """FLOP/s of fused attention, forward and backward, in the framework's kernel."""
        if self.vendor:
            self.attention = rates.vendor_attention_forward, rates.vendor_attention_backward
        self.scaling = scaling_of(model.context.workload.kernels.fp8_recipe, vendor=self.vendor)
        self.gradient = _gradient_bytes(staged)
        runs = (*model.runs, *([model.mtp] if model.mtp else []))
        self.core_share = {run.graph: core_share(model, run) for run in runs}


class _Products(NamedTuple):
    """A matrix product with a weight, and seconds of it and its gradients."""

    whole: Product
    forward: float
    dgrad: float
    wgrad: float


class OpTimer:
    """Times the ops of one graph."""

    def __init__(self, run: Kernels, graph: Graph) -> None:
        self.graph = graph
        self.run = run
        self.rates = run.rates
        self.context = run.model.context
        self.sizes: Mapping[str, Any] = run.model.sizes
        self.wide = wide(self.sizes)
        self.fused_loss = run.training.compiled_loss or run.training.loss == "fused"
        self.core_share = run.core_share.get(graph, ONE)
        self.readers: dict[str, int] = {}
        for op in graph.ops:
            for name in op.inputs:
                self.readers[name] = self.readers.get(name, 0) + 1
        self.fused_into = {} if run.eager else self._fusions()

    def _fusions(self) -> dict[str, str]:
        """Dropouts that one kernel does together with the addition after them (jit fusion)."""
        adders = {name: op for op in self.graph.ops if op.kind == "add" for name in op.inputs}
        return {
            op.name: adders[op.outputs[0]].name
            for op in self.graph.ops
            if op.kind == "dropout" and op.outputs[0] in adders and self.readers[op.outputs[0]] == 1
        }

    def size(self, name: str) -> float:
        """Bytes of one tensor."""
        found: float = real(self.run.model.tensor_bytes[self.graph][name])
        return found

    def _bytes(self, names: Iterable[str]) -> float:
        return sum(self.size(name) for name in dict.fromkeys(names))

    def _real(self, names: Iterable[str]) -> tuple[str, ...]:
        """Floating-point tensors of this layer alone: those that have gradients."""
        return tuple(
            name
            for name in dict.fromkeys(names)
            if self.graph.tensors[name].dtype not in _INTEGERS and name not in self.graph.shared
        )

    def _moved(self, moved: float, kernels: float = 1) -> float:
        """Seconds of kernels that move so many bytes; what moves nothing is none."""
        if nothing(moved):
            return 0.0
        return moved / self.rates.memory + kernels * self.rates.shares.kernel_seconds

    def times(self) -> tuple[OpTime, ...]:
        """Seconds of each op, in order."""
        return beside_exchange(tuple(self._times()), self.graph, self.run)

    def _times(self) -> Iterable[OpTime]:
        for op in self.graph.ops:
            if op.kind == "linear":
                yield self._linear(op)
            elif op.kind == "core":
                yield self._core(op)
            else:
                yield self._simple(op)

    # --- collectives ------------------------------------------------------------------------------

    def _comm(self, comm: Comm) -> float:
        narrow = self.run.scaling.gathered
        message = real(comm.bytes.value(self.sizes)) * gathered_share(
            comm, self.context, self.graph.name, narrow=narrow
        )
        size, stride = group_of(comm.group, self.sizes)
        moe, kernels = self.context.model.moe, self.context.workload.kernels
        once = kernels.moe_token_dispatcher_type == "flex"
        if once and moe and comm.group == "ep" and comm.collective is Collective.ALL_TO_ALL:
            return sent_once_seconds(message / moe.topk, moe, size, stride, self.rates)
        seconds = collective_seconds(comm.collective, message, size, stride, self.rates)
        return seconds + self._moved(*in_order(comm, message, self.context, self.sizes))

    def _stacked(self, comms: Iterable[Comm]) -> float:
        """Seconds of summing what came piece by piece, when all of it is there."""
        seconds: float = added(
            self._moved(stacked(one, real(one.bytes.value(self.sizes)), self.context, self.sizes))
            for one in comms
        )
        return seconds

    # --- matrix products with a weight ------------------------------------------------------------

    def _linear(self, op: Op) -> OpTime:
        products = self._products(op)
        forward, dgrad, wgrad = products.forward, products.dgrad, products.wgrad
        forward_comm = added(map(self._comm, op.comm))
        gathers, reduces, exposed = self._backward_comms(op)
        share = self.rates.shares.communication_multiprocessors
        kernels = self.context.workload.kernels
        if kernels.tp_comm_overlap and self.context.layout.sp:
            # The product runs in as many pieces as ranks, each beside the travel of the next
            # (of a scatter: the one before); one piece's travel has no work beside it.
            pieces = self.sizes["t"]
            whole = products.whole
            cut = whole._replace(m=whole.m / pieces)
            lost = pieces * gemm_seconds(cut, self.rates) - gemm_seconds(whole, self.rates)
            split = forward + most(0.0, lost)
            rest = (1 - 1 / pieces) * forward_comm
            forward_comm = beside(split, rest, share) - forward + forward_comm / pieces
            back = gathers + exposed
            gathers, exposed = (1 - 1 / pieces) * back, back / pieces
            forward_comm += self._stacked(op.comm)
            exposed += self._stacked(op.backward_comm)
        elif not kernels.async_tensor_model_parallel_allreduce:
            gathers, reduces, exposed = 0.0, 0.0, gathers + reduces + exposed
        grown_dgrad = beside(dgrad, gathers, share)
        grown_wgrad = beside(wgrad, reduces, share)
        dgrad_all = grown_dgrad + self._accumulate(op)
        return OpTime(
            op.name, op.kind, op.group, forward, forward_comm, dgrad_all, grown_wgrad, exposed,
            gathers + reduces, grown_dgrad - dgrad + grown_wgrad - wgrad,
        )  # fmt: skip

    def _products(self, op: Op) -> _Products:
        """A product and its two gradients, without collectives."""
        shape = [real(dim.value(self.sizes)) for dim in self.graph.factor(op)]
        outside, inside = shape[-2], shape[-1]
        local = shape[0] if len(shape) > 2 else 1.0
        rows = real(op.flops.value(self.wide)) / (2 * inside * outside) / local
        fp8 = self.context.workload.fp8_products
        operand = 1.0 if fp8 else float(self.context.act.itemsize)
        result = float(self.context.act.itemsize)
        missed, both = misaligned(operand, inside), misaligned(operand, inside, outside)
        whole = Product(rows, outside, inside, local, result, operand, missed)
        parameters = local * inside * outside
        forward = gemm_seconds(whole, self.rates)
        dgrad = gemm_seconds(
            Product(rows, inside, outside, local, result, operand, both), self.rates
        )
        gradient = self.run.gradient
        wgrad = gemm_seconds(
            Product(outside, inside, rows, local, gradient.product, operand, both), self.rates
        )
        if fp8:
            scaling, elements = self.run.scaling, rows * local
            forward = forward / scaling.speed + self._quantised(elements * inside, local)
            dgrad = dgrad / scaling.speed + self._quantised(elements * outside, local)
            wgrad /= scaling.speed
            if not self.run.vendor:
                forward += self._quantised(parameters / 2, local)
                dgrad += self._quantised(parameters / 2, local)
            elif self.run.microbatches == 1:
                forward += self._quantised(parameters, local)
        if self.context.autocast:
            # The fp32 weight is cast for each pass: 4 bytes read, 2 written.
            forward += self._moved(6 * parameters)
        if gradient.after:
            wgrad += self._moved(gradient.after * parameters, 2)
        if op.name == "qkv" and len(shape) == 2 and not self.run.vendor:
            # Queries, keys and values are views of one tensor; their gradients are copied into one
            # (PyTorch: backward of split is cat; Transformer Engine's SplitAlongDim needs none).
            dgrad += self._moved(2 * rows * local * outside * result)
        if any(w.name.endswith(".bias") and not w.frozen for w in op.weights[1:]):
            wgrad += self._moved(rows * local * outside * result)
            if not self.run.eager and op.name == "qkv":
                # Its bias is added by a kernel of its own; the others' join the kernel after them.
                forward += self._moved(2 * rows * outside * result)
        if not self.graph.trains(op):
            wgrad = 0.0  # a frozen weight has no gradient
        if self.run.training.lora_rank:
            beside = self._adapted(op, whole)
            forward, dgrad = forward + beside.forward, dgrad + beside.backward
        return _Products(whole, forward, dgrad, wgrad)

    def _quantised(self, elements: float, local: float) -> float:
        """Seconds of quantising an operand, of ``local`` experts, for both of its products."""
        scaling = self.run.scaling
        return self._moved(scaling.moved * elements, launches(scaling, local))

    def _adapted(self, op: Op, whole: Product) -> Beside:
        """What adapters of a frozen layer take, and making its quantised weight whole again."""
        training = self.run.training
        forward = backward = 0.0
        if low_rank(op.name) in op.outputs:
            fused = not self.run.eager
            forward, backward = adapter_seconds(whole, training.lora_rank, self.rates, fused=fused)
        if self.graph.name not in ("embedding", "head"):
            again = whole_again_seconds(
                whole.batch * whole.n * whole.k, training.base_bits, whole.result_bytes, self.rates
            )
            forward, backward = forward + again, backward + again
        return Beside(forward, backward)

    def _backward_comms(self, op: Op) -> tuple[float, float, float]:
        """Seconds hidden beside dX, hidden beside dW, and exposed."""
        comms = op.backward_comm
        seconds = [self._comm(comm) for comm in comms]
        if len(comms) == 2:
            return seconds[0], seconds[1], 0.0
        if len(comms) == 1 and not op.comm:
            return 0.0, seconds[0], 0.0
        return 0.0, 0.0, added(seconds)

    # --- attention's products ---------------------------------------------------------------------

    def _core(self, op: Op) -> OpTime:
        scores = [
            n
            for n in (*op.inputs, *op.outputs)
            if len(self.graph.tensors[n].shape) == 4 and n not in self.graph.shared
        ]
        flops = real(op.flops.value(self.wide))
        back = real(op.backward_flops.value(self.wide))
        fused = bool(op.kernel) or not scores or len(op.outputs) > 1
        comm, back_comm = self._core_comms(op)
        if fused:
            work = self._work(flops, op)
            forward = (
                most(
                    flops * work.forward / self.run.attention[0],
                    self._bytes((*op.inputs, *op.outputs)) / self.rates.memory,
                )
                + self.rates.shares.kernel_seconds
            )
            backward = (
                most(
                    back * work.backward / self.run.attention[1],
                    2 * self._bytes((*op.saves, *op.inputs)) / self.rates.memory,
                )
                + 2 * self.rates.shares.kernel_seconds
            )
            # Keys and values travel while the products of the block before are done.
            return OpTime(
                op.name, op.kind, op.group, forward, most(0.0, comm - forward),
                backward + self._accumulate(op), 0.0, most(0.0, back_comm - backward),
                least(backward, back_comm),
            )  # fmt: skip
        widest = largest_of(scores, self.size)
        sb, heads, rows, keys = (
            real(dim.value(self.sizes)) for dim in self.graph.tensors[widest].shape
        )
        batch = sb * heads
        width = flops / (2 * batch * rows * keys)
        item = float(self.context.act.itemsize)
        # Heads lie beside each other in one tensor: each begins a width after the one before.
        missed = misaligned(item, width, keys)
        made = widest in op.outputs
        first, second, third = (
            gemm_seconds(Product(m, n, k, batch, item, item, missed), self.rates, core=True)
            for m, n, k in ((rows, keys, width), (rows, width, keys), (keys, width, rows))
        )
        forward, other = (first, second) if made else (second, first)
        backward = other + third
        return OpTime(
            op.name, op.kind, op.group, forward, comm, backward + self._accumulate(op), 0.0,
            back_comm, 0.0,
        )  # fmt: skip

    def _core_comms(self, op: Op) -> tuple[float, float]:
        """Collectives of the core; keys and values go round under context parallelism.

        Their gradients go round with them in backward. Graphs whose framework does not say how
        (one rank's tensors are the same) are charged the ring as well.
        """
        comm = added(map(self._comm, op.comm))
        back = added(map(self._comm, op.backward_comm))
        layout = self.context.layout
        if layout.cp == 1 or any(one.group == "cp" for one in op.comm):
            return comm, back
        sizes = self.sizes
        wide = 2 * sizes["d"] * sizes["k"] / sizes["z"]
        if self.context.model.mla:
            wide = (sizes["d"] + sizes["p"] + sizes["g"]) * sizes["a"] / sizes["t"]
        message = sizes["s"] * sizes["b"] * wide * self.context.act.itemsize
        ring = collective_seconds(Collective.RING, message, *group_of("cp", sizes), self.rates)
        return comm + ring, back + 2 * ring

    def _work(self, flops: float, op: Op) -> attention.Work:
        """What a fused kernel does over the counted score products."""
        keys = least(self.sizes["s"], self.sizes["y"])
        if nothing(flops) or self.core_share == ONE:
            return attention.unmasked(keys)
        return attention.masked(real((op.flops * self.core_share).value(self.wide)) / flops, keys)

    # --- everything that moves bytes --------------------------------------------------------------

    def _accumulate(self, op: Op) -> float:
        """Summing gradients of a tensor that other ops read too: charged to all but one of them."""
        extra = 0.0
        for name in self._real(op.inputs):
            count = self.readers[name]
            if count > 1:
                extra += 3 * self.size(name) * (count - 1) / count
        return self._moved(extra, 0)

    def _primary(self, op: Op) -> tuple[str, ...]:
        """Outputs that carry a gradient: those another op reads, or that leave the layer."""
        return tuple(
            name
            for name in self._real(op.outputs)
            if name in self.readers or name == self.graph.output
        )

    def _simple(self, op: Op) -> OpTime:
        forward, kernels = self._forward_bytes(op)
        backward, back_kernels = self._backward_bytes(op)
        return OpTime(
            op.name, op.kind, op.group,
            self._moved(forward, kernels),
            added(map(self._comm, op.comm)),
            self._moved(backward, back_kernels) + self._accumulate(op),
            0.0,
            added(map(self._comm, op.backward_comm)),
            0.0, 0.0, kernels, back_kernels,
        )  # fmt: skip

    def _chain(self, op: Op) -> tuple[Chain, float] | None:
        """What an op that runs op by op moves of an element, and its elements."""
        found = CHAINS.get((op.kind, op.kernel)) if self.run.eager else None
        if found is None or self.graph.tensors[op.inputs[0]].dtype.itemsize != 2:
            return None
        return found, self.size(op.inputs[0]) / 2

    def _forward_bytes(self, op: Op) -> tuple[float, float]:
        if op.kind in ("view", "gather"):
            return 0.0, 0
        if chain := self._chain(op):
            per, elements = chain
            return per.forward * elements, per.kernels
        if op.kind == "embedding":
            return 2 * self._bytes(self._real(op.outputs)), 1
        if op.kind == "loss":
            logits = self.graph.tensors[op.inputs[0]]
            each, kernels = (_FUSED_LOSS_FORWARD, 1) if self.fused_loss else (_LOSS_FORWARD, 8)
            metrics = self.run.training.loss_metrics
            each, kernels = each + _METRIC * metrics, kernels + 3 * metrics
            return each * real(logits.elements.value(self.sizes)), kernels
        if op.name in self.fused_into:
            # Its kernel is the addition's; only the mask is extra.
            return self._bytes(n for n in op.outputs if n not in self._primary(op)), 0
        inputs, outputs = self._bytes(op.inputs), self._bytes(op.outputs)
        if op.kind in ("norm", "softmax", "activation", "router", "rotary"):
            # What an op by op chain makes on its way is written by one kernel, read by the next.
            between = [
                n
                for n in self._real(op.outputs)
                if n not in self.readers and n != self.graph.output
            ]
            extra = self._bytes(between)
            return inputs + outputs + extra, 1 + 2 * len(between)
        return inputs + outputs, 1

    def _backward_bytes(self, op: Op) -> tuple[float, float]:
        if op.kind in ("view", "gather", "add"):
            return 0.0, 0
        if chain := self._chain(op):
            per, elements = chain
            idle = not op.trains
            moved = per.backward - idle * per.weight
            return moved * elements, per.backward_kernels - idle * per.weight_kernels
        gradients = self._bytes(self._primary(op))
        if op.kind == "embedding":
            return 3 * self._bytes(self._real(op.outputs)), 1
        if op.kind == "loss":
            logits = self.graph.tensors[op.inputs[0]]
            each = _FUSED_LOSS_BACKWARD if self.fused_loss else _LOSS_BACKWARD
            return each * real(logits.elements.value(self.sizes)), 2
        made = self._bytes(self._real(op.inputs))
        saved = self._bytes(op.saves)
        total = gradients + saved + made
        if op.kind == "norm" and op.trains:
            # A second kernel reads both again for the gradients of weight and bias.
            return total + gradients + saved, 2
        return total, 1
