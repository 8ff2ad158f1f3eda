"""The sweep finds what no parent can confirm any more, by marker or by session, and touches nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from rlm_kernel.children import posix
from rlm_kernel.children.sweep import kill_marked

Start = Callable[..., "subprocess.Popen[bytes]"]
TOKEN = f"a1b2-{os.getpid()}"  # not that of another run beside this one
MARKER = f"RLM_SWEEP_TEST={TOKEN}"


@pytest.fixture
def start(no_leftovers: None) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str, **more: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command or ("/bin/sleep", "1000"), **{"env": {}, **more})  # type: ignore[call-overload]
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def marked(value: str = TOKEN, **more: str) -> dict[str, str]:
    return {"RLM_SWEEP_TEST": value, **more}


def test_everything_with_the_marker_is_killed_and_confirmed_and_nothing_else(start: Start) -> None:
    ours = [start(env=marked()), start(env=marked(OTHER="x"), start_new_session=True)]
    others = [start(env=marked(TOKEN + "c3")), start(env={"X": MARKER}), start(env={})]
    assert kill_marked(MARKER, time.monotonic() + 5) == ()
    assert [process.poll() is not None for process in ours] == [True, True]
    assert [process.poll() for process in others] == [None] * 3


def test_a_process_that_ignores_signals_goes_too(start: Start) -> None:
    process = start(
        "/bin/sh", "-c", "trap '' TERM INT HUP; echo ready; while :; do sleep 1000; done", env=marked(), stdout=-1
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert kill_marked(MARKER, time.monotonic() + 5) == ()
    assert process.wait(5) == -signal.SIGKILL
    process.stdout.close()


def test_who_is_in_the_session_of_a_dead_child_is_found_without_the_marker(start: Start) -> None:
    leader = start("/bin/sh", "-c", "sleep 1000 & echo $!; wait", start_new_session=True, env=marked(), stdout=-1)
    assert leader.stdout is not None
    inner = int(leader.stdout.readline())
    leader.stdout.close()
    pidfd = posix.open_pidfd(inner)
    assert pidfd is not None
    leader.kill()
    leader.wait()
    unmarked_in_session = posix.session_of(inner)
    assert unmarked_in_session == leader.pid
    assert kill_marked("RLM_SWEEP_TEST=other", time.monotonic() + 5, sessions={leader.pid}) == ()
    assert posix.pidfd_has_exited(pidfd)
    os.close(pidfd)


def test_a_dead_leader_that_nobody_has_reaped_yet_still_names_its_session(start: Start) -> None:
    leader = start("/bin/sh", "-c", "sleep 1000 & echo $!; wait", start_new_session=True, env=marked(), stdout=-1)
    assert leader.stdout is not None
    inner = int(leader.stdout.readline())
    leader.stdout.close()
    inner_fd, leader_fd = posix.open_pidfd(inner), posix.open_pidfd(leader.pid)
    assert inner_fd is not None
    assert leader_fd is not None
    leader.kill()
    assert posix.pidfd_has_exited(leader_fd, 5)
    assert kill_marked("RLM_SWEEP_TEST=other", time.monotonic() + 5, sessions={leader.pid}) == ()
    assert posix.pidfd_has_exited(inner_fd)
    os.close(inner_fd)
    os.close(leader_fd)


def test_a_session_whose_number_belongs_to_a_living_stranger_is_left_alone(start: Start) -> None:
    stranger = start("/bin/sh", "-c", "sleep 1000 & echo $!; wait", start_new_session=True, env={"A": "b"}, stdout=-1)
    assert stranger.stdout is not None
    inner = int(stranger.stdout.readline())
    stranger.stdout.close()
    pidfd = posix.open_pidfd(inner)
    assert pidfd is not None
    assert kill_marked(MARKER, time.monotonic() + 5, sessions={stranger.pid}) == ()
    assert not posix.pidfd_has_exited(pidfd)
    assert stranger.poll() is None
    posix.signal_pidfd(pidfd, signal.SIGKILL)
    assert posix.pidfd_has_exited(pidfd, 5)
    os.close(pidfd)


def test_what_cannot_be_confirmed_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(env=marked())
    monkeypatch.setattr(posix, "signal_pidfd", lambda *_: True)
    assert kill_marked(MARKER, time.monotonic() - 1) == (process.pid,)


def test_a_pid_that_changed_hands_in_mid_look_is_not_signalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(env=marked())
    looks: list[int] = []

    def has(pid: int, entry: bytes) -> bool:
        if pid != process.pid:
            return False
        looks.append(pid)
        return len(looks) == 1  # by the second look the number is somebody else's

    monkeypatch.setattr(posix, "environ_has", has)
    assert kill_marked(MARKER, time.monotonic() + 5) == ()
    assert process.poll() is None


def test_the_sweeping_process_itself_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "environ_has", lambda pid, _entry: pid == os.getpid())
    assert kill_marked(MARKER, time.monotonic() + 5) == ()
