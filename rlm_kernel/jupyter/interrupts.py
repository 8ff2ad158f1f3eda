"""Interrupt the cell that runs on the main thread, that cell only, and promptly.

Who runs it: `arm`, `disarm` and the signal handler run on the main thread; `interrupt` on any other.

How it works. One SIGINT handler stands for the life of the kernel. It raises ``KeyboardInterrupt`` only while it is
*armed*, so an interrupt that comes a moment after the end of a cell hits neither the machinery that sends the reply nor
the next cell. `interrupt` sends the signal under a lock and only while a cell runs; afterwards it wakes the event loop,
whose selector does not return by itself for a signal that is handled by a Python function.

How each step can fail: no cell runs (nothing is sent); the process is not the leader of its group (only this process is
signalled, never a group that we do not lead); a second interrupt comes while the first unwinds (it raises again, as
Python users expect).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class CellInterrupts:
    """See the module's docstring.

    Args:
        wake_loop: makes the main thread's event loop turn once; called from other threads.
    """

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        self._wake_loop = wake_loop
        self._lock = threading.Lock()
        self._running = False
        self._armed = False

    def install(self) -> None:
        """Install the SIGINT handler. On the main thread."""
        signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, _signum: int, _frame: FrameType | None) -> None:
        if self._armed:
            raise KeyboardInterrupt

    def arm(self) -> None:
        """A cell (or another handler that runs code of the user's) begins."""
        with self._lock:
            self._running = True
        self._armed = True

    def disarm(self) -> None:
        """It has ended. May be called twice."""
        self._armed = False
        with self._lock:
            self._running = False

    def interrupt(self) -> bool:
        """Send SIGINT to the running cell, and to what it started in this process group.

        Returns:
            whether a cell was running.
        """
        with self._lock:
            if not self._running:
                return False
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGINT)
            else:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._wake_loop()
        return True
