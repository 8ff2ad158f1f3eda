"""Every lifecycle event, while one child of each kind that is hard to stop is alive.

The kinds (`tests.support.families.start_kinds`): blocked in a model call, ignoring signals, a parent that waits for its own child, and
one with a process that has daemonized itself away, and another that has not. After each event none of the seven processes is left; where
the kernel lives to reply, none was left at the moment at which the reply came.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import plain_client
from tests.support.families import Kinds, start_kinds
from tests.support.kernels import Fifo, Kernel, Processes, marked
from tests.support.model_server import ModelServer, reply

KILLED_S = 3.5
"""Seconds within which nothing is left after the kernel or the nursery was killed."""

SETTINGS = {
    "RLM_MAX_DEPTH": "3",
    "RLM_SHUTDOWN_GRACE_S": "0.2",
    "RLM_TERMINATE_GRACE_S": "0.1",
}
"""Short graces: how long each is, is tested elsewhere."""


def settled(server: ModelServer) -> dict[str, Any]:
    return {**SETTINGS, **plain_client.variables(server)}


@pytest.fixture(scope="module")
def lasting(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel for the events that it survives."""
    with Kernel(tmp_path_factory.mktemp("lasting"), **settled(module_server)) as kernel:
        # Its nursery is not to look like a leak of the first test.
        kernel.ok(f"assert rlm_query({reply('FINAL(1)')!r}) == '1'")
        kernel.ok("%rlm reset")
        yield kernel


# -- events that the kernel survives. Each returns the processes that were left at the moment of its reply.


def interrupt_a_wait(kernel: Kernel, processes: Processes) -> list[int]:
    cell = kernel.blocked("rlm_wait(hs, timeout_s=50)")
    request = kernel.ask("interrupt_request")
    left = kernel.reply_at_once(cell, processes)
    content, left_later = kernel.answer_at_once(request, processes)
    assert content == {"status": "ok"}
    assert kernel.finish(cell).reply["ename"] == "KeyboardInterrupt"
    return left + left_later


def interrupt_when_idle(kernel: Kernel, processes: Processes) -> list[int]:
    content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert content == {"status": "ok"}
    return left


def run_a_cell(text: str) -> Callable[[Kernel, Processes], list[int]]:
    def event(kernel: Kernel, processes: Processes) -> list[int]:
        cell = kernel.send(text)
        left = kernel.reply_at_once(cell, processes)
        assert kernel.finish(cell).status == "ok"
        return left

    return event


def kill_the_nursery(kernel: Kernel, processes: Processes) -> list[int]:
    os.kill(kernel.value("get_ipython().kernel.rlm.supervisor.nursery_pid"), signal.SIGKILL)
    cell = kernel.send("statuses = rlm_wait(hs)")
    # A status says that its child's exit is confirmed, which is what the wait waited for.
    left = kernel.reply_at_once(cell, processes)
    kernel.finish(cell)
    assert kernel.value("[(str(s.state), s.exited) for s in statuses]") == [("failed", True)] * 4
    return left


SURVIVED = {
    "interrupt_request while a cell waits": (interrupt_a_wait, "cancelled"),
    "interrupt_request while idle": (interrupt_when_idle, "cancelled"),
    "%rlm close": (run_a_cell("%rlm close"), "cancelled"),
    "%rlm reset": (run_a_cell("%rlm reset"), None),
    "FINAL": (run_a_cell("FINAL(0)"), "cancelled"),
    "answer is ready": (run_a_cell("answer['content'] = 'done'; answer['ready'] = True"), "cancelled"),
    "SIGKILL of the nursery": (kill_the_nursery, "failed"),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_nothing_is_left_at_the_reply_to_an_event_that_the_kernel_survives(
    lasting: Kernel, server: ModelServer, fifo: Fifo, name: str
) -> None:
    event, state = SURVIVED[name]
    kinds = start_kinds(lasting, server, fifo)
    with kinds.watched() as processes:
        assert len(processes.left) == 7
        left = event(lasting, processes)
        assert left == []
    if state is not None:
        assert lasting.value("[(str(s.state), s.exited) for s in rlm_status()][-5:]") == [(state, True)] * 5
    assert lasting.processes <= set(lasting.value("[get_ipython().kernel.rlm.supervisor.nursery_pid]"))
    lasting.ok("%rlm reset")
    assert lasting.value("rlm_status()") == []
    assert lasting.value(f"rlm_query({reply('FINAL(again)')!r})") == "again"


# -- events that end the kernel. Each returns the processes that were left at the last moment at which it could say something.


def shut_down(*, restart: bool) -> Callable[[Kernel, Processes, Kinds], list[int]]:
    def event(kernel: Kernel, processes: Processes, _kinds: Kinds) -> list[int]:
        request = kernel.ask("shutdown_request", {"restart": restart})
        content, left = kernel.answer_at_once(request, processes)
        assert content == {"status": "ok", "restart": restart}
        return left

    return event


def send(signum: int) -> Callable[[Kernel, Processes, Kinds], list[int]]:
    def event(kernel: Kernel, processes: Processes, _kinds: Kinds) -> list[int]:
        kernel.blocked("rlm_wait(hs, timeout_s=50)")
        os.kill(kernel.pid, signum)
        kernel.wait_exit(KILLED_S)
        return processes.left  # confirmed before the process ends

    return event


def kill_the_kernel(kernel: Kernel, processes: Processes, _kinds: Kinds) -> list[int]:
    kernel.blocked("rlm_wait(hs, timeout_s=50)")
    os.kill(kernel.pid, signal.SIGKILL)
    return processes.wait(KILLED_S)


def crash(kernel: Kernel, processes: Processes, _kinds: Kinds) -> list[int]:
    kernel.send("import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.abort()")
    return processes.wait(KILLED_S)


def type_exit(kernel: Kernel, processes: Processes, _kinds: Kinds) -> list[int]:
    kernel.send("exit")
    kernel.wait_exit(KILLED_S)
    return processes.left


ENDED = {
    "shutdown_request": (shut_down(restart=False), 0),
    "restart": (shut_down(restart=True), 0),
    "SIGTERM": (send(signal.SIGTERM), 143),
    "SIGHUP": (send(signal.SIGHUP), 129),
    "SIGKILL": (kill_the_kernel, -signal.SIGKILL),
    "crash": (crash, -signal.SIGABRT),
    "exit": (type_exit, 0),
}


@pytest.mark.parametrize("name", ENDED)
def test_nothing_is_left_after_an_event_that_ends_the_kernel(
    start_kernel, server: ModelServer, fifo: Fifo, name: str
) -> None:
    event, code = ENDED[name]
    kernel = start_kernel(**SETTINGS)
    kinds = start_kinds(kernel, server, fifo)
    with kinds.watched(kinds.nursery) as processes:
        assert event(kernel, processes, kinds) == []
    assert kernel.wait_exit(KILLED_S) == code
    assert marked(kernel.mark) == set()
    if code >= 0:
        assert "Traceback" not in kernel.log
        (run_file,) = (kernel.home / "runs").rglob("run.json")
        recorded = json.loads(run_file.read_text("utf-8"))
        assert recorded["ended"] is True
        assert [child["exited"] for child in recorded["children"]] == [True] * 5


@pytest.mark.alone
def test_children_die_with_kernel_and_nursery_and_the_next_kernel_sweeps_what_they_had_detached(
    start_kernel, server: ModelServer, fifo: Fifo, tmp_path: Path
) -> None:
    kernel = start_kernel(**SETTINGS)
    kinds = start_kinds(kernel, server, fifo)
    both = (kernel.pid, kinds.nursery)
    detached = Processes([kinds.daemon, kinds.subprocess])
    with Processes([*kinds.children, *both]) as processes, detached:
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # neither is to live long enough to see the other die
            for pid in both:
                os.kill(pid, signum)
        assert processes.wait(KILLED_S) == []
        with Kernel(tmp_path / "next") as following:
            assert detached.wait(KILLED_S) == []
            assert following.value("1 + 1") == 2
    assert kernel.wait_exit() == -signal.SIGKILL


# -- process groups

IN_A_GROUP = (
    "import os, subprocess, sys\n"
    "os.environ.pop('JPY_PARENT_PID', None)\n"  # the kernel's parent is this program
    "bystander = subprocess.Popen(['sleep', '300'])\n"
    "print(bystander.pid, file=open(sys.argv[1], 'w'))\n"
    "sys.exit(subprocess.call(sys.argv[2:]))\n"
)
"""Starts a kernel in this program's own process group, beside a bystander."""

TRACE = """
import os, sys
_traced = open({path!r}, 'w', buffering=1)
def _trace(event, arguments):
    if event in ('os.kill', 'os.killpg'):
        print(event, *arguments, file=_traced)
sys.addaudithook(_trace)
"""


def test_a_kernel_that_does_not_lead_its_process_group_signals_nobody_else_in_it(
    server: ModelServer, fifo: Fifo, tmp_path: Path
) -> None:
    """At an interrupt, a FINAL, the nursery's death and a shutdown, in a group that belongs to somebody else."""
    kernel = Kernel(tmp_path / "kernel", **settled(server))
    spec = kernel.manager.kernel_spec
    assert spec is not None
    spec.argv = [sys.executable, "-c", IN_A_GROUP, fifo.path, *spec.argv]
    trace = tmp_path / "trace"
    with kernel:
        bystander, leader = int(fifo.lines(1)[0]), kernel.pid
        pid = kernel.value("__import__('os').getpid()")
        assert os.getpgid(pid) == os.getpgid(bystander) == leader != pid
        kernel.ok(TRACE.format(path=str(trace)))
        with Processes([bystander, leader]) as others:
            for event in (interrupt_a_wait, run_a_cell("FINAL(0)"), kill_the_nursery):
                kinds = start_kinds(kernel, server, fifo)
                with kinds.watched() as processes:
                    assert event(kernel, processes) == []
                kernel.ok("%rlm reset")
            assert others.left == [bystander, leader]
            kernel.ok("hs = [rlm_query('[[block]]', blocking=False)]")
            assert kernel.answer(kernel.ask("shutdown_request", {"restart": False}))["status"] == "ok"
            assert kernel.wait_exit(KILLED_S) == 0
            assert others.left == [bystander]
    signalled = [line.split() for line in trace.read_text().splitlines()]
    assert [line for line in signalled if line[0] == "os.killpg" or int(line[1]) in (0, -1, -leader)] == []
