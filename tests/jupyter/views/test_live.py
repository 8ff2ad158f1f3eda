"""`rlm_kernel.jupyter.views.live`: when a view draws, what, and that nothing is left of it. In real kernels: end_to_end/test_views.py."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.jupyter.views import live
from rlm_kernel.jupyter.views.base import View
from rlm_kernel.jupyter.views.live import LiveView, close_left_open
from tests.support.displays import Published, Text

DELAY_S = 0.03
INTERVAL_S = 0.02
LONG_S = 60.0


@pytest.fixture
def published() -> Published:
    return Published()


def view_of(published: Published, *states: object, delay_s: float = DELAY_S) -> LiveView:
    """Return a live view of states, of which the last one is that of all later times."""
    left = itertools.chain(states, itertools.repeat(states[-1]))
    return LiveView(published.shell, lambda: Text(next(left)), delay_s=delay_s, interval_s=INTERVAL_S)


def view_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlm-view" and thread.ident]


def test_nothing_is_shown_of_a_block_that_is_left_before_the_delay_is_over(published) -> None:
    with view_of(published, "state", delay_s=LONG_S) as view:
        view.stir()
        assert len(view_threads()) == 1
    assert (published.messages, view_threads()) == ([], [])


def test_one_display_is_updated_with_what_is_new_and_has_its_last_state_before_the_block_is_left(published) -> None:
    state = ["first"]
    with LiveView(published.shell, lambda: Text(state[0]), delay_s=DELAY_S, interval_s=INTERVAL_S) as view:
        published.wait_for(1)
        state[0] = "second"
        view.stir()
        published.wait_for(2)
        state[0] = "last"
    assert published.texts == ["first", "second", "last"]
    assert published.kinds == ["display_data", "update_display_data", "update_display_data"]
    assert len({message["content"]["transient"]["display_id"] for message in published.messages}) == 1
    assert view_threads() == []


def test_what_has_not_changed_is_not_sent_again(published) -> None:
    rendered = threading.Semaphore(0)

    def render() -> View:
        rendered.release()
        return Text("the same")

    with LiveView(published.shell, render, delay_s=0, interval_s=0) as view:
        for _ in range(5):
            assert rendered.acquire(timeout=10)
            view.stir()
    assert published.texts == ["the same"]


def test_times_go_on_when_nothing_stirs(published, monkeypatch) -> None:
    monkeypatch.setattr(live, "_TICK_S", 0.03)
    with view_of(published, *range(5)):
        published.wait_for(3)


def test_however_much_stirs_there_is_one_message_in_an_interval(published) -> None:
    counter = itertools.count()
    with LiveView(published.shell, lambda: Text(next(counter)), delay_s=0, interval_s=0.1) as view:
        began = time.monotonic()
        while time.monotonic() < began + 0.45:
            view.stir()
        took = time.monotonic() - began
    assert 3 <= len(published.messages) <= took / 0.1 + 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_block_comes_out_after_the_last_state(published, error) -> None:
    state = ["first"]

    def fail() -> None:
        with LiveView(published.shell, lambda: Text(state[0]), delay_s=0, interval_s=0):
            published.wait_for(1)
            state[0] = "last"
            raise error

    with pytest.raises(error):
        fail()
    assert published.texts[-1] == "last"
    assert view_threads() == []


def test_a_display_that_cannot_be_sent_disturbs_nobody(published) -> None:
    published.failing = True
    with view_of(published, *range(100), delay_s=0) as view:
        for thread in view_threads():
            thread.join(10)  # it gives up
        view.stir()
    published.failing = False
    with LiveView(object(), lambda: Text("x"), delay_s=0) as view:  # a shell with nothing to draw on
        view.stir()
    assert (published.messages, view_threads()) == ([], [])


def test_a_state_that_cannot_be_rendered_is_left_out(published) -> None:
    states = iter([None, Text("second")])

    def render() -> View | None:
        try:
            return next(states)
        except StopIteration:
            raise RuntimeError("no more") from None

    with LiveView(published.shell, render, delay_s=0, interval_s=0) as view:
        while not published.messages:
            view.stir()
    assert published.texts == ["second"]


def test_messages_belong_to_the_cell_that_entered_the_block_whatever_runs_later(published) -> None:
    """Also where a thread of the user's enters it, which has no cell of its own."""
    published.begin_cell("first")
    entered, over = threading.Event(), threading.Event()

    def wait() -> None:
        with view_of(published, *range(100), delay_s=0):
            entered.set()
            over.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(10)
    with view_of(published, *range(100), delay_s=0) as view:
        published.begin_cell("second")
        seen = len(published.messages)
        while len(published.messages) < seen + 5:
            view.stir()
    over.set()
    thread.join()
    assert published.cells == {"first"}


def test_views_that_were_not_left_end_with_their_cell_and_no_others(published) -> None:
    view_of(published, "mine", delay_s=LONG_S).__enter__()
    entered, over = threading.Event(), threading.Event()

    def wait() -> None:
        with view_of(published, "another's", delay_s=LONG_S):
            entered.set()
            over.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(10)
    close_left_open()
    assert [getattr(view, "owner", None) for view in view_threads()] == [thread.ident]
    over.set()
    thread.join()


def test_leaving_gives_up_on_a_display_that_hangs(published, monkeypatch) -> None:
    monkeypatch.setattr(live, "_JOIN_S", 0.05)
    hangs, goes_on = threading.Event(), threading.Event()

    def send(*_: object, **__: object) -> None:
        hangs.set()
        goes_on.wait(10)

    published.send_multipart = send
    with view_of(published, "x", delay_s=0):
        assert hangs.wait(10)
    [thread] = view_threads()
    goes_on.set()
    thread.join(10)


class Interrupter:
    """Interrupts the main thread twice, by a signal of its own (pytest's timeouts use the timers)."""

    def __init__(self) -> None:
        self._wanted = 0
        self.fired = threading.Event()

    def on_signal(self, *_: object) -> None:
        if self._wanted:
            self._wanted -= 1
            raise KeyboardInterrupt

    def arm(self, after_s: float) -> threading.Thread:
        """Have the first one come after some seconds, and the second one shortly after that."""
        self._wanted = 2
        self.fired.clear()

        def fire() -> None:
            pause = threading.Event()
            pause.wait(after_s)
            for _ in range(2):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                pause.wait(0.0002)
            self.fired.set()

        thread = threading.Thread(target=fire)
        thread.start()
        return thread


@pytest.fixture
def interrupter(monkeypatch) -> Iterator[Interrupter]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Python itself swallows those that hit a destructor
    interrupter = Interrupter()
    previous = signal.signal(signal.SIGUSR1, interrupter.on_signal)
    yield interrupter
    signal.signal(signal.SIGUSR1, previous)
    limbo: Any = threading._limbo  # type: ignore[attr-defined]  # keeps those whose start was cut off, which never run
    for thread in [thread for thread in limbo if thread.name == "rlm-view"]:
        if not thread._started.wait(1.0):
            del limbo[thread]


def test_interrupts_at_any_moment_come_out_and_leave_no_thread(published, interrupter) -> None:
    """The first one hits the entry, the wait, or the exit; the second one what the first one has begun."""
    interrupted = 0
    for number in range(100):
        firing = None
        try:
            try:
                firing = interrupter.arm(0.00003 * number)
                with view_of(published, *range(100), delay_s=0):
                    interrupter.fired.wait(10)
            except KeyboardInterrupt:
                interrupted += 1
            interrupter.fired.wait(10)
        except KeyboardInterrupt:
            interrupted += 1
        interrupter.fired.wait(10)
        if firing is not None:
            firing.join()
        close_left_open()
        give_up_at = time.monotonic() + 5
        while view_threads():  # `join` would not do: see `live`
            assert time.monotonic() < give_up_at
            threading.Event().wait(0.001)
    assert interrupted > 100
