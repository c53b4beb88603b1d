"""How a model is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from actcalc.errors import SpecError
from actcalc.specs.base import MAX_SLICES, Degree, Spec
from actcalc.specs.schedules import SCHEDULES

if TYPE_CHECKING:
    Schedule = str
else:  # choices are the rows of the table, which a type checker cannot read
    Schedule = Literal[tuple(SCHEDULES)]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Layout(Spec):
    """Parallel degrees; their product is the number of devices."""

    tp: Degree = 1
    """Tensor-parallel degree (t): heads, feed-forward and vocabulary are split."""
    sp: bool = False
    """Sequence parallelism: norms and dropouts between tensor-parallel regions are split too."""
    pp: Degree = 1
    """Pipeline-parallel stages (p)."""
    vpp: Degree = 1
    """Model chunks per stage of an interleaved pipeline (v)."""
    microbatch_group: Degree | None = None
    """Micro-batches that an interleaved pipeline runs through one chunk before the next; None
    means pp (Megatron's --microbatch-group-size-per-virtual-pipeline-stage)."""
    cp: Degree = 1
    """Context-parallel degree (c): the sequence is split everywhere."""
    ep: Degree = 1
    """Expert-parallel degree: routed experts are spread over so many ranks."""
    etp: Degree | None = None
    """Tensor-parallel degree inside experts; None means the framework's default (tp)."""
    dp: Degree = 1
    """Data-parallel replicas (a context-parallel group counts as one replica)."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards optimizer states over dp, 2 gradients too, 3 weights too (FSDP)."""
    schedule: Schedule | None = None
    """Pipeline schedule; None means interleaved if vpp > 1, else 1f1b."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each slice of the model in order: of each pipeline stage, of each chunk of an
    interleaved pipeline (pp · vpp of them), of each chunk of a V (2 · pp); empty means an even
    split."""

    keep_sent_outputs: bool = False
    """A pipeline stage keeps the outputs that it has sent until their backward (Megatron's
    deallocate_pipeline_outputs false)."""

    def __post_init__(self) -> None:
        self._set(layers_per_stage=tuple(self.layers_per_stage))
        super().__post_init__()

    def _check(self) -> None:
        if self.etp is not None and self.etp < 1:
            raise SpecError(f"layout: etp is {self.etp}", "use a value of at least 1")
        if self.sp and self.tp == 1:
            raise SpecError(
                "sequence parallelism (sp) splits over the tensor-parallel group, but tp is 1",
                "add --tp 2 or more, or drop --sp",
            )
        if self.schedule is not None and self.pp == 1:
            raise SpecError(
                f"schedule {self.schedule} runs a pipeline, but pp is 1",
                "add --pp 2 or more, or drop --schedule",
            )
        if self.vpp > 1 and self.pp == 1:
            raise SpecError(
                f"vpp {self.vpp} interleaves a pipeline, but pp is 1",
                "add --pp 2 or more, or drop --vpp",
            )
        if self.keep_sent_outputs and self.pp == 1:
            raise SpecError(
                "keep_sent_outputs is of a pipeline, but pp is 1",
                "add --pp 2 or more, or drop keep_sent_outputs",
            )
        SCHEDULES[self.pipeline].chunk_count(self.vpp)
        if self.microbatch_group is not None and not SCHEDULES[self.pipeline].grouped:
            raise SpecError(
                f"microbatch_group {self.microbatch_group} orders an interleaved pipeline, but "
                f"the schedule is {self.pipeline}",
                "add --vpp 2 or more, or drop microbatch_group",
            )
        if self.slices > MAX_SLICES:
            raise SpecError(
                f"{self.cut} is {self.slices} slices of a model, more than the {MAX_SLICES} that "
                "are followed",
                "use less --pp or --vpp",
            )
        if self.layers_per_stage and len(self.layers_per_stage) != self.slices:
            raise SpecError(
                f"layers_per_stage has {len(self.layers_per_stage)} entries for {self.cut}",
                f"give {self.slices} entries, one for each slice of the model in order",
            )
        if any(count < 0 for count in self.layers_per_stage):
            raise SpecError(
                f"layers_per_stage {list(self.layers_per_stage)} has a negative entry",
                "count layers from 0",
            )

    @property
    def devices(self) -> int:
        """Devices in all: tp · cp · pp · dp (expert parallelism lives inside them)."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks inside experts: etp, or tp where that is not given."""
        return self.etp or self.tp

    @property
    def slices(self) -> int:
        """Consecutive slices the pipeline cuts the model into."""
        return SCHEDULES[self.pipeline].slices(self.pp, self.vpp)

    @property
    def chunks(self) -> int:
        """Model chunks that one stage runs."""
        return SCHEDULES[self.pipeline].chunk_count(self.vpp)

    @property
    def cut(self) -> str:
        """What cuts the model into slices, in words: ``pp 4 x 2 chunks of zb-v``."""
        each = self.slices // self.pp
        if each == 1:
            return f"pp {self.pp}"
        if SCHEDULES[self.pipeline].chunks:
            return f"pp {self.pp} x {each} chunks of {self.pipeline}"
        return f"pp {self.pp} x vpp {self.vpp}"

    @property
    def pipeline(self) -> Schedule:
        """The schedule that runs."""
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")
