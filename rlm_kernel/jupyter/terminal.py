"""The lifecycle of a session in IPython in a terminal (or in any shell without an IPython kernel), by the shell's
events.

Who runs it: everything here runs on the main thread, except `_on_end_signal`, which runs on "rlm-signals" (see
`exits`). It owns the exit hooks and, while the session lasts, the handlers of SIGTERM and SIGHUP.

What is confirmed when. A cell that finalizes, or ends in Ctrl-C, has its children stopped before the prompt comes
back; Ctrl-C meanwhile skips to SIGKILL. Leaving IPython (``exit``, Ctrl-D, the end of a script) stops them before the
interpreter waits for threads of the user's, who may be waiting for children. SIGTERM and SIGHUP stop them, and then
the process ends with 128 + signal.

How each step can fail: children are left (the error is shown, and cells other than ``%rlm`` lines are refused; after
the end of IPython the nursery goes on killing, and the exit code is 1); the prompt's event loop takes the wake-up
descriptor (the handler, which then runs as soon as the main thread gets to it, writes to the same socket); the main
thread does not leave its cell or its prompt (`exits.LastResort`).
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from IPython.core.error import InputRejected

from rlm_kernel.errors import RLMError
from rlm_kernel.jupyter.exits import EndSignals, LastResort, end_process, flush_output
from rlm_kernel.jupyter.interrupts import signal_main_thread
from rlm_kernel.jupyter.shell_session import ShellSession, was_interrupted
from rlm_kernel.session.offthread import run_off_thread, wait_here
from rlm_kernel.values import CleanupReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell


class CellRefused(InputRejected):
    """A cell may not run. Shown by its text alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self.__cause__).__name__}: {self}"]


class TerminalAttachment:
    """See the module's docstring.

    Args:
        shell: the shell.
        cells: its session.
    """

    def __init__(self, shell: InteractiveShell, cells: ShellSession) -> None:
        self.shell = shell
        self.cells = cells
        self.rlm = cells.rlm
        self.exit_code = 0
        self._signals = EndSignals(self._on_end_signal)
        self._last_resort = LastResort(lambda: self.exit_code, self._leave_terminal)
        self._gate = _Gate(self._refusal_of_this_cell)
        self._cell: ExecutionInfo | None = None  # the outermost cell that runs
        self._terminal = _terminal_mode()
        self._leave: Callable[[], None] | None = None
        self._stopping: Future[CleanupReport] | None = None
        self._pid = os.getpid()

    # -- attaching

    def attach(self) -> None:
        """Listen to the shell's events, and take the end signals over."""
        self.shell.events.register("pre_run_cell", self._begin_cell)
        self.shell.events.register("post_run_cell", self._end_cell)
        self.shell.ast_transformers.append(self._gate)
        self._leave = getattr(self.shell, "_atexit_once", None)
        if self._leave is not None:
            # Called at the end of the main loop, where threads can still be started and joined; the exit hook comes later.
            self.shell._atexit_once = self._leave_shell  # type: ignore[method-assign]
        self._signals.install()
        # The cell that loads us has begun already, if there is one; its end is told all the same.
        self.cells.begin_cell()

    def detach(self) -> None:
        """Undo what `attach` did."""
        self.shell.events.unregister("pre_run_cell", self._begin_cell)
        self.shell.events.unregister("post_run_cell", self._end_cell)
        with contextlib.suppress(ValueError):
            self.shell.ast_transformers.remove(self._gate)
        if self.shell.__dict__.get("_atexit_once") == self._leave_shell:
            del self.shell.__dict__["_atexit_once"]
        self._signals.uninstall()

    # -- cells

    def _begin_cell(self, info: ExecutionInfo) -> None:
        if self._cell is not None:
            return  # a cell that a cell runs
        self._cell = info
        self._signals.refresh()
        self.cells.begin_cell()

    def _refusal_of_this_cell(self) -> RLMError | None:
        return None if self._cell is None else self.cells.refusal(self._cell.raw_cell or "")

    def _end_cell(self, result: ExecutionResult | None) -> None:
        if self._cell is not None and result is not None and not _is_of(result, self._cell):
            return
        self._cell = None
        with self._hastening():
            self.cells.end_cell(
                success=result is not None and result.success,
                interrupted=was_interrupted(result) and self._stopping is None,
            )

    @contextlib.contextmanager
    def _hastening(self) -> Iterator[None]:
        """Have Ctrl-C skip to SIGKILL, wherever in the block it comes. Nothing in it holds a lock that this needs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, lambda *_: self.rlm.lifecycle.hasten())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # -- leaving

    def _leave_shell(self) -> None:
        if os.getpid() == self._pid:
            self._shut_down()
        if self._leave is not None:
            self._leave()

    def _shut_down(self) -> None:
        """Stop everything for good, or wait until a signal has done so. Later calls find nothing to do."""
        with self._hastening():
            if self._stopping is None:
                self._stopping = run_off_thread(lambda: self.rlm.shutdown("exit"))
            report = wait_here(self._stopping, self.rlm.lifecycle.hasten)
        if not report.ok and not self.exit_code:
            self.exit_code = 1
            print(report.summary(), file=sys.stderr)

    def at_exit(self) -> None:
        """The interpreter ends."""
        if os.getpid() != self._pid:
            return
        self._last_resort.unwound()
        self._shut_down()
        if self.exit_code:
            self.cells.save_history()
            end_process(self.exit_code)

    def _on_end_signal(self, signum: int) -> None:
        """Serve SIGTERM or SIGHUP. On the thread "rlm-signals"."""
        self.exit_code = 128 + signum
        self._last_resort.start()
        stopping = self._stopping = Future()
        self.rlm.lifecycle.begin()
        # First: a cell that waits for children is to end, not to go on without them. The main thread then waits for us.
        self._leave_prompt_or_cell()
        try:
            report = self.rlm.shutdown("finalize", begun=True)
            if not report.ok:
                self.exit_code = 1
                print(report.summary(), file=sys.__stderr__, flush=True)
        except Exception:
            self.cells.log.exception("the children may not have been stopped")
            self.exit_code = 1
            report = CleanupReport("finalize")
        stopping.set_result(report)
        self._last_resort.arm()

    def _leave_prompt_or_cell(self) -> None:
        leaving: Any = self.shell  # a terminal's shell has it
        leaving.ask_exit()
        if self._cell is not None:
            signal_main_thread()
            return
        prompt: Any = getattr(getattr(self.shell, "pt_app", None), "app", None)
        loop = None if prompt is None else prompt.loop
        if loop is not None:
            loop.call_soon_threadsafe(lambda: prompt.is_running and prompt.exit(result=""))

    def _leave_terminal(self) -> None:
        """Make the terminal usable again after a prompt that did not end by itself."""
        flush_output()
        if self._terminal is not None:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)


class _Gate(ast.NodeTransformer):
    """Refuse a cell before it runs: of what IPython offers, only a transformer of the syntax tree can do that.

    Args:
        refusal: says why the present cell may not run.
    """

    def __init__(self, refusal: Callable[[], RLMError | None]) -> None:
        self._refusal = refusal

    def visit(self, node: ast.AST) -> ast.AST:
        refusal = self._refusal()
        if refusal is not None:
            raise CellRefused(str(refusal)) from refusal
        return node


def _is_of(result: ExecutionResult, cell: ExecutionInfo) -> bool:
    """Tell whether a result is a cell's. IPython describes the cell anew when it was broken off."""
    return result.info is cell or (result.info is not None and result.info.raw_cell == cell.raw_cell)


def _terminal_mode() -> Any:
    """Return the mode of the terminal on standard input, None if it is none."""
    try:
        import termios
    except ImportError:  # Windows
        return None
    try:
        return termios.tcgetattr(0)
    except (OSError, termios.error):
        return None
