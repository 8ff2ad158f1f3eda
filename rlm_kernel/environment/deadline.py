"""Interrupt code that runs longer than it may, by an exception that is raised inside it.

Who runs it: the thread that runs the code. On the main thread the timer is ITIMER_REAL with SIGALRM; a timer that was
running before (an outer step's, a test runner's) still fires in time, through its own handler, and is put back. On other
threads, and where there is no such timer, a helper thread "rlm-timeout" sets the exception for the thread, which takes
effect at its next bytecode; `wake` ends what keeps it from getting there, as far as that can be done.

How each step can fail: code may catch the exception and go on. Then it is raised again, `MAX_RAISES` times in all, at short
intervals; after that the code is left alone and a line is logged, since nothing in a process can end a thread. What the
interpreter itself does before and after the code (compiling it, writing its traceback) is let finish, for as many intervals.
Native code that never returns to the interpreter cannot be interrupted at all. An exception is raised only while `_limited`
is on the stack of the thread; on other threads one may arrive just after that, and `_AsyncDeadline.call` receives it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from rlm_kernel.errors import ConfigurationError

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RAISES = 40
"""How often the exception is raised before code that catches it is left alone."""

_AGAIN_S = 0.05
"""Seconds between two raises: enough for ``finally`` blocks that behave."""

_LEAST_S = 1e-4


@dataclass(frozen=True, slots=True)
class Codes:
    """Code objects by which frames of the interpreter are known.

    Attributes:
        running: one of them is on the stack while the user's code runs.
        spared: nothing is raised while one of them is on the stack.
    """

    running: frozenset[CodeType]
    spared: frozenset[CodeType]


class ExecutionTimeout(BaseException):
    """Raised inside code whose time is up. Not an `Exception`, so that ``except Exception`` lets it pass.

    Each deadline raises a subclass of its own, so that nested ones can be told apart.
    """


class Deadline:
    """Base of the two kinds; made by `make_deadline`.

    Args:
        timeout_s: seconds that the code may take.
        wake: called from any thread with each raise, to end what blocks the code.
        codes: tells the code that is to be interrupted from what happens around it.

    Attributes:
        raised: how often the exception has been raised.
    """

    def __init__(self, timeout_s: float, wake: Callable[[], None], codes: Codes) -> None:
        self.timeout_s = timeout_s
        self.wake = wake
        self.raised = 0
        self._codes = codes
        self._postponed = 0
        self.exception: type[ExecutionTimeout] = type(
            "ExecutionTimeout", (ExecutionTimeout,), {"__str__": lambda _: self.message()}
        )

    def call(self, function: Callable[[], T]) -> T | None:
        """Call a function under this deadline.

        Returns:
            what it returned; None if the time was up before it returned anything.
        """
        raise NotImplementedError

    def message(self) -> str:
        """Say what happened."""
        text = f"the code was interrupted because it ran longer than timeout_s={self.timeout_s:g}"
        if self.raised > 1:
            text += f"; it caught the interruption, which had to be raised {self.raised} times"
        return text

    def _count(self) -> float:
        """Count one raise, and return the seconds until the next one."""
        self.raised += 1
        if self.raised < MAX_RAISES:
            return _AGAIN_S
        _log.error(
            "code that ran out of its time (%g s) has caught the interruption %d times and is left running",
            self.timeout_s,
            self.raised,
        )
        return math.inf

    def _may_raise_in(self, frame: FrameType | None) -> bool:
        """Tell whether a thread that is at this frame runs the code that is to be interrupted."""
        patient = self._postponed < MAX_RAISES
        runs_code = not patient
        while frame is not None:
            if patient and frame.f_code in self._codes.spared:
                break
            runs_code = runs_code or frame.f_code in self._codes.running
            if frame.f_code is _limited.__code__ and frame.f_locals.get("deadline") is self:
                if runs_code:
                    return True
                break
            frame = frame.f_back
        self._postponed += frame is not None
        return False


def check_timeout(timeout_s: object) -> None:
    """Refuse a timeout that is no positive number of seconds.

    Raises:
        ConfigurationError: names the value.
    """
    good = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not good or not (0 < timeout_s < math.inf):  # type: ignore[operator]
        raise ConfigurationError("timeout_s", timeout_s, "must be more than 0 seconds, or None for no limit")


def make_deadline(
    timeout_s: float,
    wake: Callable[[], None],
    codes: Codes,
    *,
    other_thread: bool = False,
) -> Deadline:
    """Make the kind of deadline that fits.

    Args:
        timeout_s: seconds.
        wake, codes: see `Deadline`.
        other_thread: `Deadline.call` will be called on a thread other than this one.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and not other_thread and hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is not None:
        return _SignalDeadline(timeout_s, wake, codes)
    return _AsyncDeadline(timeout_s, wake, codes)


def _limited(deadline: Deadline, function: Callable[[], T]) -> T:
    """Call the function; while this frame is on the stack, the exception may be raised."""
    return function()


class _SignalDeadline(Deadline):
    """For the main thread."""

    def call(self, function: Callable[[], T]) -> T | None:
        self._due = time.monotonic() + self.timeout_s
        self._other_due: float | None = None
        self._passed_on: BaseException | None = None
        self._in_alarm = False
        self._other = signal.signal(signal.SIGALRM, self._on_alarm)
        remaining, self._interval = signal.setitimer(signal.ITIMER_REAL, max(self.timeout_s, _LEAST_S))
        if remaining:
            self._other_due = time.monotonic() + remaining
            self._arm()
        result: T | None = None
        try:
            result = _limited(self, function)
        except self.exception:
            pass
        finally:
            self._put_back()
        if self._passed_on is not None:
            raise self._passed_on
        return result

    def _arm(self) -> None:
        due = self._due if self._other_due is None else min(self._due, self._other_due)
        if due < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(due - time.monotonic(), _LEAST_S))

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        if self._in_alarm:
            # Another alarm while the timer before ours is being served: what it raises must not be lost to what we raise.
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S / 10)
            return
        self._in_alarm = True
        try:
            self._alarm(signum, frame)
        finally:
            self._in_alarm = False

    def _alarm(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._other_due is not None and now >= self._other_due:
            self._other_due = now + self._interval if self._interval else None
            self._arm()
            self._pass_on(signum, frame)
        if now >= self._due:
            if self._may_raise_in(frame):
                self._due = now + self._count()
                self._arm()
                self.wake()
                raise self.exception
            self._due = now + _AGAIN_S  # not yet, or not any more
        self._arm()

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Let the timer that was there before do what it would have done."""
        if callable(self._other):
            try:
                self._other(signum, frame)
            except BaseException as error:
                # The code might take it for an error of its own: `call` raises it again.
                self._passed_on = error
                raise
        elif self._other == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _put_back(self) -> None:
        self._due = math.inf  # an alarm that comes just now must not set the timer again for us
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._other)
        if self._other_due is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._other_due - time.monotonic(), _LEAST_S), self._interval)


class _AsyncDeadline(Deadline):
    """For every other thread."""

    def call(self, function: Callable[[], T]) -> T | None:
        self._ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="rlm-timeout", daemon=True)
        # A breakpoint must not suspend it.
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
        thread.start()
        outcome: dict[str, Any] = {}
        try:
            try:
                outcome["result"] = _limited(self, function)
            except BaseException as error:
                outcome["error"] = error
            self._end(thread)
        except self.exception:
            self._end(thread)
        failure = outcome.get("error")
        if failure is not None and not isinstance(failure, self.exception):
            raise failure
        return outcome.get("result")

    def _end(self, thread: threading.Thread) -> None:
        """Stop the watching; then nothing is pending any more and nothing can come."""
        self._ended.set()
        thread.join()
        _set_exception(threading.get_ident(), None)

    def _watch(self, ident: int) -> None:
        pause = self.timeout_s
        while not self._ended.wait(pause):
            if not self._may_raise_in(sys._current_frames().get(ident)):
                pause = _AGAIN_S  # not yet, or not any more
                continue
            pause = self._count()
            _set_exception(ident, self.exception)
            self.wake()
            if pause == math.inf:
                return


def _set_exception(ident: int, exception: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if exception is None else ctypes.py_object(exception)
    )
