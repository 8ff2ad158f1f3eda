"""What carries out model calls and recursive calls for one run: directly, by recursion in this process, or by managed
children.

A backend has `query`, `query_batched`, `recursive_query` and `recursive_query_batched`, and records what became of the
children in ``child_traces``. The loop that asks it is `rlm_kernel.session.local_runner` or any other.

Who runs it: the thread that calls; batches use daemon threads of their own, each with a copy of the caller's context
variables. Thread-safe. How it can fail: a single query raises what the model or the child raised; in a batch that
becomes ``Error: …`` in its place; a callback that raises is logged and changes nothing.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlm_kernel.clients.base import ModelClient, run_batch
from rlm_kernel.errors import ChildFailedError, UsageMistake
from rlm_kernel.loop.prompts import RLM_SYSTEM_PROMPT
from rlm_kernel.session.models import BATCH_WORKERS, ModelAccess
from rlm_kernel.session.queries import ChatFn, chat_client, checked_prompt, checked_prompts, describe, takes
from rlm_kernel.session.runtree import RunNode
from rlm_kernel.values import ChildState, ManagedChildConfig, _check_count, _check_seconds

if TYPE_CHECKING:
    from rlm_kernel.session.managed import ManagedChildren

_log = logging.getLogger(__name__)

PREVIEW_CHARS = 80
"""Characters of a prompt or a result in a trace and in the callbacks of runs in this process."""

UNNAMED_MODEL = "default"
"""How callbacks see the model of a query that names none."""


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Bounds on what a backend does.

    Attributes:
        max_depth: children exist at depths 1 … ``max_depth - 1``; beyond, a recursive query is one direct call.
        max_batch_workers: calls or children of one batch that are under way at once.
        max_children_total: children of the whole tree, None for no limit.
        max_children_per_batch: children that one batch may start, None for no limit of its own.
        result_truncation_limit: characters after which a result is cut, None for never.
        per_child_timeout_s: seconds that a child may take, None for no limit.

    Raises:
        ConfigurationError: names the field and the value.
    """

    max_depth: int = 1
    max_batch_workers: int = BATCH_WORKERS
    max_children_total: int | None = None
    max_children_per_batch: int | None = None
    result_truncation_limit: int | None = None
    per_child_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_count("max_depth", self.max_depth, minimum=0)
        _check_count("max_batch_workers", self.max_batch_workers, minimum=1)
        _check_count("max_children_total", self.max_children_total, minimum=0, optional=True)
        _check_count("max_children_per_batch", self.max_children_per_batch, minimum=1, optional=True)
        _check_count("result_truncation_limit", self.result_truncation_limit, minimum=1, optional=True)
        if self.per_child_timeout_s is not None:
            _check_seconds("per_child_timeout_s", self.per_child_timeout_s, minimum=0.0, exclusive=True)


@dataclass(frozen=True, slots=True)
class ChildTrace:
    """What became of one child.

    Attributes:
        depth: of the child.
        result_preview: the beginning of its answer, None if there is none.
        error: why there is no answer, None if there is one.
    """

    depth: int
    duration_s: float
    prompt_preview: str
    result_preview: str | None
    error: str | None


class RecursiveBackend(Protocol):
    """What a run needs of a backend; one of a user's own has to have this much."""

    def query(self, prompt: str, model: str | None = None) -> str: ...
    def query_batched(self, prompts: list[str], model: str | None = None) -> list[str]: ...
    def recursive_query(self, prompt: str, model: str | None = None) -> str: ...
    def recursive_query_batched(self, prompts: list[str], model: str | None = None) -> list[str]: ...


class DirectLMBackend:
    """Model calls without recursion: a recursive query is a direct call, too.

    Args:
        chat_fn: makes the calls.
        depth: of the run that asks; 0 for the root.
        limits: bounds; None for the defaults.
        node: the run's place in a tree of runs, None for a tree of its own.

    Raises:
        ConfigurationError: ``chat_fn`` is neither a chat function nor a client.
    """

    def __init__(
        self,
        chat_fn: ChatFn | ModelClient,
        depth: int = 0,
        limits: BackendLimits | None = None,
        *,
        node: RunNode | None = None,
    ) -> None:
        self.chat_fn = chat_fn
        self.depth = depth
        self.limits = limits or BackendLimits()
        self.max_depth = self.limits.max_depth
        self.node = node or RunNode()
        self.child_traces: list[ChildTrace] = []
        client = chat_client(chat_fn)
        self.models = ModelAccess(lambda: client, meter=self.node, batch_workers=self.limits.max_batch_workers)

    def query(self, prompt: str, model: str | None = None) -> str:
        """Ask the model once. What the call raises comes through."""
        return self._cut(self.models.ask(checked_prompt(prompt), model))

    def query_batched(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """Ask the model several questions at once. Answers keep the order; a failed one is ``Error: …``."""
        replies = self.models.try_batch(checked_prompts(prompts), model)
        return [self._cut(reply) if isinstance(reply, str) else f"Error: {reply}" for reply in replies]

    def recursive_query(self, prompt: str, model: str | None = None) -> str:
        """Ask directly: there is no recursion here."""
        return self.query(prompt, model)

    def recursive_query_batched(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """Ask directly, several at once: there is no recursion here."""
        return self.query_batched(prompts, model)

    def begin_episode(self) -> None:
        """Begin to count anew: children, usage and traces belong to an episode."""
        self.node.begin_anew()
        self.child_traces.clear()

    def close(self) -> None:
        """Let no further call begin, neither here nor in what recurs below. May be called twice."""
        self.node.stop()

    def _cut(self, text: str) -> str:
        limit = self.limits.result_truncation_limit
        return text if limit is None else text[:limit]


class LocalChildRLMBackend(DirectLMBackend):
    """Recursion in this process: each child is a loop with a REPL of its own, in the thread that asks.

    Children block. Their timeout is cooperative: it interrupts the child's code, and is looked at between its iterations;
    a model call under way is waited for.

    Args:
        chat_fn: makes the model calls of the whole tree.
        runner_factory: makes a child's runner; called like `LocalRLMRunner`, which is the default.
        system_prompt, max_iterations, env_max_iterations_multiplier: for the children.
        depth, limits, node: as for `DirectLMBackend`.
        on_subcall_start: called as ``(depth, model, prompt_preview)``.
        on_subcall_complete: called as ``(depth, model, duration_s, error)``.
    """

    def __init__(
        self,
        chat_fn: ChatFn | ModelClient,
        *,
        runner_factory: Callable[..., Any] | None = None,
        system_prompt: str = RLM_SYSTEM_PROMPT,
        max_iterations: int = 30,
        env_max_iterations_multiplier: int = 5,
        depth: int = 0,
        limits: BackendLimits | None = None,
        on_subcall_start: Callable[..., None] | None = None,
        on_subcall_complete: Callable[..., None] | None = None,
        node: RunNode | None = None,
    ) -> None:
        super().__init__(chat_fn, depth, limits, node=node)
        self.runner_factory = runner_factory or _local_runner
        self.system_prompt = system_prompt
        self.max_iterations = max_iterations
        self.env_max_iterations_multiplier = env_max_iterations_multiplier
        self.on_subcall_start = on_subcall_start
        self.on_subcall_complete = on_subcall_complete

    def recursive_query(self, prompt: str, model: str | None = None, *, context: Any = None) -> str:
        """Give a task to a child and return its answer; at the depth limit, ask the model directly.

        Args:
            prompt: the task.
            model: model for the child's own calls.
            context: what the child finds in its ``context``; the prompt if None.

        Returns:
            the answer, cut at ``result_truncation_limit``; ``Error: …`` if a limit is exceeded or its time is up.

        Raises:
            ChildFailedError: the child ended without an answer.
            Exception: whatever broke the child's run, such as `ModelCallError`.
        """
        checked_prompt(prompt)
        if self.depth + 1 >= self.max_depth:
            return self.query(prompt if context is None else f"{prompt}\n\nContext:\n{context}", model)
        number = self.node.admit_child(self.limits.max_children_total)
        if number is None:
            return "Error: max_children_total exceeded"
        return self._run_child(number, prompt, model, prompt if context is None else context)

    def recursive_query_batched(
        self, prompts: Sequence[str], model: str | None = None, *, context: Any = None
    ) -> list[str]:
        """Give several tasks to children that run side by side, in threads.

        Args:
            prompts: the tasks; those beyond ``max_children_per_batch`` are left out.
            model: model for the children's own calls.
            context: the same context for all, or a list with one entry per prompt.

        Returns:
            the answers in order; a failure is ``Error: …`` in its place.
        """
        checked = checked_prompts(prompts)
        contexts = context if isinstance(context, list) else [context] * len(checked)
        if len(contexts) != len(checked):
            raise UsageMistake(
                f"context has {len(contexts)} entries for {len(checked)} prompts; give one per prompt, or a single object"
            )
        tasks = list(zip(checked, contexts, strict=True))[: self.limits.max_children_per_batch]
        outcomes = run_batch(
            lambda task: self.recursive_query(task[0], model, context=task[1]), tasks, self.limits.max_batch_workers
        )
        return [f"Error: {describe(each)}" if isinstance(each, Exception) else each for each in outcomes]

    def _run_child(self, number: int, prompt: str, model: str | None, context: Any) -> str:
        depth, label, began = self.depth + 1, model or UNNAMED_MODEL, time.monotonic()
        self._tell(self.on_subcall_start, depth, label, prompt[:PREVIEW_CHARS])
        answer, error = None, None
        try:
            answer, error = self._ask_child(number, prompt, model, context)
        except BaseException as failure:
            error = describe(failure)
            raise
        finally:
            duration_s = time.monotonic() - began
            shown = None if answer is None else answer[:PREVIEW_CHARS]
            self.child_traces.append(ChildTrace(depth, duration_s, prompt[:PREVIEW_CHARS], shown, error))
            self._tell(self.on_subcall_complete, depth, label, duration_s, error)
        return f"Error: {error}" if answer is None else answer

    def _ask_child(self, number: int, prompt: str, model: str | None, context: Any) -> tuple[str | None, str | None]:
        """Run a child; return its answer, or why its time was up."""
        child = self.runner_factory(
            self.chat_fn,
            system_prompt=self.system_prompt,
            max_iterations=self.max_iterations,
            max_depth=self.max_depth,
            depth=self.depth + 1,
            env_max_iterations_multiplier=self.env_max_iterations_multiplier,
            max_batch_workers=self.limits.max_batch_workers,
            backend_factory=functools.partial(self._child_backend, number),
            on_subcall_start=self.on_subcall_start,
            on_subcall_complete=self.on_subcall_complete,
        )
        limit, began = self.limits.per_child_timeout_s, time.monotonic()
        timed = {"timeout_s": limit} if limit is not None and takes(child.run, "timeout_s") else {}
        result = child.run(context, prompt, model=model, **timed)
        elapsed = time.monotonic() - began
        if limit is not None and elapsed >= limit:
            return None, f"child timeout after {limit:.3f}s"
        if result.final_answer is None:
            reason = getattr(result, "stop_reason", None)
            if reason == "deadline":  # of a run above
                return None, f"child timeout after {elapsed:.3f}s"
            raise ChildFailedError(f"the child ended without an answer{f' ({reason})' if reason else ''}")
        return self._cut(result.final_answer), None

    def _child_backend(self, number: int, chat_fn: ChatFn | ModelClient, **options: Any) -> LocalChildRLMBackend:
        """Make the backend of a child's runner: the same limits and counts, one level further down."""
        return LocalChildRLMBackend(
            chat_fn,
            runner_factory=self.runner_factory,
            system_prompt=options["system_prompt"],
            max_iterations=options["max_iterations"],
            env_max_iterations_multiplier=options["env_max_iterations_multiplier"],
            depth=options["depth"],
            limits=self.limits,
            on_subcall_start=self.on_subcall_start,
            on_subcall_complete=self.on_subcall_complete,
            node=RunNode(self.node, f"c{number}"),
        )

    @staticmethod
    def _tell(callback: Callable[..., None] | None, *details: Any) -> None:
        if callback is not None:
            try:
                callback(*details)
            except Exception:
                _log.warning("a callback of the user's raised", exc_info=True)


class ManagedChildBackend:
    """The same surface over managed children, which are processes of their own; it can also start them without waiting.

    Args:
        chat_fn: makes the root's own model calls; None for what the configured factory builds.
        managed: the children, or the configuration to make them from (then `close` ends them for good).
        system_prompt: of the children's runs, if they are made here.
    """

    depth = 0

    def __init__(
        self,
        chat_fn: ChatFn | ModelClient | None = None,
        *,
        managed: ManagedChildren | ManagedChildConfig,
        system_prompt: str | None = None,
    ) -> None:
        from rlm_kernel.session.managed import ManagedChildren

        self._owned = isinstance(managed, ManagedChildConfig)
        if isinstance(managed, ManagedChildConfig):
            managed = ManagedChildren(managed, chat_fn=chat_fn, system_prompt=system_prompt)
        self.managed = managed
        config = self.managed.config
        self.max_depth = config.max_depth
        self.limits = BackendLimits(
            max_depth=config.max_depth,
            max_children_total=config.max_children_total,
            max_children_per_batch=config.max_children_per_batch,
            result_truncation_limit=config.result_truncation_limit,
            per_child_timeout_s=config.per_child_timeout_s,
        )
        self._helpers: Mapping[str, Callable[..., Any]] = self.managed.helpers()

    def query(self, prompt: str, model: str | None = None) -> str:
        """Ask the model once. What the call raises comes through."""
        answer: str = self._helpers["llm_query"](prompt, model)
        return answer

    def query_batched(self, prompts: Sequence[str], model: str | None = None) -> list[str]:
        """Ask the model several questions at once. Answers keep the order; a failed one is ``Error: …``."""
        answers: list[str] = self._helpers["llm_query_batched"](prompts, model)
        return answers

    def recursive_query(self, prompt: str, model: str | None = None, **options: Any) -> Any:
        """Give a task to a child; ``blocking=False`` and the other options are those of the namespace's ``rlm_query``."""
        return self._helpers["rlm_query"](prompt, model, **options)

    def recursive_query_batched(self, prompts: Sequence[str], model: str | None = None, **options: Any) -> Any:
        """Give several tasks to children; the options are those of the namespace's ``rlm_query_batched``."""
        return self._helpers["rlm_query_batched"](prompts, model, **options)

    @property
    def child_traces(self) -> list[ChildTrace]:
        """One entry for each child of the root that has ended in this episode, in start order."""
        return [
            ChildTrace(
                status.depth,
                status.elapsed_s,
                status.prompt_preview,
                None if status.result is None else status.result[:PREVIEW_CHARS],
                None if status.state is ChildState.COMPLETED else status.error or str(status.state),
            )
            for status in self.managed.statuses()
            if status.done and status.parent_id is None
        ]

    def close(self) -> None:
        """Stop the children; for good, if they were made here. May be called twice.

        Raises:
            ChildCleanupError: names the processes whose exit could not be confirmed.
        """
        if self._owned:
            self.managed.close()
        else:
            self.managed.finalize()


def _local_runner(*args: Any, **options: Any) -> Any:
    from rlm_kernel.session.local_runner import LocalRLMRunner  # which is built on this module

    return LocalRLMRunner(*args, **options)
