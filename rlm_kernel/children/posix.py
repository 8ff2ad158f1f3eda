"""Small wrappers over what the operating system offers for watching and containing processes.

Each returns None or False where the platform lacks it, so that callers state their fallback. Nothing here signals a
process by a pid that it does not know to be pinned: `signal_pidfd` takes a pidfd, and whoever calls ``os.kill`` with a
pid must be its parent and not have reaped it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rlm_kernel.errors import ManagedModeRequired

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_PIDFD_OPEN = 434
_SYS_PIDFD_SEND_SIGNAL = 424
"""The same numbers on every Linux architecture (syscalls from 403 on are unified). Some Python builds lack ``os.pidfd_open``."""

_EXEC_WAIT_S = 0.25
"""How long to wait for the end of another process's exec: what one that does not get the processor on a busy machine may need."""

IS_LINUX = sys.platform == "linux"

CAN_FORK = hasattr(os, "fork")
"""Whether children can exist at all: not on Windows."""


def require_fork() -> None:
    """Raise where there can be no children.

    Raises:
        ManagedModeRequired: the platform cannot fork; the message says what works there.
    """
    if not CAN_FORK:
        raise ManagedModeRequired(
            f"children are forked processes, which need a POSIX system; this one is {sys.platform!r}. Use Linux, macOS, or the "
            "Windows Subsystem for Linux. `llm_query(...)` and a blocking `rlm_query(...)`, which is one model call here, work."
        )


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> bool:
    if not IS_LINUX:
        return False
    return bool(
        _libc().prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0
    )


def warm_up() -> None:
    """Load what the functions here need, in a process that is about to fork."""
    if IS_LINUX:
        _libc()


def set_parent_death_signal(signum: int) -> bool:
    """Have the kernel send ``signum`` to this process when the thread that forked it ends.

    The parent may have ended already: compare ``os.getppid()`` with the expected parent after this call.

    Returns:
        whether the platform can.
    """
    return _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> bool:
    """Make orphaned descendants of this process its children rather than init's.

    Returns:
        whether the platform can.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def open_pidfd(pid: int) -> int | None:
    """Open a pidfd of a process that the caller knows to be the right one (its own child, or itself).

    Returns:
        a close-on-exec descriptor that becomes readable when the process exits; None if the platform has none or no
        descriptor is free.
    """
    if not IS_LINUX:
        return None
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        fd = int(_libc().syscall(_SYS_PIDFD_OPEN, pid, 0))
    except OSError:
        return None
    return fd if fd >= 0 else None


def pidfd_has_exited(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Tell whether the process behind a pidfd has exited (it may still be a zombie), waiting up to ``timeout_s`` seconds for it."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def signal_pidfd(pidfd: int, signum: int) -> bool:
    """Send a signal through a pidfd: it reaches that process or none.

    Returns:
        whether the process was still there.
    """
    try:
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(pidfd, signum)
            return True
        if _libc().syscall(_SYS_PIDFD_SEND_SIGNAL, pidfd, signum, None, 0) == 0:
            return True
        if ctypes.get_errno() in (errno.ESRCH, errno.EPERM):
            return False
        raise OSError(ctypes.get_errno(), "pidfd_send_signal")
    except (ProcessLookupError, PermissionError):
        return False


def kill_group(pgid: int, signum: int) -> bool:
    """Signal a process group whose leader the caller has not reaped yet (so its number cannot have been reused).

    Returns:
        whether anything was there to signal.
    """
    try:
        os.killpg(pgid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def thread_count() -> int:
    """Return how many threads this process has, as the operating system counts them."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def thread_names() -> list[str]:
    """Name the threads of this process other than the main one: Python's names, and the operating system's for native ones."""
    import threading

    python = {t.native_id: t.name for t in threading.enumerate()}
    try:
        ids = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    names = []
    for tid in sorted(ids):
        if tid == os.getpid():
            continue
        try:
            comm = Path(f"/proc/self/task/{tid}/comm").read_text("utf-8", "replace").strip()
        except OSError:
            continue
        names.append(python.get(tid) or f"native thread {comm!r}")
    return names


def _stat_fields(pid: int) -> list[bytes] | None:
    """Return the fields of `proc(5)`'s ``stat`` from the third (the state) on, None if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and parentheses; the fields after the last one are regular.
    return stat[stat.rindex(b")") + 2 :].split()


def parent_and_state(pid: int) -> tuple[int, str] | None:
    """Return the parent pid and the state letter of a process, None if it is gone."""
    fields = _stat_fields(pid)
    return None if fields is None else (int(fields[1]), fields[0].decode())


def session_of(pid: int) -> int | None:
    """Return the session id of a process, None if it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def all_pids() -> Iterator[int]:
    """Yield the pids of all visible processes; none where there is no ``/proc``."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    yield from (int(name) for name in names if name.isdecimal())


def children_of_this_process() -> list[int]:
    """Return the pids of all direct children, zombies included. Empty where there is no ``/proc``."""
    me = os.getpid()
    try:
        listed = Path(f"/proc/self/task/{me}/children").read_bytes()
    except OSError:
        return [pid for pid in all_pids() if (seen := parent_and_state(pid)) is not None and seen[0] == me]
    return [int(pid) for pid in listed.split()]


def _is_in_exec(pid: int) -> bool:
    """Tell whether a process has a new address space already, but no environment in it yet: fields 23 and 51 of ``stat``."""
    fields = _stat_fields(pid)
    return fields is not None and len(fields) > 48 and fields[20] != b"0" and fields[48] == b"0"


def _settled_environ(pid: int) -> bytes:
    """Read the environment that a process was exec'ed with, of one in the middle of an exec when that is over.

    In there the file reads as empty, and who looks just then would take the process for a stranger. The kernel reports the
    end of somebody else's exec to nobody, so this looks again; an exec takes microseconds once it has the processor.

    Raises:
        OSError: it is gone, or belongs to somebody else.
    """
    give_up_at = time.monotonic() + _EXEC_WAIT_S
    while True:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if environ or not _is_in_exec(pid) or time.monotonic() >= give_up_at:
            # The exec may have ended between the two looks.
            return environ or Path(f"/proc/{pid}/environ").read_bytes()
        time.sleep(0.0005)


def is_foreign(pid: int, entry: bytes) -> bool:
    """Tell whether a living process has this pid and was exec'ed without ``NAME=value`` in its environment.

    One that is just ending, or a zombie, shows no environment any more, or gives an error: it is not taken for foreign.
    """
    try:
        environ = _settled_environ(pid)
    except PermissionError:
        seen = parent_and_state(pid)
        return seen is not None and seen[1] not in "ZX"
    except OSError:
        return False
    return bool(environ) and entry not in environ.split(b"\0")


def environ_has(pid: int, entry: bytes) -> bool:
    """Tell whether the environment a process was exec'ed with holds ``NAME=value`` exactly. False if it cannot be read."""
    try:
        environ = _settled_environ(pid)
    except OSError:
        return False
    return entry in environ.split(b"\0")


def address_space_bytes(pid: int) -> int | None:
    """Return the size of a process's address space, None where that cannot be read."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def private_bytes(pid: int) -> int | None:
    """Return the memory that a process has to itself: private pages and swap, not what it shares with its parent by a fork.

    None where that cannot be read (`proc(5)`, ``smaps_rollup``).
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    except OSError:
        return None
    wanted = (b"Private_Clean:", b"Private_Dirty:", b"Swap:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


def environ_value(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was exec'ed with, None if it has none or cannot be read."""
    try:
        environ = _settled_environ(pid)
    except OSError:
        return None
    prefix = f"{name}=".encode()
    found = next((entry for entry in environ.split(b"\0") if entry.startswith(prefix)), None)
    return None if found is None else found[len(prefix) :].decode("utf-8", "replace")
