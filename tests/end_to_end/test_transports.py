"""Encrypted and local transports: a kernel behind them is the same kernel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import plain_client
from tests.support.families import PLAIN, start_child
from tests.support.kernels import Kernel, Processes, marked

pytestmark = pytest.mark.slow


@pytest.fixture
def start_over(server, tmp_path):
    """Start a kernel whose manager has been given some traits."""
    started = []

    def start(**traits: str) -> Kernel:
        variables: dict[str, Any] = plain_client.variables(server)
        kernel = Kernel(tmp_path / "kernel", **variables)
        started.append(kernel)
        for name, value in traits.items():
            setattr(kernel.manager, name, value)
        return kernel.start()

    yield start
    for kernel in started:
        kernel.stop()


@pytest.mark.parametrize("traits", [{"transport_encryption": "required"}, {"transport": "ipc"}], ids=["curve", "ipc"])
def test_children_interrupts_and_shutdowns_work_over_other_transports(start_over, fifo, traits) -> None:
    kernel = start_over(**traits)
    with open(kernel.manager.connection_file) as file:
        connection = json.load(file)
    assert connection["transport"] == traits.get("transport", "tcp")
    assert ("curve_secretkey" in connection) == ("transport_encryption" in traits)
    if "transport_encryption" in traits:
        assert "without encryption" not in kernel.log
    assert kernel.value("rlm_query('[[reply: FINAL(over)]]')") == "over"
    first = start_child(kernel, fifo, PLAIN)
    cell = kernel.blocked("rlm_wait(h)")
    with Processes([first]) as processes:
        content, left = kernel.answer_at_once(kernel.ask("interrupt_request"), processes)
    assert (content, left) == ({"status": "ok"}, [])
    assert kernel.finish(cell).reply["ename"] == "KeyboardInterrupt"
    second = start_child(kernel, fifo, PLAIN)
    with Processes([second]) as processes:
        content, left = kernel.answer_at_once(kernel.ask("shutdown_request", {"restart": False}), processes)
    assert (content, left) == ({"status": "ok", "restart": False}, [])
    assert kernel.wait_exit(4.0) == 0
    assert marked(kernel.mark) == set()


def test_no_key_of_the_transport_reaches_a_child(start_over, server) -> None:
    """The key is in a file that only its owner can read; it is in no environment and in no argument."""
    kernel = start_over(transport_encryption="required")
    key = kernel.manager.curve_secretkey.decode()
    kernel.ok("h = rlm_query('[[block]] keys', blocking=False)")
    server.wait_for_request("keys")
    for pid in marked(kernel.mark):
        for name in ("environ", "cmdline"):
            with open(f"/proc/{pid}/{name}", "rb") as file:
                assert key.encode() not in file.read()
