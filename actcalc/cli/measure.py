"""``actcalc measure MODEL``: real saved bytes from PyTorch, beside the prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actcalc.cli.choices import argument, examples, models, option
from actcalc.cli.options import (
    OutputOptions,
    RunOptions,
    refuse_given,
    split_policies,
    with_options,
)
from actcalc.cli.output import check_units, chosen_format, emit, write_whole
from actcalc.errors import SpecError, say

if TYPE_CHECKING:
    from actcalc.answers.measure.figures import Measurement
    from actcalc.measure.results import Measured
    from actcalc.render.sheet import Sheet

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Module = Annotated[
    str | None,
    option(
        "--module",
        metavar="PATH.py:FACTORY",
        help="Measure a module of yours: factory() returns (module, inputs). Runs that file.",
        files=True,
    ),
]
Save = Annotated[
    str | None,
    option(
        "--save",
        metavar="FILE",
        help="Keep the measured layer (.json or .yaml), for `actcalc compare` and `plan`.",
        files=True,
    ),
]
Check = Annotated[bool, option("--check", help="Exit with 1 unless the prediction is exact.")]
Model = Annotated[
    str | None,
    argument(
        metavar="[MODEL]",
        help="Preset, config.json or its folder; or use --module.",
        words=models,
        files=True,
    ),
]


@app.command(
    epilog=examples(
        "measure llama-3-8b --layers 1",
        "measure --module block.py:factory --save layer.json",
    )
)
@with_options(RunOptions, OutputOptions)
def measure(
    options: RunOptions,
    output: OutputOptions,
    model: Model = None,
    module: Module = None,
    save: Save = None,
    check: Check = False,
) -> int:
    """Real saved bytes from PyTorch, beside the prediction, tensor by tensor.

    Builds the transformers model on fake tensors (no weights, no memory, no GPU) and records what
    autograd keeps for backward. --device cuda also runs one real step. Needs actcalc[torch].
    """
    check_units(output.units)
    chosen_format(output)
    if module is not None and check:
        raise SpecError("--check compares with a prediction, and --module has none", "drop --check")
    result, measured = answer(model, module, options, keep_layer=save is not None)
    if save is not None and measured.layer is not None:
        from actcalc.measure.layer import layer_text

        write_whole(Path(save), layer_text(measured.layer, save))
        say(f"wrote {save}: the layer, for `actcalc compare {save}` and `actcalc plan {save}`")

    def sheets() -> list[Sheet]:
        from actcalc.render.measure import measure_sheets

        return measure_sheets(result, output.units)

    emit(sheets, result.document, output)
    return int(check and result.exact is not True)


def answer(
    model: str | None,
    module: str | Callable[[], Any] | None,
    options: RunOptions,
    *,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """What was measured of a model or a module, and all that was recorded of it."""
    if (model is None) == (module is None):
        raise SpecError(
            "measure takes a MODEL or --module, and was given "
            + ("neither" if model is None else "both"),
            "actcalc measure llama-3-8b, or actcalc measure --module block.py:factory",
        )
    if options.device not in (None, "cuda"):
        raise SpecError(
            f"--device {options.device}: a measurement runs here or nowhere",
            "use --device cuda for one real step on this machine's GPU, or drop it",
        )
    for flag in ("device_memory", "peak", "headroom"):
        if getattr(options, flag) is not None:
            name = flag.replace("_", "-")
            raise SpecError(f"--{name}: a measurement uses what is here", f"drop --{name}")
    if module is not None:
        return _of_module(module, options, keep_layer)
    return _of_model(model or "", options, keep_layer)


def _of_module(
    reference: str | Callable[[], Any], options: RunOptions, keep_layer: bool
) -> tuple[Measurement, Measured]:
    """Measure a module of the user's, which brings its own sizes."""
    from actcalc.answers.measure import measure_own_module

    refuse_given(options, "--module", keep=("device", "precision"))
    precision = options.precision
    if precision not in (None, "amp-bf16", "amp-fp16"):
        raise SpecError(
            f"--precision {precision}: a module of yours has its own element type",
            "set it inside the factory; amp-bf16 and amp-fp16 run it under autocast",
        )
    return measure_own_module(
        reference,
        amp=precision.removeprefix("amp-") if precision else None,
        real=options.device == "cuda",
        keep_layer=keep_layer,
    )


def _of_model(model: str, options: RunOptions, keep_layer: bool) -> tuple[Measurement, Measured]:
    """Measure a transformers model beside the run's prediction."""
    from actcalc.answers.measure import FRAMEWORK, check_measurable, measure_run
    from actcalc.io.runs import load_framework
    from actcalc.io.sources import source

    profile = options.framework or FRAMEWORK
    if not load_framework(profile).hub_models:
        raise SpecError(
            f"measure builds transformers models, not {options.framework} ones",
            "drop --framework; --module measures code of your own",
        )
    real = options.device == "cuda"
    options = replace(options, device=None)
    try:
        origin = source(model, options.from_)
    except SpecError as error:
        config = _refused(model, error)
        if config is None:
            raise
        return _alone(config, Path(model), options, str(error), real=real, keep_layer=keep_layer)
    run = options.run(origin, profile)
    if check_measurable(run) and keep_layer:
        raise SpecError("--save keeps a layer that is not checkpointed", "drop --policy full")
    base = replace(options, layers=None).run(origin, profile).model
    config = _config(model, base, replace(options, layers=None, set=None).run(origin, profile))
    return measure_run(run, config, layers=options.layers, real=real, keep_layer=keep_layer)


def _refused(name: str, error: SpecError) -> dict[str, Any] | None:
    """The configuration in a file whose model type nothing describes: told so, or sent here."""
    from actcalc.io.hf import refused_types
    from actcalc.io.hub.family import MEASURE_HINT
    from actcalc.measure.hf import load_config

    path = Path(name)
    if not (path.is_dir() or path.suffix == ".json"):
        return None
    try:
        config = load_config(path)
    except SpecError:
        return None
    sent = error.hint == MEASURE_HINT or config["model_type"] in refused_types()
    return config if sent else None


def _alone(
    config: dict[str, Any],
    path: Path,
    options: RunOptions,
    reason: str,
    *,
    real: bool,
    keep_layer: bool,
) -> tuple[Measurement, Measured]:
    """Measure a model that no layer graph describes, with the sizes of the options."""
    from actcalc.answers.measure import asks_checkpointing, measure_undescribed
    from actcalc.specs.workload import Workload

    keep = ("seq", "micro_batch", "precision", "attention", "layers", "policy")
    refuse_given(options, "a model without a prediction", keep=keep)
    checkpointing = asks_checkpointing(split_policies(options.policy))
    if checkpointing and keep_layer:
        raise SpecError("--save keeps a layer that is not checkpointed", "drop --policy full")
    given: dict[str, Any] = {
        key: getattr(options, key)
        for key in ("seq", "micro_batch", "precision")
        if getattr(options, key) is not None
    }
    return measure_undescribed(
        config,
        Workload(**given),
        name=path.stem,
        reason=reason,
        attention=options.attention,
        checkpointing=checkpointing,
        layers=options.layers,
        real=real,
        keep_layer=keep_layer,
    )


def _config(name: str, wanted: Any, plain: Any) -> dict[str, Any]:
    """The configuration to build: the file's, changed by --set, or one written for a preset."""
    from actcalc.io import presets
    from actcalc.io.hub.write import with_changes, write_config

    path = Path(name)
    preset = presets.exists("models", name) or presets.exists("runs", name)
    if preset or not (path.is_dir() or path.suffix == ".json"):
        return write_config(wanted)
    from actcalc.measure.hf import load_config

    return with_changes(load_config(path), plain.model, wanted)


__all__ = ["app"]
