"""Find and kill processes by the environment marker that everything started below a nursery carries.

For what no parent can confirm any more: the nursery was killed, so its children were re-parented, and what they had
started may have survived them. A pidfd is opened first and the marker is read after that, so a pid that was reused in
between is never signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

from rlm_kernel.children import posix
from rlm_kernel.wire.channel import close_fds

_LOOKS = 3
"""Times to look again: a process that was being forked while the first look went on is found by the second."""


def kill_marked(marker: str, give_up_at: float, sessions: Collection[int] = ()) -> tuple[int, ...]:
    """Kill every process whose environment holds ``marker``, and wait until each is gone.

    Args:
        marker: ``"NAME=value"``.
        sessions: pids of children that have just ended: who is in the session of one of them came from it, though its
            environment may have been replaced. (The number cannot have been taken anew while somebody is in the session.)
        give_up_at: ``time.monotonic()`` after which to stop waiting.

    Returns:
        pids of processes that could not be confirmed gone. Always empty where there are no pidfds or no ``/proc``.
    """
    survivors: dict[int, int] = {}
    for _ in range(_LOOKS):
        found = _open_marked(marker.encode(), sessions)
        if not found:
            break
        for pidfd in found.values():
            posix.signal_pidfd(pidfd, signal.SIGKILL)
        survivors = {pid: pidfd for pid, pidfd in found.items() if not _wait_gone(pidfd, give_up_at)}
        close_fds(found.values())
        if survivors:
            break
    return tuple(survivors)


def _open_marked(marker: bytes, sessions: Collection[int]) -> dict[int, int]:
    def is_ours(pid: int) -> bool:
        return posix.environ_has(pid, marker) or posix.session_of(pid) in trusted

    # A number that somebody else's process has taken meanwhile says nothing about who is in "its" session.
    trusted = {pid for pid in sessions if not posix.is_foreign(pid, marker)}

    found = {}
    for pid in posix.all_pids():
        if pid == os.getpid() or not is_ours(pid):
            continue
        pidfd = posix.open_pidfd(pid)
        if pidfd is None:
            continue
        if is_ours(pid):
            found[pid] = pidfd
        else:
            close_fds([pidfd])
    return found


def _wait_gone(pidfd: int, give_up_at: float) -> bool:
    return posix.pidfd_has_exited(pidfd, give_up_at - time.monotonic())
