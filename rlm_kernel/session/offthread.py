"""Run a blocking lifecycle verb on a thread of its own, so that neither the main thread nor a control channel waits in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rlm_kernel.children.observers import hide_from_debugger

T = TypeVar("T")


def run_off_thread(verb: Callable[[], T]) -> Future[T]:
    """Start ``verb`` on a daemon thread. If no thread can be started, it runs here, since a stop must not be lost.

    Returns:
        a future for its outcome, exceptions included.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = verb()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name="rlm-lifecycle", daemon=True)
    hide_from_debugger(thread)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is ending
        run()
    return future


def wait_here(future: Future[T], on_interrupt: Callable[[], None]) -> T:
    """Wait for a verb on the main thread. An interrupt hastens the verb rather than abandoning it."""
    while True:
        try:
            return future.result()
        except KeyboardInterrupt:
            if future.done():
                raise
            on_interrupt()
