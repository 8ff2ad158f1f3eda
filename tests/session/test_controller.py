"""Promises of `rlm_kernel.session.controller`: the one place where backends are put together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.local import LocalREPLEnv
from rlm_kernel.errors import ConfigurationError, EpisodeClosing
from rlm_kernel.session.backends import BackendLimits, DirectLMBackend, LocalChildRLMBackend, ManagedChildBackend
from rlm_kernel.session.controller import RecursiveController, create_server_recursive_controller
from rlm_kernel.values import ManagedChildConfig


def ok(messages: list[dict[str, str]], model: str | None = None) -> str:
    return "ok"


@pytest.mark.parametrize("max_depth", [0, 1])
def test_without_depth_there_is_no_recursion(max_depth: int) -> None:
    with create_server_recursive_controller(ok, max_depth=max_depth, max_iterations=4) as controller:
        assert (controller.llm_query_fn("hello"), controller.llm_batch_fn(["a", "b"])) == ("ok", ["ok", "ok"])
        assert controller.llm_query_fn("hello", "model") == "ok"
        assert (controller.rlm_query_fn, controller.rlm_batch_fn, controller.managed) == (None, None, None)
        assert type(controller.backend) is DirectLMBackend


def test_with_depth_children_are_runs_in_this_process() -> None:
    prompts: list[str] = []

    def chat(messages: list[dict[str, str]]) -> str:
        prompts.append(messages[0]["content"])
        return "```repl\nFINAL(context.upper())\n```"

    with create_server_recursive_controller(
        chat, max_depth=2, max_iterations=4, system_prompt="Mine.", max_children_total=2, result_truncation_limit=3
    ) as controller:
        assert isinstance(controller.backend, LocalChildRLMBackend)
        assert controller.rlm_query_fn is not None
        assert controller.rlm_batch_fn is not None
        assert controller.rlm_query_fn("abcdef") == "ABC"
        assert sorted(controller.rlm_batch_fn(["x", "x"], None)) == ["Error: max_children_total exceeded", "X"]
        assert all(prompt.startswith("Mine.") for prompt in prompts)
        assert controller.backend.limits == BackendLimits(2, 8, 2, None, 3, None)
        controller.begin_episode()
        assert controller.rlm_query_fn("again") == "AGA"
    with pytest.raises(EpisodeClosing):
        controller.llm_query_fn("p")


def test_managed_children_take_the_limits_that_are_named_beside_them() -> None:
    config = ManagedChildConfig(client_factory=ScriptedClient.factory("x"), max_children_total=9, max_depth=3)
    controller = create_server_recursive_controller(
        ok, max_depth=1, max_iterations=4, max_children_per_batch=2, per_child_timeout_s=7.0, managed=config
    )
    assert isinstance(controller.backend, ManagedChildBackend)
    assert controller.managed is controller.backend.managed
    assert controller.managed is not None
    got = controller.managed.config
    assert (got.max_children_total, got.max_children_per_batch, got.per_child_timeout_s, got.max_depth) == (
        9,
        2,
        7.0,
        3,
    )
    assert controller.llm_query_fn("p") == "ok"
    assert controller.rlm_query_fn is not None
    assert controller.rlm_batch_fn is not None
    controller.close()
    controller.close()


@pytest.mark.parametrize("managed", [{"client_factory": ok}, ok, "openai/x"])
def test_what_is_no_configuration_is_refused_by_name(managed: Any) -> None:
    with pytest.raises(ConfigurationError, match="managed="):
        create_server_recursive_controller(ok, max_depth=1, max_iterations=4, managed=managed)


def test_a_controller_around_a_backend_of_the_users_own_can_be_closed() -> None:
    controller = RecursiveController(lambda p: p, lambda ps: ps, None, None, object())
    controller.begin_episode()
    controller.close()


def test_the_library_can_be_imported_where_no_process_can_be_forked() -> None:
    """What stands for Windows: no `os.fork`, none of the POSIX-only modules, and managed mode says so."""
    program = """
import os, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty"):
    sys.modules[name] = None
del os.fork
from rlm_kernel.session import backends, controller, local_runner, managed
assert not any(name.startswith("rlm_kernel.children") for name in sys.modules), "loaded at import"
for name in ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty"):
    del sys.modules[name]
from rlm_kernel.errors import ManagedModeRequired
from rlm_kernel.values import ManagedChildConfig
chat = lambda messages: "```repl\\nFINAL(rlm_query('p'))\\n```" if len(messages) > 1 else "direct"
assert local_runner.LocalRLMRunner(chat, max_depth=1).run("c", "t").final_answer == "direct"
try:
    managed.ManagedChildren(ManagedChildConfig(client_factory=lambda: chat))
except ManagedModeRequired as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "need a POSIX system" in done.stdout


def test_an_environment_gives_its_code_the_recursion_of_a_controller_and_counts_per_episode() -> None:
    def chat(messages: list[dict[str, str]]) -> str:
        return "```repl\nFINAL(len(context))\n```"

    controller = create_server_recursive_controller(chat, max_depth=2, max_iterations=4, max_children_total=2)
    with LocalREPLEnv(recursive_controller=controller) as environment:
        for _ in range(2):
            environment.reset()
            result = environment.execute(
                "rlm_query('abc') + rlm_query_batched(['x'], context=[[1, 2]])[0] + rlm_query('y')"
            )
            assert "32Error: max_children_total exceeded" in result.observation.result.stdout
    with pytest.raises(EpisodeClosing):
        controller.llm_query_fn("p")
