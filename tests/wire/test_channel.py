"""The framed channel: what is sent arrives whole and in order, and what is no message never passes for one."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.wire.anonymous import anonymous_file
from rlm_kernel.wire.channel import INLINE_LIMIT, Channel, ChannelBroken, ChannelClosed, Frame, FrameReader


class Note(msgspec.Struct, tag=True, frozen=True):
    text: str


class Other(msgspec.Struct, tag=True, frozen=True):
    number: int


Pair = tuple["Channel[Note]", "Channel[Note]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    a: Channel[Note] = Channel(left, Note)
    b: Channel[Note] = Channel(right, Note)
    yield a, b
    a.close()
    b.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def null_fd() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def header(length: int, *, fds: int = 0, flags: int = 0, magic: bytes = b"RK") -> bytes:
    return struct.pack("!2sBBI", magic, flags, fds, length)


def frame(body: bytes, fds: int = 0) -> bytes:
    return header(len(body), fds=fds) + body


@given(bodies=st.lists(st.binary(max_size=200), max_size=6), data=st.data())
def test_frames_come_out_whole_however_the_bytes_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body) for body in bodies)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    reader = FrameReader()
    got: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert [f.body for f in got] == bodies


def test_a_frame_is_complete_at_its_last_byte_and_not_before() -> None:
    reader = FrameReader()
    stream = frame(b"hello")
    for byte in stream[:-1]:
        assert list(reader.feed(bytes([byte]))) == []
    assert list(reader.feed(stream[-1:])) == [Frame(b"hello")]


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=8), size=st.integers(1, 50))
def test_descriptors_go_to_their_own_frames_in_order(counts: list[int], size: int) -> None:
    # Numbers that are no open descriptors: the reader only hands them on.
    numbers = iter(range(10**6, 10**6 + sum(counts)))
    expected = [tuple(next(numbers) for _ in range(count)) for count in counts]
    stream = b"".join(frame(b"x" * 7, count) for count in counts)
    starts = [i * (8 + 7) for i in range(len(counts))]
    reader = FrameReader()
    got: list[Frame] = []
    for at in range(0, len(stream), size):
        arriving = [fd for start, fds in zip(starts, expected, strict=True) if at <= start < at + size for fd in fds]
        got += reader.feed(stream[at : at + size], arriving)
    assert [f.fds for f in got] == expected


@pytest.mark.parametrize(
    "garbage",
    [b"Traceback (most recent call last)", header(3, magic=b"XX") + b"abc", header(2**31), header(0, flags=9)],
    ids=["text", "magic", "huge length", "flags"],
)
def test_what_is_no_frame_is_refused(garbage: bytes) -> None:
    with pytest.raises(ChannelBroken, match="not a frame"):
        list(FrameReader().feed(garbage))


def test_a_frame_whose_descriptors_did_not_come_is_refused() -> None:
    with pytest.raises(ChannelBroken, match="announces 2 descriptors, 0 came"):
        list(FrameReader().feed(frame(b"", fds=2)))


def test_a_body_said_to_be_in_a_file_that_did_not_come_is_refused() -> None:
    with pytest.raises(ChannelBroken, match="brings none"):
        list(FrameReader().feed(header(0, flags=1)))


def test_a_body_file_that_cannot_be_read_breaks_the_channel_and_closes_everything() -> None:
    directory, rest = os.open("/", os.O_RDONLY), null_fd()
    with pytest.raises(ChannelBroken, match="cannot be read"):
        list(FrameReader().feed(header(0, fds=2, flags=1), [directory, rest]))
    assert not is_open(directory)
    assert not is_open(rest)


def test_messages_arrive_in_order(pair: Pair) -> None:
    a, b = pair
    for number in range(100):
        a.queue(Note(str(number)))
    assert a.flush()
    assert [message.text for message, _ in b.receive()] == [str(number) for number in range(100)]


def test_a_large_message_does_not_wait_for_the_reader(pair: Pair) -> None:
    """5 MB are gone from the sender before anybody reads, so no exit waits for a result to be read."""
    a, b = pair
    text = "é" * 2_600_000
    a.queue(Note(text))
    assert a.flush()
    [(message, fds)] = b.receive()
    assert message.text == text
    assert fds == ()


@pytest.mark.parametrize("size", [INLINE_LIMIT - 50, INLINE_LIMIT, INLINE_LIMIT + 50])
def test_messages_around_the_inline_limit_are_the_same_on_both_ways(pair: Pair, size: int) -> None:
    a, b = pair
    a.queue(Note("x" * size), [null_fd()])
    a.flush()
    [(message, fds)] = b.receive()
    assert (len(message.text), len(fds)) == (size, 1)
    os.close(fds[0])


def test_many_messages_with_descriptors_keep_them_apart(pair: Pair) -> None:
    a, b = pair
    for number in range(60):
        count = number % 3
        a.queue(Note(str(number)), [anonymous_file([f"{number}.{i}".encode()]) for i in range(count)])
    assert a.flush()
    received = b.receive()
    assert len(received) == 60
    for number, (message, fds) in enumerate(received):
        contents = [os.pread(fd, 100, 0).decode() for fd in fds]
        assert (message.text, contents) == (str(number), [f"{number}.{i}" for i in range(number % 3)])
        for fd in fds:
            assert not os.get_inheritable(fd)
            os.close(fd)


def test_the_sender_keeps_no_copy_of_a_sent_descriptor(pair: Pair) -> None:
    a, b = pair
    fd = null_fd()
    a.queue(Note("x"), [fd])
    assert a.flush()
    assert not is_open(fd)
    [(_, fds)] = b.receive()
    os.close(fds[0])


def test_a_full_socket_loses_nothing(pair: Pair) -> None:
    a, b = pair
    for number in range(100):
        a.queue(Note(f"{number}:" + "x" * 30_000))
    assert not a.flush()
    assert a.pending
    got: list[str] = []
    while a.pending or len(got) < 100:
        a.flush()
        got += [message.text.split(":")[0] for message, _ in b.receive()]
    assert got == [str(number) for number in range(100)]


def test_closing_closes_what_was_still_to_be_sent(pair: Pair) -> None:
    a, _ = pair
    fd = null_fd()
    a.queue(Note("x"), [fd])
    a.close()
    assert not is_open(fd)
    assert a.closed
    a.close()


def test_closing_closes_what_no_message_has_claimed() -> None:
    reader = FrameReader()
    fd = null_fd()
    assert list(reader.feed(b"R", [fd])) == []
    reader.close()
    assert not is_open(fd)


def test_too_many_descriptors_are_refused_and_closed(pair: Pair) -> None:
    fds = [null_fd() for _ in range(251)]
    with pytest.raises(ValueError, match="251 descriptors"):
        pair[0].queue(Note("x"), fds)
    assert not any(is_open(fd) for fd in fds)
    assert not pair[0].pending


def test_text_that_is_no_utf8_arrives_escaped_rather_than_not_at_all(pair: Pair) -> None:
    a, b = pair
    a.queue(Note("bad \udcff end"))
    a.flush()
    assert b.receive() == [(Note("bad \\udcff end"), ())]


def test_a_message_of_another_union_breaks_the_channel_and_its_descriptors_are_closed(pair: Pair) -> None:
    a, b = pair
    before = set(os.listdir("/proc/self/fd"))
    a.queue(Note("good"), [null_fd()])
    a.queue(Other(1), [null_fd()])
    a.flush()
    with pytest.raises(ChannelBroken, match="not a message"):
        b.receive()
    assert set(os.listdir("/proc/self/fd")) == before


def test_garbage_after_a_good_message_breaks_the_channel(pair: Pair) -> None:
    left, right = socket.socketpair()
    channel: Channel[Note] = Channel(right, Note)
    left.sendall(frame(msgspec.msgpack.encode(Note("good"))) + b"printed by some C library\n")
    with pytest.raises(ChannelBroken):
        channel.receive()
    left.close()
    channel.close()


def test_descriptors_that_were_cut_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    channel: Channel[Note] = Channel(right, Note)
    monkeypatch.setattr("rlm_kernel.wire.channel._MAX_FDS", 1)
    before = set(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file:
        socket.send_fds(left, [frame(b"x", 8)], [file.fileno()] * 8)
    with pytest.raises(ChannelBroken, match="cut off"):
        channel.receive()
    assert set(os.listdir("/proc/self/fd")) == before
    left.close()
    channel.close()


def test_a_peer_that_is_gone_is_end_of_file_and_what_it_sent_before_counts(pair: Pair) -> None:
    a, b = pair
    a.queue(Note("last words"))
    a.flush()
    a.close()
    assert [message.text for message, _ in b.receive()] == ["last words"]
    assert b.eof
    assert b.receive() == []


def test_sending_to_a_peer_that_is_gone_raises_channel_closed(pair: Pair) -> None:
    a, b = pair
    b.close()
    a.queue(Note("x"))
    with pytest.raises(ChannelClosed):
        a.flush()


def test_a_peer_that_never_pauses_does_not_keep_the_reader(pair: Pair) -> None:
    a, b = pair
    for number in range(3):
        a.queue(Note(str(number)), [null_fd()])  # a descriptor ends a read
    a.flush()
    first = b.receive(reads=1)
    assert [message.text for message, _ in first] == ["0"]
    rest = b.receive()
    assert [message.text for message, _ in rest] == ["1", "2"]
    for _, fds in first + rest:
        os.close(fds[0])


def test_wait_readable_says_whether_there_is_something(pair: Pair) -> None:
    a, b = pair
    assert not b.wait_readable(deadline=0.0)
    a.queue(Note("x"))
    a.flush()
    assert b.wait_readable(deadline=0.0)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_no_bytes_at_all_make_the_reader_fail_in_another_way(data: bytes) -> None:
    reader = FrameReader()
    try:
        for got in reader.feed(data):
            assert isinstance(got.body, bytes)
    except ChannelBroken:
        pass
    finally:
        reader.close()
