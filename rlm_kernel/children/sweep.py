"""Find and kill processes by the environment marker that everything started below a nursery carries.

For what no parent can confirm any more: the nursery was killed, so its children were re-parented, and what they had
started may have survived them. A pidfd is opened first and the marker is read after that, so a pid that was reused in
between is never signalled.
"""

from __future__ import annotations

import os
import signal
import time

from rlm_kernel.children import posix
from rlm_kernel.wire.channel import close_fds

_LOOKS = 3
"""Times to look again: a process that was being forked while the first look went on is found by the second."""


def kill_marked(marker: str, give_up_at: float) -> tuple[int, ...]:
    """Kill every process whose environment holds ``marker``, and wait until each is gone.

    Args:
        marker: ``"NAME=value"``.
        give_up_at: ``time.monotonic()`` after which to stop waiting.

    Returns:
        pids of processes that could not be confirmed gone. Always empty where there are no pidfds or no ``/proc``.
    """
    survivors: dict[int, int] = {}
    for _ in range(_LOOKS):
        found = _open_marked(marker.encode())
        if not found:
            break
        for pidfd in found.values():
            posix.signal_pidfd(pidfd, signal.SIGKILL)
        survivors = {pid: pidfd for pid, pidfd in found.items() if not _wait_gone(pidfd, give_up_at)}
        close_fds(found.values())
        if survivors:
            break
    return tuple(survivors)


def _open_marked(marker: bytes) -> dict[int, int]:
    found = {}
    for pid in posix.all_pids():
        if pid == os.getpid() or not posix.environ_has(pid, marker):
            continue
        pidfd = posix.open_pidfd(pid)
        if pidfd is None:
            continue
        if posix.environ_has(pid, marker):
            found[pid] = pidfd
        else:
            close_fds([pidfd])
    return found


def _wait_gone(pidfd: int, give_up_at: float) -> bool:
    return posix.pidfd_has_exited(pidfd, give_up_at - time.monotonic())
