"""Exceptions of encoders by name: what the configuration of an encoder-decoder or a sense says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actcalc.io.hub.reading import Reading
from actcalc.specs.base import MAX_LAYERS

Model = Any
"""A ``specs.Model``: specs stand above this package, which reads their fields by name."""


def _encoder_decoder(reading: Reading) -> None:
    """Each half states its own sizes; they are described where both are the same."""
    values, fields = reading.values, reading.fields
    fields["encoder_layers"] = fields["layers"]
    fields["layers"] = values.size(("decoder_layers",), MAX_LAYERS) or fields["layers"]
    for what, name in (("attention_heads", "heads"), ("ffn_dim", "ffn")):
        key = f"decoder_{what}"
        if (values.size((key,)) or fields[name]) != fields[name]:
            raise values.wrong(
                key, f"not the encoder's {fields[name]}: halves of one width are described",
                "measure it: actcalc measure CONFIG --save layer.json",
            )  # fmt: skip
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        if values.number(key) > 0:
            reading.warnings.append(f"{key} is ignored: every layer is counted")
    for name in reading.outer.items("architectures") or []:
        if isinstance(name, str) and not name.endswith(("ForConditionalGeneration", "Model")):
            reading.warnings.append(
                f"architectures names {name[:60]}: a language-model head is assumed"
            )


def _unread_encoder_decoder(model: Model) -> dict[str, Any]:
    return {
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.layers,
        "decoder_attention_heads": model.heads,
        "decoder_ffn_dim": model.ffn,
    }


def _whisper(reading: Reading) -> None:
    values, fields = reading.values, reading.fields
    fields["mel_bins"] = values.size(("num_mel_bins",)) or 80
    fields["decoder_positions"] = values.size(("max_target_positions",)) or 448
    if values.flag("apply_spec_augment", False):
        reading.warnings.append("apply_spec_augment: its masks of the input are not counted")


def _unread_whisper(model: Model) -> dict[str, Any]:
    return {"num_mel_bins": model.mel_bins, "max_target_positions": model.decoder_positions}


SENSES: dict[str, Callable[[Reading], None]] = {
    "encoder_decoder": _encoder_decoder,
    "whisper": _whisper,
}
"""Exceptions by name (``adjust.ADJUST``)."""

UNADJUST_SENSES: dict[str, Callable[[Model], dict[str, Any]]] = {
    "encoder_decoder": _unread_encoder_decoder,
    "whisper": _unread_whisper,
}
"""Their inverses (``write.UNADJUST``)."""
