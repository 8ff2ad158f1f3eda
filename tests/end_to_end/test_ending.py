"""Every way in which a kernel ends: nothing of it is left when that is acknowledged, or shortly after it was killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.families import PLAIN, start_child, start_family
from tests.support.kernels import GONE_S, Processes, marked

KILLED_S = 3.5
"""Seconds within which nothing is left after the kernel was killed or told to end by a signal."""

BLOCKED = {
    "code that ignores interrupts": "while True:\n    try:\n        import time; time.sleep(60)\n    except BaseException: pass",
    "await": "import asyncio\nawait asyncio.sleep(30)",
}


@pytest.mark.parametrize(
    ("text", "restart"),
    [(text, number % 2 == 0) for number, text in enumerate(BLOCKED.values())],
    ids=[f"{name}-{'restart' if n % 2 == 0 else 'shutdown'}" for n, name in enumerate(BLOCKED)],
)
def test_no_child_is_left_when_a_shutdown_is_acknowledged(start_kernel, server, fifo, text, restart) -> None:
    kernel = start_kernel()
    family = start_family(kernel, server, fifo)
    kernel.blocked(text)
    with family.watched(family.nursery) as processes:
        began = time.monotonic()
        content, left = kernel.answer_at_once(kernel.ask("shutdown_request", {"restart": restart}), processes)
        took = time.monotonic() - began
    assert left == []
    assert content == {"status": "ok", "restart": restart}
    assert took < GONE_S
    assert kernel.wait_exit(3.0) == 0
    assert marked(kernel.mark) == set()
    assert "Traceback" not in kernel.log


def test_two_shutdown_requests_back_to_back_are_both_answered(start_kernel, server, fifo) -> None:
    kernel = start_kernel()
    family = start_family(kernel, server, fifo)
    with family.watched() as processes:
        first = kernel.ask("shutdown_request", {"restart": True})
        second = kernel.ask("shutdown_request", {"restart": False})
        content, left = kernel.answer_at_once(first, processes)
        assert left == []
    assert content == {"status": "ok", "restart": True}
    assert kernel.answer(second) == {"status": "ok", "restart": False}
    assert kernel.wait_exit(3.0) == 0
    assert "Traceback" not in kernel.log


def test_a_shutdown_right_after_an_interrupt_does_not_run_the_graces_twice(start_kernel, server, fifo) -> None:
    """As jupyter_client does it."""
    kernel = start_kernel()
    family = start_family(kernel, server, fifo)
    kernel.blocked("rlm_wait(hs)")
    with family.watched() as processes:
        began = time.monotonic()
        interrupt, shutdown = kernel.ask("interrupt_request"), kernel.ask("shutdown_request", {"restart": False})
        _, left = kernel.answer_at_once(shutdown, processes)
    assert left == []
    assert time.monotonic() - began < GONE_S
    assert kernel.answer(interrupt) == {"status": "ok"}
    assert kernel.wait_exit(3.0) == 0


def test_a_restarted_kernel_has_its_helpers_and_nothing_of_the_life_before(start_kernel, server, fifo) -> None:
    kernel = start_kernel()
    family = start_family(kernel, server, fifo)
    episode = kernel.value("hs[0].episode_id")
    with family.watched(family.nursery, kernel.pid) as processes:
        kernel.manager.restart_kernel(now=False)
        assert processes.left == []
    kernel.reconnect()
    assert kernel.value("[callable(f) for f in (rlm_query, llm_query, FINAL, rlm_wait)]") == [True] * 4
    assert kernel.value("rlm_status()") == []
    assert kernel.value("'hs' in globals()") is False
    assert kernel.run("rlm_status('c1')").error.startswith("UnknownHandleError")
    assert episode not in kernel.ok("%rlm").text
    assert "1 live" not in kernel.ok("%rlm").text

    # A restart that does not ask.
    family = start_family(kernel, server, fifo)
    with family.watched(family.nursery, kernel.pid) as processes:
        kernel.manager.restart_kernel(now=True)
        assert processes.wait(KILLED_S) == []
    kernel.reconnect()
    assert kernel.ok("1 + 1").text == "2"


def test_sigterm_ends_a_kernel_that_is_busy(start_kernel, fifo) -> None:
    kernel = start_kernel()
    pid = start_child(kernel, fifo, PLAIN)
    kernel.blocked("while True: pass")
    with Processes([pid]) as processes:
        os.kill(kernel.pid, signal.SIGTERM)
        assert kernel.wait_exit(KILLED_S) == 143
        assert processes.left == []


FORKED = """
import os, time
if os.fork() == 0:
    try:
        rlm_query('x', blocking=False)
    except BaseException as error:
        name = type(error).__name__
    try:
        rlm_wait(h)
    except BaseException as error:
        name += ' ' + type(error).__name__
    {report}
    time.sleep(300)
    os._exit(0)
"""


def test_a_process_that_user_code_forked_keeps_no_child_alive_and_cannot_use_the_helpers(start_kernel, fifo) -> None:
    kernel = start_kernel()
    pid = start_child(kernel, fifo, PLAIN)
    nursery = kernel.value("get_ipython().kernel.rlm.supervisor.nursery_pid")
    kernel.ok(FORKED.format(report=fifo.write_code("f'{name} {os.getpid()}'")))
    first, second, forked = fifo.lines(1)[0].split()
    assert (first, second) == ("ForkedProcessError", "ForkedProcessError")
    with Processes([pid, nursery]) as processes, Processes([int(forked)]) as copy:
        os.kill(kernel.pid, signal.SIGKILL)
        assert processes.wait(KILLED_S) == []
        assert copy.left == [int(forked)]  # it holds copies of the kernel's descriptors all the while
        os.kill(int(forked), signal.SIGKILL)


TERMINATED_COPY = """
import multiprocessing, time
process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,))
process.start()
process.{how}()
process.join()
process.exitcode
"""


def test_ending_a_process_that_user_code_forked_does_not_end_the_kernel(start_kernel, fifo) -> None:
    kernel = start_kernel()
    pid = start_child(kernel, fifo, PLAIN)
    with Processes([pid, kernel.pid]) as processes:
        assert kernel.ok(TERMINATED_COPY.format(how="terminate")).text == "-15"
        assert kernel.ok(TERMINATED_COPY.format(how="kill")).text == "-9"
        assert kernel.value("str(h.status().state)") == "running"
        assert processes.wait(0.5) == [pid, kernel.pid]


def test_a_shutdown_with_survivors_names_them_in_its_reply_and_exits_with_1(start_kernel) -> None:
    kernel = start_kernel()
    kernel.ok(
        "from rlm_kernel.values import CleanupReport\n"
        "get_ipython().kernel.rlm.supervisor.stop = lambda verb, graces, refs=None: CleanupReport(verb, survivors=(4194000,))"
    )
    content = kernel.answer(kernel.ask("shutdown_request", {"restart": False}))
    assert content["status"] == "error"
    assert content["restart"] is False
    assert content["ename"] == "ChildCleanupError"
    assert content["survivors"] == [4194000]
    assert kernel.wait_exit(4.0) == 1
    assert "4194000" in kernel.log


def test_a_shutdown_whose_stop_raises_is_answered_and_ends_all_the_same(start_kernel) -> None:
    kernel = start_kernel()
    kernel.ok("def broken(*args): raise OSError('broken')\nget_ipython().kernel.rlm.supervisor.stop = broken")
    content = kernel.answer(kernel.ask("shutdown_request", {"restart": False}))
    assert content["status"] == "error"
    assert "broken" in content["evalue"]
    assert kernel.wait_exit(4.0) == 1


def test_a_shutdown_request_leaves_the_final_answer_on_disk(start_kernel, fifo) -> None:
    kernel = start_kernel()
    start_child(kernel, fifo, PLAIN)
    kernel.ok("FINAL('kept')")
    kernel.answer(kernel.ask("shutdown_request", {"restart": False}))
    kernel.wait_exit(4.0)
    (run_file,) = (kernel.home / "runs").rglob("run.json")
    import json

    recorded = json.loads(run_file.read_text())
    assert recorded["final_answer"] == "kept"
    assert recorded["ended"] is True
    assert [child["exited"] for child in recorded["children"]] == [True]
