"""``%rlm``: look at the session, configure it, and run its verbs. A magic parses, makes one call, and shows a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from rlm_kernel.errors import ConfigurationError, RLMError, UsageMistake
from rlm_kernel.jupyter.displays import Table, status_table
from rlm_kernel.session.config import SETTINGS
from rlm_kernel.session.offthread import run_off_thread, wait_here
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_USAGE = (
    "%rlm [status [ID] | model [SPEC] | config [NAME[=VALUE]] | reset | close | cleanup [--abandon] | export ID OUT]"
)

_HELP = {
    "status": "status [ID]: the children, or one of them",
    "model": "model [SPEC]: show or set the model, as provider/model, or demo",
    "config": (
        "config [NAME[=VALUE]]: show all settings, show one, or set one; "
        "client_factory=NAME takes module:callable, or a callable variable of this notebook"
    ),
    "reset": "reset: stop the children and begin a new episode; your variables stay",
    "close": "close: stop the children; results and handles stay usable",
    "cleanup": "cleanup [--abandon]: try again to confirm exits; --abandon goes on without them",
    "export": (
        "export ID OUT.ipynb|OUT.jsonl [--force] [--tree]: write a run to a file; ID is a child, root (the latest run of "
        "%%rlm), an episode, or EPISODE/RUN"
    ),
}


@magics_class
class RLMMagics(Magics):
    """The magics of one session."""

    def __init__(self, shell: InteractiveShell, session: RLMSession) -> None:
        super().__init__(shell)
        self._session = session

    @line_magic
    def rlm(self, line: str) -> Any:
        """Look at the RLM session, configure it, and run its verbs.

        %rlm                          a summary
        %rlm status [ID]              the children, or one of them
        %rlm model [SPEC]             show or set the model: provider/model, or demo
        %rlm config [NAME[=VALUE]]    show all settings, show one, or set one; client_factory=NAME takes
                                      module:callable, or a callable variable of this notebook
        %rlm reset                    stop the children and begin a new episode; your variables stay
        %rlm close                    stop the children; results and handles stay usable
        %rlm cleanup [--abandon]      try again to confirm exits, or go on without them
        %rlm export ID OUT            write a run to OUT.ipynb, which runs again, or to OUT.jsonl
        """
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[str], Any]] = {
            "": self._summary,
            "status": self._status,
            "model": self._model,
            "config": self._config,
            "reset": self._reset,
            "close": self._close,
            "cleanup": self._cleanup,
            "export": self._export,
        }
        if command not in commands:
            raise UsageError(f"%rlm has no {command!r}. {_USAGE}")
        if rest in ("-h", "--help"):
            print(f"%rlm {_HELP.get(command, _USAGE)}")
            return None
        try:
            return commands[command](rest)
        except UsageMistake as error:
            raise UsageError(str(error)) from None

    # -- looking

    def _summary(self, rest: str) -> Table:
        _none(rest, "")
        session = self._session
        statuses = session.supervisor.status()
        live = sum(not status.done for status in statuses)
        final = session.final_answer
        usage = session.usage
        rows = [
            (
                "model",
                session.model_name or "none: type `%rlm model demo` to try things out, or `%rlm model openai/...`",
            ),
            ("episode", session.episode_id),
            ("children", f"{live} live, {len(statuses)} started (limit {session.settings['max_children_total']})"),
            ("usage", f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens"),
            ("final answer", "none yet" if final is None else final.text[:200]),
            ("shared contexts", f"{len(session.held)} held, {session.held.total_bytes:,} bytes"),
            ("files", str(session.run_folder or "none yet")),
        ]
        dropped = session.supervisor.observers.dropped
        if dropped:
            rows.append(("observers", f"{dropped} notifications were dropped: a callback is too slow, or blocked"))
        if session.cleanup_failure is not None:
            rows.append(("cleanup", str(session.cleanup_failure)))
        return Table("RLM session", ("", ""), tuple(rows))

    def _status(self, rest: str) -> Any:
        session = self._session
        if rest:
            return status_table(session.supervisor.status([(rest, None)]), f"child {rest}")
        statuses = session.supervisor.status()
        return status_table(statuses, f"{len(statuses)} children in episode {session.episode_id}")

    def _export(self, rest: str) -> None:
        from rlm_kernel.jupyter.export_command import export_line

        print(export_line(rest, self._session))

    # -- configuring

    def _model(self, rest: str) -> None:
        if rest:
            self._session.configure("model", rest)
            self._session.prepare()
        name = self._session.model_name
        print(
            f"model: {name}"
            if name
            else "no model is configured; type `%rlm model demo` or `%rlm model provider/model`"
        )
        if name == "demo":
            from rlm_kernel.clients.demo import DEMO_NOTICE

            print(DEMO_NOTICE)

    def _config(self, rest: str) -> Table | None:
        session = self._session
        name, equals, text = rest.partition("=")
        name = name.strip()
        if equals:
            text = text.strip()
            if name == "client_factory" and text.isidentifier() and text.lower() != "none":
                self._set_factory(text)
                shown = text
            else:
                shown = repr(session.configure(name, text))
            print(f"{name} = {shown}")
            for warning in session.settings.warnings:
                print(f"note: {warning}")
            return None
        if name and name not in SETTINGS:
            session.settings.set_text(name, "")  # raises, and says which settings there are
        values = session.settings.items()
        names = [name] if name else list(values)
        rows = tuple((n, repr(values[n]), SETTINGS[n].env or "", SETTINGS[n].help) for n in names)
        return Table("Settings; set one with %rlm config NAME=VALUE", ("name", "value", "environment", "meaning"), rows)

    def _set_factory(self, variable: str) -> None:
        """Take a variable of the user's as the client factory: what it is bound to now, not what it is bound to later."""
        namespace = self._session.namespace
        if variable not in namespace:
            raise ConfigurationError(
                "client_factory", variable, "there is no such variable; give module:callable, or the name of a callable"
            )
        factory = namespace[variable]
        if not callable(factory):
            kind = type(factory).__name__
            raise ConfigurationError(
                "client_factory",
                variable,
                f"is of type {kind}, which cannot be called; give a function without arguments that returns a client",
            )
        self._session.configure_value("client_factory", factory)
        self._session.prepare()

    # -- verbs

    def _run(self, verb: Callable[[], CleanupReport]) -> CleanupReport:
        report = wait_here(run_off_thread(verb), self._session.lifecycle.hasten)
        print(report.summary())
        return report

    def _reset(self, rest: str) -> None:
        _none(rest, "reset")
        failure = self._session.cleanup_failure
        self._run(self._session.reset)
        self._raise_failure()
        if failure is None:
            print(f"new episode {self._session.episode_id}")

    def _close(self, rest: str) -> None:
        _none(rest, "close")
        self._run(self._session.close)
        failure = self._session.cleanup_failure
        if failure is not None:
            print(failure)

    def _cleanup(self, rest: str) -> None:
        if rest == "--abandon":
            failure = self._session.lifecycle.abandon()
            print(
                "nothing to abandon" if failure is None else f"abandoned pid {', '.join(map(str, failure.survivors))}"
            )
            return
        _none(rest, "cleanup")
        self._run(self._session.cleanup)
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure: RLMError | None = self._session.cleanup_failure
        if failure is not None:
            raise failure


def _none(rest: str, command: str) -> None:
    if rest:
        raise UsageError(f"%rlm {command} takes no argument, got {rest!r}".replace("  ", " "))
