"""The supervisor: admits, tracks and stops every child of every depth. Lives in the root process.

Who runs it: any thread of the root process may call the public methods; what comes from the nursery and from the
children arrives on the reactor's thread. One plain lock guards the registry and its records. It is held for dictionary
work only: never across a fork, a callback, a wait or I/O that could block. What is to be done after a decision
(*effects*) is taken out under the lock and carried out after it is released.

It owns the registry, the reactor and the pidfd of every child whose exit is not confirmed.

`stop` is the one way in which children are ended from outside. It runs on the caller's thread (a lifecycle thread, not
the reactor), so it ends in time even if the nursery or the reactor does not answer:

1. the children are marked as stopping and the nursery is told: request, SIGTERM, SIGKILL, each after its grace;
2. if their exits are not confirmed when SIGKILL is due and a little more, the supervisor kills them itself through
their pidfds;
3. if that does not help, it kills the nursery, and the parent-death signal ends whatever it had forked;
4. what cannot be confirmed then, by the nursery's report or by pidfd, is returned as survivors. It is never silently
dropped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlm_kernel.children import posix
from rlm_kernel.children.callgate import CallGate, Permission
from rlm_kernel.children.nursery_process import NurseryProcess
from rlm_kernel.children.observers import ObserverThread, hide_from_debugger
from rlm_kernel.children.reactor import Reactor
from rlm_kernel.children.records import ChildRecord, ChildSpec, Limits
from rlm_kernel.children.registry import Call, Effect, Finished, Launch, Registry, StopProcesses, Waiter
from rlm_kernel.children.states import Event, Outcome, Phase
from rlm_kernel.children.timers import Timer
from rlm_kernel.errors import (
    ChildCleanupError,
    ChildLimitError,
    EpisodeClosing,
    ForkedProcessError,
    NurseryError,
    RLMError,
    UsageMistake,
)
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Graces, Usage
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import close_fds

_log = logging.getLogger(__name__)

_TAKEOVER_S = 0.15
"""Seconds after SIGKILL is due at which the supervisor stops relying on the nursery. A healthy one needs a few milliseconds."""

_WARN_AT = 0.8
"""Part of ``max_children_total`` at which the user is warned."""

_CLOSE_S = 1.0
"""Seconds that an idle nursery is given to exit before it is killed."""

Ref = tuple[str, str | None]
"""Child id and, from a handle, its episode."""

ChildListener = Callable[[ChildStatus], None]


@dataclass(frozen=True, slots=True)
class NurserySettings:
    """How a nursery is started."""

    warm_up: str = ""
    preload: tuple[str, ...] = ()
    keep_secrets: tuple[str, ...] = ()
    log_path: str = ""


@dataclass(slots=True, eq=False)
class _StopTally:
    """What the nursery reported about the children that one stop covers."""

    asked: int = 0
    terminated: int = 0
    killed: int = 0
    leftover: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _RootWait:
    """One wait of the root's. ``over`` is released when it is over."""

    waiter: Waiter
    over: threading.Lock
    interrupted: bool = False
    on_main_thread: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())


class Supervisor:
    """See the module's docstring.

    Args:
        settings: how to start nurseries.
        paths: gives log path and trajectory path for a child id; empty strings for none. Called under the lock: it only
        names.
        on_change: called on the observer thread with a status whenever a child changes its state.
        on_warning: called on the observer thread with one line for the user.
    """

    def __init__(
        self,
        settings: NurserySettings | None = None,
        *,
        paths: Callable[[str], tuple[str, str]] = lambda _id: ("", ""),
        on_change: ChildListener | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings or NurserySettings()
        self.observers = ObserverThread()
        self._paths = paths
        self._on_change = on_change
        self._on_warning = on_warning
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._registry = Registry()
        self._reactor = Reactor(self, self._start_nursery)
        self._gate = CallGate()
        self._admitting = True
        self._tallies: list[_StopTally] = []
        self._root_waits: list[_RootWait] = []
        self._published: dict[str, ChildState] = {}

    # -- set-up

    def configure(self, limits: Limits) -> None:
        """Set the limits that later admissions meet."""
        with self._lock:
            self._registry.limits = limits
            self._gate.max_concurrent = limits.max_concurrent_model_calls
            self._gate.max_tokens = limits.max_total_tokens

    def begin_episode(self, episode_id: str) -> None:
        """Begin an episode: handles of the one before become stale. All its children must have ended."""
        with self._lock:
            for record in self._registry.records.values():
                self._close_pidfd(record)  # of one that was abandoned: nobody will find its record any more
            self._registry.begin_episode(episode_id)
            self._gate.spent = 0
            self._published.clear()

    def prepare(self) -> None:
        """Start a nursery now, so that the first child need not wait for it."""
        self._check_process()
        self._reactor.post(self._prepare)

    def _prepare(self) -> None:
        try:
            self._reactor.ensure_nursery()
        except (NurseryError, OSError) as error:
            _log.warning("%s", error)  # the first child will try again, and fail with this if it must

    def _start_nursery(self) -> NurseryProcess:
        s = self.settings
        return NurseryProcess.start(
            warm_up=s.warm_up, preload=s.preload, keep_secrets=s.keep_secrets, log_path=s.log_path
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this process was forked by user code; children can only be used from the process that the session runs in"
            )

    # -- admission

    def admit_children(self, admit: bool) -> None:
        """Open or close the door for new children. What is running is not touched."""
        with self._lock:
            self._admitting = admit

    def start(self, specs: Sequence[ChildSpec], caller: ChildRecord | None = None) -> list[ChildStatus]:
        """Start children, all or none. Returns at once; the processes come to be in the background.

        Args:
            specs: what to run. The supervisor owns their descriptors from now on, also when this raises.
            caller: the child that asks, None for the root.

        Raises:
            ChildLimitError: a limit would be exceeded.
            EpisodeClosing: a stop is under way.
            NurseryError: there is no supervisor thread to be had.
            ForkedProcessError: this process was forked by user code.
        """
        try:
            self._check_process()
            with self._lock:
                if not self._admitting:
                    raise EpisodeClosing("a stop is under way; start children again when it is done")
                if caller is not None and caller.phase not in (Phase.RUNNING, Phase.WAITING):
                    raise EpisodeClosing(f"{caller.id} is being stopped and cannot start children")
                if self._gate.exhausted:
                    raise budget_error(self._gate.max_tokens)
                records = self._registry.admit(specs, caller, self._paths)
                self._registry.dispatch()
                statuses = [record.status() for record in records]
                effects = self._registry.take_effects()
                started = self._registry.started_in_episode
            self._carry_out(effects)
            for record in records:
                self._publish(record)
            self._warn_near_limit(started - len(records), started)
        except BaseException as error:
            # An interrupt may have come at any point: all or none holds for it, too.
            self._take_back(specs, f"its start was broken off: {type(error).__name__}: {error}")
            raise
        return statuses

    def _warn_near_limit(self, before: int, now: int) -> None:
        """Say once when most of the children that an episode may start have been started."""
        with self._lock:
            limit = self._registry.limits.max_children_total
        if self._on_warning is not None and before < _WARN_AT * limit <= now:
            text = (
                f"{now} of the {limit} children that this episode may start have been started; "
                f"`%rlm config max_children_total={2 * limit}` raises the limit"
            )
            self.observers.publish(functools.partial(self._on_warning, text))

    def _take_back(self, specs: Sequence[ChildSpec], why: str) -> None:
        """Stop what a start that raised had begun, and close what was not sent."""
        ids = {id(spec) for spec in specs}
        with self._lock:
            begun = [record for record in self._registry.live() if id(record.spec) in ids]
            self._registry.stop(begun, None)
            effects = self._registry.take_effects()
        for spec in specs:
            if id(spec) not in {id(record.spec) for record in begun}:
                spec.close()
        try:
            self._carry_out(effects)
        except NurseryError:
            # There is no thread to tell, so none of them has been launched either.
            with self._lock:
                for record in begun:
                    self._registry.never_started(record, why)
                effects = self._registry.take_effects()
            self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Launch(record):
                    self._reactor.post(lambda record=record: self._reactor.launch(record))  # type: ignore[misc]
                case StopProcesses(records, graces):
                    ids = tuple(record.id for record in records)
                    self._reactor.post(lambda ids=ids, graces=graces: self._reactor.stop(ids, graces))  # type: ignore[misc]
                case Finished(record):
                    self._finish(record)
                case Call(callback):
                    try:
                        callback()
                    except Exception:
                        _log.error("a callback at the end of a wait raised", exc_info=True)

    def _finish(self, record: ChildRecord) -> None:
        with self._lock:
            if record.exit_seen:
                self._close_pidfd(record)
            record.release_payload()
            answers = self._gate.gone(record.id)
        for answer in answers:
            answer()
        self._publish(record)

    @staticmethod
    def _close_pidfd(record: ChildRecord) -> None:
        if record.pidfd is not None:
            pidfd, record.pidfd = record.pidfd, None
            close_fds([pidfd])

    def _publish(self, record: ChildRecord) -> None:
        if self._on_change is None:
            return
        with self._lock:
            status = record.status()
            if self._published.get(record.id) is status.state:
                return
            self._published[record.id] = status.state
            # Under the lock, for the order: what is published last must be the newest. It only appends to a queue.
            on_change = self._on_change
            self.observers.publish(lambda: on_change(status))

    # -- looking

    def status(self, refs: Sequence[Ref] | None = None, caller: ChildRecord | None = None) -> list[ChildStatus]:
        """Take snapshots: of the named children, or of all that the caller can see.

        Raises:
            UnknownHandleError, StaleHandleError: a reference names no child of this episode and caller.
        """
        self._check_process()
        with self._lock:
            return [record.status() for record in self._find(refs, caller)]

    def _find(self, refs: Sequence[Ref] | None, caller: ChildRecord | None) -> list[ChildRecord]:
        if refs is None:
            return self._registry.visible_to(caller)
        return [self._registry.find(child_id, caller, episode) for child_id, episode in refs]

    def wait(self, refs: Sequence[Ref], timeout_s: float | None = None, *, any_: bool = False) -> list[ChildStatus]:
        """Wait, on behalf of the root, until all (or any) of the children have ended. A timeout changes nothing about
        them.

        The wait is interruptible by signals on the main thread and by `interrupt_waits` on the others, and thread-safe.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        self._check_process()
        over = threading.Lock()
        over.acquire()
        wait: _RootWait | None = None
        try:
            with self._lock:
                records = self._find(refs, None)
                waiter = self._registry.add_waiter(records, any_, over.release)
                if waiter is not None:
                    wait = _RootWait(waiter, over)
                    self._root_waits.append(wait)
            if wait is not None:
                over.acquire(timeout=-1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        finally:
            if wait is not None:
                with self._lock:
                    self._registry.remove_waiter(wait.waiter)
                    self._root_waits.remove(wait)
        if wait is not None and wait.interrupted:
            raise KeyboardInterrupt("the children that this waited for are being stopped")
        with self._lock:
            return [record.status() for record in records]

    def interrupt_waits(self) -> None:
        """Have waits on threads other than the main one raise `KeyboardInterrupt`: no signal reaches them."""
        with self._lock:
            for wait in self._root_waits:
                if not wait.on_main_thread and not wait.waiter.over:
                    wait.interrupted = True
                    self._registry.remove_waiter(wait.waiter)
                    wait.over.release()

    def call_when_done(self, ref: Ref, callback: Callable[[], None]) -> bool:
        """Have ``callback`` called once, on some thread of ours, when the child has ended.

        Returns:
            False if it has ended already; the callback is not called then.
        """
        self._check_process()
        with self._lock:
            record = self._find([ref], None)[0]
            return self._registry.add_waiter([record], False, callback) is not None

    def usage(self) -> Usage:
        """Return the usage of all children of the episode."""
        with self._lock:
            return self._registry.total_usage()

    @property
    def started_in_episode(self) -> int:
        """How many children the episode has started."""
        with self._lock:
            return self._registry.started_in_episode

    @property
    def live_ids(self) -> list[str]:
        """Ids of the children that have not ended."""
        with self._lock:
            return [record.id for record in self._registry.live()]

    @property
    def nursery_pid(self) -> int | None:
        return self._reactor.nursery_pid

    # -- shared contexts

    def hold(self, key: str, fd: int, *, text: bool) -> None:
        """Have the nursery hold bytes (or the text that they encode) for the children that are started from now on.

        Args:
            fd: the bytes; the supervisor owns it from now on.
        """
        self._check_process()
        try:
            self._reactor.post(lambda: self._reactor.hold(key, text, fd))
        except NurseryError:
            close_fds([fd])
            raise

    def release_held(self) -> None:
        """Release everything that is held. Children that were started keep what they inherited."""
        with contextlib.suppress(NurseryError):
            self._reactor.post(self._reactor.drop_held)

    # -- model calls

    @property
    def gates_calls(self) -> bool:
        """Whether model calls must be asked for."""
        with self._lock:
            return self._gate.is_needed

    def begin_call(self) -> None:
        """Ask, on behalf of the root, for permission to make a model call; wait until there is room for it.

        Raises:
            ChildLimitError: the token budget of the tree is spent.
        """
        answered = threading.Lock()
        answered.acquire()
        refusals: list[None] = []

        def refused() -> None:
            refusals.append(None)
            answered.release()

        granted = answered.release
        with self._lock:
            permission = self._gate.ask(ROOT, granted, refused)
            limit = self._gate.max_tokens
        if permission is Permission.QUEUED:
            try:
                answered.acquire()
            except BaseException:
                with self._lock:
                    taken_back = self._gate.withdraw(granted)
                if not taken_back:
                    self.end_call(Usage())
                raise
        if permission is Permission.REFUSED or refusals:
            raise budget_error(limit)

    def end_call(self, usage: Usage) -> None:
        """A model call of the root has ended (with no tokens, if it failed)."""
        with self._lock:
            answers = self._gate.ended(ROOT, usage)
        for answer in answers:
            answer()

    # -- steering

    def send(self, ref: Ref, text: str, caller: ChildRecord | None = None) -> ChildStatus:
        """Hand a message to a child, to be seen before its next model call; its status counts what was sent and seen.

        Raises:
            UsageMistake: the child has ended, so nobody would see it.
        """
        self._check_process()
        with self._lock:
            record = self._find([ref], caller)[0]
            if record.outcome is not None or record.ended:
                raise UsageMistake(
                    f"{record.id} is {record.state} and will make no further model call; nothing was sent"
                )
            record.messages_sent += 1
            if record.pid is None:
                record.undelivered.append(text)
            status = record.status()
            deliver = record.pid is not None
        if deliver:
            self._reactor.post(lambda: self._reactor.tell_child(record.id, m.Steer(text)))
        return status

    def cancel(self, ref: Ref, grace_s: float | None = None, caller: ChildRecord | None = None) -> CleanupReport:
        """Stop one child and its descendants, and wait until their exits are confirmed.

        Args:
            grace_s: seconds for the cooperative request, None for the configured grace.
        """
        self._check_process()
        with self._lock:
            graces = self._find([ref], caller)[0].limits.graces
        if grace_s is not None:
            graces = replace(graces, shutdown_s=grace_s)
        return self.stop("cancel", graces, [ref])

    # -- stopping

    def stop(self, verb: str, graces: Graces, refs: Sequence[Ref] | None = None) -> CleanupReport:
        """Stop children and their descendants, and wait until each exit is confirmed.

        Args:
            verb: what this is called in the report.
            graces: seconds for each step.
            refs: the children, None for all.

        Returns:
            the report; its ``survivors`` are what could not be confirmed within the graces.
        """
        self._check_process()
        began = time.monotonic()
        done = threading.Lock()
        done.acquire()
        tally = _StopTally()
        with self._lock:
            named = self._registry.live() if refs is None else self._find(refs, None)
            targets = [
                r for n in named for r in (n, *n.descendants()) if not r.ended or (r.given_up and not r.exit_seen)
            ]
            targets = list(dict.fromkeys(targets))
            if refs is None:
                targets += [r for r in self._registry.records.values() if r.given_up and not r.exit_seen]
            self._tallies.append(tally)
            self._registry.stop(targets, graces)
            waiter = self._registry.add_waiter(targets, False, done.release)
            effects = self._registry.take_effects()
        try:
            with contextlib.suppress(NurseryError):
                self._carry_out(effects)
            self._confirm(targets, waiter is None, done, began, graces, everything=refs is None)
        except BaseException:
            # An interrupt: who has been marked as stopping must have been told, too.
            with self._lock:
                self._registry.stop(targets, graces)
                effects = self._registry.take_effects()
            with contextlib.suppress(NurseryError):
                self._carry_out(effects)
            raise
        finally:
            with self._lock:
                if waiter is not None:
                    self._registry.remove_waiter(waiter)
                self._tallies.remove(tally)
        return self._report(verb, began, targets, tally)

    def _confirm(
        self,
        targets: list[ChildRecord],
        already: bool,
        done: threading.Lock,
        began: float,
        graces: Graces,
        *,
        everything: bool,
    ) -> None:
        """Steps 1 to 3 of the module's docstring. The nursery is only killed if every child is to go."""

        def settled(until: float) -> bool:
            nonlocal already
            already = already or done.acquire(timeout=max(0.0, until - time.monotonic()))
            if already and not self._all_gone(targets):
                # All have ended, but some of them only because an earlier stop gave them up: look at these themselves.
                self._wait_by_pidfd(targets, until)
                self._confirm_by_pidfd(targets)
            return already and self._all_gone(targets)

        kill_due = began + graces.shutdown_s + graces.terminate_s
        give_up = kill_due + graces.kill_s
        if everything and targets:
            # On the reactor's thread, behind the launches that this stop follows: the nursery may only just be coming to be.
            with contextlib.suppress(NurseryError):
                self._reactor.post(self._reactor.kill_booting_nursery)
        if settled(min(kill_due + _TAKEOVER_S, give_up)):
            return
        self._kill_directly(targets)
        if settled(give_up - graces.kill_s / 2):
            return
        if everything:
            self._reactor.kill_nursery()
        if settled(give_up):
            return
        self._confirm_by_pidfd(targets)
        with self._lock:
            for record in targets:
                if not record.ended:
                    self._registry.give_up(record)
            effects = self._registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._carry_out(effects)

    def _all_gone(self, targets: list[ChildRecord]) -> bool:
        with self._lock:
            return all(record.exit_seen for record in targets)

    def _kill_directly(self, targets: list[ChildRecord]) -> None:
        with self._lock:
            for record in targets:
                if record.pidfd is not None and not record.exit_seen:
                    posix.signal_pidfd(record.pidfd, signal.SIGKILL)

    def _wait_by_pidfd(self, targets: list[ChildRecord], until: float) -> None:
        with self._lock:
            # Copies: the reactor closes the originals when it hears of an exit.
            pidfds = [os.dup(r.pidfd) for r in targets if r.pidfd is not None and not r.exit_seen]
        try:
            for pidfd in pidfds:
                posix.pidfd_has_exited(pidfd, until - time.monotonic())
        finally:
            close_fds(pidfds)

    def _confirm_by_pidfd(self, targets: list[ChildRecord]) -> None:
        """Confirm exits without the nursery's word."""
        with self._lock:
            for record in targets:
                if record.pidfd is not None and not record.exit_seen and posix.pidfd_has_exited(record.pidfd):
                    self._registry.exited(record, -signal.SIGKILL, "killed; the nursery did not answer")
            effects = self._registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._carry_out(effects)

    def _report(self, verb: str, began: float, targets: list[ChildRecord], tally: _StopTally) -> CleanupReport:
        with self._lock:
            stopped = tuple(r.id for r in targets if r.exit_seen and r.outcome is Outcome.CANCELLED)
            survivors = {record.pid for record in targets if not record.exit_seen and record.pid is not None}
            unknown = [record.id for record in targets if not record.exit_seen and record.pid is None]
        survivors |= {pid for pid in tally.leftover if posix.parent_and_state(pid) is not None}
        if unknown:
            # A child whose pid we never learned can only come from a nursery that does not answer: name that.
            survivors |= {pid for pid in (self.nursery_pid,) if pid is not None}
        return CleanupReport(
            verb=verb,
            duration_s=time.monotonic() - began,
            stopped=stopped,
            asked=tally.asked,
            terminated=tally.terminated,
            killed=tally.killed,
            survivors=tuple(sorted(survivors)),
        )

    def hasten(self) -> None:
        """Skip to SIGKILL for everything that is being stopped."""
        with self._lock:
            records = self._registry.live()
            if not records:
                return
            self._registry.stop(records, records[0].limits.graces.from_kill())
            effects = self._registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._carry_out(effects)

    def close(self) -> bool:
        """End the nursery and our threads. Call it when every child has ended; those that have not are killed.

        Returns:
            whether they are gone.
        """
        if os.getpid() != self._pid:
            return True
        if self.live_ids:
            with self._lock:
                graces = self._registry.limits.graces.from_kill()
            self.stop("close", graces)
        gone = self._reactor.close(_CLOSE_S)
        self.observers.close()
        return gone

    # -- what the reactor tells (reactor thread)

    def _apply(self, child_id: str, change: Callable[[ChildRecord], None]) -> None:
        with self._lock:
            record = self._registry.records.get(child_id)
            if record is None:
                return
            change(record)
            effects = self._registry.take_effects()
        self._publish(record)
        self._carry_out(effects)

    def on_nursery_ready(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            _log.warning("nursery: %s", warning)
            if self._on_warning is not None:
                self.observers.publish(functools.partial(self._on_warning, warning))

    def on_started(self, child_id: str, pid: int, pidfd: int | None) -> None:
        kept = False

        def change(record: ChildRecord) -> None:
            nonlocal kept
            if not record.exit_seen:
                record.pidfd, kept = pidfd, True
            record.pid = pid
            record.started_wall = time.time()
            record.started_mono = record.active_mono = time.monotonic()
            self._registry.apply(record, Event.STARTED)
            waiting.extend(record.undelivered)
            record.undelivered.clear()

        waiting: list[str] = []
        self._apply(child_id, change)
        for text in waiting:
            self._reactor.tell_child(child_id, m.Steer(text))
        if not kept and pidfd is not None:
            close_fds([pidfd])

    def on_spawn_failed(self, child_id: str, error: str) -> None:
        self._apply(child_id, lambda record: self._registry.apply(record, Event.SPAWN_FAILED, error=error))

    def on_never_started(self, child_id: str, error: str) -> None:
        self._apply(child_id, lambda record: self._registry.never_started(record, error))

    def on_timed_out(self, child_id: str) -> None:
        def change(record: ChildRecord) -> None:
            self._registry.apply(record, Event.TIMEOUT, error=f"timed out after {record.timeout_s:g} s")

        self._apply(child_id, change)

    def on_over_limit(self, child_id: str, private_bytes: int) -> None:
        def change(record: ChildRecord) -> None:
            limit = record.limits.memory_limit_bytes or 0
            text = f"memory limit: it used {private_bytes >> 20} MiB of its own, memory_limit_bytes={limit}"
            self._registry.apply(record, Event.LIMIT, graces=record.limits.graces.from_kill(), error=text)

        self._apply(child_id, change)

    def on_exited(self, message: m.Exited, error: str | None = None) -> None:
        def change(record: ChildRecord) -> None:
            for tally in self._tallies:
                tally.asked += message.asked
                tally.terminated += message.terminated
                tally.killed += message.killed
                tally.leftover.update(message.leftover)
            self._registry.exited(record, message.code, error or _exit_text(message.code))
            if record.ended and record.exit_seen:
                self._close_pidfd(record)

        self._apply(message.id, change)

    def on_unconfirmed(self, child_id: str, error: str) -> None:
        def change(record: ChildRecord) -> None:
            self._registry.apply(record, Event.LIMIT, error=error)
            self._registry.give_up(record)

        self._apply(child_id, change)

    def on_broken(self, child_id: str, error: str) -> None:
        self._apply(child_id, lambda record: self._registry.apply(record, Event.LIMIT, error=error))

    def on_output(self, child_id: str, tail: str) -> None:
        def change(record: ChildRecord) -> None:
            record.log_tail = tail
            record.active_mono = time.monotonic()

        self._apply(child_id, change)

    def on_message(self, child_id: str, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case m.AskSpawn():
                self._serve_spawn(child_id, message, fds)
                return
            case m.AskStatus():
                self._serve_status(child_id, message)
            case m.AskWait():
                self._serve_wait(child_id, message)
            case m.AskCancel():
                self._serve_cancel(child_id, message)
            case m.AskSend():
                caller = self._caller(child_id)
                self._answer(child_id, message.request, lambda: [self.send((message.id, None), message.text, caller)])
            case m.AskCall():
                self._serve_call(child_id, message)
            case m.CallEnded():
                self._call_ended(child_id, message)
            case _:
                self._apply(child_id, lambda record: self._note(record, message))
        close_fds(fds)

    def _note(self, record: ChildRecord, message: Any) -> None:
        record.active_mono = time.monotonic()
        match message:
            case m.Iteration(number):
                record.iterations = number
            case m.SteerSeen(total):
                record.messages_seen = total
            case m.Failure(error):
                self._registry.apply(record, Event.FAILURE, error=error)
            case m.Answer(result):
                if not record.ended and record.result is None:
                    record.result = _truncated(result, record.limits.result_truncation_limit)
                self._registry.apply(record, Event.ANSWER)

    # -- requests of children (reactor thread)

    def _caller(self, child_id: str) -> ChildRecord | None:
        with self._lock:
            return self._registry.records.get(child_id)

    def _serve_spawn(self, child_id: str, ask: m.AskSpawn, fds: tuple[int, ...]) -> None:
        caller = self._caller(child_id)
        if caller is None:
            close_fds(fds)
            return
        specs, rest = [], list(fds)
        for wanted in ask.specs:
            attachments, rest = tuple(rest[: wanted.attachments]), rest[wanted.attachments :]
            specs.append(
                ChildSpec(
                    entry=caller.spec.entry,
                    task=wanted.task,
                    inherited=caller.spec.inherited,
                    attachments=attachments,
                    environ=ask.environ,
                    secret_environ=caller.spec.secret_environ,
                    cwd=ask.cwd,
                    sys_path=ask.sys_path,
                    name=wanted.name,
                    prompt_preview=wanted.prompt_preview,
                    model=wanted.model,
                    timeout_s=wanted.timeout_s,
                )
            )
        close_fds(rest)
        self._answer(child_id, ask.request, lambda: self.start(specs, caller))

    def _serve_status(self, child_id: str, ask: m.AskStatus) -> None:
        caller = self._caller(child_id)
        refs = None if ask.ids is None else [(i, None) for i in ask.ids]
        if caller is not None:
            self._answer(child_id, ask.request, lambda: self.status(refs, caller))

    def _answer(self, child_id: str, request: int, produce: Callable[[], list[ChildStatus]]) -> None:
        self._reactor.tell_child(child_id, self._reply(request, produce))

    @staticmethod
    def _reply(request: int, produce: Callable[[], list[ChildStatus]]) -> m.Reply:
        try:
            return m.Reply(request, statuses=tuple(produce()))
        except RLMError as error:
            return error_reply(request, error)

    def _serve_cancel(self, child_id: str, ask: m.AskCancel) -> None:
        """Carry out a child's cancel on a thread of its own: it waits for exits that this thread must report."""
        caller = self._caller(child_id)
        if caller is None:
            return
        ref = (ask.id, None)

        def cancel() -> None:
            def produce() -> list[ChildStatus]:
                report = self.cancel(ref, ask.grace_s, caller)
                if not report.ok:
                    raise ChildCleanupError(report.summary(), report.survivors, report)
                return self.status([ref], caller)

            reply = self._reply(ask.request, produce)
            self._reactor.post(lambda: self._reactor.tell_child(child_id, reply))

        thread = threading.Thread(target=cancel, name="rlm-cancel", daemon=True)
        hide_from_debugger(thread)
        thread.start()

    def _serve_call(self, child_id: str, ask: m.AskCall) -> None:
        def answer(reply: m.Reply) -> None:
            self._reactor.post(lambda: self._reactor.tell_child(child_id, reply))

        with self._lock:
            limit = self._gate.max_tokens
            granted, refused = m.Reply(ask.request), error_reply(ask.request, budget_error(limit))
            record = self._registry.records.get(child_id)
            if record is None or record.ended:
                return
            permission = self._gate.ask(child_id, lambda: answer(granted), lambda: answer(refused))
        if permission is not Permission.QUEUED:
            self._reactor.tell_child(child_id, granted if permission is Permission.GRANTED else refused)

    def _call_ended(self, child_id: str, message: m.CallEnded) -> None:
        answers: list[Callable[[], None]] = []

        def change(record: ChildRecord) -> None:
            record.active_mono = time.monotonic()
            record.usage += message.usage
            if message.permitted:
                answers.extend(self._gate.ended(child_id, message.usage))
            else:
                self._gate.spent += message.usage.total_tokens

        self._apply(child_id, change)
        for answer in answers:
            answer()

    def _serve_wait(self, child_id: str, ask: m.AskWait) -> None:
        caller = self._caller(child_id)
        if caller is None:
            return
        refs = [(i, None) for i in ask.ids]

        timer: Timer | None = None

        def reply() -> None:
            self._reactor.cancel_timer(timer)
            self._answer(child_id, ask.request, lambda: self.status(refs, caller))

        def resumed() -> None:
            self._publish(caller)
            self._reactor.post(reply)

        waiter = None
        try:
            with self._lock:
                records = self._find(refs, caller)
                if ask.timeout_s != 0:
                    waiter = self._registry.begin_wait(caller, records, ask.any, resumed)
                effects = self._registry.take_effects()
        except RLMError as error:
            self._reactor.tell_child(child_id, error_reply(ask.request, error))
            return
        if waiter is None:
            reply()
            return
        self._publish(caller)
        self._carry_out(effects)
        if ask.timeout_s is not None:
            timer = self._reactor.call_at(time.monotonic() + ask.timeout_s, lambda: self._wait_timed_out(waiter))

    def _wait_timed_out(self, waiter: Waiter) -> None:
        with self._lock:
            self._registry.wait_timed_out(waiter)
            effects = self._registry.take_effects()
        self._carry_out(effects)


ROOT = ""
"""How the root is called at the gate for model calls."""


def budget_error(limit: int | None) -> ChildLimitError:
    """Say that the token budget is spent."""
    return ChildLimitError(
        "max_total_tokens", limit, f"max_total_tokens exceeded: the episode's budget of {limit} tokens is spent"
    )


def error_reply(request: int, error: RLMError) -> m.Reply:
    """Put an error into a reply, so that the child can raise the same one."""
    limit = error.limit if isinstance(error, ChildLimitError) else ""
    value = error.value if isinstance(error, ChildLimitError) and isinstance(error.value, int | float) else None
    return m.Reply(request, error=str(error), error_class=type(error).__name__, limit=limit, limit_value=value)


def _exit_text(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the child was killed by signal {-code} ({signal.Signals(-code).name}) before it had an answer"
        return f"the child was killed by signal {-code} before it had an answer"
    return f"the child exited with code {code} before it had an answer"


def _truncated(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}\n[... cut: the answer has {len(text)} characters, result_truncation_limit={limit}]"
