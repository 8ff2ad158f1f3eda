"""The child's end of the channel: replies find their request, and a stop never cuts a frame in two."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.children.worker import Link, StopRequested, apply_surroundings, load_entry
from rlm_kernel.errors import ForkedProcessError
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import Channel, ChannelClosed
from tests.children.helpers import DEADLINE_S

Ends = tuple[Link, "Channel[Any]"]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    link, root = Link(theirs), Channel[Any](ours, m.FromChild)
    yield link, root
    root.close()
    link._channel.close()


def ask(number: int) -> m.AskStatus:
    return m.AskStatus(number, None)


def reply(root: Channel[Any], number: int) -> None:
    root.queue(m.Reply(number, ids=(f"for {number}",)))
    root.flush()


def requests(root: Channel[Any], count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        assert root.wait_readable()
        found += [message.request for message, _ in root.receive()]
    return found


def test_a_request_gets_its_own_reply(ends: Ends) -> None:
    link, root = ends
    reply(root, 7)  # nobody asked for it
    reply(root, 1)
    assert link.request(ask).ids == ("for 1",)


def test_threads_get_their_own_replies_in_whatever_order_these_come(ends: Ends) -> None:
    link, root = ends
    got: dict[int, tuple[str, ...]] = {}

    def run() -> None:
        answered = link.request(ask)
        got[answered.request] = answered.ids

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    numbers = requests(root, 8)
    for number in reversed(numbers):
        reply(root, number)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == {number: (f"for {number}",) for number in numbers}
    assert link._pending == {}


def test_when_the_root_is_gone_every_waiting_thread_is_told(ends: Ends) -> None:
    link, root = ends
    raised: list[type[BaseException]] = []

    def run() -> None:
        try:
            link.request(ask)
        except ChannelClosed:
            raised.append(ChannelClosed)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    requests(root, 4)
    root.close()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert raised == [ChannelClosed] * 4
    assert link._pending == {}


@pytest.fixture
def sigint(ends: Ends) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, ends[0].on_sigint)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stop_is_raised_at_once(ends: Ends, sigint: None) -> None:
    with pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    assert ends[0].stop_requested


def test_a_request_that_is_repeated_does_not_break_into_the_unwinding(ends: Ends, sigint: None) -> None:
    done = []

    def unwind() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("unwound")

    with pytest.raises(StopRequested):
        unwind()
    assert done == ["unwound"]


def test_a_stop_while_a_frame_is_being_written_comes_right_after_it(
    ends: Ends, sigint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, root = ends
    flush = link._channel.flush

    def interrupted() -> bool:
        signal.raise_signal(signal.SIGINT)
        return flush()

    monkeypatch.setattr(link._channel, "flush", interrupted)
    with pytest.raises(StopRequested):
        link.notify(m.Iteration(3))
    assert [message for message, _ in root.receive()] == [m.Iteration(3)]


def test_a_stop_while_a_reply_is_being_read_loses_nothing_of_the_stream(
    ends: Ends, sigint: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, root = ends
    read_some = link._channel._read_some

    def interrupted() -> Any:
        chunk = read_some()
        if chunk is not None:
            signal.raise_signal(signal.SIGINT)
        return chunk

    root.queue(m.Reply(2, ids=("still whole",)))
    frame = bytes(root._outgoing.popleft()[0])
    os.write(root.fileno(), frame[:10])
    monkeypatch.setattr(link._channel, "_read_some", interrupted)
    with pytest.raises(StopRequested):
        link.request(ask)
    monkeypatch.undo()
    os.write(root.fileno(), frame[10:])
    assert link.request(ask).ids == ("still whole",)


def test_a_stop_ends_a_wait_for_a_reply(ends: Ends, sigint: None, monkeypatch: pytest.MonkeyPatch) -> None:
    link, _ = ends
    wait_readable = link._channel.wait_readable

    def interrupted(deadline: float | None = None) -> bool:
        signal.raise_signal(signal.SIGINT)
        return wait_readable(deadline)

    monkeypatch.setattr(link._channel, "wait_readable", interrupted)
    with pytest.raises(StopRequested):
        link.request(ask)
    assert link._pending == {}


def test_a_copy_that_user_code_forked_is_refused_and_its_descriptors_closed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, root = ends
    monkeypatch.setattr(link, "_pid", os.getpid() + 1)
    fd = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(ForkedProcessError):
        link.notify(m.Iteration(1), (fd,))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert root.receive() == []


def test_without_a_root_there_is_no_start(ends: Ends) -> None:
    link, root = ends
    root.close()
    assert link.wait_for_start() is None


def test_an_entry_is_loaded_by_its_dotted_name() -> None:
    assert load_entry("os.path:join") is os.path.join  # type: ignore[comparison-overlap]


def test_surroundings_are_replaced_but_the_marker_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    start = m.Start("a", 1, None, "", "", b"", b"", {"A": "1", "RLM_KERNEL_NURSERY": "theirs"}, {"B": "2"}, "/", ("p",))
    before, cwd, path = dict(os.environ), os.getcwd(), list(sys.path)
    os.environ["RLM_KERNEL_NURSERY"] = "ours"
    try:
        apply_surroundings(start)
        got = (dict(os.environ), os.getcwd(), list(sys.path))
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(cwd)
        sys.path[:] = path
    assert got == ({"A": "1", "B": "2", "RLM_KERNEL_NURSERY": "ours"}, "/", ["p"])
