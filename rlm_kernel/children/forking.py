"""The one place where this project forks, and the one list of what a fork must reset.

Who runs it: `fork` runs in the nursery process, on its only thread. `reset_in_child` runs in the new process, first
thing.

How each step can fail:

* the nursery has a second thread: `fork` refuses (`ForkRefused`); a fork could copy a lock that nobody in the child ever releases;
* ``fork`` itself fails (EAGAIN, ENOMEM): OSError to the nursery, which reports it; no process came to be;
* a signal arrives between fork and the child's own handlers: SIGINT, SIGTERM and SIGHUP are blocked across the fork and unblocked
  by the child when its handlers stand, so an early stop is delivered late, never lost and never handled by the
  nursery's code;
* the nursery dies before the child has armed its parent-death signal: the child compares its parent with the expected one after
  arming, and exits;
* anything in the child raises: the child's side ends in ``os._exit``, so it can neither return into the nursery's loop nor run the
  nursery's exit hooks.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from rlm_kernel.children import posix

HELD_SIGNALS = frozenset(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Blocked across a fork. By name, so that the module can be imported on Windows, which has no SIGHUP."""

EXIT_BROKEN = 70
"""Exit code of a child whose own machinery broke (EX_SOFTWARE in sysexits.h)."""

EXIT_ORPHANED = 71
"""Exit code of a child whose nursery was gone before it had armed its parent-death signal."""

SignalHandler = Callable[[int, FrameType | None], Any]


class ForkRefused(RuntimeError):
    """The process has more than one thread, so a fork would be unsafe."""


def fork(run: Callable[[], int]) -> int:
    """Fork, and run ``run`` in the new process, whose exit code is what it returns.

    Args:
        run: called in the child with the signals in `HELD_SIGNALS` blocked; it must end in an exit code.

    Returns:
        the pid of the child. Only the parent returns from here.

    Raises:
        ForkRefused: this process has more than one thread.
        OSError: the operating system refused.
    """
    if posix.thread_count() != 1:
        names = ", ".join(posix.thread_names()) or "unnamed"
        raise ForkRefused(f"the nursery has more than one thread ({names}); a fork would not be safe")
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _be_the_child(run)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _be_the_child(run: Callable[[], int]) -> None:
    code = EXIT_BROKEN
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def reset_in_child(
    *, nursery_pid: int, keep_fds: Iterable[int], log_fd: int, on_sigint: SignalHandler, channel_fd: int
) -> None:
    """Undo in a fresh child everything that it must not share with the nursery.

    Args:
        nursery_pid: pid that the parent of this process must have.
        keep_fds: further descriptors to leave open.
        log_fd: becomes standard output and standard error.
        on_sigint: handler of the cooperative stop.
        channel_fd: the child's end of its channel, left open.
    """
    os.setsid()
    if posix.set_parent_death_signal(signal.SIGKILL) and os.getppid() != nursery_pid:
        os._exit(EXIT_ORPHANED)
    posix.become_subreaper()
    _reset_descriptors({channel_fd, *keep_fds}, log_fd)
    _reset_random_state()
    atexit._clear()
    _reset_signals(on_sigint)


ADDRESS_SPACE_SLACK = 64 << 20
"""Bytes of address space beyond the memory limit: mappings that are never touched, thread stacks, the allocator's reserve."""


def limit_address_space(memory_limit_bytes: int) -> None:
    """Bound the address space to what is inherited, the limit, and some slack: a last resort against one huge allocation.

    The limit proper is on private memory, which the nursery samples; an allocation that runs into this bound fails with
    ``MemoryError``.
    """
    import resource

    inherited = posix.address_space_bytes(os.getpid())
    if inherited is not None:
        bound = inherited + memory_limit_bytes + ADDRESS_SPACE_SLACK
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _reset_descriptors(keep: set[int], log_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    lowest = 3
    for fd in sorted(keep):
        os.closerange(lowest, fd)
        lowest = max(lowest, fd + 1)
    os.closerange(lowest, _highest_fd() + 1)
    streams: dict[str, Any] = {
        "stdin": open(0, encoding="utf-8", closefd=False),  # noqa: SIM115  (open for the life of the process)
        "stdout": open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False),  # noqa: SIM115
        "stderr": open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False),  # noqa: SIM115
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _highest_fd() -> int:
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd"))
    except OSError:
        return int(os.sysconf("SC_OPEN_MAX"))


def _reset_random_state() -> None:
    """Give the process random numbers of its own, and forget where temporary files were to go.

    ``random`` and the names of ``tempfile`` see to it themselves after a fork; ``uuid4`` and ``secrets`` read the system's generator.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # type: ignore[attr-defined]  # TMPDIR is what the call's environment says


def _reset_signals(on_sigint: SignalHandler) -> None:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, on_sigint)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
