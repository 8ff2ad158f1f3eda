"""What the state machine needs to look, to wait, and to do several things at the same time."""

from __future__ import annotations

import contextlib
import faulthandler
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.errors import EpisodeClosing, UsageMistake
from rlm_kernel.values import ChildStatus
from tests.children import machine_proc as proc
from tests.children.helpers import Reports, readable

SETTLE_S = 5.0
"""Seconds for messages that are under way."""


class Told(Reports):
    """Reports that can be taken without waiting for more of them."""

    def rest(self) -> list[dict[str, Any]]:
        taken = []
        while b"\n" in self._buffer or readable(self._reader, 0.0):
            taken.append(self.next())
        return taken


def is_our_program(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read() == b"/bin/sleep\x001000\x00"
    return False


def lineage(status: ChildStatus, everybody: dict[str, ChildStatus]) -> set[str]:
    """Return the ids of a child and of all above it."""
    ids = {status.id}
    while status.parent_id is not None:
        status = everybody[status.parent_id]
        ids.add(status.id)
    return ids


def disagreements(sup: Supervisor) -> list[str]:
    """Compare the registry with ``/proc``. What messages under way can explain is returned, all else raises."""
    before = sup.status()
    nursery, seen = sup.nursery_pid, proc.marked()
    below_nursery = set() if nursery is None else proc.children_of(nursery)
    after = {status.id: status for status in sup.status()}
    expected = {status.pid for status in after.values() if status.pid is not None and not status.exited}
    wrong = []
    for status in before:
        if status.pid is None:
            continue
        if status.exited:
            assert status.pid not in seen or status.pid in expected, f"confirmed gone, and lives: {status}"
        elif not after[status.id].exited:
            at = seen.get(status.pid)
            if at is None:
                wrong.append(f"{status.id} has no process")
            elif at.parent != nursery:
                wrong.append(f"{status.id} is below {at.parent}, not below the nursery {nursery}")
    wrong += [
        f"nobody knows {at}" for at in seen.values() if at.pid != nursery and not proc.descends_from(at, expected)
    ]
    wrong += [f"the nursery has a child that nobody knows: {proc.look(pid)}" for pid in below_nursery - expected]
    return wrong


def eventually(holds: Callable[[], bool], otherwise: str | Callable[[], str], within_s: float = SETTLE_S) -> None:
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        select.select([], [], [], 0.002)


def delayed(work: Callable[[], object], seconds: float) -> Callable[[], object]:
    """Spread what happens at the same time a little: the race is what is wanted here."""

    def run() -> object:
        select.select([], [], [], seconds)
        return work()

    return run


REFUSALS = (EpisodeClosing, UsageMistake)
"""What a verb or an end that came first may lead to."""


@contextlib.contextmanager
def threads(*works: Callable[[], object]) -> Iterator[None]:
    """Run each on a thread of its own, beside the block. Whatever one raises is raised in the end; a hang is a failure."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except REFUSALS:
            return
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        for thread in running:
            thread.join(4 * SETTLE_S)
        if any(thread.is_alive() for thread in running):
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError("a call hangs")
    if errors:
        raise errors[0]
