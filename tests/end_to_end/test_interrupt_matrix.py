"""Where an interrupt may find the kernel, besides the places in `test_interrupting`: it hits what it is meant for, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.families import PLAIN, start_child
from tests.support.kernels import Processes


def test_a_cell_in_input_is_interrupted_and_its_children_go(kernel, fifo) -> None:
    pid = start_child(kernel, fifo, PLAIN)
    cell = kernel.send("input('name? ')", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=10)["content"]["prompt"] == "name? "
    with Processes([pid]) as processes:
        content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert (content, left) == ({"status": "ok"}, [])
    assert kernel.finish(cell, 3).reply["ename"] == "KeyboardInterrupt"
    again = kernel.send("input('again? ')", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=10)["content"]["prompt"] == "again? "
    kernel.client.input("Ada")
    assert kernel.finish(again).text == "'Ada'"


def test_of_three_queued_cells_only_the_running_one_is_interrupted(kernel, fifo) -> None:
    """The queued ones are aborted, as Jupyter defines it, unless they were sent to run whatever happens before them."""
    start_child(kernel, fifo, PLAIN)
    first = kernel.begin("print('the code runs', flush=True)\nrlm_wait(h)", stop_on_error=False)
    kernel.until(lambda: "the code runs" in first.stdout)
    queued = [kernel.send(f"ran_{n} = sum(range(300_000)); {n}") for n in range(3)]
    assert kernel.interrupt() == {"status": "ok"}
    assert kernel.finish(first).reply["ename"] == "KeyboardInterrupt"
    assert [kernel.finish(cell).text for cell in queued] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "text", ["rlm_wait(h)", "await h", "import time\ntime.sleep(30)"], ids=["wait", "await", "sleep"]
)
def test_two_interrupts_in_a_row_each_stop_what_runs_then(kernel, fifo, text) -> None:
    for _ in range(2):
        pid = start_child(kernel, fifo, PLAIN)
        cell = kernel.blocked(text)
        with Processes([pid]) as processes:
            began = time.monotonic()
            content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
        assert (content, left) == ({"status": "ok"}, [])
        assert kernel.finish(cell, 3).reply["ename"] in ("KeyboardInterrupt", "CancelledError")
        assert time.monotonic() - began < 2.5
    assert kernel.ok("1 + 1").text == "2"


def test_interrupts_of_an_idle_kernel_hit_no_later_cell(kernel) -> None:
    requests = [kernel.ask("interrupt_request") for _ in range(3)]
    cell = kernel.send("sum(range(2_000_000))")
    assert [kernel.answer(request) for request in requests] == [{"status": "ok"}] * 3
    kernel.finish(cell)
    assert cell.status == "ok" or cell.reply["ename"] == "KeyboardInterrupt"  # it may have run by then
    for _ in range(3):
        kernel.interrupt()
        assert kernel.ok("import asyncio; await asyncio.sleep(0); sum(range(300_000))").text == "44999850000"


def test_a_handler_of_a_widget_is_interrupted_and_the_kernel_goes_on(kernel, fifo) -> None:
    pid = start_child(kernel, fifo, PLAIN)
    kernel.ok(
        "import time\n"
        "def target(comm, message):\n"
        f"    comm.on_msg(lambda m: ({fifo.write_code('1')}, time.sleep(30)))\n"
        "get_ipython().kernel.comm_manager.register_target('slow', target)"
    )
    kernel.ask("comm_open", {"comm_id": "c-slow", "target_name": "slow", "data": {}}, channel="shell")
    kernel.ask("comm_msg", {"comm_id": "c-slow", "data": {}}, channel="shell")
    fifo.lines(1)
    with Processes([pid]) as processes:
        began = time.monotonic()
        content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert (content, left) == ({"status": "ok"}, [])
    assert kernel.ok("1 + 1").text == "2"
    assert time.monotonic() - began < 3.0


def test_an_awaiting_cell_is_interrupted_promptly_and_its_own_tasks_live_on(kernel) -> None:
    kernel.ok("import asyncio; task = asyncio.ensure_future(asyncio.sleep(0.2, 'done'))")
    cell = kernel.blocked("await asyncio.Event().wait()")
    began = time.monotonic()
    assert kernel.interrupt() == {"status": "ok"}
    assert kernel.finish(cell, 2).reply["ename"] in ("KeyboardInterrupt", asyncio.CancelledError.__name__)
    assert time.monotonic() - began < 1.0
    assert kernel.ok("await task").text == "'done'"


def test_a_cell_that_catches_the_interrupt_goes_on(kernel) -> None:
    inside = "    print('the code runs', flush=True)\n    time.sleep(30)"
    cell = kernel.begin(f"import time\ntry:\n{inside}\nexcept KeyboardInterrupt:\n    caught = True\ncaught")
    kernel.until(lambda: "the code runs" in cell.stdout)
    assert kernel.interrupt() == {"status": "ok"}
    assert kernel.finish(cell, 3).text == "True"


@pytest.mark.parametrize("how", ["1 / 0", "raise KeyboardInterrupt"])
def test_what_goes_wrong_while_a_value_is_shown_is_not_blamed_on_a_later_cell(kernel, how) -> None:
    assert kernel.run(f"class Shown:\n    def __repr__(self): {how}\nShown()").status == "error"
    assert kernel.ok("import asyncio; await asyncio.sleep(0); 7").text == "7"
