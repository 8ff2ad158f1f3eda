"""The soak: thousands of short children of real sessions, killed at random, after which everything is where it was.

``python -m tests.soak --minutes 5 [--seed 7]`` runs children with a scripted model, 8 to 16 at a time, some with children of their own.
Workers are killed, stopped and hit in mid-start, now and then the nursery is, children are cancelled at the instant of finishing, waited
for 1 ms at a time, and the session is closed and reset every few hundred. At each reset nothing may be left; at the end descriptors,
threads and memory of root and nursery are where they were after the warm-up. It prints its figures and exits with 1 if anything is wrong.

``--machine`` runs the random state machine of `tests.children.machine` for that long instead.
`tests.children.test_soak` is the short form.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlm_kernel.children import posix
from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import UsageMistake
from rlm_kernel.session.config import Settings
from rlm_kernel.session.handles import ChildHandle
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState, ChildStatus
from tests.children import machine_proc as proc

HANG_S = 30.0
"""Seconds after which a child that should have ended has not."""

SETTLE_S = 2.0
"""Seconds for what a verb does not promise before its end: the reaping of a killed nursery, garbage."""

ROOT_GROWTH = 12 << 20
ROOT_GROWTH_PER_CHILD = 1 << 10
"""Bytes that the root may have gained. Per child: its id, which stays known as stale (about 0.2 KiB), and fragments of the heap. The
constant: the records of one whole episode, with their results, log tails and errors, which the next reset frees."""

NURSERY_GROWTH = 3 << 20
"""Bytes of private memory that a nursery may have gained. Nothing is kept per child, but forking copies pages: every page of the frozen
heap whose reference counts it touches becomes its own, once."""

BOOTS_DIFFER = 5 << 20
"""Bytes by which two fresh nurseries may differ: one that had to compile modules has a larger heap (4 MiB were seen)."""

STUBBORN = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        signal.pause()
    except BaseException:
        pass
"""
DAEMON = "import subprocess\nsubprocess.Popen(['/bin/sleep', '1000'], start_new_session=True)\n"
NEST = "FINAL(rlm_query('quick ' + context.split()[1]))"
NEST_WIDE = "hs = rlm_query_batched(['quick ' + context.split()[1]] * 3, blocking=False)\n"
TAKE_ALL = "FINAL([s.result for s in rlm_as_completed(hs)][0])"
TAKE_POLLS = "while not all(rlm_wait(hs, 0.005)):\n    pass\nFINAL(hs[0].result())"

SCRIPT = {
    "quick": "FINAL(context.split()[1])",
    "prints": "print('line ' * 200)\nFINAL(context.split()[1])",
    "nap": "import time\ntime.sleep(0.05)\nFINAL(context.split()[1])",
    "long": "FINAL(context.split()[1] * 20000)",
    "daemon": DAEMON + "FINAL(context.split()[1])",
    "nested": NEST,
    "wide": NEST_WIDE + TAKE_ALL,
    "polling": NEST_WIDE + TAKE_POLLS,
    "careless": NEST_WIDE + "rlm_query('stubborn x', blocking=False)\nFINAL(context.split()[1])",
    "fails": "import os\nos._exit(3)",
    "endless": "import time\ntime.sleep(1000)",
    "stubborn": STUBBORN,
    "stuck": DAEMON + "rlm_query_batched(['endless x', 'stubborn x'])",
}
"""Kind of child → the code that its model writes. The second word of the prompt is the token that must come back."""

ENDLESS = frozenset({"endless", "stubborn", "stuck"})
MIX = ("quick",) * 8 + (
    "prints",
    "nap",
    "nap",
    "long",
    "daemon",
    "nested",
    "nested",
    "wide",
    "polling",
    "careless",
    "fails",
)
TROUBLE = ("endless", "stubborn", "stuck")


def scripted() -> Any:
    return ScriptedClient.factory(rules={rf"\b{kind} \w+": f"```repl\n{code}\n```" for kind, code in SCRIPT.items()})


class Wrong(AssertionError):
    """What a soak found."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What root and nursery hold at a moment at which no child lives. Memory in bytes, written and private pages only."""

    fds: int
    threads: tuple[str, ...]
    memory: int
    nursery: int
    nursery_fds: int
    nursery_memory: int

    def __str__(self) -> str:
        return (
            f"root {self.fds} fds, {len(self.threads)} threads, {self.memory / 2**20:.1f} MiB; "
            f"nursery {self.nursery_fds} fds, {self.nursery_memory / 2**20:.1f} MiB"
        )


@dataclass
class Running:
    """A child that the soak has started and not yet seen to end.

    Attributes:
        touched: whether something was done to it that may end it.
    """

    handle: ChildHandle
    kind: str
    token: str
    started: float
    touched: bool = False


@dataclass
class Figures:
    """What a soak counted."""

    children: int = 0
    states: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def time(self, what: str, seconds: float) -> None:
        self.slowest[what] = max(seconds, self.slowest.get(what, 0.0))

    def summary(self, seconds: float) -> str:
        lines = [
            f"{self.children} children (nested ones included) in {seconds:.0f} s: {self.children / seconds:.1f} per second"
        ]
        lines.append("ended: " + ", ".join(f"{state} {n}" for state, n in sorted(self.states.items())))
        lines.append("deeds: " + ", ".join(f"{deed} {n}" for deed, n in sorted(self.deeds.items())))
        lines.append("slowest: " + ", ".join(f"{what} {s * 1000:.0f} ms" for what, s in sorted(self.slowest.items())))
        if self.samples:
            lines += [f"after warm-up: {self.samples[0]}", f"at the end:    {self.samples[-1]}"]
            most = max(sample.memory for sample in self.samples), max(sample.nursery_memory for sample in self.samples)
            lines.append(f"most at any reset: root {most[0] / 2**20:.1f} MiB, nursery {most[1] / 2**20:.1f} MiB")
        return "\n".join(lines)


class Soak:
    """One session under random load. A ``with`` block.

    Args:
        seed: of the random choices.
        run_dir: where trajectories go.
        reset_every: children (of the root) after which the episode is reset.
    """

    def __init__(self, seed: int, run_dir: Path, *, reset_every: int = 300) -> None:
        self.random = random.Random(seed)
        self.reset_every = reset_every
        settings = {"run_dir": str(run_dir), "keep_runs": 3, "max_depth": 3, "max_children_total": 100_000}
        graces = {"shutdown_grace_s": 0.1, "terminate_grace_s": 0.1, "kill_grace_s": 1.0}
        self.session = RLMSession(Settings({**settings, **graces}, environ={}), {})
        self.session.configure_value("client_factory", scripted())
        self.helpers = self.session.namespace
        self.figures = Figures()
        self.running: list[Running] = []
        self.in_episode = 0
        self.tokens = 0
        self.hit_nursery = -1
        self.seen: dict[str, tuple[ChildState, str | None]] = {}

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        report = self.session.shutdown()
        self.expect(report.ok, f"shutdown: {report}")
        self.expect(not proc.marked(), f"left after the shutdown: {proc.marked()}")
        self.expect(not proc.own_threads(), f"threads after the shutdown: {proc.own_threads()}")
        self.expect(not proc.zombies_of_this_process(), "zombies after the shutdown")

    @staticmethod
    def expect(holds: bool, otherwise: str) -> None:
        if not holds:
            raise Wrong(otherwise)

    # -- the load

    def run(self, over: Callable[[], bool]) -> None:
        """Keep children coming until ``over()``; then reset, and compare with what there was after the warm-up."""
        self.warm_up()
        deeds = [self.start] * 8 + [self.wait_briefly] * 8 + [self.cancel] * 3 + [self.kill_worker] * 2
        deeds += [self.cancel_at_the_end, self.freeze_worker, self.look, self.send, self.rarely]
        while not over():
            self.random.choice(deeds)()
            self.take_ended()
            if self.in_episode >= self.reset_every:
                self.reset()
        self.reset()
        self.compare()

    def warm_up(self) -> None:
        """Run one child of each kind, and reset twice, so that caches are filled and the first samples are of a used process."""
        for _ in range(2):
            self.start_one(*(kind for kind in SCRIPT if kind not in ENDLESS))
            self.helpers["rlm_wait"]([child.handle for child in self.running], HANG_S)
            self.take_ended()
            self.reset()
        self.figures.samples[:-1] = []

    def start_one(self, *kinds: str) -> list[Running]:
        self.session.configure("max_concurrent_children", str(self.random.randint(8, 16)))
        tokens = [f"t{self.tokens + number}" for number in range(len(kinds))]
        self.tokens += len(kinds)
        prompts = [f"{kind} {token}" for kind, token in zip(kinds, tokens, strict=True)]
        # One that goes to a nursery whose death has not been noticed yet shares it.
        dying = self.session.supervisor.nursery_pid == self.hit_nursery
        handles = self.helpers["rlm_query_batched"](prompts, blocking=False)
        now = time.monotonic()
        new = [Running(h, kind, token, now, dying) for h, kind, token in zip(handles, kinds, tokens, strict=True)]
        self.running += new
        self.in_episode += len(new)
        return new

    def start(self) -> None:
        if len(self.running) < 16:
            kinds = [self.random.choice(MIX) for _ in range(self.random.randint(1, 5))]
            if sum(child.kind in ENDLESS for child in self.running) < 3:
                kinds.append(self.random.choice(TROUBLE))
            self.start_one(*kinds)

    def some(self) -> Running | None:
        return self.random.choice(self.running) if self.running else None

    def wait_briefly(self) -> None:
        if self.running:
            handles = [child.handle for child in self.running]
            how = self.random.choice(["any", "all"])
            began = time.monotonic()
            self.helpers["rlm_wait"](handles, self.random.choice([0.0, 0.001, 0.001, 0.05]), return_when=how)
            self.figures.time("wait of at most 50 ms", time.monotonic() - began)

    def take_ended(self) -> None:
        """Check each child that has ended, once and for all."""
        now = time.monotonic()
        statuses = self.session.supervisor.status()
        for status in statuses:
            if status.done:
                self.expect(status.exited, f"done and not exited: {status}")
                first = self.seen.setdefault(status.id, (status.state, status.result))
                self.expect(first == (status.state, status.result), f"{status.id} was {first}, and is {status}")
        by_id = {status.id: status for status in statuses}
        left = []
        for child in self.running:
            status = by_id[child.handle.id]
            if status.done:
                self.check_end(child, status)
            else:
                waits_long = child.kind not in ENDLESS and not child.touched and now - child.started > HANG_S
                self.expect(not waits_long, f"{child.kind} does not end: {status}")
                left.append(child)
        self.running = left

    def check_end(self, child: Running, status: ChildStatus) -> None:
        if status.state is ChildState.COMPLETED:
            wanted = child.token * 20000 if child.kind == "long" else child.token
            ok = status.result == wanted or (
                child.kind in ("nested", "wide", "polling") and self.figures.deeds.total() > 0
            )
            self.expect(ok, f"{child.kind} {child.token} has a wrong answer: {status}")
        elif not child.touched:
            self.expect(
                child.kind == "fails" or self.excused(child), f"{child.kind} ended like this untouched: {status}"
            )

    def excused(self, child: Running) -> bool:
        """Parents may fail because a child of theirs was hit."""
        return child.kind in ("nested", "wide", "polling", "careless", "stuck")

    # -- the deeds

    def touch_all(self) -> None:
        for child in self.running:
            child.touched = True

    def cancel(self) -> None:
        """Prefer children that would never end: they hold the slots."""
        old = time.monotonic() - 0.5
        endless = [c for c in self.running if c.kind in ENDLESS or (c.touched and c.started < old)]
        child = self.random.choice(endless) if endless and self.random.random() < 0.8 else self.some()
        if child is not None:
            self.cancel_one(child, self.random.choice([None, 0.0, 0.05]))

    def cancel_one(self, child: Running, grace_s: float | None) -> ChildStatus:
        child.touched = True
        self.figures.deeds["cancel"] += 1
        began = time.monotonic()
        status: ChildStatus = child.handle.cancel(grace_s=grace_s)
        self.figures.time("cancel", time.monotonic() - began)
        self.expect(status.done and status.exited, f"cancelled: {status}")
        return status

    def cancel_at_the_end(self) -> None:
        """Cancel at about the moment at which the child finishes."""
        while len(self.running) > 4:  # with a slot for it
            self.cancel_one(self.running[0], 0.0)
            self.take_ended()
        [child] = self.start_one("quick")
        child.handle.wait(self.random.uniform(0.0, 0.08))
        status = self.cancel_one(child, None)
        self.figures.deeds[f"cancel at the end: {status.state}"] += 1

    def worker(self) -> tuple[ChildStatus, int] | None:
        """Choose a process of a child, nested ones included; return its status and a pidfd."""
        alive = [s for s in self.session.supervisor.status() if s.pid is not None and not s.done and not s.exited]
        if not alive:
            return None
        status = self.random.choice(alive)
        assert status.pid is not None
        pidfd = posix.open_pidfd(status.pid)
        if pidfd is None:
            return None
        seen = posix.parent_and_state(status.pid)
        if seen is None or seen[0] != self.session.supervisor.nursery_pid:
            os.close(pidfd)
            return None
        for child in self.running:
            child.touched = child.touched or child.handle.id in (status.id, status.parent_id)
        return status, pidfd

    def kill_worker(self) -> None:
        if (chosen := self.worker()) is not None:
            signum = self.random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV])
            self.figures.deeds[f"worker {signal.Signals(signum).name}"] += 1
            posix.signal_pidfd(chosen[1], signum)
            os.close(chosen[1])

    def freeze_worker(self) -> None:
        """Stop a process; it is cancelled or killed later, at the next close at the latest."""
        if (chosen := self.worker()) is not None:
            self.figures.deeds["worker SIGSTOP"] += 1
            posix.signal_pidfd(chosen[1], signal.SIGSTOP)
            os.close(chosen[1])

    def look(self) -> None:
        self.helpers["rlm_status"]()
        if self.running:
            repr(self.random.choice(self.running).handle)

    def send(self) -> None:
        if (child := self.some()) is not None:
            try:
                child.handle.send(f"{child.kind} {child.token}")  # what the script goes by
                self.figures.deeds["send"] += 1
            except UsageMistake:
                self.figures.deeds["send too late"] += 1

    def rarely(self) -> None:
        deed = self.random.choice([self.close, self.kill_nursery, self.freeze_nursery, self.close_in_a_hurry])
        if self.random.random() < 0.3:
            deed()

    def kill_nursery(self) -> None:
        nursery = self.session.supervisor.nursery_pid
        if nursery is not None and (pidfd := posix.open_pidfd(nursery)) is not None:
            self.touch_all()
            signum = self.random.choice([signal.SIGKILL, signal.SIGTERM])
            self.figures.deeds[f"nursery {signum.name}"] += 1
            posix.signal_pidfd(pidfd, signum)
            os.close(pidfd)
            self.hit_nursery = nursery

    def freeze_nursery(self) -> None:
        """Stop the nursery, and close at once."""
        nursery = self.session.supervisor.nursery_pid
        if nursery is not None and self.running and (pidfd := posix.open_pidfd(nursery)) is not None:
            self.figures.deeds["nursery SIGSTOP"] += 1
            posix.signal_pidfd(pidfd, signal.SIGSTOP)
            self.close()
            posix.signal_pidfd(pidfd, signal.SIGCONT)
            os.close(pidfd)

    def close_in_a_hurry(self) -> None:
        self.session.supervisor.hasten()
        self.touch_all()
        self.close()

    def close(self) -> None:
        self.touch_all()
        self.verb("close", self.session.close)

    def verb(self, name: str, run: Callable[[], Any]) -> None:
        self.figures.deeds[name] += 1
        began = time.monotonic()
        report = run()
        self.figures.time(name, time.monotonic() - began)
        self.expect(report.ok, f"{name}: {report}")
        left = [seen for seen in proc.marked().values() if not proc.is_nursery(seen)]
        self.expect(not left, f"alive after {name}: {left}")

    def reset(self) -> None:
        self.touch_all()
        self.session.close()
        self.take_ended()
        statuses = self.session.supervisor.status()
        self.figures.children += len(statuses)
        self.figures.states.update(str(status.state) for status in statuses)
        self.verb("reset", self.session.reset)
        self.seen.clear()
        self.in_episode = 0
        self.figures.samples.append(self.sample())

    # -- what must hold

    def sample(self) -> Sample:
        """Look at root and nursery; make sure that there is a nursery to look at."""
        self.expect(self.helpers["rlm_query"]("quick t") == "t", "no child can be started")
        nursery = self.session.supervisor.nursery_pid
        assert nursery is not None
        until = time.monotonic() + SETTLE_S
        while proc.children_of(nursery) or proc.zombies_of_this_process():
            self.expect(time.monotonic() < until, "zombies, or children of the nursery that are nobody's")
            select.select([], [], [], 0.005)
        gc.collect()
        threads = tuple(proc.own_threads())
        memory, nursery_memory = proc.dirty_bytes(os.getpid()), proc.dirty_bytes(nursery)
        return Sample(len(proc.own_fds()), threads, memory, nursery, len(proc.open_fds(nursery)), nursery_memory)

    def compare(self) -> None:
        """Compare the last sample with that after the warm-up."""
        first, last = self.figures.samples[0], self.figures.samples[-1]
        self.expect(last.fds <= first.fds, f"descriptors: {first.fds} → {last.fds}: {proc.own_fds()}")
        self.expect(last.threads == first.threads, f"threads: {first.threads} → {last.threads}")
        self.expect(
            last.nursery_fds <= first.nursery_fds,
            f"the nursery's descriptors: {first.nursery_fds} → {last.nursery_fds}",
        )
        allowed = ROOT_GROWTH + ROOT_GROWTH_PER_CHILD * self.figures.children
        self.expect(last.memory - first.memory <= allowed, f"the root's memory: {first} → {last}")
        for sample in self.figures.samples:
            born = next(other for other in self.figures.samples if other.nursery == sample.nursery)
            grown = sample.nursery_memory - born.nursery_memory
            self.expect(grown <= NURSERY_GROWTH, f"the memory of one nursery: {born} → {sample}")
        grown = last.nursery_memory - first.nursery_memory
        self.expect(grown <= NURSERY_GROWTH + BOOTS_DIFFER, f"the nursery's memory: {first} → {last}")


def soak_sessions(minutes: float, seed: int) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlm-soak-") as folder:
        soak = Soak(seed, Path(folder))
        try:
            with soak:
                soak.run(lambda: time.monotonic() - began > minutes * 60)
        finally:
            print(f"seed {seed}\n{soak.figures.summary(time.monotonic() - began)}", flush=True)


def soak_machine(minutes: float) -> None:
    from tests.children.machine import run_machine
    from tests.children.machine_base import Arena

    began = time.monotonic()
    with Arena() as arena:
        try:
            while time.monotonic() - began < minutes * 60:
                run_machine(arena, examples=20, steps=20)
        finally:
            print(
                f"{arena.examples} examples, {arena.steps} steps, {arena.children} children of the root "
                f"in {time.monotonic() - began:.0f} s",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Run children for a long time, killing at random."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--machine", action="store_true", help="run the random state machine instead")
    options = parser.parse_args(arguments)
    proc.mark_this_run()
    try:
        if options.machine:
            soak_machine(options.minutes)
        else:
            soak_sessions(options.minutes, options.seed)
    except Wrong as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    print("all is where it was")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
