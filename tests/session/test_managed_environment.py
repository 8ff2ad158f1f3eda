"""`REPLEnvironment` with real managed children: finalize, reset and close stop them, confirmed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.environment.local import LocalREPLEnv
from rlm_kernel.environment.models import REPLAction
from rlm_kernel.session.controller import create_server_recursive_controller
from rlm_kernel.values import ManagedChildConfig


def endless_factory() -> ScriptedClient:
    """Children of this client never come to an end by themselves."""
    return ScriptedClient(lambda messages: "```repl\nimport threading\nthreading.Event().wait(60)\n```")


@pytest.fixture
def env() -> Iterator[LocalREPLEnv]:
    controller = create_server_recursive_controller(
        lambda messages, model=None: "direct",
        max_depth=2,
        max_iterations=3,
        managed=ManagedChildConfig(client_factory=endless_factory, max_iterations=3),
    )
    with LocalREPLEnv(context="ctx", recursive_controller=controller) as made:
        made.reset()
        yield made


def value(env: LocalREPLEnv, name: str) -> Any:
    return env._env._executor.get_variable(name)  # type: ignore[union-attr]


def start(env: LocalREPLEnv) -> None:
    result = env.execute("h = rlm_query('work', blocking=False)\ns = rlm_status(h)").observation.result
    assert result.success, result


@pytest.mark.slow
def test_each_way_to_end_stops_the_children_and_a_reset_makes_their_handles_stale(env: LocalREPLEnv) -> None:
    assert {"rlm_status", "rlm_share", "llm_batch"} <= set(env.list_variables())
    for code in ("FINAL(1)", "print('FINAL(1)')", None):
        start(env)
        old = value(env, "h")
        result = env.submit_final_answer("1") if code is None else env.execute(code)
        assert (result.done, result.observation.metadata["final_answer"]) == (True, "1")
        status = old.status()
        assert (status.state, status.exited) == ("cancelled", True)
        assert "EpisodeFinalized" in (env.execute("rlm_query('x', blocking=False)").observation.result.exception or "")
        env.reset()
        env._env._executor.set_variable("old", old)  # type: ignore[union-attr]
        assert "StaleHandleError" in (env.execute("rlm_status(old)").observation.result.exception or "")
    start(env)
    child = env._env._managed.statuses()  # type: ignore[union-attr]
    assert len(child) == 1
    env.reset()
    assert env._env._managed.statuses() == []  # type: ignore[union-attr]


def test_closing_reaches_the_supervisor_while_a_step_waits_for_a_child(env: LocalREPLEnv) -> None:
    start(env)
    handle, waiting = value(env, "h"), threading.Event()
    env._env._executor.set_variable("waiting", waiting)  # type: ignore[union-attr]
    ended: list[Any] = []

    def step() -> None:
        try:
            ended.append(env.step(REPLAction(code="waiting.set()\nprint(rlm_wait(h).state)")))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    assert waiting.wait(10)
    env.close()
    thread.join(10)
    assert ended
    assert not thread.is_alive()
    assert handle is not None
