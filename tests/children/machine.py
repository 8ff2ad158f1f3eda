"""The rules of the state machine: what may be done to a supervisor, in any order. `machine_base` says what must hold."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlm_kernel.errors import StaleHandleError, UnknownHandleError, UsageMistake
from rlm_kernel.values import ChildState
from tests.children import machine_proc as proc
from tests.children.machine_base import BUDGET_S, GRACES, Arena, Ground, noted, somebody_lives
from tests.children.machine_helpers import (
    SETTLE_S,
    delayed,
    eventually,
    lineage,
    threads,
)
from tests.children.machine_kinds import KINDS, REPORTING


class Machine(Ground):
    """Random use of one supervisor. See the module's docstring."""

    # -- rules: children

    @rule(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
    @noted
    def spawn_several_kinds(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.start(kind)

    @rule(kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 3), settled=st.booleans())
    @noted
    def spawn(self, kind: str, count: int, settled: bool) -> None:
        free = self.limit - sum(not status.done for status in self.sup.status())
        statuses = self.start(kind, count)
        if settled and kind in REPORTING and count <= free:
            heard: set[int] = set()
            while not {s.pid for s in self.sup.status([(s.id, None) for s in statuses])} <= heard:
                report = self.reports.next()
                heard.add(report["pid"])
                self.note(report)

    @precondition(somebody_lives)
    @rule(
        index=st.integers(0, 99), timeout_s=st.sampled_from([0.0, 0.001, 0.03]), any_=st.booleans(), all_=st.booleans()
    )
    @noted
    def wait(self, index: int, timeout_s: float, any_: bool, all_: bool) -> None:
        chosen = self.pick(index)
        if chosen is None:
            return
        ids = [status.id for status in self.sup.status()] if all_ else [chosen]
        began = time.monotonic()
        statuses = self.sup.wait([(child_id, None) for child_id in ids], timeout_s, any_=any_)
        took = time.monotonic() - began
        assert [status.id for status in statuses] == ids
        over = any(statuses) if any_ else all(statuses)
        assert over or took >= timeout_s
        assert took < timeout_s + BUDGET_S

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99))
    @noted
    def wait_for_one_that_ends(self, index: int) -> None:
        """Whatever may end by itself does, if nobody holds its slot or stops it."""
        quick = [kid for kid in self.kids.values() if KINDS[kid.kind].ends and kid.kind not in ("late", "lingers")]
        if not quick or any(kid.kind not in self._ending and kid.id not in self.ended for kid in self.kids.values()):
            return
        chosen = quick[index % len(quick)]
        [status] = self.sup.wait([(chosen.id, None)], 4 * SETTLE_S)
        assert status.done, status

    _ending = frozenset(name for name, kind in KINDS.items() if kind.ends) - {"late", "lingers"}

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99), grace_s=st.sampled_from([None, 0.0, 0.02]))
    @noted
    def cancel(self, index: int, grace_s: float | None) -> None:
        chosen = self.pick(index)
        if chosen is None:
            return
        self.allow(ChildState.CANCELLED, only=chosen)
        report = self.sup.cancel((chosen, None), grace_s)
        self.check_report(report)
        everybody = {status.id: status for status in self.sup.status()}
        for status in everybody.values():
            if chosen in lineage(status, everybody):
                assert status.done, status
                assert status.exited, status

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99))
    @noted
    def send(self, index: int) -> None:
        chosen = self.pick(index)
        if chosen is None:
            return
        if self.is_a(chosen, "listens"):
            self.allow(ChildState.COMPLETED, only=chosen)
        try:
            status = self.sup.send((chosen, None), "a word")
        except UsageMistake:
            return
        assert not status.done

    @rule()
    @noted
    def use_wrong_ids(self) -> None:
        with pytest.raises(UnknownHandleError):
            self.sup.status([("c999999", None)])
        with pytest.raises(StaleHandleError):
            self.sup.cancel((self.arena.stale_id, None))

    # -- rules: violence

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99), signum=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    @noted
    def hit_worker(self, index: int, signum: int) -> None:
        chosen = self.pick(index)
        if chosen is not None:
            self.allow(ChildState.FAILED, only=chosen)
            self.signal_worker(chosen, signum)

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99))
    @noted
    def freeze_worker(self, index: int) -> None:
        chosen = self.pick(index)
        # Whoever is asked for an answer by `wait_for_one_that_ends` must be able to give it.
        if chosen is None:
            return
        everybody = {status.id: status for status in self.sup.status()}
        above = [self.kids[other] for other in lineage(everybody[chosen], everybody) if other in self.kids]
        if not any(KINDS[kid.kind].ends for kid in above):
            self.signal_worker(chosen, signal.SIGSTOP)

    @precondition(somebody_lives)
    @rule(signum=st.sampled_from([signal.SIGKILL, signal.SIGTERM]))
    @noted
    def hit_nursery(self, signum: int) -> None:
        self.allow(ChildState.FAILED)
        self.signal_nursery(signum)

    @precondition(somebody_lives)
    @rule(index=st.integers(0, 99))
    @noted
    def cancel_while_the_nursery_is_frozen(self, index: int) -> None:
        chosen = self.pick(index)
        if chosen is None:
            return
        self.allow(ChildState.CANCELLED, only=chosen)
        self.signal_nursery(signal.SIGSTOP)
        try:
            report = self.sup.cancel((chosen, None))
        finally:
            self.signal_nursery(signal.SIGCONT)
        assert report.duration_s < GRACES.total_s + BUDGET_S, report
        # One whose fork the nursery had not got to could not be confirmed. Now it is.
        eventually(lambda: all(s.exited for s in self.sup.status() if s.done), "a given-up child is not confirmed")

    @precondition(somebody_lives)
    @rule()
    @noted
    def stop_everything_while_the_nursery_is_frozen(self) -> None:
        self.allow(ChildState.FAILED, ChildState.CANCELLED)
        self.started = False
        self.signal_nursery(signal.SIGSTOP)
        try:
            self.sup.admit_children(False)
            self.check_report(self.sup.stop("close", GRACES))
            self.check_quiet()
        finally:
            self.signal_nursery(signal.SIGCONT)
            self.sup.admit_children(True)

    # -- rules: verbs

    @precondition(somebody_lives)
    @rule(hurry=st.booleans())
    @noted
    def interrupt(self, hurry: bool) -> None:
        self.verb("close", GRACES.from_kill() if hurry else GRACES)

    @precondition(somebody_lives)
    @rule()
    @noted
    def interrupt_a_waiting_thread(self) -> None:
        live = [(status.id, None) for status in self.sup.status() if not status.done]
        outcome: list[str] = []

        def look() -> None:
            try:
                self.sup.wait(live, 4 * SETTLE_S)
                outcome.append("done")
            except KeyboardInterrupt:
                outcome.append("interrupted")

        with threads(look):
            self.verb("close")
        assert len(outcome) == 1

    @precondition(somebody_lives)
    @rule()
    @noted
    def reset(self) -> None:
        self.verb("reset")
        self.check()
        old = next(iter(self.kids), None)
        self.begin_episode()
        if old is not None:
            with pytest.raises(StaleHandleError):
                self.sup.status([(old, None)])

    @precondition(somebody_lives)
    @rule()
    @noted
    def finalize(self) -> None:
        self.verb("finalize")

    @precondition(somebody_lives)
    @rule()
    @noted
    def close(self) -> None:
        """End the nursery and the threads, too: what is started afterwards finds new ones."""
        self.allow(ChildState.CANCELLED)
        self.started = False
        assert self.sup.close()
        assert proc.marked() == {}
        assert [name for name in proc.own_threads() if name != "rlm-observers"] == []

    # -- rules: things at the same time

    @rule(
        names=st.lists(
            st.sampled_from(
                [
                    "cancel",
                    "cancel",
                    "stop",
                    "spawn",
                    "spawn",
                    "wait",
                    "send",
                    "hit nursery",
                    "hit worker",
                    "hasten",
                    "close",
                ]
            ),
            min_size=2,
            max_size=4,
        ),
        index=st.integers(0, 99),
        kind=st.sampled_from(sorted(KINDS)),
        spread=st.sampled_from([0.0, 0.002, 0.02]),
    )
    @noted
    def at_once(self, names: list[str], index: int, kind: str, spread: float) -> None:
        """Do several things on several threads. Nobody hangs, and the invariants hold afterwards."""
        chosen = self.pick(index)
        both = (ChildState.FAILED, ChildState.CANCELLED)
        if {"stop", "hit nursery", "hit worker", "close", "cancel", "hasten"} & set(names):
            self.allow(*both)
        works: dict[str, Callable[[], object]] = {
            "stop": lambda: self.sup.stop("close", GRACES),
            "spawn": lambda: self.start(kind, 2, both),
            "hit nursery": lambda: self.signal_nursery(signal.SIGKILL),
            "hasten": self.sup.hasten,
            "close": self.sup.close,
        }
        if chosen is not None:
            ref = (chosen, None)
            if self.is_a(chosen, "listens"):
                self.allow(ChildState.COMPLETED, only=chosen)
            works["cancel"] = lambda: self.check_report(self.sup.cancel(ref))
            works["wait"] = lambda: self.sup.wait([ref], 0.01)
            works["send"] = lambda: self.sup.send(ref, "a word")
            works["hit worker"] = lambda: self.signal_worker(chosen, signal.SIGKILL)
        chosen_works = [works[name] for name in names if name in works]
        with threads(*(delayed(work, number * spread) for number, work in enumerate(chosen_works))):
            pass


def run_machine(arena: Arena, *, examples: int, steps: int = 12, steady: bool = False) -> None:
    """Run examples of random use.

    Args:
        steady: the same examples each time.
    """
    try:
        run_state_machine_as_test(
            functools.partial(Machine, arena),  # type: ignore[arg-type]  # any factory will do
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=steady,
                database=None,
                print_blob=False,
                # Processes are not deterministic: to shrink would be to look for another failure.
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            ),
        )
    except BaseException as error:
        if arena.failures:
            raise AssertionError(arena.failures[0]) from error
        raise
