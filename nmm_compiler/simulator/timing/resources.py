"""Exclusive resources: slot lists with gaps, and the on-chip memory pools.

The NKI compiler reorders instructions within their dependences; above all it hoists loads. A
`Slots` models that for DMA queues and DMA engines: it gets work in program order, and work that is
ready early takes a gap that earlier work, which waits for its operands, has left open. A `Pool`
limits how far loads can run ahead. A new tensor has storage of its own, so only the capacity of the
memory delays its first write: until the last use of the oldest dead tensors that free enough bytes.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable

from nmm_compiler.simulator.timing.timeline import AT_ONCE, Booking, Waited

_GAPS_KEPT = 64
_SMALLEST_GAP_US = 0.02
_OLDEST = slice(0, -_GAPS_KEPT - 1)
_WORTH_A_SWAP = 0.5  # assumed: a stall shorter than this part of an instruction is left


class Slots:
    """One resource; `place` books the earliest free interval. Times in microseconds.

    starts, stops: the gaps, in order. Nothing is booked from starts[-1] on.
    ended: by the time at which a booking lets go, what one that starts then waited for.
    """

    def __init__(self) -> None:
        self.starts, self.stops = [0.0], [math.inf]
        self.ended: dict[float, Waited] = {}

    def later(self, shift: float) -> Slots:
        """Return a resource booked the same, only `shift` later."""
        twin = Slots()
        twin.starts = [start + shift for start in self.starts]
        twin.stops = [stop + shift for stop in self.stops]
        twin.ended = {
            when + shift: (kind, held, when + shift) for when, (kind, held, _) in self.ended.items()
        }
        return twin

    def hold(
        self, index: int, kind: str, row: str | int, start: float, stop: float, waited: Waited
    ) -> Booking:
        """Return the booking of an interval that is booked; it waits for the one that ends at its
        start, else for what is given."""
        held = Booking(index, kind, row, start, stop, *self.ended.get(start, waited))
        self.ended[stop] = kind, held, stop
        return held

    def append(self, ready: float, duration: float) -> float:
        """Book behind everything, not before `ready`; return the start."""
        return self._take(-1, ready, duration)

    def place(self, ready: float, duration: float) -> float:
        """Book `duration` at the earliest time not before `ready`; return its start."""
        if ready >= self.starts[-1]:
            return self._take(-1, ready, duration)
        return self._take(self._gap(ready, duration), ready, duration)

    def squeeze(self, ready: float, duration: float) -> float:
        """Book as `place` does, but in pieces if no gap is long enough; return the start.

        A scheduler that fills a stall with independent work delays the instructions behind it by
        the difference. They are booked already, so the work takes the idle time before them, and
        only the rest lengthens the engine's time. A stall that nothing fills stays.
        """
        starts, stops, left = self.starts, self.stops, duration
        index = self._gap(ready, duration)
        if stops[index] < math.inf:
            return self._take(index, ready, duration)
        while index and left > 0.0 and stops[index - 1] > ready:
            index -= 1
            start, stop = starts[index], stops[index]
            begin = start if start > ready else ready
            if stop - begin < duration * _WORTH_A_SWAP:
                break
            if stop - begin > left:
                begin = stop - left
            left -= stop - begin
            stops[index] = begin
            if begin - start > _SMALLEST_GAP_US:
                break
            del starts[index], stops[index]
        if left == duration:
            return self.append(ready, duration)
        _, before, _ = self.ended.get(starts[-1], AT_ONCE)
        starts[-1] += max(left, 0.0)
        at = starts[-1] - duration
        self.ended[at] = "engine", before, at
        return at

    def _gap(self, ready: float, duration: float) -> int:
        """Return the first gap that is long enough."""
        starts, stops = self.starts, self.stops
        index = bisect.bisect_left(stops, ready + duration)
        while starts[index] > ready and starts[index] + duration > stops[index]:
            index += 1
        return index

    def _take(self, index: int, ready: float, duration: float) -> float:
        """Book the first part of a gap from `ready` on; what is left on both sides are gaps."""
        starts, stops = self.starts, self.stops
        start = starts[index]
        at = start if start > ready else ready
        end = at + duration
        before = at - start > _SMALLEST_GAP_US
        if stops[index] - end > _SMALLEST_GAP_US:
            starts[index] = end
            if before:
                starts[index:index] = [start]
                stops[index:index] = [at]
                del starts[_OLDEST], stops[_OLDEST]
        elif before:
            stops[index] = at
        else:
            del starts[index], stops[index]
        return at


class Pool:
    """The bytes (per partition) of SBUF or PSUM, handed out in program order.

    freed_by: what used the tensor last whose bytes were handed out last.
    settle: books the store that was put off and is ready first, if that is before the given time;
    this frees its source. Returns whether there was one.
    """

    def __init__(self, capacity: int, settle: Callable[[float], bool]) -> None:
        self.settle = settle
        self.free = capacity
        self.overflow = 0
        self.freed_by: Booking | None = None
        self.dead: list[tuple[float, int, int, Booking | None]] = []

    def take(self, size: int) -> float:
        """Allocate `size` bytes; return the time from which they are free (0 if never used).

        A store that is ready before the oldest dead tensor dies frees its source first.
        A kernel whose live tensors exceed the memory still gets its bytes; `overflow` counts the
        excess. The compiler would spill or load again.
        """
        self.free -= size
        when = 0.0
        dead = self.dead
        while self.free < 0:
            if self.settle(dead[0][0] if dead else math.inf):
                continue
            if not dead:
                break
            when, released, _, self.freed_by = heapq.heappop(dead)
            self.free += released
        if self.free < 0:
            self.overflow = max(self.overflow, -self.free)
        return when

    def release(self, size: int, when: float, user: Booking | None) -> None:
        """Give back `size` bytes, last used until `when`."""
        heapq.heappush(self.dead, (when, size, user.index if user else -1, user))
