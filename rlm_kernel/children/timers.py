"""Timers of a loop: a heap in which cancelled entries do not pile up. Pure; the loop brings the clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

_TIDY_ABOVE = 64
"""Cancelled entries that are tolerated before the heap is built anew (and never more than half of it)."""


@dataclass(slots=True, order=True)
class Timer:
    """One piece of work that is due at a time."""

    when: float
    number: int
    work: Callable[[], None] | None = field(compare=False)


class Timers:
    """What is due when, on one clock."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._numbers = itertools.count()
        self._cancelled = 0

    def add(self, when: float, work: Callable[[], None]) -> Timer:
        """Have ``work`` come due at ``when``."""
        timer = Timer(when, next(self._numbers), work)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Take a timer back. Harmless if it has fired, or was cancelled before."""
        if timer is None or timer.work is None:
            return
        timer.work = None
        self._cancelled += 1
        if self._cancelled > max(_TIDY_ABOVE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry.work is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next_due(self) -> float | None:
        """Return when the next timer is due, None if there is none."""
        self._drop_cancelled()
        return self._heap[0].when if self._heap else None

    def pop_due(self, now: float) -> Callable[[], None] | None:
        """Return the work of one timer that is due, None if none is."""
        self._drop_cancelled()
        if not self._heap or self._heap[0].when > now:
            return None
        timer = heapq.heappop(self._heap)
        work, timer.work = timer.work, None
        return work

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0].work is None:
            heapq.heappop(self._heap)
            self._cancelled = max(0, self._cancelled - 1)
