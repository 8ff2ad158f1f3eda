"""What the tests of the process layer share: specs, reports of children, and looking at processes without sleeping."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlm_kernel.children import posix
from rlm_kernel.children.core import Ref
from rlm_kernel.children.records import ChildSpec, Limits
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.values import ChildStatus, Graces

ROOT = str(Path(__file__).resolve().parents[2])
ENTRY = "tests.children.entries:run"
DEADLINE_S = 15.0
"""Seconds after which a test gives up on an event. It never waits this long for one that comes."""

QUICK = Graces(0.15, 0.15, 1.0)
"""Graces for tests in which something does not react to the first two steps."""

BUDGET_SLACK_S = 0.25
"""What a stop may take beyond the graces that it had to wait for."""


class Reports:
    """A pipe on which children tell what they have done. A ``with`` block."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._buffer = b""

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_writer()
        os.close(self._reader)

    def attach(self) -> tuple[int, ...]:
        """Return a copy of the write end for one child."""
        return (os.dup(self._writer),)

    def close_writer(self) -> None:
        if self._writer >= 0:
            writer, self._writer = self._writer, -1
            os.close(writer)

    def next(self) -> dict[str, Any]:
        """Wait for the next report."""
        while b"\n" not in self._buffer:
            assert readable(self._reader), "no report came"
            data = os.read(self._reader, 65536)
            assert data, "every process that could report is gone"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        report: dict[str, Any] = json.loads(line)
        return report

    def take(self, count: int) -> list[dict[str, Any]]:
        return [self.next() for _ in range(count)]

    def wait_until_everybody_is_gone(self) -> None:
        """Wait until no process holds the write end any more."""
        self.close_writer()
        while readable(self._reader):
            if not os.read(self._reader, 65536):
                return
        raise AssertionError("somebody still holds the pipe")

    def everybody_is_gone(self) -> bool:
        """Tell whether no process holds the write end any more: the children, and all that they have forked."""
        self.close_writer()
        while readable(self._reader, 0.0):
            data = os.read(self._reader, 65536)
            if not data:
                return True
        return False


def readable(fd: int, timeout_s: float = DEADLINE_S) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def spec(do: str, reports: Reports | None = None, *, timeout_s: float | None = None, **task: Any) -> ChildSpec:
    return ChildSpec(
        entry=ENTRY,
        task=json.dumps({"do": do, **task}).encode(),
        inherited=b"",
        environ=environ(),
        secret_environ={},
        cwd=ROOT,
        sys_path=tuple(sys.path),
        timeout_s=timeout_s,
        attachments=() if reports is None else reports.attach(),
    )


def environ() -> Mapping[str, str]:
    return dict(os.environ)


def limits(**changes: Any) -> Limits:
    return Limits(**{"max_depth": 5, "max_children_total": 10**6, "max_concurrent_children": 32, **changes})


def refs(statuses: list[ChildStatus]) -> list[Ref]:
    return [(status.id, None) for status in statuses]


def finish(supervisor: Supervisor, *specs: ChildSpec, timeout_s: float = DEADLINE_S) -> list[ChildStatus]:
    """Start children and wait for their end."""
    statuses = supervisor.wait(refs(supervisor.start(specs)), timeout_s)
    assert all(status.done for status in statuses), statuses
    return statuses


def nursery_of(supervisor: Supervisor) -> int:
    """Return the pid of its nursery, which must exist: ``os.kill(0, …)`` would hit the tests themselves."""
    pid = supervisor.nursery_pid
    assert pid
    return pid


def is_gone(pid: int) -> bool:
    """Tell whether a process is gone entirely: not even a zombie is left."""
    return posix.parent_and_state(pid) is None


def is_dead(pid: int) -> bool:
    """The same, but somebody else's zombie counts as dead: not every parent reaps at once."""
    seen = posix.parent_and_state(pid)
    return seen is None or seen[1] == "Z"


class Watched:
    """Processes that are watched through pidfds, so that their end is an event. A ``with`` block."""

    def __init__(self, *pids: int) -> None:
        self._pidfds = {pid: pidfd for pid in pids if (pidfd := posix.open_pidfd(pid)) is not None}
        assert len(self._pidfds) == len(pids), f"not all of {pids} were alive"

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def alive(self, timeout_s: float = 0.0) -> list[int]:
        """Return those that have not ended within the time."""
        return [pid for pid, pidfd in self._pidfds.items() if not posix.pidfd_has_exited(pidfd, timeout_s)]
