"""The supervisor's I/O thread: the nursery's channel, every child's channel and log pipe, timers.

Who runs it: one daemon thread of the root process, started with the first child. Other threads hand it work with
`post`, which never blocks. It owns the `NurseryProcess`, the root's end of every child's channel, the read end of every
log pipe, and the raw logs. It
decides nothing: everything that happens is told to its owner (the supervisor), which takes its own lock for it. No lock
is held here while the owner is called.

How each step can fail, and what then happens:

* the thread cannot be started: `post` raises `NurseryError`; nothing was begun;
* a child cannot be launched (no descriptors left, the nursery cannot be started): ``on_spawn_failed``;
* a child's channel breaks or holds garbage: ``on_broken``; the owner stops the child. End-of-file proves nothing and is only
  unregistered;
* the nursery dies, closes its channel or sends garbage: it is killed, its children with it, what they had started is found by its
  marker; each exit is confirmed through the child's pidfd and told by ``on_exited``, or ``on_unconfirmed``. The next
  launch starts a new nursery;
* an unexpected exception in the loop: logged, and handled like a nursery that died, so that no child outlives the confusion.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlm_kernel.children import posix, sweep
from rlm_kernel.children.nursery_process import NurseryProcess
from rlm_kernel.children.observers import hide_from_debugger
from rlm_kernel.children.rawlog import RawLog
from rlm_kernel.children.records import ChildRecord
from rlm_kernel.children.states import Phase
from rlm_kernel.children.timers import Timer, Timers
from rlm_kernel.credentials import secret_values
from rlm_kernel.errors import NurseryError
from rlm_kernel.values import Graces
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import READS_PER_TURN, Channel, ChannelBroken, ChannelClosed, close_fds

_log = logging.getLogger(__name__)

_LONGEST_SELECT_S = 3600.0
"""A selector takes no more than about 24 days, and a child may wait for a year."""

_LOG_READ = 64 << 10
_LOG_READS_PER_TURN = 16
"""Reads of one log pipe before others get their turn."""

_START_S = 15.0
"""Seconds within which a warm nursery forks; it needs a few milliseconds, and a large shared context some hundred."""

_BOOT_S = 120.0
"""Seconds that a nursery may take to warm up: preloads can be slow on a busy machine."""

_OVERDUE_S = 3.0
"""Seconds after a child's time and graces are up at which the root steps in."""

_OWN_END_S = 0.1
"""Seconds that a nursery which has closed its channel has for its exit, so that its exit code can be told. It is ending."""

_LOST_GIVE_UP_S = 1.0
"""Seconds to wait for the children of a dead nursery: SIGKILL has been sent, the kernel only has to tear them down."""


class Owner(Protocol):
    """What the reactor tells. All of it is called on the reactor's thread."""

    def on_nursery_ready(self, warnings: tuple[str, ...]) -> None: ...
    def on_started(self, child_id: str, pid: int, pidfd: int | None, at: float) -> None: ...
    def on_spawn_failed(self, child_id: str, error: str) -> None: ...
    def on_never_started(self, child_id: str, error: str) -> None: ...
    def on_timed_out(self, child_id: str) -> None: ...
    def on_over_limit(self, child_id: str, private_bytes: int) -> None: ...
    def on_exited(self, message: m.Exited, error: str | None = None) -> None: ...
    def on_unconfirmed(self, child_id: str, error: str) -> None: ...
    def on_message(self, child_id: str, message: Any, fds: tuple[int, ...]) -> None: ...
    def on_output(self, child_id: str, tail: str) -> None: ...
    def on_broken(self, child_id: str, error: str) -> None: ...


@dataclass(slots=True)
class _Port:
    """The root's side of one child: channel, log pipe, raw log, and what is needed to confirm its exit without the nursery."""

    record: ChildRecord
    channel: Channel[Any]
    log_fd: int
    log: RawLog
    launched_at: float = field(default_factory=time.monotonic)
    timer: Timer | None = None


def _raw_log(record: ChildRecord) -> RawLog:
    return RawLog(record.log_path, secret_values(record.spec.secret_environ))


class Reactor:
    """See the module's docstring.

    Args:
        owner: is told what happens.
        start_nursery: starts a fresh nursery.
    """

    def __init__(self, owner: Owner, start_nursery: Callable[[], NurseryProcess]) -> None:
        self._owner = owner
        self._start_nursery = start_nursery
        self._todo: deque[Callable[[], None]] = deque()
        self._timers = Timers()
        self._held: dict[str, tuple[bool, int]] = {}
        self._ports: dict[str, _Port] = {}
        self._nursery: NurseryProcess | None = None
        self._deferred: list[ChildRecord] = []
        self._boot_timer: Timer | None = None
        self._untold: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._stopping = False

    # -- from any thread

    def post(self, *work: Callable[[], None]) -> None:
        """Have calls run on the reactor's thread, soon and in one turn: nothing that comes from outside is seen between them.

        Raises:
            NurseryError: the thread cannot be started.
        """
        self._todo.extend(work)
        with self._thread_lock:
            if self._thread is None:
                self._start_thread()
            self._wake()

    def _start_thread(self) -> None:
        try:
            self._selector = selectors.DefaultSelector()
            try:
                self._wake_reader, self._wake_writer = socket.socketpair()
            except OSError:
                self._selector.close()
                raise
        except OSError as error:
            self._todo.clear()
            raise NurseryError(f"cannot start the supervisor thread: {error}") from error
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakeups)
        self._stopping = False
        # Noted before its start, so that an interrupt in mid-start does not lead to a second one.
        thread = self._thread = threading.Thread(target=self._run, name="rlm-supervisor", daemon=True)
        hide_from_debugger(thread)
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            self._todo.clear()
            self._selector.close()
            self._close_wakeups()
            raise NurseryError(f"cannot start the supervisor thread: {error}") from error

    def _wake(self) -> None:
        # A full socket wakes the loop as well; a closed one belongs to a loop that has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def kill_nursery(self) -> None:
        """Kill the nursery, and by their parent-death signal all children. From any thread; harmless if there is none."""
        nursery = self._nursery
        if nursery is not None:
            nursery.kill()

    @property
    def nursery_pid(self) -> int | None:
        """Pid of the nursery, None if there is none."""
        nursery = self._nursery
        return None if nursery is None else nursery.pid

    def close(self, timeout_s: float) -> bool:
        """End the nursery and the thread, when no child is left.

        Args:
            timeout_s: seconds after which the nursery is killed; the same again is then given to its exit.

        Returns:
            whether both are gone.
        """
        with self._thread_lock:
            thread = self._thread
            if thread is None:
                return True
            self._todo.append(lambda: self._begin_close(time.monotonic() + timeout_s))
            self._wake()
        if thread is threading.current_thread():
            return False
        thread.join(2 * timeout_s + 0.5)
        return not thread.is_alive()

    # -- the loop (reactor thread from here on)

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._turn()
            except Exception as error:
                _log.critical("unexpected error in the supervisor thread; stopping all children", exc_info=True)
                self._lose_nursery(f"internal error in the supervisor: {type(error).__name__}: {error}")

    def _is_over(self) -> bool:
        """Decide under the lock whether to end, so that what is posted meanwhile finds a new thread rather than none."""
        if not self._stopping:
            return False
        with self._thread_lock:
            if self._todo:
                return False
            if self._nursery is not None:
                self._stopping = False  # Somebody wanted children again after the close.
                return False
            self._thread = None
            self._selector.close()
            self._close_wakeups()
            return True

    def _close_wakeups(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    def _turn(self) -> None:
        timeout = None
        if self._todo:
            timeout = 0.0
        elif (due := self._timers.next_due()) is not None:
            timeout = min(max(0.0, due - time.monotonic()), _LONGEST_SELECT_S)
        for key, mask in self._selector.select(timeout):
            key.data(mask)
        while self._todo:
            self._todo.popleft()()
        now = time.monotonic()
        while (work := self._timers.pop_due(now)) is not None:
            work()

    def _drain_wakeups(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def call_at(self, when: float, work: Callable[[], None]) -> Timer:
        """Have ``work`` run at monotonic time ``when``; `cancel_timer` takes it back. On the reactor's thread only."""
        return self._timers.add(when, work)

    def cancel_timer(self, timer: Timer | None) -> None:
        """Take a timer back. On the reactor's thread only."""
        self._timers.cancel(timer)

    # -- the nursery

    def ensure_nursery(self) -> NurseryProcess:
        """Start a nursery if there is none.

        Raises:
            NurseryError: it could not be started.
        """
        if self._nursery is None:
            nursery = self._nursery = self._start_nursery()
            self._selector.register(nursery.channel.fileno(), selectors.EVENT_READ, self._serve_nursery)
            if nursery.pidfd is not None:
                self._selector.register(nursery.pidfd, selectors.EVENT_READ, lambda _mask: self._lose_nursery(""))
            self._boot_timer = self.call_at(time.monotonic() + _BOOT_S, lambda: self._expect_ready(nursery))
            for key, (text, fd) in self._held.items():
                self._tell_nursery(m.Hold(key, text), (os.dup(fd),))
        return self._nursery

    def give_up_idle_nursery(self, warm_up: str) -> None:
        """End a nursery that has no children and was not warmed by ``warm_up``."""
        nursery = self._nursery
        if nursery is not None and nursery.warm_up != warm_up and not self._ports and not self._deferred:
            self._lose_nursery("")

    def _serve_nursery(self, _mask: int) -> None:
        nursery = self._nursery
        if nursery is None:
            return
        try:
            for message, fds in _each(nursery.channel.receive()):
                self._on_nursery_message(nursery, message, fds)
            if nursery.channel.eof:
                self._lose_nursery("the nursery closed its channel")
            else:
                self._flush_nursery()
        except ChannelBroken as error:
            self._lose_nursery(f"the nursery's channel is broken: {error}")

    def _on_nursery_message(self, nursery: NurseryProcess, message: m.FromNursery, fds: tuple[int, ...]) -> None:
        match message:
            case m.NurseryReady():
                nursery.ready, nursery.active_at = True, time.monotonic()
                self._timers.cancel(self._boot_timer)
                self._owner.on_nursery_ready(message.warnings)
                while self._deferred:
                    self.launch(self._deferred.pop(0))
            case m.Started():
                nursery.active_at = time.monotonic()
                self._owner.on_started(message.id, message.pid, fds[0] if fds else None, message.at)
                self._listen_to(message.id, nursery)
                return
            case m.SpawnFailed():
                self._release(message.id)
                self._tell_end(lambda: self._owner.on_spawn_failed(message.id, message.error))
            case m.TimedOut():
                self._owner.on_timed_out(message.id)
            case m.OverLimit():
                self._owner.on_over_limit(message.id, message.private_bytes)
            case m.Exited():
                # The answer may still be in the socket: read it before judging the exit.
                self._read_channel(message.id)
                self._read_log(message.id)
                self._release(message.id)
                self._tell_end(lambda: self._owner.on_exited(message))
        close_fds(fds)

    def _tell_end(self, tell: Callable[[], None]) -> None:
        """Tell an end of a child that has no port any more. If that meets a bug of ours, it is told again when the nursery is given up."""
        self._untold.append(tell)
        tell()
        self._untold.pop()

    def _tell_nursery(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        if self._nursery is None:
            close_fds(fds)
            return
        self._nursery.channel.queue(message, fds)
        self._flush_nursery()

    def _flush_nursery(self) -> None:
        nursery = self._nursery
        if nursery is None:
            return
        try:
            complete = nursery.channel.flush()
        except ChannelClosed:
            return  # Its end will be seen as readable.
        self._watch(nursery.channel.fileno(), self._serve_nursery, writing=not complete)

    def _watch(self, fd: int, callback: Callable[[int], None], *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if self._selector.get_key(fd).events != events:
            self._selector.modify(fd, events, callback)

    def kill_booting_nursery(self) -> None:
        """Kill a nursery that is not warm yet: nothing has been forked, and waiting for its imports would be waiting for nothing."""
        nursery = self._nursery
        if nursery is None or nursery.ready or any(record.phase is Phase.STARTING for record in self._deferred):
            return
        # At once, so that the next launch does not go to one that is dying.
        self._lose_nursery("a stop came before it was ready")

    def stop(self, ids: tuple[str, ...], graces: Graces) -> None:
        """Have the nursery stop children. One that has not been launched by now never will be."""
        self._deferred = [record for record in self._deferred if record.id not in ids]
        for child_id in ids:
            if child_id not in self._ports:
                self._owner.on_never_started(child_id, "stopped before its process came to be")
        self._tell_nursery(m.Stop(ids, graces))

    def hold(self, key: str, text: bool, fd: int) -> None:
        """Have the nursery, and every one after it, keep a shared context for later children. Takes the descriptor over."""
        self._held[key] = (text, fd)
        if self._nursery is not None:
            self._tell_nursery(m.Hold(key, text), (os.dup(fd),))

    def drop_held(self) -> None:
        """Release all shared contexts, here and in the nursery."""
        keys = tuple(self._held)
        close_fds(fd for _, fd in self._held.values())
        self._held.clear()
        if keys:
            self._tell_nursery(m.Drop(keys))

    # -- a nursery that does not answer

    def _expect_ready(self, nursery: NurseryProcess) -> None:
        if self._nursery is nursery and not nursery.ready:
            self._lose_nursery(f"the nursery was not ready within {_BOOT_S:g} s")

    def _expect_start(self, child_id: str, nursery: NurseryProcess) -> None:
        """Give the nursery up if it has not started a child in time: it is stopped, or stuck."""
        port = self._ports.get(child_id)
        if port is None or port.record.pid is not None or self._nursery is not nursery:
            return
        due = max(port.launched_at, nursery.active_at) + _START_S
        if time.monotonic() < due:
            port.timer = self.call_at(due, lambda: self._expect_start(child_id, nursery))
        else:
            self._lose_nursery(f"the nursery did not start {child_id} within {_START_S:g} s")

    def _expect_end(self, child_id: str, nursery: NurseryProcess, *, killed: bool = False) -> None:
        """Step in for a nursery that has neither ended nor reported a child whose time is up long since."""
        port = self._ports.get(child_id)
        if port is None or self._nursery is not nursery or port.record.pidfd is None:
            return
        if posix.pidfd_has_exited(port.record.pidfd):
            self._lose_nursery(f"the nursery did not report the exit of {child_id}")
        elif not killed:
            self._owner.on_timed_out(child_id)
            posix.signal_pidfd(port.record.pidfd, signal.SIGKILL)
            port.timer = self.call_at(
                time.monotonic() + _OVERDUE_S, lambda: self._expect_end(child_id, nursery, killed=True)
            )

    # -- children

    def launch(self, record: ChildRecord) -> None:
        """Have a child forked. What it is to run is sent when the nursery has said that it exists."""
        if record.phase is not Phase.STARTING or record.id in self._ports:
            # A stop came first (its message may even have overtaken this call), or this is asked for twice.
            self._owner.on_never_started(record.id, "stopped before its process came to be")
            return
        if record in self._deferred:
            return
        spec = record.spec
        opened: list[int] = []
        try:
            nursery = self.ensure_nursery()
            if not nursery.ready:
                # What has been sent cannot be taken back, and the stop of one child would have to wait for the nursery's imports.
                self._deferred.append(record)
                return
            ours, theirs = socket.socketpair()
            opened += [ours.detach(), theirs.detach()]
            opened += os.pipe()
        except (OSError, NurseryError) as error:
            close_fds(opened)
            self._owner.on_spawn_failed(record.id, f"cannot start the child: {error}")
            return
        ours_fd, theirs_fd, log_reader, log_writer = opened
        limits = record.limits
        spawn = m.Spawn(record.id, record.timeout_s, limits.graces, limits.memory_limit_bytes)
        self._tell_nursery(spawn, (theirs_fd, log_writer))
        os.set_blocking(log_reader, False)
        channel: Channel[Any] = Channel(socket.socket(fileno=ours_fd), m.FromChild)
        port = self._ports[record.id] = _Port(record, channel, log_reader, _raw_log(record))
        child_id = record.id
        port.timer = self.call_at(port.launched_at + _START_S, lambda: self._expect_start(child_id, nursery))
        self._selector.register(log_reader, selectors.EVENT_READ, lambda _mask: self._read_log(child_id))
        start = m.Start(
            id=record.id,
            depth=record.depth,
            parent_id=None if record.parent is None else record.parent.id,
            trajectory_path=record.trajectory_path,
            entry=spec.entry,
            task=spec.task,
            inherited=spec.inherited,
            environ=dict(spec.environ),
            secret_environ=dict(spec.secret_environ),
            cwd=spec.cwd,
            sys_path=spec.sys_path,
        )
        attachments, spec.attachments = spec.attachments, ()
        try:
            port.channel.queue(start, attachments)
        except (OSError, ValueError) as error:
            # No memory for the task, more attachments than a message takes, text that is no UTF-8.
            self._owner.on_broken(record.id, f"cannot hand the task over: {error}")

    def _listen_to(self, child_id: str, nursery: NurseryProcess) -> None:
        """Send a child its task, and begin to read its messages.

        Not before the nursery has said that it exists: so its messages come in order, and no code of the task runs in a process whose
        pid, and with it the session of all that it starts, is not known here.
        """
        port = self._ports.get(child_id)
        if port is not None:
            self._selector.register(
                port.channel.fileno(), selectors.EVENT_READ, lambda _mask: self._serve_child(child_id)
            )
            self._flush_child(port)
            record = port.record
            self._timers.cancel(port.timer)
            overdue_at = time.monotonic() + record.timeout_s + record.limits.graces.total_s + _OVERDUE_S
            port.timer = self.call_at(overdue_at, lambda: self._expect_end(child_id, nursery))

    def tell_child(self, child_id: str, message: Any) -> None:
        """Send a child a message; one that is gone gets nothing."""
        port = self._ports.get(child_id)
        if port is not None:
            try:
                port.channel.queue(message)
            except OSError as error:
                self._owner.on_broken(child_id, f"cannot answer the child: {error}")
                return
            self._flush_child(port)

    def _flush_child(self, port: _Port) -> None:
        try:
            complete = port.channel.flush()
        except ChannelClosed:
            return  # The nursery will report its exit.
        child_id = port.record.id
        if port.channel.fileno() in self._selector.get_map():
            self._watch(port.channel.fileno(), lambda _mask: self._serve_child(child_id), writing=not complete)

    def _serve_child(self, child_id: str) -> None:
        self._read_channel(child_id, READS_PER_TURN)
        port = self._ports.get(child_id)
        if port is not None and port.channel.pending:
            self._flush_child(port)

    def _read_channel(self, child_id: str, reads: int | None = None) -> None:
        port = self._ports.get(child_id)
        if port is None or port.channel.closed:
            return
        try:
            messages = port.channel.receive(reads)
        except ChannelBroken as error:
            self._unregister(port.channel.fileno())
            self._owner.on_broken(child_id, f"the child's channel is broken: {error}")
            return
        if port.channel.eof:
            self._unregister(port.channel.fileno())
        for message, fds in _each(messages):
            self._owner.on_message(child_id, message, fds)

    def _read_log(self, child_id: str) -> None:
        port = self._ports.get(child_id)
        if port is None or port.log_fd < 0:
            return
        got = False
        for _ in range(_LOG_READS_PER_TURN):
            try:
                data = os.read(port.log_fd, _LOG_READ)
            except BlockingIOError:
                break
            if not data:
                self._close_log_pipe(port)
                break
            port.log.add(data)
            got = True
        if got:
            self._owner.on_output(child_id, port.log.tail)

    def _close_log_pipe(self, port: _Port) -> None:
        fd, port.log_fd = port.log_fd, -1
        if fd >= 0:
            self._unregister(fd)
            os.close(fd)

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _release(self, child_id: str) -> None:
        port = self._ports.pop(child_id, None)
        if port is None:
            return
        self._timers.cancel(port.timer)
        self._unregister(port.channel.fileno())
        port.channel.close()
        self._close_log_pipe(port)
        port.log.close()

    # -- the nursery is gone

    def _lose_nursery(self, why: str) -> None:
        """Kill what is left of a nursery and its children, and tell the owner of each exit."""
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        self._unregister(nursery.channel.fileno())
        if nursery.pidfd is not None:
            self._unregister(nursery.pidfd)
        with _logged("reading a lost nursery's last messages"):
            for message, fds in _each(nursery.channel.receive()):
                self._on_nursery_message(nursery, message, fds)
        if nursery.channel.eof:
            nursery.wait(_OWN_END_S)
        nursery.kill()
        nursery_gone = nursery.wait(_LOST_GIVE_UP_S)
        give_up_at = time.monotonic() + _LOST_GIVE_UP_S
        leaders = {port.record.pid for port in self._ports.values() if port.record.pid is not None}
        survivors = sweep.kill_marked(nursery.marker, give_up_at, sessions=leaders)
        error = "; ".join(part for part in (why, nursery.describe_exit()) if part)
        nursery.close()
        self._timers.cancel(self._boot_timer)
        while self._deferred:
            record = self._deferred.pop(0)
            with _logged(f"telling the end of {record.id}"):
                self._owner.on_spawn_failed(record.id, error)
        untold, self._untold = self._untold, []
        for tell in untold:
            with _logged("telling an end for the second time"):
                tell()
        # Each by itself: whatever is wrong with one must not leave the others running for ever. All have failed before any has ended,
        # the youngest first: the end of a parent would cancel its children.
        for child_id in reversed(list(self._ports)):
            with _logged(f"reading the last messages of {child_id}"):
                self._read_channel(child_id)
                self._read_log(child_id)
                self._owner.on_broken(child_id, error)
        for child_id, port in list(self._ports.items()):
            with _logged(f"telling the end of {child_id}"):
                self._release(child_id)
                if nursery_gone and self._is_confirmed_gone(port.record, survivors, give_up_at):
                    self._owner.on_exited(m.Exited(child_id, -signal.SIGKILL, leftover=survivors), error)
                else:
                    self._owner.on_unconfirmed(child_id, error)

    def _is_confirmed_gone(self, record: ChildRecord, survivors: tuple[int, ...], give_up_at: float) -> bool:
        pidfd = record.pidfd
        if pidfd is None:
            return record.exit_seen or not survivors
        # A stop on another thread may confirm the exit, and then closes the pidfd, while we look.
        return posix.pidfd_has_exited(pidfd, give_up_at - time.monotonic()) or record.exit_seen

    # -- the end

    def _begin_close(self, kill_at: float) -> None:
        self._stopping = True
        if self._ports or self._deferred:
            self._lose_nursery("the supervisor was closed")
        nursery = self._nursery
        if nursery is None:
            return
        self._unregister(nursery.channel.fileno())
        if nursery.pidfd is not None:
            self._unregister(nursery.pidfd)
        nursery.channel.close()
        self._timers.cancel(self._boot_timer)
        if not nursery.ready or not nursery.wait(kill_at - time.monotonic()):
            nursery.kill()
            nursery.wait(_LOST_GIVE_UP_S)
        nursery.close()
        self._nursery = None


def _each(messages: list[tuple[Any, tuple[int, ...]]]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield messages; if whoever takes them breaks off, close the descriptors of the rest."""
    rest = deque(messages)
    try:
        while rest:
            yield rest.popleft()
    finally:
        for _, fds in rest:
            close_fds(fds)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an unexpected error, and go on after the block."""
    try:
        yield
    except Exception:
        _log.critical("unexpected error while %s", what, exc_info=True)
