"""The best of what a search has found: in order, those that really differ, the Pareto front."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actcalc.search.find import Found

Indices = NDArray[np.int64]


def ordered(found: Found) -> Indices:
    """Rows from the fastest on; of equal ones that with the least memory first."""
    rows = found.rows
    found_order: Indices = np.lexsort(
        (rows.block, rows.policy, rows.zero, found.peak, found.seconds)
    )
    return found_order


def different(found: Found, order: Indices) -> Indices:
    """Of every set of degrees (tp, cp, ep, pp; dp follows) the first row in ``order``."""
    if not len(order):
        return order
    degrees = np.array([[one.split.tp, one.split.cp, one.split.ep] for one in found.lanes])
    stages = np.array([cut.pp for cut in found.cuts])
    rows = np.column_stack([degrees[found.rows.lane[order]], stages[found.rows.cut[order]]])
    _, first = np.unique(rows, axis=0, return_index=True)
    chosen: Indices = order[np.sort(first)]
    return chosen


def pareto(found: Found, order: Indices) -> Indices:
    """Rows that no other one tops in both time and memory, the fastest first."""
    if not len(order):
        return order
    peaks = found.peak[order]
    least = np.minimum.accumulate(peaks)
    kept = np.concatenate([[True], peaks[1:] < least[:-1]])
    front: Indices = order[kept]
    return front
