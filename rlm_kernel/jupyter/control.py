"""The lifecycle verbs on a kernel's control channel, and the end of its process. A part of `attachment`, which see.

Threads. ``interrupt_request`` and ``shutdown_request`` are served on the thread "Control"; the verbs themselves run
on short-lived threads "rlm-lifecycle", which "Control" awaits, so that it keeps answering. SIGTERM and SIGHUP come in
on "rlm-signals" (see `exits`). `after_loop` and `at_exit` run on the main thread. It owns the interrupts of cells and
the handlers of the end signals.

How each step can fail: a process cannot be confirmed gone (the reply is an error that names it); a verb raises (the
same, without names); no thread can be started (the verb runs in place, see `offthread`); the main thread does not
unwind (`exits.LastResort`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.jupyter.control_queue import ControlQueue
from rlm_kernel.jupyter.debugging import continue_others, has_stopped
from rlm_kernel.jupyter.exits import EndSignals, LastResort, end_process, flush_output
from rlm_kernel.jupyter.interrupts import CellInterrupts
from rlm_kernel.jupyter.shell_session import ShellSession
from rlm_kernel.session.offthread import run_off_thread
from rlm_kernel.values import CleanupReport

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel


_REPLY_S = 0.3
"""Seconds for an interrupted cell to unwind and be answered before a shutdown is: afterwards there are no sockets any more. One that
does not unwind, in native code or a loop that ignores interrupts, costs its share of what a server waits, so they are few."""


class ControlVerbs:
    """See the module's docstring.

    Args:
        kernel: the kernel.
        cells: its shell's session.
        stock: the kernel's own methods, by name.
    """

    def __init__(self, kernel: IPythonKernel, cells: ShellSession, stock: Mapping[str, Callable[..., Any]]) -> None:
        self.kernel = kernel
        self.cells = cells
        self.rlm = cells.rlm
        self.log = cells.log
        assert kernel.session is not None
        self._wire = kernel.session
        self._stock = stock
        self.is_active = False
        self._queue = ControlQueue(kernel, stock)
        self.set_parent, self.get_parent = self._queue.set_parent, self._queue.get_parent
        self.interrupts = CellInterrupts(self._wake_main_loop)
        self.signals = EndSignals(self._on_end_signal)
        self._last_resort = LastResort(lambda: self.exit_code, flush_output)
        self.exit_code = 0
        self._closing: Future[CleanupReport] | None = None
        self._closing_cell: Future[CleanupReport] | None = None  # the close that interrupted the main thread's cell
        self._joined: set[str] = set()
        self._shutdown: dict[str, Any] | None = None
        self._late_shutdowns: list[tuple[Any, Any]] = []
        self._stopping: Future[CleanupReport] | None = None
        self.is_shutting_down = False
        self._is_idle = threading.Event()  # the main thread handles no request
        self._is_idle.set()
        self._pid = os.getpid()

    def _wake_main_loop(self) -> None:
        if hasattr(self.kernel, "io_loop"):
            self.kernel.io_loop.add_callback(lambda: None)

    # -- what cells ask

    def begin_request(self) -> None:
        """The main thread takes up a request."""
        self._is_idle.clear()

    def end_request(self) -> None:
        """It has been answered."""
        self._is_idle.set()

    def forget_cell(self) -> None:
        """The main thread takes up a cell, which no close has interrupted yet."""
        self._closing_cell = None

    def take_closing(self, *, on_main: bool) -> Future[CleanupReport] | None:
        """Return the close that a cell's reply must wait for: one that interrupted it, or one under way. Each is told once."""
        closing = (self._closing_cell if on_main else None) or self._closing
        if on_main:
            self._closing_cell = None
        return closing

    # -- the control channel

    async def dispatch_control(self, msg: list[Any]) -> None:
        """Look at requests before they queue behind the one that is being served."""
        if not self.is_active:
            await self._stock["dispatch_control"](msg)
            return
        peeked = self._peek(msg)
        kind = peeked["header"]["msg_type"] if peeked else ""
        if self._closing is not None or self.is_shutting_down:
            if kind == "interrupt_request":
                self._joined.add(peeked["header"]["msg_id"])
                self.rlm.lifecycle.hasten()
                self.interrupts.interrupt()
            elif kind == "shutdown_request" and self.is_shutting_down:
                self._answer_late_shutdown(msg)
                return
        await self._queue.dispatch(msg, kind)

    def _peek(self, msg: list[Any]) -> dict[str, Any]:
        """Return a verified message's header and the like without consuming it; empty if it is none."""
        try:
            _, frames = self._wire.feed_identities(msg, copy=False)
            peeked: dict[str, Any] = self._wire.deserialize(frames, content=False, copy=False)
        except Exception:
            return {}
        return peeked

    async def debug_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """See `control_queue`."""
        served = self._queue.debug_request if self.is_active else self._stock["debug_request"]
        await served(stream, ident, parent)

    async def delete_subshell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """See `control_queue`."""
        served = self._queue.delete_subshell_request if self.is_active else self._stock["delete_subshell_request"]
        await served(stream, ident, parent)

    async def interrupt_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Stop the running cell, then the children; reply when every exit is confirmed."""
        if not self.is_active or not self.kernel.session:
            await self._stock["interrupt_request"](stream, ident, parent)
            return
        msg_id = parent["header"]["msg_id"]
        if msg_id in self._joined:
            self._joined.discard(msg_id)
            content = self._verb_content(self.rlm.cleanup_failure)
        else:
            if self.rlm.lifecycle.busy:
                # A FINAL or a reset is stopping children already: the user will not wait for their graces.
                self.rlm.lifecycle.hasten()
            try:
                report = await self._close_after_interrupting()
                content = self._verb_content(self.rlm.cleanup_failure)
                if report.stopped:
                    self.log.info("%s", report.summary())
            except Exception as error:
                self.log.exception("the children may not have been stopped")
                content = self._verb_content(error)
        self._wire.send(stream, "interrupt_reply", content, parent, ident=ident)

    async def _close_after_interrupting(self) -> CleanupReport:
        outcome: Future[CleanupReport] = Future()
        # The cell may be slower to unwind than the children are to end: it must find the outcome then, too.
        self._closing = self._closing_cell = outcome
        try:
            self.rlm.lifecycle.begin()
            stopped = has_stopped(self.kernel)
            if not self.interrupts.interrupt():
                self._closing_cell = None
            self.rlm.supervisor.interrupt_waits()
            report = await asyncio.wrap_future(run_off_thread(lambda: self.rlm.close(begun=True)))
            if stopped:
                continue_others()
            outcome.set_result(report)
        except BaseException:
            outcome.set_result(CleanupReport("close"))
            raise
        finally:
            self._closing = None
        return report

    @staticmethod
    def _verb_content(failure: Exception | None) -> dict[str, Any]:
        if failure is None:
            return {"status": "ok"}
        return {
            "status": "error",
            "ename": type(failure).__name__,
            "evalue": str(failure),
            "traceback": [str(failure)],
            "survivors": list(failure.survivors) if isinstance(failure, ChildCleanupError) else [],
        }

    # -- shutdown

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """Stop the children and confirm; a shutdown always ends in exit, with survivors named in the reply."""
        failure: Exception | None = None
        if self.is_active:
            try:
                await asyncio.wrap_future(self._begin_shutdown("reset" if restart else "finalize"))
                failure = self.rlm.cleanup_failure
            except Exception as error:
                self.log.exception("the children may not have been stopped")
                self.exit_code = self.exit_code or 1
                failure = error
        stock = self._stock["do_shutdown"](restart)
        content: dict[str, Any] = await stock if inspect.isawaitable(stock) else stock
        return content if failure is None else {**content, **self._verb_content(failure)}

    def _begin_shutdown(self, verb: str) -> Future[CleanupReport]:
        """Shut admission, interrupt the cell, and stop everything on a lifecycle thread."""
        self.is_shutting_down = True
        self._last_resort.start()
        self.rlm.lifecycle.begin()
        self.interrupts.interrupt()

        def shut_down() -> CleanupReport:
            report = self.rlm.shutdown(verb, begun=True)
            if not report.ok:
                self.exit_code = self.exit_code or 1
                print(report.summary(), file=sys.__stderr__, flush=True)
            self._is_idle.wait(_REPLY_S)
            return report

        self._stopping = run_off_thread(shut_down)
        return self._stopping

    async def shutdown_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        await self._stock["shutdown_request"](stream, ident, parent)
        if not self.is_active:
            return
        self._shutdown = {"status": "ok", "restart": parent["content"]["restart"]}
        late, self._late_shutdowns = self._late_shutdowns, []
        for late_ident, late_parent in late:
            self._send_shutdown_reply(late_ident, late_parent)
        self._last_resort.arm()

    def _answer_late_shutdown(self, msg: list[Any]) -> None:
        """Answer a shutdown request that came while another is served, when that one is done."""
        try:
            ident, frames = self._wire.feed_identities(msg, copy=False)
            parent = self._wire.deserialize(frames, content=True, copy=False)
        except Exception:
            self.log.error("Invalid Control Message", exc_info=True)
            return
        if self._shutdown is None:
            self._late_shutdowns.append((ident, parent))
        else:
            self._send_shutdown_reply(ident, parent)

    def _send_shutdown_reply(self, ident: Any, parent: dict[str, Any]) -> None:
        content = {"status": "ok", "restart": parent["content"]["restart"]}
        self._wire.send(self.kernel.control_stream, "shutdown_reply", content, parent, ident=ident)

    # -- the end of the process

    def _on_end_signal(self, signum: int) -> None:
        """Serve SIGTERM or SIGHUP. On the thread "rlm-signals"."""
        self.exit_code = 128 + signum
        try:
            self._begin_shutdown("finalize").result()
            if self.rlm.cleanup_failure is not None:
                self.exit_code = 1
        except Exception:
            self.log.exception("the children may not have been stopped")
            self.exit_code = 1
        if hasattr(self.kernel, "io_loop"):
            self.kernel.io_loop.add_callback(self.kernel.io_loop.stop)
        self._last_resort.arm()

    def after_loop(self) -> None:
        """The main loop has ended, for whatever reason: nothing may be left behind."""
        self._last_resort.unwound()
        if self._stopping is not None:
            with contextlib.suppress(Exception):  # reported where it was begun
                self._stopping.result()
        else:
            report = self.rlm.shutdown("exit")
            if not report.ok:
                self.exit_code = self.exit_code or 1

    def at_exit(self) -> None:
        """Do in an exit hook of the interpreter what our own kernel does after its loop."""
        if os.getpid() != self._pid:
            return
        self.after_loop()
        if self.exit_code:
            self.cells.save_history()
            end_process(self.exit_code)
