"""What holds for every test."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_END_TO_END = Path(__file__).parent / "end_to_end"

_TAG = "RLM_KERNEL_TESTS"
"""Tells our processes from those of another test run on the same machine: everything started from here inherits it."""
os.environ[_TAG] = str(os.getpid())

_JOIN_S = 5.0
"""Seconds for a thread of ours that is just ending."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test marked ``alone`` run while the other workers of a parallel run wait, its fixtures included."""
    lock = _turns(item.config)
    if lock is None:
        return (yield)
    fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


@functools.cache
def _turns(config: pytest.Config) -> int | None:
    """Open the file whose lock the workers of a parallel run share; None in a run without workers."""
    if not hasattr(config, "workerinput"):
        return None
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return os.open(factory.getbasetemp().parent / "turns", os.O_RDWR | os.O_CREAT, 0o600)


def pytest_collection_finish() -> None:
    """Take everything that was imported out of the garbage collector's way: several thousand tests make each collection slow."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in ``tests/end_to_end``, so that nobody has to remember to."""
    for item in items:
        if _END_TO_END in item.path.parents:
            item.add_marker(pytest.mark.end_to_end)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """After each test no process, thread or descriptor of ours is left that was not there before (fixtures of a wider scope stay).

    What is found is named, and processes are killed, so that one test's fault does not become the next one's.
    """
    pids, fds, threads = _all_pids(), set(_open_fds()), _our_threads()
    yield
    for thread in _our_threads() - threads:
        thread._started.wait(_JOIN_S)  # type: ignore[attr-defined]  # one that is just being started cannot be joined yet
        thread.join(_JOIN_S)
    left = [f"thread {thread.name}" for thread in _our_threads() - threads]
    left += [f"process {pid}: {command}" for pid, command in _our_processes(pids).items()]
    if set(_open_fds()) - fds:
        gc.collect()  # a socket or file in a cycle of garbage is no leak
        left += [f"descriptor {fd}: {target}" for fd, target in _open_fds().items() if fd not in fds]
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


def _our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rlm-")}


def _all_pids() -> set[int]:
    with suppress(OSError):
        return {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    return set()


def _open_fds() -> dict[int, str]:
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing's own descriptor
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _our_processes(before: set[int]) -> dict[int, str]:
    """Kill and name what is new: children of this process, and whatever carries the marker of a nursery started from here."""
    children: set[int] = set()
    with suppress(OSError):
        for tid in os.listdir("/proc/self/task"):
            with suppress(OSError):
                children.update(map(int, Path(f"/proc/self/task/{tid}/children").read_bytes().split()))
    found = {}
    tag = f"{_TAG}={os.getpid()}".encode()
    for pid in _all_pids() - before:
        with suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            marked = tag in environ and any(entry.startswith(b"RLM_KERNEL_NURSERY=") for entry in environ)
            if marked or pid in children:
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:200]
                )
                os.kill(pid, signal.SIGKILL)
                if pid in children:
                    os.waitpid(pid, 0)
    return found
