"""The kinds of children that the state machine starts, and what it knows about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlm_kernel.values import ChildState

ENTRY = "tests.children.machine_entries:run"

QUICK, FAILS, ENDLESS = {ChildState.COMPLETED}, {ChildState.FAILED}, set[ChildState]()


@dataclass(frozen=True)
class Kind:
    """One kind of child: its task, and how it may end if nobody touches it."""

    task: dict[str, Any]
    ends: frozenset[ChildState] = frozenset()
    timeout_s: float | None = None


def _kind(ends: set[ChildState], do: str, timeout_s: float | None = None, **task: Any) -> Kind:
    return Kind({"do": do, **task}, frozenset(ends), timeout_s)


PAUSE, ECHO, STUBBORN = {"do": "pause"}, {"do": "echo"}, {"do": "stubborn"}
NESTED = {"do": "parent", "children": [ECHO, PAUSE]}

KINDS = {
    "quick": _kind(QUICK, "echo"),
    "big": _kind(QUICK, "big", size=150_000),
    "raises": _kind(FAILS, "raise"),
    "exits": _kind(FAILS, "exit", code=0),
    "pause": _kind(ENDLESS, "pause"),
    "stubborn": _kind(ENDLESS, "stubborn"),
    "swallow": _kind(ENDLESS, "swallow"),
    "cleans up": _kind(ENDLESS, "clean_up_when_asked"),
    "late": _kind(QUICK, "answer_when_asked"),
    "lingers": _kind(QUICK, "answer_then_linger"),
    "garbage": _kind(FAILS, "garbage"),
    "timed": _kind({ChildState.TIMED_OUT}, "stubborn", 0.1),
    "daemon": _kind(ENDLESS, "daemonize", then="pause"),
    "leaves a daemon": _kind(QUICK, "daemonize"),
    "programs": _kind(ENDLESS, "subprocess", then="pause"),
    "leaves programs": _kind(QUICK, "subprocess"),
    "listens": _kind(ENDLESS, "listen"),
    "parent": _kind(QUICK, "parent", children=[ECHO, ECHO]),
    "parent of endless": _kind(ENDLESS, "parent", children=[PAUSE, STUBBORN]),
    "grandparent": _kind(ENDLESS, "parent", children=[NESTED, ECHO]),
    "does not wait": _kind(QUICK, "parent_that_does_not_wait", children=[STUBBORN, PAUSE, ECHO]),
    "polls": _kind(QUICK, "parent_that_polls", children=[ECHO, ECHO]),
    "short waits": _kind(QUICK, "poll_with_short_waits", children=[ECHO, ECHO]),
    "threads": _kind(QUICK, "many_threads_wait", children=[ECHO, ECHO, ECHO]),
    "waits in vain": _kind(QUICK, "parent", children=[PAUSE], wait_s=0.05),
    "cancels": _kind(QUICK, "cancel_one_and_wait_for_any"),
    "leaves a thread": _kind(QUICK, "leave_a_thread"),
}
PARENTS = frozenset(name for name, kind in KINDS.items() if "children" in kind.task) | {"cancels", "leaves a thread"}
REPORTING = ("pause", "stubborn", "swallow", "cleans up", "late", "lingers", "daemon", "programs", "listens")


@dataclass
class Kid:
    """What the machine knows about one child that it started.

    Attributes:
        may: the states in which it may end, after all that was done to it.
    """

    id: str
    kind: str
    may: set[ChildState]


@dataclass
class Ended:
    """What a child was when it was first seen to have ended."""

    state: ChildState
    result: str | None
    error: str | None
    exit_code: int | None
