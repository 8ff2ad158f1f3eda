"""The child's side: what runs in a forked process between the fork and its exit.

Who runs it: `be_child` runs in the child, on its main and (until user code starts others) only thread. It owns the
child's end of the channel through `Link`.

How each step can fail, and what then happens:

* the start message does not come because the root is gone: the child exits; the nursery is about to kill it anyway;
* the entry point cannot be imported, or raises: `Failure` with a readable error, then exit code 1;
* a cooperative stop (SIGINT from the nursery, which repeats it) arrives: `StopRequested` is raised in the main thread, once, at once or,
  while a frame is being written, right after it; ``finally`` blocks run; code that swallows it meets SIGTERM and SIGKILL later;
* the answer cannot be sent because the root is gone: nothing is left to tell; exit code 1;
* code of the user's forks: the copy has another pid, and `Link` refuses to work there.

The exit is always ``os._exit``: threads that user code left behind, and exit hooks, do not delay it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from rlm_kernel.children import forking
from rlm_kernel.errors import ChildFailedError, ForkedProcessError
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import Channel, ChannelClosed, close_fds

INHERITED: dict[str, str | bytes] = {}
"""Shared contexts that the nursery holds; a child finds here what was held when it was forked."""

MARKER_VARIABLE = "RLM_KERNEL_NURSERY"
"""Environment variable that marks a nursery and, by inheritance, everything that comes from it."""

EXIT_NO_ANSWER = 1
EXIT_STOPPED = 130
"""As shells report a process that SIGINT ended."""


class StopRequested(KeyboardInterrupt):
    """The cooperative stop: raised in the child's main thread. ``except KeyboardInterrupt`` and ``finally`` see it."""


@dataclass(slots=True)
class _Pending:
    """One request that waits for its reply; ``wake`` is held until there is a reason to look."""

    wake: threading.Lock = field(default_factory=threading.Lock)
    reply: m.Reply | None = None


class Link:
    """The child's end of its channel. Thread-safe: requests of several threads may be under way at once.

    One waiting thread at a time is the leader: it reads the channel and hands each reply to the request it belongs to.
    When its own reply has come, it passes leadership on. So no reader thread is needed, and the child stays
    single-threaded unless user code decides otherwise.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel: Channel[m.Start | m.Reply | m.Steer] = Channel(sock, m.ToChild)
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._sending = threading.Lock()
        self._leading = threading.Lock()
        self._shields = 0
        self._inbox: list[str] = []
        self._seen = 0
        self.stop_requested = False
        self.start: m.Start | None = None
        self.attachments: tuple[int, ...] = ()

    # -- the cooperative stop

    def on_sigint(self, _signum: int, _frame: FrameType | None) -> None:
        """Signal handler: raise `StopRequested` in the main thread, unless a frame is being written right now.

        Once: the nursery repeats the request, for the case that this thread was just about to enter a system call.
        """
        if self.stop_requested:
            return
        self.stop_requested = True
        if not self._shields:
            raise StopRequested("the parent asked this run to stop")

    @contextlib.contextmanager
    def _shielded(self) -> Iterator[None]:
        """Put a stop off until the end of the block. Only the main thread runs signal handlers; elsewhere this is a no-op."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        already = self.stop_requested
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self.stop_requested and not already and not self._shields:
            raise StopRequested("the parent asked this run to stop")

    # -- messages

    def check_process(self) -> None:
        """Raise where this is not the child itself but a process that its code forked."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this process was forked by user code; the RLM helpers only work in the process that was started for the run"
            )

    def notify(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message that has no reply.

        Raises:
            ChannelClosed: the root process is gone.
            ForkedProcessError: this is a process that user code forked.
        """
        try:
            self.check_process()
        except ForkedProcessError:
            close_fds(fds)
            raise
        with self._shielded(), self._sending:
            self._channel.send_blocking(message, fds)

    def request(self, build: Callable[[int], Any], fds: Sequence[int] = ()) -> m.Reply:
        """Send a request and wait for its reply.

        Args:
            build: makes the message from the request number.
            fds: descriptors to send along; they are closed in any case.

        Raises:
            ChannelClosed: the root process is gone.
        """
        number = next(self._numbers)
        pending = self._pending[number] = _Pending()
        pending.wake.acquire()
        try:
            self.notify(build(number), fds)
            while pending.reply is None:
                if self._leading.acquire(blocking=False):
                    try:
                        while pending.reply is None:
                            self._read_replies()
                    finally:
                        self._leading.release()
                else:
                    pending.wake.acquire()
            return pending.reply
        finally:
            del self._pending[number]
            self._wake_one_waiter()

    def _wake_one_waiter(self) -> None:
        """Give another waiting thread the chance to lead."""
        for other in list(self._pending.values()):
            if other.reply is None and other.wake.locked():
                with contextlib.suppress(RuntimeError):
                    other.wake.release()
                return

    def _read_replies(self) -> None:
        self._channel.wait_readable()
        self._take_in()

    def _take_in(self) -> None:
        """Hand out what has arrived. The caller is the leader."""
        with self._shielded():
            received = self._channel.receive()
        for message, fds in received:
            close_fds(fds)
            if isinstance(message, m.Steer):
                self._inbox.append(message.text)
            elif isinstance(message, m.Reply) and (pending := self._pending.get(message.request)) is not None:
                pending.reply = message
                if pending.wake.locked():
                    with contextlib.suppress(RuntimeError):
                        pending.wake.release()
        if self._channel.eof:
            raise ChannelClosed("the kernel is gone")

    def take_messages(self) -> list[str]:
        """Return the messages that were sent to this run since the last call, and acknowledge them. Never blocks.

        Raises:
            ChannelClosed: the root process is gone.
        """
        # If another thread leads, it has put into the inbox whatever came.
        if self._leading.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._leading.release()
                self._wake_one_waiter()
        messages, self._inbox = self._inbox, []
        if messages:
            self._seen += len(messages)
            self.notify(m.SteerSeen(self._seen))
        return messages

    def wait_for_start(self) -> m.Start | None:
        """Wait for the start message; None if the root is gone. Its attachments are then in `attachments`."""
        while not self._channel.eof:
            self._channel.wait_readable()
            for message, fds in self._channel.receive():
                if isinstance(message, m.Start):
                    self.start, self.attachments = message, fds
                    continue
                close_fds(fds)
                if isinstance(message, m.Steer):
                    self._inbox.append(message.text)
            if self.start is not None:
                return self.start
        return None


class Entry(Protocol):
    """What an entry point looks like: it gets the link and returns the answer's text, or raises."""

    def __call__(self, link: Link, start: m.Start) -> str: ...


def load_entry(dotted: str) -> Entry:
    """Import ``"module:callable"``."""
    module, _, name = dotted.partition(":")
    loaded: Entry = getattr(importlib.import_module(module), name)
    return loaded


def be_child(*, nursery_pid: int, channel_fd: int, log_fd: int, memory_limit_bytes: int | None = None) -> int:
    """Run one child from its reset to its exit code. Called right after the fork, with the held signals blocked."""
    link: Link | None = None
    asked = False

    def on_sigint(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        again, asked = asked, True
        if link is not None:
            link.on_sigint(signum, frame)
        elif not again:
            raise StopRequested("the parent asked this run to stop")

    try:
        link = Link(socket.socket(fileno=channel_fd))
        forking.reset_in_child(
            nursery_pid=nursery_pid, keep_fds=(), log_fd=log_fd, on_sigint=on_sigint, channel_fd=channel_fd
        )
        if memory_limit_bytes is not None:
            forking.limit_address_space(memory_limit_bytes)
        start = link.wait_for_start()
        return EXIT_NO_ANSWER if start is None else _run(link, start)
    except StopRequested:
        return EXIT_STOPPED
    except ChannelClosed:
        return EXIT_NO_ANSWER


def _run(link: Link, start: m.Start) -> int:
    try:
        apply_surroundings(start)
        answer = load_entry(start.entry)(link, start)
    except StopRequested:
        raise
    except BaseException as error:
        link.notify(m.Failure(_sendable(_readable(error))))
        return EXIT_NO_ANSWER
    # From here on a stop finds the work done: the answer goes out whole, and the exit follows at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        link.notify(m.Answer(_sendable(answer)))
    except ChannelClosed:
        raise
    except (OSError, MemoryError) as error:
        # A large answer travels by file: nothing of it has been sent, so the channel still takes the reason.
        link.notify(m.Failure(f"the answer of {len(answer)} characters could not be sent: {_readable(error)}"))
        return EXIT_NO_ANSWER
    return 0


def _sendable(text: str) -> str:
    """Replace what UTF-8 cannot hold (lone surrogates, as in undecodable file names), so that no answer is lost over it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _readable(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, ChildFailedError):
        return text  # that is what it will be called where it is shown
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"the run's code ended its process ({name}: {text})"
    return f"{name}: {text}" if text else name


def apply_surroundings(start: m.Start) -> None:
    """Take over the cwd, path and environment that the caller had at the moment of its call.

    Raises:
        OSError: the directory is gone; the message names it.
    """
    marker = os.environ.get(MARKER_VARIABLE)
    os.environ.clear()
    os.environ.update(start.environ)
    os.environ.update(start.secret_environ)
    if marker is not None:
        os.environ[MARKER_VARIABLE] = marker
    try:
        os.chdir(start.cwd)
    except OSError as error:
        raise OSError(f"cannot enter the working directory of the call, {start.cwd!r}: {error.strerror}") from error
    sys.path[:] = start.sys_path
    importlib.invalidate_caches()
