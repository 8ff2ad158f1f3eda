"""The stop button: what runs is interrupted, the children are gone before anything is acknowledged, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.families import PLAIN, STUBBORN, start_child, start_family
from tests.support.kernels import GONE_S, Cell, Processes
from tests.support.model_server import reply, script

BLOCKED = {
    "rlm_wait": "rlm_wait(hs, timeout_s=50)",
    "a model call": "llm_query('[[block]] root')",
    "a busy loop": "while True: pass",
    "await": "import asyncio\nawait asyncio.sleep(30)",
    "await of a handle": "await hs[0]",
    "a wait in a cell with await": "import asyncio\nawait asyncio.sleep(0)\nllm_query('[[block]] root')",
    "a busy loop in a cell with await": "import asyncio\nawait asyncio.sleep(0)\nwhile True: pass",
    "time.sleep": "import time\ntime.sleep(30)",
}
"""Cells that are under way when the button is pressed. ``hs`` are live children."""


@pytest.mark.parametrize("text", BLOCKED.values(), ids=BLOCKED.keys())
def test_no_child_is_left_when_interrupt_and_cell_are_acknowledged(kernel, server, fifo, text) -> None:
    family = start_family(kernel, server, fifo)
    kernel.ok("kept = {'a': 1}")
    cell = kernel.blocked(text)
    with family.watched() as processes:
        began = time.monotonic()
        request = kernel.ask("interrupt_request")
        left_at_cell = kernel.reply_at_once(cell, processes)
        content, left_at_reply = kernel.answer_at_once(request, processes)
        took = time.monotonic() - began
    assert left_at_cell == []
    assert left_at_reply == []
    assert content == {"status": "ok"}
    assert took < GONE_S
    kernel.finish(cell)
    allowed = ("KeyboardInterrupt", "CancelledError") if "await" in text else ("KeyboardInterrupt",)
    assert cell.reply["ename"] in allowed
    shown = "".join(cell.reply["traceback"])  # where in a client or its library the call was is nobody's interest
    assert not any(name in shown for name in ("httpx", "clients/base.py", "clients/specs.py"))
    assert "close:" in cell.stderr  # the one line that says which
    assert "stopped" in cell.stderr
    assert set(kernel.value("[str(h.status().state) for h in hs]")) == {"cancelled"}
    assert kernel.value("[h.status().exited for h in hs]") == [True, True, True]
    assert kernel.value("kept") == {"a": 1}
    assert kernel.value(f"rlm_query({script(reply('FINAL(again)'))!r})") == "again"


def test_an_interrupt_without_children_is_answered_at_once(kernel) -> None:
    cell = kernel.blocked("import time\ntime.sleep(30)")
    began = time.monotonic()
    assert kernel.interrupt() == {"status": "ok"}
    kernel.finish(cell)
    assert time.monotonic() - began < 1.0
    assert cell.reply["ename"] == "KeyboardInterrupt"


def test_a_second_interrupt_while_closing_skips_to_sigkill(kernel, fifo) -> None:
    kernel.ok("%rlm config shutdown_grace_s=2")
    pid = start_child(kernel, fifo, STUBBORN)
    cell = kernel.blocked("rlm_wait(h)")
    with Processes([pid]) as processes:
        began = time.monotonic()
        first, second = kernel.ask("interrupt_request"), kernel.ask("interrupt_request")
        _, left = kernel.answer_at_once(second, processes)
        took = time.monotonic() - began
        assert left == []
    assert kernel.answer(first) == {"status": "ok"}
    assert took < 1.0  # the graces alone would be 2.5 s
    assert kernel.finish(cell).status == "error"
    assert kernel.ok("1 + 1").text == "2"


def test_completed_results_survive_an_interrupt(kernel, fifo) -> None:
    kernel.ok(f"done = rlm_query({script(reply('FINAL(early)'))!r}, blocking=False); rlm_wait(done)")
    start_child(kernel, fifo, PLAIN)
    kernel.interrupt()
    assert kernel.value("done.result()") == "early"
    assert kernel.value("str(done.status().state)") == "completed"


def test_no_reply_is_lost_whenever_the_interrupt_comes(kernel) -> None:
    """Interrupts are sent without waiting for anything, at 40 different moments of a short cell."""
    replies = {"ok": 0, "error": 0}
    for moment in range(40):
        cell = kernel.send(f"sum(range({moment * 10_000}))")
        if moment % 4 == 1:
            kernel.until(lambda cell=cell: bool(cell.messages))
        elif moment % 4 == 2:
            kernel.until(lambda cell=cell: len(cell.messages) > 1)
        elif moment % 4 == 3:
            kernel.until(lambda cell=cell: bool(cell.reply))
        request = kernel.ask("interrupt_request")
        kernel.finish(cell)
        kernel.answer(request)
        replies[cell.status] += 1
        assert cell.status == "ok" or cell.reply["ename"] == "KeyboardInterrupt"
        assert kernel.run("'next'").text == "'next'"
    assert sum(replies.values()) == 40
    assert "caught in kernel" not in kernel.log
    assert "Traceback" not in kernel.log


def test_an_interrupt_wakes_a_sleeping_main_thread_each_time(kernel) -> None:
    """Of a signal to a process any thread may run the C handler; the main thread would then sleep on."""
    for _ in range(10):
        cell = kernel.blocked("import time\ntime.sleep(20)")
        kernel.interrupt()
        assert kernel.finish(cell, 2.0).reply["ename"] == "KeyboardInterrupt"


def test_a_cell_that_unwinds_more_slowly_than_the_children_end_says_which_were_stopped(kernel, fifo) -> None:
    start_child(kernel, fifo, PLAIN)
    unwinding = (
        "import time\ntry:\n    print('the code runs', flush=True)\n    time.sleep(30)\n"
        f"finally:\n    {fifo.write_code('1')}\n    open({fifo.path!r} + '-go').read()"
    )
    os.mkfifo(f"{fifo.path}-go")
    cell = kernel.begin(unwinding)
    kernel.until(lambda: "the code runs" in cell.stdout)
    assert kernel.interrupt() == {"status": "ok"}
    fifo.lines(1)
    assert not cell.reply
    with open(f"{fifo.path}-go", "w"):
        pass  # let it go on
    assert kernel.finish(cell).reply["ename"] == "KeyboardInterrupt"
    assert kernel.value("h.id") in cell.stderr


def test_a_queued_cell_is_aborted_and_one_sent_later_runs(kernel) -> None:
    first = kernel.blocked("import time\ntime.sleep(30)")
    queued = [kernel.send("ran = True") for _ in range(2)]
    kernel.interrupt()
    kernel.finish(first)
    assert first.reply["ename"] == "KeyboardInterrupt"
    assert [kernel.finish(cell).status for cell in queued] == ["aborted", "aborted"]
    assert kernel.value("'ran' in globals()") is False


def test_a_queued_cell_that_goes_on_regardless_is_not_hit_by_the_interrupt_of_the_first(kernel) -> None:
    first = kernel.begin("print('the code runs', flush=True)\nimport time\ntime.sleep(30)", stop_on_error=False)
    kernel.until(lambda: "the code runs" in first.stdout)
    queued = kernel.send("x = sum(range(1_000_000)); x")
    kernel.interrupt()
    assert kernel.finish(first).reply["ename"] == "KeyboardInterrupt"
    assert kernel.finish(queued).text == "499999500000"


def test_code_that_replaces_the_sigint_handler_does_not_make_later_cells_uninterruptible(kernel) -> None:
    kernel.ok("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    cell = kernel.blocked("import time\ntime.sleep(30)")
    kernel.interrupt()
    assert kernel.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"


def test_an_interrupted_cell_keeps_its_number_and_the_next_one_counts_on(kernel) -> None:
    cell = kernel.blocked("import time\ntime.sleep(30)")
    kernel.interrupt()
    number = kernel.finish(cell).reply["execution_count"]
    assert cell.messages[1]["content"]["execution_count"] == number
    assert kernel.ok("1").reply["execution_count"] == number + 1


def test_a_subprocess_of_the_cell_is_interrupted_with_it(kernel, fifo) -> None:
    cell = kernel.begin(f"!echo started; echo $$ > {fifo.path}; sleep 300")
    # IPython may lose a command that is interrupted while it is being started.
    kernel.until(lambda: "started" in cell.stdout)
    pid = int(fifo.lines(1)[0])
    with Processes([pid]) as processes:
        kernel.interrupt()
        kernel.finish(cell)
        assert processes.wait(5) == []


@pytest.mark.parametrize(
    "text",
    [
        "rlm_wait(h)",
        "llm_query('[[block]] single call')",
        "llm_query_batched(['[[block]] batch of calls', '[[block]] another'])",
    ],
)
def test_a_wait_in_a_subshell_ends_with_an_interrupt(start_kernel, server, fifo, text) -> None:
    kernel = start_kernel()
    pid = start_child(kernel, fifo, PLAIN)
    subshell = kernel.answer(kernel.ask("create_subshell_request"))["subshell_id"]
    message = kernel.client.session.msg("execute_request", {"code": f"{fifo.write_code('1')}\n{text}", "silent": False})
    message["header"]["subshell_id"] = subshell
    cell = kernel._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
    kernel.client.shell_channel.send(message)
    fifo.lines(1)
    if "rlm_wait" in text:
        kernel.ok("while not get_ipython().kernel.rlm.supervisor._root_waits: pass")
    else:
        # The server has served other tests before.
        wanted = text.split("'")[1]
        server.wait_for_request(lambda request: request.text.startswith(wanted))
    with Processes([pid]) as processes:
        _, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert left == []
    kernel.finish(cell, 2)
    assert cell.reply.get("ename") == "KeyboardInterrupt"


def test_sigint_from_outside_interrupts_the_cell_as_in_a_stock_kernel(kernel) -> None:
    cell = kernel.blocked("import time\ntime.sleep(30)")
    os.kill(kernel.pid, signal.SIGINT)
    assert kernel.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"
    os.kill(kernel.pid, signal.SIGINT)  # idle: nothing happens
    assert kernel.ok("1 + 1").text == "2"
