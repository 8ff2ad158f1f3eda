"""Run blocks of code in an IPython shell and capture what comes of them.

One interpreter serves the notebook's own shell (ZMQ, with a running event loop), the shell that lives in each child, and the
shells of in-process environments. While a block runs, everything that IPython would send to a front end is turned into
text: ``print``, the repr of a trailing expression, ``display``, tracebacks. Magics, ``!cmd`` and top-level ``await`` work.

Who runs it: the thread that calls `execute`, usually the main thread. With the first two kinds of shell, all that the process
prints meanwhile is captured; with a `ThreadShell`, what the code of that shell prints, whatever else runs beside it. A
KeyboardInterrupt (also a child's cooperative stop) that ends the block is raised again after the capture, so that nobody
above mistakes it for an error of the code.
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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rlm_kernel.environment.capture import CAPTURE_LIMIT, CapturingStream, Listener
from rlm_kernel.environment.deadline import Codes, Deadline, ExecutionTimeout, check_timeout, make_deadline
from rlm_kernel.environment.routing import Scope, capture_process, capture_scope, stream_of_caller
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
        echo: whether what is captured is also written to the streams that were there before. Never with a `ThreadShell`.
        capture_limit: characters of each stream that one block's result keeps.
        on_output: called with each piece of output, of both streams, on the thread that writes it; then nothing is echoed.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        *,
        echo: bool = True,
        capture_limit: int = CAPTURE_LIMIT,
        on_output: Callable[[str], object] | None = None,
    ) -> None:
        self._shell = shell
        self._on_output = on_output
        self._scope = Scope(shell) if getattr(shell, "by_thread", False) else None
        self._echo = echo and self._scope is None
        self._capture_limit = capture_limit
        self._busy = threading.Lock()

    @property
    def namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = self._shell.user_ns
        return namespace

    def execute(self, code: str, *, timeout_s: float | None = None) -> CodeResult:
        """Run one block.

        Args:
            timeout_s: seconds after which the code is interrupted, None for never. Its result then says so.

        Raises:
            KeyboardInterrupt: the block was interrupted.
            RuntimeError: code in a block re-entered the interpreter, or two threads use it at once.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this REPL is running a block already; code in a block cannot run another one in it")
        began = time.monotonic()
        before = dict(self.namespace)
        try:
            with self._captured(code) as (out, err):
                result, timeout = self._run_within(code, timeout_s)
                if timeout is not None:
                    err.write(f"{timeout}\n")
        finally:
            self._busy.release()
        error = None if result is None else result.error_before_exec or result.error_in_exec
        # A CancelledError is no interrupt: it comes from a task that the code itself cancelled, and is shown to the model.
        # The timeout of a step around this one is none of ours either.
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, ExecutionTimeout) and timeout is None):
            raise error
        return CodeResult(
            stdout=out.value(),
            stderr=err.value(),
            new_locals=_new_names(before, self.namespace),
            duration_s=time.monotonic() - began,
            success=timeout is None and result is not None and result.success,
            exception=timeout or (None if error is None else _one_line(error)),
            stdout_length=out.total,
            stderr_length=err.total,
        )

    def forget_shell(self) -> None:
        """Let threads that code started, and that live on, not keep the shell alive."""
        if self._scope is not None:
            self._scope.shell = None

    def _run_within(self, code: str, timeout_s: float | None) -> tuple[ExecutionResult | None, str | None]:
        """Run a block and return its result, and, if its time ran out, the line that says so."""
        if timeout_s is None:
            return self._run(code, None), None
        wake = getattr(self._shell, "wake", lambda: None)
        deadline = make_deadline(timeout_s, wake, self._codes(), other_thread=self._on_other_thread(code))
        result = self._run(code, deadline)
        return result, f"TimeoutError: {deadline.message()}" if deadline.raised else None

    def _codes(self) -> Codes:
        """Say how it is seen on a stack that code runs, or that its traceback is being written."""
        shell = type(self._shell)
        # An event loop that is idle while code awaits has no frame of that code on its stack.
        running = (shell.run_code, asyncio.BaseEventLoop.run_forever)
        spared = (shell.showtraceback, shell.showsyntaxerror, *getattr(shell, "spared", ()))
        return Codes(frozenset(f.__code__ for f in running), frozenset(f.__code__ for f in spared))

    def _on_other_thread(self, code: str) -> bool:
        return _loop_is_running() and self._needs_loop(code)

    def _run(self, code: str, deadline: Deadline | None) -> ExecutionResult | None:
        shell = self._shell
        call: Callable[[Callable[[], Any]], Any] = (lambda f: f()) if deadline is None else deadline.call
        if not self._on_other_thread(code):
            result: ExecutionResult | None = call(lambda: shell.run_cell(code, store_history=False))
            return result
        if self._scope is not None:
            # It has a loop of its own, in which its tasks live.
            thread_shell: Any = shell
            return _run_on_own_thread(
                lambda: call(lambda: shell.run_cell(code, store_history=False)), thread_shell.cancel_tasks
            )
        return _run_in_own_loop(
            lambda: shell.run_cell_async(code, store_history=False, **self._transformed(code)), call
        )

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
        shell = self._shell
        out, err = self._stream("stdout"), self._stream("stderr")

        def show_traceback(_etype: type[BaseException], _value: BaseException, stb: list[str]) -> None:
            err.write(_ANSI.sub("", shell.InteractiveTB.stb2text(stb)) + "\n")

        with contextlib.ExitStack() as stack:
            if self._scope is None:
                stack.enter_context(capture_process(out, err))
            else:
                thread_shell: Any = shell
                thread_shell.furnish()
                stack.enter_context(thread_shell.found_by_its_code())
                stack.enter_context(capture_scope(self._scope, out, err))
            last_results = {name: shell.user_ns[name] for name in _LAST_RESULTS if name in shell.user_ns}
            hook = _plain_display_hook()(shell=shell, cache_size=0)
            hook.code = code
            shell.user_ns.update(last_results)
            stack.enter_context(_attribute(shell, "displayhook", hook))
            stack.enter_context(_attribute(shell.display_trap, "hook", hook))
            if self._scope is None:
                # In a cell that runs already, the trap has been set, and is not set again.
                stack.enter_context(_attribute(sys, "displayhook", hook))
            stack.enter_context(_attribute(shell, "display_pub", _plain_display_publisher()()))
            stack.enter_context(_attribute(shell, "_showtraceback", show_traceback))
            # IPython would keep all that is written, whole, in its history of outputs.
            stack.enter_context(_attribute(shell, "_tee", lambda channel: contextlib.nullcontext()))
            stack.enter_context(_attribute(shell, "ask_exit", lambda: print(_EXIT_NOTE)))
            yield out, err

    def _stream(self, name: str) -> CapturingStream:
        original = stream_of_caller(name)
        echo: Any = original if self._echo else None
        if self._on_output is not None:
            echo = Listener(self._on_output)
        return CapturingStream(original, echo, self._capture_limit)


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

        def log_output(self, format_dict: dict[str, Any]) -> None:
            """Keep nothing of it in the history of outputs."""

    return PlainDisplayHook


@functools.cache
def _plain_display_publisher() -> Any:
    from IPython.core.displaypub import DisplayPublisher

    class PlainDisplayPublisher(DisplayPublisher):
        """Print the plain text of what is displayed, and keep nothing of it: no history of outputs, no hooks in the shell."""

        def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
            if "text/plain" in data:
                print(data["text/plain"])

        def clear_output(self, wait: bool = False) -> None:
            pass

    return PlainDisplayPublisher


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


def _run_in_own_loop(make: Any, call: Callable[[Callable[[], Any]], Any]) -> ExecutionResult | None:
    """Run a coroutine to its end in a loop of its own on a thread of its own, since this thread's loop is busy running
    us.
    """
    loop = asyncio.new_event_loop()

    def run() -> Any:
        try:
            asyncio.set_event_loop(loop)
            return call(lambda: loop.run_until_complete(make()))
        finally:
            loop.close()

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    return _run_on_own_thread(run, cancel)


def _run_on_own_thread(function: Callable[[], Any], cancel: Callable[[], None]) -> ExecutionResult | None:
    """Call a function on a thread of its own, in this thread's context.

    An interrupt of the waiting thread calls ``cancel`` and gives the function `_UNWIND_S` seconds to unwind.
    """
    outcome: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)
        finally:
            done.release()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="rlm-await", daemon=True)
    try:
        thread.start()
        done.acquire()
    except KeyboardInterrupt:
        cancel()
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
        if isinstance(name, str) and not name.startswith("_") and name not in before
    }


class _ShortRepr(reprlib.Repr):
    """The repr of a value, without building all of it for a large container."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = REPR_LIMIT
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxfrozenset = self.maxdeque = 50

    def repr_bytes(self, value: bytes, _level: int) -> str:
        return repr(value[:REPR_LIMIT])

    def repr_bytearray(self, value: bytearray, _level: int) -> str:
        return repr(value[:REPR_LIMIT])


_short_repr = _ShortRepr()


def short_repr(value: object) -> str:
    """Return the repr of a value, cut at `REPR_LIMIT` characters. A repr that raises gives a note."""
    try:
        text = _short_repr.repr(value)
    except Exception as error:
        return f"<{type(value).__name__}; its repr raised {type(error).__name__}>"
    return text if len(text) <= REPR_LIMIT else text[:REPR_LIMIT]


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # the error's own __str__ may fail in any way
        text = f"its text raised {type(broken).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
