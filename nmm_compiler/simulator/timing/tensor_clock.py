"""TensorE: when products start, at which clock, and when a sum may be added to.

The clock runs at half until `tensor_ramp_seconds` of work are done, and starts again when
utilization over about that time falls below half.
"""

from __future__ import annotations

import math

from nmm_compiler.simulator.timing.costs import Work
from nmm_compiler.simulator.timing.resources import Slots
from nmm_compiler.targets import Target

_US = 1e6


class TensorClock:
    """Books products on TensorE. Times in microseconds.

    sums: from when the next product may add to a sum, by (storage, byte, partition).
    throttled_us: what the clock ramp has cost so far.
    """

    __slots__ = (
        "fill_us", "ramp_done", "ramp_us", "slots", "start_fraction", "sums",
        "throttled_us", "utilization", "utilization_at", "window",
    )  # fmt: skip

    def __init__(self, target: Target, slots: Slots) -> None:
        self.slots = slots
        self.sums: dict[tuple[int, int, int], float] = {}
        self.fill_us = target.tensor_latency_seconds * _US
        # work done since the array was cold, recent utilization and until when
        self.ramp_us = target.tensor_ramp_seconds * _US
        self.start_fraction = target.tensor_ramp_start_fraction
        self.window = self.ramp_us / (2.0 * math.log(2.0))
        self.ramp_done = 0.0
        self.utilization = 0.0
        self.utilization_at = 0.0
        self.throttled_us = 0.0

    def book(
        self, work: Work, into: tuple[int, int, int], ready: float, in_order: int
    ) -> tuple[float, float, float]:
        """Book a product into a sum; return its start, when TensorE is free, and its end.

        A product that adds to a sum starts no sooner than the first column of the product before
        it has come through.
        """
        interval = work.interval
        slots = self.slots
        tail = slots.tail
        begin = self.sums.get(into, 0.0)
        if in_order and tail > begin:
            begin = tail
        if ready > begin:
            begin = ready
        fill = work.latency - interval
        ramp_us = self.ramp_us
        if ramp_us:
            gap = (begin if begin > tail else tail) - self.utilization_at
            used = self.utilization
            if gap > 0.0:
                used *= math.exp(-gap / self.window)
                if used < 0.5:
                    self.ramp_done = 0.0
            if self.ramp_done < ramp_us:
                slow = interval / self.start_fraction
                self.throttled_us += slow - interval
                interval = slow
                self.ramp_done += interval
            begin = slots.place(begin, interval) if in_order else slots.squeeze(begin, interval)
            if slots.tail > self.utilization_at:
                self.utilization = 1.0 - (1.0 - used) * math.exp(-interval / self.window)
                self.utilization_at = slots.tail
        else:
            begin = slots.place(begin, interval) if in_order else slots.squeeze(begin, interval)
        free = begin + interval
        self.sums[into] = free if interval > self.fill_us else begin + self.fill_us
        return begin, free, free + fill
