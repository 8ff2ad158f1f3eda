"""``%load_ext rlm_kernel`` in a stock ipykernel: the same helpers and the same lifecycle, and nothing of it left when it is unloaded.

Front ends interrupt a stock kernel by SIGINT, as `interrupt` does here, and ask for a shutdown as they ask us.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import plain_client
from tests.support.families import PLAIN, STUBBORN, SURVIVOR, start_child, start_family
from tests.support.kernels import GONE_S, STOCK, Cell, Kernel, Processes, marked
from tests.support.model_server import ModelServer, code, reply, script

SLEEPS = "import time\nwhile True: time.sleep(0.05)"
"""Code that sleeps, in short pieces: Python notices a signal that comes just before a system call only when that call returns, and a signal
that is pressed is sent once."""

TO_COMPARE = """
import signal, threading
_kernel = get_ipython().kernel
def _surroundings():
    fd = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(fd)
    calls = [_kernel.control_stream._recv_callback, *_kernel.control_handlers.values(), *_kernel.shell_handlers.values()]
    return [
        [getattr(call, "__qualname__", "") for call in calls],
        sorted(set(vars(_kernel)) - {"_save_getpass", "saved_sigint_handler"}),
        [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        [thread.name for thread in threading.enumerate() if thread.name.startswith("rlm-")],
        fd, sorted(name for name in get_ipython().user_ns_hidden if not name.startswith("_")),
        sorted(get_ipython().magics_manager.magics["line"]), sorted(get_ipython().magics_manager.magics["cell"]),
        [matcher.__qualname__ for matcher in get_ipython().Completer.custom_matchers],
    ]
"""


@pytest.fixture(scope="module")
def shared_stock(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("stock")
    with Kernel(home, spec=STOCK, RLM_MODEL="openai/test", **module_server.environment) as running:
        running.ok(TO_COMPARE)
        running.ok("before = _surroundings()")
        running.ok("%load_ext rlm_kernel")
        running.ok(f"assert rlm_query({script(reply('FINAL(1)'))!r}) == '1'")
        running.ok("%rlm config shutdown_grace_s=0.1\n%rlm config terminate_grace_s=0.1")
        running.run("1 / 0")  # the first traceback loads a lot, which is not to count as time that a stop takes
        yield running


@pytest.fixture
def stock(shared_stock: Kernel, server: ModelServer) -> Iterator[Kernel]:
    """The module's stock kernel with the extension loaded, in a fresh episode."""
    yield shared_stock
    assert "new episode" in shared_stock.ok("%rlm reset").stdout


@pytest.fixture
def start_stock(server: ModelServer, tmp_path: Path) -> Iterator[Kernel]:
    """A stock kernel of the test's own with the extension loaded."""
    with ExitStack() as stack:
        running = stack.enter_context(Kernel(tmp_path / "kernel", spec=STOCK, **plain_client.variables(server)))
        running.ok("%load_ext rlm")
        running.run(
            "1 / 0"
        )  # as above: a reply that is made when the kernel has closed its sockets is logged as an error
        yield running


def press_stop(kernel: Kernel) -> None:
    """Interrupt as front ends do it with a stock kernel."""
    os.killpg(kernel.pid, signal.SIGINT)


@pytest.mark.parametrize(
    "text",
    [
        SLEEPS,
        "rlm_wait(hs, timeout_s=50)",
        "import asyncio\nawait asyncio.sleep(30)",
        "await hs[0]",
    ],
    ids=["time.sleep", "rlm_wait", "await", "await of a handle"],
)
def test_a_cell_that_ends_in_an_interrupt_has_stopped_the_children_before_its_reply(stock, server, fifo, text) -> None:
    family = start_family(stock, server, fifo)
    cell = stock.blocked(text)
    with family.watched() as processes:
        began = time.monotonic()
        press_stop(stock)
        left = stock.reply_at_once(cell, processes)
        took = time.monotonic() - began
    assert left == []
    assert took < GONE_S
    assert stock.finish(cell).reply["ename"] in ("KeyboardInterrupt", "CancelledError")
    assert "close:" in cell.stderr
    assert set(stock.value("[str(h.status().state) for h in hs]")) == {"cancelled"}
    assert stock.value(f"rlm_query({script(reply('FINAL(again)'))!r})") == "again"


def test_a_second_interrupt_while_closing_skips_to_sigkill(stock, fifo) -> None:
    stock.ok("%rlm config shutdown_grace_s=3")
    pid = start_child(stock, fifo, STUBBORN)
    cell = stock.blocked(SLEEPS)
    with Processes([pid]) as processes:
        press_stop(stock)
        stock.until(lambda: any(m["msg_type"] == "error" for m in cell.messages))
        began = time.monotonic()
        while not cell.reply and time.monotonic() - began < 2:  # one may come before the close has begun
            press_stop(stock)
            stock._take(0.25)
        assert cell.reply
        assert processes.left == []
    stock.finish(cell)
    stock.ok("%rlm config shutdown_grace_s=0.1")


def test_an_idle_interrupt_does_nothing(stock, fifo) -> None:
    pid = start_child(stock, fifo, PLAIN)
    with Processes([pid]) as processes:
        press_stop(stock)
        assert stock.ok("6 * 7").text == "42"
        assert processes.left == [pid]


def test_an_interrupt_request_is_served_as_in_our_own_kernel(stock, server, fifo) -> None:
    family = start_family(stock, server, fifo)
    cell = stock.blocked("rlm_wait(hs, timeout_s=50)")
    with family.watched() as processes:
        request = stock.ask("interrupt_request")
        left_at_cell = stock.reply_at_once(cell, processes)
        content, left_at_reply = stock.answer_at_once(request, processes)
    assert (left_at_cell, left_at_reply, content) == ([], [], {"status": "ok"})
    assert stock.finish(cell).reply["ename"] == "KeyboardInterrupt"


def test_a_cell_that_finalizes_has_stopped_the_children_and_shows_it_to_a_harness(stock, fifo) -> None:
    pid = start_child(stock, fifo, PLAIN)
    with Processes([pid]) as processes:
        cell = stock.send("FINAL('done')", user_expressions={"obs": "__rlm__.observation()"})
        assert stock.reply_at_once(cell, processes) == []
    stock.finish(cell)
    shown = cell.reply["user_expressions"]["obs"]["data"]["application/json"]
    assert (shown["done"], shown["final_answer"], shown["children"]["live"]) == (True, "done", 0)
    assert stock.run("rlm_query('x', blocking=False)").error.startswith("EpisodeFinalized")


def test_a_failed_cleanup_is_the_cells_error_and_blocks_until_it_is_confirmed(stock) -> None:
    assert stock.run(f"{SURVIVOR}\nFINAL(1)").reply["ename"] == "ChildCleanupError"
    assert stock.run("x = 2").reply["ename"] == "ChildCleanupError"
    stock.ok("%rlm cleanup")
    assert stock.ok("'runs'").text == "'runs'"


def test_unloading_stops_the_children_and_leaves_a_stock_kernel(stock, server, fifo) -> None:
    """Also: the cell that unloads is interruptible to its end, the next one is as in any stock kernel, and loading works again."""
    family = start_family(stock, server, fifo)
    with family.watched(family.nursery) as processes:
        cell = stock.blocked("%unload_ext rlm_kernel\nprint('unloaded', flush=True)\n" + SLEEPS)
        stock.until(lambda: "unloaded" in cell.stdout)
        assert processes.left == []
        press_stop(stock)
        assert stock.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"
    differences = "[pair for pair in zip(before, _surroundings()) if pair[0] != pair[1]]"
    assert stock.value(differences) == []
    assert stock.value("'rlm_query' in globals() or 'answer' in globals() or '__rlm__' in globals()") is False
    press_stop(stock)  # idle: it must not end the kernel
    cell = stock.blocked(SLEEPS)
    press_stop(stock)
    assert stock.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"
    assert "not found" in stock.run("%rlm").error
    stock.ok("%load_ext rlm_kernel")
    assert stock.value(f"rlm_query({script(reply('FINAL(again)'))!r})") == "again"


def test_loading_again_and_reloading_are_safe_in_sync_and_async_cells(stock) -> None:
    assert "already loaded" in stock.ok("%load_ext rlm_kernel").stdout
    assert stock.ok("%load_ext rlm").stdout == "The RLM extension is loaded already.\n"
    stock.ok("%reload_ext rlm_kernel")
    stock.ok("import asyncio\nawait asyncio.sleep(0)\n%reload_ext rlm_kernel\nawait asyncio.sleep(0)")
    press_stop(stock)  # idle: what the kernel itself puts back at the end of such a cell would raise in its event loop
    cell = stock.blocked("import asyncio\nawait asyncio.sleep(30)")
    press_stop(stock)
    assert stock.finish(cell, 5).status == "error"
    assert stock.value("sum(thread.name == 'rlm-signals' for thread in threading.enumerate())") == 1


def test_the_cell_that_loads_us_ends_as_later_ones_do(stock, fifo) -> None:
    stock.ok("%unload_ext rlm_kernel")
    stock.ok("%load_ext rlm_kernel\nFINAL(5)")
    assert "5" in stock.ok("%rlm").text
    stock.ok("%unload_ext rlm_kernel")
    ready = fifo.write_code("__import__('os').getpid()")
    child = script(code(STUBBORN.format(ready=ready)))
    cell = stock.begin(f"%load_ext rlm_kernel\nh = rlm_query({child!r}, blocking=False)\n{SLEEPS}")
    with Processes([int(fifo.lines(1)[0])]) as processes:
        press_stop(stock)
        assert stock.reply_at_once(cell, processes) == []
    assert stock.finish(cell).reply["ename"] == "KeyboardInterrupt"
    assert stock.value("str(h.status().state)") == "cancelled"


def test_a_subshell_cannot_load_or_unload(stock) -> None:
    subshell = stock.answer(stock.ask("create_subshell_request"))["subshell_id"]
    message = stock.client.session.msg("execute_request", {"code": "%unload_ext rlm_kernel", "silent": False})
    message["header"]["subshell_id"] = subshell
    cell = stock._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
    stock.client.shell_channel.send(message)
    assert stock.finish(cell).error.startswith("UsageMistake")
    assert stock.value("callable(rlm_query)") is True
    stock.answer(stock.ask("delete_subshell_request", {"subshell_id": subshell}))


def test_no_child_is_left_when_a_shutdown_is_acknowledged(start_stock, server, fifo) -> None:
    family = start_family(start_stock, server, fifo)
    start_stock.blocked("rlm_wait(hs, timeout_s=50)")
    with family.watched(family.nursery) as processes:
        content, left = start_stock.answer_at_once(start_stock.ask("shutdown_request", {"restart": True}), processes)
    assert (left, content) == ([], {"status": "ok", "restart": True})
    assert start_stock.wait_exit(3.0) == 0
    assert marked(start_stock.mark) == set()
    assert "Traceback" not in start_stock.log


def test_a_stock_kernel_in_a_busy_loop_ends_by_a_signal_when_its_children_have(start_stock, fifo) -> None:
    pid = start_child(start_stock, fifo, STUBBORN)
    start_stock.blocked("while True: pass")
    with Processes([pid]) as processes:
        os.kill(start_stock.pid, signal.SIGTERM)
        assert start_stock.wait_exit(GONE_S + 2) == 143
        assert processes.left == []  # confirmed before the process ended
    assert "Traceback" not in start_stock.log


def test_a_stock_kernel_that_is_told_to_load_us_at_its_start_has_everything_up_to_its_exit(
    server, tmp_path, fifo
) -> None:
    spec = {**STOCK, "argv": [*STOCK["argv"], "--ext=rlm_kernel", "--RLM.max_depth=4"]}
    with Kernel(tmp_path / "kernel", spec=spec, **plain_client.variables(server)) as kernel:
        pid = start_child(kernel, fifo, PLAIN)
        assert "4" in kernel.ok("%rlm config max_depth").text
        cell = kernel.blocked(SLEEPS)
        with Processes([pid]) as processes:
            press_stop(kernel)
            assert kernel.reply_at_once(cell, processes) == []
        kernel.finish(cell)
        kernel.ok("%unload_ext rlm_kernel")
        press_stop(kernel)
        kernel.ok("%load_ext rlm_kernel")
        pid = start_child(kernel, fifo, STUBBORN)
        with Processes([pid]) as processes:
            kernel.send("exit()")
            assert kernel.wait_exit(GONE_S + 2) == 0
            assert processes.left == []
        assert "Traceback" not in kernel.log
