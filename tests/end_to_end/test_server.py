"""With a real Jupyter server: however it ends a kernel, or is ended itself, nothing of the kernel is left when that is acknowledged.

Each event meets children of all kinds at once: see `tests.support.generations`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlm_kernel.jupyter.activity import MESSAGE_TYPE
from tests.support import plain_client
from tests.support.generations import MAX_DEPTH, READY_S, Generations, start_generations
from tests.support.kernels import Cell, Fifo, Processes, marked
from tests.support.model_server import ModelServer
from tests.support.server import CULL_NOBODY_S, Server, ServerKernel

GRACES_S = 2.0
"""The three graces together."""

KILLED_S = 3.5
"""Seconds within which nothing is left after a kernel was killed."""

POLLER_S = 2.0
"""Seconds within which ipykernel's parent poller ends a kernel: it looks once a second, and a busy machine may delay it."""

CULL_S = 2
"""Seconds after which an idle kernel is culled; the server looks once a second, so it can take one more."""

SPECS = {"rlm": {}, "signs": {"RLM_KEEP_ALIVE_S": "0.5"}}


def make_server(home: Path, model: ModelServer) -> Server:
    return Server(home, SPECS, **MAX_DEPTH, **plain_client.variables(model))


@pytest.fixture(scope="module")
def shared(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The module's Jupyter server, for events that leave it running."""
    with make_server(tmp_path_factory.mktemp("jupyter"), module_server) as running:
        yield running


@pytest.fixture
def culling(shared: Server) -> Iterator[Callable[[], None]]:
    """Begin to cull idle kernels; after the test none is culled any more."""
    yield lambda: shared.cull_idle_kernels_after(CULL_S)
    shared.cull_idle_kernels_after(CULL_NOBODY_S)


def blocked_in_wait(kernel: ServerKernel, server: ModelServer, fifo: Fifo) -> tuple[Generations, Cell]:
    """Start everything, and block the notebook in `rlm_wait`. No process of the kernel is overlooked."""
    family = start_generations(kernel.ok, server, fifo)
    assert set(family.all) == kernel.server.processes
    return family, kernel.blocked("rlm_wait(hs, timeout_s=50)")


@pytest.mark.slow
def test_nothing_is_left_when_a_server_that_got_sigterm_has_exited(server, fifo, tmp_path) -> None:
    with make_server(tmp_path, server) as jupyter, jupyter.open("rlm") as kernel:
        family, _ = blocked_in_wait(kernel, server, fifo)
        with Processes(family.all) as processes, Processes([jupyter.process.pid]) as itself:
            os.kill(jupyter.process.pid, signal.SIGTERM)
            gone = itself.wait(10.0)
            left = processes.left
        assert gone == []
        assert left == []
        assert marked(jupyter.mark) == set()
        assert jupyter.process.wait(10) == 0


@pytest.mark.slow
def test_nothing_is_left_soon_after_a_server_was_killed(server, fifo, tmp_path) -> None:
    """The kernel's parent poller ends the kernel without any hook; the nursery does the rest."""
    with make_server(tmp_path, server) as jupyter, jupyter.open("rlm") as kernel:
        family, _ = blocked_in_wait(kernel, server, fifo)
        with Processes([family.kernel]) as itself, Processes(family.all) as processes:
            os.kill(jupyter.process.pid, signal.SIGKILL)
            assert itself.wait(POLLER_S) == []
            assert processes.wait(KILLED_S) == []
        assert marked(jupyter.mark) == set()


def test_nothing_is_left_when_the_delete_of_a_kernel_is_answered(shared, server, fifo) -> None:
    with shared.open("rlm") as kernel:
        family, _ = blocked_in_wait(kernel, server, fifo)
        with Processes(family.all) as processes:
            status = kernel.request("DELETE")
            left = processes.left
        assert (status, left) == (204, [])
        assert shared.processes == set()
        assert not kernel.exists


def test_nothing_is_left_of_the_life_before_when_a_restart_is_answered(shared, server, fifo) -> None:
    with shared.open("rlm") as kernel:
        family, _ = blocked_in_wait(kernel, server, fifo)
        with Processes(family.all) as processes:
            status = kernel.request("POST", "restart")
            left = processes.left
        assert (status, left) == (200, [])
        kernel.reconnect()
        assert kernel.ok("(rlm_status(), 'hs' in globals())").text == "([], False)"


def test_the_children_are_gone_within_the_graces_after_an_interrupt_is_answered(shared, server, fifo) -> None:
    """The server does not wait for the kernel's reply to the interrupt."""
    with shared.open("rlm") as kernel:
        family, cell = blocked_in_wait(kernel, server, fifo)
        with Processes(family.below) as processes:
            assert kernel.request("POST", "interrupt") == 204
            assert processes.wait(GRACES_S + 0.5) == []
        assert kernel.finish(cell).error.startswith("KeyboardInterrupt")
        assert kernel.ok("[str(h.status().state) for h in hs]").text == str(["cancelled"] * 4)


@pytest.mark.slow
def test_a_kernel_is_not_culled_while_a_child_lives_and_is_culled_when_it_has_ended(shared, server, culling) -> None:
    with shared.open("signs") as kernel:
        kernel.ok("h = rlm_query('[[block culled]]', blocking=False)")
        server.wait_for_request("[[block culled]]", READY_S)
        with Processes([int(kernel.ok("import os; os.getpid()").text)]) as processes:
            culling()
            assert len(processes.wait(CULL_S + 1.0 + 1.0)) == 1  # without a living child it would have gone by then
            kernel.until(lambda: len(signs_of_life(kernel)) >= 4)
            server.release("culled")
            assert processes.wait(CULL_S + 1.0 + GRACES_S + 2.0) == []
        shared.wait_for_line(f"Culling 'idle' kernel 'signs' ({kernel.id})")
    # They belong to no cell, so that nobody who waits for one is disturbed.
    assert [(sign["parent_header"], sign["content"]) for sign in signs_of_life(kernel)[:4]] == 4 * [
        ({}, {"live_children": 1})
    ]


def signs_of_life(kernel: ServerKernel) -> list[dict]:
    return [message for message in kernel.messages if message["msg_type"] == MESSAGE_TYPE]
