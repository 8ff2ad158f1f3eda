"""A verb runs off the thread that asks for it, and runs in any case."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from rlm_kernel.session.offthread import run_off_thread, wait_here


def test_a_verb_runs_on_a_thread_of_its_own_and_its_error_comes_out() -> None:
    assert run_off_thread(lambda: threading.current_thread().name).result(10) == "rlm-lifecycle"
    with pytest.raises(ZeroDivisionError):
        run_off_thread(lambda: 1 / 0).result(10)


def test_a_verb_runs_here_if_no_thread_can_be_started(monkeypatch) -> None:
    """What was shut for it (admission) would stay shut for ever otherwise, and its children would live on."""

    def no_more(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert run_off_thread(threading.current_thread).result(0) is threading.current_thread()


class InterruptedOnce(Future[str]):
    """A verb's future whose first wait is broken off by Ctrl-C."""

    waits = 0

    def result(self, timeout: float | None = None) -> str:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        return super().result(timeout)


def test_an_interrupt_hastens_a_verb_that_is_waited_for_and_does_not_abandon_it() -> None:
    future = InterruptedOnce()
    assert wait_here(future, lambda: future.set_result("hastened")) == "hastened"
