"""Options that commands share, defined once, and how they become a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import typer

from actcalc.errors import SpecError
from actcalc.io.runs import resolve
from actcalc.io.sources import Source, one_source, sources
from actcalc.render.formats import ENDINGS, FORMATS
from actcalc.specs.optimizers import OPTIMIZERS
from actcalc.specs.recipes import CHOOSABLE
from actcalc.specs.recompute import MODULES
from actcalc.specs.run import Run
from actcalc.specs.schedules import SCHEDULES
from actcalc.specs.workload import Attention, Precision

_MODEL = "Preset, hub id, run file, config.json or launch file; several files of one run; - reads."
ModelArguments = Annotated[list[str], typer.Argument(metavar="MODEL...", help=_MODEL)]
"""What a command of one run takes: a name, or the files that describe the run together."""
_LAYOUT = "Layout"
_WORK = "Workload"
_TRAINING = "Training"
_OUT = "Output"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _option(*names: str, help: str, panel: str, **extra: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **extra)


@dataclass(frozen=True, eq=False, repr=False)
class RunOptions:
    """Overrides of a run; None means: as the run file or preset says."""

    seq: Annotated[int | None, _option("--seq", help="Tokens per sequence (s).", panel=_WORK)] = (
        None
    )
    micro_batch: Annotated[
        int | None, _option("--micro-batch", help="Sequences per micro-batch (b).", panel=_WORK)
    ] = None
    global_batch: Annotated[
        int | None, _option("--global-batch", help="Sequences per step.", panel=_WORK)
    ] = None
    layers: Annotated[
        int | None, _option("--layers", help="Transformer layers (l).", panel=_WORK)
    ] = None
    tp: Annotated[int | None, _option("--tp", help="Tensor-parallel (t).", panel=_LAYOUT)] = None
    sp: Annotated[
        bool | None,
        _option("--sp/--no-sp", help="Sequence parallelism with tp.", panel=_LAYOUT),
    ] = None
    pp: Annotated[int | None, _option("--pp", help="Pipeline stages (p).", panel=_LAYOUT)] = None
    vpp: Annotated[int | None, _option("--vpp", help="Chunks per stage (v).", panel=_LAYOUT)] = None
    cp: Annotated[int | None, _option("--cp", help="Context-parallel (c).", panel=_LAYOUT)] = None
    ep: Annotated[int | None, _option("--ep", help="Expert-parallel.", panel=_LAYOUT)] = None
    etp: Annotated[
        int | None, _option("--etp", help="Tensor-parallel inside experts.", panel=_LAYOUT)
    ] = None
    dp: Annotated[int | None, _option("--dp", help="Data-parallel replicas.", panel=_LAYOUT)] = None
    zero: Annotated[int | None, _option("--zero", help="ZeRO stage, 0 to 3.", panel=_LAYOUT)] = None
    schedule: Annotated[
        str | None,
        _option("--schedule", help=f"Pipeline schedule: {_names(SCHEDULES)}.", panel=_LAYOUT),
    ] = None
    layers_per_stage: Annotated[
        str | None,
        _option("--layers-per-stage", help="Uneven split, e.g. 7,8x14,7.", panel=_LAYOUT),
    ] = None
    precision: Annotated[
        str | None,
        _option("--precision", help=f"{_names(get_args(Precision))}.", panel=_WORK),
    ] = None
    attention: Annotated[
        str | None, _option("--attention", help=f"{_names(get_args(Attention))}.", panel=_WORK)
    ] = None
    dropout: Annotated[
        bool | None,
        _option("--dropout/--no-dropout", help="Use the model's dropout rates.", panel=_WORK),
    ] = None
    framework: Annotated[
        str | None, _option("--framework", help="Profile that picks kernels.", panel=_WORK)
    ] = None
    device: Annotated[
        str | None,
        _option(
            "--device",
            help="Accelerator: a preset (h100-80gb), another name, a cloud's instance type "
            "(p5.48xlarge) or FILE.yaml.",
            panel=_LAYOUT,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        _option(
            "--device-memory", help="Memory of the device a process can use: 16GiB.", panel=_LAYOUT
        ),
    ] = None
    peak: Annotated[
        str | None,
        _option(
            "--peak",
            help="Dense peak of the device in the run's number format: 312TFLOPS.",
            panel=_LAYOUT,
        ),
    ] = None
    headroom: Annotated[
        str | None,
        _option(
            "--headroom",
            help="Share of the device's memory left free where something fits (default 5%).",
            panel=_LAYOUT,
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        _option(
            "--policy",
            help=f"Recompute policy; repeatable; modules join with +: {_names(MODULES)}.",
            panel=_WORK,
        ),
    ] = None
    recompute_method: Annotated[
        str | None,
        _option("--recompute-method", help="Megatron's: uniform or block.", panel=_WORK),
    ] = None
    recompute_num_layers: Annotated[
        int | None,
        _option("--recompute-num-layers", help="Layers per segment, or first layers.", panel=_WORK),
    ] = None
    cuda_graphs: Annotated[
        str | None,
        _option("--cuda-graphs", help="Captured: none, attention or full.", panel=_WORK),
    ] = None
    moe_imbalance: Annotated[
        float | None,
        _option("--moe-imbalance", help="Tokens of the fullest rank over the mean.", panel=_WORK),
    ] = None
    set: Annotated[
        list[str] | None,
        _option("--set", help="Any other spec field, key=value; repeatable.", panel=_WORK),
    ] = None
    from_: Annotated[
        str | None,
        _option("--from", help="Read files as: megatron, torchtitan, deepspeed, axolotl, trl, ...",
                panel=_WORK),
    ] = None  # fmt: skip

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
        run = resolve(
            origin,
            model=_given(layers=self.layers),
            layout=_given(
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
            workload=_given(
                seq=self.seq,
                micro_batch=self.micro_batch,
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

    def origin(self, models: Sequence[str]) -> Source:
        """The one run that names and files describe together."""
        return one_source(models, self.from_)

    def origins(self, models: Sequence[str]) -> list[Source]:
        """The runs that they describe: several, or one in parts."""
        return sources(models, self.from_)

    def runs(self, origin: Source, training: dict[str, Any] | None = None) -> tuple[Run, ...]:
        """One run per framework profile asked for."""
        return tuple(self.run(origin, name, training) for name in self.frameworks())


def flag_of(name: str) -> str:
    """The flag that a field of options is given with."""
    return "--" + name.rstrip("_").replace("_", "-")


def refuse_given(options: RunOptions, what: str, *, keep: Sequence[str]) -> None:
    """Refuse options that ``what`` cannot heed; those named in ``keep`` it can."""
    for field in fields(options):
        if field.name not in keep and getattr(options, field.name) is not None:
            raise SpecError(
                f"{what} takes no {flag_of(field.name)}: its sizes are its own",
                "drop it, or measure again with other sizes",
            )


def refuse_idle(options: RunOptions, command: str, names: Sequence[str]) -> None:
    """Refuse options that cannot change a command's answer, so that none is silently ignored."""
    for name in names:
        if getattr(options, name) is not None:
            flag = name.replace("_", "-")
            others = "compare and plan do" if name == "peak" else "compare and memory do"
            raise SpecError(f"{command} does not depend on --{flag}", f"drop --{flag}; {others}")


@dataclass(frozen=True, eq=False, repr=False)
class TrainingOptions:
    """How weights are trained; None means: as the run file or the framework says."""

    optimizer: Annotated[
        str | None,
        _option(
            "--optimizer",
            help=f"{_names(OPTIMIZERS)}.",
            panel=_TRAINING,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        _option(
            "--recipe",
            help=f"Formats of states: {_names(CHOOSABLE)}.",
            panel=_TRAINING,
        ),
    ] = None
    shards: Annotated[
        int | None,
        _option("--shards", help="Ranks ZeRO shards over (hybrid sharding).", panel=_TRAINING),
    ] = None
    loss: Annotated[
        str | None,
        _option("--loss", help="Cross-entropy: full, chunked or fused.", panel=_TRAINING),
    ] = None
    lora_rank: Annotated[
        int | None, _option("--lora-rank", help="Train adapters of this rank.", panel=_TRAINING)
    ] = None
    lora_targets: Annotated[
        str | None,
        _option(
            "--lora-targets", help="attention, mlp, all, or projections: q+v.", panel=_TRAINING
        ),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        return _given(
            optimizer=self.optimizer,
            recipe=self.recipe,
            shards=self.shards,
            loss=self.loss,
            lora_rank=self.lora_rank,
            lora_targets=self.lora_targets,
        )


@dataclass(frozen=True, eq=False, repr=False)
class MemoryOptions(TrainingOptions):
    """The same, and what is kept in host memory."""

    offload: Annotated[
        list[str] | None,
        _option("--offload", help="To the host: optimizer, weights, activations.", panel=_TRAINING),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        return {**super().training(), **_given(offload=_one_offload(self.offload))}


@dataclass(frozen=True, eq=False, repr=False)
class PlanTrainingOptions(TrainingOptions):
    """The same for a command whose --offload moves activations: states have a name of their own."""

    offload_states: Annotated[
        str | None,
        _option(
            "--offload-states",
            help="States kept in host memory: optimizer, or weights and optimizer.",
            panel=_TRAINING,
        ),
    ] = None

    def training(self) -> dict[str, Any]:
        """The fields of ``specs.Training`` that were given."""
        states = self.offload_states
        if states not in (None, "optimizer", "weights", "none"):
            raise SpecError(
                f"--offload-states {states!r} names no states",
                "use optimizer, or weights (both); --offload moves activations",
            )
        return {**super().training(), **_given(offload=states)}

    def given(self) -> tuple[str, ...]:
        """The flags that were given."""
        return tuple(
            "--" + field.name.replace("_", "-")
            for field in fields(self)
            if getattr(self, field.name) is not None
        )


@dataclass(frozen=True, eq=False, repr=False)
class TimeOptions:
    """What times are computed with; None means: as the presets say."""

    efficiency: Annotated[
        list[str] | None,
        _option(
            "--efficiency",
            help="Shares of peaks: gemm=0.8, a preset's name or a YAML file; repeatable.",
            panel=_LAYOUT,
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


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _one_offload(wanted: list[str] | None) -> str | None:
    """What is kept on the host; ``SpecError`` for several things, of which one would be lost."""
    names = set(wanted or ())
    if names == {"optimizer", "weights"}:
        return "weights"  # their optimizer states go with them
    if len(names) > 1:
        raise SpecError(
            f"--offload {' and '.join(sorted(names))}: one of them at a time is modelled",
            "name one; weights takes the optimizer's states along",
        )
    return next(iter(names), None)


def split_policies(texts: list[str] | None) -> tuple[str, ...]:
    """Policies from repeated options, each of which may list several with commas."""
    names = [name.strip() for text in texts or () for name in text.split(",")]
    if not all(names):
        raise SpecError("--policy is empty", "name one, e.g. --policy selective")
    return tuple(dict.fromkeys(names))


def parse_split(text: str | None) -> tuple[int, ...] | None:
    """``7,8x14,7`` as sixteen numbers; ``SpecError`` if it does not read like that."""
    if text is None:
        return None
    counts: list[int] = []
    for part in text.replace(" ", "").split(","):
        count, times, repeat = part.partition("x")
        if not count.isdigit() or (times and not repeat.isdigit()) or len(part) > 12:
            raise SpecError(
                f"--layers-per-stage {text!r}: {part!r} is no count",
                "write counts joined with commas, repeats as 8x14: 7,8x14,7",
            )
        if times and int(repeat) > 4096:
            raise SpecError(f"--layers-per-stage {text!r}: too many stages", "use at most 4096")
        counts += [int(count)] * (int(repeat) if times else 1)
    return tuple(counts)


@dataclass(frozen=True, eq=False, repr=False)
class OutputOptions:
    """Where and how the answer is printed."""

    format: Annotated[
        str | None,
        _option("--format", help=f"{_names(FORMATS)}.", panel=_OUT),
    ] = None
    json: Annotated[bool, _option("--json", help="Same as --format json.", panel=_OUT)] = False
    output: Annotated[
        str | None,
        _option(
            "-o",
            "--output",
            help=f"Write to a file; its ending says the format: {_names(ENDINGS)}.",
            panel=_OUT,
        ),
    ] = None
    units: Annotated[str, _option("--units", help="GB (decimal) or GiB.", panel=_OUT)] = "GB"


def with_options(*bundles: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of each bundle; it receives one object per bundle.

    The command's parameter annotated with a bundle receives it; Typer sees all fields as separate
    options.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        every = inspect.signature(command, eval_str=True).parameters.values()
        keywords = {each.annotation: each.name for each in every if each.annotation in bundles}
        own = [each for each in every if each.annotation not in bundles]
        names = {bundle: [field.name for field in fields(bundle)] for bundle in bundles}

        def wrapper(**values: Any) -> int:
            made = {
                keywords[bundle]: bundle(
                    **{name: values.pop(f"{_key(name)}") for name in names[bundle]}
                )
                for bundle in bundles
            }
            return command(**values, **made)

        extra = [
            inspect.Parameter(
                _key(field.name),
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=_annotations(bundle)[field.name],
            )
            for bundle in bundles
            for field in fields(bundle)
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *extra]}
        wrapper.__doc__ = command.__doc__
        wrapper.__name__ = command.__name__
        return wrapper

    return decorate


def _annotations(bundle: type[Any]) -> dict[str, Any]:
    """The evaluated annotations of a bundle's fields, inherited ones among them."""
    found: dict[str, Any] = {}
    for base in reversed(bundle.__mro__[:-1]):
        found.update(inspect.get_annotations(base, eval_str=True))
    return found


def _key(name: str) -> str:
    """A parameter name that shadows nothing."""
    return name + "_" if name in ("set", "format") else name
