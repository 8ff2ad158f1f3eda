"""One session in one IPython shell: what is alike in our kernel, in a stock one and in a terminal.

Who runs it: the thread that runs a cell (the main one, or a subshell's). It owns the session, its magics, and which
names of ours are in the user's namespace.

How each step can fail: a bad setting (reported with the first cell, the defaults hold: a kernel that does not start
tells nobody why); a name of ours that the user has bound (theirs stays).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rlm_kernel.children.orphans import kill_orphans
from rlm_kernel.errors import ConfigurationError, RLMError
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.jupyter.magics.completion import RLMCompleter
from rlm_kernel.jupyter.views.cards import Cards
from rlm_kernel.jupyter.views.waiting import WaitTables
from rlm_kernel.session.config import RLM, Settings
from rlm_kernel.session.observation import Observer
from rlm_kernel.session.offthread import run_off_thread, wait_here
from rlm_kernel.session.ports import unwatched
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import FinalAnswer

if TYPE_CHECKING:
    import logging

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
    from traitlets.config import Configurable

OBSERVER = "__rlm__"
"""The name under which a harness finds the state of the episode. Not a word that a user's own code would bind."""

_SWEEP_S = 2.0
"""Seconds to wait for orphans of earlier kernels to end."""


class ShellSession:
    """See the module's docstring.

    Args:
        shell: the shell.
        parent: whose configuration is read.
        log: where errors of ours go.
    """

    def __init__(self, shell: InteractiveShell, parent: Configurable, log: logging.Logger) -> None:
        self.shell = shell
        self.log = log
        settings, self._config_error = self._read_settings(parent)
        # A namespace of its own at first: what the user has bound to our names is not overwritten.
        self.rlm = RLMSession(settings, {}, on_warning=lambda line: print(line, file=sys.stderr))
        self._observer = Observer(self.rlm)
        self._magics = RLMMagics(shell, self.rlm)
        self._replaced: dict[tuple[str, str], Any] = {}
        self._register_magics()
        self._completer = RLMCompleter(shell, self.rlm)
        self._completer.register()
        self._waits = WaitTables(shell, self.rlm)
        self.rlm.watch = self._waits.watch
        self._cards = Cards(shell)
        self.furnish()

    def _read_settings(self, parent: Configurable) -> tuple[Settings, ConfigurationError | None]:
        settings, error = Settings.read(RLM(parent=parent))
        if error is not None:
            self.log.error("%s", error)
        return settings, error

    def _register_magics(self) -> None:
        known = self.shell.magics_manager.magics
        for kind, named in self._magics.magics.items():
            for name in named:
                self._replaced[kind, name] = known[kind].get(name)
        self.shell.register_magics(self._magics)

    def start(self) -> None:
        """Start what takes its time in the background: the nursery, if a model is configured, and the sweep."""
        if self.rlm.is_managed:
            self.rlm.prepare()
        self.sweep_in_background()

    def sweep_in_background(self) -> None:
        """Kill what outlived an earlier kernel and its nursery both. Off the main thread: it reads all of the process list."""

        def sweep() -> None:
            orphans, survivors = kill_orphans(_SWEEP_S)
            for orphan in orphans:
                fate = "could not be killed" if orphan.pid in survivors else "was killed"
                self.log.warning("left behind by an earlier kernel: pid %d %s: %s", orphan.pid, fate, orphan.command)

        run_off_thread(sweep)

    # -- the namespace

    def _ours(self) -> dict[str, Any]:
        return {
            **self.rlm.functions,
            "answer": self.rlm.finalization.answer_dict,
            "context": "",
            OBSERVER: self._observer,
        }

    def furnish(self) -> list[str]:
        """Put in what is missing of ours (at first, and after ``%reset``), and hide it from ``%who``.

        Returns:
            the names that the user has bound otherwise: they stay, and are shown.
        """
        namespace = self.rlm.namespace = self.shell.user_ns
        ours = self._ours()
        for name, value in ours.items():
            namespace.setdefault(name, value)
        self.shell.user_ns_hidden.update(ours)
        return [name for name, value in ours.items() if namespace[name] is not value]

    def remove(self) -> None:
        """Take out the magics, and what in the namespace is still ours."""
        namespace, hidden = self.shell.user_ns, self.shell.user_ns_hidden
        for name, value in self._ours().items():
            if namespace.get(name) is value:
                del namespace[name]
            hidden.pop(name, None)
        known = self.shell.magics_manager.magics
        for (kind, name), replaced in self._replaced.items():
            if known[kind].get(name) != self._magics.magics[kind][name]:
                continue
            if replaced is None:
                del known[kind][name]
            else:
                known[kind][name] = replaced
        self.shell.magics_manager.registry.pop(type(self._magics).__name__, None)
        self._completer.unregister()
        self._cards.remove()
        self.rlm.watch = unwatched

    def save_history(self) -> None:
        """Do what IPython does when it exits, in a process that is about to be ended in another way."""
        try:
            self.shell.atexit_operations()
        except Exception:
            self.log.exception("the history may be incomplete")

    # -- cells

    def refusal(self, code: str) -> RLMError | None:
        """Say why a cell may not run, None if it may."""
        if self._config_error is not None and not is_empty(code):
            error, self._config_error = self._config_error, None
            print(f"Configuration ignored: {error}. `%rlm config` shows what holds.", file=sys.stderr)
        failure = self.rlm.cleanup_failure
        return None if failure is None or is_empty(code) or is_rlm_line(code) else failure

    def begin_cell(self) -> None:
        """A cell begins in this thread."""
        self.furnish()
        self.rlm.finalization.begin_cell()

    def end_cell(self, *, success: bool, interrupted: bool) -> None:
        """A cell has ended in this thread: run what follows from it, and return when every exit is confirmed.

        For shells in which nothing else can be held back until then, and no error be reported but by showing it. Ctrl-C
        skips to SIGKILL.

        Args:
            success: whether it ran to its end.
            interrupted: whether it ended in an interrupt.
        """
        final = self.rlm.finalization.end_cell(success=success)
        if final is not None or interrupted:
            self._stop_children(final, interrupted)
        self.end_views()

    def end_views(self) -> None:
        """Everything that a cell led to in this thread is confirmed: what it shows gets its last state."""
        self._waits.end_cell()

    def _stop_children(self, final: FinalAnswer | None, interrupted: bool) -> None:
        verb = self.rlm.close if final is None else self.rlm.finalize
        try:
            report = wait_here(run_off_thread(verb), self.rlm.lifecycle.hasten)
            if interrupted and report.stopped:
                print(report.summary(), file=sys.stderr)
            failure: Exception | None = self.rlm.cleanup_failure
        except Exception as error:
            self.log.exception("the children may not have been stopped")
            failure = error
        if failure is not None:
            print(f"{type(failure).__name__}: {failure}", file=sys.stderr)


def was_interrupted(result: ExecutionResult | None) -> bool:
    """Tell whether a cell ended in an interrupt: in its code, or where IPython compiled its next statement."""
    return result is not None and isinstance(result.error_before_exec or result.error_in_exec, KeyboardInterrupt)


def is_empty(code: str) -> bool:
    """Tell whether a request runs no code."""
    return not code.strip()


def is_rlm_line(code: str) -> bool:
    """Tell whether a cell holds nothing but ``%rlm`` lines."""
    return all(line.split()[0] in ("%rlm", "%rlm?") for line in code.strip().splitlines() if line.strip())
