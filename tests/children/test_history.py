"""Each child's past is kept: when it was in which state, how it ended, when its exit was confirmed. It never grows without end."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable

import pytest

from rlm_kernel.children.history import MAX_CALLS, MAX_CHANGES, ChildHistory, History
from rlm_kernel.children.records import ChildRecord
from rlm_kernel.children.states import Event
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.errors import UnknownHandleError
from rlm_kernel.values import MAX_MODELS, OTHER_MODELS, ChildState, ChildStatus, Usage
from tests.children.helpers import DEADLINE_S, Reports, nursery_of, refs, spec
from tests.children.test_registry import Driver

S = ChildState
PATHS = {
    S.COMPLETED: Event.ANSWER,
    S.FAILED: Event.FAILURE,
    S.TIMED_OUT: Event.TIMEOUT,
    S.CANCELLED: Event.STOP,
}
"""What decides each terminal state."""


def look(record: ChildRecord) -> ChildHistory:
    now = time.monotonic()
    return record.look_back(now, time.time() - now)


def states(history: ChildHistory) -> list[ChildState]:
    return [span.state for span in history.spans]


def check(history: ChildHistory) -> None:
    """Spans follow each other without gaps, in order, and only the last one is open."""
    for span, following in zip(history.spans, history.spans[1:], strict=False):
        assert span.end == following.start
        assert span.start <= following.start
    assert history.spans[-1].end is None
    assert states(history)[-1] is history.status.state
    assert history.exited_at is None or history.status.exited


# ----------------------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("outcome", PATHS)
def test_each_end_is_noted_and_so_is_the_confirmed_exit(outcome: ChildState) -> None:
    driver = Driver()
    [record] = driver.start(1)
    driver.run(record)
    driver.registry.apply(record, PATHS[outcome])
    driver.settle()
    assert states(look(record)) == [S.QUEUED, S.RUNNING]
    driver.exit(record)
    history = look(record)
    check(history)
    assert states(history) == [S.QUEUED, S.RUNNING, outcome]
    assert history.ended_at == record.ended_mono
    assert history.exited_at is not None
    assert record.started_mono is None or history.spans[1].start == record.started_mono


def test_a_child_that_never_came_to_be_was_queued_all_its_life() -> None:
    driver = Driver(max_concurrent_children=1)
    first, second = driver.start(2)
    driver.registry.never_started(first, "no")
    driver.settle()
    driver.registry.stop([second], None)
    driver.registry.never_started(second, "stopped before its process came to be")
    driver.settle()
    for record, end in ((first, S.FAILED), (second, S.CANCELLED)):
        check(look(record))
        assert states(look(record)) == [S.QUEUED, end]
        assert look(record).exited_at is not None


def test_one_whose_exit_was_not_confirmed_has_an_end_and_gets_its_exit_when_it_is() -> None:
    driver = Driver()
    [record] = driver.start(1)
    driver.run(record)
    driver.registry.stop([record], None)
    driver.registry.give_up(record)
    driver.settle()
    assert states(look(record))[-1] is S.CANCELLED
    assert look(record).exited_at is None
    driver.exit(record)
    late = look(record)
    check(late)
    assert late.ended_at is not None
    assert late.exited_at is not None
    assert late.exited_at >= late.ended_at


def test_a_parent_waits_until_it_is_woken() -> None:
    driver = Driver()
    [parent] = driver.start(1)
    driver.run(parent)
    [child] = driver.start(1, parent)
    driver.wait(parent, [child])
    driver.complete(child)
    driver.answer(parent)
    driver.exit(parent)
    history = look(parent)
    check(history)
    assert states(history) == [S.QUEUED, S.RUNNING, S.WAITING, S.RUNNING, S.COMPLETED]


# ------------------------------------------------------------------------------------------------------------ no growth


STATUS = ChildStatus("c1", "c1", 1, None, S.RUNNING)


def test_a_hundred_thousand_changes_are_a_few_hundred_with_the_same_seconds() -> None:
    history = History()
    history.enter(S.QUEUED, 0.0)
    history.enter(S.RUNNING, 10.0)
    at, waited = 10.0, 0.0
    for number in range(50_000):
        waits = 0.003 if number < 25_000 else 0.001
        history.enter(S.WAITING, at + 0.001)
        history.enter(S.RUNNING, at + 0.001 + waits)
        at, waited = at + 0.001 + waits, waited + waits
    seen = history.snapshot(STATUS, {}, at + 5.0, 0.0)
    assert len(seen.spans) <= MAX_CHANGES
    assert seen.merged == 100_002 - len(seen.spans)
    assert seen.spans[0].end == 10.0
    assert seen.seconds[S.WAITING] == pytest.approx(waited)
    assert seen.seconds[S.RUNNING] == pytest.approx(at + 5.0 - 10.0 - waited)
    for span, following in zip(seen.spans, seen.spans[1:], strict=False):
        assert span.end == following.start
        assert span.state is not following.state
    middle = 10.0 + 25_000 * 0.004
    first_half = sum(
        (span.end or 0) - span.start for span in seen.spans if span.state is S.WAITING and span.start < middle
    )
    assert first_half / (middle - 10.0) == pytest.approx(0.75, abs=0.02), "each part has the share that it had"


def test_a_long_spell_among_many_short_ones_is_still_there() -> None:
    history = History()
    history.enter(S.QUEUED, 0.0)
    history.enter(S.RUNNING, 0.0)
    at = 0.0
    for number in range(5_000):
        history.enter(S.WAITING, at + 0.001)
        at += 60.0 if number == 2_000 else 0.002
        history.enter(S.RUNNING, at)
    spans = history.snapshot(STATUS, {}, at, 0.0).spans
    assert max((span.end or at) - span.start for span in spans if span.state is S.WAITING) == pytest.approx(
        60.0, abs=0.5
    )


def test_of_many_calls_some_are_kept_from_all_over_its_life() -> None:
    history = History()
    history.enter(S.QUEUED, 0.0)
    for number in range(10_000):
        history.note_call(number, number + 0.5)
    calls = history.snapshot(STATUS, {}, 10_000.0, 0.0).calls
    assert MAX_CALLS / 4 < len(calls) < MAX_CALLS
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(calls)]
    assert max(gaps) <= 2 * min(gaps)
    assert calls[-1][0] > 9_900


def test_names_of_models_are_not_counted_without_end_and_nothing_is_lost() -> None:
    [record] = Driver().start(1)
    for number in range(500):
        record.add_usage(Usage(1, 10, 2), f"model {number}")
    record.add_usage(Usage(), "a call that failed")
    by_model = look(record).usage_by_model
    assert len(by_model) == MAX_MODELS + 1
    assert by_model[OTHER_MODELS] == Usage(400, 4000, 800)
    assert sum(by_model.values(), Usage()) == record.usage


# ---------------------------------------------------------------------------------------------------------- real children


def test_real_children_leave_times_that_fit_their_statuses(sup: Supervisor) -> None:
    parent = spec("parent", children=[{"do": "echo"}])
    [started] = sup.start([parent])
    sup.wait(refs([started]), DEADLINE_S)
    wall = time.time()
    above, below = sup.histories()
    for history in (above, below):
        check(history)
        status = history.status
        assert history.ended_at is not None
        assert history.exited_at is not None
        assert history.ended_at - history.spans[1].start == pytest.approx(status.elapsed_s)
        assert history.wall(history.spans[1].start) == pytest.approx(status.started_at, abs=0.05)
        assert history.wall(history.taken_at) == pytest.approx(wall, abs=1.0)
    assert states(above) == [S.QUEUED, S.RUNNING, S.WAITING, S.RUNNING, S.COMPLETED]
    assert above.asked_at < below.asked_at
    assert [each.status.id for each in sup.histories([(below.status.id, None)])] == [below.status.id]
    with pytest.raises(UnknownHandleError):
        sup.histories([("nobody", None)])


def test_children_of_a_killed_nursery_have_failed_with_a_confirmed_exit(
    make_supervisor: Callable[..., Supervisor], reports: Reports
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("pause", reports)])
    reports.next()
    os.kill(nursery_of(supervisor), signal.SIGKILL)
    supervisor.wait(refs(children), DEADLINE_S)
    [history] = supervisor.histories()
    check(history)
    assert states(history) == [S.QUEUED, S.RUNNING, S.FAILED]
    assert history.exited_at is not None
