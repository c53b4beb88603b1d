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


def _rounded(size: int) -> int:
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


class _Pool(NamedTuple):
    """Free blocks of one stream and size class: (size, number of segment, offset), sorted."""

    small: bool
    free: list[tuple[int, int, int]]


class Block(NamedTuple):
    """What a request got."""

    key: tuple[int, bool]
    segment: int
    start: int
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
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._sizes: dict[int, int] = {}
        self._ends: dict[int, dict[int, int]] = {}
        self._starts: dict[int, dict[int, int]] = {}
        self._grown: dict[tuple[int, bool], int] = {}
        self._empty: dict[int, _Pool] = {}
        self._count = 0

    def take(self, size: int, stream: int = 0) -> Block:
        """A block of ``size`` bytes for one stream."""
        size = _rounded(size)
        key = (stream, size <= _SMALL)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(key[1], [])
        at = bisect_left(pool.free, (size, -1, -1))
        if at == len(pool.free):
            self._grow(key, pool, size)
            at = bisect_left(pool.free, (size, -1, -1))
        whole, segment, start = pool.free[at]
        self._drop(pool, whole, segment, start)
        left = whole - size
        if self._splits(left, small=key[1]):
            self._add(pool, left, segment, start + size)
        else:
            size = whole
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return Block(key, segment, start, size)

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
        small, used = size <= _SMALL, 0
        free = self._free(small)
        first = at = bisect_left(free, (size, -1, -1))
        pieces: list[int] = []
        while count:
            if at == len(free):
                return None
            whole = free[at][0]
            taken = min(count, whole // size)
            left = whole - taken * size
            if self._splits(left, small=small):
                pieces.append(left)
                left = 0
            used += taken * size + left
            count, at = count - taken, at + 1
        if (last <= _SMALL) != small:
            small, first, at, pieces = not small, 0, 0, []
            free = self._free(small)
        place = bisect_left(free, (last, -1, -1))
        if first <= place < at:
            place = at
        found = [piece for piece in pieces if piece >= last]
        found += [whole for whole, _, _ in free[place : place + 1]]
        if not found:
            return None
        left = min(found) - last
        return used + last + (0 if self._splits(left, small=small) else left)

    def _free(self, small: bool) -> list[tuple[int, int, int]]:
        pool = self._pools.get((0, small))
        return pool.free if pool else []

    def _splits(self, left: int, *, small: bool) -> bool:
        """Whether ``left`` bytes of a block that is taken stay free."""
        return left >= _ROUND if small or self.expandable else left > _SMALL

    def give(self, block: Block) -> None:
        """A block back to its pool, joined with free neighbours."""
        pool = self._pools[block.key]
        segment, start, size = block.segment, block.start, block.size
        self.allocated -= size
        before = self._ends[segment].get(start)
        if before is not None:
            self._drop(pool, before, segment, start - before)
            start, size = start - before, size + before
        after = self._starts[segment].get(start + size)
        if after is not None:
            self._drop(pool, after, segment, start + size)
            size += after
        self._add(pool, size, segment, start)

    def _add(self, pool: _Pool, size: int, segment: int, start: int) -> None:
        insort(pool.free, (size, segment, start))
        self._starts[segment][start] = size
        self._ends[segment][start + size] = size
        if size == self._sizes[segment]:
            self._empty[segment] = pool

    def _drop(self, pool: _Pool, size: int, segment: int, start: int) -> None:
        del pool.free[bisect_left(pool.free, (size, segment, start))]
        del self._starts[segment][start]
        del self._ends[segment][start + size]
        self._empty.pop(segment, None)

    def _grow(self, key: tuple[int, bool], pool: _Pool, size: int) -> None:
        """A new segment that holds ``size`` bytes (or more of the pool's only one)."""
        if self.expandable:
            self._extend(key, pool, size)
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
        segment = self._new(whole)
        self._reserve(whole)
        self._add(pool, whole, segment, 0)

    def _extend(self, key: tuple[int, bool], pool: _Pool, size: int) -> None:
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        if key not in self._grown:
            self._grown[key] = self._new(0)
        segment = self._grown[key]
        end = self._sizes[segment]
        tail = self._ends[segment].get(end, 0)
        more = -(-(size - tail) // page) * page
        if tail:
            self._drop(pool, tail, segment, end - tail)
        self._sizes[segment] = end + more
        self._reserve(more)
        self._add(pool, tail + more, segment, end - tail)

    def _new(self, size: int) -> int:
        self._count += 1
        self._sizes[self._count] = size
        self._ends[self._count], self._starts[self._count] = {}, {}
        return self._count

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _release(self) -> None:
        """Segments with nothing in them go back to the device."""
        for segment, pool in list(self._empty.items()):
            size = self._sizes[segment]
            self._drop(pool, size, segment, 0)
            self.reserved -= size
