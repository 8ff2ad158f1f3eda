"""The machinery itself fails: threads that cannot start, bugs of ours, no processes, no descriptors, broken channels, full disks.

Each ends in a clear state with a readable reason, and nothing hangs or is left (the fixture ``no_leftovers`` looks after every test).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.children import reactor
from rlm_kernel.children.arrivals import Arrivals
from rlm_kernel.children.reactor import Reactor
from rlm_kernel.children.records import ChildSpec
from rlm_kernel.children.supervisor import NurserySettings, Supervisor
from rlm_kernel.errors import NurseryError
from rlm_kernel.loop.trajectory import read_trajectory
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState, ChildStatus, Graces
from tests.children import fault_entries as faults
from tests.children.fault_matrix import HeldReactor, SpawnSent
from tests.children.helpers import (
    BUDGET_SLACK_S,
    DEADLINE_S,
    QUICK,
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


def one(statuses: list[ChildStatus]) -> ChildStatus:
    [status] = statuses
    return status


def works(supervisor: Supervisor) -> bool:
    return one(finish(supervisor, spec("echo"))).state is ChildState.COMPLETED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(faults.DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def pipes(folder: Path) -> Iterator[dict[str, int]]:
    fds = {}
    for name in ("at", "go-boot"):
        os.mkfifo(folder / name)
        fds[name] = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
    yield fds
    for fd in fds.values():
        os.close(fd)


def with_warm_up(name: str, **more: Any) -> NurserySettings:
    return NurserySettings(warm_up=f"tests.children.fault_entries:{name}", **more)


@contextlib.contextmanager
def without_thread(name: str) -> Iterator[None]:
    """The operating system has no thread of that name to give."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError("can't start new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """This process may open nothing any more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


# -------------------------------------------------------------------------------------------------------------- threads


def test_without_a_supervisor_thread_a_start_raises_and_takes_everything_back(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    before = set(os.listdir("/proc/self/fd"))
    with without_thread("rlm-supervisor"):
        with pytest.raises(NurseryError, match="cannot start the supervisor thread: can't start new thread"):
            supervisor.start([spec("echo", reports), spec("echo", reports)])
        assert supervisor.live_ids == []
        assert {(s.state, s.exited) for s in supervisor.status()} <= {(ChildState.CANCELLED, True)}
        supervisor.release_held()
        assert supervisor.stop("close", QUICK).ok
        reader, writer = os.pipe()
        os.close(writer)
        with pytest.raises(NurseryError):
            supervisor.hold("key", reader, text=False)
        assert set(os.listdir("/proc/self/fd")) == before
    assert works(supervisor)


def test_without_an_observer_thread_children_run_and_what_is_not_told_is_counted(make_supervisor: Make) -> None:
    supervisor = make_supervisor(on_change=lambda _status: None)
    with without_thread("rlm-observers"):
        assert works(supervisor)
    assert supervisor.observers.dropped > 0


def test_without_a_thread_for_its_cancel_a_child_gets_an_error_and_nobody_else_is_harmed(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    bystander = supervisor.start([spec("pause", reports)])
    reports.next()
    child = spec("parent", children=[{"do": "pause"}])
    child.entry = "tests.children.fault_entries:start_and_cancel"
    with without_thread("rlm-cancel"):
        status = one(finish(supervisor, child))
    assert status.state is ChildState.COMPLETED
    assert "can't start new thread" in str(status.result)
    assert one(supervisor.status(refs(bystander))).state is ChildState.RUNNING
    assert supervisor.stop("close", QUICK).ok


# ------------------------------------------------------------------------------------------------------------ bugs of ours


def eater() -> ChildSpec:
    child = spec("echo")
    child.entry = "tests.children.fault_entries:eat_memory"
    return child


SITUATIONS: dict[str, Callable[[Supervisor, Reports], object]] = {
    "on_nursery_ready": lambda sup, reports: sup.start([spec("echo")]),
    "on_started": lambda sup, reports: sup.start([spec("pause"), spec("pause"), spec("pause")]),
    "on_spawn_failed": lambda sup, reports: sup.start([spec("echo")]),
    "on_timed_out": lambda sup, reports: sup.start([spec("pause", timeout_s=0.05)]),
    "on_over_limit": lambda sup, reports: sup.start([eater()]),
    "on_exited": lambda sup, reports: sup.start([spec("exit", code=0), spec("exit", code=0)]),
    "on_message": lambda sup, reports: sup.start([spec("parent", reports, children=[{"do": "pause"}] * 3)]),
    "on_output": lambda sup, reports: sup.start([spec("echo")]),
    "on_broken": lambda sup, reports: sup.start([spec("garbage")]),
}


def slow_to_go_on_after_a_post(monkeypatch: pytest.MonkeyPatch, until: threading.Event) -> None:
    """Have a thread that hands work to the supervisor thread go on only when an event has come: its slowest order."""
    usual = Reactor.post

    def post(self: Reactor, *work: Callable[[], None]) -> None:
        usual(self, *work)
        if threading.current_thread() is threading.main_thread():
            until.wait(DEADLINE_S)

    monkeypatch.setattr(Reactor, "post", post)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("callback", SITUATIONS)
def test_an_error_of_our_own_wherever_it_comes_ends_in_terminal_states_and_the_loop_goes_on(
    make_supervisor: Make,
    reports: Reports,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    callback: str,
    when: str,
) -> None:
    supervisor = make_supervisor(with_warm_up("warm_up_without_forks"), limits(memory_limit_bytes=60_000_000))
    if callback != "on_nursery_ready":
        supervisor.start([spec("pause", reports)])
        reports.next()
    if callback == "on_spawn_failed":
        (folder / "no-forks").write_text("1")
    usual = getattr(Arrivals, callback)
    raised = threading.Event()

    def broken(self: Arrivals, *args: Any, **options: Any) -> None:
        if raised.is_set():
            usual(self, *args, **options)
            return
        if when == "after":
            usual(self, *args, **options)
        elif callback == "on_started":
            os.close(args[2])  # it is the callback's to close
        elif callback == "on_message":
            for fd in args[2]:
                os.close(fd)
        raised.set()
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Arrivals, callback, broken)
    if callback == "on_started":
        slow_to_go_on_after_a_post(monkeypatch, raised)
    SITUATIONS[callback](supervisor, reports)
    assert raised.wait(DEADLINE_S), "this callback was not called"
    statuses = supervisor.wait(refs(supervisor.status()), DEADLINE_S)
    assert all(status.done for status in statuses)
    assert all(status.exited for status in statuses)
    if callback != "on_nursery_ready":
        assert statuses[0].state is ChildState.FAILED
        assert "a bug of ours" in str(statuses[0].error)
    assert supervisor.stop("close", QUICK).ok
    assert works(supervisor)


def test_a_supervisor_thread_that_is_held_up_for_the_whole_of_a_stop_is_named_as_the_survivors_are_and_confirms_later(
    make_supervisor: Make,
) -> None:
    supervisor = make_supervisor()
    assert works(supervisor)
    held = HeldReactor()
    try:
        child = supervisor.start([spec("stubborn")])
        assert held.reached.wait(DEADLINE_S)
        nursery = nursery_of(supervisor)
        graces = Graces(0.05, 0.05, 0.3)
        report = supervisor.stop("close", graces)
        assert not report.ok
        assert report.survivors == (nursery,)
        assert report.duration_s < graces.total_s + BUDGET_SLACK_S
        status = one(supervisor.status(refs(child)))
        assert (status.state, status.exited) == (ChildState.CANCELLED, False)
    finally:
        held.release()
    assert works(supervisor)  # what was held up has been told by now
    assert supervisor.stop("cleanup", QUICK).ok
    assert one(supervisor.status(refs(child))).exited


def test_callbacks_that_block_keep_no_verb_from_confirming(make_supervisor: Make, reports: Reports) -> None:
    go = threading.Event()
    supervisor = make_supervisor(on_change=lambda _status: go.wait(DEADLINE_S))
    supervisor.start([spec("pause", reports), spec("stubborn", reports)])
    pids = [report["pid"] for report in reports.take(2)]
    report = supervisor.stop("close", QUICK)
    go.set()
    assert report.ok
    assert report.duration_s < QUICK.total_s + BUDGET_SLACK_S
    assert all(is_dead(pid) for pid in pids)


# ------------------------------------------------------------------------------------------------------------- no processes


def test_a_fork_that_the_system_refuses_fails_that_child_readably_and_the_next_one_works(
    make_supervisor: Make, reports: Reports, folder: Path
) -> None:
    supervisor = make_supervisor(with_warm_up("warm_up_without_forks"))
    bystander = supervisor.start([spec("pause", reports)])
    reports.next()
    (folder / "no-forks").write_text("2")
    statuses = finish(supervisor, spec("echo", reports), spec("echo", reports), spec("echo", reports))
    assert [s.state for s in statuses] == [ChildState.FAILED, ChildState.FAILED, ChildState.COMPLETED]
    assert all("Resource temporarily unavailable" in str(s.error) and s.exited and s.pid is None for s in statuses[:2])
    assert one(supervisor.status(refs(bystander))).state is ChildState.RUNNING
    assert supervisor.stop("close", QUICK).ok


# ----------------------------------------------------------------------------------------------------------- no descriptors


def test_without_descriptors_for_the_supervisor_thread_a_start_raises_readably_and_works_again_afterwards(
    make_supervisor: Make,
) -> None:
    supervisor = make_supervisor()
    with without_descriptors():
        with pytest.raises(NurseryError, match="Too many open files"):
            supervisor.start([spec("echo")])
        assert supervisor.live_ids == []
        assert supervisor.stop("close", QUICK).ok
    assert works(supervisor)


def test_without_descriptors_for_a_nursery_the_child_fails_readably(make_supervisor: Make) -> None:
    supervisor = make_supervisor()
    assert works(supervisor)
    with Watched(nursery_of(supervisor)) as watched:
        os.kill(nursery_of(supervisor), signal.SIGKILL)
        assert watched.alive(DEADLINE_S) == []
    while supervisor.nursery_pid is not None:
        supervisor.wait([], 0.0)
    with without_descriptors():
        status = one(finish(supervisor, spec("echo")))
    assert status.state is ChildState.FAILED
    assert "Too many open files" in str(status.error)
    assert works(supervisor)


def test_without_descriptors_verbs_still_confirm(make_supervisor: Make, reports: Reports) -> None:
    supervisor = make_supervisor()
    supervisor.start([spec("stubborn", reports), spec("pause", reports)])
    pids = [report["pid"] for report in reports.take(2)]
    with without_descriptors():
        report = supervisor.stop("close", QUICK)
    assert report.ok
    assert all(is_dead(pid) for pid in pids)
    assert works(supervisor)


def test_an_answer_for_which_the_root_has_no_descriptor_fails_that_child(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor()
    child = spec("echo", reports)
    child.entry = "tests.children.fault_entries:big_answer_when_asked"
    started = supervisor.start([child])
    pid = reports.next()["pid"]
    with without_descriptors():
        os.kill(pid, signal.SIGUSR1)
        status = one(supervisor.wait(refs(started), DEADLINE_S))
    assert (status.state, status.exited) == (ChildState.FAILED, True)
    assert "too many files open" in str(status.error)
    assert works(supervisor)


def test_a_nursery_without_descriptors_ends_in_a_clear_state_and_the_next_one_works(
    make_supervisor: Make, reports: Reports, folder: Path, pipes: dict[str, int]
) -> None:
    supervisor = make_supervisor(with_warm_up("warm_up_without_descriptors"))
    first = supervisor.start([spec("daemonize", reports, then="pause")])
    daemon = reports.next()["daemon"]
    (folder / "no-descriptors").touch()
    second = supervisor.start([spec("exit", code=0)])
    assert readable(pipes["at"]), "its descriptors are not used up"
    third = supervisor.start([spec("echo")])
    statuses = supervisor.wait(refs([*second, *third]), DEADLINE_S)
    assert all(status.done and status.exited for status in statuses)
    assert statuses[1].error
    assert supervisor.stop("close", QUICK).ok
    assert one(supervisor.status(refs(first))).exited
    assert is_dead(daemon)
    with contextlib.suppress(ProcessLookupError, AssertionError):
        os.kill(nursery_of(supervisor), signal.SIGKILL)
    while supervisor.nursery_pid is not None:
        supervisor.wait([], 0.0)
    assert works(supervisor)


# ------------------------------------------------------------------------------------------------------------ full disks


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(where)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_costs_logs_and_trajectories_and_nothing_else(
    full_disk: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: None
) -> None:
    from rlm_kernel.clients.scripted import ScriptedClient

    session = RLMSession(Settings({"run_dir": str(full_disk / "runs")}, environ={}), {})
    noisy = "```repl\nimport os\nfor _ in range(20): os.write(1, b'n' * 10_000)\nprint('x' * 60_000)\n```"
    session.configure_value(
        "client_factory", ScriptedClient.factory([noisy, noisy, "```repl\nFINAL('got through')\n```"])
    )
    try:
        query = session.namespace["rlm_query"]
        assert [query("one"), query("two")] == ["got through"] * 2
        handle = query("three", blocking=False)
        status = handle.wait(DEADLINE_S)
        assert (status.state, status.result) == (ChildState.COMPLETED, "got through")
        assert session.close().ok
        run_folder = session.run_folder
        assert run_folder is not None
        for trajectory in run_folder.glob("*.jsonl"):
            for line in trajectory.read_bytes().split(b"\n")[:-1]:
                json.loads(line)
            read_trajectory(trajectory)
        run_file = run_folder / "run.json"
        assert not run_file.exists() or json.loads(run_file.read_text())["episode_id"] == session.episode_id
        assert session.reset().ok
        assert query("four") == "got through"
    finally:
        assert session.shutdown().ok


# -------------------------------------------------------------------------------------------------------- broken channels

HALF_A_FRAME = struct.pack("!2sBBI", b"RK", 0, 0, 5000) + b"x" * 100


@pytest.mark.parametrize("data", [HALF_A_FRAME, HALF_A_FRAME[:5]], ids=["body", "header"])
def test_half_a_frame_of_a_child_that_ends_is_no_answer(make_supervisor: Make, data: bytes) -> None:
    supervisor = make_supervisor()
    status = one(finish(supervisor, raw(data, "exit")))
    assert (status.state, status.error) == (ChildState.FAILED, "the child exited with code 0 before it had an answer")
    assert works(supervisor)


def test_a_child_that_lingers_behind_half_a_frame_is_ended_by_its_timeout(make_supervisor: Make) -> None:
    supervisor = make_supervisor(None, limits(graces=QUICK))
    status = one(finish(supervisor, raw(HALF_A_FRAME, "pause", timeout_s=0.2)))
    assert (status.state, status.exited) == (ChildState.TIMED_OUT, True)


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 4096,
        struct.pack("!2sBBI", b"RK", 0, 0, 3) + b"\xff\xff\xff",
        struct.pack("!2sBBI", b"RK", 0, 9, 1) + b"\x80",
        struct.pack("!2sBBI", b"RK", 1, 0, 0),
        struct.pack("!2sBBI", b"RK", 0, 0, 2**31),
    ],
    ids=["zeros", "no message", "descriptors that do not come", "a file that does not come", "a huge frame"],
)
def test_garbage_of_a_child_ends_it_and_nobody_else(make_supervisor: Make, reports: Reports, data: bytes) -> None:
    supervisor = make_supervisor()
    bystander = supervisor.start([spec("pause", reports)])
    reports.next()
    status = one(finish(supervisor, raw(data, "pause")))
    assert (status.state, status.exited) == (ChildState.FAILED, True)
    assert "the child's channel is broken" in str(status.error)
    assert one(supervisor.status(refs(bystander))).state is ChildState.RUNNING
    assert supervisor.stop("close", QUICK).ok


def raw(data: bytes, then: str, timeout_s: float | None = None) -> ChildSpec:
    child = spec("raw", timeout_s=timeout_s, data=data.hex(), then=then)
    child.entry = "tests.children.fault_entries:write_raw"
    return child


@pytest.mark.parametrize(
    ("data", "exits"),
    [(b"\0" * 4096, False), (HALF_A_FRAME, True), (HALF_A_FRAME[:5], True), (b"", True)],
    ids=["garbage", "half a frame", "half a header", "end of file"],
)
def test_a_nursery_that_talks_nonsense_fails_its_runs_and_the_next_one_works(
    make_supervisor: Make, reports: Reports, folder: Path, data: bytes, exits: bool
) -> None:
    supervisor = make_supervisor(with_warm_up("warm_up_that_talks_nonsense"))
    first = supervisor.start([spec("daemonize", reports, then="pause")])
    told = reports.next()
    (folder / "nonsense").write_bytes(data)
    if exits:
        (folder / "then-exit").touch()
    second = supervisor.start([spec("pause", reports)])
    statuses = supervisor.wait(refs([*first, *second]), DEADLINE_S)
    assert {(s.state, s.exited) for s in statuses} == {(ChildState.FAILED, True)}
    assert all(
        ("nursery's channel is broken" if data and not exits else "the nursery process ended") in str(s.error)
        for s in statuses
    )
    assert all(is_dead(pid) for pid in (told["pid"], told["daemon"]))
    (folder / "nonsense").unlink()
    assert works(supervisor)


# ------------------------------------------------------------------------------------------- a nursery that is of no use


def test_a_nursery_that_never_becomes_ready_is_given_up_with_a_reason(
    make_supervisor: Make, folder: Path, pipes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reactor, "_BOOT_S", 0.5)
    supervisor = make_supervisor(with_warm_up("warm_up_never"))
    statuses = finish(supervisor, spec("echo"), spec("echo"))
    assert {(s.state, s.exited, s.pid) for s in statuses} == {(ChildState.FAILED, True, None)}
    assert all("the nursery was not ready within 0.5 s" in str(s.error) for s in statuses)


def test_a_warm_up_that_raises_fails_the_run_with_what_the_nursery_wrote(make_supervisor: Make, tmp_path: Path) -> None:
    supervisor = make_supervisor(with_warm_up("warm_up_and_raise", log_path=str(tmp_path / "nursery.log")))
    status = one(finish(supervisor, spec("echo")))
    assert (status.state, status.exited, status.pid) == (ChildState.FAILED, True, None)
    assert "the nursery process ended (exit code 1)" in str(status.error)
    assert str(status.error).endswith("InjectedError: no way to warm up")


def test_a_cancel_that_a_stopped_nursery_does_not_carry_out_names_it_and_is_confirmed_when_it_goes_on(
    make_supervisor: Make, reports: Reports
) -> None:
    supervisor = make_supervisor(None, limits(graces=Graces(0.05, 0.05, 0.3)))
    bystander = supervisor.start([spec("pause", reports)])
    reports.next()
    nursery = nursery_of(supervisor)
    os.kill(nursery, signal.SIGSTOP)
    sent = SpawnSent()
    child = supervisor.start([spec("stubborn")])
    sent.wait()
    report = supervisor.cancel(refs(child)[0])
    assert report.survivors == (nursery,)
    assert one(supervisor.status(refs(child))).state is ChildState.CANCELLED
    os.kill(nursery, signal.SIGCONT)
    assert works(supervisor)
    status = one(supervisor.status(refs(child)))
    while not status.exited:
        supervisor.wait(refs(bystander), 0.005)
        status = one(supervisor.status(refs(child)))
    assert status.state is ChildState.CANCELLED
    assert one(supervisor.status(refs(bystander))).state is ChildState.RUNNING
    assert supervisor.stop("close", QUICK).ok
