"""The short form of the soak, and what it and the state machine have found."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_kernel.children import posix
from rlm_kernel.children.registry import Registry
from rlm_kernel.children.states import Event, Phase
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from rlm_kernel.errors import UsageMistake
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Graces
from tests.children.helpers import DEADLINE_S, Reports, finish, limits, refs, spec
from tests.soak import Soak

Make = Callable[..., Supervisor]


@pytest.mark.slow
@pytest.mark.skipif(not posix.IS_LINUX, reason="compares with /proc")
def test_after_more_than_a_hundred_children_killed_at_random_everything_is_where_it_was(tmp_path: Path) -> None:
    with Soak(4, tmp_path, reset_every=50) as soak:
        soak.run(lambda: soak.figures.children + soak.in_episode >= 120)
    assert soak.figures.states[ChildState.COMPLETED] > 30
    assert soak.figures.deeds["cancel"] > 3


@pytest.mark.slow
def test_a_cancel_at_the_instant_of_finishing_leaves_one_terminal_state_and_the_answer_that_won(
    make_supervisor: Make,
) -> None:
    """Two hundred times, at moments spread around the one at which the child ends. What was published agrees with what is kept."""
    published: dict[str, list[ChildState]] = {}
    supervisor = make_supervisor(on_change=lambda status: published.setdefault(status.id, []).append(status.state))
    finish(supervisor, spec("echo"))
    usual = max(status.elapsed_s for status in finish(supervisor, spec("echo"), spec("echo")))
    moments, outcomes = random.Random(1), Counter[ChildState]()
    for number in range(200):
        [child] = supervisor.start([spec("echo", text=f"answer {number}")])
        supervisor.wait(refs([child]), moments.uniform(0.0, 1.5 * usual))
        assert supervisor.cancel((child.id, None)).ok
        [status] = supervisor.status(refs([child]))
        assert status.state in (ChildState.COMPLETED, ChildState.CANCELLED)
        assert status.exited
        assert status.result in (f"answer {number}", None)
        assert status.result is not None or status.state is ChildState.CANCELLED
        outcomes[status.state] += 1
    assert min(outcomes[ChildState.COMPLETED], outcomes[ChildState.CANCELLED]) > 10, outcomes
    supervisor.observers.flush()
    for status in supervisor.status():
        assert [state for state in published[status.id] if state.done] == [status.state]


def takes_messages(supervisor: Supervisor, child: ChildStatus) -> bool:
    """Tell whether nothing has decided a child's end yet."""
    try:
        return bool(supervisor.send((child.id, None), "x").id)
    except UsageMistake:
        return False


def test_each_of_two_stops_at_the_same_time_counts_its_own_children(make_supervisor: Make, reports: Reports) -> None:
    """The one that ends first has counted what the other has, and takes only its own count with it."""
    supervisor = make_supervisor()
    [stubborn] = supervisor.start([spec("stubborn", reports)])
    [pausing] = supervisor.start([spec("pause", reports)])
    reports.take(2)
    outcome: list[CleanupReport | BaseException] = []

    def stop() -> None:
        try:
            outcome.append(supervisor.stop("close", Graces(0.3, 0.1, 1.0), refs([stubborn])))
        except BaseException as error:
            outcome.append(error)

    slow = threading.Thread(target=stop)
    slow.start()
    while takes_messages(supervisor, stubborn):
        pass
    quick = supervisor.stop("cancel", Graces(5.0, 5.0, 1.0), refs([pausing]))
    slow.join(DEADLINE_S)
    assert (quick.ok, quick.stopped, quick.asked, quick.terminated, quick.killed) == (True, (pausing.id,), 1, 0, 0)
    [report] = outcome
    assert isinstance(report, CleanupReport), report
    assert (report.ok, report.stopped, report.asked, report.terminated, report.killed) == (
        True,
        (stubborn.id,),
        1,
        1,
        1,
    )


def test_the_cancel_of_a_child_whose_nursery_still_boots_does_not_wait_for_its_imports(
    make_supervisor: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it name the nursery as what is left; its sibling starts when the nursery is ready."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "slow_to_import.py").write_text(f"open({str(gate)!r}).read()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    supervisor = make_supervisor(NurserySettings(preload=("slow_to_import",)))
    cancelled, sibling = supervisor.start([spec("echo"), spec("echo")])
    with gate.open("w"):  # waits until the nursery imports it, which then waits for the end of this block
        report = supervisor.cancel((cancelled.id, None))
        assert report.ok
        assert report.duration_s < limits().graces.shutdown_s
        assert supervisor.status(refs([cancelled]))[0].state is ChildState.CANCELLED
        assert supervisor.status(refs([sibling]))[0].state is ChildState.QUEUED
    assert supervisor.wait(refs([sibling]), DEADLINE_S)[0].state is ChildState.COMPLETED


def test_after_a_stop_that_met_a_booting_nursery_the_next_child_does_not_go_to_the_dying_one(
    make_supervisor: Make,
) -> None:
    supervisor = make_supervisor()
    for _ in range(10):
        supervisor.start([spec("pause")])
        assert supervisor.stop("close", limits().graces).ok
        assert supervisor.nursery_pid is None or posix.parent_and_state(supervisor.nursery_pid) is not None
        [status] = finish(supervisor, spec("echo"))
        assert status.state is ChildState.COMPLETED, status
        assert supervisor.close()


def test_waits_of_a_child_for_any_leave_nothing_with_the_sibling_that_runs_on() -> None:
    registry = Registry(limits=limits())
    [parent] = registry.admit([spec("parent")], None, lambda _: ("", ""))
    registry.dispatch()
    registry.apply(parent, Event.STARTED)
    for _ in range(200):
        if len(parent.children) < 2:
            registry.admit([spec("pause"), spec("echo")], parent, lambda _: ("", ""))
        else:
            registry.admit([spec("echo")], parent, lambda _: ("", ""))
        registry.dispatch()
        lasting, quick = parent.children[0], parent.children[-1]
        assert registry.begin_wait(parent, [lasting, quick], True, lambda: None) is not None
        registry.apply(quick, Event.STARTED)
        registry.exited(quick, 0)
        assert parent.phase is Phase.RUNNING
    assert registry._waiters == {}
