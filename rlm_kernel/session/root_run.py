"""Run the loop in the root's own namespace: a run of its own inside the notebook.

Who runs it: the thread that calls `run_in_namespace`, in the kernel the main thread, inside a cell. Its finalization is
its own: it stops only the children that it started, the notebook's episode stays open, and ``context``, ``answer`` and
the helpers are put back as they were.

How it can end: with an answer, without one, by an error of the model's (`ModelCallError`), by an interrupt. In every
case the trajectory so far is on disk, and the children that the run started are stopped and confirmed before this
returns or raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlm_kernel.credentials import secret_values
from rlm_kernel.environment.finalization import Finalization
from rlm_kernel.environment.interpreter import Interpreter
from rlm_kernel.loop.prompts import PromptFeatures
from rlm_kernel.loop.runner import LoopResult, LoopRunner, RunEvents
from rlm_kernel.loop.trajectory import RunMetadata, TrajectoryWriter
from rlm_kernel.session.helpers import HIDDEN_NAMES, Helpers
from rlm_kernel.session.kept_contexts import describe_kept
from rlm_kernel.session.model_repl import ModelREPL
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildStatus, CleanupReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@dataclass(frozen=True, slots=True)
class RootRunResult:
    """How a run in the root's namespace ended.

    Attributes:
        answer: the answer as text, None if there is none.
        stop_reason: see `rlm_kernel.loop.runner.LoopResult`.
        children: last statuses of the children that the run started, all of them ended.
        report: what stopping those that still ran took.
        trajectory_path: the run's JSONL file, empty if none could be written.
    """

    answer: str | None
    stop_reason: str
    iterations: int
    children: tuple[ChildStatus, ...]
    report: CleanupReport
    trajectory_path: str


def run_in_namespace(
    session: RLMSession,
    shell: InteractiveShell,
    task: str,
    *,
    context: Any,
    model: str | None = None,
    max_iterations: int | None = None,
    echo: bool = False,
    events: RunEvents | None = None,
    off_thread: Callable[[Callable[[], CleanupReport]], CleanupReport] = lambda verb: verb(),
) -> RootRunResult:
    """Run the loop on a task over a context, in the shell's namespace.

    Args:
        session: whose helpers, settings and children are used.
        shell: the shell that runs the code.
        task: what the model is to do.
        context: what the code finds in ``context``.
        model: model for the loop's own calls, None for the configured one.
        max_iterations: turns, None for the configured number.
        echo: whether the code's output also goes to the streams that were there before.
        events: what the caller wants to be told.
        off_thread: how the stop of the run's children is carried out.

    Raises:
        ModelNotConfigured: no model is configured.
        ModelCallError: a model call failed.
        ChildCleanupError: the children could not be confirmed gone.
    """
    session.check_may_run()
    models = session.models()
    finalization = Finalization(lambda: shell.user_ns, lambda: HIDDEN_NAMES)
    environment = replace(session.helper_environment, may_start=session.check_managed)
    functions = Helpers(environment, finalization).functions()
    interpreter = Interpreter(shell, echo=echo)
    repl = ModelREPL(interpreter, finalization, models, context, functions)
    before = {status.id for status in session.supervisor.status()}
    run_id, path = session.new_root_run()
    turns = session.settings["max_iterations"] if max_iterations is None else max_iterations
    with (
        _run_names(shell.user_ns, {**functions, "context": context, "answer": finalization.answer_dict}),
        contextlib.ExitStack() as stack,
    ):
        kept = describe_kept(context, repl.context_metadata(), session.run_folder, secret_values(os.environ))
        trajectory = stack.enter_context(_trajectory(session, run_id, path, turns, task, kept))
        trajectory.write_metadata()
        runner = LoopRunner(
            models,
            repl,
            model_name=model,
            max_iterations=turns,
            features=_features(session),
            trajectory=trajectory,
            events=events,
        )
        try:
            result = runner.run(task)
        finally:
            session.note_root_run(run_id, children=[status.id for status in _started(session, before)])
            report = off_thread(lambda: _stop_started(session, before))
    session.check_may_run()
    return _result(session, result, before, report, path)


def _features(session: RLMSession) -> PromptFeatures:
    max_depth: int = session.settings["max_depth"]
    return PromptFeatures(
        background=max_depth > 1, steering=max_depth > 1, share=max_depth > 1, depth=0, max_depth=max_depth
    )


def _trajectory(
    session: RLMSession, run_id: str, path: str, turns: int, task: str, context: dict[str, Any]
) -> TrajectoryWriter:
    metadata = RunMetadata(
        root_model=session.model_name,
        max_depth=session.settings["max_depth"],
        max_iterations=turns,
        run_id=run_id,
        episode_id=session.episode_id,
        task=task,
        context=context,
    )
    return TrajectoryWriter(path or os.devnull, metadata=metadata, secrets=secret_values(os.environ))


def _started(session: RLMSession, before: set[str]) -> list[ChildStatus]:
    return [status for status in session.supervisor.status() if status.id not in before]


def _stop_started(session: RLMSession, before: set[str]) -> CleanupReport:
    live = [status.id for status in _started(session, before) if not status.done]
    return session.lifecycle.run_for("run", live) if live else CleanupReport("run")


def _result(
    session: RLMSession, result: LoopResult, before: set[str], report: CleanupReport, path: str
) -> RootRunResult:
    return RootRunResult(
        answer=None if result.answer is None else result.answer.text,
        stop_reason=result.stop_reason,
        iterations=result.iterations,
        children=tuple(_started(session, before)),
        report=report,
        trajectory_path=path,
    )


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
