"""A session per module, which is begun anew for each test, and a model server."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.session.config import Settings
from rlm_kernel.session.session import RLMSession
from tests.support.model_server import ModelServer, code, script
from tests.support.plain_client import PlainFactory


class Root:
    """A session with its namespace. Helpers are attributes: ``root.rlm_query(...)``."""

    def __init__(self, run_dir: Path, *, openai: bool = False) -> None:
        self.run_dir = run_dir
        self.openai = openai
        self.session = RLMSession(self._settings(), {})

    def _settings(self) -> Settings:
        return Settings({"run_dir": str(self.run_dir), "warm_openai": self.openai}, environ={})

    @property
    def namespace(self) -> dict[str, Any]:
        return self.session.namespace

    def __getattr__(self, name: str) -> Any:
        return self.session.namespace[name]

    def scripted(self, *replies: Any, **options: Any) -> None:
        """Have every client that is built give these replies in turn."""
        factory = ScriptedClient.factory(list(replies), **options)
        # Wrapped, it no longer says that it does without openai: a nursery that is started now serves the module's other tests, too.
        self.session.configure_value("client_factory", functools.partial(factory) if self.openai else factory)

    def served(self, server: ModelServer, monkeypatch: pytest.MonkeyPatch, *, openai: bool = False) -> None:
        """Use a model server: on demand, and in a module with ``OPENAI = True``, through ``openai/test-model``, else by `plain_client`."""
        if not (openai or self.openai):
            self.session.configure_value("client_factory", PlainFactory(server.base_url))
            return
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        self.session.configure("model", "openai/test-model")

    def begin_anew(self) -> None:
        """Put everything back: settings, episode, namespace."""
        self.session.settings = self._settings()
        assert self.session.reset().ok
        self.namespace.clear()
        self.session.inject()

    def say_final(self, value: Any) -> None:
        """Finalize the episode as a cell with ``FINAL(value)`` does."""
        self.session.finalization.begin_cell()
        self.namespace["FINAL"](value)
        assert self.session.finalization.end_cell(success=True) is not None
        assert self.session.finalize().ok


@pytest.fixture(scope="module")
def one_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    root = Root(tmp_path_factory.mktemp("runs"), openai=getattr(request.module, "OPENAI", False))
    root.scripted(final("warm"))  # what the first child brings (nursery, threads) belongs to the module, not to a test
    assert root.namespace["rlm_query"]("warm up") == "warm"
    root.begin_anew()
    yield root
    assert root.session.shutdown().ok


@pytest.fixture
def root(one_root: Root) -> Iterator[Root]:
    yield one_root
    one_root.begin_anew()


@pytest.fixture
def own_root(tmp_path: Path) -> Iterator[Root]:
    """A session of the test's own, for tests that end it or break it."""
    root = Root(tmp_path / "runs")
    yield root
    root.session.shutdown()


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def final(text: str) -> str:
    """Write a reply whose code gives an answer."""
    return f"```repl\nFINAL({text!r})\n```"


def block(python: str) -> str:
    """Write a reply with a block of code."""
    return f"```repl\n{python}\n```"


def task(*blocks: str) -> str:
    """Write a prompt that makes the model server answer with these blocks of code, one per turn."""
    return script(*(code(python) for python in blocks))


HELD = "[[block held]]"
"""A prompt at which the model server waits."""


def held(*blocks: str, gate: str = "held") -> str:
    """Write a prompt like `task` whose first reply waits for ``server.release(gate)``."""
    first, *rest = blocks
    return script(f"[[block {gate}]]{code(first)}", *(code(python) for python in rest))
