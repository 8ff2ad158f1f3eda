"""The process layer under random use: whatever is done in whatever order, the registry and ``/proc`` agree.

A hypothesis state machine over the real thing: one supervisor with a real nursery, an episode per example. After every step it holds that
the ids are unique, that a child has one terminal state and keeps it, that this state can be explained by what was done, that no more
children run than the limit allows, that every running child has its process below the nursery, and that no process with the nursery's
marker is unknown. After each verb no process is left, and no descriptor or thread that was not there before.

The suite runs a short, steady form. ``RLM_TEST_MACHINE_EXAMPLES=500`` makes it a long, random one; so does
``python -m tests.soak --machine --minutes N``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlm_kernel.children import posix
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.errors import (
    EpisodeClosing,
    StaleHandleError,
    UnknownHandleError,
    UsageMistake,
)
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Graces
from tests.children import machine_proc as proc
from tests.children.helpers import Reports, finish, limits, readable, spec

pytestmark = pytest.mark.skipif(not posix.IS_LINUX, reason="compares with /proc")

ENTRY = "tests.children.machine_entries:run"
GRACES = Graces(0.05, 0.05, 0.8)
BUDGET_S = 1.0
"""What a stop may take beyond its graces on a busy machine. (`test_supervisor` measures the promise itself.)"""

SETTLE_S = 5.0
"""Seconds for messages that are under way."""

QUICK, FAILS, ENDLESS = {ChildState.COMPLETED}, {ChildState.FAILED}, set[ChildState]()


@dataclass(frozen=True)
class Kind:
    """One kind of child: its task, and how it may end if nobody touches it."""

    task: dict[str, Any]
    ends: frozenset[ChildState] = frozenset()
    timeout_s: float | None = None


def _kind(ends: set[ChildState], do: str, timeout_s: float | None = None, **task: Any) -> Kind:
    return Kind({"do": do, **task}, frozenset(ends), timeout_s)


PAUSE, ECHO, STUBBORN = {"do": "pause"}, {"do": "echo"}, {"do": "stubborn"}
NESTED = {"do": "parent", "children": [ECHO, PAUSE]}

KINDS = {
    "quick": _kind(QUICK, "echo"),
    "big": _kind(QUICK, "big", size=150_000),
    "raises": _kind(FAILS, "raise"),
    "exits": _kind(FAILS, "exit", code=0),
    "pause": _kind(ENDLESS, "pause"),
    "stubborn": _kind(ENDLESS, "stubborn"),
    "swallow": _kind(ENDLESS, "swallow"),
    "cleans up": _kind(ENDLESS, "clean_up_when_asked"),
    "late": _kind(QUICK, "answer_when_asked"),
    "lingers": _kind(QUICK, "answer_then_linger"),
    "garbage": _kind(FAILS, "garbage"),
    "timed": _kind({ChildState.TIMED_OUT}, "stubborn", 0.1),
    "daemon": _kind(ENDLESS, "daemonize", then="pause"),
    "leaves a daemon": _kind(QUICK, "daemonize"),
    "programs": _kind(ENDLESS, "subprocess", then="pause"),
    "leaves programs": _kind(QUICK, "subprocess"),
    "listens": _kind(ENDLESS, "listen"),
    "parent": _kind(QUICK, "parent", children=[ECHO, ECHO]),
    "parent of endless": _kind(ENDLESS, "parent", children=[PAUSE, STUBBORN]),
    "grandparent": _kind(ENDLESS, "parent", children=[NESTED, ECHO]),
    "does not wait": _kind(QUICK, "parent_that_does_not_wait", children=[STUBBORN, PAUSE, ECHO]),
    "polls": _kind(QUICK, "parent_that_polls", children=[ECHO, ECHO]),
    "short waits": _kind(QUICK, "poll_with_short_waits", children=[ECHO, ECHO]),
    "threads": _kind(QUICK, "many_threads_wait", children=[ECHO, ECHO, ECHO]),
    "waits in vain": _kind(QUICK, "parent", children=[PAUSE], wait_s=0.05),
    "cancels": _kind(QUICK, "cancel_one_and_wait_for_any"),
    "leaves a thread": _kind(QUICK, "leave_a_thread"),
}
PARENTS = frozenset(name for name, kind in KINDS.items() if "children" in kind.task) | {"cancels", "leaves a thread"}
REPORTING = ("pause", "stubborn", "swallow", "cleans up", "late", "lingers", "daemon", "programs", "listens")


@dataclass
class Kid:
    """What the machine knows about one child that it started.

    Attributes:
        may: the states in which it may end, after all that was done to it.
    """

    id: str
    kind: str
    may: set[ChildState]


@dataclass
class Ended:
    """What a child was when it was first seen to have ended."""

    state: ChildState
    result: str | None
    error: str | None
    exit_code: int | None


@dataclass
class Arena:
    """The supervisor that the examples share, and what there was before the first of them. A ``with`` block."""

    supervisor: Supervisor = field(default_factory=Supervisor)
    stale_id: str = ""
    numbers: int = 0
    fds: int = 0
    nursery_fds: int = 0
    threads: tuple[str, ...] = ()
    steps: int = 0
    examples: int = 0
    children: int = 0
    hit_nurseries: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Arena:
        self.supervisor.configure(replace(limits(), graces=GRACES))
        self.supervisor.begin_episode("warm-up")
        self.stale_id = finish(self.supervisor, spec("echo"))[0].id
        nursery = self.supervisor.nursery_pid
        assert nursery is not None
        self.fds, self.threads = len(proc.own_fds()), tuple(proc.own_threads())
        self.nursery_fds = len(proc.open_fds(nursery))
        return self

    def __exit__(self, *_: object) -> None:
        assert self.supervisor.close()
        assert proc.marked() == {}


def noted(function: Callable[..., None]) -> Callable[..., None]:
    """Note a step, and the first failure: hypothesis tries a failure again, and with processes it may not come again."""

    @functools.wraps(function)
    def step(machine: Machine, **arguments: Any) -> None:
        told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        machine.history.append(f"{function.__name__}({told})")
        try:
            function(machine, **arguments)
        except Exception:
            machine.arena.failures.append("\n".join([*machine.history, traceback.format_exc()]))
            raise

    return step


def somebody_lives(machine: Machine) -> bool:
    """So that steps are not spent on nobody. Not decided by looking, which would give another answer the next time."""
    return machine.started


class Told(Reports):
    """Reports that can be taken without waiting for more of them."""

    def rest(self) -> list[dict[str, Any]]:
        taken = []
        while b"\n" in self._buffer or readable(self._reader, 0.0):
            taken.append(self.next())
        return taken


class Machine(RuleBasedStateMachine):
    """Random use of one supervisor. See the module's docstring."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena, self.sup = arena, arena.supervisor
        self.arena.examples += 1
        self.reports = Told()
        self.history: list[str] = []
        self.kids: dict[str, Kid] = {}
        self.ended: dict[str, Ended] = {}
        self.programs: set[int] = set()
        self.violent = self.started = False
        self.limit = 0
        self.begin_episode()

    def begin_episode(self) -> None:
        self.kids, self.ended, self.violent = {}, {}, False
        self.sup.begin_episode(f"e{time.monotonic_ns()}")

    @initialize(limit=st.integers(1, 6), kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6))
    @noted
    def begin(self, limit: int, kinds: list[str]) -> None:
        self.limit = limit
        self.sup.configure(replace(limits(max_concurrent_children=limit), graces=GRACES))
        for kind in kinds:
            self.start(kind)

    # -- what the rules share

    def pick(self, index: int) -> str | None:
        """Choose one of all children, nested ones included."""
        statuses = self.sup.status()
        return statuses[index % len(statuses)].id if statuses else None

    def allow(self, *states: ChildState, only: str | None = None) -> None:
        """Note that children that live may end like this, after what is about to be done."""
        if ChildState.FAILED in states:
            self.violent = True
        nested = only is not None and only not in self.kids
        for kid in list(self.kids.values()):
            if kid.id in self.ended:
                continue
            if only in (None, kid.id):
                kid.may.update(states)
            if nested and kid.kind in PARENTS:
                kid.may.add(ChildState.COMPLETED)  # what it waits for is ended by us

    def start(self, kind: str, count: int = 1, may: tuple[ChildState, ...] = ()) -> list[ChildStatus]:
        chosen = KINDS[kind]
        specs = []
        for _ in range(count):
            one = spec(**chosen.task, reports=self.reports, timeout_s=chosen.timeout_s)
            one.entry = ENTRY
            specs.append(one)
        # One that goes to a nursery whose death has not been noticed yet shares it.
        dying = {ChildState.FAILED} if self.sup.nursery_pid in self.arena.hit_nurseries else set()
        statuses = self.sup.start(specs)
        for status in statuses:
            self.kids[status.id] = Kid(status.id, kind, {*chosen.ends, *may, *dying})
        self.started = True
        self.arena.children += count
        return statuses

    def signal_worker(self, child_id: str, signum: int) -> None:
        """Signal a child's process, if it is there and the nursery's."""
        [status] = self.sup.status([(child_id, None)])
        if status.pid is None or status.exited or (pidfd := posix.open_pidfd(status.pid)) is None:
            return
        try:
            seen = posix.parent_and_state(status.pid)
            if seen is not None and seen[0] == self.sup.nursery_pid:
                posix.signal_pidfd(pidfd, signum)
        finally:
            os.close(pidfd)

    def signal_nursery(self, signum: int) -> None:
        pid = self.sup.nursery_pid
        if pid is not None and (pidfd := posix.open_pidfd(pid)) is not None:
            try:
                posix.signal_pidfd(pidfd, signum)
                if signum in (signal.SIGKILL, signal.SIGTERM):
                    self.arena.hit_nurseries.add(pid)
            finally:
                os.close(pidfd)

    def check_report(self, report: CleanupReport, graces: Graces = GRACES) -> None:
        assert report.ok, report
        assert report.duration_s < graces.total_s + BUDGET_S, report

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

    def note(self, report: dict[str, Any]) -> None:
        """Remember programs that a child started without our marker."""
        self.programs.update(report.get("started", ()))

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

    def is_a(self, child_id: str, kind: str) -> bool:
        kid = self.kids.get(child_id)
        return kid is not None and kid.kind == kind

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

    def verb(self, name: str, graces: Graces = GRACES) -> None:
        """What a session does at each verb."""
        self.allow(ChildState.CANCELLED)
        self.started = False
        self.sup.admit_children(False)
        self.sup.interrupt_waits()
        report = self.sup.stop(name, graces)
        self.check_report(report, graces)
        with pytest.raises(EpisodeClosing):
            self.sup.start([spec("echo")])
        self.check_quiet()
        self.sup.admit_children(True)

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

    # -- what must hold

    @invariant()
    @noted
    def check(self) -> None:
        self.arena.steps += 1
        statuses = self.sup.status()
        self.check_records(statuses)
        wrong = disagreements(self.sup)
        until = time.monotonic() + SETTLE_S
        while wrong and time.monotonic() < until:
            select.select([], [], [], 0.005)  # messages are under way; the deadline makes what stays a failure
            wrong = disagreements(self.sup)
        assert not wrong, (wrong, self.sup.status())

    def check_records(self, statuses: list[ChildStatus]) -> None:
        ids = [status.id for status in statuses]
        numbers = [int(child_id[1:]) for child_id in ids]
        assert numbers == sorted(set(numbers)), ids
        parents = {status.parent_id for status in statuses}
        busy = [
            s.id for s in statuses if s.state is ChildState.RUNNING and s.id not in parents and not self.is_parent(s.id)
        ]
        assert len(busy) <= self.limit or not self.limit, f"{busy} run at once, the limit is {self.limit}"
        for status in statuses:
            assert status.messages_seen <= status.messages_sent, status
            if not status.done:
                assert not status.exited or any(not s.done for s in statuses if s.parent_id == status.id), status
                assert status.id not in self.ended, (self.ended[status.id], status)
                continue
            assert status.exited, status
            assert (status.result is not None) or status.state is not ChildState.COMPLETED, status
            assert status.error is None or status.state is not ChildState.COMPLETED, status
            now = Ended(status.state, status.result, status.error, status.exit_code)
            assert self.ended.setdefault(status.id, now) == now, status
            kid = self.kids.get(status.id)
            if kid is not None:
                assert status.state in kid.may, (kid, status)
            elif status.depth > 1:
                usual = {ChildState.COMPLETED, ChildState.CANCELLED}
                assert status.state in usual or self.violent, status

    def is_parent(self, child_id: str) -> bool:
        kid = self.kids.get(child_id)
        return kid is not None and kid.kind in PARENTS

    def check_quiet(self) -> None:
        """After a verb: nothing lives but at most one nursery, and nothing is held that was not held before."""
        left = {pid: seen for pid, seen in proc.marked().items() if pid != self.sup.nursery_pid}
        assert not left, (left, self.sup.nursery_pid, self.sup.status())
        for report in self.reports.rest():
            self.note(report)
        running = [pid for pid in self.programs if is_our_program(pid)]
        assert not running, f"programs without our marker still run: {running}"
        assert self.sup.live_ids == []
        assert all(status.exited for status in self.sup.status())
        eventually(lambda: not proc.zombies_of_this_process(), "an unreaped nursery")
        nursery = self.sup.nursery_pid
        if nursery is not None:
            eventually(lambda: not proc.children_of(nursery), "the nursery has children that are no children of ours")
            fds = proc.open_fds(nursery)
            eventually(lambda: len(proc.open_fds(nursery)) <= self.arena.nursery_fds, f"the nursery holds {fds}")
        allowed = self.arena.fds + 2  # the pipe for reports
        eventually(lambda: len(proc.own_fds()) <= allowed, lambda: f"{allowed} descriptors allowed: {proc.own_fds()}")
        eventually(lambda: set(proc.own_threads()) <= set(self.arena.threads), lambda: f"threads: {proc.own_threads()}")

    @noted
    def teardown(self) -> None:
        try:
            self.sup.admit_children(True)
            self.verb("teardown")
            self.check()
        finally:
            self.sup.admit_children(True)
            self.sup.stop("teardown", GRACES.from_kill())
            gone = self.reports.everybody_is_gone()
            self.reports.__exit__()
        assert gone, "somebody still holds the pipe for reports"


# -- helpers


def is_our_program(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read() == b"/bin/sleep\x001000\x00"
    return False


def lineage(status: ChildStatus, everybody: dict[str, ChildStatus]) -> set[str]:
    """Return the ids of a child and of all above it."""
    ids = {status.id}
    while status.parent_id is not None:
        status = everybody[status.parent_id]
        ids.add(status.id)
    return ids


def disagreements(sup: Supervisor) -> list[str]:
    """Compare the registry with ``/proc``. What messages under way can explain is returned, all else raises."""
    before = sup.status()
    nursery, seen = sup.nursery_pid, proc.marked()
    below_nursery = set() if nursery is None else proc.children_of(nursery)
    after = {status.id: status for status in sup.status()}
    expected = {status.pid for status in after.values() if status.pid is not None and not status.exited}
    wrong = []
    for status in before:
        if status.pid is None:
            continue
        if status.exited:
            assert status.pid not in seen or status.pid in expected, f"confirmed gone, and lives: {status}"
        elif not after[status.id].exited:
            at = seen.get(status.pid)
            if at is None:
                wrong.append(f"{status.id} has no process")
            elif at.parent != nursery:
                wrong.append(f"{status.id} is below {at.parent}, not below the nursery {nursery}")
    wrong += [
        f"nobody knows {at}" for at in seen.values() if at.pid != nursery and not proc.descends_from(at, expected)
    ]
    wrong += [f"the nursery has a child that nobody knows: {proc.look(pid)}" for pid in below_nursery - expected]
    return wrong


def eventually(holds: Callable[[], bool], otherwise: str | Callable[[], str], within_s: float = SETTLE_S) -> None:
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        select.select([], [], [], 0.002)


def delayed(work: Callable[[], object], seconds: float) -> Callable[[], object]:
    """Spread what happens at the same time a little: the race is what is wanted here."""

    def run() -> object:
        select.select([], [], [], seconds)
        return work()

    return run


REFUSALS = (EpisodeClosing, UsageMistake)
"""What a verb or an end that came first may lead to."""


@contextlib.contextmanager
def threads(*works: Callable[[], object]) -> Iterator[None]:
    """Run each on a thread of its own, beside the block. Whatever one raises is raised in the end; a hang is a failure."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except REFUSALS:
            return
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        for thread in running:
            thread.join(4 * SETTLE_S)
        if any(thread.is_alive() for thread in running):
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError("a call hangs")
    if errors:
        raise errors[0]


# -- the test


def run_machine(arena: Arena, *, examples: int, steps: int = 12, steady: bool = False) -> None:
    """Run examples of random use.

    Args:
        steady: the same examples each time.
    """
    try:
        run_state_machine_as_test(
            functools.partial(Machine, arena),
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


EXAMPLES_VARIABLE = "RLM_TEST_MACHINE_EXAMPLES"


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES_VARIABLE in os.environ else 120)
def test_whatever_is_done_in_whatever_order_the_registry_and_the_processes_agree() -> None:
    asked = os.environ.get(EXAMPLES_VARIABLE)
    with Arena() as arena:
        run_machine(arena, examples=int(asked or 12), steady=asked is None)
        assert arena.steps > arena.examples, "the machine took no steps"
