"""Let a server see that children live, so that it does not cull a kernel that only looks idle.

A Jupyter server calls a kernel active when a message comes on its iopub channel; newer ones leave out a list of types, which a type
of our own is not in. So while a child lives, one message of such a type goes out now and then. It has no parent: it belongs to no cell,
so whoever waits for a cell's messages passes it over, and front ends ignore types that they do not know. A repeated ``status`` message
would do for the server, too. But clients take the state in it for what it says (``jupyter console`` ends its wait for a cell with any
"idle"), and one that is sent while another thread begins a cell would be wrong.

Who runs it: a daemon thread "rlm-activity", from `Activity.start` to `Activity.close`. It owns nothing but its queue. While no child
lives it is blocked until one stirs; while one lives it wakes once in each interval. ipykernel's iopub socket may be used from any thread.

How each step can fail: the message cannot be sent, as the process is ending (it is logged, and tried again one interval later); native
code holds the interpreter lock (then a cell is running, and servers spare a busy kernel); no thread can be started (a warning).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlm_kernel.children.observers import hide_from_debugger

if TYPE_CHECKING:
    from ipykernel.kernelbase import Kernel

    from rlm_kernel.session.session import RLMSession

_log = logging.getLogger(__name__)

MESSAGE_TYPE = "rlm_activity"
"""The type of the message; its content is ``{"live_children": number}``."""


class Activity:
    """Tell somebody, once in each interval, that something lives; nothing is told while nothing does.

    Args:
        alive: gives the number of those that live. Called on our thread.
        tell: tells it. Called on our thread, with that number.
        interval_s: gives the seconds between two calls of ``tell``, None to tell nothing. A new value holds from the next time that
            something stirs or is due.
    """

    def __init__(
        self, alive: Callable[[], int], tell: Callable[[int], None], interval_s: Callable[[], float | None]
    ) -> None:
        self._alive = alive
        self._tell = tell
        self._interval_s = interval_s
        # A SimpleQueue may be put to from anywhere, also from code that a signal handler has interrupted.
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlm-activity", daemon=True)
        self._started = False

    def start(self) -> None:
        """Start the thread."""
        hide_from_debugger(self._thread)
        try:
            self._thread.start()
            self._started = True
        except RuntimeError as error:
            _log.warning("no thread to show servers that children live (%s): they may cull this kernel", error)

    def stir(self) -> None:
        """Something may live now that did not before. Any thread may call this; it does not block."""
        self._words.put("stir")

    def close(self) -> None:
        """End the thread, and wait for its end. May be called twice, and without a start."""
        self._words.put("close")
        if self._started and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        due_at = time.monotonic()
        asleep = True
        while self._next_word(None if asleep else due_at) != "close":
            if time.monotonic() < due_at:
                asleep = False  # what stirred too early is looked at when the next one is due
                continue
            interval_s = self._interval_s()
            number = 0 if interval_s is None else self._alive()
            asleep = number == 0
            if interval_s is not None and number:
                self._try_to_tell(number)
                due_at = time.monotonic() + interval_s

    def _next_word(self, until: float | None) -> str:
        try:
            return self._words.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            return "due"

    def _try_to_tell(self, number: int) -> None:
        try:
            self._tell(number)
        except Exception:
            _log.debug("a sign of life could not be given", exc_info=True)


def show_activity(kernel: Kernel, rlm: RLMSession) -> Activity:
    """Make and start the `Activity` of a kernel's children.

    Args:
        kernel: whose iopub channel is used.
        rlm: whose children it is about, with the setting ``keep_alive_s``.
    """

    def tell(number: int) -> None:
        if kernel.session is not None:
            topic = kernel._topic(MESSAGE_TYPE)
            kernel.session.send(kernel.iopub_socket, MESSAGE_TYPE, {"live_children": number}, parent={}, ident=topic)

    activity = Activity(
        alive=lambda: len(rlm.supervisor.live_ids), tell=tell, interval_s=lambda: rlm.settings["keep_alive_s"]
    )
    rlm.supervisor.call_on_stir(activity.stir)
    activity.start()
    return activity
