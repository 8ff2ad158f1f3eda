"""The table of a child's life is total: each pair is a decision or an error, and the end is only ever reached by a confirmed exit."""

from __future__ import annotations

import itertools

import pytest

from rlm_kernel.children.states import (
    DECIDES,
    TRANSITIONS,
    Action,
    Event,
    IllegalTransition,
    Outcome,
    Phase,
    advance,
    public_state,
)
from rlm_kernel.values import ChildState

PAIRS = list(itertools.product(Phase, Event))

ENDS = {
    # confirmed exits
    (Phase.STARTING, Event.EXITED),
    (Phase.RUNNING, Event.EXITED),
    (Phase.WAITING, Event.EXITED),
    (Phase.ENDING, Event.EXITED),
    (Phase.STOPPING, Event.EXITED),
    # there never was a process
    (Phase.QUEUED, Event.STOP),
    (Phase.QUEUED, Event.LIMIT),
    (Phase.QUEUED, Event.SPAWN_FAILED),
    (Phase.STARTING, Event.SPAWN_FAILED),
    (Phase.STOPPING, Event.SPAWN_FAILED),
    # given up, and said so
    (Phase.ENDING, Event.GIVEN_UP),
    (Phase.STOPPING, Event.GIVEN_UP),
}
"""Every way in which a child may end, written out a second time on purpose."""


@pytest.mark.parametrize(("phase", "event"), PAIRS, ids=lambda value: value.name)
def test_every_pair_is_listed_or_raises(phase: Phase, event: Event) -> None:
    if (phase, event) in TRANSITIONS:
        assert advance(phase, event) == TRANSITIONS[phase, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} .* {phase.name}"):
            advance(phase, event)


def test_a_child_ends_only_by_a_confirmed_exit_without_a_process_or_given_up() -> None:
    entering = {pair for pair, (phase, _) in TRANSITIONS.items() if phase is Phase.ENDED and pair[0] is not Phase.ENDED}
    assert entering == ENDS


def test_exactly_the_transitions_that_end_a_child_finish_it() -> None:
    assert {pair for pair, (_, action) in TRANSITIONS.items() if action is Action.FINISH} == ENDS


def test_the_end_is_final_and_does_nothing() -> None:
    from_the_end = {TRANSITIONS[pair] for pair in TRANSITIONS if pair[0] is Phase.ENDED}
    assert from_the_end == {(Phase.ENDED, Action.NOTHING)}


def test_what_may_still_arrive_after_a_child_was_given_up_is_taken() -> None:
    """Its nursery may come to life again: each message of its must find a decision, not an error."""
    for event in (
        Event.STARTED,
        Event.SPAWN_FAILED,
        Event.TIMEOUT,
        Event.EXITED,
        Event.ANSWER,
        Event.FAILURE,
        Event.LIMIT,
    ):
        assert advance(Phase.ENDED, event) == (Phase.ENDED, Action.NOTHING)


def test_every_child_that_has_a_process_can_be_stopped_and_a_stop_is_always_passed_on() -> None:
    for phase in (Phase.STARTING, Phase.RUNNING, Phase.WAITING, Phase.ENDING, Phase.STOPPING):
        assert TRANSITIONS[phase, Event.STOP][1] is Action.STOP_PROCESS


def test_only_a_slot_starts_a_process() -> None:
    assert [pair for pair, (_, action) in TRANSITIONS.items() if action is Action.SPAWN] == [(Phase.QUEUED, Event.SLOT)]


def test_every_event_that_ends_a_child_decides_how_except_giving_up() -> None:
    assert {event for _, event in ENDS} - {Event.GIVEN_UP} <= set(DECIDES)


def test_a_late_answer_is_kept_and_leaves_the_stop_under_way() -> None:
    assert advance(Phase.STOPPING, Event.ANSWER) == (Phase.STOPPING, Action.KEEP_ANSWER)


@pytest.mark.parametrize("outcome", Outcome)
def test_an_ended_child_shows_its_one_outcome(outcome: Outcome) -> None:
    assert public_state(Phase.ENDED, outcome, has_process=True) is outcome.value
    assert outcome.value.done


def test_a_child_that_ended_without_an_outcome_is_a_bug() -> None:
    with pytest.raises(IllegalTransition, match="without an outcome"):
        public_state(Phase.ENDED, None, has_process=True)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_no_child_is_done_before_its_end_whatever_is_decided(phase: Phase) -> None:
    for outcome in (None, *Outcome):
        for has_process in (True, False):
            state = public_state(phase, outcome, has_process=has_process)
            assert not state.done
            assert (state is ChildState.QUEUED) == (not has_process)
