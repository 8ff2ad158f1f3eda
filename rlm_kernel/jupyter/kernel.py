"""The kernel: ipykernel's, with the session's helpers in its namespace and its lifecycle on the control channel.

Threads. Cells run on the main thread (or a subshell's). ``interrupt_request`` and ``shutdown_request`` are served on
the thread "Control"; the verbs themselves run on short-lived threads "rlm-lifecycle", which "Control" awaits, so that
it keeps answering. SIGTERM and SIGHUP come in on "rlm-signals" (see `exits`).

What is acknowledged when. An interrupt first shuts admission and interrupts the running cell, then stops the children.
Both the cell's ``execute_reply`` and the ``interrupt_reply`` are held until each exit is confirmed. A shutdown does the
same and then ends the process. A cell that finalizes stops the children before its reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from rlm_kernel._version import __version__
from rlm_kernel.children.orphans import kill_orphans
from rlm_kernel.errors import ChildCleanupError, ConfigurationError, RLMError
from rlm_kernel.jupyter.exits import EndSignals, LastResort
from rlm_kernel.jupyter.interrupts import CellInterrupts
from rlm_kernel.jupyter.magics import RLMMagics
from rlm_kernel.jupyter.offthread import run_off_thread
from rlm_kernel.session.config import RLM, Settings
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport

_log = logging.getLogger(__name__)

_SWEEP_S = 2.0
"""Seconds to wait for orphans of earlier kernels to end."""


class RLMKernel(IPythonKernel):
    """An IPython kernel that is the REPL of a Recursive Language Model."""

    implementation = "rlm-kernel"
    implementation_version = __version__

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert self.shell is not None
        assert self.session is not None
        self._wire = self.session
        settings, self._config_error = self._read_settings()
        self.rlm = RLMSession(settings, self.shell.user_ns, on_warning=lambda line: print(line, file=sys.stderr))
        self.shell.register_magics(RLMMagics(self.shell, self.rlm))
        self.interrupts = CellInterrupts(self._wake_main_loop)
        self._last_resort = LastResort(lambda: self.exit_code, self._flush_output)
        self.exit_code = 0
        self._closing: Future[CleanupReport] | None = None
        self._closing_cell: Future[CleanupReport] | None = None  # the close that interrupted the main thread's cell
        self._joined: set[str] = set()
        self._shutdown: dict[str, Any] | None = None
        self._late_shutdowns: list[tuple[Any, Any]] = []
        self._shutting_down = False

    def _read_settings(self) -> tuple[Settings, ConfigurationError | None]:
        """Read the settings. A bad value must not keep the kernel from starting: nobody would see why."""
        try:
            return Settings.from_traitlets(RLM(parent=self)), None
        except ConfigurationError as error:
            self.log.error("%s", error)
            return Settings(environ={}), error

    def start(self) -> None:
        super().start()
        self.interrupts.install()
        self._signals = EndSignals(self._on_end_signal)
        self._signals.install()
        if self.rlm.is_managed:
            self.rlm.prepare()
        sweep_in_background()

    def _wake_main_loop(self) -> None:
        self.io_loop.add_callback(lambda: None)

    # -- cells

    def pre_handler_hook(self) -> None:
        """Arm for the handlers that run code of the user's outside of cells (comms, completion). Cells arm themselves."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self.get_parent("shell")["header"]["msg_type"] == "execute_request":
            # Raising before there is anybody to make a reply of it would lose the reply.
            self._closing_cell = None
            self.interrupts.expect()
        else:
            self.interrupts.arm()

    def post_handler_hook(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.interrupts.disarm()

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
        on_main = threading.current_thread() is threading.main_thread()
        refusal = self._refusal(code)
        if refusal is not None:
            return self._error_reply(refusal, silent, uncounted=store_history)
        self._furnish()
        arguments = (code, silent, store_history, user_expressions, allow_stdin)
        keywords = {"cell_meta": cell_meta, "cell_id": cell_id}
        if on_main:
            reply = await self._execute_interruptibly(arguments, keywords)
        else:
            reply = await super().do_execute(*arguments, **keywords)
        return await self._after_cell(reply, silent, on_main)

    async def _execute_interruptibly(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        _code, silent, store_history, *_ = arguments
        count = self.execution_count
        try:
            try:
                self.interrupts.arm()
                reply: dict[str, Any] = await super().do_execute(*arguments, **keywords)
                return reply
            finally:
                self.interrupts.disarm()
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # It came when the cell's code had ended already, or outside of it: the reply is lost, so make one.
            self.interrupts.disarm()
            return self._error_reply(error, silent, uncounted=store_history and self.execution_count == count)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Make a cell with ``await`` interruptible, whether it awaits or runs code."""
        assert self.shell is not None
        with self.interrupts.cancelling(future, self.shell.user_global_ns):
            yield

    def _refusal(self, code: str) -> RLMError | None:
        """Say why this cell may not run, None if it may."""
        if self._config_error is not None and not _is_empty(code):
            error, self._config_error = self._config_error, None
            print(f"Configuration ignored: {error}. The defaults hold; see `%rlm config`.", file=sys.stderr)
        failure = self.rlm.cleanup_failure
        return None if failure is None or _is_empty(code) or _is_rlm_line(code) else failure

    def _furnish(self) -> None:
        """Put back what was deleted of ours (``%reset``), and hide it from ``%who``; what the user rebound stays, and is shown."""
        assert self.shell is not None
        self.rlm.namespace = self.shell.user_ns
        ours = {**self.rlm.functions, "answer": self.rlm.finalization.answer_dict, "context": ""}
        for name, value in ours.items():
            self.shell.user_ns.setdefault(name, value)
        self.shell.user_ns_hidden.update(ours)
        self.rlm.finalization.begin_cell()

    async def _after_cell(self, reply: dict[str, Any], silent: bool, on_main: bool) -> dict[str, Any]:
        """Hold the reply until every stop that concerns the cell is confirmed."""
        closing = (self._closing_cell if on_main else None) or self._closing
        if closing is not None:
            report = await asyncio.wrap_future(closing)
            if report.stopped or not report.ok:
                print(report.summary(), file=sys.stderr)
        final = self.rlm.finalization.end_cell(success=reply["status"] == "ok")
        if final is not None:
            try:
                await asyncio.wrap_future(run_off_thread(self.rlm.finalize))
            except Exception as error:
                self.log.exception("the children may not have been stopped")
                return self._error_reply(error, silent)
        failure = self.rlm.cleanup_failure
        if failure is not None and (final is not None or closing is not None):
            return self._error_reply(failure, silent)
        return reply

    def _error_reply(self, error: BaseException, silent: bool, *, uncounted: bool = False) -> dict[str, Any]:
        """Show an error as a cell's error, and return the reply for it.

        Args:
            error: the error.
            silent: whether nothing is to be shown.
            uncounted: whether the shell has not counted this cell, although its number has been announced.
        """
        assert self.shell is not None
        if uncounted and not silent:
            self.shell.execution_count += 1
        content = {
            "ename": type(error).__name__,
            "evalue": str(error),
            "traceback": [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__],
        }
        if not silent:
            self.send_response(self.iopub_socket, "error", content, ident=self._topic("error"))
        return {
            "status": "error",
            **content,
            "execution_count": max(0, self.shell.execution_count - 1),
            "user_expressions": {},
            "payload": [],
        }

    # -- the control channel

    async def dispatch_control(self, msg: list[Any]) -> None:
        """Look at requests before they queue behind the one that is being served."""
        if self._closing is not None or self._shutting_down:
            peeked = self._peek(msg)
            kind = peeked["header"]["msg_type"] if peeked else ""
            if kind == "interrupt_request":
                self._joined.add(peeked["header"]["msg_id"])
                self.rlm.lifecycle.hasten()
                self.interrupts.interrupt()
            elif kind == "shutdown_request" and self._shutting_down:
                self._answer_late_shutdown(msg)
                return
        await super().dispatch_control(msg)

    def _peek(self, msg: list[Any]) -> dict[str, Any]:
        """Return a verified message's header and the like without consuming it; empty if it is none."""
        try:
            _, frames = self._wire.feed_identities(msg, copy=False)
            peeked: dict[str, Any] = self._wire.deserialize(frames, content=False, copy=False)
        except Exception:
            return {}
        return peeked

    async def interrupt_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Stop the running cell, then the children; reply when every exit is confirmed."""
        if not self.session:
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
            if not self.interrupts.interrupt():
                self._closing_cell = None
            self.rlm.supervisor.interrupt_waits()
            report = await asyncio.wrap_future(run_off_thread(lambda: self.rlm.close(begun=True)))
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

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """Stop the children and confirm; a shutdown always ends in exit, with survivors named in the reply."""
        failure: Exception | None
        try:
            await asyncio.wrap_future(self._begin_shutdown("reset" if restart else "finalize"))
            failure = self.rlm.cleanup_failure
        except Exception as error:
            self.log.exception("the children may not have been stopped")
            self.exit_code = self.exit_code or 1
            failure = error
        content: dict[str, Any] = super().do_shutdown(restart)
        if failure is not None:
            content |= self._verb_content(failure)
        return content

    def _begin_shutdown(self, verb: str) -> Future[CleanupReport]:
        """Shut admission, interrupt the cell, and stop everything on a lifecycle thread."""
        self._shutting_down = True
        self._last_resort.start()
        self.rlm.lifecycle.begin()
        self.interrupts.interrupt()

        def shut_down() -> CleanupReport:
            report = self.rlm.shutdown(verb, begun=True)
            if not report.ok:
                self.exit_code = self.exit_code or 1
                print(report.summary(), file=sys.__stderr__, flush=True)
            return report

        return run_off_thread(shut_down)

    async def shutdown_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        await super().shutdown_request(stream, ident, parent)
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
        self._wire.send(self.control_stream, "shutdown_reply", content, parent, ident=ident)

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
        self.io_loop.add_callback(self.io_loop.stop)
        self._last_resort.arm()

    def _flush_output(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    def after_loop(self) -> None:
        """The main loop has ended, for whatever reason: nothing may be left behind."""
        self._last_resort.unwound()
        if not self._shutting_down:
            report = self.rlm.shutdown("exit")
            if not report.ok:
                self.exit_code = self.exit_code or 1


def sweep_in_background() -> None:
    """Kill what outlived an earlier kernel and its nursery both. Off the main thread: it reads all of the process list."""

    def sweep() -> None:
        orphans, survivors = kill_orphans(_SWEEP_S)
        for orphan in orphans:
            fate = "could not be killed" if orphan.pid in survivors else "was killed"
            _log.warning("left behind by an earlier kernel: pid %d %s: %s", orphan.pid, fate, orphan.command)

    run_off_thread(sweep)


def _is_empty(code: str) -> bool:
    return not code.strip()


def _is_rlm_line(code: str) -> bool:
    return all(line.split()[0] == "%rlm" for line in code.strip().splitlines() if line.strip())


class RLMKernelApp(IPKernelApp):
    """Launch the RLM kernel. Reads the same config files as ``ipykernel`` does."""

    kernel_class = Type("rlm_kernel.jupyter.kernel.RLMKernel", klass="ipykernel.kernelbase.Kernel").tag(config=True)
    classes = [*IPKernelApp.classes, RLMKernel, RLM]  # type: ignore[assignment]  # noqa: RUF012  (as in traitlets)

    def start(self) -> None:
        try:
            super().start()
        finally:
            if isinstance(self.kernel, RLMKernel):
                self.kernel.after_loop()
        code = getattr(self.kernel, "exit_code", 0)
        if code:
            sys.exit(code)
