"""Observers run off the lifecycle path: whatever a callback does, publishing returns and later callbacks are made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from rlm_kernel.children.observers import ObserverThread


@pytest.fixture
def observers() -> Iterator[ObserverThread]:
    thread = ObserverThread(length=3)
    yield thread
    thread.close()


def test_no_thread_without_a_notification(observers: ObserverThread) -> None:
    assert not [t for t in threading.enumerate() if t.name == "rlm-observers"]


def test_calls_are_made_in_order_on_one_hidden_daemon_thread(observers: ObserverThread) -> None:
    seen: list[tuple[int, threading.Thread]] = []
    for number in range(20):
        observers.publish(lambda number=number: seen.append((number, threading.current_thread())))  # type: ignore[misc]
        assert observers.flush()
    assert [number for number, _ in seen] == list(range(20))
    [thread] = {thread for _, thread in seen}
    assert thread.daemon
    assert thread.pydev_do_not_trace  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_callback_that_raises_anything_is_logged_and_the_next_is_still_called(
    observers: ObserverThread, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def bad() -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        observers.publish(bad)
        assert observers.flush()
    assert "an observer callback raised" in caplog.text


def test_a_callback_that_blocks_neither_blocks_publishers_nor_fills_the_memory(observers: ObserverThread) -> None:
    running, go, seen = threading.Event(), threading.Event(), []

    def block() -> None:
        running.set()
        go.wait(10)

    observers.publish(block)
    assert running.wait(10)
    for number in range(10):
        observers.publish(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert observers.dropped == 7
    go.set()
    observers.close()
    assert seen == [0, 1, 2]


def test_closing_delivers_what_is_queued_and_ends_the_thread(observers: ObserverThread) -> None:
    seen: list[int] = []
    for number in range(3):
        observers.publish(lambda number=number: seen.append(number))  # type: ignore[misc]
    observers.close()
    assert seen == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name == "rlm-observers"]
    observers.publish(lambda: seen.append(99))
    observers.close()
    assert seen == [0, 1, 2]


def test_closing_does_not_wait_for_a_callback_that_is_stuck(observers: ObserverThread) -> None:
    running, go = threading.Event(), threading.Event()

    def block() -> None:
        running.set()
        go.wait(10)

    observers.publish(block)
    assert running.wait(10)
    observers.close(timeout_s=0.0)
    go.set()


def test_a_callback_may_close_the_observers_that_run_it(observers: ObserverThread) -> None:
    closed = threading.Event()

    def close() -> None:
        observers.close()
        closed.set()

    observers.publish(close)
    assert closed.wait(10)
