"""`KernelREPLEnv`: the REPL environment whose code runs in a kernel of its own, for training and evaluation.

It blocks. For many at once give each a thread, or await ``asyncio.to_thread(env.execute, code)``: environments share nothing.

Who runs it: the caller's threads. One lock per environment lets one call in at a time; `close` of another thread first ends the call
that is under way. It starts no thread. It owns a kernel from the first `reset` to `close`; an environment that is dropped without `close`
ends its kernel when it is collected, or at the interpreter's exit.

What is where. The context travels to the kernel in a file of a private directory, which is deleted when it has been read. The
expected answer, the task and the rewards stay in this process: code in the kernel cannot find them.

How each step can fail. The code takes too long: it is interrupted as by the stop button, the result says so, and the kernel goes on.
The interrupt does not help, or the kernel dies: the kernel and all that came from it are killed, and `KernelDied` is raised, at once where
there are pidfds; the next `reset` starts another kernel. The kernel cannot confirm that children have ended: `ChildCleanupError`,
until an attempt confirms it; `reset` tries again, ``reset(fresh_kernel=True)`` takes another kernel. Ctrl-C in this process interrupts
the code, too, and is raised again.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.environment.deadline import check_timeout
from rlm_kernel.environment.executor import check_count
from rlm_kernel.environment.models import CodeBlockResult, REPLAction, REPLObservation, REPLState, StepResult
from rlm_kernel.environment.rubrics import REPLRubric, Rubric
from rlm_kernel.errors import ChildCleanupError, ConfigurationError
from rlm_kernel.jupyter.episodes import Job
from rlm_kernel.jupyter.kernel_link import KernelCommand, KernelLink
from rlm_kernel.session.helpers import HELPER_NAMES


class KernelREPLEnv(ClosesOnExit):
    """A REPL environment in a kernel of its own. Use as a context manager, or call `close`.

    Args:
        model: model spec, such as ``openai/gpt-5-mini`` or ``demo``; None for what the environment variables say.
        client_factory: builds the model client: ``"module:callable"``, or a callable that cloudpickle can pickle.
        max_iterations: calls of `execute` that an episode may take.
        max_output_length: characters of each stream that a result keeps: the first and the last half.
        context_preview_length: characters of the context that an observation shows.
        rubric: gives the rewards; a `REPLRubric` by default.
        settings: further settings of the kernel by name, as ``%rlm config`` lists them.
        kernel_name: an installed kernelspec. By default this interpreter runs the kernel, installed or not.
        env: more environment variables for the kernel.
        cwd: the kernel's working directory.
        startup_timeout_s: seconds that the kernel may take to start.

    Raises:
        ConfigurationError: names the argument and the value.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        client_factory: Callable[[], Any] | str | None = None,
        max_iterations: int = 30,
        max_output_length: int = 8192,
        context_preview_length: int = 500,
        rubric: Rubric | None = None,
        settings: Mapping[str, Any] | None = None,
        kernel_name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        startup_timeout_s: float = 60.0,
    ) -> None:
        self._max_iterations = check_count("max_iterations", max_iterations)
        self._preview_length = check_count("context_preview_length", context_preview_length, minimum=0)
        if not 0 < startup_timeout_s < math.inf:
            raise ConfigurationError("startup_timeout_s", startup_timeout_s, "must be more than 0 seconds")
        given = dict(settings or {})
        if model is not None:
            given["model"] = model
        self._factory = client_factory if callable(client_factory) else None
        if client_factory is not None and self._factory is None:
            given["client_factory"] = client_factory
        command = KernelCommand.of(
            given,
            env or {},
            name=kernel_name,
            cwd=None if cwd is None else os.fspath(cwd),
            startup_timeout_s=startup_timeout_s,
        )
        self._rubric = REPLRubric() if rubric is None else rubric
        self._lock = threading.RLock()
        self._episode: _Episode | None = None
        self._link = KernelLink(command, check_count("max_output_length", max_output_length))
        self._finalizer = weakref.finalize(self, self._link.release)

    # -- the environment

    def reset(
        self,
        context: Any = "",
        task_prompt: str = "",
        expected_answer: Any = None,
        seed: int | None = None,
        *,
        max_iterations: int | None = None,
        fresh_kernel: bool = False,
    ) -> StepResult[REPLObservation]:
        """Begin an episode. The kernel goes on, with an empty namespace; one that has died is replaced.

        Args:
            context: what code finds in ``context``: anything that cloudpickle can pickle.
            task_prompt: for the observation's metadata. Code does not see it.
            expected_answer: for the reward. Code does not see it.
            seed: for ``random`` in the kernel, and numpy if it is imported there.
            max_iterations: calls of `execute` in this episode; None for the environment's number.
            fresh_kernel: take a new kernel, so that nothing at all is left of earlier episodes, not even a module.

        Raises:
            KernelDied: the kernel did not start, or died.
            ChildCleanupError: children of the episode before could not be confirmed gone.
            PayloadError: the context (or the client factory) cannot be pickled.
            ConfigurationError: an illegal ``max_iterations``.
        """
        turns = self._max_iterations if max_iterations is None else check_count("max_iterations", max_iterations)
        with self._lock:
            self._check_open()
            self._episode = None
            context = "" if context is None else context
            seen = self._link.begin(Job(context, seed, self._factory), fresh_kernel=fresh_kernel)
            self._rubric.reset()
            if expected_answer is not None:
                self._rubric.set_expected(expected_answer)
            self._episode = episode = _Episode(context, task_prompt, turns, self._preview_length)
            episode.take(seen)
            return StepResult(episode.observe(CodeBlockResult()), None, False)

    def execute(self, code: str, timeout_s: float | None = None) -> StepResult[REPLObservation]:
        """Run code as one step of the episode.

        Children that could not be confirmed gone when the code ended are in the observation's metadata (``cleanup_error``,
        ``survivors``); the next step raises.

        Args:
            code: IPython code. Lines of its output that are final calls count.
            timeout_s: seconds after which it is interrupted; None for never.

        Raises:
            RuntimeError: there is no episode.
            KernelDied: the kernel died, or had to be killed.
            ChildCleanupError: children could not be confirmed gone in an earlier step; call `cleanup`.
            ConfigurationError: an illegal ``timeout_s``.
        """
        return self.step(REPLAction(code=code), timeout_s)

    def submit_final_answer(self, answer: str) -> StepResult[REPLObservation]:
        """End the episode with an answer, as one step. Its children are stopped. If it has ended before, that answer stays."""
        return self.step(REPLAction(is_final=True, final_answer=str(answer)))

    def step(self, action: REPLAction, timeout_s: float | None = None) -> StepResult[REPLObservation]:
        """Carry out an action: run its code, or take its final answer. See `execute`."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        with self._lock:
            episode = self._current()
            self._check_clean()
            was_done = episode.done
            try:
                block = self._carry_out(episode, action, timeout_s)
            finally:
                if self._link.pid is None:
                    self._episode = None
            failure = self._link.cleanup_failure
            if failure is not None and block.success:
                block.success, block.exception = False, f"{type(failure).__name__}: {failure}"
                block.stderr += f"{block.exception}\n"
            observation = episode.observe(block, failure)
            # The outcome is paid once, however many steps follow it.
            observation.reward = 0.0 if was_done else self._rubric(action, observation)
            return StepResult(observation, observation.reward, observation.done)

    def _carry_out(self, episode: _Episode, action: REPLAction, timeout_s: float | None) -> CodeBlockResult:
        episode.iteration += 1
        if action.is_final:
            if not episode.done:
                self._end_episode(episode, action.final_answer or "")
            return CodeBlockResult(stdout="The final answer was submitted.")
        if episode.iteration > episode.max_iterations:
            return CodeBlockResult(stdout=episode.out_of_iterations, success=False)
        ran = self._link.run(action.code, timeout_s)
        new_names = episode.take(ran.seen)
        episode.total_execution_time += ran.duration_s
        block = CodeBlockResult(
            stdout=ran.stdout,
            stderr=ran.stderr,
            locals_snapshot=self._link.snapshot(new_names),
            execution_time=ran.duration_s,
            success=ran.exception is None,
            exception=ran.exception,
        )
        if episode.iteration == episode.max_iterations and not episode.done:
            separator = "\n" if block.stdout and not block.stdout.endswith("\n") else ""
            block.stdout += f"{separator}{episode.out_of_iterations}\n"
            self._end_episode(episode, episode.partial_answer)
        return block

    def _end_episode(self, episode: _Episode, answer: str | None) -> None:
        """End it with an answer or without one. The answer is kept whatever becomes of the children."""
        episode.done, episode.final_answer = True, answer
        episode.take(self._link.finish(answer))

    def get_variable(self, name: str) -> StepResult[REPLObservation]:
        """Take one step that prints the repr of a variable (or of any expression)."""
        return self.execute(f"print(repr({name}))")

    def list_variables(self) -> list[str]:
        """Return the names in the namespace, helpers included."""
        return self.state().namespace_keys

    def state(self) -> REPLState:
        """Return the state of the episode, as of the last step.

        Raises:
            RuntimeError: there is none.
        """
        with self._lock:
            return self._current().state()

    def cleanup(self) -> None:
        """Try again to confirm the exits of children that could not be confirmed.

        Raises:
            ChildCleanupError: they still cannot be confirmed.
            KernelDied, RuntimeError: see `execute`.
        """
        with self._lock:
            self._check_open()
            self._link.cleanup()
            self._check_clean()

    @property
    def kernel_pid(self) -> int | None:
        """The kernel's process id, None while there is no kernel."""
        return self._link.pid

    def close(self) -> None:
        """End the kernel, and return when it and everything that came from it are gone. May be called twice.

        A call that is under way in another thread is ended first: there it raises RuntimeError.

        Raises:
            ChildCleanupError: processes could not be confirmed gone.
        """
        self._link.wake()
        with self._lock:
            self._episode = None
            if self._finalizer.detach() is not None:
                self._link.release()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this environment is closed; make a new one")

    def _check_clean(self) -> None:
        failure = self._link.cleanup_failure
        if failure is not None:
            raise failure

    def _current(self) -> _Episode:
        self._check_open()
        if self._episode is None:
            raise RuntimeError("this environment has no episode: call reset() first")
        return self._episode


class _Episode:
    """What this process knows of an episode.

    Args:
        context: what was given.
        task_prompt: what was given.
        max_iterations: steps that it may take.
        preview_length: characters of the context that are shown.
    """

    def __init__(self, context: Any, task_prompt: str, max_iterations: int, preview_length: int) -> None:
        self._task_prompt = task_prompt
        self._context = context if isinstance(context, str) else str(context)
        self._preview = self._context[:preview_length] or None
        self._names: list[str] = []
        self._seen: dict[str, Any] = {}
        self.max_iterations = max_iterations
        self.iteration = 0
        self.total_execution_time = 0.0
        self.done = False
        self.final_answer: str | None = None
        self.partial_answer: str | None = None

    def take(self, seen: dict[str, Any]) -> list[str]:
        """Take in what a reply says. Returns the names that the cell has newly bound."""
        names = list(seen["variables"] or {})
        new = [name for name in names if name not in self._names]
        self._names = names
        self._seen = seen
        self.partial_answer = seen["partial_answer"]
        if seen["done"] and not self.done:
            self.done, self.final_answer = True, seen["final_answer"]
        return new

    @property
    def out_of_iterations(self) -> str:
        return f"Maximum iterations ({self.max_iterations}) reached."

    def observe(self, result: CodeBlockResult, failure: ChildCleanupError | None = None) -> REPLObservation:
        metadata: dict[str, Any] = {
            "task_prompt": self._task_prompt,
            "final_answer": self.final_answer,
            "execution_time": result.execution_time,
            "total_execution_time": self.total_execution_time,
            "episode_id": self._seen["episode_id"],
            "children": self._seen["children"],
            "usage": self._seen["usage"],
        }
        if failure is not None:
            metadata |= {"cleanup_error": str(failure), "survivors": list(failure.survivors)}
        return REPLObservation(
            result=result,
            context_preview=self._preview,
            context_length=len(self._context),
            available_variables=self._available(),
            iteration=self.iteration,
            max_iterations=self.max_iterations,
            done=self.done,
            metadata=metadata,
        )

    def state(self) -> REPLState:
        return REPLState(
            episode_id=self._seen["episode_id"],
            step_count=self.iteration,
            context=self._context or None,
            task_prompt=self._task_prompt,
            iteration=self.iteration,
            max_iterations=self.max_iterations,
            namespace_keys=self._available(),
            final_answer=self.final_answer,
            total_execution_time=self.total_execution_time,
        )

    def _available(self) -> list[str]:
        return sorted({*HELPER_NAMES, "answer", "context", *self._names})
