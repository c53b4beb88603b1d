"""Options that commands share, defined once, and how they become a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

from actcalc.cli import choices
from actcalc.cli.bundles import with_options as with_options
from actcalc.cli.choices import (
    DEVICE,
    KERNELS,
    LAYOUT,
    RECOMPUTE,
    WORK,
    argument,
    option,
)
from actcalc.cli.given import accumulated, only_given, parse_split
from actcalc.cli.given import flag_of as flag_of
from actcalc.cli.given import refuse_given as refuse_given
from actcalc.cli.given import refuse_idle as refuse_idle
from actcalc.cli.given import split_policies as split_policies
from actcalc.cli.output import OutputOptions as OutputOptions
from actcalc.errors import SpecError
from actcalc.io.runs import resolve
from actcalc.io.sources import Source, one_source, sources
from actcalc.specs.recompute import MODULES
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.workload import Attention, Precision

_MODEL = "Preset, hub id, run file, config.json or launch file; several files of one run; - reads."
ModelArguments = Annotated[
    list[str], argument(metavar="MODEL...", help=_MODEL, words=choices.models, files=True)
]
"""What a command of one run takes: a name, or the files that describe the run together."""
OptionalModel = Annotated[
    str | None,
    argument(
        metavar="[MODEL]",
        help="Whose numbers; GPT-3 if none is named.",
        words=choices.models,
        files=True,
    ),
]
"""What a command takes that has a run of its own to fall back on."""


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


@dataclass(frozen=True, eq=False, repr=False)
class RunOptions:
    """Overrides of a run; None means: as the run file or preset says."""

    seq: Annotated[
        int | None, option("--seq", help="Tokens per sequence (s); 8k is 8192.", panel=WORK)
    ] = None
    micro_batch: Annotated[
        int | None, option("--micro-batch", help="Sequences per micro-batch (b).", panel=WORK)
    ] = None
    global_batch: Annotated[
        int | None, option("--global-batch", help="Sequences per step, all replicas.", panel=WORK)
    ] = None
    decoder_seq: Annotated[
        int | None,
        option("--decoder-seq", help="Tokens of an encoder-decoder's decoder.", panel=WORK),
    ] = None
    image_tokens: Annotated[
        int | None, option("--image-tokens", help="Tokens per sequence from images.", panel=WORK)
    ] = None
    lengths: Annotated[
        str | None,
        option("--lengths", help="Lengths of sequences, as 512:70,2048:30.", panel=WORK),
    ] = None
    packed: Annotated[
        bool | None,
        option("--packed/--no-packed", help="Pack sequences of --lengths.", panel=WORK),
    ] = None
    completion: Annotated[
        int | None,
        option("--completion", help="Tokens scored at the end of a sequence.", panel=WORK),
    ] = None
    grad_accum: Annotated[
        int | None,
        option(
            "--grad-accum",
            help="Micro-batches per step and replica, for --global-batch.",
            panel=WORK,
        ),
    ] = None
    layers: Annotated[
        int | None, option("--layers", help="Transformer layers (l).", panel=WORK)
    ] = None
    tp: Annotated[int | None, option("--tp", help="Tensor-parallel ranks (t).", panel=LAYOUT)] = (
        None
    )
    sp: Annotated[
        bool | None,
        option("--sp/--no-sp", help="Sequence parallelism with tp.", panel=LAYOUT),
    ] = None
    pp: Annotated[int | None, option("--pp", help="Pipeline stages (p).", panel=LAYOUT)] = None
    vpp: Annotated[
        int | None, option("--vpp", help="Chunks of layers per stage (v).", panel=LAYOUT)
    ] = None
    cp: Annotated[int | None, option("--cp", help="Context-parallel ranks (c).", panel=LAYOUT)] = (
        None
    )
    ep: Annotated[int | None, option("--ep", help="Expert-parallel ranks.", panel=LAYOUT)] = None
    etp: Annotated[
        int | None,
        option("--etp", help="Tensor-parallel ranks inside experts (default: tp).", panel=LAYOUT),
    ] = None
    dp: Annotated[int | None, option("--dp", help="Data-parallel replicas.", panel=LAYOUT)] = None
    zero: Annotated[
        int | None, option("--zero", help="ZeRO stage, 0 to 3 (3 is FSDP).", panel=LAYOUT)
    ] = None
    schedule: Annotated[
        str | None,
        option(
            "--schedule",
            help=f"Order of a pipeline: {_names(SCHEDULES)} (default: 1f1b; with --vpp "
            "interleaved).",
            panel=LAYOUT,
            words=lambda: SCHEDULES,
        ),
    ] = None
    layers_per_stage: Annotated[
        str | None,
        option(
            "--layers-per-stage",
            help="Uneven split, e.g. 7,8x14,7.",
            panel=LAYOUT,
            metavar="COUNTS",
        ),
    ] = None
    precision: Annotated[
        str | None,
        option(
            "--precision",
            help=f"Number format: {_names(get_args(Precision))}.",
            panel=WORK,
            words=lambda: get_args(Precision),
        ),
    ] = None
    attention: Annotated[
        str | None,
        option(
            "--attention",
            help=f"Kernel of attention: {_names(get_args(Attention))}.",
            panel=KERNELS,
            words=lambda: get_args(Attention),
        ),
    ] = None
    dropout: Annotated[
        bool | None,
        option("--dropout/--no-dropout", help="Use the model's dropout rates.", panel=WORK),
    ] = None
    framework: Annotated[
        str | None,
        option(
            "--framework",
            help="Profile that picks kernels: {words} (default: the model's own; else megatron "
            "where tp, pp, cp or ep is above 1, and transformers). a,b side by side.",
            panel=KERNELS,
            words=choices.frameworks,
        ),
    ] = None
    device: Annotated[
        str | None,
        option(
            "--device",
            help="Accelerator: a preset (h100-80gb; `actcalc presets list devices`), another "
            "name, a cloud's instance type (p5.48xlarge) or FILE.yaml.",
            panel=DEVICE,
            words=choices.devices,
            files=True,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        option(
            "--device-memory",
            help="Memory of the device that a process can use: 16GiB.",
            panel=DEVICE,
            metavar="SIZE",
        ),
    ] = None
    peak: Annotated[
        str | None,
        option(
            "--peak",
            help="Dense peak of the device in the run's number format: 312TFLOPS.",
            panel=DEVICE,
            metavar="FLOPS",
        ),
    ] = None
    headroom: Annotated[
        str | None,
        option(
            "--headroom",
            help="Share of the device's memory left free where something fits (default: 5%).",
            panel=DEVICE,
            metavar="SHARE",
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        option(
            "--policy",
            help="What is re-run: none, selective, full, sqrt, ffn, norm, uniform:N, block:N, "
            f"every:N, op, or modules joined with +: {_names(MODULES)}. Repeatable.",
            panel=RECOMPUTE,
            words=choices.policies,
        ),
    ] = None
    recompute_method: Annotated[
        str | None,
        option(
            "--recompute-method",
            help="Megatron's: uniform or block.",
            panel=RECOMPUTE,
            words=lambda: ("uniform", "block"),
        ),
    ] = None
    recompute_num_layers: Annotated[
        int | None,
        option(
            "--recompute-num-layers", help="Layers per segment, or first layers.", panel=RECOMPUTE
        ),
    ] = None
    cuda_graphs: Annotated[
        str | None,
        option(
            "--cuda-graphs",
            help="Captured: none, attention or full (default: none).",
            panel=KERNELS,
            words=lambda: ("none", "attention", "full"),
        ),
    ] = None
    moe_imbalance: Annotated[
        float | None,
        option("--moe-imbalance", help="Tokens of the fullest rank over the mean.", panel=WORK),
    ] = None
    set: Annotated[
        list[str] | None,
        option(
            "--set",
            help="Any other field of model, layout, workload or training: hidden=4096. Repeatable.",
            panel=WORK,
            metavar="FIELD=VALUE",
            words=choices.fields,
        ),
    ] = None
    from_: Annotated[
        str | None,
        option(
            "--from",
            help="Kind of file to read MODEL as: {words}.",
            panel=WORK,
            metavar="KIND",
            words=choices.file_kinds,
        ),
    ] = None

    def frameworks(self) -> tuple[str | None, ...]:
        """The profiles asked for, comma-separated on the command line; (None,) if none was."""
        if self.framework is None:
            return (None,)
        names = tuple(name.strip() for name in self.framework.split(","))
        if not all(names):
            raise SpecError(
                f"--framework {self.framework!r} names no profile",
                "`actcalc presets list frameworks` lists them",
            )
        return names

    def run(
        self,
        origin: Source,
        framework: str | None = None,
        training: dict[str, Any] | None = None,
    ) -> Run:
        """Validate the source with these overrides."""
        batch: dict[str, Any] = {}
        if self.grad_accum is not None:
            origin = accumulated(origin, self.grad_accum, self.global_batch)
            batch = {"global_batch": None}
        run = resolve(
            origin,
            model=only_given(layers=self.layers),
            layout=only_given(
                tp=self.tp,
                sp=self.sp,
                pp=self.pp,
                vpp=self.vpp,
                cp=self.cp,
                ep=self.ep,
                etp=self.etp,
                dp=self.dp,
                zero=self.zero,
                schedule=self.schedule,
                layers_per_stage=parse_split(self.layers_per_stage),
            ),
            workload=batch
            | only_given(
                seq=self.seq,
                micro_batch=self.micro_batch,
                decoder_seq=self.decoder_seq,
                image_tokens=self.image_tokens,
                completion=self.completion,
                lengths=self.lengths,
                packed=self.packed,
                global_batch=self.global_batch,
                precision=self.precision,
                attention=self.attention,
                dropout=self.dropout,
                moe_imbalance=self.moe_imbalance,
            ),
            training=training,
            framework=framework if framework is not None else self.frameworks()[0],
            device=self.device,
            policies=self.policies(),
            settings=self.settings(),
        )
        if self.device_memory is None and self.peak is None and self.headroom is None:
            return run
        from actcalc.cli.values import with_figures, with_headroom

        run = with_figures(run, self.device_memory, self.peak)
        return with_headroom(run, self.headroom)

    def settings(self) -> tuple[str, ...]:
        """Single fields asked for, those that have a flag of their own last."""
        graphs = () if self.cuda_graphs is None else (f"kernels.cuda_graphs={self.cuda_graphs}",)
        return (*(self.set or ()), *graphs)

    def policies(self) -> tuple[str, ...]:
        """The policies asked for, Megatron's recompute options among them."""
        named = split_policies(self.policy)
        method, count = self.recompute_method, self.recompute_num_layers
        if method is None and count is None:
            return named
        if method not in (None, "uniform", "block"):
            raise SpecError(f"--recompute-method is {method!r}", "use uniform or block")
        if count is None:
            raise SpecError(
                f"--recompute-method {method} needs to know how many layers",
                "add --recompute-num-layers N",
            )
        chosen = f"{method or 'uniform'}:{count}"
        # Megatron's triple: --recompute-granularity full says that, method and number say how
        if "full" in named:
            return tuple(dict.fromkeys(chosen if name == "full" else name for name in named))
        return tuple(dict.fromkeys((*named, chosen)))

    def by_policy(self) -> tuple[RunOptions, ...]:
        """These options once for each policy that they name; as they are where they name none."""
        named = self.policies()
        if len(named) < 2:
            return (self,)
        alone = {"recompute_method": None, "recompute_num_layers": None}
        return tuple(replace(self, policy=[name], **alone) for name in named)

    def origin(self, models: Sequence[str]) -> Source:
        """The one run that names and files describe together."""
        return one_source(models, self.from_)

    def origins(self, models: Sequence[str]) -> list[Source]:
        """The runs that they describe: several, or one in parts."""
        return sources(models, self.from_)

    def runs(self, origin: Source, training: dict[str, Any] | None = None) -> tuple[Run, ...]:
        """One run per framework profile asked for."""
        return tuple(self.run(origin, name, training) for name in self.frameworks())


@dataclass(frozen=True, eq=False, repr=False)
class TimeOptions:
    """What times are computed with; None means: as the presets say."""

    efficiency: Annotated[
        list[str] | None,
        option(
            "--efficiency",
            help="Shares of peaks: gemm=0.8, a preset's name or a YAML file. Repeatable.",
            panel=DEVICE,
            metavar="SHARES",
            words=choices.shares,
            files=True,
        ),
    ] = None

    def shares(self, run: Run) -> dict[str, float]:
        """The shares to override, later ones first; ``SpecError`` without a device to time on."""
        if not self.efficiency:
            return {}
        if run.device is None:
            raise SpecError(
                f"--efficiency {self.efficiency[0]} changes times, and there is no device to time "
                "on",
                "add --device, or drop --efficiency",
            )
        from actcalc.cost.rates import parse_overrides

        return parse_overrides(self.efficiency)
