"""The nursery: a single-threaded fork server, and the parent of every child process of every depth.

Who runs it: a process of its own, freshly exec'ed by the root (its own session, a scrubbed environment), with one
thread for life. It imports what children need, warms it up, freezes the garbage collector, and then only forks, reaps
and signals. It never unpickles anything and never runs code of the user's.

What it owns: the control channel to the root; the pid of every child until it has reaped it (an unreaped child pins its
pid, so signalling it by number is free of races); the schedule of every stop; every child's wall-clock timeout. Stops
and timeouts live here rather than in the root, because native code that holds the root's interpreter lock cannot delay
them.

How each step can fail, and what then happens:

* the root dies: the kernel's pidfd becomes readable (end-of-file on the control channel is taken as well, but is not relied on: a
  process that user code forked in the kernel may hold a copy of it). Every child is stopped with its own graces, then
  the nursery exits;
* the root stops reading: messages queue up here; forking, reaping and stopping go on;
* a fork fails: `SpawnFailed`;
* a child ends, however it ends: it is seen by ``waitid(WNOWAIT)``, its process group is killed while the zombie still pins the
  number, it is reaped, and what it left behind, which the kernel has handed to us as a subreaper, is killed and reaped.
  Only then `Exited` is sent. What cannot be confirmed within the kill grace is named in it;
* a child does not react: SIGINT (repeated twice, see `_ASK_AGAIN_S`), SIGTERM and SIGKILL follow each other, for all children side by side;
* the nursery itself is killed: the children's parent-death signal takes them along, and the root finds what is left;
* an unexpected exception here ends the process, which is the case above.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlm_kernel.children import forking, posix, worker
from rlm_kernel.children.escalation import Escalation, Step
from rlm_kernel.values import Graces
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.anonymous import read_anonymous
from rlm_kernel.wire.channel import READS_PER_TURN, Channel, ChannelBroken, ChannelClosed, close_fds

_PARENT_CHECK_S = 0.5
"""How often the parent is compared with the kernel's pid where there are no pidfds, and only there."""

_LONGEST_POLL_MS = 3_600_000.0
"""A poll takes no more than about 24 days, and a child may have been given a year."""

_MEMORY_SAMPLE_S = 0.1
"""How often the memory of children with a limit is looked at: there is no event for it. A look costs about 0.3 ms."""

_ASK_AGAIN_S = (0.02, 0.1)
"""Seconds after which the request to stop is repeated. Python notices a signal that comes just before a system call only when that call
returns; the second one ends the call, and the worker takes both for one."""

_SIGNAL_OF_STEP = {Step.ASK: signal.SIGINT, Step.TERMINATE: signal.SIGTERM, Step.KILL: signal.SIGKILL}


@dataclass(slots=True)
class _Child:
    """One child from its fork to its `Exited` message."""

    id: str
    pid: int
    graces: Graces
    timeout_at: float
    memory_limit_bytes: int | None = None
    over_limit: bool = False
    stop: Escalation | None = None
    code: int = 0
    give_up_at: float = 0.0
    sent: set[Step] = field(default_factory=set)
    ask_again_at: list[float] = field(default_factory=list)

    @property
    def samples_memory(self) -> bool:
        return self.memory_limit_bytes is not None and not self.over_limit


class Nursery:
    """The loop of the nursery process. One thread; see the module's docstring."""

    def __init__(self, control: socket.socket, kernel_pid: int, kernel_pidfd: int | None) -> None:
        self._channel: Channel[m.ToNursery] = Channel(control, m.ToNursery)
        self._kernel_pid = kernel_pid
        self._kernel_pidfd = kernel_pidfd
        self._children: dict[str, _Child] = {}
        self._by_pid: dict[int, _Child] = {}
        self._gone: list[_Child] = []
        self._leaving = False
        self._stop_everything = False
        self._memory_sampled = 0.0
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._poller = select.poll()

    # -- set-up

    def install_signals(self) -> None:
        """Take over the signals: those of children wake the loop, those that end us ask it to stop everything."""
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._on_end_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        posix.become_subreaper()

    def _on_end_signal(self, *_: object) -> None:
        self._stop_everything = True

    def announce(self, boot_s: float, warnings: Sequence[str]) -> None:
        """Tell the root that spawns are served from now on."""
        self._channel.queue(m.NurseryReady(boot_s, tuple(warnings)))

    # -- the loop

    def run(self) -> None:
        """Serve until the root wants no more children, or is gone, and none is left."""
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(self._channel.fileno(), select.POLLIN)
        if self._kernel_pidfd is not None:
            self._poller.register(self._kernel_pidfd, select.POLLIN)
        while not (self._leaving and not self._children and not self._gone):
            self._flush()
            ready = {fd for fd, _ in self._poller.poll(self._poll_timeout_ms())}
            if self._wake_reader.fileno() in ready:
                self._drain_wakeups()
            if self._kernel_is_gone(ready) or self._stop_everything:
                self._leave()
            if not self._channel.closed and self._channel.fileno() in ready:
                self._serve_root()
            self._reap()
            self._sweep()
            self._run_timers()
        self._flush()

    def _poll_timeout_ms(self) -> float | None:
        due = [child.timeout_at for child in self._children.values() if child.stop is None]
        due += [at for child in self._children.values() if child.stop and (at := child.stop.next_due()) is not None]
        due += [child.ask_again_at[0] for child in self._children.values() if child.ask_again_at]
        due += [child.give_up_at for child in self._gone]
        now = time.monotonic()
        if any(child.samples_memory for child in self._children.values()):
            due.append(max(now, self._memory_sampled + _MEMORY_SAMPLE_S))
        if self._kernel_pidfd is None and not self._leaving:
            due.append(now + _PARENT_CHECK_S)
        return None if not due else min(max(0.0, min(due) - now) * 1000 + 0.5, _LONGEST_POLL_MS)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _kernel_is_gone(self, ready: set[int]) -> bool:
        if self._kernel_pidfd is not None:
            return self._kernel_pidfd in ready
        return os.getppid() != self._kernel_pid

    def _leave(self) -> None:
        """Stop every child and exit when none is left; nobody is listening any more."""
        if self._kernel_pidfd is not None and self._kernel_pidfd >= 0:
            with contextlib.suppress(KeyError):
                self._poller.unregister(self._kernel_pidfd)
            self._kernel_pidfd = None
        self._stop_everything = False
        self._leaving = True
        self._hang_up()
        now = time.monotonic()
        for child in self._children.values():
            self._begin_stop(child, now, child.graces)

    def _hang_up(self) -> None:
        if not self._channel.closed:
            self._poller.unregister(self._channel.fileno())
            self._channel.close()

    def _flush(self) -> None:
        """Send what is queued; what the socket does not take now goes out when it is writable."""
        if self._channel.closed:
            return
        try:
            complete = self._channel.flush()
        except ChannelClosed:
            self._leave()
            return
        self._poller.modify(self._channel.fileno(), select.POLLIN if complete else select.POLLIN | select.POLLOUT)

    def _tell(self, message: m.FromNursery, fds: Sequence[int] = ()) -> None:
        if self._channel.closed:
            close_fds(fds)
        else:
            self._channel.queue(message, fds)

    # -- requests of the root

    def _serve_root(self) -> None:
        try:
            received = self._channel.receive(READS_PER_TURN)
        except ChannelBroken as error:
            print(f"control channel broken: {error}", file=sys.stderr)
            self._leave()
            return
        for message, fds in received:
            match message:
                case m.Spawn():
                    self._spawn(message, fds)
                case m.Stop():
                    self._stop(message)
                case m.Hold():
                    self._hold(message, fds)
                case m.Drop():
                    for key in message.keys:
                        worker.INHERITED.pop(key, None)
                case m.Quit():
                    self._leaving = True
        if self._channel.eof:
            self._leave()

    def _spawn(self, spawn: m.Spawn, fds: tuple[int, ...]) -> None:
        nursery_pid = os.getpid()

        def be_child() -> int:
            return worker.be_child(
                nursery_pid=nursery_pid,
                channel_fd=fds[0],
                log_fd=fds[1],
                memory_limit_bytes=spawn.memory_limit_bytes,
            )

        try:
            pid = forking.fork(be_child)
        except (OSError, forking.ForkRefused) as error:
            self._tell(m.SpawnFailed(spawn.id, str(error)))
            return
        finally:
            close_fds(fds)
        now = time.monotonic()
        child = _Child(spawn.id, pid, spawn.graces, now + spawn.timeout_s, spawn.memory_limit_bytes)
        self._children[spawn.id] = self._by_pid[pid] = child
        pidfd = posix.open_pidfd(pid)
        self._tell(m.Started(spawn.id, pid, now), () if pidfd is None else (pidfd,))

    def _hold(self, hold: m.Hold, fds: tuple[int, ...]) -> None:
        data = read_anonymous(fds[0])
        close_fds(fds)
        worker.INHERITED[hold.key] = data.decode("utf-8", "surrogatepass") if hold.text else data

    # -- stopping

    def _stop(self, stop: m.Stop) -> None:
        now = time.monotonic()
        for child_id in stop.ids:
            child = self._children.get(child_id)
            if child is not None:
                self._begin_stop(child, now, stop.graces)

    def _begin_stop(self, child: _Child, now: float, graces: Graces) -> None:
        if child.stop is None:
            child.stop = Escalation.begin(now, graces)
        else:
            child.stop.hasten(now, graces)

    def _sample_memory(self, now: float) -> None:
        """Kill what uses more private memory than it may. At once: asking would give it time to take more."""
        if now < self._memory_sampled + _MEMORY_SAMPLE_S:
            return
        self._memory_sampled = now
        for child in self._children.values():
            limit = child.memory_limit_bytes
            if limit is None or child.over_limit:
                continue
            used = posix.private_bytes(child.pid)
            if used is not None and used > limit:
                child.over_limit = True
                self._tell(m.OverLimit(child.id, used))
                self._begin_stop(child, now, child.graces.from_kill())

    def _run_timers(self) -> None:
        now = time.monotonic()
        self._sample_memory(now)
        for child in self._children.values():
            if child.stop is None and child.timeout_at <= now:
                self._tell(m.TimedOut(child.id))
                self._begin_stop(child, now, child.graces)
            while child.stop is not None and (step := child.stop.pop_due(now)) is not None:
                self._signal(child, step)
            while child.ask_again_at and child.ask_again_at[0] <= now:
                child.ask_again_at.pop(0)
                _kill(child.pid, _SIGNAL_OF_STEP[Step.ASK])

    def _signal(self, child: _Child, step: Step) -> None:
        """Signal a child that has not been reaped. The request goes to the run itself, the two signals after it to its whole group."""
        child.sent.add(step)
        signum = _SIGNAL_OF_STEP[step]
        _kill(child.pid, signum)
        if step is Step.ASK:
            now = time.monotonic()
            child.ask_again_at = [now + pause_s for pause_s in _ASK_AGAIN_S]
        else:
            child.ask_again_at = []
            posix.kill_group(child.pid, signum)

    # -- reaping

    def _reap(self) -> None:
        while (ended := _reap_one(self._by_pid)) is not None:
            pid, status = ended
            child = self._by_pid.pop(pid, None)
            if child is not None:
                del self._children[child.id]
                child.code = os.waitstatus_to_exitcode(status)
                child.give_up_at = time.monotonic() + child.graces.kill_s
                self._gone.append(child)

    def _sweep(self) -> None:
        """Kill what dead children left behind, and report the exits once nothing of it is left."""
        if not self._gone:
            return
        strangers = [pid for pid in posix.children_of_this_process() if pid not in self._by_pid]
        for pid in strangers:
            # They are our own unreaped children now, so the number is theirs.
            _kill(pid, signal.SIGKILL)
        now = time.monotonic()
        if strangers and now < min(child.give_up_at for child in self._gone):
            return
        for child in self._gone:
            self._tell(
                m.Exited(
                    child.id,
                    child.code,
                    asked=Step.ASK in child.sent,
                    terminated=Step.TERMINATE in child.sent,
                    killed=Step.KILL in child.sent,
                    leftover=tuple(strangers),
                )
            )
        self._gone.clear()


def _kill(pid: int, signum: int) -> None:
    """Signal a process of ours that has not been reaped: the number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _reap_one(group_leaders: Container[int]) -> tuple[int, int] | None:
    """Reap one process that has ended, killing the process group of a group leader first.

    Returns:
        its pid and wait status, None if no process has ended.
    """
    try:
        if not hasattr(os, "waitid"):
            # macOS: without WNOWAIT the group can only be killed after the reaping, when its number could in theory be taken anew.
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in group_leaders:
                posix.kill_group(pid, signal.SIGKILL)
            return (pid, status) if pid else None
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_pid in group_leaders:
            posix.kill_group(info.si_pid, signal.SIGKILL)
        return os.waitpid(info.si_pid, 0)
    except ChildProcessError:
        return None


def _load(options: dict[str, Any]) -> None:
    """Import the preloads. One that leaves a thread behind is dropped: this process starts over without it, as the same process.

    Args:
        options: what `main` was given; what is to be told to the user is added to its ``warnings``.
    """
    for name in options["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            options["warnings"].append(f"preload {name!r} failed: {type(error).__name__}: {error}")
        if posix.thread_count() > 1:
            threads = ", ".join(posix.thread_names())
            options["warnings"].append(
                f"preload {name!r} was left out: it leaves threads behind ({threads}), and a process with threads cannot fork"
            )
            options["preload"] = [other for other in options["preload"] if other != name]
            os.execv(sys.executable, [*sys.orig_argv[:-1], json.dumps(options)])


def _warm_up(entry: str) -> list[str]:
    """Warm what children need. Returns warnings."""
    warnings = []
    if entry:
        module, _, name = entry.partition(":")
        getattr(importlib.import_module(module), name)()
    posix.warm_up()
    if posix.thread_count() > 1:
        warnings.append(f"warming up left threads behind ({', '.join(posix.thread_names())})")
    gc.collect()
    gc.freeze()
    gc.enable()
    return warnings


def main(argv: Sequence[str]) -> None:
    """Run the nursery: ``argv`` is one JSON object, written by `NurseryProcess`."""
    try:
        _main(json.loads(argv[0]))
    except BaseException:
        # The channel closes with the exit, not long before it: whoever sees it closed finds the exit code, too.
        sys.excepthook(*sys.exc_info())
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)


def _main(options: dict[str, Any]) -> None:
    began = time.monotonic()
    gc.disable()  # until `_warm_up` has frozen what is here: collections in the middle of the imports take a tenth of the time
    # Nobody looks out for the kernel's end while this process imports, and it has no children yet.
    if posix.set_parent_death_signal(signal.SIGKILL) and os.getppid() != options["kernel_pid"]:
        return
    nursery = Nursery(socket.socket(fileno=options["control_fd"]), options["kernel_pid"], options["kernel_pidfd"])
    nursery.install_signals()
    options.setdefault("warnings", [])
    _load(options)
    warnings = [*options["warnings"], *_warm_up(options["warm_up"])]
    # From here on the end of the kernel is seen and cleaned up after; but if this process is stopped then (SIGSTOP), it must go on first.
    posix.set_parent_death_signal(signal.SIGCONT)
    nursery.announce(time.monotonic() - began, warnings)
    nursery.run()
