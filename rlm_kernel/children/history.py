"""When a child was in which state, and when it called its model. Pure: its owner brings the lock and the time.

Times are those of ``time.monotonic()``. Nothing here grows without end. A child that changes its state again and again keeps at most
`MAX_CHANGES` changes: beyond that, two short spells of running and two of waiting become one each, of the same length together. How many
changes are gone is counted; the seconds in each state stay exact. Of its model calls at most `MAX_CALLS` are kept: beyond that every
other one, evenly over its life.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlm_kernel.values import ChildState, ChildStatus, Usage

MAX_CHANGES = 400
MAX_CALLS = 400

_FIRST_MERGED = 1
"""The first spell, in the queue, is kept as it was."""

_GROUP = 4


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One spell in one state.

    Attributes:
        start, end: seconds of ``time.monotonic()``; ``end`` is None while it lasts. A terminal state lasts for ever.
    """

    state: ChildState
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class ChildHistory:
    """A snapshot of one child and its past.

    Attributes:
        status: how it is now.
        spans: its states in order, without gaps; the first is ``queued``, from when it was asked for.
        exited_at: when its exit was confirmed, or it was sure that no process would come to be; None before.
        seconds: seconds spent in each state that has ended or still lasts; exact. Terminal states are not in it.
        merged: changes of state that ``spans`` leave out, because there were so many.
        calls: model calls that have ended, as (start, end), in the order of their ends; a selection if there were very many.
        usage_by_model: usage by the name of the model, adding up to ``status.usage``.
        taken_at: when this snapshot was taken.
        wall_offset: what turns a time of this snapshot into Unix time, by adding it.
    """

    status: ChildStatus
    spans: tuple[StateSpan, ...]
    exited_at: float | None
    seconds: Mapping[ChildState, float]
    merged: int
    calls: tuple[tuple[float, float], ...]
    usage_by_model: Mapping[str, Usage]
    taken_at: float
    wall_offset: float

    @property
    def asked_at(self) -> float:
        """When the child was asked for."""
        return self.spans[0].start

    @property
    def ended_at(self) -> float | None:
        """When it ended; None before."""
        last = self.spans[-1]
        return last.start if last.state.done else None

    def wall(self, at: float) -> float:
        """Return the Unix time of a time of this snapshot."""
        return at + self.wall_offset


@dataclass(slots=True)
class History:
    """The past of one child. Not thread-safe.

    Attributes:
        exited: when its exit was confirmed.
        since: when it came into its present state.
    """

    exited: float | None = None
    since: float = 0.0
    merged: int = 0
    _changes: list[tuple[ChildState, float]] = field(default_factory=list)
    _seconds: dict[ChildState, float] = field(default_factory=dict)
    _calls: list[tuple[float, float]] = field(default_factory=list)
    _calls_seen: int = 0
    _calls_step: int = 1

    def enter(self, state: ChildState, at: float) -> None:
        """Note a state. The one that it is in already is no news; a time before the last change counts as that."""
        if self._changes:
            present = self._changes[-1][0]
            if present is state:
                return
            at = max(at, self.since)
            self._seconds[present] = self._seconds.get(present, 0.0) + at - self.since
        self._changes.append((state, at))
        self.since = at
        if len(self._changes) > MAX_CHANGES:
            self._merge()

    def _merge(self) -> None:
        """Let the shortest stretches of four spells be two, with the same seconds in each state."""
        changes = self._changes
        firsts = [
            (changes[i + _GROUP][1] - changes[i][1], i)
            for i in range(_FIRST_MERGED, len(changes) - _GROUP, _GROUP)
            if changes[i][0] is changes[i + 2][0] and changes[i + 1][0] is changes[i + 3][0]
        ]
        for _, i in sorted(heapq.nsmallest(len(firsts) // 2, firsts), key=lambda first: -first[1]):
            one, other, third, fourth = changes[i : i + _GROUP]
            seconds = (other[1] - one[1]) + (fourth[1] - third[1])
            changes[i : i + _GROUP] = [one, (other[0], one[1] + seconds)]
            self.merged += 2

    def note_call(self, start: float, end: float) -> None:
        """Note a model call that has ended."""
        self._calls_seen += 1
        if self._calls_seen % self._calls_step:
            return
        self._calls.append((start, end))
        if len(self._calls) >= MAX_CALLS:
            del self._calls[::2]
            self._calls_step *= 2

    def snapshot(
        self, status: ChildStatus, usage_by_model: Mapping[str, Usage], now: float, wall_offset: float
    ) -> ChildHistory:
        """Copy it.

        Args:
            status: of the same child, at the same moment.
            usage_by_model: of the same child.
            now: the time.
            wall_offset: Unix time less ``now``.
        """
        ends: list[float | None] = [at for _, at in self._changes[1:]]
        seconds = dict(self._seconds)
        present = self._changes[-1][0]
        if not present.done:
            seconds[present] = seconds.get(present, 0.0) + now - self.since
        return ChildHistory(
            status=status,
            spans=tuple(StateSpan(*change, end) for change, end in zip(self._changes, [*ends, None], strict=True)),
            exited_at=self.exited,
            seconds=seconds,
            merged=self.merged,
            calls=tuple(self._calls),
            usage_by_model=dict(usage_by_model),
            taken_at=now,
            wall_offset=wall_offset,
        )
