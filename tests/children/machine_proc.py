"""What the operating system says about the processes of one root, for comparison with what a supervisor says."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from rlm_kernel.children import posix
from rlm_kernel.children.worker import MARKER_VARIABLE

TAG = "RLM_KERNEL_TESTS"
"""In the environment of everything that comes from this test run; `tests.conftest` sets it, and so does a soak."""


def mark_this_run() -> None:
    """Have everything that is exec'ed from here carry this process's tag."""
    os.environ[TAG] = str(os.getpid())


@dataclass(frozen=True, slots=True)
class Seen:
    """One process as ``/proc`` shows it."""

    pid: int
    parent: int
    state: str
    session: int | None

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def marked() -> dict[int, Seen]:
    """Return every living process that comes from a nursery of this root, the nurseries included.

    Zombies have no environment left, so they are not among them: see `children_of`.
    """
    tag = f"{TAG}={os.getpid()}".encode()
    found = {}
    for pid in posix.all_pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if tag in environ and any(entry.startswith(MARKER_VARIABLE.encode() + b"=") for entry in environ):
                seen = look(pid)
                if seen is not None and seen.alive:
                    found[pid] = seen
    return found


def is_nursery(seen: Seen) -> bool:
    """Tell whether a marked process is a nursery: nothing else of it is our own child. A nursery may outlive its children for a moment."""
    return seen.parent == os.getpid()


def look(pid: int) -> Seen | None:
    """Look at one process, None if it is gone."""
    seen = posix.parent_and_state(pid)
    return None if seen is None else Seen(pid, seen[0], seen[1], posix.session_of(pid))


def children_of(pid: int) -> set[int]:
    """Return the direct children of a process with one thread, zombies included; empty if it is gone."""
    with contextlib.suppress(OSError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()}
    return set()


def descends_from(seen: Seen, roots: set[int]) -> bool:
    """Tell whether a process is one of ``roots``, was started below one, or is in the session of one."""
    at: Seen | None = seen
    while at is not None and at.pid > 1:
        if at.pid in roots or at.session in roots:
            return True
        at = look(at.parent)
    return False


def open_fds(pid: int | None = None) -> dict[int, str]:
    """Return the open descriptors of a process with what they are; the one that this listing takes is not among them."""
    folder = f"/proc/{'self' if pid is None else pid}/fd"
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"{folder}/{name}")
    return found


def own_fds() -> dict[int, str]:
    """Return the open descriptors of this process that are no garbage."""
    gc.collect()
    return open_fds()


def dirty_bytes(pid: int) -> int:
    """Return the memory that a process has written to and shares with nobody, swap included.

    Clean private pages are left out: pages of a library are "private" exactly while no other process on the machine maps them.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith((b"Private_Dirty:", b"Swap:")))


def own_threads() -> list[str]:
    """Name the product's threads in this process."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("rlm-"))


def zombies_of_this_process() -> list[int]:
    """Return our own children that nobody has reaped."""
    return [pid for pid in posix.children_of_this_process() if (seen := look(pid)) is not None and not seen.alive]
