"""Root processes that tests kill: ``python -m tests.children.roots NAME``. They tell on stdout, one JSON line each, what tests need."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

from rlm_kernel.children.supervisor import Supervisor
from tests.children.helpers import Reports, finish, limits, nursery_of, refs, spec


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def pause() -> NoReturn:
    while True:
        signal.pause()


def with_children(supervisor: Supervisor) -> dict[str, int]:
    """Start one child of each kind that is hard to end; return everybody's pid."""
    supervisor.configure(limits())
    with Reports() as reports:
        supervisor.start([spec("stubborn", reports), spec("daemonize", reports, then="pause")])
        supervisor.start([spec("parent", reports, children=[{"do": "stubborn"}])])
        told = reports.take(4)
        pids = {"nursery": nursery_of(supervisor)}
        for number, report in enumerate(told):
            pids[f"child{number}"] = report["pid"]
            if "daemon" in report:
                pids["daemon"] = report["daemon"]
    return pids


def run_plain() -> None:
    tell(**with_children(Supervisor()))
    pause()


def run_with_a_forked_copy() -> None:
    """Code of the user's forks a copy that holds every socket of ours, and outlives us."""
    supervisor = Supervisor()
    pids = with_children(supervisor)
    copy = os.fork()
    if copy == 0:
        pause()
    tell(copy=copy, **pids)
    pause()


def run_that_ends_without_closing() -> None:
    tell(**with_children(Supervisor()))


def run_without_descriptors() -> None:
    """Spawns fail readably when none is free, and work again afterwards."""
    supervisor = Supervisor()
    supervisor.configure(limits())
    finish(supervisor, spec("echo"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, hard))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    poor = finish(supervisor, spec("echo"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in held:
        os.close(fd)
    rich = finish(supervisor, spec("echo"))
    tell(poor=[poor[0].state, poor[0].error, poor[0].exited], rich=rich[0].state, closed=supervisor.close())


def run_with_sigint_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor = Supervisor()
    supervisor.configure(limits())
    with Reports() as reports:
        children = supervisor.start([spec("clean_up_when_asked", reports)])
        reports.next()
        report = supervisor.stop("close", limits().graces)
        cleaned = reports.next()["cleaned"]
    code = supervisor.status(refs(children))[0].exit_code
    supervisor.close()
    tell(cleaned=cleaned, killed=report.killed, code=code)


if __name__ == "__main__":
    globals()["run_" + sys.argv[1]]()
