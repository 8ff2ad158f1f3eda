"""``%load_ext rlm_kernel`` in IPython in a terminal: Ctrl-C closes, and however one leaves, the children are gone before IPython is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import plain_client
from tests.support.families import STUBBORN
from tests.support.kernels import Fifo, Processes, marked
from tests.support.model_server import ModelServer, code, script
from tests.support.terminals import Terminal

GONE_S = 6.0
"""Seconds within which the process has ended: the graces, one second for a main thread that does not unwind, and IPython's own exit."""


@pytest.fixture
def terminal(server: ModelServer, tmp_path: Path, fifo: Fifo) -> Iterator[Terminal]:
    text = STUBBORN.format(ready=fifo.write_code("__import__('os').getpid()"))
    with ExitStack() as stack:
        # Short graces: that they are kept is tested elsewhere.
        variables = {"RLM_SHUTDOWN_GRACE_S": "0.1", "RLM_TERMINATE_GRACE_S": "0.1", "CHILD": script(code(text))}
        running = stack.enter_context(Terminal(tmp_path / "terminal", **plain_client.variables(server), **variables))
        running.run("%load_ext rlm_kernel")
        yield running


def start_child(terminal: Terminal, fifo: Fifo) -> int:
    """Start a child that nothing but SIGKILL ends. Returns its pid when it runs."""
    terminal.run(
        "import os; h = rlm_query(os.environ['CHILD'], blocking=False)"
    )  # short: each key that is typed costs time
    return int(fifo.lines(1)[0])


def block(terminal: Terminal) -> None:
    """Begin a cell that sleeps, and return when it does. In short pieces: Ctrl-C just before a system call is noticed after it."""
    terminal.enter("import time; print('it', 'runs', flush=True); exec('while True: time.sleep(0.05)')")
    terminal.until("it runs")


def test_ctrl_c_and_a_final_answer_stop_the_children_before_the_next_prompt_and_exit_before_the_end(
    terminal, fifo
) -> None:
    pid = start_child(terminal, fifo)
    block(terminal)
    with Processes([pid]) as processes:
        terminal.press("c")
        shown = terminal.prompt()
        assert processes.left == [], shown
    assert "KeyboardInterrupt" in shown
    assert "close: c1 stopped" in shown
    assert "'cancelled'" in terminal.run("str(h.status().state)")

    pid = start_child(terminal, fifo)
    with Processes([pid]) as processes:
        terminal.run("FINAL('done')")
        assert processes.left == []
    assert "EpisodeFinalized" in terminal.run("rlm_query('x', blocking=False)")
    assert "new episode" in terminal.run("%rlm reset")

    pid = start_child(terminal, fifo)
    with Processes([pid]) as processes:
        terminal.enter("exit()")
        assert terminal.wait_exit(GONE_S) == 0
        assert processes.left == []
    assert marked(terminal.mark) == set()


def test_ctrl_d_stops_a_child_for_which_a_thread_of_the_users_waits(terminal, fifo) -> None:
    """The interpreter waits for such threads before it runs exit hooks; it would wait for as long as the child lives."""
    pid = start_child(terminal, fifo)
    terminal.run("import threading; threading.Thread(target=h.wait).start()")
    with Processes([pid]) as processes:
        terminal.press_at_prompt("d")
        assert terminal.wait_exit(GONE_S) == 0
        assert processes.left == []


@pytest.mark.parametrize(("signum", "busy"), [(signal.SIGTERM, False), (signal.SIGHUP, True)], ids=["prompt", "cell"])
def test_a_signal_stops_the_children_and_then_ends_ipython(terminal, fifo, signum, busy) -> None:
    pid = start_child(terminal, fifo)
    if busy:
        block(terminal)
    with Processes([pid]) as processes:
        os.kill(terminal.pid, signum)
        assert terminal.wait_exit(GONE_S) == 128 + signum
        assert processes.left == []
    assert marked(terminal.mark) == set()
