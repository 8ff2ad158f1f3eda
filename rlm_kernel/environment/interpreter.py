"""Run blocks of code in an IPython shell and capture what comes of them.

One interpreter serves the notebook's own shell (ZMQ, with a running event loop) and the shell that lives in each child.
While a block runs, everything that IPython would send to a front end is turned into text: ``print``, the repr of a
trailing expression, ``display``, tracebacks. Magics, ``!cmd`` and top-level ``await`` work.

Who runs it: the thread that calls `execute`, usually the main thread. A KeyboardInterrupt (also a child's cooperative
stop) that ends the block is raised again after the capture, so that nobody above mistakes it for an error of the code.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import re
import reprlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rlm_kernel.environment.capture import CapturingStream
from rlm_kernel.values import CodeResult

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

REPR_LIMIT = 500
"""Characters of a variable's repr that a result keeps."""

_UNWIND_S = 0.5
"""Seconds that an interrupted coroutine is given to unwind while its output is still captured; code may refuse to."""

_LAST_RESULTS = ("_", "__", "___")
"""Names that a display hook sets to empty texts when it is made; the notebook's own values are put back."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_EXIT_NOTE = "exit() does not end this run; give the answer with FINAL(...) instead."


def make_shell() -> InteractiveShell:
    """Build the shell that children run code in: no history, no threads, no colours, no start-up files."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.banner1 = ""
    shell: InteractiveShell = InteractiveShell.instance(config=config, user_ns={})
    return shell


class Interpreter:
    """Run code in a shell's namespace.

    Args:
        shell: the shell.
        echo: whether what is captured is also written to the streams that were there before.
    """

    def __init__(self, shell: InteractiveShell, *, echo: bool = True) -> None:
        self._shell = shell
        self._echo = echo
        self._running = False

    @property
    def namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = self._shell.user_ns
        return namespace

    def execute(self, code: str) -> CodeResult:
        """Run one block.

        Raises:
            KeyboardInterrupt: the block was interrupted.
            RuntimeError: code in a block re-entered the interpreter.
        """
        if self._running:
            raise RuntimeError("this REPL is running a block already; code in a block cannot run another one in it")
        began = time.monotonic()
        before = dict(self.namespace)
        try:
            self._running = True
            with self._captured(code) as (out, err):
                result = self._run(code)
        finally:
            self._running = False
        error = result.error_before_exec or result.error_in_exec
        # A CancelledError is no interrupt: it comes from a task that the code itself cancelled, and is shown to the model.
        if isinstance(error, KeyboardInterrupt):
            raise error
        return CodeResult(
            stdout=out.value(),
            stderr=err.value(),
            new_locals=_new_names(before, self.namespace),
            duration_s=time.monotonic() - began,
            success=result.success,
            exception=None if error is None else _one_line(error),
        )

    def _run(self, code: str) -> ExecutionResult:
        shell = self._shell
        if not _loop_is_running() or not self._needs_loop(code):
            result: ExecutionResult = shell.run_cell(code, store_history=False)
            return result
        return _run_in_own_loop(lambda: shell.run_cell_async(code, store_history=False, **self._transformed(code)))

    def _transformed(self, code: str) -> dict[str, Any]:
        try:
            return {"transformed_cell": self._shell.transform_cell(code), "preprocessing_exc_tuple": None}
        except Exception:
            return {"transformed_cell": code, "preprocessing_exc_tuple": sys.exc_info()}

    def _needs_loop(self, code: str) -> bool:
        return bool(self._shell.should_run_async(code, **self._transformed(code)))

    @contextlib.contextmanager
    def _captured(self, code: str) -> Iterator[tuple[CapturingStream, CapturingStream]]:
        """Turn everything that the shell would show into text on the two streams."""
        from IPython.core.displaypub import DisplayPublisher

        shell = self._shell
        out, err = self._stream(sys.stdout), self._stream(sys.stderr)

        def show_traceback(_etype: type[BaseException], _value: BaseException, stb: list[str]) -> None:
            err.write(_ANSI.sub("", shell.InteractiveTB.stb2text(stb)) + "\n")

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            last_results = {name: shell.user_ns[name] for name in _LAST_RESULTS if name in shell.user_ns}
            hook = _plain_display_hook()(shell=shell, cache_size=0)
            hook.code = code
            shell.user_ns.update(last_results)
            stack.enter_context(_attribute(shell, "displayhook", hook))
            stack.enter_context(_attribute(shell.display_trap, "hook", hook))
            stack.enter_context(_attribute(shell, "display_pub", DisplayPublisher(shell=shell)))
            stack.enter_context(_attribute(shell, "_showtraceback", show_traceback))
            stack.enter_context(_attribute(shell, "ask_exit", lambda: print(_EXIT_NOTE)))
            yield out, err

    def _stream(self, original: TextIO) -> CapturingStream:
        return CapturingStream(original, original if self._echo else None)


@functools.cache
def _plain_display_hook() -> Any:
    from IPython.core.displayhook import DisplayHook

    class PlainDisplayHook(DisplayHook):
        """Write the repr of a trailing expression without the ``Out[n]:`` prompt."""

        code = ""

        def write_output_prompt(self) -> None:
            pass

        def quiet(self) -> bool:
            """Tell whether the block ends in a semicolon. (The stock hook looks into the history, where blocks are not.)"""
            return bool(self.semicolon_at_end_of_expression(self.code))  # type: ignore[no-untyped-call]

    return PlainDisplayHook


@contextlib.contextmanager
def _attribute(target: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for the length of the block. What was set on the instance is put back; what was not is removed."""
    had = name in vars(target) or _is_trait(target, name)
    old = getattr(target, name, None)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, old)
        else:
            delattr(target, name)


def _is_trait(target: object, name: str) -> bool:
    return hasattr(target, "has_trait") and bool(target.has_trait(name))


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_own_loop(make: Any) -> ExecutionResult:
    """Run a coroutine to its end in a loop of its own on a thread of its own, since this thread's loop is busy running
    us.

    An interrupt of the waiting thread cancels the coroutine and gives it `_UNWIND_S` seconds to unwind.
    """
    outcome: list[Any] = []
    loop = asyncio.new_event_loop()
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            asyncio.set_event_loop(loop)
            outcome.append(loop.run_until_complete(make()))
        except BaseException as error:
            outcome.append(error)
        finally:
            loop.close()
            done.release()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="rlm-await", daemon=True)
    try:
        thread.start()
        done.acquire()
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        done.acquire(timeout=_UNWIND_S)
        raise
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


def _new_names(before: dict[str, Any], after: dict[str, Any]) -> dict[str, str]:
    return {
        name: short_repr(value)
        for name, value in list(after.items())
        if not name.startswith("_") and name not in before
    }


class _ShortRepr(reprlib.Repr):
    """The repr of a value, without building all of it for a large container."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = REPR_LIMIT
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxfrozenset = self.maxdeque = 50


_short_repr = _ShortRepr()


def short_repr(value: object) -> str:
    """Return the repr of a value, cut at `REPR_LIMIT` characters. A repr that raises gives a note."""
    try:
        text = _short_repr.repr(value)
    except Exception as error:
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
    return text if len(text) <= REPR_LIMIT else text[:REPR_LIMIT]


def _one_line(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
