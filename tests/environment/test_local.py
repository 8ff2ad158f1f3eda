"""Promises of `rlm_kernel.environment.local`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.environment.local import LocalREPLEnv
from rlm_kernel.environment.models import REPLAction, StepResult
from rlm_kernel.environment.repl import REPLEnvironment


def test_results_carry_observation_reward_and_end() -> None:
    with LocalREPLEnv() as env:
        result = env.reset(context="Hello World", task_prompt="Count chars", expected_answer="11")
        assert isinstance(result, StepResult)
        assert not result.done
        assert (result.observation.iteration, result.observation.context_length) == (0, 11)
        result = env.execute("count = len(context)")
        assert result.observation.result.success
        assert (result.reward, result.done) == (0.0, False)
        result = env.execute("print(f'FINAL({count})')")
        assert (result.reward, result.done) == (1.0, True)
        assert env.state().final_answer == "11"
        assert (env.state().context, env.state().task_prompt) == ("Hello World", "Count chars")


def test_it_takes_the_arguments_of_the_environment() -> None:
    def parameters(cls: type) -> Any:
        return [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]

    assert parameters(LocalREPLEnv) == parameters(REPLEnvironment)
    closed: list[int] = []
    control = SimpleNamespace(
        llm_query_fn=lambda prompt: f"asked {prompt}",
        llm_batch_fn=None,
        rlm_query_fn=None,
        rlm_batch_fn=None,
        backend=None,
        managed=None,
        close=lambda: closed.append(1),
    )
    with LocalREPLEnv("ctx", "task", 5, 100, 2, recursive_controller=control) as env:
        observation = env.reset().observation
        assert (observation.context_preview, observation.max_iterations) == ("ct", 5)
        assert observation.metadata["task_prompt"] == "task"
        assert env.reset(max_iterations=2).observation.max_iterations == 2
        assert env.execute("llm_query('x')").observation.result.stdout == "'asked x'\n"
    assert closed == [1]


def test_an_episode_has_thirty_iterations_unless_told_otherwise() -> None:
    with LocalREPLEnv() as env:
        assert env.reset().observation.max_iterations == 30


def test_query_functions_that_take_only_a_prompt_are_accepted() -> None:
    def query(prompt: str) -> str:
        return f"Response: {prompt[:20]}"

    with LocalREPLEnv(llm_query_fn=query, llm_batch_fn=lambda prompts: [query(p) for p in prompts]) as env:
        names = env.reset(context="Test").observation.available_variables
        assert {"llm_query", "llm_query_batched", "llm_batch", "rlm_query", "SHOW_VARS"} <= set(names)
        env.execute("r = llm_query('Hello')\nr2 = rlm_query('World')\nr3 = llm_batch(['A'])")
        assert env.execute("print(r, r3)").observation.result.stdout == "Response: Hello ['Response: A']\n"
        assert "r2" in env.execute("print(SHOW_VARS())").observation.result.stdout


def test_an_answer_can_be_submitted() -> None:
    with LocalREPLEnv() as env:
        env.reset()
        assert env.submit_final_answer("my answer").done
        assert env.state().final_answer == "my answer"


def test_variables_can_be_listed_and_looked_at() -> None:
    with LocalREPLEnv() as env:
        env.reset()
        env.step(REPLAction(code="mine = 'x'"))
        assert "mine" in env.list_variables()
        assert env.get_variable("mine").observation.result.stdout == "'x'\n"


def test_a_step_can_be_given_a_time() -> None:
    with LocalREPLEnv() as env:
        env.reset()
        assert "timeout_s" in (env.execute("while True: pass", timeout_s=0.05).observation.result.exception or "")


def test_leaving_the_block_closes_it() -> None:
    env = LocalREPLEnv()
    with env:
        env.reset()
        env.execute("x = 1")
    with pytest.raises(RuntimeError):
        env.state()
    env.close()
