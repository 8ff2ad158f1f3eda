"""Whatever a child's code starts goes with the child, however that ends; what belongs to living children is left alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from rlm_kernel.children.orphans import find_orphans, kill_orphans
from rlm_kernel.children.records import ChildSpec
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.values import ChildState
from tests.children.helpers import (
    BUDGET_SLACK_S,
    DEADLINE_S,
    QUICK,
    Reports,
    Watched,
    finish,
    is_dead,
    is_gone,
    limits,
    nursery_of,
    refs,
    spec,
)
from tests.support.strays import strays

Make = Callable[..., Supervisor]

KINDS = ("program", "group", "session", "bare", "daemon", "stubborn_daemon", "scrubbed_daemon")


def breeder(reports: Reports, kinds: tuple[str, ...] = KINDS, then: str = "answer") -> ChildSpec:
    child = spec("breed", reports, kinds=kinds, then=then)
    child.entry = "tests.children.fault_entries:breed"
    return child


@pytest.fixture
def stray() -> Iterator[Callable[[str], int]]:
    """Start processes that nobody of ours is the parent of."""
    with strays() as start:
        yield start


# ------------------------------------------------------------------------------------------------- with its child


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["answer", "fail", "cancel", "kill", "timeout"])
def test_what_a_child_started_is_gone_when_its_end_is_told(
    sup: Supervisor, reports: Reports, kind: str, ending: str
) -> None:
    sup.configure(limits(graces=QUICK))
    child = breeder(reports, (kind,), then={"answer": "answer", "fail": "fail"}.get(ending, "pause"))
    child.timeout_s = 0.5 if ending == "timeout" else None
    started = sup.start([child])
    report = reports.next()
    if ending == "cancel":
        assert sup.cancel(refs(started)[0]).ok
    elif ending == "kill":
        os.kill(report["pid"], signal.SIGKILL)
    [status] = sup.wait(refs(started), DEADLINE_S)
    assert (status.done, status.exited) == (True, True)
    assert [is_gone(pid) for pid in report["started"]] == [True]


def test_what_living_children_started_is_left_alone_while_their_siblings_end_in_every_way(
    sup: Supervisor, reports: Reports
) -> None:
    sup.configure(limits(graces=QUICK))
    [living] = sup.start([breeder(reports, then="pause")])
    kept = reports.next()
    with Watched(kept["pid"], *kept["started"]) as watched:
        others = sup.start([breeder(reports, then=then) for then in ("answer", "fail", "pause", "stubborn")])
        told = reports.take(4)
        assert sup.stop("close", QUICK, refs(others)).ok
        assert all(is_gone(pid) for report in told for pid in report["started"])
        assert watched.alive() == [kept["pid"], *kept["started"]]
        assert sup.stop("close", QUICK, refs([living])).ok
        assert watched.alive() == []


def test_what_descendants_started_goes_with_the_parent_that_answers(sup: Supervisor, reports: Reports) -> None:
    sup.configure(limits(graces=QUICK))
    parent = breeder(reports, then="parent")
    started = sup.start([parent])
    told = reports.take(2)
    [status] = sup.wait(refs(started), DEADLINE_S)
    assert status.state is ChildState.COMPLETED
    assert {report["pid"] for report in told} > {status.pid}
    assert all(is_gone(pid) for report in told for pid in (report["pid"], *report["started"]))


# ------------------------------------------------------------------------------------------------------ many at once


@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_twenty_stubborn_children_and_their_daemons_are_gone_within_the_budget(
    make_supervisor: Make, reports: Reports, nested: bool
) -> None:
    supervisor = make_supervisor(None, limits(graces=QUICK, max_concurrent_children=50))
    daemons = ("daemon", "stubborn_daemon", "scrubbed_daemon", "session", "daemon")
    if nested:
        parent = spec("breed", reports, kinds=(), then="parents", children=20, grandkinds=daemons)
        parent.entry = "tests.children.fault_entries:breed"
        supervisor.start([parent])
    else:
        supervisor.start([breeder(reports, daemons, then="stubborn") for _ in range(20)])
    told = [report for report in reports.take(21 if nested else 20) if report["started"]]
    pids = [pid for report in told for pid in (report["pid"], *report["started"])]
    assert len(pids) == 120
    began = time.monotonic()
    report = supervisor.stop("close", QUICK)
    took = time.monotonic() - began
    assert report.ok
    assert [pid for pid in pids if not is_gone(pid)] == []
    assert took < QUICK.total_s + BUDGET_SLACK_S
    assert supervisor.live_ids == []


# ------------------------------------------------------------------------------------------- when the nursery is killed


def test_a_killed_nursery_takes_along_what_its_children_started(make_supervisor: Make, reports: Reports) -> None:
    """All but a daemon that scrubbed its environment *and* left its child's session: that one has cut every tie."""
    supervisor = make_supervisor()
    kinds = tuple(kind for kind in KINDS if kind not in ("scrubbed_daemon",))
    children = supervisor.start([breeder(reports, kinds, then="pause"), breeder(reports, kinds, then="stubborn")])
    told = reports.take(2)
    pids = [pid for report in told for pid in (report["pid"], *report["started"])]
    with Watched(*pids) as watched:
        os.kill(nursery_of(supervisor), signal.SIGKILL)
        statuses = supervisor.wait(refs(children), DEADLINE_S)
        assert watched.alive() == []
    assert {(s.state, s.exited) for s in statuses} == {(ChildState.FAILED, True)}
    assert [finish(supervisor, spec("echo"))[0].state] == [ChildState.COMPLETED]


# --------------------------------------------------------------------------------- when kernel and nursery both are gone


def test_what_outlived_kernel_and_nursery_is_found_and_killed(stray: Callable[[str], int]) -> None:
    pid = stray("outlived-1")
    found = [orphan for orphan in find_orphans() if orphan.pid == pid]
    assert [orphan.marker for orphan in found] == ["outlived-1"]
    assert "import os, signal" in found[0].command
    orphans, survivors = kill_orphans(5.0)
    assert pid in [orphan.pid for orphan in orphans]
    assert survivors == ()
    assert is_dead(pid)


def test_what_belongs_to_a_living_nursery_is_never_taken_for_an_orphan(sup: Supervisor, reports: Reports) -> None:
    sup.start([breeder(reports, then="pause"), spec("stubborn", reports)])
    told = reports.take(2)
    ours = {nursery_of(sup), *(pid for report in told for pid in (report["pid"], *report.get("started", ())))}
    assert ours & {orphan.pid for orphan in find_orphans()} == set()
    with Watched(*ours) as watched:
        kill_orphans(5.0)
        assert set(watched.alive()) == ours


def test_what_belongs_to_a_stopped_nursery_is_no_orphan_either(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor()
    supervisor.start([spec("daemonize", reports, then="pause")])
    report = reports.next()
    nursery = nursery_of(supervisor)
    os.kill(nursery, signal.SIGSTOP)
    assert {nursery, report["pid"], report["daemon"]} & {orphan.pid for orphan in find_orphans()} == set()
    os.kill(nursery, signal.SIGCONT)
    assert supervisor.stop("close", QUICK).ok
