"""What transformers asks of masks and positions, whose values fake tensors do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from actcalc.measure.fake_cuda import patched


@contextlib.contextmanager
def masks_of_ones(*, causal: bool, bidirectional: bool) -> Iterator[None]:
    """Tell transformers that masks which models make of ones themselves hide nothing.

    It reads them to find out, and drops such a mask (``_ignore_causal_mask_sdpa`` and
    ``_ignore_bidirectional_mask_sdpa`` in ``masking_utils.py``); on fake tensors it cannot, and
    keeps it.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return

    def unread(skip: Any) -> Any:
        return lambda _padding_mask, *args, **options: skip(None, *args, **options)

    asked = (
        ("_ignore_causal_mask_sdpa", causal),
        ("_ignore_bidirectional_mask_sdpa", bidirectional),
    )
    names = [name for name, wanted in asked if wanted and hasattr(masking_utils, name)]
    with patched(*((masking_utils, n, unread(getattr(masking_utils, n))) for n in names)):
        yield


@contextlib.contextmanager
def unpacked_batch() -> Iterator[None]:
    """Tell transformers that no row of the batch packs several sequences.

    It reads the positions to find out, cannot on fake tensors, and then assumes the worst: a
    full mask, which takes flash attention away (``find_packed_sequence_indices`` in
    ``masking_utils.py``). The batch made here is not packed.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    name = "find_packed_sequence_indices"
    changes = [(masking_utils, name, lambda *_, **__: None)] if hasattr(masking_utils, name) else []
    with patched(*changes):
        yield
