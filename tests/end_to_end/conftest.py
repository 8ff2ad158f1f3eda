"""Kernels and their model server. Tests that leave the kernel usable share one per module; the others start their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import ensure_event_loop

from tests.support import plain_client
from tests.support.kernels import Fifo, Kernel
from tests.support.model_server import ModelServer, _Handler, reply, script


class _OneRequest(_Handler):
    protocol_version = "HTTP/1.0"


@pytest.fixture(scope="module")
def module_server() -> Iterator[ModelServer]:
    ensure_event_loop()  # jupyter_client keeps one for good: it is not to look like a leak of the first test
    with ModelServer() as running:
        # One request per connection: what a kernel keeps open between two tests would look like a leak of the first.
        running._http.RequestHandlerClass = _OneRequest
        yield running


@pytest.fixture
def server(module_server: ModelServer) -> Iterator[ModelServer]:
    """The module's model server; after the test no connection of it is left."""
    yield module_server
    for thread in threading.enumerate():
        if thread.name.startswith("model-server-connection"):
            thread.join(5.0)


@pytest.fixture(scope="module")
def shared_kernel(module_server: ModelServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("kernel")
    variables: dict[str, Any] = module_server.environment
    with Kernel(home, RLM_MODEL="openai/test", **variables) as running:
        # A nursery that came to be within a test would look like a leak of that test.
        running.ok(f"assert rlm_query({script(reply('FINAL(1)'))!r}) == '1'")
        running.ok("%rlm reset")
        yield running


@pytest.fixture
def kernel(shared_kernel: Kernel, start_kernel: StartKernel) -> Iterator[Kernel]:
    """The module's kernel, in a fresh episode. If a test has left it unusable, another one, so that it fails no other test."""
    running = shared_kernel
    try:
        running.run("1", 3.0)
    except TimeoutError:
        running = start_kernel()
    yield running
    running.ok("%rlm config shutdown_grace_s=0.5")
    assert "new episode" in running.ok("%rlm reset").stdout


StartKernel = Callable[..., Kernel]


@pytest.fixture
def start_kernel(server: ModelServer, tmp_path: Path) -> Iterator[StartKernel]:
    """Start kernels of the test's own; keyword arguments are further variables. Without ``RLM_MODEL`` they use `plain_client`."""
    with ExitStack() as stack:

        def start(**variables: str) -> Kernel:
            model = server.environment if "RLM_MODEL" in variables else plain_client.variables(server)
            given: dict[str, Any] = {**model, **variables}
            return stack.enter_context(Kernel(tmp_path / "kernel", **given))

        yield start


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    pipe = Fifo(tmp_path / "fifo")
    yield pipe
    pipe.close()
