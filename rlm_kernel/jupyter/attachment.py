"""The lifecycle of a session on the channels of an IPython kernel: ours, or a stock one into which it is loaded.

How it is attached. `attach` sets attributes of the kernel *instance* in front of its methods, and entries of its
handler tables; each of ours calls the kernel's own method where that does the work. `detach` takes them out again.
One that somebody else has covered in the meantime stays below theirs and passes everything through. So the kernel's
class is untouched, and our kernel and a stock one run the same code.

Threads. Cells run on the main thread (or a subshell's). `attach` and `detach` run on the main thread. What comes in
on the control channel and by signals is in `control`.

What is acknowledged when. An interrupt first shuts admission and interrupts the running cell, then stops the
children. Both the cell's ``execute_reply`` and the ``interrupt_reply`` are held until each exit is confirmed. A
shutdown does the same and then ends the process. A cell that finalizes stops the children before its reply; so does
one that ends in an interrupt which came as a signal (front ends send stock kernels nothing else).

How each step can fail: a process cannot be confirmed gone (an error reply that names it, and cells are refused); a
verb raises (the same, without names); an interrupt comes when the cell's code has ended already (a reply is made of
it).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import UsageMistake
from rlm_kernel.jupyter.activity import show_activity
from rlm_kernel.jupyter.control import ControlVerbs
from rlm_kernel.jupyter.model_driven import ModelDrivenCell, is_model_driven
from rlm_kernel.jupyter.shell_session import ShellSession, was_interrupted
from rlm_kernel.session.observation import observe
from rlm_kernel.session.offthread import run_off_thread
from rlm_kernel.values import CleanupReport

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

COVERED = (
    "do_execute",
    "do_shutdown",
    "shutdown_request",
    "interrupt_request",
    "dispatch_control",
    "debug_request",
    "delete_subshell_request",
    "set_parent",
    "get_parent",
    "pre_handler_hook",
    "post_handler_hook",
    "finish_metadata",
    "_cancel_on_sigint",
)
"""The kernel's methods that ours stand in front of."""

HANDLERS = ("interrupt_request", "shutdown_request", "debug_request", "delete_subshell_request")
"""Those of them that the kernel also keeps in its tables of handlers."""


class KernelAttachment:
    """See the module's docstring.

    Args:
        kernel: the kernel.
        cells: its shell's session.
    """

    def __init__(self, kernel: IPythonKernel, cells: ShellSession) -> None:
        self.kernel = kernel
        self.cells = cells
        self.rlm = cells.rlm
        self.log = cells.log
        self._stock: dict[str, Callable[..., Any]] = {}
        self.verbs = ControlVerbs(kernel, cells, self._stock)
        self.interrupts = self.verbs.interrupts
        self._ours: dict[str, Callable[..., Any]] = {}
        self._was_on_instance: dict[str, bool] = {}
        self._idle_sigint: Any = signal.SIG_IGN

    # -- attaching

    def attach(self) -> None:
        """Stand in front of the kernel's methods, and take SIGINT over. Works before the kernel is started, and in a cell."""
        previous = signal.getsignal(signal.SIGINT)
        in_handler = previous is not signal.SIG_IGN  # ipykernel ignores SIGINT except while it handles a request
        self._idle_sigint = getattr(self.kernel, "saved_sigint_handler", signal.SIG_IGN) if in_handler else previous
        for name in COVERED:
            self._was_on_instance[name] = name in self.kernel.__dict__
            self._stock[name] = getattr(self.kernel, name)
            self._ours[name] = getattr(self.verbs if hasattr(self.verbs, name) else self, name)
            setattr(self.kernel, name, self._ours[name])
        self._exchange_handlers(self._stock, self._ours)
        self.verbs.is_active = True
        self.interrupts.install()
        if in_handler and hasattr(self.kernel, "io_loop"):
            self.interrupts.arm()  # the cell that loads us goes on; `post_handler_hook` disarms
            self._look_after_this_cell()
        self.verbs.signals.install()
        self._activity = show_activity(self.kernel, self.rlm)

    def detach(self) -> None:
        """Undo what `attach` did. The cell in which this happens ends properly, and stays interruptible."""
        self.verbs.is_active = False
        for name, ours in self._ours.items():
            if self.kernel.__dict__.get(name) != ours:
                continue
            if self._was_on_instance[name]:
                setattr(self.kernel, name, self._stock[name])
            else:
                delattr(self.kernel, name)
        self._exchange_handlers(self._ours, self._stock)
        if self.interrupts.is_armed:
            self.kernel.saved_sigint_handler = self._idle_sigint  # what the kernel's own hook puts back after the cell
        else:
            signal.signal(signal.SIGINT, self._idle_sigint)
        self.verbs.signals.uninstall()
        self._activity.close()

    def at_exit(self) -> None:
        """The interpreter ends; our own kernel has come here by another way."""
        self.verbs.at_exit()

    def _look_after_this_cell(self) -> None:
        """Do for the cell that loads us, which the kernel's own method runs, what `do_execute` does for later ones."""
        events = self.cells.shell.events
        self.cells.begin_cell()

        def end_cell(result: Any) -> None:
            events.unregister("post_run_cell", end_cell)
            if self.verbs.is_active:
                success = result is not None and result.success
                self.cells.end_cell(success=success, interrupted=was_interrupted(result))

        events.register("post_run_cell", end_cell)

    def _exchange_handlers(self, old: dict[str, Callable[..., Any]], new: dict[str, Callable[..., Any]]) -> None:
        for table in (self.kernel.shell_handlers, self.kernel.control_handlers):
            for name in HANDLERS:
                if table.get(name) == old[name]:
                    table[name] = new[name]
        stream = self.kernel.control_stream
        if stream is not None and hasattr(self.kernel, "io_loop"):  # a kernel that is not started yet does it then
            # On the stream's own thread. A request that is served before this is not looked at early: no harm.
            stream.io_loop.add_callback(partial(stream.on_recv, new["dispatch_control"], copy=False))

    # -- cells

    def pre_handler_hook(self) -> None:
        """Arm for the handlers that run code of the user's outside of cells (comms, completion). Cells arm themselves."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.verbs.begin_request()
        if self.kernel.get_parent("shell")["header"]["msg_type"] == "execute_request":
            # Raising before there is anybody to make a reply of it would lose the reply.
            self.verbs.forget_cell()
            self.interrupts.expect()
        else:
            self.interrupts.arm()

    def post_handler_hook(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.interrupts.disarm()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                # Left by the stock handling of the cell that loaded us. It would raise in the middle of the event loop.
                self.interrupts.install()
            self.verbs.end_request()

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: dict[str, Any] | None = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Run a cell, and return its reply when what follows from it is confirmed."""
        execute = self._stock["do_execute"]
        if not self.verbs.is_active:
            reply: dict[str, Any] = await execute(
                code, silent, store_history, user_expressions, allow_stdin, cell_meta=cell_meta, cell_id=cell_id
            )
            return reply
        refusal = self.cells.refusal(code)
        if refusal is not None:
            return self._error_reply(refusal, silent, uncounted=store_history)
        self.cells.begin_cell()
        # Set by an error or an interrupt in the middle of showing a value. ipykernel clears it for cells without ``await`` only, and
        # would report the next one with it as failed.
        shell: Any = self.kernel.shell
        shell._last_traceback_during_displayhook = False
        on_main = threading.current_thread() is threading.main_thread()
        # Expressions are evaluated afterwards: they are to show what has come of a finalization.
        run = partial(execute, code, silent, store_history, None, allow_stdin, cell_meta=cell_meta, cell_id=cell_id)
        driven = ModelDrivenCell(self.rlm, self.kernel.shell) if is_model_driven(cell_meta) else None
        with driven or contextlib.nullcontext():
            reply = await self._run_interruptibly(run, silent, store_history) if on_main else await run()
        reply = await self._settle(reply, silent, on_main, driven)
        if user_expressions and reply["status"] == "ok":
            evaluate = partial(self._evaluate, reply, user_expressions)
            reply = await self._run_interruptibly(evaluate, silent, False) if on_main else await evaluate()
            reply = await self._settle(reply, silent, on_main)
        self.cells.end_views()
        return reply

    async def _evaluate(self, reply: dict[str, Any], expressions: dict[str, str]) -> dict[str, Any]:
        assert self.kernel.shell is not None
        return {**reply, "user_expressions": self.kernel.shell.user_expressions(expressions)}

    async def _run_interruptibly(
        self, run: Callable[[], Awaitable[dict[str, Any]]], silent: bool, store_history: bool
    ) -> dict[str, Any]:
        count = self.kernel.execution_count
        try:
            try:
                self.interrupts.arm()
                return await run()
            finally:
                self.interrupts.disarm()
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # It came when the cell's code had ended already, or outside of it: the reply is lost, so make one.
            self.interrupts.disarm()
            return self._error_reply(error, silent, uncounted=store_history and self.kernel.execution_count == count)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Make a cell with ``await`` interruptible, whether it awaits or runs code."""
        assert self.kernel.shell is not None
        with self.interrupts.cancelling(future, self.kernel.shell.user_global_ns):
            yield

    async def _settle(
        self, reply: dict[str, Any], silent: bool, on_main: bool, driven: ModelDrivenCell | None = None
    ) -> dict[str, Any]:
        """Hold the reply until every stop that concerns the cell is confirmed.

        Args:
            reply: the content of the reply so far.
            silent: whether nothing is to be shown.
            on_main: whether the cell ran on the main thread.
            driven: what scanned the cell's output, if lines of it count.

        Returns:
            the reply, or an error reply in its place.
        """
        if not self.verbs.is_active:  # this was the cell that unloaded us
            return reply
        closing = self.verbs.take_closing(on_main=on_main)
        if closing is None and on_main and self._was_interrupted(reply) and not self.verbs.is_shutting_down:
            closing = run_off_thread(self.rlm.close)
        try:
            if closing is not None:
                report = await self._confirmed(closing, on_main)
                if report.stopped or not report.ok:
                    print(report.summary(), file=sys.stderr)
            success = reply["status"] == "ok"
            final = driven.finish(success) if driven else self.rlm.finalization.end_cell(success=success)
            if final is not None:
                await self._confirmed(run_off_thread(self.rlm.finalize), on_main)
        except UsageMistake as error:  # a line of output that names no variable
            return self._error_reply(error, silent)
        except Exception as error:
            self.log.exception("the children may not have been stopped")
            return self._error_reply(error, silent)
        failure = self.rlm.cleanup_failure
        if failure is not None and (final is not None or closing is not None):
            return self._error_reply(failure, silent)
        return reply

    def _was_interrupted(self, reply: dict[str, Any]) -> bool:
        name = reply.get("ename")
        return name == "KeyboardInterrupt" or (name == "CancelledError" and self.interrupts.was_hit)

    async def _confirmed(self, verb: Future[CleanupReport], on_main: bool) -> CleanupReport:
        """Await a verb. SIGINT, which would hit nothing now, hastens it."""
        if not on_main:
            return await asyncio.wrap_future(verb)
        loop, hasten = asyncio.get_running_loop(), self.rlm.lifecycle.hasten
        with self.interrupts.otherwise(lambda: loop.call_soon_threadsafe(hasten)):
            return await asyncio.wrap_future(verb)

    def _error_reply(self, error: BaseException, silent: bool, *, uncounted: bool = False) -> dict[str, Any]:
        """Show an error as a cell's error, and return the reply for it.

        Args:
            error: the error.
            silent: whether nothing is to be shown.
            uncounted: whether the shell has not counted this cell, although its number has been announced.
        """
        kernel = self.kernel
        assert kernel.shell is not None
        if uncounted and not silent:
            kernel.shell.execution_count += 1
        content = {
            "ename": type(error).__name__,
            "evalue": str(error),
            "traceback": [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__],
        }
        if not silent:
            kernel.send_response(kernel.iopub_socket, "error", content, ident=kernel._topic("error"))
        return {
            "status": "error",
            **content,
            "execution_count": max(0, kernel.shell.execution_count - 1),
            "user_expressions": {},
            "payload": [],
        }

    def finish_metadata(self, parent: dict[str, Any], metadata: dict[str, Any], reply_content: Any) -> dict[str, Any]:
        """Add the state of the episode to what goes out with an ``execute_reply``."""
        finished: dict[str, Any] = self._stock["finish_metadata"](parent, metadata, reply_content)
        if self.verbs.is_active and parent["header"]["msg_type"] == "execute_request":
            finished["rlm"] = observe(self.rlm)
        return finished
