"""Images for vision-language models on fake tensors, and what such models ask of their values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from math import isqrt
from typing import Any

from actcalc.errors import SpecError
from actcalc.measure.fake_cuda import patched, require_torch


def images_of(
    config: Any, images: int, tokens: int, *, batch: int, seq: int, dtype: Any, device: str
) -> dict[str, Any]:
    """What a vision-language model takes beside its tokens: ``images`` for each sequence.

    They are of the size that the configuration states; where it states none, squares that become
    ``tokens`` tokens each.
    """
    torch = require_torch()
    vision, count = config.vision_config, batch * images
    size = getattr(vision, "image_size", None)
    if size is None:
        return _packed(config, count, tokens, batch=batch, seq=seq, dtype=dtype, device=device)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    made = {"pixel_values": torch.randn(count, channels, height, width, device=device, dtype=dtype)}
    if config.model_type == "gemma3":
        made["token_type_ids"] = torch.zeros(batch, seq, dtype=torch.int64, device=device)
    return made


def given(inputs: dict[str, Any]) -> list[Any]:
    """The tensors of a batch that are nobody's activations: what a processor makes."""
    made = (name for name in inputs if not name.startswith("image_"))
    return [inputs[name] for name in made if hasattr(inputs[name], "grad_fn")]


def _packed(
    config: Any, count: int, tokens: int, *, batch: int, seq: int, dtype: Any, device: str
) -> dict[str, Any]:
    """Patches of all images as one sequence, with what Qwen's towers would compute from its grid.

    Lengths are NumPy's, for fake tensors have no values to split by (``vision_utils.py`` says under
    which names a model takes them from its caller).
    """
    import numpy as np

    torch = require_torch()
    vision = config.vision_config
    merge = vision.spatial_merge_size
    side = isqrt(tokens)
    if side * side != tokens or not tokens:
        raise SpecError(
            f"an image of {tokens} tokens is no square",
            hint="give the square of a number, for example 256",
        )
    patches, rows = tokens * merge**2, side * merge
    total = count * patches
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def index(*shape: int) -> Any:
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    made = {
        "pixel_values": torch.randn(total, values, device=device, dtype=dtype),
        "image_grid_thw": np.array([[1, rows, rows]] * count),
        "mm_token_type_ids": index(batch, seq),
        "position_ids": index(3, batch, seq),
        "image_position_ids": index(total, 2),
        "image_cu_seqlens": np.arange(count + 1) * patches,
    }
    if getattr(vision, "window_size", None):
        # Made on the host, from where indexing moves it (get_vision_window_index).
        made["image_window_index"] = torch.zeros(count * tokens, dtype=torch.int64)
        window = vision.window_size // vision.patch_size
        made["image_cu_window_seqlens"] = np.array(_ends(count, rows, window))
    if getattr(vision, "num_position_embeddings", None):
        made["image_interp_indices"] = index(total, 4)
        made["image_interp_weights"] = torch.zeros(total, 4, device=device)
    return made


def _ends(count: int, rows: int, window: int) -> list[int]:
    """Where each window of ``count`` square images ends, in patches."""
    sides = [min(window, rows - start) for start in range(0, rows, window)]
    ends = [0]
    for _ in range(count):
        for height in sides:
            for width in sides:
                ends.append(ends[-1] + height * width)
    return ends


@contextlib.contextmanager
def uncounted_images(cls: Any) -> Iterator[None]:
    """Let models believe that a sequence has as many image tokens as there are features.

    They count them, which fake tensors cannot (``torch_compilable_check``, import_utils.py).

    Qwen3-VL adds features to the stream at the places of a mask: indexing by it and putting back
    keep the mask alone (derivatives.yaml ``index``, ``index_put_``), as the addition that stands in
    for them does.

    Llama 4 hands on ``image_outputs`` of its language model's output, which has none
    (modeling_llama4.py, 5.24), so that the output with images stands in for it.
    """
    torch = require_torch()
    name = "_check_tensor_all_with"
    changes: list[Any] = [(torch, name, lambda *_, **__: None)] if hasattr(torch, name) else []
    module = sys.modules[cls.__module__]
    for found in vars(module).values():
        if isinstance(found, type) and "_deepstack_process" in vars(found):
            changes.append((found, "_deepstack_process", _added))
    name = "MoeCausalLMOutputWithPast"
    if cls.__name__ == "Llama4ForConditionalGeneration" and hasattr(module, name):
        changes.append((module, name, module.Llama4CausalLMOutputWithPast))
    with patched(*changes):
        yield


def _added(_: Any, stream: Any, mask: Any, features: Any) -> Any:
    """The stream with features added where the mask is set."""
    zeros = stream.new_zeros(stream.shape)
    return stream + zeros.masked_scatter(mask.unsqueeze(-1), features.to(stream.dtype))
