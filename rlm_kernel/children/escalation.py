"""When which signal is due: the stop of one process as a pure schedule.

A stop asks first (SIGINT, which the child's worker turns into a cooperative cancellation), then sends SIGTERM, then
SIGKILL, each after the grace of the step before it. A further stop request may only bring the steps forward, never put
them off, so two verbs that overlap never run the graces twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rlm_kernel.values import Graces


class Step(IntEnum):
    """The steps in order."""

    ASK = 0
    TERMINATE = 1
    KILL = 2


@dataclass(slots=True)
class Escalation:
    """The schedule of one stop.

    Attributes:
        due: monotonic seconds at which each step is due.
        taken: the steps that have been taken.
    """

    due: list[float]
    taken: set[Step]

    @classmethod
    def begin(cls, now: float, graces: Graces) -> Escalation:
        """Start a schedule at monotonic time ``now``."""
        return cls(cls._times(now, graces), set())

    @staticmethod
    def _times(now: float, graces: Graces) -> list[float]:
        return [now, now + graces.shutdown_s, now + graces.shutdown_s + graces.terminate_s]

    def hasten(self, now: float, graces: Graces) -> None:
        """Bring the steps forward to what a stop that began now would do, where that is earlier."""
        self.due = [min(old, new) for old, new in zip(self.due, self._times(now, graces), strict=True)]

    def pop_due(self, now: float) -> Step | None:
        """Return the strongest step that is due and not taken, and count the weaker ones as taken."""
        ready = [step for step in Step if step not in self.taken and self.due[step] <= now]
        if not ready:
            return None
        strongest = max(ready)
        if strongest < max(self.taken, default=Step.ASK):
            self.taken.update(ready)
            return None
        self.taken.update(ready)
        return strongest

    def next_due(self) -> float | None:
        """Return the monotonic time of the next step that has not been taken, None when all have."""
        return min((self.due[step] for step in Step if step not in self.taken), default=None)
