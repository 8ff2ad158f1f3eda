"""Whoever dies, and however: the children are gone, and what they had started with them."""

from __future__ import annotations

import dis
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from rlm_kernel.children import posix
from rlm_kernel.children.states import Phase
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from rlm_kernel.values import ChildState, Graces
from tests.children.helpers import (
    BUDGET_SLACK_S,
    DEADLINE_S,
    QUICK,
    ROOT,
    Reports,
    Watched,
    finish,
    is_dead,
    limits,
    nursery_of,
    readable,
    refs,
    spec,
)

Make = Callable[..., Supervisor]

ORPHANED_S = 2.5
"""Seconds for everybody to go when the root is dead: the graces up to SIGKILL are 1.0 together."""


# ------------------------------------------------------------------------------------------------- the root process dies


class RootScript:
    """A root process of its own."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.children.roots", name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert readable(self.process.stdout.fileno()), "the root says nothing"
        said: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        return said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def script(no_leftovers: None) -> Iterator[Callable[[str], RootScript]]:
    running: list[RootScript] = []

    def start(name: str) -> RootScript:
        running.append(RootScript(name))
        return running[-1]

    yield start
    for root in running:
        root.close()


def test_a_root_killed_outright_leaves_nobody(script: Callable[[str], RootScript]) -> None:
    root = script("plain")
    pids = root.line()
    assert len(pids) == 6
    with Watched(*pids.values()) as watched:
        root.process.kill()
        root.process.wait()
        assert watched.alive(ORPHANED_S) == []


def test_a_root_that_ends_without_closing_leaves_nobody(script: Callable[[str], RootScript]) -> None:
    root = script("that_ends_without_closing")
    pids = root.line()
    with_pidfds = [pid for pid in pids.values() if not is_dead(pid)]
    with Watched(*with_pidfds) as watched:
        assert watched.alive(DEADLINE_S) == []


def test_a_copy_of_the_root_that_holds_its_sockets_keeps_no_child_alive(script: Callable[[str], RootScript]) -> None:
    root = script("with_a_forked_copy")
    pids = root.line()
    copy = pids.pop("copy")
    with Watched(copy) as the_copy, Watched(*pids.values()) as watched:
        root.process.kill()
        root.process.wait()
        assert watched.alive(ORPHANED_S) == []
        assert the_copy.alive() == [copy]
        os.kill(copy, signal.SIGKILL)
        assert the_copy.alive(DEADLINE_S) == []


def test_without_free_descriptors_a_start_fails_readably_and_works_again_afterwards(
    script: Callable[[str], RootScript],
) -> None:
    said = script("without_descriptors").line()
    state, error, exited = said["poor"]
    assert (state, exited) == ("failed", True)
    assert "cannot start the child" in error
    assert "Too many open files" in error
    assert (said["rich"], said["closed"]) == ("completed", True)


def test_a_root_that_ignores_sigint_still_stops_its_children_politely(script: Callable[[str], RootScript]) -> None:
    assert script("with_sigint_ignored").line() == {"cleaned": True, "killed": 0, "code": 130}


# ------------------------------------------------------------------------------------------------------ the nursery dies


def test_a_nursery_killed_outright_fails_its_runs_and_the_next_start_works(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("stubborn", reports), spec("daemonize", reports, then="pause")])
    told = reports.take(2)
    pids = [report["pid"] for report in told] + [report["daemon"] for report in told if "daemon" in report]
    assert len(pids) == 3
    first = nursery_of(supervisor)
    os.kill(first, signal.SIGKILL)
    for status in supervisor.wait(refs(children), DEADLINE_S):
        assert (status.state, status.exited) == (ChildState.FAILED, True)
        assert "the nursery process ended (signal 9)" in str(status.error)
    assert [is_dead(pid) for pid in pids] == [True] * 3
    [again] = finish(supervisor, spec("echo"))
    assert again.state is ChildState.COMPLETED
    assert supervisor.nursery_pid != first


def test_programs_without_our_environment_die_with_a_killed_nursery_too(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("subprocess", reports, then="pause")])
    usual, _, bare = reports.next()["started"]
    with Watched(usual, bare) as watched:
        os.kill(nursery_of(supervisor), signal.SIGKILL)
        supervisor.wait(refs(children), DEADLINE_S)
        assert watched.alive() == []


def test_queued_children_survive_the_death_of_a_nursery(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor(None, limits(max_concurrent_children=1))
    running, queued = supervisor.start([spec("pause", reports), spec("echo")])
    reports.next()
    os.kill(nursery_of(supervisor), signal.SIGKILL)
    statuses = supervisor.wait(refs([running, queued]), DEADLINE_S)
    assert [status.state for status in statuses] == [ChildState.FAILED, ChildState.COMPLETED]


def test_an_answer_that_was_sent_before_the_nursery_died_is_not_lost(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor()
    [child] = supervisor.start([spec("answer_when_asked", reports)])
    pid = reports.next()["pid"]
    nursery = nursery_of(supervisor)
    os.kill(nursery, signal.SIGSTOP)  # it cannot report the exit any more
    while (seen := posix.parent_and_state(nursery)) is not None and seen[1] != "T":
        supervisor.wait(refs([child]), 0.001)
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + DEADLINE_S
    while supervisor.status(refs([child]))[0].result is None and time.monotonic() < deadline:
        supervisor.wait(refs([child]), 0.01)
    os.kill(nursery, signal.SIGKILL)
    [status] = supervisor.wait(refs([child]), DEADLINE_S)
    assert (status.state, status.exited, bool(status.result)) == (ChildState.COMPLETED, True, True)


def test_a_nursery_that_hangs_does_not_keep_a_stop_from_confirming_in_time(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("stubborn", reports), spec("pause", reports)])
    with Watched(*[report["pid"] for report in reports.take(2)]) as watched:
        supervisor.wait(refs(children), 0.0)
        os.kill(nursery_of(supervisor), signal.SIGSTOP)
        report = supervisor.stop("close", QUICK)
        assert report.ok
        assert report.duration_s < QUICK.total_s + BUDGET_SLACK_S
        assert watched.alive() == []
    assert {status.state for status in supervisor.status(refs(children))} == {ChildState.CANCELLED}
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED


def test_a_stop_of_one_child_confirms_without_the_nursery_and_spares_the_others(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    [stubborn] = supervisor.start([spec("stubborn", reports)])
    pid = reports.next()["pid"]
    others = supervisor.start([spec("pause", reports)])
    reports.next()
    os.kill(nursery_of(supervisor), signal.SIGSTOP)
    report = supervisor.stop("cancel", Graces(0.1, 0.1, 0.5), refs([stubborn]))
    assert (report.ok, is_dead(pid)) == (True, True)
    assert not supervisor.status(refs(others))[0].done
    os.kill(nursery_of(supervisor), signal.SIGCONT)
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED


def test_a_nursery_that_hangs_before_it_forks_is_killed_by_the_stop(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    os.kill(nursery_of(supervisor), signal.SIGSTOP)
    children = supervisor.start([spec("stubborn", reports)])
    report = supervisor.stop("close", QUICK)
    assert report.ok
    assert report.duration_s < QUICK.total_s + BUDGET_SLACK_S
    assert supervisor.status(refs(children))[0].state is ChildState.CANCELLED
    assert reports.everybody_is_gone()


def test_a_sigterm_to_the_nursery_ends_every_child_and_the_next_start_works(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("stubborn", reports), spec("pause", reports)])
    pids = [report["pid"] for report in reports.take(2)]
    os.kill(nursery_of(supervisor), signal.SIGTERM)
    assert {s.state for s in supervisor.wait(refs(children), DEADLINE_S)} == {ChildState.FAILED}
    assert [is_dead(pid) for pid in pids] == [True, True]
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED


def test_a_stop_while_the_nursery_boots_does_not_wait_for_its_imports(make_supervisor: Make, tmp_path: Path) -> None:
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    (tmp_path / "slow.py").write_text(f"open({str(fifo)!r}).read()\n")
    os.environ["PYTHONPATH"], before = str(tmp_path), os.environ.get("PYTHONPATH")
    try:
        supervisor = make_supervisor(NurserySettings(preload=("slow",)))
        children = supervisor.start([spec("echo"), spec("pause")])
        report = supervisor.stop("close", Graces(30, 30, 30))
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    assert report.ok
    assert report.duration_s < 5.0
    assert {status.state for status in supervisor.status(refs(children))} == {ChildState.CANCELLED}


def test_a_nursery_that_cannot_boot_fails_the_run_with_what_it_wrote(make_supervisor: Make, tmp_path: Path) -> None:
    supervisor = make_supervisor(
        NurserySettings(warm_up="no_such_module:warm_up", log_path=str(tmp_path / "nursery.log"))
    )
    [status] = finish(supervisor, spec("echo"))
    assert status.state is ChildState.FAILED
    assert "No module named 'no_such_module'" in str(status.error)


# ------------------------------------------------------------------------------------------------- closing and reopening


def test_closing_ends_nursery_and_threads_and_a_later_start_begins_anew(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    pid = nursery_of(supervisor)
    assert supervisor.close()
    assert is_dead(pid)
    assert not [t for t in threading.enumerate() if t.name == "rlm-supervisor"]
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED
    assert supervisor.close()
    assert supervisor.close()


def test_a_start_that_comes_right_behind_a_close_is_served(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    held, go = threading.Event(), threading.Event()

    def hold_the_loop() -> None:
        held.set()
        go.wait(DEADLINE_S)

    reactor = supervisor._core.reactor
    reactor.post(hold_the_loop)
    assert held.wait(DEADLINE_S)
    reactor.post(lambda: reactor._begin_close(time.monotonic() + 5))
    children = supervisor.start([spec("echo")])
    go.set()
    [status] = supervisor.wait(refs(children), DEADLINE_S)
    assert status.state is ChildState.COMPLETED


def test_closing_with_live_children_ends_them_and_says_so(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor(None, limits(max_concurrent_children=2))
    children = supervisor.start(
        [spec("stubborn", reports), spec("daemonize", reports, then="pause"), spec("echo", reports)]
    )
    reports.take(2)
    waiting = threading.Thread(target=lambda: supervisor.wait(refs(children)))
    waiting.start()
    assert supervisor.close()
    assert reports.everybody_is_gone()
    statuses = supervisor.status(refs(children))
    assert {(status.state, status.exited) for status in statuses} == {(ChildState.CANCELLED, True)}
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_starts_and_closes_on_two_threads_lose_no_child(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    stop = threading.Event()

    def close() -> None:
        while not stop.is_set():
            supervisor.close()

    closing = threading.Thread(target=close)
    closing.start()
    try:
        for _ in range(8):
            [status] = supervisor.wait(refs(supervisor.start([spec("exit", code=0)])), DEADLINE_S)
            assert status.done, "a child was posted to a thread that had ended"
    finally:
        stop.set()
        closing.join(DEADLINE_S)


def test_an_error_of_our_own_in_the_loop_ends_every_child_and_the_loop_goes_on(
    make_supervisor: Make, reports: Reports, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("pause", reports), spec("stubborn", reports)])
    reports.take(2)

    def bug() -> None:
        raise RuntimeError("a bug of ours")

    supervisor._core.reactor.post(bug)
    for status in supervisor.wait(refs(children), DEADLINE_S):
        assert (status.state, status.exited) == (ChildState.FAILED, True)
        assert "a bug of ours" in str(status.error)
    assert reports.everybody_is_gone()
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED


def test_what_is_wrong_with_one_child_leaves_no_other_running_when_the_nursery_is_lost(
    make_supervisor: Make, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make_supervisor()
    children = supervisor.start([spec("pause", reports) for _ in range(3)])
    reports.take(3)
    owner = supervisor._core.reactor._owner
    on_exited = owner.on_exited

    def broken(message: Any, error: str | None = None) -> None:
        if message.id == children[0].id:
            raise RuntimeError("a bug of ours")
        on_exited(message, error)

    monkeypatch.setattr(owner, "on_exited", broken)
    os.kill(nursery_of(supervisor), signal.SIGKILL)
    statuses = supervisor.wait(refs(children[1:]), DEADLINE_S)
    assert [status.state for status in statuses] == [ChildState.FAILED] * 2
    monkeypatch.undo()
    assert supervisor.stop("close", QUICK).ok


def test_a_child_that_nobody_could_confirm_is_named_and_a_later_stop_confirms_it(
    make_supervisor: Make, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the supervisor or the nursery does reaches the process: as if it were stuck in the kernel."""
    supervisor = make_supervisor()
    [child] = supervisor.start([spec("pause", reports)])
    pid = reports.next()["pid"]
    with monkeypatch.context() as patch:
        patch.setattr(supervisor._core.reactor, "stop", lambda *_: None)
        patch.setattr(posix, "signal_pidfd", lambda *_: True)
        report = supervisor.stop("close", Graces(0.05, 0.05, 0.2))
    assert report.survivors == (pid,)
    [status] = supervisor.status(refs([child]))
    assert (status.state, status.exited) == (ChildState.CANCELLED, False)
    again = supervisor.stop("cleanup", QUICK)
    assert (again.ok, is_dead(pid)) == (True, True)
    assert again.duration_s < QUICK.total_s
    assert supervisor.status(refs([child]))[0].exited


def test_an_abandoned_child_leaves_no_descriptor_when_its_episode_is_over(
    make_supervisor: Make, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    before = set(os.listdir("/proc/self/fd"))
    supervisor.start([spec("pause", reports)])
    pid = reports.next()["pid"]
    with monkeypatch.context() as patch:
        patch.setattr(supervisor._core.reactor, "stop", lambda *_: None)
        patch.setattr(posix, "signal_pidfd", lambda *_: True)
        assert not supervisor.stop("close", Graces(0.05, 0.05, 0.2)).ok
    supervisor.begin_episode("the next")
    with Watched(pid) as watched:
        os.kill(pid, signal.SIGKILL)
        assert watched.alive(DEADLINE_S) == []
    finish(supervisor, spec("echo"))  # its exit has been read by now
    assert set(os.listdir("/proc/self/fd")) == before


# ----------------------------------------------------------------------------------------------------------- interrupts


MODULES = ("supervisor.py", "core.py", "stopping.py", "registry.py", "records.py", "reactor.py", "states.py")
CHECKED_AFTER = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
"""Instructions after which the interpreter looks for signals (and nowhere else: a ``with`` is entered without a look)."""


class Interrupter:
    """A trace function that raises KeyboardInterrupt at the n-th point of the modules above at which one could really come."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._previous: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if os.path.basename(frame.f_code.co_filename) not in MODULES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self._can_come_here(frame):
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            self._previous[frame] = frame.f_lasti
        return self

    def _can_come_here(self, frame: FrameType) -> bool:
        code, before = frame.f_code, self._previous.get(frame)
        if before is None or dis.opname[code.co_code[before]] not in CHECKED_AFTER:
            return False
        # A real one would be raised by the instruction before; here it must at least meet the same `with` and `except`.
        return handler_of(code, before) == handler_of(code, frame.f_lasti)


@cache
def handler_of(code: CodeType, offset: int) -> int | None:
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def interrupted(work: Callable[[], Any], number: int) -> bool:
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # in 3.12 it takes effect with the next `settrace`
    sys.settrace(Interrupter(number))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def assert_nobody_keeps_the_lock(supervisor: Supervisor) -> None:
    assert supervisor._core.lock.acquire(timeout=5.0)  # the reactor may hold it for a moment
    supervisor._core.lock.release()


def assert_a_stop_confirms(supervisor: Supervisor, number: int) -> None:
    assert_nobody_keeps_the_lock(supervisor)
    report = supervisor.stop("close", Graces(5, 5, 5))
    assert report.ok, f"point {number}"
    assert report.duration_s < 4.0, f"point {number}"
    assert supervisor.live_ids == []
    supervisor.begin_episode(str(number))  # so that there are no more points at the end than at the beginning


def test_an_interrupt_at_any_point_of_a_start_leaves_no_lock_and_no_child(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    number, again = 0, True
    while again:
        number += 1
        specs = [spec("pause", reports), spec("pause", reports)]
        again = interrupted(lambda specs=specs: supervisor.start(specs), number)  # type: ignore[misc]
        assert_a_stop_confirms(supervisor, number)
        for one in specs:
            one.close()  # an interrupt may come before the first line of `start`
    assert number > 40
    assert finish(supervisor, spec("echo"))[0].state is ChildState.COMPLETED
    assert reports.everybody_is_gone()


def test_an_interrupt_at_any_point_of_a_wait_leaves_no_lock_and_the_child_running(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    [child] = supervisor.start([spec("pause", reports)])
    reports.next()
    number = 1
    while interrupted(lambda: supervisor.wait(refs([child]), 0.0), number):
        number += 1
        assert_nobody_keeps_the_lock(supervisor)
    assert number > 20
    assert not supervisor.wait(refs([child]), 0.0)[0].done
    assert supervisor.stop("close", QUICK).ok


def test_an_interrupt_at_any_point_of_a_stop_leaves_no_lock_and_the_next_stop_confirms(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    finish(supervisor, spec("echo"))
    number, again = 0, True
    while again:
        number += 1
        supervisor.start([spec("pause", reports)])
        reports.next()
        again = interrupted(lambda: supervisor.stop("cancel", Graces(5, 5, 5)), number)
        assert_nobody_keeps_the_lock(supervisor)
        for record in supervisor._core.registry.live():
            if (
                record.phase is Phase.STOPPING
            ):  # who has been marked has been told, too, and ends without a further stop
                assert supervisor.wait([(record.id, None)], 5.0)[0].done, f"point {number}"
        assert_a_stop_confirms(supervisor, number)
    assert number > 40
    assert reports.everybody_is_gone()


def test_a_wait_in_the_main_thread_is_interrupted_at_once(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor()
    [child] = supervisor.start([spec("pause", reports)])
    reports.next()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            supervisor.wait(refs([child]), DEADLINE_S)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < DEADLINE_S / 2
    assert supervisor._core.registry._waiters == {}
    assert supervisor.stop("close", QUICK).ok
