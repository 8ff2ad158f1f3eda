"""All that can live below a kernel at once: children of each kind, a child's child, and a daemon that a child's code has started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.families import PLAIN, STUBBORN, tag
from tests.support.kernels import Fifo
from tests.support.model_server import ModelServer, code, script

_DAEMON = (
    "import os, signal\n"
    "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"
    "os.setsid()\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "{ready}\n"
    "while True: signal.pause()\n"
)

_STARTS_DAEMON = (
    "import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {daemon!r}], check=True)\n" + PLAIN
)

_LOOK = "[__import__('os').getpid(), get_ipython().kernel.rlm.supervisor.nursery_pid, *(h.status().pid for h in hs)]"

READY_S = 30.0
"""Seconds until all of them are where they are to be: the nursery starts first, and other tests may use the processors, too."""

MAX_DEPTH = {"RLM_MAX_DEPTH": "3"}
"""What a kernel needs in its environment, so that its children may have children."""


@dataclass(frozen=True)
class Generations:
    """The pids of a kernel and of all that lives below it: the handles are bound to ``hs`` there.

    Attributes:
        below: the children, the grandchild and the daemon.
    """

    kernel: int
    nursery: int
    below: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (self.kernel, self.nursery, *self.below)


def start_generations(run: Callable[[str], Any], model: ModelServer, fifo: Fifo) -> Generations:
    """Start four children from one cell: one blocked in a model call, one that nothing but SIGKILL ends, one that waits for a child
    of its own, and one that has started a daemon. Returns when all of them are where they are to be.

    Args:
        run: runs a cell that must succeed; what it returns has the result's ``text``.
    """
    blocked = tag("blocked")
    ready = fifo.write_code("__import__('os').getpid()")
    nested = script(code(PLAIN.format(ready=ready)))
    texts = (
        STUBBORN.format(ready=ready),
        f"print(rlm_query({nested!r}))",
        _STARTS_DAEMON.format(daemon=_DAEMON.format(ready=ready), ready=ready),
    )
    prompts = [f"{blocked} [[block]]", *(script(code(text)) for text in texts)]
    run(f"hs = [rlm_query(p, blocking=False) for p in {prompts!r}]")
    model.wait_for_request(blocked, READY_S)
    # The stubborn child, the grandchild, the daemon, and the child that started it.
    told = {int(line) for line in fifo.lines(4, READY_S)}
    kernel, nursery, *children = [int(number) for number in run(_LOOK).text.strip("[]").split(",")]
    below = tuple(sorted({*children, *told}))
    assert len(below) == 6
    return Generations(kernel, nursery, below)
