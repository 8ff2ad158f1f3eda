"""Run the loop in this process, without a kernel: `LocalRLMRunner`.

Who runs it: the thread that calls `LocalRLMRunner.run`. The code of a run is executed in that thread, in a shell of the
run's own. Children are further runs of the same kind in the same process, or, with ``managed=``, supervised processes.

What it owns: for the length of a run its shell; until `close` its managed children. Each run is an episode.

How a run can end: with an answer, without one, at its deadline, or by what it raises (the chat function's own exception, an
interrupt). However it ends, its shell is closed, what recurs below it makes no further call, and its managed children
are stopped and their exits confirmed before this returns or raises. If that fails, `ChildCleanupError` is raised,
``last_result`` holds what the run had come to, and the next run is refused until the exits are confirmed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlm_kernel.clients.base import ModelClient
from rlm_kernel.closing import ClosesOnExit
from rlm_kernel.credentials import secret_values
from rlm_kernel.environment.queries import query_helpers
from rlm_kernel.errors import ConfigurationError, EpisodeClosing, UsageMistake
from rlm_kernel.loop.prompts import MAX_TASK_CHARS, RLM_SYSTEM_PROMPT, PromptFeatures
from rlm_kernel.loop.runner import LoopResult, LoopRunner, RunEvents
from rlm_kernel.loop.trajectory import IterationRecord, RunMetadata, TrajectoryWriter
from rlm_kernel.session.backends import BackendLimits, LocalChildRLMBackend, ManagedChildBackend
from rlm_kernel.session.controller import managed_config
from rlm_kernel.session.local_files import trajectory_path, written_down
from rlm_kernel.session.local_repl import open_local_repl
from rlm_kernel.session.models import ModelAccess
from rlm_kernel.session.queries import ChatFn, chat_client, checked_prompt
from rlm_kernel.session.runtree import RunNode
from rlm_kernel.values import FinalAnswer, ManagedChildConfig, Message, Usage, _check_count, _check_seconds

if TYPE_CHECKING:
    from rlm_kernel.session.managed import ManagedChildren


@dataclass(frozen=True, slots=True)
class RLMRunResult:
    """How a run ended.

    Attributes:
        final_answer: the answer as text, None if there is none.
        messages: the whole conversation, the last reply included.
        iterations: turns made; ``max_iterations`` if they ran out.
        depth: of this run.
        child_traces: what became of its children (`rlm_kernel.session.backends.ChildTrace`).
        usage: model calls and tokens of this run and of everything below it.
        stop_reason: see `rlm_kernel.loop.runner.LoopResult`.
        trajectory_path: the run's JSONL file; empty if none was written. With ``managed=`` one always is, else where the
            environment variable ``RLM_RUN_DIR`` is set.
    """

    final_answer: str | None
    messages: list[Message]
    iterations: int
    depth: int
    child_traces: list[Any] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    stop_reason: str = ""
    trajectory_path: str = ""


@dataclass(frozen=True, slots=True)
class _World:
    """What one run works with."""

    functions: Mapping[str, Callable[..., Any]]
    backend: Any
    models: ModelAccess
    features: PromptFeatures
    node: RunNode
    check_open: Callable[[], None]
    usage: Callable[[], Usage]
    run_id: str
    trajectory_path: str = ""


class LocalRLMRunner(ClosesOnExit):
    """Runs tasks over contexts in this process. See the module's docstring.

    Runs may go on side by side in several threads; with ``managed`` only one at a time.

    Args:
        llm_chat_fn: ``f(messages, model)`` or ``f(messages)``, or a client: makes the run's model calls and, without
            ``managed``, those of everything below it.
        system_prompt: one of the two constants (rendered for the helpers that are there) or a text of your own.
        max_iterations: turns of each run.
        max_depth: children exist at depths 1 … ``max_depth - 1``; with ``managed`` its own value counts.
        depth: of the runs that this runner makes.
        env_max_iterations_multiplier: how many blocks of code a run may run, in multiples of ``max_iterations``.
        max_batch_workers: model calls or children of one batch that are under way at once.
        backend_factory: called as ``(llm_chat_fn, system_prompt=, max_iterations=, depth=,
            env_max_iterations_multiplier=)`` for each run; returns a `RecursiveBackend`.
        max_children_total, max_children_per_batch, result_truncation_limit, per_child_timeout_s: see `BackendLimits`.
        on_subcall_start: called as ``(depth, model, prompt_preview)``.
        on_subcall_complete: called as ``(depth, model, duration_s, error)``.
        managed: have children be supervised processes, which may also run in the background.
        verbose: whether each iteration is told on the process's stderr.

    Attributes:
        last_result: what the last run came to, also if its cleanup then failed.

    Raises:
        ConfigurationError: names the argument and its value (also a `ValueError`).
    """

    def __init__(
        self,
        llm_chat_fn: ChatFn | ModelClient,
        *,
        system_prompt: str = RLM_SYSTEM_PROMPT,
        max_iterations: int = 30,
        max_depth: int = 2,
        depth: int = 0,
        env_max_iterations_multiplier: int = 5,
        max_batch_workers: int = 8,
        backend_factory: Callable[..., Any] | None = None,
        max_children_total: int | None = None,
        max_children_per_batch: int | None = None,
        result_truncation_limit: int | None = None,
        per_child_timeout_s: float | None = None,
        on_subcall_start: Callable[..., None] | None = None,
        on_subcall_complete: Callable[..., None] | None = None,
        managed: ManagedChildConfig | None = None,
        verbose: bool = False,
    ) -> None:
        if managed is not None and backend_factory is not None:
            raise ConfigurationError(
                "backend_factory", backend_factory, "cannot be combined with managed=, which has a backend of its own"
            )
        if managed is not None and depth != 0:
            raise ConfigurationError(
                "depth", depth, "must be 0 with managed=: its children run in processes of their own"
            )
        _check_count("max_iterations", max_iterations, minimum=1)
        _check_count("depth", depth, minimum=0)
        _check_count("env_max_iterations_multiplier", env_max_iterations_multiplier, minimum=1)
        self.llm_chat_fn = llm_chat_fn
        self.system_prompt = system_prompt
        self.max_iterations = max_iterations
        self.depth = depth
        self.env_max_iterations_multiplier = env_max_iterations_multiplier
        self.backend_factory = backend_factory or self._make_backend
        self.limits = BackendLimits(
            max_depth=max_depth,
            max_batch_workers=max_batch_workers,
            max_children_total=max_children_total,
            max_children_per_batch=max_children_per_batch,
            result_truncation_limit=result_truncation_limit,
            per_child_timeout_s=per_child_timeout_s,
        )
        self.on_subcall_start = on_subcall_start
        self.on_subcall_complete = on_subcall_complete
        callbacks = {"on_subcall_start": on_subcall_start, "on_subcall_complete": on_subcall_complete}
        self.managed = None if managed is None else managed_config(managed, self.limits, **callbacks)
        self.verbose = verbose
        self.last_result: RLMRunResult | None = None
        self._client = chat_client(llm_chat_fn)
        self._children: ManagedChildren | None = None
        self._lock = threading.Lock()
        self._active: set[RunNode] = set()
        self._one_managed_run = threading.Lock()
        self._closed = False

    # -- running

    def run(
        self, context: Any, task_prompt: str, *, model: str | None = None, timeout_s: float | None = None
    ) -> RLMRunResult:
        """Run a task to its answer.

        Args:
            context: what the code finds in ``context``; any object.
            task_prompt: what the model is to do.
            model: passed to the run's own model calls.
            timeout_s: seconds after which the run's code is interrupted and no further iteration begins; a model call
                under way is waited for.

        Returns:
            the answer, and how it came about.

        Raises:
            EpisodeClosing: the runner was closed, before or meanwhile.
            ChildCleanupError: managed children could not be confirmed gone; ``last_result`` holds what the run came to.
            Exception: whatever the chat function raised.
        """
        checked_prompt(task_prompt, "task_prompt")
        if timeout_s is not None:
            _check_seconds("timeout_s", timeout_s, minimum=0.0, exclusive=True)
        run = self._run_managed if self.managed is not None else self._run_locally
        return run(context, task_prompt, model, timeout_s)

    def _run_locally(self, context: Any, task: str, model: str | None, timeout_s: float | None) -> RLMRunResult:
        backend = self.backend_factory(
            self.llm_chat_fn,
            system_prompt=self.system_prompt,
            max_iterations=self.max_iterations,
            depth=self.depth,
            env_max_iterations_multiplier=self.env_max_iterations_multiplier,
        )
        node = getattr(backend, "node", None)
        if not isinstance(node, RunNode):  # a backend of the user's own
            node = RunNode()
        with self._running(node), written_down(node, task, self._client_name) as note_answer:
            node.limit_time(timeout_s)
            world = _World(
                functions=query_helpers(
                    backend.query, backend.query_batched, backend.recursive_query, backend.recursive_query_batched
                ),
                backend=backend,
                models=ModelAccess(lambda: self._client, meter=node),
                features=PromptFeatures(
                    depth=self.depth, max_depth=getattr(backend, "max_depth", self.limits.max_depth)
                ),
                node=node,
                check_open=node.check,
                usage=lambda: node.usage,
                run_id=node.name,
                trajectory_path=trajectory_path(node),
            )
            result = self._drive(world, context, task, model)
            note_answer(result.final_answer)
        return result

    def _run_managed(self, context: Any, task: str, model: str | None, timeout_s: float | None) -> RLMRunResult:
        from rlm_kernel.session.child_run import features

        if not self._one_managed_run.acquire(blocking=False):
            raise UsageMistake("a run is under way; with managed= a runner makes one run at a time: use one per thread")
        try:
            node = RunNode()
            with self._running(node):
                managed = self._managed_children()
                managed.begin_episode()
                run_id, path = managed.session.new_root_run()
                answer: FinalAnswer | None = None
                try:
                    node.limit_time(timeout_s)
                    world = _World(
                        functions=managed.helpers(),
                        backend=ManagedChildBackend(managed=managed),
                        models=managed.models,
                        features=features(0, managed.config.max_depth),
                        node=node,
                        check_open=node.check,
                        usage=lambda: managed.usage,
                        run_id=run_id,
                        trajectory_path=path,
                    )
                    result = self._drive(world, context, task, model)
                    if result.final_answer is not None:
                        answer = FinalAnswer(result.final_answer)
                finally:
                    try:
                        managed.session.note_root_run(run_id, children=[status.id for status in managed.statuses()])
                    finally:
                        managed.finalize(answer)
                # Only now: what its children have come to is settled.
                result = self.last_result = replace(
                    result, child_traces=world.backend.child_traces, usage=managed.usage
                )
                return result
        finally:
            self._one_managed_run.release()

    def _drive(self, world: _World, context: Any, task: str, model: str | None) -> RLMRunResult:
        """Run the loop."""
        long = len(task) > MAX_TASK_CHARS and context is not task
        with (
            open_local_repl(
                context,
                world.functions,
                world.models,
                task=task if long else None,
                max_blocks=self.max_iterations * self.env_max_iterations_multiplier,
                deadline=lambda: world.node.deadline,
            ) as repl,
            self._trajectory(world, task) as trajectory,
        ):
            loop = LoopRunner(
                world.models,
                repl,
                model_name=model,
                max_iterations=self.max_iterations,
                features=world.features,
                system_prompt=self.system_prompt,
                trajectory=trajectory,
                cooperative_deadline=world.node.deadline,
                max_reminders=self.max_iterations,
                task_variable="task" if long else "context",
                events=RunEvents(
                    before_model_call=lambda messages: _unless_closed(world, messages), on_iteration=self._tell
                ),
            )
            result = self.last_result = self._result(world, loop.run(task))
            return result

    def _result(self, world: _World, result: LoopResult) -> RLMRunResult:
        return RLMRunResult(
            final_answer=None if result.answer is None else result.answer.text,
            messages=result.messages,
            iterations=result.iterations,
            depth=self.depth,
            child_traces=list(getattr(world.backend, "child_traces", ())),
            usage=world.usage(),
            stop_reason=result.stop_reason,
            trajectory_path=world.trajectory_path,
        )

    def _tell(self, record: IterationRecord) -> None:
        if self.verbose and sys.__stderr__ is not None:
            # Past sys.stderr: a child's lines would become output of the code that asked for it.
            print(
                f"[depth={self.depth}] iteration={record.iteration} code_blocks={len(record.blocks)} "
                f"seconds={record.duration_s:.1f}",
                file=sys.__stderr__,
            )

    def _trajectory(self, world: _World, task: str) -> TrajectoryWriter:
        metadata = RunMetadata(
            root_model=self._client_name,
            max_depth=world.features.max_depth,
            max_iterations=self.max_iterations,
            run_id=world.run_id,
            parent_id=None if world.node.parent is None else world.node.parent.name,
            depth=self.depth,
            task=task,
        )
        return TrajectoryWriter(
            world.trajectory_path or os.devnull, metadata=metadata, secrets=secret_values(os.environ)
        )

    @property
    def _client_name(self) -> str:
        return getattr(self.llm_chat_fn, "__qualname__", type(self.llm_chat_fn).__name__)

    # -- parts

    def _make_backend(self, chat_fn: ChatFn | ModelClient, **options: Any) -> LocalChildRLMBackend:
        return LocalChildRLMBackend(
            chat_fn,
            limits=self.limits,
            on_subcall_start=self.on_subcall_start,
            on_subcall_complete=self.on_subcall_complete,
            **options,
        )

    def _managed_children(self) -> ManagedChildren:
        from rlm_kernel.session.managed import ManagedChildren

        with self._lock:
            self._check_open()
            if self._children is None:
                assert self.managed is not None
                self._children = ManagedChildren(
                    self.managed, chat_fn=self.llm_chat_fn, system_prompt=self.system_prompt
                )
            return self._children

    @contextlib.contextmanager
    def _running(self, node: RunNode) -> Iterator[None]:
        """Note a run while it goes on. When it has ended, nothing of it makes a further call."""
        with self._lock:
            self._check_open()
            self._active.add(node)
        try:
            yield
        finally:
            node.stop()
            with self._lock:
                self._active.discard(node)

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeClosing("this runner was closed; make a new one")

    # -- the end

    def close(self) -> None:
        """End runs that go on in other threads at their next model call, and stop the managed children, for good.

        May be called twice, and from any thread.

        Raises:
            ChildCleanupError: names the processes whose exit could not be confirmed; call it again to retry.
        """
        with self._lock:
            self._closed = True
            active, children = list(self._active), self._children
        for node in active:
            node.stop()
        if children is not None:
            children.close()


def _unless_closed(world: _World, messages: list[Message]) -> list[Message]:
    world.check_open()
    return messages
