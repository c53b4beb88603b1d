"""Pipeline schedules, one row each: how they cut a model, what they need, where they are from.

Choices, help and schema come from these rows, and so do the rules of layouts and of
:mod:`actcalc.run.schedule`, which has the order of work of each; every column must be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from actcalc.errors import SpecError
from actcalc.specs.row import Row

Way = Literal["straight", "v", "two-way"]
"""How micro-batches pass the stages: from the first to the last, once for each chunk; there and
back again; or half of them from either end, which keeps each slice of the model on two stages."""


class PipelineSchedule(Row):
    """One schedule; its order of work is an entry of ``actcalc.run.schedule.orders.BUILDERS``."""

    name: str
    """As given to --schedule."""
    title: str
    """In a few words, for help and schema."""
    chunks: int
    """Model chunks that a stage runs; 0: as many as --vpp says."""
    way: Way
    """How micro-batches pass the stages."""
    grouped: bool
    """Micro-batches pass a chunk in groups before the next chunk's turn."""
    splits_backward: bool
    """Input gradients and weight gradients are computed apart."""
    phased: bool
    """All forwards come before all backwards, so that the time of a step is linear in its
    micro-batches; else a middle part repeats with every further one."""
    depth: int
    """Upper bound of the micro-batches, per direction, in warm-up or cool-down, in groups (of pp
    micro-batches where they are not grouped)."""
    least: int
    """Micro-batches that a step needs at least, in multiples of pp; 0: any number runs."""
    instead: str
    """A schedule for a step of fewer micro-batches; empty where none is needed."""
    source: str
    """Where the order is from."""

    @property
    def directions(self) -> int:
        """Streams of micro-batches that pass the pipeline."""
        return 2 if self.way == "two-way" else 1

    def chunk_count(self, vpp: int) -> int:
        """Model chunks that one stage runs; ``SpecError`` for a ``vpp`` it cannot have.

        A schedule with several chunks by nature takes ``vpp`` 1 (unset) or their number.
        """
        if vpp < 1:
            raise SpecError(f"vpp {vpp} is not a number of model chunks", "use vpp 1 or more")
        if not self.chunks and vpp == 1:
            raise SpecError(
                f"the {self.name} schedule needs more than one model chunk per stage, but vpp is 1",
                "add --vpp 2 or more, or use the 1f1b schedule",
            )
        if self.chunks and vpp > self.chunks:
            noun = "chunk" if self.chunks == 1 else "chunks"
            raise SpecError(
                f"the {self.name} schedule runs {self.chunks} model {noun} per stage, but vpp is "
                f"{vpp}",
                "leave vpp out, or use the interleaved schedule",
            )
        return self.chunks or vpp

    def slices(self, pp: int, vpp: int) -> int:
        """Consecutive slices the pipeline cuts the model into: p·v, 2p in a V, p both ways."""
        return pp * self.chunk_count(vpp) // self.directions

    def place(self, pp: int, stage: int, chunk: int) -> int:
        """Which slice (from 0, in the order of the layers) a stage's chunk holds.

        It is also where on its way a micro-batch meets this chunk.
        """
        if self.way == "straight" or chunk == 0:
            return chunk * pp + stage
        return (pp if self.way == "two-way" else 2 * pp) - 1 - stage


_ROWS = (
    PipelineSchedule(
        name="1f1b", title="one forward, one backward in turn",
        chunks=1, way="straight", grouped=False, splits_backward=False,
        phased=False, depth=1, least=0, instead="",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (PipeDream-Flush)",
    ),
    PipelineSchedule(
        name="interleaved", title="1f1b over several chunks a stage",
        chunks=0, way="straight", grouped=True, splits_backward=False,
        # warm-up: 2(p - r - 1) + (v - 1)g chunks are less than two groups of v chunks
        phased=False, depth=2, least=1, instead="1f1b",
        source="Narayanan et al. 2021, section 2.2.2; Megatron-Core pipeline_parallel/schedules.py "
        "get_pp_rank_microbatches, get_schedule_table",
    ),
    PipelineSchedule(
        name="interleaved-zb", title="interleaved, with weight gradients that lag behind",
        chunks=0, way="straight", grouped=True, splits_backward=True,
        phased=False, depth=3, least=1, instead="1f1b",
        source="torch.distributed.pipelining schedules.py ScheduleInterleavedZeroBubble",
    ),
    PipelineSchedule(
        name="gpipe", title="all forwards, then all backwards",
        chunks=1, way="straight", grouped=False, splits_backward=False,
        phased=True, depth=2, least=0, instead="",
        source="Huang et al. 2019, arXiv:1811.06965",
    ),
    PipelineSchedule(
        name="zb-h1", title="1f1b whose weight gradients lag behind, with its memory",
        chunks=1, way="straight", grouped=False, splits_backward=True,
        phased=False, depth=2, least=0, instead="",
        source="Qi et al. 2023, arXiv:2401.10241, section 2: weight gradients lag by the rank of "
        "the stage, so that every stage holds what the first one holds",
    ),
    PipelineSchedule(
        name="zb-v", title="zero bubble in a V of two chunks a stage",
        chunks=2, way="v", grouped=False, splits_backward=True,
        phased=False, depth=2, least=0, instead="",
        source="Qi et al. 2023, section 6; torch.distributed.pipelining ScheduleZBVZeroBubble",
    ),
    PipelineSchedule(
        name="dualpipe", title="micro-batches from both ends, slices kept twice",
        chunks=2, way="two-way", grouped=False, splits_backward=True,
        phased=False, depth=2, least=2, instead="zb-h1",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.2.1; dualpipe.py",
    ),
    PipelineSchedule(
        name="dualpipe-v", title="dualpipe's half, in a V",
        chunks=2, way="v", grouped=False, splits_backward=True,
        phased=False, depth=2, least=2, instead="zb-v",
        source="dualpipev.py; torch.distributed.pipelining ScheduleDualPipeV",
    ),
)  # fmt: skip

SCHEDULES: Mapping[str, PipelineSchedule] = {row.name: row for row in _ROWS}
"""Every schedule by its name."""
