"""The optional kernel provisioner: it makes Jupyter wait for the configured graces, and for what a killed kernel leaves to its nursery.

Kernelspecs that ``rlm-kernel install --provisioner`` writes name it. It starts kernels like jupyter_client's `LocalProvisioner`, and

* tells Jupyter to wait long enough for a shutdown, and tells the kernel so;
* when a kernel has been killed, or has ended otherwise than well, returns from `kill` and `wait` only when its nursery, its children and
  what they had started are gone.

Who runs it: the event loop of the process that manages kernels (a Jupyter server, nbclient, …). What reads the process list or
waits runs on a thread of that loop's executor. It owns the kernel's process, as its base class does, and pidfds while it waits.

How each step can fail: the graces are not where they can be read from here, but in config files or typed into a
notebook (the kernel then warns that the wait is shorter than they are); a variable has a bad value (the kernel then
ignores them all, and so does this); the nursery does not get done within the graces (what is left is killed through
pidfds); something cannot be killed (its pid is logged, and Jupyter goes on); there are no pidfds or no ``/proc``
(nothing is found, and nothing is waited for).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from rlm_kernel.children import posix
from rlm_kernel.children.orphans import find_orphans
from rlm_kernel.errors import ConfigurationError
from rlm_kernel.session.config import JUPYTER_SHUTDOWN_WAIT_S, SHUTDOWN_WAIT_VARIABLE, Settings
from rlm_kernel.values import Graces
from rlm_kernel.wire.channel import close_fds

LAUNCH_VARIABLE = "RLM_KERNEL_LAUNCH"
"""Environment variable that marks one start of a kernel and, by inheritance, everything that comes from it."""

_MARGIN_S = 2.5
"""Seconds that a kernel may need for its shutdown besides the graces: to end the nursery, to leave its cell, and to exit."""

_NURSERY_MARGIN_S = 1.0
"""Seconds that a nursery may need besides the graces when its kernel was killed, on a busy machine."""

_KILL_S = 2.0
"""Seconds to wait for processes that were killed from here."""

_LOOKS = 5
"""Times to look for what is left: a process that was being forked during one look is found by the next."""


class RLMProvisioner(LocalProvisioner):
    """See the module's docstring."""

    _launch = ""
    _graces = Graces()

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Mark what is about to be started, and tell it how long a shutdown is waited for."""
        launch_arguments: dict[str, Any] = await super().pre_launch(**kwargs)
        environ = launch_arguments["env"]
        self._graces = graces_in(environ)
        self._launch = environ[LAUNCH_VARIABLE] = secrets.token_hex(8)
        configured = getattr(self.parent, "shutdown_wait_time", JUPYTER_SHUTDOWN_WAIT_S)
        environ[SHUTDOWN_WAIT_VARIABLE] = f"{os.getpid()}:{self.get_shutdown_wait_time(configured):g}"
        return launch_arguments

    def get_shutdown_wait_time(self, recommended: float = JUPYTER_SHUTDOWN_WAIT_S) -> float:
        """Return the seconds that a shutdown may take; half of them pass before Jupyter sends SIGTERM."""
        return max(super().get_shutdown_wait_time(recommended), 2 * (self._graces.total_s + _MARGIN_S))

    async def kill(self, restart: bool = False) -> None:
        """Kill the kernel, and return when nothing of it is left."""
        if self.process is None:
            return
        pid, pidfds = self.process.pid, {}
        if self.process.poll() is None and (pidfd := posix.open_pidfd(pid)) is not None:
            pidfds[pid] = pidfd
        # What is seen while it lives can be waited for to its very end: a process that is just ending shows no mark any more.
        pidfds |= await asyncio.to_thread(open_remains, self._launch, pid)
        try:
            await super().kill(restart=restart)
        finally:
            await self._wait_for_remains(pidfds)

    async def wait(self) -> int | None:
        """Wait for the kernel's exit, and, unless it has confirmed that nothing of it is left, for that."""
        code = await super().wait()
        if code:
            await self._wait_for_remains({})
        return code

    async def _wait_for_remains(self, pidfds: dict[int, int]) -> None:
        survivors = await asyncio.to_thread(wait_until_gone, self._launch, self._graces, pidfds)
        if survivors:
            self.log.error(
                "kernel %s has ended, but of what it had started these processes could not be killed: %s",
                self.kernel_id,
                ", ".join(map(str, survivors)),
            )

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what another process needs to go on managing this kernel."""
        return {**await super().get_provisioner_info(), "rlm_launch": self._launch, "rlm_graces": astuple(self._graces)}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over a kernel that another process has started."""
        await super().load_provisioner_info(provisioner_info)
        self._launch = provisioner_info["rlm_launch"]
        self._graces = Graces(*provisioner_info["rlm_graces"])


def graces_in(environ: Mapping[str, str]) -> Graces:
    """Return the graces that a kernel with this environment has, as far as no config file sets them."""
    try:
        return Settings(environ=environ).bounds().graces
    except ConfigurationError:
        return Graces()


def open_remains(launch: str, kernel_pid: int | None = None) -> dict[int, int]:
    """Open a pidfd of the nurseries of a kernel, of their children, and of what these have started.

    What belongs to another kernel that lives is left out. (Code in a kernel may have started a server with kernels of its own.)

    Args:
        launch: the value of `LAUNCH_VARIABLE` for that start of the kernel.
        kernel_pid: its pid, if it has not ended yet.

    Returns:
        the pidfds by pid; empty where there are none.
    """
    mark = f"{LAUNCH_VARIABLE}={launch}".encode()
    found = {}
    for orphan in find_orphans(() if kernel_pid is None else (kernel_pid,)):
        if not posix.environ_has(orphan.pid, mark):
            continue
        pidfd = posix.open_pidfd(orphan.pid)
        if pidfd is None:
            continue
        # Read once more: the number may have passed on to another process before the pidfd was opened.
        if posix.environ_has(orphan.pid, mark):
            found[orphan.pid] = pidfd
        else:
            close_fds([pidfd])
    return found


def wait_until_gone(launch: str, graces: Graces, pidfds: dict[int, int]) -> tuple[int, ...]:
    """Wait until nothing is left of a kernel that has ended or been killed. What is left after the graces is killed.

    Args:
        launch: the value of `LAUNCH_VARIABLE` for that start of the kernel.
        graces: what its nursery keeps to.
        pidfds: what is known already; they are closed.

    Returns:
        pids of processes that could not be confirmed gone.
    """
    patience_until = time.monotonic() + graces.total_s + _NURSERY_MARGIN_S
    give_up_at = patience_until + _KILL_S
    for _ in range(_LOOKS):
        try:
            left = _still_there(pidfds, pidfds, patience_until)
            for pid in left:
                posix.signal_pidfd(pidfds[pid], signal.SIGKILL)
            left = _still_there(left, pidfds, give_up_at)
        finally:
            close_fds(pidfds.values())
        if left:
            return left
        pidfds = open_remains(launch)
        if not pidfds:
            return ()
    close_fds(pidfds.values())
    return tuple(pidfds)


def _still_there(pids: Iterable[int], pidfds: Mapping[int, int], until: float) -> tuple[int, ...]:
    return tuple(pid for pid in pids if not posix.pidfd_has_exited(pidfds[pid], until - time.monotonic()))
