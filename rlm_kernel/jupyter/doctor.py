"""``rlm-kernel doctor``: look for processes that outlived their kernel, and say what this platform offers for containing them."""

from __future__ import annotations

import argparse
import os

from rlm_kernel.children import posix
from rlm_kernel.children.orphans import find_orphans, kill_orphans

_SWEEP_S = 5.0


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns 0 if nothing is left behind, else 1."""
    for line in platform_lines():
        print(line)
    if args.sweep:
        orphans, survivors = kill_orphans(_SWEEP_S)
        for orphan in orphans:
            print(f"{'NOT gone' if orphan.pid in survivors else 'killed'}: pid {orphan.pid}  {orphan.command}")
        print(
            "nothing was left behind" if not orphans else f"{len(orphans)} found, {len(orphans) - len(survivors)} gone"
        )
        return 1 if survivors else 0
    orphans = find_orphans()
    for orphan in orphans:
        print(f"left behind: pid {orphan.pid}  {orphan.command}")
    print("nothing is left behind" if not orphans else "`rlm-kernel doctor --sweep` kills what is left behind")
    return 1 if orphans else 0


def platform_lines() -> list[str]:
    """Say what the platform offers, one line each."""
    pidfd = posix.open_pidfd(os.getpid())
    if pidfd is not None:
        os.close(pidfd)
    facts = [
        ("process descriptors (pidfd)", pidfd is not None, "exits are confirmed by the nursery alone"),
        (
            "parent-death signal and subreaper",
            posix.IS_LINUX,
            "a killed nursery leaves its children to end by themselves",
        ),
        ("process list (/proc)", os.path.isdir("/proc/self"), "what daemonized itself away cannot be found"),
    ]
    return [f"{name}: {'yes' if there else f'no; {without}'}" for name, there, without in facts]
