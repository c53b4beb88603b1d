"""A transformers configuration cut to fewer layers, with every list that goes layer by layer."""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError


def shorten(config: Any, layers: int) -> None:
    """Cut a configuration, and its per-layer lists, to a number of layers.

    Raises:
        SpecError: it states no number of layers.
    """
    text = text_config(config)
    if not isinstance(getattr(text, "num_hidden_layers", None), int):
        raise SpecError(
            f"this {config.model_type} configuration states no number of layers to change",
            hint="set num_hidden_layers in it",
        )
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before and layers < before:
            setattr(text, name, value[:layers])
        elif _numbers_layers(name, value, before):
            setattr(text, name, [index for index in value if index < layers])
    if getattr(text, "num_kv_shared_layers", 0):  # the last of them, which are cut off
        text.num_kv_shared_layers = max(0, layers - before + text.num_kv_shared_layers)
    try:
        text.num_hidden_layers = layers
    except NotImplementedError as error:
        raise SpecError(
            f"the number of layers of a {config.model_type} model is not one number: {error}",
            hint="leave --layers out, or change the configuration",
        ) from error


def _numbers_layers(name: str, value: object, layers: int) -> bool:
    """Whether a field lists indices of layers (Zamba2's ``hybrid_layer_ids``)."""
    if not isinstance(value, list) or not ("layer" in name or "attn" in name):
        return False
    return all(type(index) is int and 0 <= index < layers for index in value)


def text_config(config: Any) -> Any:
    """Return ``config.get_text_config()``.

    Raises:
        SpecError: the configuration holds several text models.
    """
    try:
        return config.get_text_config()
    except ValueError as error:
        raise SpecError(
            f"this {config.model_type} configuration holds several text models",
            hint="give the configuration of one of them",
        ) from error
