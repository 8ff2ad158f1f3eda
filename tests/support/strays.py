"""Daemons that carry a nursery's marker and that nobody of ours is the parent of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from rlm_kernel.children import posix
from rlm_kernel.children.worker import MARKER_VARIABLE

_PROGRAM = (
    "import os, signal\n"
    "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "print(os.getpid(), flush=True)\n"
    "os.close(1)\n"
    "while True: signal.pause()\n"
)

_GONE_S = 10.0


@contextlib.contextmanager
def strays() -> Iterator[Callable[[str], int]]:
    """Give a function that starts one with a marker and returns its pid; all of them are gone at the end of the block."""
    pidfds: list[int] = []

    def start(marker: str) -> int:
        environ = {**os.environ, MARKER_VARIABLE: marker}
        said = subprocess.run([sys.executable, "-S", "-c", _PROGRAM], env=environ, stdout=subprocess.PIPE, check=True)
        pid = int(said.stdout)
        pidfd = posix.open_pidfd(pid)
        assert pidfd is not None
        pidfds.append(pidfd)
        return pid

    try:
        yield start
    finally:
        for pidfd in pidfds:
            posix.signal_pidfd(pidfd, signal.SIGKILL)
            posix.pidfd_has_exited(pidfd, _GONE_S)
            os.close(pidfd)
