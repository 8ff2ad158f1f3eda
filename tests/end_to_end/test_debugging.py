"""The debugger and subshells: both work, and neither keeps children from advancing or a stop from being served."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.families import PLAIN, start_child, tag
from tests.support.kernels import GONE_S, Cell, Kernel, Processes
from tests.support.message_spec import CheckedKernel
from tests.support.model_server import ModelServer

pytestmark = pytest.mark.slow

TEXT = "x = 1\ny = x + 1\nprint('y is', y)\n"
"""A cell with a breakpoint in its second line."""


class Debugger:
    """What a front end's debugger does, by the Debug Adapter Protocol over the control channel."""

    def __init__(self, kernel: CheckedKernel) -> None:
        self.kernel = kernel
        self._seq = 0

    def ask(self, command: str, **arguments: Any) -> str:
        self._seq += 1
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        return self.kernel.ask("debug_request", content)

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        reply = self.kernel.answer(self.ask(command, **arguments))
        assert reply["success"], reply
        return reply.get("body") or {}

    def attach(self) -> None:
        self.do("initialize", clientID="test", adapterID="")
        self.do("attach")

    def set_breakpoint(self, text: str, line: int) -> None:
        path = self.do("dumpCell", code=text)["sourcePath"]
        source, points = {"path": path}, [{"line": line}]
        (point,) = self.do("setBreakpoints", source=source, breakpoints=points, sourceModified=False)["breakpoints"]
        assert (point["verified"], point["line"]) == (True, line)
        self.do("configurationDone")

    def stopped(self) -> int:
        """Wait until a thread is stopped at a breakpoint; return its number."""
        events = self.kernel.events
        self.kernel.until(lambda: any(event["event"] == "stopped" for event in events))
        (body,) = [event["body"] for event in events if event["event"] == "stopped"]
        assert body["reason"] == "breakpoint"
        events.clear()
        return int(body["threadId"])


@pytest.fixture(scope="module")
def debugged(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debugger]:
    home = tmp_path_factory.mktemp("kernel")
    with CheckedKernel(home, RLM_MODEL="openai/test", **module_server.environment) as kernel:
        debugger = Debugger(kernel)
        kernel.ok("rlm_query('[[reply: FINAL(1)]]')")
        # First of all: the debugger is started by a cell of its own, which must wait for the one that runs.
        cell = kernel.blocked("import time\ntime.sleep(30)")
        asked = debugger.ask("initialize", clientID="test", adapterID="")
        began = time.monotonic()
        assert kernel.interrupt() == {"status": "ok"}
        assert time.monotonic() - began < GONE_S
        assert kernel.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"
        assert kernel.answer(asked)["success"]
        debugger.do("attach")
        debugger.set_breakpoint(TEXT, 2)
        yield debugger


def begin_stopped(debugger: Debugger) -> tuple[Cell, int]:
    cell = debugger.kernel.send(TEXT)
    return cell, debugger.stopped()


def test_a_breakpoint_stops_the_cell_and_none_of_our_threads(debugged, server, fifo) -> None:
    kernel, gate, word = debugged.kernel, tag("gate"), tag("late")
    kernel.ok(f"h = rlm_query('[[block {gate}]] {word} [[reply: FINAL(late)]]', blocking=False)")
    server.wait_for_request(word)
    pid = kernel.value("h.status().pid")
    cell, thread = begin_stopped(debugged)
    assert not [found for found in debugged.do("threads")["threads"] if found["name"].startswith("rlm-")]
    with Processes([pid]) as processes:
        server.release(gate)
        assert processes.wait(10) == []  # it has answered and was reaped, while the cell stands still
    frame = debugged.do("stackTrace", threadId=thread)["stackFrames"][0]
    assert frame["line"] == 2
    shown = debugged.do("evaluate", expression="h.status().result", frameId=frame["id"], context="repl")
    assert shown["result"] == "'late'"
    debugged.do("continue", threadId=thread)
    assert kernel.finish(cell).stdout == "y is 2\n"


def test_an_interrupt_at_a_breakpoint_ends_the_cell_there_and_the_debugger_lives_on(debugged, fifo) -> None:
    kernel = debugged.kernel
    pid = start_child(kernel, fifo, PLAIN)
    for _ in range(2):
        cell, _thread = begin_stopped(debugged)
        with Processes([pid]) as processes:
            began = time.monotonic()
            content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
            took = time.monotonic() - began
        assert (content, left) == ({"status": "ok"}, [])
        assert took < GONE_S
        assert kernel.finish(cell, 5).reply["ename"] == "KeyboardInterrupt"
        assert cell.stdout == ""
        assert debugged.do("debugInfo")["stoppedThreads"] == []
        pid = start_child(kernel, fifo, PLAIN)
    cell, thread = begin_stopped(debugged)
    debugged.do("continue", threadId=thread)
    assert kernel.finish(cell).stdout == "y is 2\n"


def test_a_shutdown_at_a_breakpoint_is_served(debugged, fifo) -> None:
    """The last test of this kernel."""
    kernel = debugged.kernel
    pid = start_child(kernel, fifo, PLAIN)
    begin_stopped(debugged)
    with Processes([pid]) as processes:
        content, left = kernel.answer_at_once(kernel.ask("shutdown_request", {"restart": False}), processes)
    assert (content, left) == ({"status": "ok", "restart": False}, [])
    assert kernel.wait_exit(4.0) == 0


# -- subshells


def send_to(kernel: Kernel, subshell: str, code: str) -> Cell:
    """Send a cell to a subshell, and return when its code runs."""
    content = {"code": f"print('the code runs', flush=True)\n{code}", "silent": False, "stop_on_error": False}
    message = kernel.client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    cell = kernel._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
    kernel.client.shell_channel.send(message)
    kernel.until(lambda: "the code runs" in cell.stdout)
    return cell


def create(kernel: Kernel) -> str:
    return str(kernel.answer(kernel.ask("create_subshell_request"))["subshell_id"])


def test_a_subshell_waits_while_the_main_shell_works(kernel, server) -> None:
    gate = tag("gate")
    subshell = create(kernel)
    kernel.ok(f"h = rlm_query('[[block {gate}]] [[reply: FINAL(seen)]]', blocking=False)")
    waiting = send_to(kernel, subshell, "rlm_wait(h).result")
    assert kernel.ok("6 * 7").text == "42"
    assert not waiting.reply
    server.release(gate)
    assert kernel.finish(waiting).text == "'seen'"
    assert kernel.answer(kernel.ask("list_subshell_request"))["subshell_id"] == [subshell]
    assert kernel.answer(kernel.ask("delete_subshell_request", {"subshell_id": subshell}))["status"] == "ok"
    assert kernel.answer(kernel.ask("list_subshell_request"))["subshell_id"] == []


def test_an_interrupt_ends_the_wait_in_a_subshell_and_leaves_other_code_there_alone(kernel, fifo, tmp_path) -> None:
    os.mkfifo(tmp_path / "go")
    pid = start_child(kernel, fifo, PLAIN)
    first, second = create(kernel), create(kernel)
    waiting = send_to(kernel, first, "rlm_wait(h)")
    reading = send_to(kernel, second, f"open({str(tmp_path / 'go')!r}).read()")
    kernel.ok("while not get_ipython().kernel.rlm.supervisor._root_waits: pass")
    with Processes([pid]) as processes:
        content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert (content, left) == ({"status": "ok"}, [])
    assert kernel.finish(waiting, 3).reply["ename"] == "KeyboardInterrupt"
    (tmp_path / "go").write_text("gone on")
    assert kernel.finish(reading).text == "'gone on'"
    for subshell in (first, second):
        assert kernel.answer(kernel.ask("delete_subshell_request", {"subshell_id": subshell}))["status"] == "ok"


def test_deleting_a_busy_subshell_keeps_no_stop_from_being_served(kernel, fifo, tmp_path) -> None:
    os.mkfifo(tmp_path / "go")
    pid = start_child(kernel, fifo, PLAIN)
    subshell = create(kernel)
    reading = send_to(kernel, subshell, f"open({str(tmp_path / 'go')!r}).read()")
    deleting = kernel.ask("delete_subshell_request", {"subshell_id": subshell})
    with Processes([pid]) as processes:
        began = time.monotonic()
        content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
        assert time.monotonic() - began < GONE_S
    assert (content, left) == ({"status": "ok"}, [])
    assert kernel.ok("6 * 7").text == "42"  # the other shells are served, too
    (tmp_path / "go").write_text("gone on")
    assert kernel.finish(reading).text == "'gone on'"
    assert kernel.answer(deleting)["status"] == "ok"
