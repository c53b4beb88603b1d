"""PyTorch's caching allocator: how much it has reserved after a sequence of requests.

The published rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 B; up to 1 MiB
they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from segments of their
own, rounded to 2 MiB. The smallest free block of the stream that is large enough is taken, and
split where more than 512 B (small) or 1 MiB (large) are left; freed neighbours of a segment join.
With ``expandable_segments`` a pool of a stream is one segment that grows by whole pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

_ROUND = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_LARGE_FROM = 10 * 2**20

_SEGMENT = 60
"""Bits of an address within its segment; above them is the segment's number."""
_ADDRESS = 84
"""Bits of an address; a free block is one number, its size above its address, so that numbers are
in the order in which the allocator looks at blocks: by size, then by address."""
_IN_ADDRESS = 2**_ADDRESS - 1


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND or _ROUND


class _Pool(NamedTuple):
    """Free blocks of one stream and size class, sorted."""

    key: int
    """Twice the stream, and one more for small blocks."""
    small: bool
    least: int
    """The smallest rest of a block that stays free when the block is taken."""
    free: list[int]


class _Pools(dict[int, _Pool]):
    """The pool of each stream's small blocks, and of its large ones, made when asked for."""

    def __init__(self, *, expandable: bool) -> None:
        super().__init__()
        self._large = _ROUND if expandable else _SMALL + 1

    def __missing__(self, key: int) -> _Pool:
        small = bool(key % 2)
        pool = self[key] = _Pool(key, small, _ROUND if small else self._large, [])
        return pool


class Block(NamedTuple):
    """What a request got."""

    pool: _Pool
    start: int
    """Its address, that of its segment included."""
    size: int


class CachingAllocator:
    """The allocator of one device.

    ``limit`` bytes are all there are: when a new segment would pass it, free segments go back to
    the device first. ``expandable`` is the option ``expandable_segments``.
    """

    def __init__(self, *, limit: int | None = None, expandable: bool = False) -> None:
        self.limit = limit
        self.expandable = expandable
        self.reserved = self.most_reserved = 0
        self.allocated = self.most_allocated = 0
        self._pools = _Pools(expandable=expandable)
        self._sizes: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._grown: dict[int, int] = {}

    def take(self, size: int, stream: int = 0) -> Block:
        """A block of ``size`` bytes for one stream."""
        size = _rounded(size)
        pool = self._pools[2 * stream + (size <= _SMALL)]
        free = pool.free
        at = bisect_left(free, size << _ADDRESS)
        if at == len(free):
            self._grow(pool, size)
            at = bisect_left(free, size << _ADDRESS)
        found = free.pop(at)
        whole, start = found >> _ADDRESS, found & _IN_ADDRESS
        del self._starts[start]
        left = whole - size
        if left >= pool.least:
            insort(free, left << _ADDRESS | start + size)
            self._starts[start + size] = self._ends[start + whole] = left
        else:
            del self._ends[start + whole]
            size = whole
        self.allocated += size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return Block(pool, start, size)

    def give(self, block: Block) -> None:
        """A block back to its pool, joined with free neighbours."""
        pool, start, size = block
        free = pool.free
        self.allocated -= size
        before = self._ends.pop(start, 0)
        if before:
            start -= before
            size += before
            del free[bisect_left(free, before << _ADDRESS | start)]
        after = self._starts.pop(start + size, 0)
        if after:
            del free[bisect_left(free, after << _ADDRESS | start + size)]
            size += after
        insort(free, size << _ADDRESS | start)
        self._starts[start] = self._ends[start + size] = size

    def touch(self, sizes: Sequence[int]) -> None:
        """Take blocks of ``sizes``, all but the last of which are equal, and give them back.

        Where free blocks hold them all, everything is then as it was (freed neighbours join), so
        that what was in use is all there is to know.
        """
        used = self._fitting(_rounded(sizes[0]), _rounded(sizes[-1]), len(sizes) - 1)
        if used is None:
            for block in [self.take(size) for size in sizes]:
                self.give(block)
        else:
            self.most_allocated = max(self.most_allocated, self.allocated + used)

    def _fitting(self, size: int, last: int, count: int) -> int | None:
        """Bytes in use by ``count`` blocks of a size and a ``last`` one; None if they do not fit.

        The smallest block that is large enough is taken, and what is left of it is smaller still:
        it is cut up before the next one is.
        """
        pool, used = self._pools[size <= _SMALL], 0
        free = pool.free
        first = at = bisect_left(free, size << _ADDRESS)
        pieces: list[int] = []
        while count:
            if at == len(free):
                return None
            whole = free[at] >> _ADDRESS
            taken = min(count, whole // size)
            left = whole - taken * size
            if left >= pool.least:
                pieces.append(left)
                left = 0
            used += taken * size + left
            count, at = count - taken, at + 1
        if (last <= _SMALL) != pool.small:
            pool, first, at, pieces = self._pools[last <= _SMALL], 0, 0, []
            free = pool.free
        place = bisect_left(free, last << _ADDRESS)
        if first <= place < at:
            place = at
        found = [piece for piece in pieces if piece >= last]
        found += [whole >> _ADDRESS for whole in free[place : place + 1]]
        if not found:
            return None
        left = min(found) - last
        return used + last + (0 if left >= pool.least else left)

    def _grow(self, pool: _Pool, size: int) -> None:
        """A new segment that holds ``size`` bytes (or more of the pool's only one)."""
        if self.expandable:
            self._extend(pool, size)
            return
        whole = (
            _SMALL_SEGMENT
            if pool.small
            else _LARGE_SEGMENT
            if size < _LARGE_FROM
            else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        )
        if self.limit is not None and self.reserved + whole > self.limit:
            self._release()
        self._reserve(whole)
        self._add(pool, whole, self._new(whole) << _SEGMENT)

    def _extend(self, pool: _Pool, size: int) -> None:
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        if pool.key not in self._grown:
            self._grown[pool.key] = self._new(0)
        segment = self._grown[pool.key]
        end = (segment << _SEGMENT) + self._sizes[segment]
        tail = self._ends.pop(end, 0)
        more = -(-(size - tail) // page) * page
        if tail:
            del pool.free[bisect_left(pool.free, tail << _ADDRESS | end - tail)]
        self._sizes[segment] += more
        self._reserve(more)
        self._add(pool, tail + more, end - tail)

    def _add(self, pool: _Pool, size: int, start: int) -> None:
        insort(pool.free, size << _ADDRESS | start)
        self._starts[start] = self._ends[start + size] = size

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _release(self) -> None:
        """Segments with nothing in them go back to the device."""
        for pool in self._pools.values():
            kept = []
            for block in pool.free:
                size, start = block >> _ADDRESS, block & _IN_ADDRESS
                if size == self._sizes[start >> _SEGMENT]:
                    del self._starts[start], self._ends[start + size]
                    self.reserved -= size
                else:
                    kept.append(block)
            pool.free[:] = kept
