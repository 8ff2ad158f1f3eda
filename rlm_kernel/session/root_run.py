"""Run the loop in the root's own namespace: a run of its own inside the notebook.

Who runs it: the thread that calls `RootRun.run`, in the kernel the main thread or a subshell's, inside a cell. Its finalization is
its own: it stops only the children that it started (and theirs), the notebook's episode stays open, and ``context``, ``answer``
and the helpers are put back as they were. One runs at a time: the capture of output and the helpers in the namespace are the shell's,
of which there is one.

How it can end: with an answer, without one, by an error of the model's (`ModelCallError`), by an interrupt. In every
case the trajectory so far is on disk, and the children that the run started are stopped and confirmed before this
returns or raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rlm_kernel.credentials import secret_values
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.interpreter import Interpreter
from rlm_kernel.errors import UsageMistake
from rlm_kernel.loop.prompts import PromptFeatures
from rlm_kernel.loop.runner import LoopResult, LoopRunner, RunEvents
from rlm_kernel.loop.trajectory import RunMetadata, TrajectoryWriter
from rlm_kernel.session.helpers import HIDDEN_NAMES, Helpers
from rlm_kernel.session.kept_contexts import describe_kept
from rlm_kernel.session.model_repl import ModelREPL
from rlm_kernel.session.ports import ChildrenPort, ChildRequest
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildStatus, CleanupReport, Usage

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_current: contextvars.ContextVar[RootRun | None] = contextvars.ContextVar("rlm_root_run", default=None)


def current_run() -> RootRun | None:
    """Return the run whose code the calling thread (or task) runs, None outside of all."""
    return _current.get()


class RunUnderWay(UsageMistake):
    """There is a run in this namespace already."""

    def __init__(
        self,
        message: str = (
            "a run of %%rlm is under way in this notebook, and its namespace serves one at a time. Code of the run itself "
            "calls rlm_query(...) for a sub-task; another cell waits for its end, or uses %%rlm --background"
        ),
    ) -> None:
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class RootRunResult:
    """How a run in the root's namespace ended.

    Attributes:
        answer: the answer as text, None if there is none.
        stop_reason: see `rlm_kernel.loop.runner.LoopResult`.
        children: last statuses of the children that the run started (and theirs), all of them ended.
        report: what stopping those that still ran took.
        trajectory_path: the run's JSONL file, empty if none could be written.
        usage: of the run and of those children.
        duration_s: wall-clock seconds.
    """

    answer: str | None
    stop_reason: str
    iterations: int
    children: tuple[ChildStatus, ...]
    report: CleanupReport
    trajectory_path: str
    usage: Usage = Usage()
    duration_s: float = 0.0


class RootRun:
    """One run of the loop on a task over a context, in the shell's namespace. To be run once.

    Args:
        session: whose helpers, settings and children are used.
        shell: the shell that runs the code.
        task: what the model is to do.
        context: what the code finds in ``context``.
        model: model for the loop's own calls, None for the configured one.
        max_iterations: turns, None for the configured number.
        echo: whether the code's output also goes to the streams that were there before.
        on_output: called with each piece of output of the code, on the thread that writes it.
        off_thread: how the stop of the run's children is carried out.

    Attributes:
        functions: the helpers of its code; empty before it runs.
        trajectory_path: the run's JSONL file; empty before it runs, and if none could be written.
        result: how it ended; None before, and if it was broken off. There is one also if the cleanup then failed.
    """

    def __init__(
        self,
        session: RLMSession,
        shell: InteractiveShell,
        task: str,
        *,
        context: Any,
        model: str | None = None,
        max_iterations: int | None = None,
        echo: bool = False,
        on_output: Callable[[str], object] | None = None,
        off_thread: Callable[[Callable[[], CleanupReport]], CleanupReport] = lambda verb: verb(),
    ) -> None:
        self._session = session
        self._shell = shell
        self._task = task
        self._context = context
        self._model = model
        self._turns: int = session.settings["max_iterations"] if max_iterations is None else max_iterations
        self._echo = echo
        self._on_output = on_output
        self._off_thread = off_thread
        self._port = _RecordingPort()
        self.functions: dict[str, Callable[..., Any]] = {}
        self.trajectory_path = ""
        self.result: RootRunResult | None = None

    @property
    def max_iterations(self) -> int:
        """Turns that it may take."""
        return self._turns

    def check(self) -> None:
        """Raise what would keep it from running. Nothing has happened then.

        Raises:
            ChildCleanupError: a failed cleanup blocks the session.
            ModelNotConfigured: no model is configured.
            RunUnderWay: there is a run in this namespace already.
        """
        self._session.check_may_run()
        self._session.models()
        if self._session.root_runs_under_way:
            raise RunUnderWay

    def children(self) -> list[ChildStatus]:
        """Return the children that the run has started so far, and theirs, in start order. Any thread may ask."""
        ours = set(self._port.started)
        found = []
        for status in self._session.supervisor.status():
            if status.id in ours or status.parent_id in ours:
                ours.add(status.id)
                found.append(status)
        return found

    def run(self, events: RunEvents | None = None) -> RootRunResult:
        """Run it.

        Args:
            events: what the caller wants to be told.

        Raises:
            ModelNotConfigured: no model is configured.
            ModelCallError: a model call failed.
            ChildCleanupError: the children could not be confirmed gone.
            RunUnderWay: there is a run in this namespace already.
        """
        self.check()
        under_way = self._session.root_runs_under_way
        try:
            # One step, so that of two threads one gets it; undone by whoever did it, wherever an interrupt comes.
            if under_way.setdefault("run", self) is not self:
                raise RunUnderWay
            began = time.monotonic()
            token = _current.set(self)
            try:
                result, report = self._run(events)
            finally:
                _current.reset(token)
            self.result = self._ended(result, report, time.monotonic() - began)
        finally:
            if under_way.get("run") is self:
                del under_way["run"]
        self._session.check_may_run()
        return self.result

    def _run(self, events: RunEvents | None) -> tuple[LoopResult, CleanupReport]:
        session, shell = self._session, self._shell
        models = session.models()
        finalization = Finalization(lambda: shell.user_ns, lambda: HIDDEN_NAMES)
        port = self._port.over(session.helper_environment.children)
        environment = replace(session.helper_environment, may_start=session.check_managed, children=port)
        functions = self.functions = Helpers(environment, finalization).functions()
        interpreter = Interpreter(shell, echo=self._echo, on_output=self._on_output)
        repl = ModelREPL(interpreter, finalization, models, self._context, functions)
        run_id, self.trajectory_path = session.new_root_run()
        with (
            _run_names(shell.user_ns, {**functions, "context": self._context, "answer": finalization.answer_dict}),
            contextlib.ExitStack() as stack,
        ):
            kept = describe_kept(self._context, repl.context_metadata(), session.run_folder, secret_values(os.environ))
            trajectory = stack.enter_context(self._trajectory(run_id, kept))
            trajectory.write_metadata()
            runner = LoopRunner(
                models,
                repl,
                model_name=self._model,
                max_iterations=self._turns,
                features=_features(session),
                trajectory=trajectory,
                events=events,
            )
            try:
                result = runner.run(self._task)
            finally:
                session.note_root_run(run_id, children=[status.id for status in self.children()])
                report = self._off_thread(self._stop_started)
        return result, report

    def _trajectory(self, run_id: str, context: dict[str, Any]) -> TrajectoryWriter:
        session = self._session
        metadata = RunMetadata(
            root_model=self._model or session.model_name,
            max_depth=session.settings["max_depth"],
            max_iterations=self._turns,
            run_id=run_id,
            episode_id=session.episode_id,
            task=self._task,
            context=context,
        )
        return TrajectoryWriter(
            self.trajectory_path or os.devnull, metadata=metadata, secrets=secret_values(os.environ)
        )

    def _stop_started(self) -> CleanupReport:
        live = [status.id for status in self.children() if not status.done]
        return self._session.lifecycle.run_for("run", live) if live else CleanupReport("run")

    def _ended(self, result: LoopResult, report: CleanupReport, duration_s: float) -> RootRunResult:
        children = self.children()
        return RootRunResult(
            answer=None if result.answer is None else result.answer.text,
            stop_reason=result.stop_reason,
            iterations=result.iterations,
            children=tuple(children),
            report=report,
            trajectory_path=self.trajectory_path,
            usage=sum((status.usage for status in children), result.usage),
            duration_s=duration_s,
        )


def run_in_namespace(
    session: RLMSession,
    shell: InteractiveShell,
    task: str,
    *,
    context: Any,
    events: RunEvents | None = None,
    **options: Any,
) -> RootRunResult:
    """Run the loop on a task over a context, in the shell's namespace: `RootRun` in one call."""
    return RootRun(session, shell, task, context=context, **options).run(events)


def _features(session: RLMSession) -> PromptFeatures:
    max_depth: int = session.settings["max_depth"]
    return PromptFeatures(
        background=max_depth > 1, steering=max_depth > 1, share=max_depth > 1, depth=0, max_depth=max_depth
    )


class _RecordingPort:
    """The root's port, with a record of what was started through it. Everything else goes through.

    By the helpers of a run, so that children which a background child or another cell starts meanwhile are not taken for the run's.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self._below: Callable[[], ChildrenPort]

    def over(self, below: Callable[[], ChildrenPort]) -> Callable[[], ChildrenPort]:
        self._below = below
        return lambda: cast(ChildrenPort, self)

    def start(self, requests: Sequence[ChildRequest]) -> list[ChildStatus]:
        statuses = self._below().start(requests)
        self.started += [status.id for status in statuses]
        return statuses

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._below(), name)


@contextlib.contextmanager
def _run_names(namespace: dict[str, Any], names: dict[str, Any]) -> Iterator[None]:
    """Put a run's names into the namespace, and the previous ones back afterwards."""
    missing = object()
    previous = {name: namespace.get(name, missing) for name in names}
    namespace.update(names)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is missing:
                namespace.pop(name, None)
            else:
                namespace[name] = value
