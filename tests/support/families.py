"""Three children that must be stopped in three different ways, and the cells under which that must work."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from tests.support.kernels import Fifo, Kernel, Processes
from tests.support.model_server import ModelServer, code, script

_numbers = itertools.count(1)

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
    server.wait_for_request(blocked)
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
