"""``%%rlm``: run the loop on the text of a cell, in the notebook's namespace, and show each iteration as it happens.

Who runs it: the thread that runs the cell, the main one or a subshell's. While a model call or a block of code is under way, threads
"rlm-view" (see `views.live`) show that something happens; everything else is shown by the cell's own thread, between two steps of the loop.

What it owns for the length of a run: the views, and the session's hook for waits, so that a wait of the run's code shows no second table.

How it can end: with an answer; without one (`RunFailed`); by an error of the loop's, shown in one line; by an interrupt, which keeps what
was done. In each case the closing view says what is left, and nothing that the run started lives on. What keeps a run from beginning is one
line, and nothing was run then.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from rlm_kernel.errors import RLMError, UsageMistake
from rlm_kernel.jupyter.cell_arguments import Request, parser, read_request
from rlm_kernel.jupyter.cell_views import RunViews
from rlm_kernel.jupyter.run_command import RunFailed
from rlm_kernel.jupyter.views.iteration import Answer, Closing, Note
from rlm_kernel.jupyter.views.surfaces import request_of, wants_no_views
from rlm_kernel.loop.prompts import QueryMetadata
from rlm_kernel.session.helpers import HIDDEN_NAMES
from rlm_kernel.session.offthread import run_off_thread, wait_here
from rlm_kernel.session.root_run import RootRun, current_run
from rlm_kernel.values import ChildStatus

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rlm_kernel.session.handles import ChildHandle
    from rlm_kernel.session.session import RLMSession

_LAST_RESULTS = ("_", "__", "___")
_NAMES_SHOWN = 30

__all__ = ["parser", "run_cell"]

_ENDED = {
    "final": "answered",
    "final_in_reply": "answered",
    "exhausted": "answered when asked for the last time",
    "exhausted_fallback": "no FINAL(...) came: the last reply, or the draft, is taken for the answer",
    "no_answer": "no answer",
    "deadline": "no answer: the time was up",
}


def run_cell(session: RLMSession, shell: InteractiveShell, line: str, body: str) -> Answer | ChildHandle | None:
    """Run the loop on a cell's text.

    Args:
        session: whose model, settings and children are used.
        shell: in whose namespace it runs.
        line: what stands behind ``%%rlm``; see `parser`.
        body: the task.

    Returns:
        the answer, to be shown as the cell's value; with ``--background`` the handle; None for ``--help``.

    Raises:
        UsageError: a user's mistake. Nothing was run.
        RLMError: what went wrong; it is shown in one line.
        KeyboardInterrupt: the cell was interrupted.
    """
    try:
        args = parser.parse_argstring(line)
        if args.help:
            print(parser.format_help().replace("::\n\n  ", "", 1))
            return None
        session.check_may_run()
        request = read_request(session, shell, args, body)
        if request.background:
            return _start_child(session, shell, request)
        return _Cell(session, shell, request).run()
    except UsageMistake as error:
        raise UsageError(f"%%rlm: {error}") from None
    except UsageError:
        raise
    except BaseException as error:
        _show_short(error)
        raise


def _show_short(error: BaseException) -> None:
    """Let IPython show an error without the frames that lie between the cell and the model's server."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, RLMError | KeyboardInterrupt):
        text += f" (raised in {frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"
    with contextlib.suppress(AttributeError):
        error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]


def _start_child(session: RLMSession, shell: InteractiveShell, request: Request) -> ChildHandle:
    """Start the task as a child, as ``rlm_query(..., blocking=False)`` does."""
    inside = current_run()
    functions = session.functions if inside is None else inside.functions  # a child of a run ends with that run
    handle: ChildHandle = functions["rlm_query"](request.task, request.model, blocking=False, context=request.context)
    if request.into is not None:
        shell.user_ns[request.into] = handle
    finds = "its task" if request.context is None else f"what you gave it ({_described(request.context)})"
    where = f"`{request.into}`" if request.into is not None else "`_`, until the next value"
    note = Note(
        f"{handle.id} was started in the background. Its `context` is {finds}; it does not see the notebook's variables. "
        f"Its handle is in {where}."
    )
    if not wants_no_views(request_of(shell)):
        shell.display_pub.publish(note.bundle())
    return handle


def _described(context: Any) -> str:
    if isinstance(context, str) and not context:
        return "empty"
    about = QueryMetadata.of(context)
    return f"{about.context_type}, {about.context_total_length:,} characters" if context is not None else "None"


class _Cell:
    """One run in the notebook's namespace, with what is shown of it."""

    def __init__(self, session: RLMSession, shell: InteractiveShell, request: Request) -> None:
        self._session = session
        self._shell = shell
        self._request = request
        self._run = RootRun(
            session,
            shell,
            request.task,
            context=request.context,
            model=request.model,
            max_iterations=request.max_iterations,
            on_output=lambda text: self._views.on_output(text),
            off_thread=lambda verb: wait_here(run_off_thread(verb), session.lifecycle.hasten),
        )
        self._views = RunViews(session, shell, self._run, _label(session, request.model))

    def run(self) -> Answer:
        self._run.check()
        namespace = self._shell.user_ns
        before = dict(namespace)
        began = time.monotonic()
        error: BaseException | None = None
        try:
            with _no_table_of_waits(self._session), self._views.shown():
                self._views.begin(_described(self._request.context))
                self._run.run(self._views.events())
        except BaseException as broken:
            error = broken
        # A block that counts in `_` must not keep IPython from putting the next value there.
        namespace.update({name: before[name] for name in _LAST_RESULTS if name in before})
        names = _changes(before, namespace)
        result = self._run.result
        answer = None if result is None or result.answer is None else result.answer
        if answer is not None and self._request.into is not None:
            namespace[self._request.into] = answer
        self._views.publish(self._closing(error, names, time.monotonic() - began))
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback holds this frame
        if answer is None:
            assert result is not None
            raise RunFailed(
                f"the run ended without an answer ({result.stop_reason}, {_counted(result.iterations, 'iteration')} of at most "
                f"{self._run.max_iterations}). Give it more turns (%%rlm --max-iterations {2 * self._run.max_iterations}), or a "
                "smaller task"
            )
        return Answer(answer)

    def _closing(self, error: BaseException | None, names: Mapping[str, list[str]], duration_s: float) -> Closing:
        result, children = self._run.result, self._run.children()
        iterations = self._views.iterations
        if result is not None:
            head = _ENDED.get(result.stop_reason, result.stop_reason)
            facts = [_counted(result.iterations, "iteration")]
            if isinstance(error, RLMError):
                head += ", but what it started could not be stopped"
        else:
            how = "interrupted" if isinstance(error, KeyboardInterrupt) else "broken off"
            head, facts = f"{how} after {_counted(iterations, 'iteration')}", []
        usage = self._views.usage + sum((child.usage for child in children), type(self._views.usage)())
        facts += [f"{duration_s:.1f} s", _counted(usage.calls, "model call")]
        if usage.total_tokens:
            facts.append(f"{usage.total_tokens:,} tokens")
        if children:
            facts.append(_children(children))
        so_far = "" if result is not None else " so far"
        lines = [(f"{what}{so_far}", _listed(which)) for what, which in names.items() if which]
        if result is not None and result.answer is not None and self._request.into is not None:
            lines.append(("the answer is in", self._request.into))
        if self._run.trajectory_path:
            lines.append(("trajectory", self._run.trajectory_path))
        return Closing(head, tuple(facts), tuple(lines))


def _label(session: RLMSession, model: str | None) -> str:
    name = session.model_name or ""
    if name == "demo":
        return "demo (a rule-based stand-in)"
    return model or name


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the user's that were bound, rebound and removed."""
    own = [name for name in after if _is_users(name)]
    return {
        "bound": [name for name in own if name not in before],
        "rebound": [name for name in own if name in before and after[name] is not before[name]],
        "removed": [name for name in before if _is_users(name) and name not in after],
    }


def _is_users(name: object) -> bool:
    return isinstance(name, str) and not name.startswith("_") and name not in HIDDEN_NAMES


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _children(children: list[ChildStatus]) -> str:
    states = Counter(str(child.state) for child in children)
    how = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{len(children)} {'child' if len(children) == 1 else 'children'} ({how})"


@contextlib.contextmanager
def _no_table_of_waits(session: RLMSession) -> Iterator[None]:
    """Let waits show nothing of their own: the run has one table for all its children."""
    previous: Callable[..., Any] = session.watch
    session.watch = lambda *_, **__: contextlib.nullcontext()
    try:
        yield
    finally:
        session.watch = previous
