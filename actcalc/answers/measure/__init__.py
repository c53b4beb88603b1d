"""What PyTorch really keeps for backward, beside what the layer graphs predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actcalc.answers.measure.figures import Measurement
from actcalc.answers.measure.prediction import Prediction, predict
from actcalc.answers.measure.result import beside
from actcalc.errors import SpecError
from actcalc.specs.layout import Layout
from actcalc.specs.run import Run
from actcalc.specs.workload import Workload

if TYPE_CHECKING:
    from actcalc.measure.results import Measured

FRAMEWORK = "transformers"
"""The profile that a measured transformers model is compared with."""


def check_measurable(run: Run) -> bool:
    """Whether the run asks for checkpointing; ``SpecError`` for what no measurement can answer.

    Measured is one GPU's model as transformers builds it: no parallel layout, no policy but
    none and full (``gradient_checkpointing_enable``), no attention that needs another package.
    """
    default, layout = Layout().model_dump(), run.layout.model_dump()
    split = [key for key, value in layout.items() if value != default[key]]
    if split:
        named = ", ".join(f"{key} {layout[key]}" for key in split)
        raise SpecError(
            f"measure builds one GPU's model and knows no layout: {named}",
            "drop those options; `actcalc breakdown` takes them",
        )
    if run.training.lora_rank:
        raise SpecError(
            "measure builds the model itself, without adapters",
            "drop lora_rank; `actcalc breakdown` takes it",
        )
    full = asks_checkpointing(run.policies)
    _check_workload(run.workload)
    patches = run.model.max_positions
    if run.model.sensed and run.workload.seq != patches:
        made = "sound makes {} frames" if run.model.mel_bins else "image makes {} tokens of patches"
        raise SpecError(
            f"seq is {run.workload.seq}, but a model's " + made.format(patches),
            "leave --seq out",
        )
    return full


def asks_checkpointing(policies: Sequence[str]) -> bool:
    """Whether the policy is full (else none); ``SpecError`` for any other."""
    policies = tuple(policies) or ("none",)
    if len(policies) > 1 or policies[0] not in ("none", "full"):
        raise SpecError(
            f"measure knows the policies none and full, not {', '.join(policies)}",
            "full is transformers' gradient checkpointing; for others: --save FILE, then "
            "`actcalc compare FILE`",
        )
    return policies[0] == "full"


def _check_workload(work: Workload) -> None:
    if work.attention == "flash":
        raise SpecError(
            "--attention flash needs a package and a GPU that a trace does without",
            "use --attention sdpa: PyTorch's own flash kernel keeps the same tensors",
        )
    if work.fp8_products:
        raise SpecError("measure knows no fp8 kernels", "use --precision bf16")
    settings, plain = work.model_dump(), Workload().model_dump()
    for key in ("moe_imbalance", "kernels"):
        if settings[key] != plain[key]:
            raise SpecError(f"{key} has no effect on what PyTorch runs", f"drop --set {key}")


def measure_run(
    run: Run,
    config: Mapping[str, Any],
    *,
    layers: int | None = None,
    real: bool = False,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """Measure the transformers model that ``config`` describes, beside the run's prediction.

    Args:
        run: what to predict with; its model is the one of ``config``, with ``layers`` layers.
        config: a ``config.json`` as a mapping.
        layers: build fewer layers than the configuration says.
        real: also run one step on the GPU.
        keep_layer: keep the middle layer, to be saved.

    Raises:
        MissingExtraError: PyTorch or transformers is not installed.
        SpecError: a run that cannot be measured, a configuration that transformers refuses, or
            no GPU for a real step.
    """
    from actcalc.measure import measure_cuda, measure_transformers

    checkpointing = check_measurable(run)
    work = run.workload
    if not work.dropout:
        from actcalc.io.hub.write import without_dropout

        config = without_dropout(config)
    if layers is not None and run.model.encoder_layers:
        # The layers of the spec are the decoder's; transformers would cut the encoder.
        key = "num_decoder_layers" if "num_decoder_layers" in config else "decoder_layers"
        config, layers = {**config, key: layers}, None
    options = {**_options(work, layers), "checkpointing": checkpointing}
    images = _images(run, real=real)
    step = measure_cuda(config, **options) if real else None
    measured = measure_transformers(
        config,
        **options,
        keep_layer=keep_layer,
        name=run.model.name,
        images=images,
        image_tokens=run.model.tower.tokens if run.model.tower else 0,
    )
    if not images:
        run = replace(run, model=run.model.model_copy(update={"tower": None}))
    prediction, notes = _predicted(run, "full" if checkpointing else "none")
    if run.workload.global_batch is not None:
        notes.append("No effect on this table: global batch (one micro-batch is measured).")
    result = beside(
        measured,
        prediction,
        step=step,
        dropout=_drops(run),
        notes=notes,
        framework=str(run.framework),
    )
    return result, measured


def _images(run: Run, *, real: bool) -> int:
    """Images of each sequence; without any the language model is measured alone."""
    tower = run.model.tower
    if tower is None or not run.workload.image_tokens:
        return 0
    if real:
        raise SpecError(
            "a real step of a model with images is not measured", "drop image_tokens, or --device"
        )
    return run.workload.image_tokens // tower.tokens


def _options(work: Workload, layers: int | None) -> dict[str, Any]:
    """Arguments that a trace and a real step share."""
    return {
        "batch": work.micro_batch,
        "seq": work.seq,
        "decoder_seq": work.decoder_seq or None,
        "dtype": work.precision,
        "attention": work.attention,
        "padding_mask": work.padding_mask,
        "layers": layers,
    }


def measure_undescribed(
    config: Mapping[str, Any],
    work: Workload,
    *,
    name: str,
    reason: str,
    attention: str | None = None,
    checkpointing: bool = False,
    layers: int | None = None,
    real: bool = False,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """Measure a model that no layer graph describes; ``reason`` says why there is no prediction.

    Without ``attention`` transformers chooses (the workload's is not heeded).

    Raises the same as :func:`measure_run`.
    """
    from actcalc.measure import measure_cuda, measure_transformers

    options = _options(work, layers) | {"attention": attention, "checkpointing": checkpointing}
    step = measure_cuda(config, **options) if real else None
    measured = measure_transformers(config, **options, keep_layer=keep_layer, name=name)
    return beside(measured, None, step=step, notes=[f"No prediction: {reason}."]), measured


def _drops(run: Run) -> bool:
    """Whether any dropout rate is in use."""
    rates = (value for key, value in run.model.model_dump().items() if key.endswith("_dropout"))
    return run.workload.dropout and any(rates)


def _predicted(run: Run, policy: str) -> tuple[Prediction | None, list[str]]:
    """The prediction, or none and the reason why there is none."""
    try:
        return predict(run, policy), []
    except SpecError as error:
        return None, [f"No prediction: {error}."]


def measure_own_module(
    reference: str | Callable[[], Any],
    *,
    amp: str | None = None,
    real: bool = False,
    keep_layer: bool = False,
) -> tuple[Measurement, Measured]:
    """Measure the module that ``path.py:factory``, or the function, returns; nothing predicts it.

    Raises:
        MissingExtraError: PyTorch is not installed.
        SpecError: a bad reference, a module that fails, or no GPU for a real step.
    """
    from actcalc.measure import measure_module, measure_module_cuda

    step = measure_module_cuda(reference, amp=amp) if real else None
    measured = measure_module(reference, amp=amp, keep_layer=keep_layer)
    return beside(measured, None, step=step), measured


__all__ = [
    "FRAMEWORK",
    "Measurement",
    "asks_checkpointing",
    "check_measurable",
    "measure_own_module",
    "measure_run",
    "measure_undescribed",
]
