"""Bound the model calls of a whole tree: how many are under way, and how many tokens they may cost. Pure; its owner brings the lock.

Every run asks before each model call, and says what the call cost when it has ended. A process that dies in mid-call gives its permission
back when its exit is confirmed.

How far a token budget can be overshot. A call's cost is known only when it ends, so each call under way *reserves* what the dearest call of
the tree has cost so far. A new one is let through only while what is spent and reserved leaves something of the budget. So the overshoot
is at most the cost of the calls under way at the moment the budget is crossed, beyond what was reserved for them: with calls of like
cost less than one call; in the worst case (every call dearer than all before it) the calls of ``max_concurrent_children`` runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from rlm_kernel.values import Usage

Callback = Callable[[], None]


class Permission(Enum):
    """What came of asking."""

    GRANTED = auto()
    QUEUED = auto()
    REFUSED = auto()


@dataclass(slots=True, eq=False)
class _Asking:
    who: str
    granted: Callback
    refused: Callback


@dataclass(slots=True)
class CallGate:
    """See the module's docstring. ``who`` is a child id, or "" for the root.

    Attributes:
        max_concurrent: calls under way at most, None for no bound.
        max_tokens: the budget, None for none.
    """

    max_concurrent: int | None = None
    max_tokens: int | None = None
    spent: int = 0
    dearest: int = 0
    under_way: dict[str, int] = field(default_factory=dict)
    _queue: deque[_Asking] = field(default_factory=deque)

    @property
    def is_needed(self) -> bool:
        """Whether anything is bounded at all; runs need not ask otherwise."""
        return self.max_concurrent is not None or self.max_tokens is not None

    @property
    def exhausted(self) -> bool:
        """Whether the token budget is spent."""
        return self.max_tokens is not None and self.spent >= self.max_tokens

    @property
    def calls_under_way(self) -> int:
        return sum(self.under_way.values())

    def ask(self, who: str, granted: Callback, refused: Callback) -> Permission:
        """Ask for permission to make a call.

        Args:
            who: who asks.
            granted, refused: called later, once, if the answer is `Permission.QUEUED`.
        """
        if self.exhausted:
            return Permission.REFUSED
        if self._queue or not self._has_room():
            self._queue.append(_Asking(who, granted, refused))
            return Permission.QUEUED
        self._grant(who)
        return Permission.GRANTED

    def ended(self, who: str, usage: Usage) -> list[Callback]:
        """A call has ended (with no tokens, if it failed). Returns callbacks to run, outside of every lock."""
        self.spent += usage.total_tokens
        self.dearest = max(self.dearest, usage.total_tokens)
        left = self.under_way.get(who, 0) - 1
        if left > 0:
            self.under_way[who] = left
        else:
            self.under_way.pop(who, None)
        return self._serve()

    def gone(self, who: str) -> list[Callback]:
        """A run has ended: what it held or asked for is given back. Returns callbacks to run, outside of every lock."""
        self.under_way.pop(who, None)
        self._queue = deque(asking for asking in self._queue if asking.who != who)
        return self._serve()

    def withdraw(self, granted: Callback) -> bool:
        """Take a queued question back. Returns False if it has been answered already."""
        before = len(self._queue)
        self._queue = deque(asking for asking in self._queue if asking.granted is not granted)
        return len(self._queue) < before

    def _has_room(self) -> bool:
        calls = self.calls_under_way
        if self.max_concurrent is not None and calls >= self.max_concurrent:
            return False
        return self.max_tokens is None or calls == 0 or self.spent + calls * self.dearest < self.max_tokens

    def _grant(self, who: str) -> None:
        self.under_way[who] = self.under_way.get(who, 0) + 1

    def _serve(self) -> list[Callback]:
        answers: list[Callback] = []
        while self._queue and (self.exhausted or self._has_room()):
            asking = self._queue.popleft()
            if self.exhausted:
                answers.append(asking.refused)
            else:
                self._grant(asking.who)
                answers.append(asking.granted)
        return answers
