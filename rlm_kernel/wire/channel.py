"""Framed, typed messages with file descriptors over one end of a stream socket pair.

Theory of operation
-------------------
A frame is a header (body length, number of descriptors, flags) and a msgpack body. A body above `INLINE_LIMIT` does not
go
through the socket: it is written into an anonymous file whose descriptor is sent instead, so that a result of any size
neither fills a socket buffer nor blocks the other side's event loop.

Descriptors ride on the first byte of their frame. A stream socket delivers them in order and never later than that
byte, so a queue of received descriptors, from which each complete frame takes as many as its header says, is enough.

`FrameReader` holds the logic without I/O. `Channel` owns the socket: exactly one object owns each end, and closing it
closes the socket and every descriptor still queued in either direction. A channel is used by one thread at a time;
whoever shares it brings the lock.

How it can fail: the peer is gone (`ChannelClosed` when sending; ``eof`` when receiving), the peer sent something that
is no frame or no message (`ChannelBroken`). Neither is proof that the peer process ended: a process that it forked may
hold a copy of its end, and code running in it may have written to the socket. Only ``waitpid`` and pidfds prove that.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from rlm_kernel.wire.anonymous import anonymous_file, read_anonymous

INLINE_LIMIT = 64 << 10
"""Bodies above this many bytes travel by anonymous file: well below the smallest usual socket buffer (about 200 KB)."""

_FRAME_LIMIT = 1 << 20
"""No honest inline body comes near this; a larger length means that something else wrote to the socket."""

_MAX_FDS = 250
"""Descriptors per frame. Linux refuses more than 253 in one message."""

_HEADER = struct.Struct("!2sBBI")
_MAGIC = b"RK"
_BODY_IN_FD = 1
_READ_SIZE = 256 << 10
READS_PER_TURN = 32
"""Reads of one channel before an event loop looks at others: a peer that never pauses must not keep it, and a flood of descriptors
must not use all that the process may have open."""

_FD_SIZE = array.array("i").itemsize

T = TypeVar("T")


class ChannelClosed(ConnectionError):
    """The peer's end is gone."""


class ChannelBroken(Exception):
    """What arrived is no frame or no known message."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame: the body, and the descriptors that came with it (owned by whoever holds the frame)."""

    body: bytes
    fds: tuple[int, ...] = ()


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors, ignoring those that are closed already."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _escaped(value: Any) -> Any:
    """Replace what UTF-8 cannot hold in every text of a message in plain form."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


class FrameReader:
    """Turn received bytes and descriptors into frames. No I/O except reading bodies that came as a file."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> Iterator[Frame]:
        """Add what was received and yield every frame that is now complete.

        Raises:
            ChannelBroken: the bytes are no frame.
        """
        self._bytes += data
        self._fds.extend(fds)
        while len(self._bytes) >= _HEADER.size:
            magic, flags, n_fds, length = _HEADER.unpack_from(self._bytes)
            if magic != _MAGIC or length > _FRAME_LIMIT or flags > _BODY_IN_FD:
                raise ChannelBroken(f"not a frame: {bytes(self._bytes[:16])!r}")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            if n_fds > len(self._fds):
                raise ChannelBroken(f"a frame announces {n_fds} descriptors, {len(self._fds)} came")
            body = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            frame_fds = [self._fds.popleft() for _ in range(n_fds)]
            if flags & _BODY_IN_FD:
                if not frame_fds:
                    raise ChannelBroken("a frame says its body is in a file, but brings none")
                body_fd = frame_fds.pop(0)
                try:
                    body = read_anonymous(body_fd)
                except (OSError, ValueError) as error:
                    close_fds(frame_fds)
                    raise ChannelBroken(f"the file with a frame's body cannot be read: {error}") from error
                finally:
                    os.close(body_fd)
            yield Frame(body, tuple(frame_fds))

    def close(self) -> None:
        """Close the descriptors that no frame has claimed."""
        close_fds(self._fds)
        self._fds.clear()


class Channel(Generic[T]):
    """One end of a message channel.

    Args:
        sock: a connected stream socket, which the channel owns from now on and makes non-blocking.
        incoming: the union of message structs that may arrive.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.eof = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    @property
    def pending(self) -> bool:
        """Whether something queued has not been sent yet."""
        return bool(self._outgoing)

    def queue(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queue a message; `flush` sends it.

        Args:
            message: a struct that the peer's ``incoming`` union knows.
            fds: descriptors to send along. The channel owns them from now on and closes its copies once they are sent.

        Raises:
            OSError: a large body could not be written to an anonymous file (``fds`` are closed then).
        """
        owned = list(fds)
        try:
            body = self._encode(message)
            flags = 0
            if len(body) > INLINE_LIMIT:
                owned.insert(0, anonymous_file([body]))
                body, flags = b"", _BODY_IN_FD
            if len(owned) > _MAX_FDS:
                raise ValueError(f"{len(owned)} descriptors in one message; at most {_MAX_FDS}")
        except BaseException:
            close_fds(owned)
            raise
        frame = _HEADER.pack(_MAGIC, flags, len(owned), len(body)) + body
        self._outgoing.append((memoryview(frame), tuple(owned)))

    def _encode(self, message: msgspec.Struct) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:
            # Lone surrogates (from undecodable file names, say) are no UTF-8. No message is lost over one.
            return self._encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes,))))

    def flush(self) -> bool:
        """Send as much as the socket takes now.

        Returns:
            whether everything queued has been sent.

        Raises:
            ChannelClosed: the peer's end is gone.
        """
        while self._outgoing:
            view, fds = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([view], ancillary)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosed(f"cannot send: {error}") from error
            close_fds(fds)
            if sent < len(view):
                self._outgoing[0] = (view[sent:], ())
            else:
                self._outgoing.popleft()
        return True

    def receive(self, reads: int | None = None) -> list[tuple[T, tuple[int, ...]]]:
        """Read what is there now, without blocking. Sets `eof` when the peer's end is gone.

        Args:
            reads: read calls after which to leave the rest for the next time, None to read everything.

        Returns:
            pairs of message and descriptors; the caller owns the descriptors.

        Raises:
            ChannelBroken: something arrived that is no message; what came before it is lost to the caller, too, since a
            peer
                that sends garbage cannot be trusted about the rest.
        """
        messages: list[tuple[T, tuple[int, ...]]] = []
        try:
            for _ in itertools.count() if reads is None else range(reads):
                chunk = None if self.eof else self._read_some()
                if chunk is None:
                    break
                data, fds = chunk
                if not data:
                    self.eof = True
                for frame in self._reader.feed(data, fds):
                    try:
                        messages.append((self._decoder.decode(frame.body), frame.fds))
                    except msgspec.MsgspecError as error:
                        close_fds(frame.fds)
                        raise ChannelBroken(f"not a message: {error}") from error
        except ChannelBroken:
            for _, attached in messages:
                close_fds(attached)
            raise
        return messages

    def _read_some(self) -> tuple[bytes, list[int]] | None:
        """Read once; None when nothing is there. (``socket.recv_fds`` ignores its flags in 3.12.1, hence ``recvmsg``.)"""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            data, ancillary, got_flags, _ = self._sock.recvmsg(
                _READ_SIZE, socket.CMSG_SPACE(_MAX_FDS * _FD_SIZE), flags
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b"", []
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_SIZE])
        if not flags:
            for fd in fds:
                os.set_inheritable(fd, False)
        if got_flags & socket.MSG_CTRUNC:
            close_fds(fds)
            raise ChannelBroken("descriptors were cut off: the process has too many files open")
        return data, list(fds)

    def send_blocking(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queue a message and wait until it is sent. For processes whose only business is this channel.

        Raises:
            ChannelClosed: the peer's end is gone.
        """
        self.queue(message, fds)
        while not self.flush():
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            poller.poll()

    def wait_readable(self, deadline: float | None = None) -> bool:
        """Wait until something can be read.

        Args:
            deadline: ``time.monotonic()`` at which to give up, None to wait for ever.

        Returns:
            whether there is something to read (end-of-file included).
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        timeout_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return bool(poller.poll(timeout_ms))

    def close(self) -> None:
        """Close the socket and every descriptor that is still under way. May be called twice."""
        for _, fds in self._outgoing:
            close_fds(fds)
        self._outgoing.clear()
        self._reader.close()
        self._sock.close()
