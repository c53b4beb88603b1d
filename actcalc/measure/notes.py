"""What a trace without a GPU cannot reproduce."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from actcalc.measure.fake_cuda import require_torch
from actcalc.measure.fused import notes_of


def notes_on(module: Any, fused: Set[str] = frozenset()) -> tuple[str, ...]:
    """Return what a trace of this module leaves out, in sentences.

    ``fused`` are the fused kernels of which it holds what they keep.
    """
    torch = require_torch()
    notes = []
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules()):
        notes.append(
            "BatchNorm: on a GPU cuDNN also keeps a reserve buffer, whose size it alone knows."
        )
    if any(isinstance(m, torch.nn.RNNBase) for m in module.modules()):
        notes.append(
            "Recurrent layers: on a GPU cuDNN keeps one packed buffer instead of these tensors."
        )
    if fused:
        notes += notes_of(fused)
    elif any(map(_is_causal_conv, module.modules())):
        notes.append(
            "State-space or linear-attention layers: measured as written in PyTorch; the fused "
            "kernels of mamba-ssm, causal-conv1d or fla keep other tensors."
        )
    return tuple(notes)


def _is_causal_conv(module: Any) -> bool:
    """Say whether a module is the short causal convolution that such layers begin with."""
    torch = require_torch()
    return (
        isinstance(module, torch.nn.Conv1d)
        and 1 < module.groups == module.in_channels
        and module.padding == (module.kernel_size[0] - 1,)
    )
