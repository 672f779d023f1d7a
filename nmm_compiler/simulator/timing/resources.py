"""Exclusive resources: slot lists with gaps, and the on-chip memory pools.

The NKI compiler reorders instructions within their dependences; above all it hoists loads. A
`Slots` models that for DMA queues and DMA engines: it gets work in program order, and work that is
ready early takes a gap that earlier work, which waits for its operands, has left open. A `Pool`
limits how far loads can run ahead. A new tensor has storage of its own, so only the capacity of the
memory delays its first write: until the last use of the oldest dead tensors that free enough bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

_GAPS_KEPT = 64
_SMALLEST_GAP_US = 0.02
_WORTH_A_SWAP = 0.5  # assumed: a stall shorter than this part of an instruction is left


class Slots:
    """One resource; `place` books the earliest free interval. Times in microseconds."""

    __slots__ = ("gaps", "tail")

    def __init__(self) -> None:
        self.tail = 0.0
        self.gaps: list[tuple[float, float]] = []

    def later(self, shift: float) -> Slots:
        """Return a resource booked the same, only `shift` later."""
        twin = Slots()
        twin.tail = self.tail + shift
        twin.gaps = [(start + shift, stop + shift) for start, stop in self.gaps]
        return twin

    def close(self, when: float) -> None:
        """Forbid bookings before `when`, in a gap or at the end."""
        self.gaps.clear()
        if when > self.tail:
            self.tail = when

    def squeeze(self, ready: float, duration: float) -> float:
        """Book as `place` does, but in pieces if no gap is long enough; return the start.

        A scheduler that fills a stall with independent work delays the instructions behind it by
        the difference. They are booked already, so the work takes the idle time before them, and
        only the rest lengthens the engine's time. A stall that nothing fills stays.
        """
        gaps, left = self.gaps, duration
        if not gaps or gaps[-1][1] <= ready:
            return self._append(ready, duration)
        for start, stop in gaps:
            if (start if start > ready else ready) + duration <= stop:
                return self.place(ready, duration)
        while gaps and left > 0.0 and gaps[-1][1] > ready:
            start, stop = gaps[-1]
            begin = start if start > ready else ready
            if stop - begin < duration * _WORTH_A_SWAP:
                break
            gaps.pop()
            if stop - begin > left:
                begin = stop - left
            left -= stop - begin
            if begin - start > _SMALLEST_GAP_US:
                gaps.append((start, begin))
                break
        if left == duration:
            return self.place(ready, duration)
        self.tail += max(left, 0.0)
        return self.tail - duration

    def place(self, ready: float, duration: float) -> float:
        """Book `duration` at the earliest time not before `ready`; return its start."""
        gaps = self.gaps
        if gaps and ready + duration <= gaps[-1][1]:
            for index, (start, stop) in enumerate(gaps):
                at = start if start > ready else ready
                if at + duration <= stop:
                    left, right = (start, at), (at + duration, stop)
                    gaps[index : index + 1] = [
                        gap for gap in (left, right) if gap[1] - gap[0] > _SMALLEST_GAP_US
                    ]
                    del gaps[:-_GAPS_KEPT]
                    return at
        return self._append(ready, duration)

    def _append(self, ready: float, duration: float) -> float:
        """Book behind everything; what stays free before it is a gap."""
        tail = self.tail
        if ready > tail:
            if ready - tail > _SMALLEST_GAP_US:
                gaps = self.gaps
                gaps.append((tail, ready))
                if len(gaps) > _GAPS_KEPT:
                    del gaps[0]
            tail = ready
        self.tail = tail + duration
        return tail


class Pool:
    """The bytes (per partition) of SBUF or PSUM, handed out in program order.

    settle: books one store that was put off, which frees its source; returns False if there is
    none.
    """

    __slots__ = ("capacity", "dead", "free", "overflow", "peak", "settle", "used")

    def __init__(self, capacity: int, settle: Callable[[], bool]) -> None:
        self.capacity = capacity
        self.settle = settle
        self.free = capacity
        self.used = 0
        self.peak = 0
        self.overflow = 0
        self.dead: list[tuple[float, int]] = []

    def take(self, size: int) -> float:
        """Allocate `size` bytes; return the time from which they are free (0 if never used).

        A kernel whose live tensors exceed the memory still gets its bytes; `overflow` counts the
        excess. The compiler would spill or load again.
        """
        self.used += size
        self.peak = max(self.peak, self.used)
        self.free -= size
        when = 0.0
        while self.free < 0 and (self.dead or self.settle()):
            if self.dead:
                when, released = heapq.heappop(self.dead)
                self.free += released
        if self.free < 0:
            self.overflow = max(self.overflow, -self.free)
        return when

    def release(self, size: int, when: float) -> None:
        """Give back `size` bytes, last used until `when`."""
        self.used -= size
        heapq.heappush(self.dead, (when, size))
