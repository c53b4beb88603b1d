"""Cross-entropies that do not keep all logits: in parts, fused with the head, or in place."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from actcalc.layers.core.graph import Graph
from actcalc.layers.model import ModelGraph
from actcalc.memory.working import Options, Working, working
from actcalc.policy.outcome import layer_outcome
from actcalc.policy.rules import NONE
from actcalc.specs.training import Training

_CHUNKS = 8  # torchtune modules/loss CEWithChunkedOutputLoss num_output_chunks
_TILE = (4096, 32768)  # trl kernels/chunked_logprob.py TOKEN_CHUNK_SIZE; utils.py chunk size
_TOKENS = 256  # trl trainer/sft_trainer.py chunk_size of the chunked loss


class Sizes(NamedTuple):
    """Bytes that the head stores, and the most alive in its forward and its backward."""

    stored: int
    forward: int
    backward: int
    rest: int
    """Of backward without the loss."""


def loss_sizes(
    model: ModelGraph,
    graph: Graph,
    training: Training,
    options: Options,
    stored: int,
    work: Working,
) -> Sizes:
    """What the head holds under the run's cross-entropy; ``work`` is of one over all logits."""
    plain = Sizes(stored, work.forward, work.backward, work.backward_rest)
    how = training.loss
    if how in ("auto", "full") and not training.compiled_loss:
        return plain
    head = Head(model, graph, training, options)
    if how == "fused":
        return head.fused()
    if how == "recomputed":
        return head.recomputed(plain)
    if how == "tiled":
        return head.tiled()
    if how == "in-place":
        kept = stored - head.saved + head.logits
        return Sizes(kept, kept, max(kept, plain.rest), plain.rest)
    parts = training.loss_chunks or _CHUNKS
    if training.compiled_loss:
        # kept: logits instead of log-probabilities; made: their gradient, of the same type
        kept = stored - head.saved + head.logits
        made = -(-head.logits // parts) if how == "chunked" else head.logits
        return Sizes(kept, kept, kept + made, min(plain.rest, kept + made))
    base = stored + head.logits
    forward = base + -(-max(0, plain.forward - base) // parts)
    backward = base + -(-max(0, plain.backward - base) // parts)
    return Sizes(stored, forward, backward, min(plain.rest, backward))


class Head:
    """The head's graph cut before the product that makes the logits."""

    def __init__(
        self, model: ModelGraph, graph: Graph, training: Training, options: Options
    ) -> None:
        self.model, self.graph, self.training, self.options = model, graph, training, options
        wide = [n for n, t in graph.tensors.items() if any("v" in d.symbols() for d in t.shape)]
        sizes, kept = model.tensor_bytes[graph], set(graph.saved)
        self.saved = sum(sizes[name] for name in wide if name in kept)
        self.logits = sum(sizes[name] for name in wide if name not in kept)
        at = next(i for i, op in enumerate(graph.ops) if set(op.outputs) & set(wide))
        product = graph.ops[at]
        self.input = sizes[product.inputs[0]]
        act = model.context.act.itemsize
        count = sum(int(weight.parameters.value(model.sizes)) for weight in product.own_weights)
        self.table = count * act if product.trains else 0
        self.width = int(model.context.h.value(model.sizes))
        self.vocabulary = count // self.width
        self.tokens = self.input // act // self.width
        before = replace(graph, ops=graph.ops[:at], output=product.inputs[0])
        outcome = layer_outcome(model, before, NONE)
        self.before = working(model, outcome, options)
        self.kept = outcome.sizes(model).stored

    def fused(self) -> Sizes:
        """Gradients are made in forward, part by part, and kept instead of what they come from.

        Liger Kernel ops/fused_linear_cross_entropy.py: as many tokens at a time as make the next
        power of two of tokens over ceil(V/h); their logits become their gradient in place.
        """
        ratio = -(-self.vocabulary // self.width)
        rows = 1 << max(0, -(-self.tokens // ratio) - 1).bit_length()
        if self.training.loss_chunks:
            rows = -(-self.tokens // self.training.loss_chunks)
        logits = min(rows, self.tokens) * self.vocabulary * self.model.context.act.itemsize
        kept = self.kept + self.input + self.table + 4 * self.tokens
        forward = max(self.before.forward, kept + self.input + logits + self.table)
        backward = max(kept, self.before.backward + self.table)
        return Sizes(kept, forward, backward, backward)

    def tiled(self) -> Sizes:
        """Log-probabilities from tiles of logits, made again in backward; no logits exist.

        The hidden states of the scored tokens are copied and kept with four numbers each and the
        mask; both gradients are summed in fp32 (TRL kernels/chunked_logprob.py
        ChunkedLogProbFunction, trainer/utils.py add_fused_lm_head).
        """
        act = self.model.context.act.itemsize
        hidden = self.scored * self.width
        kept = self.kept + hidden * act + self.scored * (8 + 4 + 4) + self.tokens
        forward = max(self.before.forward, kept + self.input + self.tile + 20 * self.scored)
        sums = hidden * (4 + act) + self.table // act * (4 + act)
        backward = max(kept + sums + self.tile, self.before.backward + self.table)
        return Sizes(kept, forward, backward, backward)

    def without_gradients(self) -> int:
        """The most alive in a forward that keeps nothing: log-probabilities of a reference."""
        act = self.model.context.act.itemsize
        if self.training.loss == "tiled":
            return self.input + self.scored * (self.width * act + 36) + self.tile
        if self.training.loss == "full":  # log-probabilities beside the logits they come from
            return self.input + max(self.logits, 2 * self.saved)
        return self.input + self.logits

    @property
    def scored(self) -> int:
        """Tokens whose log-probability is computed."""
        work = self.model.context.workload
        return work.micro_batch * (work.completion or work.seq - 1)

    @property
    def tile(self) -> int:
        """Bytes of the one tile of logits."""
        rows, columns = _TILE
        return min(self.scored, rows) * columns * self.model.context.act.itemsize

    def recomputed(self, plain: Sizes) -> Sizes:
        """Each part runs under a checkpoint of its own: no logit stays (TRL's chunked loss)."""
        parts = self.training.loss_chunks or -(-self.tokens // _TOKENS)
        kept = self.kept + self.input
        forward = kept + -(-max(0, plain.forward - kept) // parts)
        made = -(-max(0, plain.backward - kept - self.table) // parts)
        # the table's gradient so far, and that of the part at work
        backward = max(kept + made + self.input + 2 * self.table, self.before.backward)
        return Sizes(kept, forward, backward, backward)
