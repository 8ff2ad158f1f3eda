"""Find and kill what outlived its kernel and its nursery both: processes that a child's code had started.

Everything below a nursery carries its marker in the environment. A marked process is an orphan if no living nursery has that marker. A
nursery counts as living while its parent is the kernel that its command line names; one whose kernel is gone is ending anyway.

Who runs it: a daemon thread of a kernel that starts, and ``rlm-kernel doctor``. Only processes of the same user can be seen and signalled,
and only through pidfds, which are opened before the marker is read for the second time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rlm_kernel.children import posix, sweep
from rlm_kernel.children.worker import MARKER_VARIABLE

_NURSERY_MODULE = b"rlm_kernel.children.nursery"


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process without a living nursery."""

    pid: int
    marker: str
    command: str


def find_orphans(ending: Collection[int] = ()) -> list[Orphan]:
    """Return the marked processes that no living nursery answers for. Empty where there is no ``/proc``.

    Args:
        ending: pids of kernels whose nurseries count as gone already.
    """
    marked: dict[int, str] = {}
    living: set[str] = set()
    for pid in posix.all_pids():
        value = posix.environ_value(pid, MARKER_VARIABLE)
        if value is None or pid == os.getpid():
            continue
        marked[pid] = value
        if _is_living_nursery(pid, ending):
            living.add(value)
    own = os.environ.get(MARKER_VARIABLE)
    return [
        Orphan(pid, value, _command(pid))
        for pid, value in sorted(marked.items())
        if value not in living and value != own
    ]


def kill_orphans(timeout_s: float) -> tuple[list[Orphan], tuple[int, ...]]:
    """Kill all orphans, and wait until they are gone.

    Returns:
        what was found, and the pids that could not be confirmed gone within ``timeout_s`` seconds.
    """
    give_up_at = time.monotonic() + timeout_s
    orphans = find_orphans()
    if orphans:
        # The list of processes is not of one moment: a nursery may have come after its place in it was read, and its child before.
        again = {orphan.marker for orphan in find_orphans()}
        orphans = [orphan for orphan in orphans if orphan.marker in again]
    survivors: tuple[int, ...] = ()
    for marker in sorted({orphan.marker for orphan in orphans}):
        survivors += sweep.kill_marked(f"{MARKER_VARIABLE}={marker}", give_up_at)
    return orphans, survivors


def _is_living_nursery(pid: int, ending: Collection[int]) -> bool:
    arguments = _arguments(pid)
    if len(arguments) < 2 or _NURSERY_MODULE not in arguments[-2]:
        return False
    try:
        kernel_pid = json.loads(arguments[-1])["kernel_pid"]
    except (ValueError, KeyError, TypeError):
        return False
    seen = posix.parent_and_state(pid)
    return seen is not None and seen[0] == kernel_pid and kernel_pid not in ending


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    return " ".join(part.decode("utf-8", "replace") for part in _arguments(pid))[:120]
