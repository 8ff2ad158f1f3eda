"""Interrupt the cell that runs on the main thread, that cell only, and promptly.

Who runs it: `expect`, `arm`, `disarm`, `cancelling`, `otherwise` and the signal handler run on the main thread; `interrupt` on any other.

How it works. One SIGINT handler stands for the life of the kernel. It acts only while it is *armed*, so an interrupt that comes a moment
after the end of a cell hits neither the machinery that sends the reply nor the next cell. `interrupt` sends the signal under a lock and
only while a cell runs; afterwards it wakes the event loop, whose selector does not return by itself for a signal that is handled by a
Python function. A request that is being taken up, but does not run code yet, is *expected*: an interrupt is remembered and raised by `arm`.

The signal goes to the process group, for what the cell has started, and then to the main thread, again and again until its handler has
run. Once is not enough: of a signal to a process any thread may run the C handler, and one that comes when the main thread has let go of
the GIL but has not entered its system call yet is noticed when that returns. (The thread that interrupts waits for the GIL, so it meets
just that moment.) The repetitions are no interrupts of their own: what comes shortly after one that was asked for is its *echo*.

A cell with ``await`` is a task of the loop. While it awaits, the task is cancelled; while it runs code of its own (a busy loop, a
blocking call), ``KeyboardInterrupt`` is raised right there. It must not be raised anywhere else then: it would leave through the loop and
end the kernel.

How each step can fail: no cell runs (nothing is sent); the process is not the leader of its group (only this process is signalled, never a
group that we do not lead); a second interrupt comes while the first unwinds (it raises again, as Python users expect); code of the user's
replaces the handler (`arm` puts it back, so only its own cell is affected).
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rlm_kernel.children.observers import hide_from_debugger
from rlm_kernel.jupyter.debugging import let_go, trace_again

_NUDGES_S = (0.005, 0.02, 0.05, *itertools.repeat(0.2, 20))
"""Seconds between the repetitions. Code that has not noticed an interrupt after all of them is in no system call."""

_ECHO_S = 0.2
"""Seconds after an interrupt in which a further signal is taken for its echo, unless another interrupt was asked for."""

_LATE_ECHO_S = 1.0
"""The same within one cell, after one that was asked for by `interrupt`. It goes to the process group as well, and on a busy machine the
thread that the operating system chooses for that one may take its time."""


class CellInterrupts:
    """See the module's docstring.

    Args:
        wake_loop: makes the main thread's event loop turn once; called from other threads.
    """

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        self._wake_loop = wake_loop
        self._lock = threading.Lock()
        self._expected = False
        self._pending = False
        self._running = False
        self._armed = False
        self._due = False
        self._asked = False
        self._echo_until = self._late_until = 0.0
        self._task: asyncio.Future[Any] | None = None
        self._cell_globals: object = None
        self._otherwise: Callable[[], object] | None = None
        self.was_hit = False
        self._was_stopped = False  # by the debugger, when it was hit last

    @property
    def is_armed(self) -> bool:
        """Whether an interrupt would be raised now."""
        return self._armed

    def install(self) -> None:
        """Install the SIGINT handler. On the main thread."""
        signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, _signum: int, frame: FrameType | None) -> None:
        if not self._due and time.monotonic() < max(self._echo_until, self._late_until):
            return
        if not self._armed:
            if self._otherwise is not None:
                self._otherwise()
            return
        interrupt = let_go(frame)
        self._was_stopped = hasattr(interrupt, "_render_traceback_")
        task = self._task
        if task is None or self._runs_cell_code(task, frame):
            self._has_arrived()
            raise interrupt
        # It stays due until the loop gets to it: the cell may be about to go on, and into a busy loop, before that.
        self._due = True
        task.get_loop().call_soon_threadsafe(self._cancel, task)

    def _has_arrived(self) -> None:
        self.was_hit = True
        now = time.monotonic()
        self._echo_until, self._late_until = now + _ECHO_S, now + _LATE_ECHO_S if self._asked else 0.0
        self._due = self._asked = False

    def _cancel(self, task: asyncio.Future[Any]) -> None:
        """Cancel the cell's task, once for each interrupt, however often the signal was repeated. Called by the loop."""
        if self._due:
            self._has_arrived()
            task.cancel()

    def _runs_cell_code(self, task: asyncio.Future[Any], frame: FrameType | None) -> bool:
        """Say whether the cell's own code is what the main thread runs, so that an exception comes out in it."""
        if asyncio.current_task(task.get_loop()) is not task:
            return False
        while frame is not None:
            if frame.f_globals is self._cell_globals:
                return True
            frame = frame.f_back
        return False

    @contextlib.contextmanager
    def cancelling(self, task: asyncio.Future[Any], cell_globals: object) -> Iterator[None]:
        """Treat the cell as a task of the loop for the length of the block.

        Args:
            task: the task that runs the cell.
            cell_globals: the globals of the cell's code.
        """
        self._task, self._cell_globals = task, cell_globals
        try:
            yield
        finally:
            self._task = None

    @contextlib.contextmanager
    def otherwise(self, call: Callable[[], object]) -> Iterator[None]:
        """Have SIGINT call something for the length of the block, where it would hit nothing.

        Args:
            call: called by the signal handler: on the main thread, in the middle of anything, so it may take no lock.
        """
        self._otherwise = call
        try:
            yield
        finally:
            self._otherwise = None

    def expect(self) -> None:
        """A cell is being taken up; its code does not run yet."""
        with self._lock:
            self._expected, self._pending = True, False

    def arm(self) -> None:
        """A cell (or another handler that runs code of the user's) begins.

        Raises:
            KeyboardInterrupt: an interrupt came while the cell was expected.
        """
        signal.signal(signal.SIGINT, self._on_sigint)
        self.was_hit = False
        if self._was_stopped:
            self._was_stopped = False
            trace_again()
        with self._lock:
            if self._pending:
                self._pending, self.was_hit = False, True
                raise KeyboardInterrupt
            self._running = self._armed = True

    def disarm(self) -> None:
        """It has ended. May be called twice."""
        self._armed = False
        self._late_until = 0.0
        with self._lock:
            self._running = self._expected = self._pending = self._due = self._asked = False

    def interrupt(self) -> bool:
        """Send SIGINT to the running cell, and to what it started in this process group.

        Returns:
            whether a cell was running, or about to.
        """
        with self._lock:
            if not self._running:
                self._pending = self._expected
                return self._expected
            self._due = self._asked = True
            if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGINT)
            self._signal_main_thread()
        self._wake_loop()
        thread = threading.Thread(target=self._nudge, name="rlm-nudge", daemon=True)
        hide_from_debugger(thread)
        thread.start()
        return True

    @staticmethod
    def _signal_main_thread() -> None:
        signal_main_thread()

    def _nudge(self) -> None:
        """Repeat the signal until the main thread's handler has run."""
        for pause_s in _NUDGES_S:
            time.sleep(pause_s)
            with self._lock:
                if not (self._running and self._due):
                    return
                self._signal_main_thread()


def signal_main_thread() -> None:
    """Send SIGINT to the main thread, whichever thread the kernel would choose."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:  # Windows
        _thread.interrupt_main()
