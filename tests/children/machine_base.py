"""The ground on which the rules of the state machine stand: what it starts, signals and knows, and what must hold after every step."""

from __future__ import annotations

import functools
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)

from rlm_kernel.children import posix
from rlm_kernel.children.supervisor import Supervisor
from rlm_kernel.errors import EpisodeClosing
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Graces
from tests.children import machine_proc as proc
from tests.children.helpers import finish, limits, spec
from tests.children.machine_helpers import (
    SETTLE_S,
    Told,
    disagreements,
    eventually,
    is_our_program,
)
from tests.children.machine_kinds import ENTRY, KINDS, PARENTS, Ended, Kid

GRACES = Graces(0.05, 0.05, 0.8)
BUDGET_S = 1.0
"""What a stop may take beyond its graces on a busy machine. (`test_supervisor` measures the promise itself.)"""


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
    def step(machine: Ground, **arguments: Any) -> None:
        told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        machine.history.append(f"{function.__name__}({told})")
        try:
            function(machine, **arguments)
        except Exception:
            machine.arena.failures.append("\n".join([*machine.history, traceback.format_exc()]))
            raise

    return step


def somebody_lives(machine: Ground) -> bool:
    """So that steps are not spent on nobody. Not decided by looking, which would give another answer the next time."""
    return machine.started


class Ground(RuleBasedStateMachine):
    """See the module's docstring."""

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

    def note(self, report: dict[str, Any]) -> None:
        """Remember programs that a child started without our marker."""
        self.programs.update(report.get("started", ()))

    def is_a(self, child_id: str, kind: str) -> bool:
        kid = self.kids.get(child_id)
        return kid is not None and kid.kind == kind

    def is_parent(self, child_id: str) -> bool:
        kid = self.kids.get(child_id)
        return kid is not None and kid.kind in PARENTS

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

    def check_quiet(self) -> None:
        """After a verb: nothing lives but at most one nursery, and nothing is held that was not held before."""
        left = [seen for seen in proc.marked().values() if not proc.is_nursery(seen)]
        assert not left, (left, self.sup.nursery_pid, self.sup.status())
        for report in self.reports.rest():
            self.note(report)
        running = [pid for pid in self.programs if is_our_program(pid)]
        assert not running, f"programs without our marker still run: {running}"
        assert self.sup.live_ids == []
        assert all(status.exited for status in self.sup.status())
        eventually(lambda: not proc.zombies_of_this_process(), "an unreaped nursery")
        eventually(lambda: set(proc.marked()) <= {self.sup.nursery_pid}, lambda: f"a second nursery: {proc.marked()}")
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
