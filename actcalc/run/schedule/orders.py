"""The order of work on every stage: one builder for each schedule.

Sources are those of the rows (:mod:`actcalc.specs.schedules`). A builder returns symbols, one for
each action of a stage; micro-batches follow from counting them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from actcalc.errors import SpecError
from actcalc.run.schedule.shape import Shape, shape_of

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; input gradient alone; weight gradient alone."""

F, B, I, W = range(4)  # noqa: E741
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
# what an action completes: forward, input gradient (also by a whole backward), weight gradient
COLUMN = (0, 1, 1, 2)
_JOINED = 4  # flag of a forward that runs together with the backward after it
_CHUNK = 8  # a symbol is chunk * _CHUNK + flag + kind
_MOST_FORWARDS = 10**6  # on one stage in one step; far above any real step, and still in memory


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    """F forward, B whole backward, I input gradient alone, W weight gradient alone."""
    microbatch: int
    """Index of the microbatch in the step, from 0."""
    chunk: int
    """Index of the model chunk on this stage, from 0."""
    joined: bool = False
    """A forward overlapped with the backward that follows it (DualPipe): both start and end
    together, and take the sum of their compute times."""


@dataclass(frozen=True)
class Order:
    """The actions of one stage as columns; microbatches are counted per direction."""

    kind: tuple[int, ...]
    chunk: tuple[int, ...]
    microbatch: tuple[int, ...]
    joined: tuple[bool, ...]

    def rows(self) -> Iterable[tuple[int, int, int, bool]]:
        """The actions in order: kind, chunk, microbatch, joined."""
        return zip(self.kind, self.chunk, self.microbatch, self.joined, strict=True)


def actions(
    schedule: str, pp: int, microbatches: int, vpp: int = 1, *, group: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The ordered actions of every stage for one training step.

    ``group`` is Megatron-Core's ``microbatch_group_size_per_vp_stage`` (default: pp). Under
    DualPipe the first half of the microbatches enters at stage 0 (chunk 0), the second half at
    the last stage (chunk 1). Raises ``SpecError`` for sizes the schedule cannot run.
    """
    shape = shape_of(schedule, pp, microbatches, vpp, group)
    result = []
    second = shape.lane if shape.row.directions == 2 else 0
    for order in orders_of(shape):
        result.append(
            tuple(
                Action(KINDS[kind], microbatch + chunk * second, chunk, joined)
                for kind, chunk, microbatch, joined in order.rows()
            )
        )
    return tuple(result)


def orders_of(shape: Shape) -> tuple[Order, ...]:
    """The order of every stage."""
    return tuple(order_of(shape, stage) for stage in range(shape.pp))


@lru_cache(maxsize=256)
def order_of(shape: Shape, stage: int) -> Order:
    """The order of one stage; ``SpecError`` for more forwards than memory has room for."""
    if shape.lane * shape.chunks > _MOST_FORWARDS:
        raise SpecError(
            f"{shape.microbatches} microbatches per step are too many to run the "
            f"{shape.schedule} schedule",
            "use a smaller global batch or a larger microbatch",
        )
    count: Counter[tuple[int, int]] = Counter()
    split: dict[int, deque[int]] = {chunk: deque() for chunk in range(shape.chunks)}
    rows = []
    for symbol in BUILDERS[shape.schedule](shape, stage):
        kind, chunk = symbol % _JOINED, symbol // _CHUNK
        if kind == W:  # weight gradients follow their own input gradients in order
            microbatch = split[chunk].popleft()
        else:
            microbatch = count[chunk, COLUMN[kind]]
            count[chunk, COLUMN[kind]] += 1
            if kind == I:
                split[chunk].append(microbatch)
        if microbatch < shape.lane:
            rows.append((kind, chunk, microbatch, symbol // _JOINED % 2 == 1))
    return Order(*zip(*rows, strict=True))


def _symbol(kind: int, chunk: int = 0, joined: bool = False) -> int:
    return chunk * _CHUNK + joined * _JOINED + kind


def _phases(*phases: tuple[Sequence[int], int]) -> list[int]:
    """Each pattern repeated its number of times, one after another."""
    return [symbol for pattern, times in phases for symbol in [*pattern] * times]


def _gpipe(shape: Shape, stage: int) -> list[int]:
    return _phases(([F], shape.lane), ([B], shape.lane))


def _one_f_one_b(shape: Shape, stage: int) -> list[int]:
    warm = min(shape.pp - stage - 1, shape.lane)
    return _phases(([F], warm), ([F, B], shape.lane - warm), ([B], warm))


def _zb_h1(shape: Shape, stage: int) -> list[int]:
    count = shape.lane
    warm = min(shape.pp - stage - 1, count)
    lag = min(stage, count)
    silent = min(lag, count - warm)  # steady rounds before the first weight gradient
    late = lag - silent  # cool-down rounds before it, in steps shorter than the pipeline
    return _phases(
        ([F], warm),
        ([F, I], silent),
        ([F, I, W], count - warm - silent),
        ([I], late),
        ([I, W], warm - late),
        ([W], lag),
    )


def _interleaved(shape: Shape, stage: int) -> list[int]:
    count, chunks, group = shape.lane, shape.chunks, shape.group
    whole, rest = divmod(count, group)
    table = [chunk for chunk in range(chunks) for _ in range(group)] * whole
    table += [chunk for chunk in range(chunks) for _ in range(rest)]
    forward = [_symbol(F, chunk) for chunk in table]
    backward = [_symbol(B, chunks - 1 - chunk) for chunk in table]
    warm = min(2 * (shape.pp - stage - 1) + (chunks - 1) * group, count * chunks)
    steady = count * chunks - warm
    pairs = zip(forward[warm:], backward[:steady], strict=True)
    return [*forward[:warm], *(symbol for pair in pairs for symbol in pair), *backward[steady:]]


def _interleaved_zb(shape: Shape, stage: int) -> list[int]:
    """Interleaved with weight gradients that lag by the rank of the stage.

    torch.distributed.pipelining schedules.py ScheduleInterleavedZeroBubble, _get_1f1b_rank_ops: one
    forward for each stage still to come before the first backward, where plain interleaving has
    two; a weight gradient follows every input gradient from the lag on.
    """
    whole = _interleaved(shape, shape.pp - 1)
    forward = [symbol for symbol in whole if symbol % _JOINED == F]
    inputs = [symbol + I - B for symbol in whole if symbol % _JOINED == B]
    total, weights = len(forward), [symbol + W - I for symbol in inputs]
    warm = min(shape.pp - stage - 1 + (shape.chunks - 1) * shape.group, total)
    found = forward[:warm]
    for at in range(total):
        found += forward[warm + at : warm + at + 1]
        found += inputs[at : at + 1]
        found += weights[at - stage : at - stage + 1] if at >= stage else []
    return found + weights[max(0, total - stage) :]


def _zb_v(shape: Shape, stage: int) -> list[int]:
    p, r = shape.pp, stage
    # shorter steps run the order of 2p - 1 microbatches with the missing ones left out
    count = max(shape.lane, 2 * p - 1)
    f0, i0, w0 = _symbol(F, 0), _symbol(I, 0), _symbol(W, 0)
    f1, i1, w1 = _symbol(F, 1), _symbol(I, 1), _symbol(W, 1)
    return _phases(
        ([f0], 2 * (p - r) - 1),
        ([f1, f0], r),
        ([f1, i1, w1], p - r),
        ([f0, i0, w0, f1, i1, w1], count - 2 * p + r + 1),
        ([i0, w0, f1, i1, w1], p - r - 1),
        ([i0, i1], r),
        ([i0, w0], p - r),
        ([w1], r),
        ([w0], r),
    )


def _dualpipe(shape: Shape, stage: int) -> list[int]:
    half = min(stage, shape.pp - 1 - stage)
    return _dual(shape.pp // 2, half, shape.lane, swapped=stage >= shape.pp // 2)


def _dualpipe_v(shape: Shape, stage: int) -> list[int]:
    return _dual(shape.pp, stage, shape.lane, swapped=False)


def _dual(ranks: int, rank: int, count: int, swapped: bool) -> list[int]:
    """The eight steps of DualPipe on the ``rank``-th of ``ranks`` stages from the near end.

    Chunk ``near`` serves the microbatches that enter at the near end, ``far`` the others (in the
    V shape: the same ones, coming back).
    """
    near, far = (1, 0) if swapped else (0, 1)
    f0, f1 = _symbol(F, near), _symbol(F, far)
    b0, b1 = _symbol(B, near), _symbol(B, far)
    i0, i1 = _symbol(I, near), _symbol(I, far)
    j0, j1 = _symbol(F, near, joined=True), _symbol(F, far, joined=True)
    outer = ranks - rank - 1
    main = count - 2 * ranks + rank + 1
    innermost = rank == ranks - 1
    drain: list[int] = []
    for index in range(rank + 1):
        # from the middle of this step on, backwards are split; odd ranks one half-round earlier
        first_split = 2 * index + rank % 2 >= 2 * ((rank + 1) // 2) + 1
        second_split = index >= (rank + 1) // 2
        drain += [i1 if first_split else b1, i0 if second_split else b0]
    symbols = _phases(
        ([f0], 2 * outer),
        ([f0, f1], rank + 1),
        ([i1, W, f1], outer),
        ([f0 if innermost else j0, b1, j1, b0], 1),
        ([j0, b1, j1, b0], main - 1),
        ([b1, j1, b0], outer),
        (drain, 1),
        ([W, i0], outer),
        ([W], rank + 1),
    )
    # weight gradients leave a queue in the order in which their input gradients entered it
    queued = iter([symbol // _CHUNK for symbol in symbols if symbol % _JOINED == I])
    return [_symbol(W, next(queued)) if symbol % _JOINED == W else symbol for symbol in symbols]


BUILDERS: Mapping[str, Callable[[Shape, int], list[int]]] = {
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "interleaved-zb": _interleaved_zb,
    "gpipe": _gpipe,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
}
"""The builder of every row of ``SCHEDULES``."""
