"""``%rlm logs`` shows what a child has printed, and follows it without flooding the page, losing a line, or outliving it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.children import rawlog
from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import ConfigurationError, UnknownHandleError
from rlm_kernel.jupyter import logs
from rlm_kernel.jupyter.logs import INTERVAL_S, show_log
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildStatus

DEADLINE_S = 15.0


class Page(io.StringIO):
    """A standard output that knows what went out with each flush, as a kernel's does, and calls back when a text is there."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[float, str]] = []
        self._flushed = 0
        self._hooks: list[tuple[str, Callable[[], None]]] = []

    def when(self, text: str, then: Callable[[], None]) -> None:
        self._hooks.append((text, then))

    def flush(self) -> None:
        new, self._flushed = self.getvalue()[self._flushed :], len(self.getvalue())
        if new:
            self.messages.append((time.monotonic(), new))
        for hook in list(self._hooks):
            if hook[0] in self.getvalue():
                self._hooks.remove(hook)
                hook[1]()


@pytest.fixture
def page() -> Page:
    return Page()


def show(page: Page, session: RLMSession, child_id: str, **options: Any) -> None:
    """Show a log on a page."""
    with contextlib.redirect_stdout(page):
        show_log(session, None, child_id, **options)


def run_what_it_is_told(messages: list[dict[str, str]]) -> str:
    """A model that has the prompt's own code run."""
    prompt = next(message["content"] for message in messages if "PYTHON" in message["content"])
    return f"```repl\n{prompt.partition('PYTHON')[2].partition('END')[0].strip()}\n_ = FINAL('done')\n```"


@pytest.fixture(scope="module")
def one_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RLMSession]:
    session = RLMSession(Settings({"run_dir": str(tmp_path_factory.mktemp("runs"))}, environ={}), {})
    session.configure_value("client_factory", ScriptedClient.factory(run_what_it_is_told))
    session.namespace["rlm_query"]("PYTHON print('warm') END")
    yield session
    assert session.shutdown().ok


@pytest.fixture
def session(one_session: RLMSession, no_leftovers: None) -> Iterator[RLMSession]:
    yield one_session
    assert one_session.reset().ok


class Child:
    """A child that runs some code, line by line as it is let go on."""

    def __init__(self, session: RLMSession, folder: Path, python: str) -> None:
        self.fifo = folder / "go"
        os.mkfifo(self.fifo)
        go = f"def go():\n    with open({str(self.fifo)!r}) as fifo: fifo.read()\n"
        self.session = session
        self.handle = session.namespace["rlm_query"](f"PYTHON import os\n{go}{python} END", blocking=False)
        self.id: str = self.handle.id

    def go_on(self) -> None:
        with open(self.fifo, "w"):
            pass

    @property
    def path(self) -> Path:
        return Path(self.handle.status().trajectory_path).with_suffix(".log")

    def has_printed(self, text: str) -> None:
        with self.session.supervisor.stirs() as stirs:
            until = time.monotonic() + DEADLINE_S
            while text not in self.handle.status().log_tail:
                assert time.monotonic() < until
                stirs.wait(until - time.monotonic())


@pytest.fixture
def child(session: RLMSession, tmp_path: Path) -> Callable[[str], Child]:
    return lambda python: Child(session, tmp_path, python)


def ended(session: RLMSession, python: str) -> ChildStatus:
    handle = session.namespace["rlm_query"](f"PYTHON import os\n{python} END", blocking=False)
    status: ChildStatus = handle.wait(DEADLINE_S)
    assert status.done
    return status


# ------------------------------------------------------------------------------------------------------------ looking


def test_the_last_lines_are_shown_and_it_is_said_how_many_there_are_and_where(session: RLMSession, page: Page) -> None:
    status = ended(session, "for i in range(100): print('line', i)")
    show(page, session, status.id, lines=3)
    note, *lines = page.getvalue().splitlines()
    assert lines == ["line 97", "line 98", "line 99"]
    assert "97 earlier lines" in note
    assert str(Path(status.trajectory_path or "").with_suffix(".log")) in note
    show(page, session, status.id, lines=100)
    assert "line 0\n" in page.getvalue()


def test_nothing_that_was_printed_breaks_the_page(session: RLMSession, page: Page) -> None:
    status = ended(session, r"os.write(1, b'\x1b[31mred\x1b[0m \xff\x00 10%\r20%\nno end' + b'x' * 50_000)")
    show(page, session, status.id)
    assert page.getvalue().startswith("20%\nno endx")
    assert "characters …]" in page.getvalue()
    assert len(page.getvalue()) < 10_000
    assert page.getvalue().endswith("x\n")


def test_a_log_beyond_the_cap_has_its_beginning_and_its_end(
    session: RLMSession, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawlog, "CAP_BYTES", 1000)
    monkeypatch.setattr(logs, "CAP_BYTES", 1000)
    status = ended(session, "for i in range(2000): print('line', i)")
    show(page, session, status.id, lines=2000)
    assert "line 0\n" in page.getvalue()
    assert "bytes left out" in page.getvalue()
    assert page.getvalue().endswith("line 1999\n")


def test_a_child_that_has_printed_nothing_is_said_to_have_printed_nothing(session: RLMSession, page: Page) -> None:
    show(page, session, ended(session, "pass").id)
    assert "has printed nothing\n" in page.getvalue()


def test_the_log_of_a_child_that_lives_is_shown_as_it_is(child: Callable[[str], Child], page: Page) -> None:
    living = child("print('begun', flush=True)\ngo()")
    living.has_printed("begun")
    show(page, living.session, living.id)
    assert page.getvalue() == "begun\n"
    living.go_on()


def test_a_log_file_that_is_gone_leaves_the_end_that_the_status_has(session: RLMSession, page: Page) -> None:
    status = ended(session, "print('the end of it')")
    path = Path(status.trajectory_path or "").with_suffix(".log")
    path.unlink()
    show(page, session, status.id)
    note, line = page.getvalue().splitlines()
    assert str(path) in note
    assert line == "the end of it"


def test_a_run_of_an_episode_that_was_reset_is_found_where_it_was_kept(session: RLMSession, page: Page) -> None:
    status = ended(session, "print('from before')")
    episode = session.episode_id
    assert session.reset().ok
    show(page, session, status.id)
    assert "from before\n" in page.getvalue()
    assert f"earlier episode {episode}" in page.getvalue()
    show(page, session, f"{episode}/{status.id}", follow=True)
    assert page.getvalue().count("from before\n") == 2


def test_wrong_arguments_are_errors_that_say_what_would_be_right(session: RLMSession, page: Page) -> None:
    with pytest.raises(UnknownHandleError, match="no child 'nobody' here"):
        show(page, session, "nobody")
    with pytest.raises(ConfigurationError, match="--lines=0: must be a whole number of at least 1"):
        show(page, session, "c1", lines=0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="--for="):
            show(page, session, "c1", timeout_s=wrong)
    with pytest.raises(ConfigurationError, match="there is no such run"):
        show(page, session, "nothing/c1")


# ---------------------------------------------------------------------------------------------------------- following


def test_what_comes_is_shown_when_it_comes_and_the_end_is_told(child: Callable[[str], Child], page: Page) -> None:
    living = child(
        "print('one', flush=True)\ngo()\nprint('two', flush=True)\ngo()\nos.write(1, b'three, without an end')"
    )
    page.when("one\n", living.go_on)
    page.when("two\n", living.go_on)
    show(page, living.session, living.id, follow=True)
    *lines, end = page.getvalue().splitlines()
    assert lines == ["one", "two", "three, without an end"]
    assert f"{living.id} has ended: completed after" in end
    assert living.handle.status().exited


def test_a_child_that_floods_is_a_few_messages_a_second_and_no_line_is_lost(session: RLMSession, page: Page) -> None:
    count = 20_000
    handle = session.namespace["rlm_query"](f"PYTHON for i in range({count}): print('line', i)\n END", blocking=False)
    began = time.monotonic()
    show(page, session, handle.id, follow=True, lines=count)
    took = time.monotonic() - began
    lines = [line for line in page.getvalue().splitlines() if not line.startswith("──")]
    assert lines == [f"line {i}" for i in range(count)]
    assert len(page.messages) <= 4 + took / INTERVAL_S
    assert max(len(text) for _, text in page.messages) <= logs._SHOWN_LENGTH


def test_following_ends_when_the_time_is_up_and_says_how_to_go_on(child: Callable[[str], Child], page: Page) -> None:
    living = child("print('one', flush=True)\ngo()")
    living.has_printed("one")
    show(page, living.session, living.id, timeout_s=0.0)
    assert page.getvalue().startswith("one\n")
    assert f"{living.id} is running; `%rlm logs {living.id} --follow` goes on" in page.getvalue()
    living.go_on()


def test_following_an_ended_child_shows_its_end_at_once(session: RLMSession, page: Page) -> None:
    status = ended(session, "print('one')")
    show(page, session, status.id, follow=True)
    assert page.getvalue().startswith("one\n")
    assert f"{status.id} has ended: {status.state}" in page.getvalue()


def test_a_log_that_is_full_says_so_and_its_end_follows(
    child: Callable[[str], Child], page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rawlog, "CAP_BYTES", 1000)
    monkeypatch.setattr(logs, "CAP_BYTES", 1000)
    living = child("for i in range(2000): print('line', i)\ngo()\nprint('the last')")
    page.when("the log is full", living.go_on)
    show(page, living.session, living.id, follow=True)
    assert "the last\n" in page.getvalue()


def test_an_interrupt_ends_the_following_and_leaves_nothing_behind(child: Callable[[str], Child], page: Page) -> None:
    living = child("print('one', flush=True)\ngo()")
    supervisor = living.session.supervisor

    def interrupt_when_it_waits() -> None:
        until = time.monotonic() + DEADLINE_S
        while not supervisor._root_waits and time.monotonic() < until:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_it_waits)
    page.when("one\n", thread.start)
    with pytest.raises(KeyboardInterrupt):
        show(page, living.session, living.id, follow=True)
    thread.join()
    assert supervisor._root_waits == []
    assert supervisor._core.on_stir == ()


def test_a_stop_interrupts_the_following_on_another_thread(child: Callable[[str], Child], page: Page) -> None:
    living = child("print('one', flush=True)\ngo()")
    raised: list[type[BaseException]] = []
    shown = threading.Event()
    page.when("one\n", shown.set)

    def follow() -> None:
        try:
            show(page, living.session, living.id, follow=True)
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=follow)
    thread.start()
    assert shown.wait(DEADLINE_S)
    while not (waits := living.session.supervisor._root_waits) or waits[0].waiter.over:
        pass
    living.session.supervisor.interrupt_waits()
    thread.join(DEADLINE_S)
    assert raised == [KeyboardInterrupt]


def test_a_child_that_is_killed_while_it_is_followed_is_told_so(child: Callable[[str], Child], page: Page) -> None:
    living = child("print('one', flush=True)\ngo()")
    page.when("one\n", lambda: os.kill(living.handle.status().pid, signal.SIGKILL))
    show(page, living.session, living.id, follow=True)
    assert f"{living.id} has ended: failed after" in page.getvalue()
    assert "SIGKILL" in page.getvalue()


def test_waiting_for_a_stir_misses_none_that_came_before(session: RLMSession) -> None:
    supervisor = session.supervisor
    with supervisor.stirs() as stirs:
        supervisor._core.on_stir[0]()
        stirs.wait(None)
        began = time.monotonic()
        stirs.wait(0.02)
        supervisor._core.on_stir[0]()
        stirs.pause(0.02)
        assert time.monotonic() - began >= 0.04
        stirs.wait(None)
    assert supervisor._core.on_stir == ()
    with contextlib.suppress(KeyboardInterrupt):
        supervisor.interrupt_waits()
