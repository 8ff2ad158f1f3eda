"""The supervisor with real processes and real signals: results, limits, and stops that end in confirmed exits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.children import posix
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from rlm_kernel.errors import ChildLimitError, EpisodeClosing, ForkedProcessError, StaleHandleError, UnknownHandleError
from rlm_kernel.values import ChildState, ChildStatus, Graces
from rlm_kernel.wire.channel import _MAX_FDS
from tests.children.helpers import (
    BUDGET_SLACK_S,
    DEADLINE_S,
    QUICK,
    Reports,
    Watched,
    finish,
    is_gone,
    limits,
    nursery_of,
    refs,
    spec,
)

Make = Callable[..., Supervisor]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def one(statuses: list[ChildStatus]) -> ChildStatus:
    [status] = statuses
    return status


# -------------------------------------------------------------------------------------------------------------- results


def test_an_answer_comes_with_everything_a_status_promises(sup: Supervisor) -> None:
    child = spec("echo", text="42")
    child.name, child.prompt_preview, child.model = "first", "p" * 500, "demo/x"
    [queued] = sup.start([child])
    assert (queued.state, queued.exited, queued.pid, queued.started_at) == (ChildState.QUEUED, False, None, None)
    status = one(sup.wait(refs([queued]), DEADLINE_S))
    assert (status.state, status.result, status.error) == (ChildState.COMPLETED, "42", None)
    assert (status.exited, status.exit_code) == (True, 0)
    assert (status.name, status.depth, status.parent_id, status.model) == ("first", 1, None, "demo/x")
    assert status.prompt_preview == "p" * 120
    assert status.pid is not None
    assert is_gone(status.pid)
    assert status.started_at is not None
    assert 0 < status.elapsed_s < DEADLINE_S
    assert status.log_tail == f"hello from {status.id}\n"
    assert status
    assert not queued


def test_an_answer_of_six_million_bytes_arrives_whole(sup: Supervisor) -> None:
    status = one(finish(sup, spec("big", size=3_000_000)))
    assert status.result == "é" * 3_000_000


def test_an_answer_that_is_read_together_with_the_exit_counts(sup: Supervisor, reports: Reports) -> None:
    """The loop is held up while the child answers and goes, and hears of the exit before it is told of the answer."""
    held, gone = threading.Event(), threading.Event()
    reactor = sup._core.reactor

    def hold_the_loop() -> None:
        reactor._unregister(reactor._ports[child.id].channel.fileno())
        held.set()
        gone.wait(DEADLINE_S)

    [child] = sup.start([spec("answer_when_asked", reports)])
    pid = reports.next()["pid"]
    reactor.post(hold_the_loop)
    assert held.wait(DEADLINE_S)
    os.kill(pid, signal.SIGINT)
    reports.wait_until_everybody_is_gone()
    gone.set()
    status = one(sup.wait(refs([child]), DEADLINE_S))
    assert (status.state, status.result) == (ChildState.COMPLETED, "a late answer")


def test_an_answer_longer_than_the_limit_is_cut_and_says_so(sup: Supervisor) -> None:
    sup.configure(limits(result_truncation_limit=10))
    status = one(finish(sup, spec("big", size=50)))
    assert status.result is not None
    assert status.result.startswith("é" * 10 + "\n")
    assert "50 characters, result_truncation_limit=10" in status.result


def test_an_answer_with_lone_surrogates_is_not_lost(sup: Supervisor) -> None:
    status = one(finish(sup, spec("surrogates")))
    assert (status.state, status.result) == (ChildState.COMPLETED, "before \\udcff after")


@pytest.mark.parametrize(
    ("task", "code", "error"),
    [
        ({"do": "raise"}, 1, "ValueError: a bad thing"),
        ({"do": "raise_unpicklable"}, 1, "CannotBePickled: cannot travel"),
        ({"do": "system_exit"}, 1, "the run's code ended its process (SystemExit: 3)"),
        ({"do": "no_such_thing"}, 1, "KeyError: 'do_no_such_thing'"),
        ({"do": "exit", "code": 0}, 0, "the child exited with code 0 before it had an answer"),
        ({"do": "exit", "code": 5}, 5, "the child exited with code 5 before it had an answer"),
        ({"do": "die", "signal": 9}, -9, "the child was killed by signal 9 (SIGKILL) before it had an answer"),
        ({"do": "die", "signal": 11}, -11, "the child was killed by signal 11 (SIGSEGV) before it had an answer"),
    ],
    ids=lambda value: str(value.get("do")) if isinstance(value, dict) else "",
)
def test_a_child_without_an_answer_has_failed_and_says_why(
    sup: Supervisor, task: dict[str, Any], code: int, error: str
) -> None:
    status = one(finish(sup, spec(**task)))
    assert (status.state, status.result, status.exit_code, status.exited) == (ChildState.FAILED, None, code, True)
    assert status.error == error


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cwd": "/no/such/folder"}, "cannot enter the working directory of the call, '/no/such/folder'"),
        ({"entry": "no_such_module:run"}, "No module named 'no_such_module'"),
    ],
    ids=["cwd", "entry"],
)
def test_a_child_that_cannot_begin_has_failed_and_harms_nobody(
    sup: Supervisor, reports: Reports, change: dict[str, Any], error: str
) -> None:
    bystander = sup.start([spec("pause", reports)])
    reports.next()
    bad = spec("echo")
    for name, value in change.items():
        setattr(bad, name, value)
    status = one(finish(sup, bad))
    assert status.state is ChildState.FAILED
    assert status.error is not None
    assert error in status.error
    assert one(sup.status(refs(bystander))).state is ChildState.RUNNING


def test_more_attachments_than_a_message_takes_fail_that_child_only(sup: Supervisor) -> None:
    bad = spec("echo")
    bad.attachments = tuple(os.open(os.devnull, os.O_RDONLY) for _ in range(_MAX_FDS + 1))
    status = one(finish(sup, bad))
    assert f"{_MAX_FDS + 1} descriptors" in str(status.error)
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED


def test_a_variable_that_is_no_utf8_harms_nobody(sup: Supervisor, reports: Reports) -> None:
    bystander = sup.start([spec("pause", reports)])
    reports.next()
    child = spec("echo")
    child.environ = {"BAD": "\udcff"}
    assert one(finish(sup, child)).exited
    assert one(sup.status(refs(bystander))).state is ChildState.RUNNING


def test_a_child_that_writes_garbage_to_its_channel_fails_and_others_are_unharmed(
    sup: Supervisor, reports: Reports
) -> None:
    bystander = sup.start([spec("pause", reports)])
    reports.next()
    status = one(finish(sup, spec("garbage", reports)))
    assert (status.state, status.exited) == (ChildState.FAILED, True)
    assert "channel is broken" in str(status.error)
    assert one(sup.status(refs(bystander))).state is ChildState.RUNNING
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED


def test_a_child_that_floods_its_channel_keeps_nobody_from_working_or_from_stopping_it(
    sup: Supervisor, reports: Reports
) -> None:
    flood = sup.start([spec("flood", reports)])
    reports.next()
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED
    report = sup.stop("cancel", QUICK, refs(flood))
    assert (report.ok, report.stopped) == (True, (flood[0].id,))
    assert one(sup.status(refs(flood))).iterations > 0


# ---------------------------------------------------------------------------------------------------------------- waits


def test_two_threads_that_wait_for_one_child_both_see_its_one_result(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("clean_up_when_asked", reports)])
    reports.next()
    seen: list[ChildStatus] = []
    threads = [threading.Thread(target=lambda: seen.extend(sup.wait(refs([child])))) for _ in range(2)]
    for thread in threads:
        thread.start()
    sup.stop("cancel", QUICK, refs([child]))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [status.state for status in seen] == [ChildState.CANCELLED] * 2
    assert len({status.pid for status in seen}) == 1


def test_a_wait_that_times_out_changes_nothing(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("pause", reports)])
    reports.next()
    status = one(sup.wait(refs([child]), 0.0))
    assert (status.state, status.done) == (ChildState.RUNNING, False)
    assert one(sup.wait(refs([child]), 0.01)).pid == status.pid


def test_a_thousand_waits_that_time_out_leave_nothing_behind(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("pause", reports)])
    reports.next()
    fds, threads = open_fds(), threading.active_count()
    for _ in range(1000):
        sup.wait(refs([child]), 0.001)
    assert sup._core.registry._waiters == {}
    assert (open_fds(), threading.active_count()) == (fds, threads)


def test_waiting_for_any_returns_with_the_first(sup: Supervisor, reports: Reports) -> None:
    slow, quick = sup.start([spec("pause", reports), spec("echo")])
    statuses = sup.wait(refs([slow, quick]), DEADLINE_S, any_=True)
    assert [status.done for status in statuses] == [False, True]


def test_waiting_for_nothing_returns_at_once(sup: Supervisor) -> None:
    assert sup.wait([]) == []


def test_a_callback_is_called_once_and_one_that_raises_harms_nobody(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("answer_when_asked", reports)])
    pid = reports.next()["pid"]
    bystander = sup.start([spec("pause", reports)])
    reports.next()
    called: list[str] = []
    done = threading.Event()

    def bad() -> None:
        called.append("bad")
        raise ValueError("from a callback")

    def good() -> None:
        called.append("good")
        done.set()

    assert sup.call_when_done((child.id, None), bad)
    assert sup.call_when_done((child.id, None), good)
    os.kill(pid, signal.SIGINT)
    assert done.wait(DEADLINE_S)
    assert called == ["bad", "good"]
    assert one(sup.status(refs(bystander))).state is ChildState.RUNNING
    assert not sup.call_when_done((child.id, None), bad)


def test_states_are_published_in_the_order_in_which_they_came(make_supervisor: Make) -> None:
    seen: dict[str, list[ChildState]] = {}
    supervisor = make_supervisor(on_change=lambda status: seen.setdefault(status.id, []).append(status.state))
    statuses = []
    for _ in range(10):
        statuses += supervisor.start([spec("echo"), spec("raise")])
    supervisor.wait(refs(statuses), DEADLINE_S)
    assert supervisor.observers.flush()
    order = [ChildState.QUEUED, ChildState.RUNNING, ChildState.COMPLETED, ChildState.FAILED]
    assert len(seen) == 20
    for states in seen.values():
        assert states == sorted(set(states), key=order.index)
        assert states[-1].done


# ------------------------------------------------------------------------------------------------------------ admission


def test_a_batch_beyond_a_limit_starts_nothing_and_closes_its_descriptors(sup: Supervisor, reports: Reports) -> None:
    sup.configure(limits(max_children_per_batch=2))
    fds = open_fds()
    with pytest.raises(ChildLimitError, match="max_children_per_batch"):
        sup.start([spec("echo", reports) for _ in range(3)])
    assert sup.status() == []
    assert open_fds() == fds


def test_while_the_door_is_closed_nothing_starts_and_what_runs_is_not_touched(
    sup: Supervisor, reports: Reports
) -> None:
    running = sup.start([spec("pause", reports)])
    reports.next()
    sup.admit_children(False)
    try:
        with pytest.raises(EpisodeClosing):
            sup.start([spec("echo", reports)])
        assert one(sup.status(refs(running))).state is ChildState.RUNNING
    finally:
        sup.admit_children(True)


def test_three_hundred_children_run_no_more_than_the_limit_at_once(sup: Supervisor) -> None:
    sup.configure(limits(max_concurrent_children=4))
    children = sup.start([spec("exit", code=0) for _ in range(300)])
    most = 0
    for child in children:
        sup.wait([(child.id, None)], DEADLINE_S)
        now = sup.status(refs(children))
        most = max(most, sum(status.pid is not None and not status.exited for status in now))
    assert all(status.done for status in sup.status(refs(children)))
    assert 1 <= most <= 4


def test_two_hundred_finished_children_hold_no_process_no_descriptor_and_no_slot(sup: Supervisor) -> None:
    finish(sup, spec("echo"))
    fds, threads = open_fds(), threading.active_count()
    children = finish(sup, *[spec("echo") for _ in range(200)], timeout_s=30.0)
    assert {status.state for status in children} == {ChildState.COMPLETED}
    assert (open_fds(), threading.active_count()) == (fds, threads)
    assert all(is_gone(status.pid or 0) for status in children)
    assert Path(f"/proc/{sup.nursery_pid}/task/{sup.nursery_pid}/children").read_text() == ""
    assert sup._core.registry.live() == []
    assert sup._core.reactor._ports == {}


def test_handles_of_an_earlier_episode_are_stale_and_unknown_ids_name_the_known(sup: Supervisor) -> None:
    old = finish(sup, spec("echo"))
    sup.begin_episode("the next")
    new = finish(sup, spec("echo"))
    with pytest.raises(StaleHandleError):
        sup.status([(old[0].id, "test")])
    with pytest.raises(UnknownHandleError, match=new[0].id):
        sup.wait([("c99999", None)])
    with pytest.raises(UnknownHandleError):
        sup.stop("cancel", QUICK, [("c99999", None)])
    assert sup._core.tallies == []


# ---------------------------------------------------------------------------------------------------------------- stops


def test_a_child_that_cooperates_runs_its_finally_blocks_and_costs_no_grace(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("clean_up_when_asked", reports)])
    reports.next()
    report = sup.stop("cancel", Graces(30, 30, 30), refs([child]))
    assert reports.next()["cleaned"]
    assert (report.ok, report.stopped, report.asked, report.terminated, report.killed) == (True, (child.id,), 1, 0, 0)
    status = one(sup.status(refs([child])))
    assert (status.state, status.exited, status.exit_code) == (ChildState.CANCELLED, True, 130)


def test_a_stubborn_child_is_gone_within_the_graces_and_its_sibling_is_unharmed(
    sup: Supervisor, reports: Reports
) -> None:
    stubborn, sibling = sup.start([spec("stubborn", reports), spec("pause", reports)])
    reports.take(2)
    began = time.monotonic()
    report = sup.stop("cancel", QUICK, refs([stubborn]))
    took = time.monotonic() - began
    assert (report.ok, report.stopped, report.asked, report.terminated, report.killed) == (
        True,
        (stubborn.id,),
        1,
        1,
        1,
    )
    assert 0.3 <= took < 0.3 + BUDGET_SLACK_S
    gone, alive = sup.status(refs([stubborn, sibling]))
    assert (gone.state, gone.exited, gone.exit_code) == (ChildState.CANCELLED, True, -9)
    assert is_gone(gone.pid or 0)
    assert (alive.state, alive.done) == (ChildState.RUNNING, False)


def test_a_child_that_swallows_the_request_is_ended_by_sigterm(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("swallow", reports)])
    reports.next()
    report = sup.stop("cancel", Graces(0.1, 30, 30), refs([child]))
    assert reports.next()["swallowed"]
    assert (report.terminated, report.killed) == (1, 0)
    assert one(sup.status(refs([child]))).exit_code == -signal.SIGTERM


def test_twenty_stubborn_children_are_stopped_side_by_side(sup: Supervisor, reports: Reports) -> None:
    children = sup.start([spec("stubborn", reports) for _ in range(20)])
    pids = [report["pid"] for report in reports.take(20)]
    began = time.monotonic()
    report = sup.stop("close", QUICK)
    took = time.monotonic() - began
    assert all(is_gone(pid) for pid in pids)
    assert (report.ok, len(report.stopped), report.killed) == (True, 20, 20)
    assert took < 0.3 + BUDGET_SLACK_S
    assert {status.state for status in sup.status(refs(children))} == {ChildState.CANCELLED}


def test_a_stopped_process_does_not_outlive_a_stop(sup: Supervisor, reports: Reports) -> None:
    sup.start([spec("pause", reports)])
    pid = reports.next()["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert sup.stop("close", QUICK).ok
    assert is_gone(pid)


def test_a_queued_child_that_is_stopped_never_starts(sup: Supervisor, reports: Reports) -> None:
    sup.configure(limits(max_concurrent_children=1))
    _, queued = sup.start([spec("pause", reports), spec("echo", reports)])
    reports.next()
    report = sup.stop("cancel", QUICK, refs([queued]))
    status = one(sup.status(refs([queued])))
    assert (report.ok, status.state, status.pid, status.exited) == (True, ChildState.CANCELLED, None, True)
    assert sup.stop("close", QUICK).ok
    assert reports.everybody_is_gone()


def test_a_stop_that_comes_with_the_start_leaves_nothing(sup: Supervisor, reports: Reports) -> None:
    for _ in range(30):
        children = sup.start([spec("pause", reports) for _ in range(3)])
        report = sup.stop("close", Graces(5, 5, 5))
        assert report.ok
        assert {status.state for status in sup.status(refs(children))} == {ChildState.CANCELLED}
    assert reports.everybody_is_gone()


def test_a_stop_that_overtakes_a_start_keeps_it_from_starting(
    sup: Supervisor, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts is held up between its decision and telling the reactor; the stop is told first."""
    carry_out = sup._core.carry_out
    held, go = threading.Event(), threading.Event()

    def slow(effects: Any) -> None:
        if threading.current_thread().name == "starter":
            held.set()
            go.wait(DEADLINE_S)
        carry_out(effects)

    monkeypatch.setattr(sup._core, "carry_out", slow)
    starter = threading.Thread(target=lambda: sup.start([spec("stubborn", reports)]), name="starter")
    starter.start()
    assert held.wait(DEADLINE_S)
    report = sup.stop("close", Graces(5, 5, 5))
    go.set()
    starter.join()
    assert (report.ok, report.asked) == (True, 0)
    assert report.duration_s < 1.0
    finish(sup, spec("echo"))  # the reactor has been through all that was posted
    assert reports.everybody_is_gone()


def test_an_answer_that_comes_after_the_stop_is_kept_and_the_child_stays_cancelled(
    sup: Supervisor, reports: Reports
) -> None:
    [child] = sup.start([spec("answer_when_asked", reports)])
    reports.next()
    assert sup.stop("cancel", Graces(30, 30, 30), refs([child])).ok
    status = one(sup.status(refs([child])))
    assert (status.state, status.result, status.exit_code) == (ChildState.CANCELLED, "a late answer", 0)


def test_stops_on_several_threads_join_and_all_confirm(sup: Supervisor, reports: Reports) -> None:
    children = sup.start([spec("stubborn", reports) for _ in range(3)])
    pids = [report["pid"] for report in reports.take(3)]
    gone: list[bool] = []

    def stop() -> None:
        assert sup.stop("close", QUICK).ok
        gone.append(all(is_gone(pid) for pid in pids))

    threads = [threading.Thread(target=stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert gone == [True] * 4
    assert {status.state for status in sup.status(refs(children))} == {ChildState.CANCELLED}


def test_hastening_skips_the_rest_of_the_graces(sup: Supervisor, reports: Reports) -> None:
    sup.start([spec("stubborn", reports)])
    pid = reports.next()["pid"]
    with Watched(pid) as watched:
        stopping = threading.Thread(target=lambda: sup.stop("close", Graces(30, 30, 30)))
        stopping.start()
        while True:
            sup.hasten()
            if not watched.alive(0.05):
                break
        stopping.join(DEADLINE_S)
        assert not stopping.is_alive()


def test_a_stop_with_nothing_to_stop_returns_at_once(sup: Supervisor) -> None:
    report = sup.stop("close", Graces(30, 30, 30))
    assert (report.ok, report.stopped) == (True, ())
    assert report.duration_s < 1.0


def test_a_child_whose_time_is_up_is_stopped_in_the_middle_of_whatever_it_does(
    sup: Supervisor, reports: Reports
) -> None:
    status = one(finish(sup, spec("pause", reports, timeout_s=0.1)))
    assert (status.state, status.exited, status.error) == (ChildState.TIMED_OUT, True, "timed out after 0.1 s")
    assert 0.1 <= status.elapsed_s < 0.1 + BUDGET_SLACK_S


@pytest.mark.parametrize("timeout_s", [1e7, 1e12, float("inf")])
def test_a_child_may_be_given_a_very_long_time(sup: Supervisor, timeout_s: float) -> None:
    assert one(finish(sup, spec("echo", timeout_s=timeout_s))).state is ChildState.COMPLETED
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED


# -------------------------------------------------------------------------------------------------- what children start


def test_what_a_child_started_is_gone_when_it_has_ended(sup: Supervisor, reports: Reports) -> None:
    status = one(finish(sup, spec("subprocess", reports)))
    started = reports.next()["started"]
    assert status.state is ChildState.COMPLETED
    assert [is_gone(pid) for pid in started] == [True] * 3


def test_a_daemon_goes_with_its_own_child_and_not_with_another_one(sup: Supervisor, reports: Reports) -> None:
    [alive] = sup.start([spec("daemonize", reports, then="pause")])
    others = reports.next()["daemon"]
    with Watched(others) as watched:
        status = one(finish(sup, spec("daemonize", reports)))
        mine = reports.next()["daemon"]
        assert status.state is ChildState.COMPLETED
        assert is_gone(mine)
        assert watched.alive() == [others]
        assert sup.stop("cancel", QUICK, refs([alive])).ok
        assert is_gone(others)


def test_a_child_killed_outright_takes_along_what_it_started(sup: Supervisor, reports: Reports) -> None:
    [child] = sup.start([spec("daemonize", reports, then="pause")])
    report = reports.next()
    daemon = report["daemon"]
    os.kill(report["pid"], signal.SIGKILL)
    assert one(sup.wait(refs([child]), DEADLINE_S)).state is ChildState.FAILED
    assert is_gone(daemon)


# ---------------------------------------------------------------------------------------------------------- descendants


def test_a_parent_gets_the_results_of_its_children(sup: Supervisor) -> None:
    status = one(finish(sup, spec("parent", children=[{"do": "echo", "text": "a"}, {"do": "echo", "text": "b"}])))
    assert [(state, result) for _, state, result in json.loads(status.result or "")] == [
        ("completed", "a"),
        ("completed", "b"),
    ]
    assert [s.depth for s in sup.status()] == [1, 2, 2]
    assert [s.parent_id for s in sup.status()] == [None, status.id, status.id]


def test_four_parents_of_two_children_each_finish_with_two_slots(sup: Supervisor) -> None:
    sup.configure(limits(max_concurrent_children=2))
    children = [{"do": "echo"}, {"do": "echo"}]
    statuses = finish(sup, *[spec("parent", children=children) for _ in range(4)])
    assert {status.state for status in statuses} == {ChildState.COMPLETED}


def test_a_parent_that_polls_finishes_with_one_slot(sup: Supervisor) -> None:
    sup.configure(limits(max_concurrent_children=1))
    status = one(finish(sup, spec("parent_that_polls", children=[{"do": "parent", "children": [{"do": "echo"}]}])))
    assert status.state is ChildState.COMPLETED


def test_a_waiting_parent_shows_it_and_one_that_is_killed_then_takes_its_descendants_along(
    sup: Supervisor, reports: Reports
) -> None:
    sup.configure(limits(graces=QUICK))
    [parent] = sup.start([spec("parent", reports, children=[{"do": "stubborn"}, {"do": "pause"}])])
    by_kind = reports.take(3)
    pids = [report["pid"] for report in by_kind if "children" not in report]
    [parents_pid] = [report["pid"] for report in by_kind if "children" in report]
    waiting = one(sup.status(refs([parent])))
    while waiting.state is not ChildState.WAITING:  # its request is on the way
        waiting = one(sup.wait(refs([parent]), 0.005))
    os.kill(parents_pid, signal.SIGKILL)
    status = one(sup.wait(refs([parent]), DEADLINE_S))
    assert status.state is ChildState.FAILED
    assert [is_gone(pid) for pid in pids] == [True, True]
    assert {s.state for s in sup.status()[1:]} == {ChildState.CANCELLED}


def test_a_parent_that_answers_without_waiting_takes_its_children_with_it(sup: Supervisor, reports: Reports) -> None:
    status = one(finish(sup, spec("parent_that_does_not_wait", reports, children=[{"do": "pause"}, {"do": "pause"}])))
    assert status.state is ChildState.COMPLETED
    assert {s.state for s in sup.status()[1:]} == {ChildState.CANCELLED}
    assert reports.everybody_is_gone()


def test_a_parent_whose_time_is_up_takes_its_children_with_it(sup: Supervisor, reports: Reports) -> None:
    status = one(finish(sup, spec("parent", reports, timeout_s=0.2, children=[{"do": "pause"}])))
    assert status.state is ChildState.TIMED_OUT
    assert sup.status()[1].state is ChildState.CANCELLED
    assert reports.everybody_is_gone()


def test_a_childs_wait_that_times_out_leaves_its_child_running(sup: Supervisor, reports: Reports) -> None:
    status = one(finish(sup, spec("parent", reports, wait_s=0.05, children=[{"do": "pause"}])))
    [(_, state, _)] = json.loads(status.result or "")
    assert state in ("running", "queued")
    assert status.state is ChildState.COMPLETED


def test_a_childs_wait_of_no_time_at_all_gets_the_current_status(sup: Supervisor) -> None:
    status = one(finish(sup, spec("parent", wait_s=0.0, children=[{"do": "pause"}])))
    [(_, state, _)] = json.loads(status.result or "")
    assert state in ("running", "queued")


def test_a_childs_very_long_wait_harms_nobody(sup: Supervisor) -> None:
    assert one(finish(sup, spec("parent", wait_s=1e12, children=[{"do": "echo"}]))).state is ChildState.COMPLETED
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED


def test_threads_of_a_child_wait_side_by_side_with_one_slot(sup: Supervisor) -> None:
    sup.configure(limits(max_concurrent_children=1))
    children = [{"do": "echo", "text": str(number)} for number in range(6)]
    status = one(finish(sup, spec("many_threads_wait", children=children)))
    assert json.loads(status.result or "") == ["0", "1", "2", "3", "4", "5"]


def test_a_limit_reaches_the_child_that_asked_as_an_error_with_its_name(sup: Supervisor) -> None:
    sup.configure(limits(max_depth=2))
    status = one(finish(sup, spec("parent", children=[{"do": "echo"}])))
    answer = json.loads(status.result or "")
    assert (answer["class"], answer["limit"]) == ("ChildLimitError", "max_depth")


def test_a_child_cannot_look_at_its_sibling(sup: Supervisor) -> None:
    [first] = finish(sup, spec("echo"))
    status = one(finish(sup, spec("ask", ids=[first.id])))
    assert json.loads(status.result or "")["class"] == "UnknownHandleError"


# ------------------------------------------------------------------------------------------------------- a fresh process


def facts(sup: Supervisor, **changes: Any) -> dict[str, Any]:
    child = spec("facts")
    for name, value in changes.items():
        setattr(child, name, value)
    status = one(finish(sup, child))
    found: dict[str, Any] = json.loads(status.result or "")
    return found


def test_children_differ_in_random_numbers_and_temporary_names(sup: Supervisor) -> None:
    results = [json.loads(s.result or "") for s in finish(sup, *[spec("facts") for _ in range(6)])]
    assert len({result["random"] for result in results}) == 6
    assert len({result["tempfile"] for result in results}) == 6


def test_a_child_is_alone_with_its_channel_in_a_session_of_its_own(sup: Supervisor) -> None:
    found = facts(sup)
    assert found["stdin"] == "/dev/null"
    assert found["input"] == "EOFError"
    assert found["sid"] == found["pid"]
    assert found["threads"] == 1
    [channel] = found["fds"]
    assert channel.startswith("socket:")
    assert "on_sigint" in found["sigint"]
    assert found["sigterm"] == "Handlers.SIG_DFL" or found["sigterm"] == "0"
    assert found["blocked"] == []


def test_a_child_takes_over_cwd_and_environment_of_the_call(sup: Supervisor, tmp_path: Path) -> None:
    found = facts(sup, cwd=str(tmp_path), environ={"ONLY": "this", "TMPDIR": str(tmp_path)})
    assert found["cwd"] == str(tmp_path)
    assert found["tempfile"].startswith(str(tmp_path))
    assert {**found["environ"], "RLM_KERNEL_NURSERY": ""} == {
        "ONLY": "this",
        "TMPDIR": str(tmp_path),
        "RLM_KERNEL_NURSERY": "",
    }


def test_secrets_reach_the_child_and_are_not_in_its_exec_environment(
    make_supervisor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret-1")
    monkeypatch.setenv("HARMLESS", "visible-1")
    found = facts(make_supervisor(), environ={}, secret_environ={"SOME_API_KEY": "sk-very-secret-1"})
    assert found["environ"]["SOME_API_KEY"] == "sk-very-secret-1"
    assert "sk-very-secret-1" not in found["exec_environ"]
    assert "visible-1" in found["exec_environ"]


def test_what_a_child_changes_stays_in_the_child(sup: Supervisor) -> None:
    here = os.getcwd()
    assert one(finish(sup, spec("change_everything"))).result == "/"
    assert os.getcwd() == here
    assert "RLM_TEST_CHANGED" not in os.environ
    assert facts(sup)["cwd"] == here


def test_a_copy_that_a_child_forks_cannot_use_its_link(sup: Supervisor) -> None:
    status = one(finish(sup, spec("fork_and_use_the_link")))
    assert (status.result, status.iterations) == ("ForkedProcessError", 0)


def test_the_supervisor_refuses_to_work_in_a_forked_copy_and_its_close_is_harmless_there(sup: Supervisor) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"no error"
        try:
            sup.start([spec("echo")])
        except ForkedProcessError:
            said = b"closed" if sup.close() else b"not closed"
        os.write(writer, said)
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"closed"
    os.close(reader)
    os.close(writer)
    assert one(finish(sup, spec("echo"))).state is ChildState.COMPLETED


def test_exits_are_confirmed_without_pidfds_too(make_supervisor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "open_pidfd", lambda _pid: None)
    supervisor = make_supervisor()
    assert one(finish(supervisor, spec("echo"))).state is ChildState.COMPLETED


def test_a_nursery_that_was_warmed_for_something_else_is_replaced_while_it_has_no_children(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    assert finish(supervisor, spec("echo"))[0].result == "ok"
    first = nursery_of(supervisor)
    supervisor.prepare()
    child = supervisor.start([spec("pause", reports)])
    reports.next()
    assert nursery_of(supervisor) == first
    supervisor.settings = NurserySettings(warm_up="tests.children.entries:warm_up")
    supervisor.prepare()
    assert finish(supervisor, spec("echo"))[0].result == "ok"
    assert nursery_of(supervisor) == first, "it has a child"
    assert supervisor.stop("close", QUICK, refs(child)).ok
    with Watched(first) as watched:
        supervisor.prepare()
        assert finish(supervisor, spec("echo"))[0].result == "ok"
        assert watched.alive(DEADLINE_S) == []
    assert nursery_of(supervisor) != first
