"""The supervisor: admits, tracks and stops every child of every depth. Lives in the root process.

Who runs it: any thread of the root process may call the public methods; what comes from the nursery and from the children arrives on the
reactor's thread (`arrivals`, `requests`). What they share, and the rules of the lock, are in `core`; how children are
ended is in `stopping`.

It owns the registry, the reactor and the pidfd of every child whose exit is not confirmed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from rlm_kernel.children import posix
from rlm_kernel.children.arrivals import Arrivals
from rlm_kernel.children.callgate import Permission
from rlm_kernel.children.core import ChildListener, Core, Ref
from rlm_kernel.children.history import ChildHistory
from rlm_kernel.children.nursery_process import NurseryProcess
from rlm_kernel.children.observers import ObserverThread
from rlm_kernel.children.reactor import Reactor
from rlm_kernel.children.records import ChildRecord, ChildSpec, Limits
from rlm_kernel.children.requests import Requests, budget_error
from rlm_kernel.children.root_waits import RootWait, Stirs
from rlm_kernel.children.states import Phase
from rlm_kernel.children.stopping import Stopper
from rlm_kernel.errors import EpisodeClosing, NurseryError, UsageMistake
from rlm_kernel.values import ChildStatus, CleanupReport, Graces, Usage
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import close_fds

_log = logging.getLogger(__name__)

T = TypeVar("T")

_WARN_AT = 0.8
"""Part of ``max_children_total`` at which the user is warned."""

_CLOSE_S = 1.0
"""Seconds that an idle nursery is given to exit before it is killed."""

ROOT = ""
"""How the root is called at the gate for model calls."""


@dataclass(frozen=True, slots=True)
class NurserySettings:
    """How a nursery is started."""

    warm_up: str = ""
    preload: tuple[str, ...] = ()
    keep_secrets: tuple[str, ...] = ()
    log_path: str = ""


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
        self._paths = paths
        self._core = Core(on_change, on_warning)
        self._core.reactor = Reactor(Arrivals(self._core, Requests(self._core, self)), self._start_nursery)
        self._stopper = Stopper(self._core)
        self._admitting = True
        self._root_waits: list[RootWait] = []

    @property
    def observers(self) -> ObserverThread:
        """The thread on which listeners are called."""
        return self._core.observers

    def configure(self, limits: Limits) -> None:
        """Set the limits that later admissions meet."""
        with self._core.lock:
            self._core.registry.limits = limits
            self._core.gate.max_concurrent = limits.max_concurrent_model_calls
            self._core.gate.max_tokens = limits.max_total_tokens

    def begin_episode(self, episode_id: str) -> None:
        """Begin an episode: handles of the one before become stale. All its children must have ended."""
        with self._core.lock:
            for record in self._core.registry.records.values():
                self._core.close_pidfd(record)  # of one that was abandoned: nobody will find its record any more
            self._core.registry.begin_episode(episode_id)
            self._core.gate.spent = 0
            self._core.published.clear()

    def prepare(self) -> None:
        """Start a nursery now, so that the first child need not wait for it.

        One without children that was warmed for something else is replaced.
        """
        self._core.check_process()
        self._core.reactor.post(self._prepare)

    def _prepare(self) -> None:
        try:
            self._core.reactor.give_up_idle_nursery(self.settings.warm_up)
            self._core.reactor.ensure_nursery()
        except (NurseryError, OSError) as error:
            _log.warning("%s", error)  # the first child will try again, and fail with this if it must

    def _start_nursery(self) -> NurseryProcess:
        s = self.settings
        return NurseryProcess.start(
            warm_up=s.warm_up, preload=s.preload, keep_secrets=s.keep_secrets, log_path=s.log_path
        )

    def call_on_stir(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called whenever something may have happened to a child: at once, on whatever thread it happens.

        Unlike ``on_change`` it is not delayed by observers that block, so it must do no more than wake somebody.

        Returns:
            a function that withdraws it.
        """
        with self._core.lock:
            self._core.on_stir += (callback,)

        def withdraw() -> None:
            with self._core.lock:
                self._core.on_stir = tuple(each for each in self._core.on_stir if each is not callback)

        return withdraw

    def stirs(self) -> Stirs:
        """Return what a thread of the root can wait on until something may have happened to a child. Use it as a ``with`` block."""
        self._core.check_process()
        return Stirs(self._core, self._root_waits, self.call_on_stir)

    # -- admission

    def admit_children(self, admit: bool) -> None:
        """Open or close the door for new children. What is running is not touched."""
        with self._core.lock:
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
            ManagedModeRequired: this platform cannot fork.
        """
        try:
            self._core.check_process()
            posix.require_fork()
            with self._core.lock:
                if not self._admitting:
                    raise EpisodeClosing("a stop is under way; start children again when it is done")
                if caller is not None and caller.phase not in (Phase.RUNNING, Phase.WAITING):
                    raise EpisodeClosing(f"{caller.id} is being stopped and cannot start children")
                if self._core.gate.exhausted:
                    raise budget_error(self._core.gate.max_tokens)
                records = self._core.registry.admit(specs, caller, self._paths)
                self._core.registry.dispatch()
                statuses = [record.status() for record in records]
                effects = self._core.registry.take_effects()
                started = self._core.registry.started_in_episode
            self._core.carry_out(effects)
            for record in records:
                self._core.publish(record)
            self._warn_near_limit(started - len(records), started)
        except BaseException as error:
            # An interrupt may have come at any point: all or none holds for it, too.
            self._take_back(specs, f"its start was broken off: {type(error).__name__}: {error}")
            raise
        return statuses

    def _warn_near_limit(self, before: int, now: int) -> None:
        """Say once when most of the children that an episode may start have been started."""
        with self._core.lock:
            limit = self._core.registry.limits.max_children_total
        if self._core.on_warning is not None and before < _WARN_AT * limit <= now:
            text = (
                f"{now} of the {limit} children that this episode may start have been started; "
                f"`%rlm config max_children_total={2 * limit}` raises the limit"
            )
            self._core.observers.publish(functools.partial(self._core.on_warning, text))

    def _take_back(self, specs: Sequence[ChildSpec], why: str) -> None:
        """Stop what a start that raised had begun, and close what was not sent."""
        ids = {id(spec) for spec in specs}
        with self._core.lock:
            begun = [record for record in self._core.registry.live() if id(record.spec) in ids]
            self._core.registry.stop(begun, None)
            effects = self._core.registry.take_effects()
        for spec in specs:
            if id(spec) not in {id(record.spec) for record in begun}:
                spec.close()
        try:
            self._core.carry_out(effects)
        except NurseryError:
            # There is no thread to tell, so none of them has been launched either.
            with self._core.lock:
                for record in begun:
                    self._core.registry.never_started(record, why)
                effects = self._core.registry.take_effects()
            self._core.carry_out(effects)

    # -- looking

    def status(self, refs: Sequence[Ref] | None = None, caller: ChildRecord | None = None) -> list[ChildStatus]:
        """Take snapshots: of the named children, or of all that the caller can see.

        Raises:
            UnknownHandleError, StaleHandleError: a reference names no child of this episode and caller.
        """
        self._core.check_process()
        with self._core.lock:
            return [record.status() for record in self._core.find(refs, caller)]

    def wait(self, refs: Sequence[Ref], timeout_s: float | None = None, *, any_: bool = False) -> list[ChildStatus]:
        """Wait, on behalf of the root, until all (or any) of the children have ended. A timeout changes nothing about
        them.

        The wait is interruptible by signals on the main thread and by `interrupt_waits` on the others, and thread-safe.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        self._core.check_process()
        over = threading.Lock()
        over.acquire()
        wait: RootWait | None = None
        try:
            with self._core.lock:
                records = self._core.find(refs, None)
                waiter = self._core.registry.add_waiter(records, any_, over.release)
                if waiter is not None:
                    wait = RootWait(waiter, over)
                    self._root_waits.append(wait)
            if wait is not None:
                over.acquire(timeout=-1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        finally:
            if wait is not None:
                with self._core.lock:
                    self._core.registry.remove_waiter(wait.waiter)
                    self._root_waits.remove(wait)
        if wait is not None and wait.interrupted:
            raise KeyboardInterrupt("the children that this waited for are being stopped")
        with self._core.lock:
            return [record.status() for record in records]

    def run_interruptibly(self, work: Callable[[], T]) -> T:
        """Run something that blocks outside of Python, such as a model call, so that `interrupt_waits` can end the wait for it.

        On the main thread it simply runs, since signals reach that. On any other it runs on a thread of its own; an interrupted
        wait leaves it to end by itself.

        Raises:
            KeyboardInterrupt: the wait was interrupted.
        """
        if threading.current_thread() is threading.main_thread():
            return _without_foreign_frames(work)
        outcome: Future[T] = Future()
        wait = RootWait.for_no_child()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                outcome.set_result(context.run(work))
            except BaseException as error:
                outcome.set_exception(error)
            with self._core.lock:
                wait.end()

        with self._core.lock:
            self._root_waits.append(wait)
        try:
            threading.Thread(target=run, name="rlm-call", daemon=True).start()
            wait.over.acquire()
        finally:
            with self._core.lock:
                self._root_waits.remove(wait)
        if wait.interrupted:
            raise KeyboardInterrupt("a stop interrupted this call; its answer is not waited for any more")
        return outcome.result()

    def interrupt_waits(self) -> None:
        """Have waits on threads other than the main one raise `KeyboardInterrupt`: no signal reaches them."""
        with self._core.lock:
            for wait in self._root_waits:
                if not wait.on_main_thread and not wait.waiter.over:
                    wait.interrupted = True
                    self._core.registry.remove_waiter(wait.waiter)
                    wait.over.release()

    def call_when_done(self, ref: Ref, callback: Callable[[], None]) -> Callable[[], None] | None:
        """Have ``callback`` called once, on some thread of ours, when the child has ended.

        Returns:
            a function that withdraws it (harmless when it has been called); None if the child has ended already, and the callback is
            not called.
        """
        self._core.check_process()
        with self._core.lock:
            record = self._core.find([ref], None)[0]
            waiter = self._core.registry.add_waiter([record], False, callback)
        if waiter is None:
            return None

        def withdraw() -> None:
            with self._core.lock:
                self._core.registry.remove_waiter(waiter)

        return withdraw

    def histories(self, refs: Sequence[Ref] | None = None, caller: ChildRecord | None = None) -> list[ChildHistory]:
        """Take snapshots of the past of children, in start order: of the named ones, or of all that the caller can see.

        Raises:
            UnknownHandleError, StaleHandleError: a reference names no child of this episode and caller.
        """
        self._core.check_process()
        with self._core.lock:
            now = time.monotonic()
            wall_offset = time.time() - now
            return [record.look_back(now, wall_offset) for record in self._core.find(refs, caller)]

    def usage(self) -> Usage:
        """Return the usage of all children of the episode."""
        with self._core.lock:
            return self._core.registry.total_usage()

    @property
    def live_ids(self) -> list[str]:
        """Ids of the children that have not ended."""
        with self._core.lock:
            return [record.id for record in self._core.registry.live()]

    @property
    def nursery_pid(self) -> int | None:
        return self._core.reactor.nursery_pid

    # -- shared contexts

    def hold(self, key: str, fd: int, *, text: bool) -> None:
        """Have the nursery hold bytes (or the text that they encode) for the children that are started from now on.

        Args:
            fd: the bytes; the supervisor owns it from now on.
        """
        self._core.check_process()
        try:
            self._core.reactor.post(lambda: self._core.reactor.hold(key, text, fd))
        except NurseryError:
            close_fds([fd])
            raise

    def release_held(self) -> None:
        """Release everything that is held, here and now. Children that were started keep what they inherited."""
        released = threading.Lock()
        released.acquire()

        def release() -> None:
            self._core.reactor.drop_held()
            released.release()

        with contextlib.suppress(NurseryError):
            self._core.reactor.post(release)
            released.acquire(timeout=_CLOSE_S)

    # -- model calls

    @property
    def gates_calls(self) -> bool:
        """Whether model calls must be asked for."""
        with self._core.lock:
            return self._core.gate.is_needed

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
        with self._core.lock:
            permission = self._core.gate.ask(ROOT, granted, refused)
            limit = self._core.gate.max_tokens
        if permission is Permission.QUEUED:
            try:
                answered.acquire()
            except BaseException:
                with self._core.lock:
                    taken_back = self._core.gate.withdraw(granted)
                if not taken_back:
                    self.end_call(Usage())
                raise
        if permission is Permission.REFUSED or refusals:
            raise budget_error(limit)

    def end_call(self, usage: Usage, model: str = "", duration_s: float = 0.0) -> None:
        """A model call of the root has ended (with no tokens, if it failed)."""
        with self._core.lock:
            answers = self._core.gate.ended(ROOT, usage)
        for answer in answers:
            answer()

    # -- steering

    def send(self, ref: Ref, text: str, caller: ChildRecord | None = None) -> ChildStatus:
        """Hand a message to a child, to be seen before its next model call; its status counts what was sent and seen.

        Raises:
            UsageMistake: the child has ended, so nobody would see it.
        """
        self._core.check_process()
        with self._core.lock:
            record = self._core.find([ref], caller)[0]
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
            self._core.reactor.post(lambda: self._core.reactor.tell_child(record.id, m.Steer(text)))
        return status

    def cancel(self, ref: Ref, grace_s: float | None = None, caller: ChildRecord | None = None) -> CleanupReport:
        """Stop one child and its descendants, and wait until their exits are confirmed.

        Args:
            grace_s: seconds for the cooperative request, None for the configured grace.
        """
        self._core.check_process()
        with self._core.lock:
            graces = self._core.find([ref], caller)[0].limits.graces
        if grace_s is not None:
            graces = replace(graces, shutdown_s=grace_s)
        return self.stop("cancel", graces, [ref])

    # -- stopping

    def stop(self, verb: str, graces: Graces, refs: Sequence[Ref] | None = None) -> CleanupReport:
        """Stop children and their descendants, and wait until each exit is confirmed; see `rlm_kernel.children.stopping`.

        Args:
            verb: what this is called in the report.
            graces: seconds for each step.
            refs: the children, None for all.

        Returns:
            the report; its ``survivors`` are what could not be confirmed within the graces.
        """
        return self._stopper.stop(verb, graces, refs)

    def hasten(self) -> None:
        """Skip to SIGKILL in a stop of everything that is under way: every live child is killed."""
        self._stopper.hasten()

    def close(self) -> bool:
        """End the nursery and our threads. Call it when every child has ended; those that have not are killed.

        Returns:
            whether they are gone.
        """
        if os.getpid() != self._core.pid:
            return True
        if self.live_ids:
            with self._core.lock:
                graces = self._core.registry.limits.graces.from_kill()
            self.stop("close", graces)
        gone = self._core.reactor.close(_CLOSE_S)
        self._core.observers.close()
        return gone


def _without_foreign_frames(work: Callable[[], T]) -> T:
    """Let an interrupt come out as if it had hit this line: where in a client's libraries it was tells nobody anything, and
    IPython takes seconds of processor time to show it, in which nothing is acknowledged."""
    try:
        return work()
    except KeyboardInterrupt as error:
        interrupt = error.with_traceback(None)
    interrupt.__context__ = None
    raise interrupt
