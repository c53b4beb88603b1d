"""Rows of a search as columns, each as narrow as its numbers are: there may be millions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """Layouts of a search, one entry each."""

    cut: NDArray[Any]
    """How the model is cut into stages."""
    lane: NDArray[Any]
    """Split and micro-batch."""
    policy: NDArray[Any]
    block: NDArray[Any]
    """The policy is for the first so many layers of a chunk alone; 0: for all."""
    dp: NDArray[Any]
    zero: NDArray[Any]
    rounds: NDArray[Any]
    """Micro-batches of a replica in a step."""

    @classmethod
    def kinds(cls) -> tuple[type[np.signedinteger[Any]], ...]:
        """The type of each column."""
        return np.int32, np.int32, np.int16, np.int16, np.int32, np.int8, np.int32

    def narrow(self) -> Rows:
        """The same rows, each column in its type."""
        pairs = zip(self, self.kinds(), strict=True)
        return Rows(*(column.astype(kind) for column, kind in pairs))

    def take(self, chosen: NDArray[Any]) -> Rows:
        """Some of the rows."""
        return Rows(*(column[chosen] for column in self))
