"""The life of a child as one total table. Pure: no process, no clock, no thread.

Theory of operation
-------------------
A child is in one *phase*; things happen to it as *events*. `TRANSITIONS` holds every legal pair and gives the next
phase and what its owner, the supervisor, must do. A pair that is not listed raises `IllegalTransition` and changes
nothing: "do nothing" is written down as a decision.

What is wanted is kept apart from what is. The first event that decides how the child shall end (an answer, a failure
report, a stop, a timeout, a limit) is remembered by the caller as the child's *outcome*; the phase says how far the
process is on its way there. A terminal phase is only entered on `Event.EXITED`, which means confirmed exit, or on
`Event.GIVEN_UP`, which a stop raises for a process that it could not confirm in time. So "done" implies "gone" unless a
cleanup error said otherwise::

    QUEUED ──SLOT──► STARTING ──STARTED──► RUNNING ◄──WAIT_ENDED/WAIT_BEGAN──► WAITING
      │                 │                     │ ANSWER/FAILURE ─► ENDING ─EXITED─┐
      │STOP             │SPAWN_FAILED         │ STOP/TIMEOUT/LIMIT ─► STOPPING ──┤ EXITED
      └────────────────►└─────────────────────┴── EXITED (no answer) ────────────┴─► ENDED

`ENDED` is refined by the outcome into the four public terminal states by `public_state`.
"""

from __future__ import annotations

from enum import Enum, auto

from rlm_kernel.values import ChildState


class Phase(Enum):
    """Where the child's process is in its life."""

    QUEUED = auto()
    STARTING = auto()
    RUNNING = auto()
    WAITING = auto()
    ENDING = auto()
    STOPPING = auto()
    ENDED = auto()


class Event(Enum):
    """What can happen to a child."""

    SLOT = auto()
    STARTED = auto()
    SPAWN_FAILED = auto()
    WAIT_BEGAN = auto()
    WAIT_ENDED = auto()
    ANSWER = auto()
    FAILURE = auto()
    STOP = auto()
    TIMEOUT = auto()
    LIMIT = auto()
    EXITED = auto()
    GIVEN_UP = auto()


class Outcome(Enum):
    """How the child ends; decided once, by the first event that decides it."""

    COMPLETED = ChildState.COMPLETED
    FAILED = ChildState.FAILED
    TIMED_OUT = ChildState.TIMED_OUT
    CANCELLED = ChildState.CANCELLED


class Action(Enum):
    """What the supervisor does on a transition."""

    NOTHING = auto()
    SPAWN = auto()
    STOP_PROCESS = auto()
    KEEP_ANSWER = auto()
    DECIDE = auto()
    """An outcome was decided by the child itself: release what it started, expect its exit."""
    FINISH = auto()


class IllegalTransition(RuntimeError):
    """An event arrived in a phase in which it cannot happen: a bug, in us or in the nursery."""


P, E, A = Phase, Event, Action

TRANSITIONS: dict[tuple[Phase, Event], tuple[Phase, Action]] = {
    (P.QUEUED, E.SLOT): (P.STARTING, A.SPAWN),
    (P.QUEUED, E.STOP): (P.ENDED, A.FINISH),
    (P.QUEUED, E.LIMIT): (P.ENDED, A.FINISH),
    (P.QUEUED, E.SPAWN_FAILED): (P.ENDED, A.FINISH),
    (P.STARTING, E.STARTED): (P.RUNNING, A.NOTHING),
    (P.STARTING, E.SPAWN_FAILED): (P.ENDED, A.FINISH),
    (P.STARTING, E.STOP): (P.STOPPING, A.STOP_PROCESS),
    (P.STARTING, E.LIMIT): (P.STOPPING, A.STOP_PROCESS),
    (P.STARTING, E.EXITED): (P.ENDED, A.FINISH),
    (P.RUNNING, E.WAIT_BEGAN): (P.WAITING, A.NOTHING),
    (P.RUNNING, E.WAIT_ENDED): (P.RUNNING, A.NOTHING),
    (P.RUNNING, E.ANSWER): (P.ENDING, A.DECIDE),
    (P.RUNNING, E.FAILURE): (P.ENDING, A.DECIDE),
    (P.RUNNING, E.STOP): (P.STOPPING, A.STOP_PROCESS),
    (P.RUNNING, E.TIMEOUT): (P.STOPPING, A.STOP_PROCESS),
    (P.RUNNING, E.LIMIT): (P.STOPPING, A.STOP_PROCESS),
    (P.RUNNING, E.EXITED): (P.ENDED, A.FINISH),
    (P.WAITING, E.WAIT_BEGAN): (P.WAITING, A.NOTHING),
    (P.WAITING, E.WAIT_ENDED): (P.RUNNING, A.NOTHING),
    (P.WAITING, E.ANSWER): (P.ENDING, A.DECIDE),
    (P.WAITING, E.FAILURE): (P.ENDING, A.DECIDE),
    (P.WAITING, E.STOP): (P.STOPPING, A.STOP_PROCESS),
    (P.WAITING, E.TIMEOUT): (P.STOPPING, A.STOP_PROCESS),
    (P.WAITING, E.LIMIT): (P.STOPPING, A.STOP_PROCESS),
    (P.WAITING, E.EXITED): (P.ENDED, A.FINISH),
    # The answer is in; whatever asks the child to end now only makes sure that it does.
    (P.ENDING, E.WAIT_BEGAN): (P.ENDING, A.NOTHING),
    (P.ENDING, E.WAIT_ENDED): (P.ENDING, A.NOTHING),
    (P.ENDING, E.ANSWER): (P.ENDING, A.NOTHING),
    (P.ENDING, E.FAILURE): (P.ENDING, A.NOTHING),
    (P.ENDING, E.STOP): (P.ENDING, A.STOP_PROCESS),
    (P.ENDING, E.TIMEOUT): (P.ENDING, A.NOTHING),
    (P.ENDING, E.LIMIT): (P.ENDING, A.NOTHING),
    (P.ENDING, E.EXITED): (P.ENDED, A.FINISH),
    (P.ENDING, E.GIVEN_UP): (P.ENDED, A.FINISH),
    # A stop is under way; a late answer is kept in the result and changes nothing else.
    (P.STOPPING, E.STARTED): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.SPAWN_FAILED): (P.ENDED, A.FINISH),
    (P.STOPPING, E.WAIT_BEGAN): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.WAIT_ENDED): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.ANSWER): (P.STOPPING, A.KEEP_ANSWER),
    (P.STOPPING, E.FAILURE): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.STOP): (P.STOPPING, A.STOP_PROCESS),
    (P.STOPPING, E.TIMEOUT): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.LIMIT): (P.STOPPING, A.NOTHING),
    (P.STOPPING, E.EXITED): (P.ENDED, A.FINISH),
    (P.STOPPING, E.GIVEN_UP): (P.ENDED, A.FINISH),
    # Terminal. A process that was given up may still be confirmed later; late messages of a drained channel change nothing.
    (P.ENDED, E.STARTED): (P.ENDED, A.NOTHING),
    (P.ENDED, E.SPAWN_FAILED): (P.ENDED, A.NOTHING),
    (P.ENDED, E.WAIT_BEGAN): (P.ENDED, A.NOTHING),
    (P.ENDED, E.WAIT_ENDED): (P.ENDED, A.NOTHING),
    (P.ENDED, E.ANSWER): (P.ENDED, A.NOTHING),
    (P.ENDED, E.FAILURE): (P.ENDED, A.NOTHING),
    (P.ENDED, E.STOP): (P.ENDED, A.NOTHING),
    (P.ENDED, E.TIMEOUT): (P.ENDED, A.NOTHING),
    (P.ENDED, E.LIMIT): (P.ENDED, A.NOTHING),
    (P.ENDED, E.EXITED): (P.ENDED, A.NOTHING),
    (P.ENDED, E.GIVEN_UP): (P.ENDED, A.NOTHING),
}

DECIDES: dict[Event, Outcome] = {
    E.ANSWER: Outcome.COMPLETED,
    E.FAILURE: Outcome.FAILED,
    E.SPAWN_FAILED: Outcome.FAILED,
    E.STOP: Outcome.CANCELLED,
    E.TIMEOUT: Outcome.TIMED_OUT,
    E.LIMIT: Outcome.FAILED,
    E.EXITED: Outcome.FAILED,
}
"""The outcome that an event decides, if none was decided before it."""


def advance(phase: Phase, event: Event) -> tuple[Phase, Action]:
    """Return the next phase and what to do.

    Raises:
        IllegalTransition: the pair is not in the table.
    """
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} cannot happen to a child that is {phase.name}") from None


def public_state(phase: Phase, outcome: Outcome | None, *, has_process: bool) -> ChildState:
    """Return the state that users see.

    Args:
        outcome: how the child ends, if that is decided; it must be for a child that has ended.
        has_process: whether the child's process is known to exist: until then it counts as queued.
    """
    if phase is Phase.ENDED:
        if outcome is None:
            raise IllegalTransition("a child has ended without an outcome")
        return outcome.value
    if not has_process:
        return ChildState.QUEUED
    return ChildState.WAITING if phase is Phase.WAITING else ChildState.RUNNING
