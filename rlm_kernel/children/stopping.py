"""The one way in which children are ended from outside.

`Stopper.stop` runs on the caller's thread (a lifecycle thread, not the reactor), so it ends in time even if the nursery or the reactor does
not answer:

1. the children are marked as stopping and the nursery is told: request, SIGTERM, SIGKILL, each after its grace;
2. if their exits are not confirmed when SIGKILL is due and a little more, the supervisor kills them itself through their pidfds;
3. if that does not help, it kills the nursery, and the parent-death signal ends whatever it had forked;
4. what cannot be confirmed then, by the nursery's report or by pidfd, is returned as survivors. It is never silently dropped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence

from rlm_kernel.children import posix
from rlm_kernel.children.core import Core, Ref, StopTally
from rlm_kernel.children.records import ChildRecord
from rlm_kernel.children.states import Outcome
from rlm_kernel.errors import NurseryError
from rlm_kernel.values import CleanupReport, Graces
from rlm_kernel.wire.channel import close_fds

_TAKEOVER_S = 0.15
"""Seconds after SIGKILL is due at which the supervisor stops relying on the nursery. A healthy one needs a few milliseconds."""


class Stopper:
    """See the module's docstring."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def stop(self, verb: str, graces: Graces, refs: Sequence[Ref] | None = None) -> CleanupReport:
        """Stop children and their descendants, and wait until each exit is confirmed.

        Args:
            verb: what this is called in the report.
            graces: seconds for each step.
            refs: the children, None for all.

        Returns:
            the report; its ``survivors`` are what could not be confirmed within the graces.
        """
        self._core.check_process()
        began = time.monotonic()
        done = threading.Lock()
        done.acquire()
        tally = StopTally()
        targets: list[ChildRecord] = []
        waiter = None
        try:
            with self._core.lock:
                named = self._core.registry.live() if refs is None else self._core.find(refs, None)
                targets = [
                    r for n in named for r in (n, *n.descendants()) if not r.ended or (r.given_up and not r.exit_seen)
                ]
                targets = list(dict.fromkeys(targets))
                if refs is None:
                    targets += [r for r in self._core.registry.records.values() if r.given_up and not r.exit_seen]
                tally.ids = frozenset(record.id for record in targets)
                self._core.tallies.append(tally)
                self._core.registry.stop(targets, graces)
                waiter = self._core.registry.add_waiter(targets, False, done.release)
                effects = self._core.registry.take_effects()
            with contextlib.suppress(NurseryError):
                if refs is None and targets:
                    # On the reactor's thread, behind the launches that this stop follows: the nursery may only just be coming to be.
                    # Before the children are told, so that this stop is not over while the nursery is still dying.
                    self._core.reactor.post(self._core.reactor.kill_booting_nursery)
                self._core.carry_out(effects)
            self._confirm(targets, waiter is None, done, began, graces, everything=refs is None)
        except BaseException:
            # An interrupt: who has been marked as stopping must have been told, too.
            with self._core.lock:
                self._core.registry.stop(targets, graces)
                effects = self._core.registry.take_effects()
            with contextlib.suppress(NurseryError):
                self._core.carry_out(effects)
            raise
        finally:
            with self._core.lock:
                if waiter is not None:
                    self._core.registry.remove_waiter(waiter)
                if tally in self._core.tallies:
                    self._core.tallies.remove(tally)
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
        if settled(min(kill_due + _TAKEOVER_S, give_up)):
            return
        self._kill_directly(targets)
        if settled(give_up - graces.kill_s / 2):
            return
        if everything:
            self._core.reactor.kill_nursery()
        if settled(give_up):
            return
        self._confirm_by_pidfd(targets)
        with self._core.lock:
            for record in targets:
                if not record.ended:
                    self._core.registry.give_up(record)
            effects = self._core.registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._core.carry_out(effects)

    def _all_gone(self, targets: list[ChildRecord]) -> bool:
        with self._core.lock:
            return all(record.exit_seen for record in targets)

    def _kill_directly(self, targets: list[ChildRecord]) -> None:
        with self._core.lock:
            for record in targets:
                if record.pidfd is not None and not record.exit_seen:
                    posix.signal_pidfd(record.pidfd, signal.SIGKILL)

    def _wait_by_pidfd(self, targets: list[ChildRecord], until: float) -> None:
        with self._core.lock:
            # Copies: the reactor closes the originals when it hears of an exit.
            pidfds = []
            with contextlib.suppress(OSError):  # none is free: what is not waited for is looked at once more at the end
                for record in targets:
                    if record.pidfd is not None and not record.exit_seen:
                        pidfds.append(os.dup(record.pidfd))
        try:
            for pidfd in pidfds:
                posix.pidfd_has_exited(pidfd, until - time.monotonic())
        finally:
            close_fds(pidfds)

    def _confirm_by_pidfd(self, targets: list[ChildRecord]) -> None:
        """Confirm exits without the nursery's word."""
        with self._core.lock:
            for record in targets:
                if record.pidfd is not None and not record.exit_seen and posix.pidfd_has_exited(record.pidfd):
                    self._core.registry.exited(record, -signal.SIGKILL, "killed; the nursery did not answer")
            effects = self._core.registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._core.carry_out(effects)

    def _report(self, verb: str, began: float, targets: list[ChildRecord], tally: StopTally) -> CleanupReport:
        with self._core.lock:
            stopped = tuple(r.id for r in targets if r.exit_seen and r.outcome is Outcome.CANCELLED)
            survivors = {record.pid for record in targets if not record.exit_seen and record.pid is not None}
            unknown = [record.id for record in targets if not record.exit_seen and record.pid is None]
        survivors |= {pid for pid in tally.leftover if posix.parent_and_state(pid) is not None}
        if unknown:
            # A child whose pid we never learned can only come from a nursery that does not answer: name that.
            survivors |= {pid for pid in (self._core.reactor.nursery_pid,) if pid is not None}
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
        """Skip to SIGKILL in a stop of everything that is under way: every live child is killed."""
        with self._core.lock:
            records = self._core.registry.live()
            if not records:
                return
            self._core.registry.stop(records, records[0].limits.graces.from_kill())
            effects = self._core.registry.take_effects()
        with contextlib.suppress(NurseryError):
            self._core.carry_out(effects)
