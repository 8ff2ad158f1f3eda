"""The fault matrix: every step of a child's life × every way to end it, with real processes.

``python -m tests.children.fault_matrix`` runs the whole of it (``--only STEP,ENDING`` one cell, ``--list`` shows what cannot be and
why). Each cell brings one child, the *leaf*, to a step, ends it, and then checks what every cell must hold:

* the leaf is in the one terminal state that the table gives, with a readable reason, and so is everybody else, all with confirmed exits;
* a verb returns within its graces plus 250 ms;
* no process with the nursery's marker is left but the nursery, no descriptor and no thread;
* the next child works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlm_kernel.children import posix
from rlm_kernel.children.worker import MARKER_VARIABLE
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildState, ChildStatus, CleanupReport, Usage
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import Channel
from tests.children import fault_entries as faults
from tests.children.helpers import BUDGET_SLACK_S, DEADLINE_S, QUICK, ROOT, Watched, is_dead, readable

STEPS = {
    "queued": "admitted, but every slot is taken",
    "booting": "its nursery is still starting",
    "unforked": "handed to a nursery that does not react",
    "forked": "the process exists, its own signal handlers do not",
    "unregistered": "its process waits for its task, as the root has not read that it exists",
    "construct": "in the construction of its client",
    "model": "in a model call",
    "loop": "in a loop in Python",
    "sleep": "in a call that blocks",
    "native": "in native code, which lets no signal handler run",
    "gate": "in a helper that waits for the supervisor",
    "result_frame": "in the middle of the frame that carries its answer",
    "result_file": "writing a large answer to its file",
    "exit": "its answer is sent, its process lingers",
    "nested": "waiting for a child of its own",
}

ENDINGS = {
    "answer": "it goes on, and answers",
    "failure": "it goes on, and fails",
    "cancel": "rlm_cancel",
    "close": "the verb",
    "reset": "the verb",
    "finalize": "the verb, by FINAL",
    "shutdown": "the verb, with which the session is over",
    "timeout": "per_child_timeout_s",
    "parent_killed": "SIGKILL for the run that started it",
    "worker_kill": "SIGKILL for its process",
    "nursery_kill": "SIGKILL for the nursery",
    "nursery_stop": "SIGSTOP for the nursery, then close",
    "kernel_kill": "SIGKILL for the root process",
    "memory": "more memory than memory_limit_bytes",
}

VERBS = ("cancel", "close", "reset", "finalize", "shutdown", "nursery_stop")
TIMEOUT_S = 1.0
LIFT_AFTER_S = 0.05
"""Seconds into a verb after which what holds the machinery up (not the leaf) gives way."""

_NO_PROCESS = ("queued", "booting", "unforked")
_TAKES_NO_MEMORY = ("unregistered", "sleep", "native", "gate", "nested")

_STATE = {
    "answer": ChildState.COMPLETED,
    "failure": ChildState.FAILED,
    "timeout": ChildState.TIMED_OUT,
    "worker_kill": ChildState.FAILED,
    "nursery_kill": ChildState.FAILED,
    "memory": ChildState.FAILED,
}


def impossible(step: str, ending: str) -> str | None:
    """Say why a cell cannot be, None if it can."""
    if step in _NO_PROCESS and ending == "timeout":
        return "the time of a child is counted from the start of its process"
    if step in _NO_PROCESS and ending in ("worker_kill", "memory"):
        return "there is no process yet"
    if step in _TAKES_NO_MEMORY and ending == "memory":
        return "while it is there it takes no memory"
    if (step, ending) == ("booting", "parent_killed"):
        return "a parent is a child of the nursery, which has started then"
    return None


def expected(step: str, ending: str) -> ChildState:
    """Return the leaf's terminal state."""
    if step == "exit" or (step, ending) == ("queued", "nursery_kill"):
        return ChildState.COMPLETED  # the answer was first; who was queued runs in the next nursery
    return _STATE.get(ending, ChildState.CANCELLED)


def reason(step: str, ending: str) -> str | None:
    """Return what the leaf's error must say, None if there must be none."""
    if expected(step, ending) not in (ChildState.FAILED, ChildState.TIMED_OUT):
        return None
    if ending == "failure":
        return {
            "construct": "InjectedError: in the client's construction",
            "model": "InjectedError: in a model call",
            "forked": "the child exited with code 70 before it had an answer",
            "result_frame": "the child exited with code 70 before it had an answer",
            "result_file": "No space left on device",
        }.get(step, "the child exited with code 7 before it had an answer")
    return {
        "timeout": f"timed out after {TIMEOUT_S:g} s",
        "worker_kill": "the child was killed by signal 9 (SIGKILL) before it had an answer",
        "nursery_kill": "the nursery process ended (signal 9)",
        "memory": "memory limit: it used",
    }[ending]


CELLS = [(step, ending) for step in STEPS for ending in ENDINGS if impossible(step, ending) is None]


def pairwise() -> list[tuple[str, str]]:
    """Choose cells in which every step and every ending comes at least twice: diagonals through the table."""
    chosen: list[tuple[str, str]] = []
    for row, step in enumerate(STEPS):
        for offset in (0, 5):
            turned = [*ENDINGS, *ENDINGS, *ENDINGS][row + offset :]
            chosen.append(next((step, e) for e in turned if (step, e) in CELLS and (step, e) not in chosen))
    for ending in ENDINGS:
        while sum(ending == other for _, other in chosen) < 2:
            chosen.append(next(cell for cell in CELLS if cell[1] == ending and cell not in chosen))
    return chosen


# --------------------------------------------------------------------------------------------------------- the machinery


class HeldReactor:
    """Keeps the root from reading what its nursery says next, as if its supervisor thread had no time."""

    def __init__(self) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        self._receive = receive = Channel.receive

        def held(channel: Channel[Any], reads: int | None = None) -> Any:
            if channel._decoder.type == m.FromNursery and threading.current_thread().name == "rlm-supervisor":
                self.reached.set()
                self._go.wait(DEADLINE_S)
            return receive(channel, reads)

        Channel.receive = held  # type: ignore[method-assign,assignment]

    def release(self) -> None:
        Channel.receive = self._receive  # type: ignore[method-assign]
        self._go.set()


class SpawnSent:
    """Tells when the root has asked its nursery for the next fork."""

    def __init__(self) -> None:
        self._sent = threading.Event()
        self._flush = flush = Channel.flush

        def watched(channel: Channel[Any]) -> bool:
            complete = flush(channel)
            if complete and channel._decoder.type == m.FromNursery:
                self._sent.set()
            return complete

        Channel.flush = watched  # type: ignore[method-assign,assignment]

    def wait(self) -> None:
        try:
            assert self._sent.wait(DEADLINE_S), "no fork was asked for"
        finally:
            Channel.flush = self._flush  # type: ignore[method-assign]


@dataclass
class Scene:
    """A leaf at its step.

    Attributes:
        leaf: its id.
        pids: processes that were announced: the leaf's, and those of others.
        lift: has the machinery go on, where it is what holds the leaf up.
        finish: undoes what the scene needed.
    """

    step: str
    ending: str
    leaf: str = ""
    parent: str | None = None
    pids: dict[str, int] = field(default_factory=dict)
    lift: Callable[[], None] = lambda: None
    finish: list[Callable[[], None]] = field(default_factory=list)


class Driver:
    """A session whose children stop where they are told to. A ``with`` block; one session serves many cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._restore = {
            name: os.environ.get(name) for name in (faults.DIRECTORY, faults.ROLE, faults.STEP, faults.FINITE)
        }
        os.environ[faults.DIRECTORY] = str(folder)
        self._pipes: dict[str, int] = {}
        self._announced = b""
        self._published: dict[str, ChildStatus] = {}
        self._make_pipes()
        self.before = (_fds(), _threads())
        self._session: RLMSession | None = None
        self.held: HeldReactor | None = None
        self.sent: SpawnSent | None = None

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            assert self._session.shutdown().ok
        self._close_pipes()
        for name, value in self._restore.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    # -- pipes

    def _make_pipes(self) -> None:
        for name in ("at", "go-leaf", "go-parent", "go-blocker", "go-inner", "go-gate", "go-boot"):
            os.mkfifo(self.folder / name)
            self._pipes[name] = os.open(self.folder / name, os.O_RDWR | os.O_CLOEXEC)
        self._announced = b""

    def _close_pipes(self) -> None:
        for name, fd in self._pipes.items():
            os.close(fd)
            os.unlink(self.folder / name)
        self._pipes.clear()

    def say(self, who: str, word: str = "answer") -> None:
        os.write(self._pipes[f"go-{who}"], word.encode() + b"\n")

    def next(self, at: str) -> dict[str, Any]:
        """Wait until somebody announces a step."""
        while True:
            while b"\n" not in self._announced:
                assert readable(self._pipes["at"]), f"nobody came to {at!r}; {self.session.supervisor.status()}"
                self._announced += os.read(self._pipes["at"], 65536)
            line, self._announced = self._announced.split(b"\n", 1)
            said: dict[str, Any] = json.loads(line)
            if said["at"] == at:
                return said

    # -- the session

    @property
    def session(self) -> RLMSession:
        if self._session is None:
            values = {
                "run_dir": str(self.folder / "runs"),
                "client_factory": "tests.children.fault_entries:make_client",
                "preload": ("tests.children.fault_entries",),
                "max_depth": 4,
                "shutdown_grace_s": QUICK.shutdown_s,
                "terminate_grace_s": QUICK.terminate_s,
                "kill_grace_s": QUICK.kill_s,
            }
            self._session = RLMSession(Settings(values, environ={}), {}, on_change=self._note)
        return self._session

    def _note(self, status: ChildStatus) -> None:
        self._published[status.id] = status

    def start(self, role: str, **options: Any) -> str:
        os.environ[faults.ROLE] = role
        handle = self.session.namespace["rlm_query"](role, blocking=False, **options)
        child_id: str = handle.id
        return child_id

    def works(self) -> bool:
        """Tell whether a plain child gets its answer."""
        os.environ[faults.ROLE] = "plain"
        return bool(self.session.namespace["rlm_query"]("plain") == "ok")

    def status(self, child_id: str) -> ChildStatus:
        return self.session.supervisor.status([(child_id, None)])[0]

    def until(self, child_id: str, holds: Callable[[ChildStatus], bool]) -> ChildStatus:
        deadline = time.monotonic() + DEADLINE_S
        while not holds(status := self.status(child_id)):
            assert time.monotonic() < deadline, status
            self.session.supervisor.wait([(child_id, None)], 0.005)
        return status

    def nursery(self) -> int:
        pid = self.session.supervisor.nursery_pid
        assert pid, "there is no nursery"
        return pid

    def tagged(self) -> list[int]:
        """Return the processes of this driver's nurseries."""
        return tagged(self.folder)

    # -- to the step

    def bring_to(self, step: str, ending: str) -> Scene:
        scene = Scene(step, ending)
        os.environ[faults.STEP] = step
        os.environ.pop(faults.FINITE, None)
        if ending in ("answer", "failure"):
            os.environ[faults.FINITE] = "1"
        if ending == "memory":
            self._configure(scene, "memory_limit_bytes", "60_000_000")
        if step == "gate":
            self._configure(scene, "max_concurrent_model_calls", "1")
        if step == "queued":
            self._fill_slots(scene, with_parent=ending == "parent_killed")
        if step == "booting":
            self._lose_nursery()
            (self.folder / "boot").touch()
        if ending == "parent_killed":
            scene.parent = self.start("parent")
            scene.pids["parent"] = self.next("parent")["pid"]
        self._prepare(scene)
        if scene.parent is None:
            scene.leaf = self.start("leaf", timeout_s=TIMEOUT_S if ending == "timeout" else None)
        else:
            self.say("parent")
            scene.leaf = self._leaf_of(scene.parent)
        self._arrive(scene)
        return scene

    def _lose_nursery(self) -> None:
        nursery = self.nursery()
        os.kill(nursery, signal.SIGKILL)
        _settle(lambda: self.session.supervisor.nursery_pid is None, "the end of the nursery was not seen")

    def _leaf_of(self, parent: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = [s.id for s in self.session.supervisor.status() if s.parent_id == parent]
            if found:
                return found[0]
            assert time.monotonic() < deadline, "the parent started nobody"
            self.session.supervisor.wait([(parent, None)], 0.005)

    def _configure(self, scene: Scene, name: str, text: str) -> None:
        before = str(self.session.settings[name])
        self.session.configure(name, text)
        scene.finish.append(lambda: self.session.configure(name, before) and None)

    def _fill_slots(self, scene: Scene, *, with_parent: bool) -> None:
        self._configure(scene, "max_concurrent_children", "2" if with_parent else "1")
        self.start("blocker")
        scene.pids["blocker"] = self.next("blocker")["pid"]
        scene.lift = lambda: self.say("blocker")

    def _prepare(self, scene: Scene) -> None:
        if scene.step == "forked":
            (self.folder / "forked").touch()
        elif scene.step == "unforked":
            nursery = self.nursery()
            os.kill(nursery, signal.SIGSTOP)
            scene.lift = lambda: os.kill(nursery, signal.SIGCONT)
            self.sent = SpawnSent()
        elif scene.step == "unregistered":
            held = self.held = HeldReactor()
            scene.lift = held.release
            scene.finish.append(held.release)
        elif scene.step == "booting":
            scene.lift = lambda: self.say("boot")

    def _arrive(self, scene: Scene) -> None:
        step = scene.step
        if step == "unforked":
            assert self.sent is not None
            self.sent.wait()
        if step in ("queued", "unforked"):
            assert self.until(scene.leaf, lambda s: True).state is ChildState.QUEUED
            return
        if step == "gate":
            self.next("before the gate")
            self.session.supervisor.begin_call()
            taken = [True]
            scene.lift = lambda: self.session.supervisor.end_call(Usage()) if taken and taken.pop() else None
            scene.finish.append(scene.lift)
            self.say("gate")
        at = {"nested": "inner"}.get(step, step)
        scene.pids[at] = self._unregistered_pid(scene) if step == "unregistered" else self.next(at)["pid"]
        if step == "nested":
            status = self.until(scene.leaf, lambda s: s.state is ChildState.WAITING)
            scene.lift = lambda: self.say("inner")
            assert status.pid
            scene.pids["nested"] = status.pid
        elif step == "exit":
            self.until(scene.leaf, lambda s: s.result is not None)
        elif step == "unregistered":
            assert self.status(scene.leaf).state is ChildState.QUEUED, "the root knows of it"

    def _unregistered_pid(self, scene: Scene) -> int:
        assert self.held is not None
        assert self.held.reached.wait(DEADLINE_S), "the nursery said nothing"
        nursery = self.nursery()
        known = set(scene.pids.values())
        [pid] = set(map(int, Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split())) - known
        return pid

    # -- the end

    def end(self, scene: Scene) -> None:
        """End the leaf; return when that is over."""
        ending = scene.ending
        if ending in VERBS:
            self._by_verb(scene)
        elif ending in ("answer", "failure", "memory"):
            self._go_on(scene, {"answer": "answer", "failure": "fail", "memory": "eat"}[ending])
        elif ending == "timeout":
            if scene.step == "unregistered":
                _wait_for_end(scene.pids[scene.step])
                scene.lift()
        else:
            victim = {
                "parent_killed": lambda: scene.pids["parent"],
                "worker_kill": lambda: scene.pids[scene.step],
                "nursery_kill": self.nursery,
            }[ending]()
            os.kill(victim, signal.SIGKILL)
            if scene.step == "unregistered" or (scene.step, ending) == ("unforked", "parent_killed"):
                scene.lift()
            if (scene.step, ending) == ("queued", "nursery_kill"):
                self.next("code")
                self.say("leaf")
        self.session.supervisor.wait(self._everybody(scene), DEADLINE_S)

    def _everybody(self, scene: Scene) -> list[tuple[str, str | None]]:
        if scene.ending == "reset":
            return []
        if scene.ending in ("parent_killed", "nursery_kill", "answer", "failure") or scene.step != "queued":
            wanted = [s.id for s in self.session.supervisor.status()]
            if (scene.step, scene.ending) == ("queued", "parent_killed"):
                self.say("blocker")
            return [(child_id, None) for child_id in wanted]
        if scene.ending == "cancel":
            self.say("blocker")
        return [(s.id, None) for s in self.session.supervisor.status()]

    def _go_on(self, scene: Scene, word: str) -> None:
        if scene.step == "sleep":
            os.kill(scene.pids["sleep"], signal.SIGUSR1)
        self.say("leaf", word)
        scene.lift()

    def _by_verb(self, scene: Scene) -> None:
        session = self.session
        if scene.ending == "nursery_stop":
            os.kill(self.nursery(), signal.SIGSTOP)
        if scene.ending == "finalize":
            session.finalization.begin_cell()
            session.namespace["FINAL"]("done")
            assert session.finalization.end_cell(success=True) is not None
        verbs: dict[str, Callable[[], CleanupReport]] = {
            "cancel": lambda: session.supervisor.cancel((scene.leaf, None)),
            "close": session.close,
            "nursery_stop": session.close,
            "reset": session.reset,
            "finalize": session.finalize,
            "shutdown": session.shutdown,
        }
        lifted = scene.step == "unregistered" or (scene.step == "unforked" and scene.ending != "nursery_stop")
        timer = threading.Timer(LIFT_AFTER_S, scene.lift) if lifted else None
        if timer is not None:
            timer.start()
        try:
            report = verbs[scene.ending]()
        finally:
            if timer is not None:
                timer.join()
        assert report.ok, report
        assert report.duration_s < QUICK.total_s + LIFT_AFTER_S + BUDGET_SLACK_S, report
        if scene.ending != "cancel":
            keep = {session.supervisor.nursery_pid} - {None}
            assert set(self.tagged()) <= keep, "a process was left when the verb returned"

    # -- what holds in every cell

    def check(self, scene: Scene) -> None:
        step, ending = scene.step, scene.ending
        if ending == "reset":
            assert self.session.supervisor.observers.flush()
            statuses = self._published
        else:
            statuses = {status.id: status for status in self.session.supervisor.status()}
        leaf = statuses[scene.leaf]
        assert leaf.state is expected(step, ending), leaf
        for status in statuses.values():
            assert status.done, status
            assert status.exited, status
        why = reason(step, ending)
        if why is None:
            assert leaf.error is None, leaf.error
        else:
            assert leaf.error is not None, leaf
            assert why in leaf.error, leaf.error
            assert "Traceback" not in leaf.error, leaf.error
        if leaf.state is ChildState.COMPLETED:
            assert leaf.result
        if scene.parent is not None:
            assert statuses[scene.parent].state is ChildState.FAILED
        alive = {name: pid for name, pid in scene.pids.items() if name != "booting" and not is_dead(pid)}
        assert not alive, f"still there: {alive}"
        assert self.session.supervisor.observers.flush() or ending == "shutdown"
        assert self._published[scene.leaf].state is leaf.state, "what was published last is not how it ended"

    def tidy(self, scene: Scene, baseline: tuple[int, int]) -> None:
        """Put everything back, and check that nothing is left and that the next child works."""
        for undo in scene.finish:
            undo()
        if scene.ending == "shutdown":
            self._session = None
            _settle(lambda: (_fds(), _threads()) == self.before, "shutdown left descriptors or threads")
        elif scene.ending == "finalize":
            assert self.session.reset().ok
        for flag in ("forked", "boot"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / flag)
        self._close_pipes()
        self._make_pipes()
        assert self.works(), "the next child does not work"
        assert self.tagged() == [self.nursery()]
        _settle(lambda: (_fds(), _threads()) == baseline, "descriptors or threads are left")
        assert self.session.reset().ok
        self._published.clear()


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return sum(thread.name.startswith("rlm-") for thread in threading.enumerate())


def _settle(holds: Callable[[], bool], what: str) -> None:
    """Wait a moment for what ends just behind an event (a thread, a pipe that a reader closes)."""
    deadline = time.monotonic() + 2.0
    while not holds():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(AssertionError), Watched(pid) as watched:
        assert watched.alive(DEADLINE_S) == [], f"{pid} has not ended"


def tagged(folder: Path) -> list[int]:
    """Return the pids of all processes that come from a nursery of this folder's."""
    entry = f"{faults.DIRECTORY}={folder}".encode()
    return [
        pid for pid in posix.all_pids() if posix.environ_has(pid, entry) and posix.environ_value(pid, MARKER_VARIABLE)
    ]


# ------------------------------------------------------------------------------------------------------------- the cells


def run_cell(driver: Driver, step: str, ending: str) -> float:
    """Run one cell, and return what it took in seconds.

    Raises:
        AssertionError: it is not green.
    """
    began = time.monotonic()
    if ending == "kernel_kill":
        kill_kernel(step)
        return time.monotonic() - began
    assert driver.works()
    assert driver.session.reset().ok
    assert driver.session.supervisor.observers.flush()
    driver._published.clear()
    baseline = (_fds(), _threads())
    scene = driver.bring_to(step, ending)
    driver.end(scene)
    driver.check(scene)
    driver.tidy(scene, baseline)
    return time.monotonic() - began


def kill_kernel(step: str) -> None:
    """Kill a root process, of its own, whose leaf stands at a step: nothing is left within the graces."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.children.fault_matrix", "--root", step, name]
        root = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert root.stdout is not None
            assert readable(root.stdout.fileno(), 30.0), "the root says nothing"
            assert root.stdout.readline() == b"there\n"
            there = tagged(Path(name))
            assert there, "there is nothing to leave behind"
            with Watched(*there) as watched:
                began = time.monotonic()
                root.kill()
                root.wait()
                assert watched.alive(DEADLINE_S) == []
                took = time.monotonic() - began
            assert took < QUICK.total_s + BUDGET_SLACK_S, took
            assert tagged(Path(name)) == []
        finally:
            root.kill()
            root.wait()
            if root.stdout is not None:
                root.stdout.close()


def be_root(step: str, folder: Path) -> None:
    with Driver(folder) as driver:
        assert driver.works()
        driver.bring_to(step, "kernel_kill")
        print("there", flush=True)
        while True:
            signal.pause()


def run_all(cells: list[tuple[str, str]]) -> int:
    failed = 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        driver = None
        for step, ending in cells:
            if driver is None:
                stack = contextlib.ExitStack()
                driver = stack.enter_context(_driver())
            try:
                took = run_cell(driver, step, ending)
                print(f"ok      {took:5.2f} s  {step}, {ending}", flush=True)
            except Exception as error:
                failed += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                print(f"FAILED  {step}, {ending}: {type(error).__name__}: {error} ({where.line})", flush=True)
                with contextlib.suppress(Exception):
                    stack.close()
                driver = None
        stack.close()
    print(f"{len(cells) - failed} of {len(cells)} cells are green, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


@contextlib.contextmanager
def _driver() -> Iterator[Driver]:
    with tempfile.TemporaryDirectory() as name, Driver(Path(name)) as driver:
        yield driver


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.children.fault_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole matrix (the default)")
    parser.add_argument("--pairwise", action="store_true", help="the part that runs in the suite")
    parser.add_argument("--only", metavar="STEP,ENDING", help="one cell, or a row (STEP,) or a column (,ENDING)")
    parser.add_argument("--list", action="store_true", help="show the cells that cannot be, with the reason")
    parser.add_argument("--root", nargs=2, metavar=("STEP", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.root:
        be_root(args.root[0], Path(args.root[1]))
    cells = pairwise() if args.pairwise else CELLS
    if args.only:
        only_step, _, only_ending = args.only.partition(",")
        cells = [(s, e) for s, e in CELLS if only_step in ("", s) and only_ending in ("", e)]
    left_out = [(s, e, impossible(s, e)) for s in STEPS for e in ENDINGS if impossible(s, e)]
    if args.list:
        for step, ending, why in left_out:
            print(f"{step}, {ending}: {why}")
        return 0
    print(f"{len(cells)} cells of {len(STEPS)} steps × {len(ENDINGS)} endings; {len(left_out)} cannot be (--list)")
    return run_all(cells)


if __name__ == "__main__":
    raise SystemExit(main())
