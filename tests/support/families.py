"""Three children that must be stopped in three different ways, and the cells under which that must work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.support.kernels import Fifo, Kernel, Processes
from tests.support.model_server import ModelServer, code, script

_numbers = itertools.count(1)

_START_S = 30.0
"""Seconds for the first child of a kernel, which waits for the nursery: that costs a second of processor time, of which a busy machine
may give little."""

STUBBORN = """\
import signal, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
{ready}
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""

PLAIN = """\
import time
{ready}
while True:
    time.sleep(0.02)
"""

CATCHING = """\
import time
{ready}
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
"""Leaves the signal handlers alone, but catches what they raise."""


def tag(word: str = "t") -> str:
    """Return a word that no other prompt has."""
    return f"{word}-{next(_numbers)}-"


@dataclass(frozen=True)
class Family:
    """Live children in a kernel, bound to ``hs`` there.

    Attributes:
        pids: theirs.
        nursery: the nursery's pid.
    """

    pids: tuple[int, ...]
    nursery: int

    def watched(self, *more: int) -> Processes:
        return Processes([*self.pids, *more])


def start_family(kernel: Kernel, server: ModelServer, fifo: Fifo) -> Family:
    """Start three children: one blocked in a model call, one that nothing but SIGKILL ends, one in a plain loop.

    Returns when all of them are where they are to be.
    """
    blocked = tag("blocked")
    ready = fifo.write_code("1")
    prompts = [f"{blocked} [[block]]", *(script(code(text.format(ready=ready))) for text in (STUBBORN, PLAIN))]
    kernel.ok(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]")
    server.wait_for_request(blocked, timeout_s=_START_S)
    fifo.lines(2)
    pids = tuple(kernel.value("[h.status().pid for h in hs]"))
    return Family(pids, parent_of(pids[0]))


def start_child(kernel: Kernel, fifo: Fifo, text: str = PLAIN, name: str = "h") -> int:
    """Start one child that runs a text; return its pid when it does."""
    ready = fifo.write_code("__import__('os').getpid()")
    kernel.ok(f"{name} = rlm_query({script(code(text.format(ready=ready)))!r}, blocking=False)")
    return int(fifo.lines(1)[0])


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


DAEMON = """\
import os, signal, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
{ready}
time.sleep(300)
"""
"""A process that leaves its parent, its group and its session twice, and ignores what asks it to end."""


@dataclass(frozen=True)
class Kinds:
    """One child of each kind that is hard to stop, alive in a kernel of ``max_depth=3``, the first four bound to ``hs`` there.

    Attributes:
        children: pids of the children: blocked in a model call, ignoring signals, waiting for its own child, parent of a
            daemon, and the child that is waited for.
        daemon: pid of the process that has daemonized itself away.
        subprocess: pid of a process that has not.
        nursery: the nursery's pid.
    """

    children: tuple[int, ...]
    daemon: int
    subprocess: int
    nursery: int

    def watched(self, *more: int) -> Processes:
        return Processes([*self.children, self.daemon, self.subprocess, *more])


def start_kinds(kernel: Kernel, server: ModelServer, fifo: Fifo) -> Kinds:
    """Start one child of each kind from one cell, and return when each is where it is to be."""
    blocked, inner = tag("blocked"), tag("inner")
    daemon = DAEMON.format(ready=fifo.write_code("f'daemon {os.getpid()}'"))
    started = fifo.write_code("f'subprocess {started.pid}'")
    texts = [
        STUBBORN.format(ready=fifo.write_code("'stubborn 0'")),
        f"rlm_query('{inner} [[block]]')",
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-S', '-c', {daemon!r}])\n"
        f"started = subprocess.Popen(['sleep', '300'])\n{started}\ntime.sleep(300)",
    ]
    prompts = [f"{blocked} [[block]]", *(script(code(text)) for text in texts)]
    kernel.ok(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]")
    server.wait_for_request(blocked, timeout_s=_START_S)
    server.wait_for_request(inner, count=2)  # its own call, and the one whose prompt holds the code
    told = dict(line.split() for line in fifo.lines(3))
    alive = kernel.value("[(s.pid, str(s.state)) for s in rlm_status() if not s.done]")
    assert sorted(state for _, state in alive) == ["running"] * 4 + ["waiting"]
    pids = tuple(pid for pid, _ in alive)
    return Kinds(pids, int(told["daemon"]), int(told["subprocess"]), parent_of(pids[0]))


SURVIVOR = """
from rlm_kernel.values import CleanupReport
supervisor = __rlm__._session.supervisor
def stop(verb, graces, refs=None, **more):
    del supervisor.stop  # for one call
    return CleanupReport(verb, survivors=(4194000,))
supervisor.stop = stop
"""
"""Code for a cell: the next stop cannot confirm an exit. The process that it names is none."""
