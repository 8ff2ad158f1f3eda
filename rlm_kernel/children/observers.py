"""Deliver notifications to callbacks of the user's, off the lifecycle path.

Who runs it: callbacks run on one daemon thread, started with the first notification. Any thread may publish; publishing
never blocks. The queue is bounded: when a callback blocks, later notifications are dropped and counted. A callback that
raises is logged, and changes nothing else.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

QUEUE_LENGTH = 1000

Notification = Callable[[], None]


class ObserverThread:
    """A bounded queue of calls and the thread that makes them."""

    def __init__(self, length: int = QUEUE_LENGTH) -> None:
        self._length = length
        self._queue: deque[Notification] = deque()
        self._lock = threading.Lock()
        self._available = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0

    def publish(self, notification: Notification) -> None:
        """Queue a call, or drop it if the queue is full or the observer is closed."""
        self._put(notification, self._length)

    def _put(self, notification: Notification, length: float) -> None:
        with self._lock:
            if self._closed or len(self._queue) >= length:
                self.dropped += 1
                return
            self._queue.append(notification)
            if self._thread is None:
                self._start()
        self._available.release()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="rlm-observers", daemon=True)
        hide_from_debugger(thread)
        self._thread = thread  # before the start: an interrupt in mid-start must not lead to a second thread
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("no thread for observers (%s); notifications are dropped", error)
            self._closed, self._thread = True, None

    def _run(self) -> None:
        while True:
            self._available.acquire()
            try:
                notification = self._queue.popleft()
            except IndexError:
                return
            try:
                notification()
            except BaseException:
                # SystemExit, too: it would end this thread, and with it every later notification.
                _log.warning("an observer callback raised", exc_info=True)

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until what was published before this call has been delivered.

        Returns:
            whether it was, within the timeout (a callback may be blocked).
        """
        delivered = threading.Lock()
        delivered.acquire()
        self._put(delivered.release, float("inf"))
        return delivered.acquire(timeout=timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Deliver what is queued and end the thread. One that is blocked in a callback is left behind after the
        timeout.

        Args:
            timeout_s: seconds to wait for callbacks that still run.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._available.release()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)


def hide_from_debugger(thread: threading.Thread) -> None:
    """Mark a thread of ours, before it is started, so that a breakpoint does not suspend it.

    The attributes are what pydevd looks for. Now and then it takes a thread that just starts for somebody else's, and
    then does not find them; so the thread itself says it once more.
    """
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    run = thread.run

    def run_unseen() -> None:
        monitoring = sys.modules.get("_pydevd_sys_monitoring.pydevd_sys_monitoring")
        if monitoring is not None:
            monitoring.stop_monitoring(all_threads=False)
        run()

    thread.run = run_unseen  # type: ignore[method-assign]
