"""`LocalREPLEnv`: a REPL environment in this process, with the methods that clients of environments have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.environment.models import REPLAction, REPLObservation, REPLState, StepResult
from rlm_kernel.environment.repl import RecursiveControl, REPLEnvironment
from rlm_kernel.environment.rubrics import Rubric

Result = StepResult[REPLObservation]


class LocalREPLEnv(ClosesOnExit):
    """A `REPLEnvironment` whose results carry reward and end beside the observation.

    The arguments are those of `REPLEnvironment`. Threads: as there. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        context: Any = None,
        task_prompt: str | None = None,
        max_iterations: int = 30,
        max_output_length: int = 8192,
        context_preview_length: int = 500,
        rubric: Rubric | None = None,
        llm_query_fn: Callable[..., Any] | None = None,
        llm_batch_fn: Callable[..., Any] | None = None,
        subcall_fn: Callable[..., Any] | None = None,
        subcall_batch_fn: Callable[..., Any] | None = None,
        rlm_max_depth: int = 1,
        rlm_max_iterations: int | None = None,
        recursive_controller: RecursiveControl | None = None,
    ) -> None:
        self._env = REPLEnvironment(
            context,
            task_prompt,
            max_iterations,
            max_output_length,
            context_preview_length,
            rubric,
            llm_query_fn,
            llm_batch_fn,
            subcall_fn,
            subcall_batch_fn,
            rlm_max_depth,
            rlm_max_iterations,
            recursive_controller,
        )

    def reset(
        self,
        context: Any = "",
        task_prompt: str = "",
        max_iterations: int | None = None,
        **options: Any,
    ) -> Result:
        """Begin an episode.

        Args:
            context, task_prompt: empty for those of the constructor.
            max_iterations: None for the constructor's, which is 30 by default.
            options: what else `REPLEnvironment.reset` takes.
        """
        return _result(
            self._env.reset(context=context, task_prompt=task_prompt, max_iterations=max_iterations, **options)
        )

    def execute(self, code: str, timeout_s: float | None = None) -> Result:
        """Take one step that runs code."""
        return self.step(REPLAction(code=code), timeout_s)

    def step(self, action: REPLAction, timeout_s: float | None = None) -> Result:
        """Take one step."""
        return _result(self._env.step(action, timeout_s))

    def submit_final_answer(self, answer: str) -> Result:
        """End the episode with an answer."""
        return self.step(REPLAction(is_final=True, final_answer=answer))

    def get_variable(self, name: str) -> Result:
        """Take one step that prints the repr of a variable (or of any expression)."""
        return self.execute(f"print(repr({name}))")

    def list_variables(self) -> list[str]:
        """Return the names in the namespace, helpers included."""
        return list(self.state().namespace_keys)

    def state(self) -> REPLState:
        """Return the state of the episode.

        Raises:
            RuntimeError: there is none.
        """
        return self._env.state

    def close(self) -> None:
        """Release everything. May be called twice, and while another thread is in a step."""
        self._env.close()


def _result(observation: REPLObservation) -> Result:
    return StepResult(observation=observation, reward=observation.reward, done=observation.done)
