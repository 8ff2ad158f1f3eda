"""Keep the control channel able to serve the lifecycle verbs while it serves anything else. A part of `attachment`, which see.

ipykernel serves one control request after the other, and two of them wait for a shell without giving the thread
"Control" back: starting the debugger (its first step is a cell for the main thread) and deleting a subshell (whose
thread is joined). Behind either, a stop button or a shutdown would wait for whatever cell runs there. Here the verbs
have a queue of their own, and those two waits are done by the event loop.

Who runs it: the thread "Control", except `set_parent` and `get_parent`, which any thread calls. It owns the stream on
the socket over which the kernel sends itself cells.

How each step can fail: the cell that starts the debugger is aborted, because one before it failed (it is sent again);
it fails, or is refused (the debugger reports that it has not started); the subshell does not exist (the kernel's own
reply says so); its cell never ends (the request is not answered, the verbs still are).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel.compiler import get_tmp_directory
from ipykernel.thread import CONTROL_THREAD_NAME
from zmq.eventloop.zmqstream import ZMQStream

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

VERBS = ("interrupt_request", "shutdown_request")


class ControlQueue:
    """See the module's docstring.

    Args:
        kernel: the kernel.
        stock: the kernel's own methods, by name.
    """

    def __init__(self, kernel: IPythonKernel, stock: Mapping[str, Callable[..., Any]]) -> None:
        self._kernel = kernel
        self._stock = stock
        self._verbs = asyncio.Lock()
        self._parent: ContextVar[dict[str, Any] | None] = ContextVar("control_parent", default=None)
        self._own_shell: ZMQStream | None = None

    async def dispatch(self, msg: list[Any], kind: str) -> None:
        """Serve a control request.

        Args:
            msg: its frames.
            kind: its type.
        """
        if kind in VERBS:
            async with self._verbs:
                await self._kernel.process_control(msg)
        else:
            await self._stock["dispatch_control"](msg)

    # -- whose request it is, now that two may be served at a time

    def set_parent(self, ident: Any, parent: dict[str, Any], channel: str = "shell") -> None:
        """Note the request that is being served. Each control request is served by a task, with variables of its own."""
        if channel == "control":
            self._parent.set(parent)
        self._stock["set_parent"](ident, parent, channel)

    def get_parent(self, channel: str | None = None) -> dict[str, Any]:
        """Return the request that is being served."""
        on_control = threading.current_thread().name == CONTROL_THREAD_NAME
        if channel == "control" or (channel is None and on_control):
            own = self._parent.get()
            if own is not None:
                return own
        stock: dict[str, Any] = self._stock["get_parent"](channel)
        return stock

    # -- waits for a shell

    async def debug_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Serve a request to the debugger; start it first, if need be, without keeping the thread from other requests."""
        request = parent["content"]
        if request.get("command") == "initialize" and not await self._start_debugger():
            refused = {"type": "response", "command": "initialize", "request_seq": request.get("seq", 0), "seq": 0}
            content = {**refused, "success": False, "message": "the kernel could not start the debugger"}
            assert self._kernel.session is not None
            self._kernel.session.send(stream, "debug_reply", content, parent, ident)
            return
        await self._stock["debug_request"](stream, ident, parent)

    async def _start_debugger(self) -> bool:
        """Make the debugger listen, which the main thread must do.

        Returns:
            whether it listens, or the kernel has none.
        """
        debugger = getattr(self._kernel, "debugger", None)
        if debugger is None or debugger.debugpy_initialized:
            return True
        Path(get_tmp_directory()).mkdir(mode=0o700, parents=True, exist_ok=True)
        host, port = debugger.debugpy_client.get_host_port()
        status = "aborted"
        while status == "aborted":
            status = await self._run_on_main(f"import debugpy; debugpy.listen(({host!r}, {int(port)}))")
        debugger.debugpy_initialized = status == "ok"
        return bool(debugger.debugpy_initialized)

    async def _run_on_main(self, code: str) -> str:
        """Run a silent cell on the main thread, behind those that are queued. Returns the status of its reply."""
        session = self._kernel.session
        assert session is not None
        if self._own_shell is None:
            self._own_shell = ZMQStream(self._kernel.debug_shell_socket)
        reply: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._own_shell.on_recv(lambda frames: None if reply.done() else reply.set_result(frames))
        session.send(self._own_shell, "execute_request", {"code": code, "silent": True})
        _, frames = session.feed_identities(await reply)
        return str(session.deserialize(frames)["content"]["status"])

    async def delete_subshell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Delete a subshell when its cell has ended. Cells that are queued in it are aborted."""
        subshell_id = parent["content"].get("subshell_id")
        manager = self._kernel.shell_channel_thread.manager
        with manager._lock_cache:  # `threading.enumerate` does not show them while the debugger is loaded
            thread = manager._cache.get(subshell_id)
        if thread is not None:
            idle: Future[None] = Future()
            manager.set_subshell_aborting(subshell_id, True)
            thread.io_loop.add_callback(idle.set_result, None)
            await asyncio.wrap_future(idle)
        await self._stock["delete_subshell_request"](stream, ident, parent)
