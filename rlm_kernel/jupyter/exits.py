"""How the kernel process ends: SIGTERM and SIGHUP as lifecycle verbs, and a main thread that may not unwind.

Who runs it: the signal handlers do nothing; the interpreter's C-level handler writes the signal's number to a socket
(``signal.set_wakeup_fd``), whose other end the thread "rlm-signals" reads. So a termination is noticed while the main
thread is blocked in anything that releases the GIL, and also in a Python loop. That thread runs the verb and then
asks the main loop to stop.

`EndSignals.uninstall` puts back what was there, as far as nobody has replaced it in the meantime.

How each step can fail: code of the user's, or a prompt's event loop, replaces the wake-up fd (`refresh` takes it
back; until then the Python-level handler, which then runs when the main thread gets to it, writes to the same
socket); a process that code of the user's forked gets a signal (it has given the socket up, so it does not tell us
about it); the main thread does not unwind in time (`os._exit` by `leave_soon`); code that holds the GIL (nothing here
runs; whoever sent the signal will kill the process, and the nursery cleans up).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlm_kernel.children.observers import hide_from_debugger

END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""By name: Windows has no SIGHUP."""

UNWIND_S = 1.0
"""Seconds that the main thread is given to leave its cell and its loop before the process is ended under it."""


class EndSignals:
    """Turn SIGTERM and SIGHUP into a call on a thread of our own.

    Args:
        on_signal: called with the signal's number, once, on the thread "rlm-signals".
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._pid = os.getpid()
        self._held = threading.local()
        self._thread = threading.Thread(target=self._watch, name="rlm-signals", daemon=True)
        self._installed = False
        self._previous_fd = -1
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals over. On the main thread."""
        hide_from_debugger(self._thread)
        self._thread.start()
        self._installed = True
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in END_SIGNALS:
            self._previous[signum] = signal.signal(signum, self._handle)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
            )

    def refresh(self) -> None:
        """Take the wake-up descriptor back, in case that somebody has replaced it. On the main thread."""
        if self._installed:
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def uninstall(self) -> None:
        """Put back the handlers and the wake-up descriptor of before, and end the thread. On the main thread.

        The hooks around forks cannot be taken back; they do nothing from now on.
        """
        if not self._installed:
            return
        self._installed = False
        for signum, previous in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, previous)
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._previous_fd if current == self._writer.fileno() else current)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _before_fork(self) -> None:
        if self._installed:
            self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)

    def _after_fork(self) -> None:
        mask = self._held.__dict__.pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork_in_child(self) -> None:
        """Give the wake-up socket up: a signal to the copy would be read by the kernel as one of its own."""
        if self._installed:
            with contextlib.suppress(ValueError):  # forked from another thread of an interpreter that minds it
                signal.set_wakeup_fd(-1)
            self._reader.close()
            self._writer.close()
        self._after_fork()

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that user code forked: it ends as it would have without us.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        with contextlib.suppress(BlockingIOError):
            self._writer.send(bytes([signum]))

    def _watch(self) -> None:
        while data := self._reader.recv(64):
            ending = next((number for number in data if number in END_SIGNALS), None)
            if ending is not None:
                self._on_signal(ending)
                return


def flush_output() -> None:
    """Flush what was printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def end_process(code: int) -> None:
    """End the process with an exit code, from an exit hook: Python itself gives no way to change it there."""
    flush_output()
    logging.shutdown()
    os._exit(code)


class LastResort:
    """End the process if its main thread does not unwind by itself.

    Started early, since a process that is ending already starts no threads; it does nothing before it is armed.

    Args:
        code: gives the exit code.
        before: called right before the process is ended, to flush what can be flushed.
    """

    def __init__(self, code: Callable[[], int], before: Callable[[], None]) -> None:
        self._code = code
        self._before = before
        self._armed = threading.Event()
        self._unwound = threading.Event()
        self._started = False

    def start(self) -> None:
        """Start the thread that waits. May be called again."""
        if not self._started:
            self._started = True
            thread = threading.Thread(target=self._watch, name="rlm-exit", daemon=True)
            hide_from_debugger(thread)
            thread.start()

    def arm(self) -> None:
        """Everything that had to be said has been said: the main thread has `UNWIND_S` seconds from now."""
        self._armed.set()

    def unwound(self) -> None:
        """The main thread has left its loop; how long its exit hooks take is its own business."""
        self._unwound.set()

    def _watch(self) -> None:
        self._armed.wait()
        if not self._unwound.wait(UNWIND_S):
            try:
                self._before()
            finally:
                os._exit(self._code())
