"""`REPLEnvironment`: episodes in which a model's code runs step by step, until there is an answer.

Who runs it: any thread, one step at a time; a second one that begins meanwhile is refused. `close` may be called from any
thread at any time. It stops managed children first, which ends a step that waits for them; other code runs to its own
end, and what it runs in is released then. Several environments may be used in several threads at once.

What it owns: the executor (shell and namespace) and, once `close` is called, the recursive controller, which it closes.

How each step can fail: the code raises (shown in the observation; the episode goes on); its time is up (the same); an interrupt
from outside (KeyboardInterrupt passes through; the step has counted). In managed mode the exits of children may not be
confirmed in time: the step that ended the episode says so in its observation, with the answer; after that `step`
and `reset` raise `ChildCleanupError` until `cleanup`, `reset` or `close` confirms them.
"""

from __future__ import annotations

import random
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlm_kernel._version import __version__
from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.environment.driven import conclude_cell
from rlm_kernel.environment.executor import PythonExecutor, check_count
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.models import (
    CodeBlockResult,
    EnvironmentMetadata,
    REPLAction,
    REPLObservation,
    REPLState,
)
from rlm_kernel.environment.queries import query_helpers
from rlm_kernel.environment.rubrics import REPLRubric, Rubric
from rlm_kernel.errors import ChildCleanupError, ConfigurationError
from rlm_kernel.values import CleanupReport, FinalAnswer

_NOT_RESET = "this environment has no episode: call reset() first"


class ManagedControl(Protocol):
    """What an environment needs of managed children."""

    def helpers(self) -> Mapping[str, Callable[..., Any]]:
        """Return every helper to put into the namespace, except those that the environment makes itself."""

    def begin_episode(self, episode_id: str | None) -> CleanupReport:
        """Stop the children and begin a new episode, or raise `ChildCleanupError`."""

    def finalize(self, answer: FinalAnswer | None = None) -> CleanupReport:
        """Stop the children because there is an answer, or raise `ChildCleanupError`."""

    def close(self) -> CleanupReport:
        """Stop the children for good, or raise `ChildCleanupError`."""

    @property
    def cleanup_failure(self) -> ChildCleanupError | None:
        """The failure that has not been made good yet."""

    def cleanup(self) -> CleanupReport:
        """Try again to confirm."""


class RecursiveControl(Protocol):
    """What an environment needs of a recursive controller. ``managed`` is None or a `ManagedControl`."""

    @property
    def llm_query_fn(self) -> Any: ...
    @property
    def llm_batch_fn(self) -> Any: ...
    @property
    def rlm_query_fn(self) -> Any: ...
    @property
    def rlm_batch_fn(self) -> Any: ...
    @property
    def backend(self) -> Any: ...
    @property
    def managed(self) -> Any: ...

    def close(self) -> Any:
        """Release what the controller holds."""


class REPLEnvironment(ClosesOnExit):
    """A REPL environment with episodes, rewards and helpers that ask models.

    Args:
        context, task_prompt: for episodes that bring none of their own.
        max_iterations: steps of an episode.
        max_output_length: characters of stdout, and of stderr, that an observation shows.
        context_preview_length: characters of the context that an observation shows.
        rubric: gives the rewards; None for `REPLRubric`.
        llm_query_fn: ``(prompt, model) -> str`` or ``(prompt) -> str``, behind ``llm_query``.
        llm_batch_fn: the same for a list of prompts, behind ``llm_query_batched``.
        subcall_fn, subcall_batch_fn: the same for recursive queries.
        rlm_max_depth, rlm_max_iterations: kept as attributes for whoever builds a controller from them; a controller
            that is given has its own.
        recursive_controller: gives those functions, or managed children with all their helpers.

    Raises:
        ConfigurationError: names the argument and the value.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

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
        self.initial_context = context
        self.initial_task_prompt = task_prompt
        self.max_iterations = check_count("max_iterations", max_iterations)
        self.max_output_length = check_count("max_output_length", max_output_length)
        self.context_preview_length = check_count("context_preview_length", context_preview_length, minimum=0)
        self.rubric: Rubric = REPLRubric() if rubric is None else rubric
        self.rlm_max_depth = check_count("rlm_max_depth", rlm_max_depth)
        self.rlm_max_iterations = (
            max_iterations if rlm_max_iterations is None else check_count("rlm_max_iterations", rlm_max_iterations)
        )
        self._controller = recursive_controller
        self._managed: ManagedControl | None = getattr(recursive_controller, "managed", None)
        given: dict[str, Any] = {
            "llm_query_fn": llm_query_fn,
            "llm_batch_fn": llm_batch_fn,
            "subcall_fn": subcall_fn,
            "subcall_batch_fn": subcall_batch_fn,
        }
        if recursive_controller is not None and self._managed is None:
            names = ("llm_query_fn", "llm_batch_fn", "rlm_query_fn", "rlm_batch_fn")
            for name, its_name in zip(given, names, strict=True):
                if given[name] is None:
                    given[name] = getattr(recursive_controller, its_name, None)
        self._functions = given
        query_helpers(**given)  # raises now rather than at the first reset
        self._lock = threading.Lock()  # guards `_busy`, `_state` and `_executor`; held for assignments only
        self._busy = False
        self._closings = 0
        self._leftover: PythonExecutor | None = None  # what the step that was running at `close` is to release
        self._state: REPLState | None = None
        self._executor: PythonExecutor | None = None
        self._finalization = Finalization(dict, frozenset)
        self._helpers: dict[str, Any] = {}
        self._done = False

    # -- episodes

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        context: Any = None,
        task_prompt: str | None = None,
        llm_model: str | None = None,
        expected_answer: Any = None,
        rlm_max_depth: int | None = None,
        rlm_max_iterations: int | None = None,
        max_iterations: int | None = None,
        hf_token: str | None = None,
    ) -> REPLObservation:
        """Begin an episode.

        Args:
            seed: seeds `random`, and NumPy's generator if NumPy is loaded. They are the whole process's.
            episode_id: None for a fresh one.
            context, task_prompt: None or empty for those of the constructor. A context need not be text.
            llm_model: passed to the query functions where code names no model.
            expected_answer: what the rubric compares the final answer with.
            rlm_max_depth, rlm_max_iterations, max_iterations: replace those of the constructor from now on.
            hf_token: refused where nothing answers queries: this environment makes no model client of its own.

        Raises:
            ChildCleanupError: children of the episode before could not be confirmed gone; it stays.
            RuntimeError: a step is running.
        """
        counts = {
            "rlm_max_depth": rlm_max_depth,
            "rlm_max_iterations": rlm_max_iterations,
            "max_iterations": max_iterations,
        }
        counts = {name: check_count(name, value) for name, value in counts.items() if value is not None}
        helpers = query_helpers(**self._functions, model=llm_model)
        if hf_token and not helpers and self._managed is None:
            raise ConfigurationError(
                "hf_token", "…", "no model client is made from it here; pass llm_query_fn=… or recursive_controller=…"
            )
        self._begin()
        try:
            episode_id = str(uuid.uuid4()) if episode_id is None else episode_id
            if self._managed is not None:
                self._managed.begin_episode(episode_id)
                helpers = self._beside(self._managed.helpers(), helpers)
            elif (begin := getattr(self._controller, "begin_episode", None)) is not None:
                begin(episode_id)  # it counts children per episode
            for name, value in counts.items():
                setattr(self, name, value)
            _seed(seed)
            self.rubric.reset()
            if expected_answer is not None:
                self.rubric.set_expected(expected_answer)
            context = self.initial_context if context is None or context == "" else context
            return self._furnish(helpers, context, task_prompt or self.initial_task_prompt, episode_id)
        finally:
            self._end()

    def _beside(self, managed: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Return the managed helpers, except those for which the caller gave a function."""
        recursive = self._functions["subcall_fn"], self._functions["subcall_batch_fn"]
        given = {name: f for name, f in own.items() if name.startswith("llm_") or recursive != (None, None)}
        helpers = {**managed, **given}
        if "llm_query_batched" in helpers:
            helpers.setdefault("llm_batch", helpers["llm_query_batched"])
        return helpers

    def _furnish(
        self, helpers: dict[str, Any], context: Any, task_prompt: str | None, episode_id: str
    ) -> REPLObservation:
        """Make the namespace and the state of a new episode."""
        with self._lock:
            executor, closings = self._executor, self._closings
        if executor is None:
            executor = PythonExecutor(self.max_output_length)
        else:
            executor.reset()
        executor.max_output_length = self.max_output_length
        hidden = frozenset({"context", "answer"}) | set(helpers) | executor.hidden_names()
        finalization = Finalization(lambda: executor.namespace, lambda: hidden | {"FINAL", "FINAL_VAR", "SHOW_VARS"})
        helpers |= {name: getattr(finalization, name) for name in ("FINAL", "FINAL_VAR", "SHOW_VARS")}
        executor.set_variable("answer", finalization.answer_dict)
        has_context = context is not None and context != ""
        if has_context:
            executor.set_context(context)
        executor.namespace.update(helpers)
        text = context if isinstance(context, str) else str(context) if has_context else ""
        state = REPLState(
            episode_id=episode_id,
            context=text,
            task_prompt=task_prompt or "",
            max_iterations=self.max_iterations,
            namespace_keys=executor.list_variables(),
        )
        self._finalization, self._helpers, self._done = finalization, helpers, False
        with self._lock:
            if closed_meanwhile := closings != self._closings:
                self._leftover = executor
            else:
                self._executor, self._state = executor, state
        if closed_meanwhile:
            raise RuntimeError("this environment was closed while it was being reset")
        lines = ["The REPL is ready."]
        if has_context:
            lines.append(f"The context ({len(text)} characters) is in the variable context.")
        if task_prompt:
            lines.append(f"Task: {task_prompt}")
        lines.append(
            "Give the answer with FINAL(value), or put it into answer['content'] and set answer['ready'] = True."
        )
        return self._observe(state, CodeBlockResult(stdout="\n".join(lines)), 0.0)

    def step(self, action: REPLAction, timeout_s: float | None = None) -> REPLObservation:
        """Run code, or take a final answer.

        Args:
            timeout_s: seconds after which the code is interrupted, None for never.

        Raises:
            RuntimeError: there is no episode, or a step is running.
            ChildCleanupError: children could not be confirmed gone when the episode ended; call `cleanup`.
            KeyboardInterrupt: the code was interrupted from outside.
        """
        if not isinstance(action, REPLAction):
            raise TypeError(f"action={action!r}: must be a REPLAction")
        self._begin()
        try:
            with self._lock:
                state, executor = self._state, self._executor
            if state is None or executor is None:
                raise RuntimeError(_NOT_RESET)
            failure = None if self._managed is None else self._managed.cleanup_failure
            if failure is not None:
                raise failure
            return self._step(state, executor, action, timeout_s)
        finally:
            self._end()

    def _step(
        self, state: REPLState, executor: PythonExecutor, action: REPLAction, timeout_s: float | None
    ) -> REPLObservation:
        was_done = self._done
        state.step_count += 1
        state.iteration += 1
        finalization = self._finalization
        if action.is_final:
            block = CodeBlockResult(stdout="The final answer was submitted.")
            if finalization.final is None:
                finalization.final = FinalAnswer(action.final_answer or "")
        elif state.iteration > state.max_iterations:
            block = CodeBlockResult(stdout=_out_of_iterations(state), success=False)
        else:
            block = self._run(executor, action.code, timeout_s)
            state.total_execution_time += block.execution_time
            state.namespace_keys = executor.list_variables()
            if state.iteration == state.max_iterations and finalization.final is None:
                self._give_up(state, block)
        self._done = finalization.final is not None or state.iteration >= state.max_iterations
        if finalization.final is not None:
            state.final_answer = finalization.final.text
        failure = self._stop_children() if self._done and not was_done else None
        if failure is not None:
            block.success, block.exception = False, f"{type(failure).__name__}: {failure}"
            block.stderr += f"{block.exception}\n"
        observation = self._observe(state, block, None, failure)
        # The outcome is paid once, however many steps follow it.
        observation.reward = 0.0 if was_done else self.rubric(action, observation)
        return observation

    def _run(self, executor: PythonExecutor, code: str, timeout_s: float | None) -> CodeBlockResult:
        executor.namespace.update(self._helpers)
        self._finalization.begin_cell()
        result = executor.run(code, timeout_s)
        return CodeBlockResult(**executor.shown(conclude_cell(self._finalization, result)))

    def _give_up(self, state: REPLState, block: CodeBlockResult) -> None:
        """Take what there is of an answer, as the iterations are used up."""
        partial = self._finalization.partial_answer()
        if partial is not None:
            self._finalization.final = FinalAnswer(partial)
        separator = "\n" if block.stdout and not block.stdout.endswith("\n") else ""
        block.stdout += f"{separator}{_out_of_iterations(state)}\n"

    def _stop_children(self) -> ChildCleanupError | None:
        with self._lock:
            closed = self._state is None
        if self._managed is None or closed:
            return None
        try:
            self._managed.finalize(self._finalization.final)
        except ChildCleanupError as error:
            return error
        return None

    def _observe(
        self,
        state: REPLState,
        block: CodeBlockResult,
        reward: float | None,
        failure: ChildCleanupError | None = None,
    ) -> REPLObservation:
        context = state.context or ""
        metadata: dict[str, Any] = {
            "task_prompt": state.task_prompt,
            "final_answer": state.final_answer,
            "execution_time": block.execution_time,
            "total_execution_time": state.total_execution_time,
        }
        if failure is not None:
            metadata |= {"cleanup_error": str(failure), "survivors": list(failure.survivors)}
        return REPLObservation(
            result=block,
            context_preview=context[: self.context_preview_length] if context else None,
            context_length=len(context),
            available_variables=state.namespace_keys,
            iteration=state.iteration,
            max_iterations=state.max_iterations,
            done=self._done,
            reward=reward,
            metadata=metadata,
        )

    # -- what is known

    @property
    def state(self) -> REPLState:
        """The state of the episode, as it is now.

        Raises:
            RuntimeError: there is no episode.
        """
        with self._lock:
            state = self._state
        if state is None:
            raise RuntimeError(_NOT_RESET)
        return state.model_copy()

    def get_metadata(self) -> EnvironmentMetadata:
        """Say what this environment is."""
        return EnvironmentMetadata(
            name="repl_env",
            description="A Python REPL in which a model works on a context that is a variable, and may ask models itself",
            version=__version__,
        )

    # -- the end

    def cleanup(self) -> CleanupReport | None:
        """Try again to confirm the exits of children that could not be confirmed; None without managed children."""
        return None if self._managed is None else self._managed.cleanup()

    def close(self) -> None:
        """Release everything. May be called twice, and from any thread while another one is in a step.

        Raises:
            ChildCleanupError: children could not be confirmed gone; the state stays. Calling it again tries again.
        """
        if self._managed is not None:
            self._managed.close()
        with self._lock:
            executor, self._executor = self._executor, None
            self._state = None
            self._closings += 1
            if self._busy:
                self._leftover, executor = executor, None
        if executor is not None:
            executor.close()
        if self._controller is not None:
            self._controller.close()

    def _begin(self) -> None:
        with self._lock:
            if self._busy:
                raise RuntimeError("this environment is running a step already; code in a step cannot run another one")
            self._busy = True

    def _end(self) -> None:
        with self._lock:
            self._busy = False
            leftover, self._leftover = self._leftover, None
        if leftover is not None:
            leftover.close()


def _out_of_iterations(state: REPLState) -> str:
    return f"Maximum iterations ({state.max_iterations}) reached."


def _seed(seed: int | None) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigurationError("seed", seed, "must be a whole number, or None")
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
