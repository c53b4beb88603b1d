"""Measure a transformers model from its configuration: no weights, no download, no GPU."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from actcalc.errors import SpecError
from actcalc.measure.fake_cuda import DEVICE, fake_cuda, imported, patched, require_torch
from actcalc.measure.fused import fused_kernels
from actcalc.measure.images import given, images_of, uncounted_images
from actcalc.measure.masks import masks_of_ones, unpacked_batch
from actcalc.measure.record import layer_stacks
from actcalc.measure.results import Dtype, Measured
from actcalc.measure.run import Step, facts_of, first_line, summarise, traced_step, without_data
from actcalc.measure.shorter import shorten, text_config

Attention = Literal["sdpa", "eager"]

_STRIDE = 2
"""Frames of a spectrogram for one position of Whisper's encoder (modeling_whisper.py)."""

_TASKS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Heads to try when the configuration names none, and last the model without one. Encoders also
have a causal head, which nobody trains them with, hence the order."""


def require_transformers() -> Any:
    """Return the ``transformers`` module, or say how to install it.

    Raises:
        MissingExtraError: transformers is not installed.
        SpecError: it is, but importing it fails.
    """
    require_torch()
    return imported("transformers", "measuring a model by its configuration needs transformers")


def load_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a configuration as a plain mapping.

    Args:
        source: the mapping itself, a ``config.json``, or a folder that holds one.

    Raises:
        SpecError: the file does not exist, is no JSON object, or names no ``model_type``.
    """
    if isinstance(source, Mapping):
        config, name = dict(source), "the configuration"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        name = str(path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                f"cannot read {name}: {error.strerror}", hint="give a config.json or its folder"
            ) from error
        except ValueError as error:
            raise SpecError(f"{name} is not JSON: {error}", hint="give a config.json") from error
        if not isinstance(config, dict):
            raise SpecError(f"{name} holds no JSON object", hint="give a config.json")
    if not isinstance(config.get("model_type"), str):
        raise SpecError(
            f"{name} has no model_type", hint='add one, for example "model_type": "llama"'
        )
    return config


def build_config(source: Mapping[str, Any] | str | Path) -> Any:
    """Return the transformers configuration object for a description.

    Remote code named by the configuration is ignored; quantisation is dropped, since training
    runs on the unquantised weights.

    Args:
        source: see :func:`load_config`.

    Raises:
        SpecError: unreadable, of a type that this transformers does not know, or invalid.
    """
    transformers = require_transformers()
    config = load_config(source)
    for key in ("auto_map", "quantization_config", "transformers_version", "dtype", "torch_dtype"):
        config.pop(key, None)
    model_type = config.pop("model_type")
    try:
        built = transformers.AutoConfig.for_model(model_type, **config)
    except Exception as error:  # transformers raises many kinds for one bad field
        known = model_type in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
        raise SpecError(
            f"transformers {transformers.__version__} cannot read this {model_type} "
            f"configuration: {first_line(error)}"
            if known
            else f"transformers {transformers.__version__} does not know model_type {model_type!r}",
            hint="check the configuration's fields" if known else "upgrade transformers",
        ) from error
    return built


def text_part(config: Any) -> Any:
    """Return the text model's configuration of a multimodal one, else the configuration.

    Without images only the text model runs.
    """
    text = text_config(config)
    if isinstance(text, Mapping):  # a nested configuration that its type does not know
        return build_config(text)
    return config if getattr(config, "is_encoder_decoder", False) else text


def model_class(config: Any, name: str | None = None) -> Any:
    """Return the class to train: ``name``, or the configuration's, or by its model type.

    Raises:
        SpecError: transformers has no such class, or none with a loss for this type.
    """
    transformers = require_transformers()
    names = [name] if name else list(config.architectures or [])
    for candidate in names:
        found = getattr(transformers, candidate, None)
        if found is not None:
            return found
    if name:
        raise SpecError(
            f"transformers {transformers.__version__} has no class {name!r}",
            hint="name a class such as LlamaForCausalLM",
        )
    auto = transformers.models.auto.modeling_auto
    for task in _TASKS:
        known = getattr(auto, task).get(config.model_type)
        if known is not None:
            return getattr(transformers, known[0] if isinstance(known, tuple) else known)
    # A part of a model, such as a tower, is listed nowhere; its class is named as its settings.
    part = getattr(transformers, type(config).__name__.removesuffix("Config") + "Model", None)
    if part is not None:
        return part
    raise SpecError(
        f"transformers {transformers.__version__} has no model for model_type "
        f"{config.model_type!r}",
        hint="measure it as a module: --module path.py:factory",
    )


def torch_dtype(dtype: str) -> tuple[Any, Any]:
    """Return (parameters' dtype, autocast dtype or None) for a name in ``Dtype``.

    Raises:
        SpecError: an unknown name.
    """
    torch = require_torch()
    plain = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype in plain:
        return plain[dtype], None
    if dtype in ("amp-bf16", "amp-fp16"):
        return torch.float32, plain[dtype.removeprefix("amp-")]
    raise SpecError(f"unknown dtype {dtype!r}", hint="one of " + ", ".join(get_args(Dtype)))


@contextlib.contextmanager
def _without_initialisation() -> Iterator[None]:
    """Skip filling weights with random numbers: fake ones have none."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers before 5 keeps it elsewhere
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield


def build_model(
    config: Any,
    cls: Any,
    *,
    dtype: Any,
    attention: str | None,
    checkpointing: bool,
    initialise: bool = False,
) -> Any:
    """Return the model in training mode, built from its configuration alone.

    ``initialise`` fills the weights with random numbers, as only a real step needs.

    Raises:
        SpecError: the class refuses the configuration or the attention implementation.
    """
    try:
        filling = contextlib.nullcontext() if initialise else _without_initialisation()
        with without_data(cls.__name__), filling:
            model = cls._from_config(config, dtype=dtype, attn_implementation=attention)
            model.tie_weights()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
    except SpecError:
        raise
    except Exception as error:  # whatever a model's own code raises on a bad configuration
        raise SpecError(
            f"transformers cannot build {cls.__name__}: {first_line(error)}",
            hint="try --attention eager"
            if attention == "sdpa"
            else "check the configuration's fields",
        ) from error
    return model


def prepare_config(config: Any) -> None:
    """Set what training code sets: no cache, and a first token for decoders that need one."""
    config.use_cache = False
    if hasattr(config, "get_text_config"):
        config.get_text_config().use_cache = False
    heads = getattr(config, "num_attention_heads", None)
    if getattr(config, "kv_lora_rank", None) and (config.num_key_value_heads or 0) > (heads or 0):
        # Latent attention has a key for each head; the class's default is the largest model's.
        config.num_key_value_heads = heads
    if getattr(config, "is_encoder_decoder", False):
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


def example_batch(
    model: Any,
    config: Any,
    *,
    batch: int,
    seq: int,
    dtype: Any,
    padding_mask: bool,
    device: str,
    images: int = 0,
    decoder_seq: int | None = None,
    image_tokens: int = 0,
) -> dict[str, Any]:
    """Return a batch with labels, of the kind the model's ``forward`` takes.

    A padding mask marks some position as padding, so that it cannot be dropped. Labels of an
    encoder-decoder are ``decoder_seq`` long (None: as long as the input).
    """
    torch = require_torch()
    if model.main_input_name == "pixel_values" or model.input_modalities == ("image",):
        size = getattr(config, "image_size", None)
        if size is None:
            raise SpecError(
                f"this {config.model_type} configuration states no image_size",
                hint='add one, for example "image_size": 224',
            )
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        pixels = torch.randn(batch, channels, height, width, device=device, dtype=dtype)
        labels = torch.randint(0, config.num_labels, (batch,), device=device)
        return _taken(model, {"pixel_values": pixels, "labels": labels})
    vocab = config.get_text_config().vocab_size
    labels = torch.randint(0, vocab, (batch, decoder_seq or seq), device=device)
    if model.main_input_name == "input_features":
        frames = config.max_source_positions * _STRIDE
        sound = torch.randn(batch, config.num_mel_bins, frames, device=device, dtype=dtype)
        return {"input_features": sound, "labels": labels}
    made = {"input_ids": torch.randint(0, vocab, (batch, seq), device=device), "labels": labels}
    if padding_mask:
        mask = torch.ones(batch, seq, dtype=torch.int64, device=device)
        mask[:, -1] = 0
        made["attention_mask"] = mask
    made = _taken(model, made)
    if images:
        made |= images_of(
            config, images, image_tokens, batch=batch, seq=seq, dtype=dtype, device=device
        )
    return made


def _taken(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without labels where the model has no head, and so no loss."""
    if "labels" in inspect.signature(model.forward).parameters:
        return batch
    return {name: value for name, value in batch.items() if name != "labels"}


def _language(model: Any) -> Any:
    """The language model of a vision-language one, whose tower is part of its embedding."""
    return getattr(getattr(model, "model", model), "language_model", model)


def measure_transformers(
    source: Mapping[str, Any] | str | Path,
    *,
    batch: int = 1,
    seq: int = 4096,
    dtype: Dtype = "bf16",
    attention: Attention | None = None,
    padding_mask: bool = False,
    checkpointing: bool = False,
    layers: int | None = None,
    cls: str | None = None,
    flops: bool = False,
    keep_layer: bool = False,
    name: str | None = None,
    images: int = 0,
    decoder_seq: int | None = None,
    image_tokens: int = 0,
) -> Measured:
    """Measure what one training step of a transformers model keeps for backward.

    Args:
        source: a configuration: mapping, ``config.json``, or a folder that holds one.
        batch: sequences (or images) in the micro-batch.
        seq: tokens per sequence; ignored by vision models.
        dtype: of the parameters, or autocast over fp32 parameters.
        attention: transformers' ``attn_implementation``; ``None`` lets it choose (sdpa where the
            model supports it).
        padding_mask: give an attention mask with padding in it.
        checkpointing: ``gradient_checkpointing_enable()``.
        layers: build fewer layers than the configuration says (the figures of one layer, the
            head and the embedding do not change; the totals do).
        cls: model class, when not the configuration's own.
        flops: also count FLOPs of forward and backward.
        keep_layer: also return :attr:`Measured.layer`, the middle layer, to be saved.
        name: what to call the model; its ``model_type`` if absent.
        images: images in each sequence of a vision-language model, which then runs whole; without
            any its language model runs alone.
        decoder_seq: tokens per sequence of an encoder-decoder's decoder, when not ``seq``.
        image_tokens: tokens of one image, where the model takes images of any size.

    Raises:
        MissingExtraError: PyTorch or transformers is not installed.
        SpecError: an invalid configuration or option, or a model that cannot run without data.
    """
    transformers = require_transformers()
    _check(attention, batch=batch, seq=seq, layers=layers, decoder_seq=decoder_seq)
    with _quiet(transformers):
        config, chosen, note = _configured(source, cls, layers, whole=images > 0)
        ran = _step_of(
            config, chosen, batch=batch, seq=seq, dtype=dtype, attention=attention,
            padding_mask=padding_mask, checkpointing=checkpointing, flops=flops,
            keep_layer=keep_layer, name=name or config.model_type, images=images,
            decoder_seq=decoder_seq,
            image_tokens=image_tokens,
        )  # fmt: skip
    return summarise(
        ran.step,
        name=name or config.model_type,
        model_class=chosen.__name__,
        transformers_version=transformers.__version__,
        batch=batch,
        seq=None if "pixel_values" in ran.inputs else seq,
        dtype=dtype,
        attention=config.get_text_config()._attn_implementation,
        padding_mask=padding_mask,
        checkpointing=checkpointing,
        **{**ran.facts, "notes": (*note, *ran.facts["notes"])},
    )


def _check(attention: str | None, **counts: int | None) -> None:
    for option, value in counts.items():
        if value is not None and value < 1:
            raise SpecError(f"{option} is {value}", hint=f"give a {option} of 1 or more")
    if attention is not None and attention not in get_args(Attention):
        raise SpecError(
            f"unknown attention {attention!r}", hint="one of " + ", ".join(get_args(Attention))
        )


def _configured(
    source: Mapping[str, Any] | str | Path,
    cls: str | None,
    layers: int | None,
    *,
    whole: bool = False,
) -> tuple[Any, Any, tuple[str, ...]]:
    """The configuration to build, its model's class, and a note where it is a part of another."""
    built = build_config(source)
    config = built if cls or whole else text_part(built)
    if layers is not None:
        shorten(config, layers)
    try:
        chosen = model_class(config, cls)
    except SpecError:
        if config is built or cls:
            raise
        # The type's language model has no head of its own: the whole is built, and no image given.
        config = built
        chosen = model_class(config)
    prepare_config(config)
    part = f"Only the text model of this {built.model_type} configuration was measured."
    return config, chosen, () if config is built else (part,)


class _Ran(NamedTuple):
    """A traced step, the batch it ran on, and what is known of the model."""

    step: Step
    inputs: dict[str, Any]
    facts: dict[str, Any]


def _step_of(
    config: Any,
    chosen: Any,
    *,
    batch: int,
    seq: int,
    dtype: Dtype,
    attention: Attention | None,
    padding_mask: bool,
    checkpointing: bool,
    images: int,
    decoder_seq: int | None,
    image_tokens: int,
    **wanted: Any,
) -> _Ran:
    """Build the model and its batch on the fake device and trace one step of it."""
    parameter_dtype, autocast_dtype = torch_dtype(dtype)
    # A decoder's own mask is never given: that of an encoder-decoder's batch is the encoder's.
    own = getattr(config, "is_encoder_decoder", False)
    masks = masks_of_ones(causal=own or not padding_mask, bidirectional=not padding_mask)
    with fake_cuda() as trace, unpacked_batch(), masks, uncounted_images(chosen):
        model = build_model(
            config, chosen, dtype=parameter_dtype, attention=attention, checkpointing=checkpointing
        )
        inputs = example_batch(
            model, config, batch=batch, seq=seq, dtype=parameter_dtype, padding_mask=padding_mask,
            device=DEVICE, images=images, image_tokens=image_tokens, decoder_seq=decoder_seq,
        )  # fmt: skip
        with fused_kernels(chosen, getattr(config, "context_length", 0)) as ran:
            step = traced_step(
                model,
                lambda: model(**inputs),
                layers=[block for stack in layer_stacks(_language(model)) for block in stack],
                inputs=given(inputs),
                what=chosen.__name__,
                autocast_dtype=autocast_dtype,
                dtype=dtype,
                **wanted,
            )
        return _Ran(step, inputs, facts_of(model, trace, ran))


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' advice for trainers off the user's screen, and it off the network."""
    from huggingface_hub import constants

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with patched((constants, "HF_HUB_OFFLINE", True)):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
