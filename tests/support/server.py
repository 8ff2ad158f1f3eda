"""Real Jupyter servers for tests: ``python -m jupyter_server`` on a Unix-domain socket, its kernels on ipc sockets.

So no port is needed that somebody else could take. Server, kernels, and all that comes from them carry the mark of `tests.support.kernels`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import websocket
from jupyter_client.kernelspec import KernelSpecManager

from rlm_kernel.jupyter.install import install
from tests.support.kernels import MARK, Cell, environment, kill_marked, marked

_READY = "the socket is there"

CULL_NOBODY_S = 3600

_EXTENSION = """
import tornado.web

class _IdleTimeout(tornado.web.RequestHandler):
    def get(self, seconds):
        self.settings["kernel_manager"].cull_idle_timeout = int(seconds)
        self.write("null")

def _jupyter_server_extension_points():
    return [{{"module": "for_tests"}}]

def _load_jupyter_server_extension(app):
    # The first turn of the loop binds the socket; the line that says "is running" comes before.
    app.io_loop.add_callback(app.io_loop.add_callback, app.log.critical, {ready!r})
    app.web_app.add_handlers(".*$", [("/idle-timeout/(.*)", _IdleTimeout)])
"""
"""An extension of the server: it tells when requests are served, and lets a test set the time after which idle kernels are
culled. (From the start it would be too short for a kernel that starts on a busy machine.)"""

TOKEN = "token-of-the-tests"
_ANSWER_S = 30.0

OPTIONS: dict[str, Any] = {
    "ServerApp.allow_root": True,
    "ServerApp.open_browser": False,
    "ServerApp.terminals_enabled": False,
    # What is installed beside it registers itself, and takes a second to load.
    "ServerApp.jpserver_extensions": {
        "for_tests": True,
        "jupyter_lsp": False,
        "jupyter_server_terminals": False,
        "jupyterlab": False,
        "notebook_shim": False,
    },
    "IdentityProvider.token": TOKEN,
    "KernelManager.transport": "ipc",
    "MappingKernelManager.cull_idle_timeout": CULL_NOBODY_S,
    "MappingKernelManager.cull_interval": 1,
    "MappingKernelManager.cull_connected": True,
}


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix-domain socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path)


def connect(path: str) -> socket.socket:
    """Connect to a Unix-domain socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


class Server:
    """One server. Use as a context manager; on leaving, nothing of it runs any more.

    Args:
        home: a directory for what it and its kernels keep.
        specs: the kernelspecs that it has, by name, with the environment variables that they set.
        variables: more environment variables.
    """

    def __init__(self, home: Path, specs: Mapping[str, Mapping[str, str]], **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        # The path of a socket must not be longer than 100 characters or so.
        self._short = Path(tempfile.mkdtemp(prefix="rlm-"))
        self.path = str(self._short / "s")
        self.environment = environment(home, **{MARK: self.mark, "JUPYTER_RUNTIME_DIR": str(self._short), **variables})
        self.environment["PYTHONPATH"] += os.pathsep + str(self._short)
        self._options = {**OPTIONS, "ServerApp.sock": self.path, "ServerApp.root_dir": str(home)}
        manager = KernelSpecManager(data_dir=self.environment["JUPYTER_DATA_DIR"])
        manager.kernel_dirs.append(manager.user_kernel_dir)  # lest it warn that this process would not find it
        for name, set_variables in specs.items():
            install(user=True, name=name, env=set_variables, manager=manager)
        self._lines: list[str] = []
        self._said = threading.Condition()
        self.process: subprocess.Popen[str]

    def start(self) -> Self:
        config = self._short / "config.json"
        tree: dict[str, dict[str, Any]] = {}
        for trait, value in self._options.items():
            section, _, name = trait.partition(".")
            tree.setdefault(section, {})[name] = value
        config.write_text(json.dumps(tree))
        (self._short / "for_tests.py").write_text(_EXTENSION.format(ready=_READY))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", f"--config={config}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self._short,
        )
        self._reader = threading.Thread(target=self._read, name="server-log", daemon=True)
        self._reader.start()
        try:
            self.wait_for_line(_READY)
        except BaseException:
            self.stop()
            raise
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self._lines.append(line)
                self._said.notify_all()
        with self._said:
            self._lines.append("(end of the log)\n")
            self._said.notify_all()

    @property
    def log(self) -> str:
        """What server and kernels wrote to their stderr."""
        with self._said:
            return "".join(self._lines)

    def wait_for_line(self, text: str, timeout_s: float = _ANSWER_S) -> None:
        """Wait until the log has a line with a text.

        Raises:
            TimeoutError: it has not come; shows the log.
        """
        with self._said:
            if not self._said.wait_for(lambda: any(text in line for line in self._lines), timeout_s):
                raise TimeoutError(f"no {text!r} within {timeout_s} s:\n{''.join(self._lines)[-5000:]}")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Make a request to the REST API.

        Returns:
            the status, and the JSON of the answer (None if it has no body).
        """
        with contextlib.closing(_Connection(self.path)) as connection:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Authorization": f"token {TOKEN}"}
            )
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else None

    def cull_idle_kernels_after(self, seconds: int) -> None:
        """Have kernels culled that have been idle so long; it looks once a second."""
        assert self.request("GET", f"/idle-timeout/{seconds}") == (200, None)

    def open(self, name: str) -> ServerKernel:
        """Open a notebook's session with a new kernel, and a WebSocket to it."""
        notebook = {"path": f"{uuid.uuid4().hex}.ipynb", "type": "notebook", "name": "", "kernel": {"name": name}}
        status, session = self.request("POST", "/api/sessions", notebook)
        assert status == 201, (status, session, self.log[-3000:])
        return ServerKernel(self, session["kernel"]["id"])

    @property
    def processes(self) -> set[int]:
        """All live processes of its kernels."""
        return marked(self.mark) - {self.process.pid}

    def stop(self) -> None:
        """Kill whatever of it still runs, and release everything."""
        kill_marked(self.mark, lambda: self.process.wait(10))
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        shutil.rmtree(self._short)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServerKernel:
    """A kernel behind a server, and a WebSocket to it. Use as a context manager; on leaving, the kernel is shut down.

    Attributes:
        id: the server's name for it.
        messages: all iopub messages so far, in order.
    """

    def __init__(self, server: Server, kernel_id: str) -> None:
        self.server = server
        self.id = kernel_id
        self.messages: list[dict[str, Any]] = []
        self._cells: dict[str, Cell] = {}
        self._idle: set[str] = set()
        self._session = uuid.uuid4().hex
        self._socket = self._connect()

    def _connect(self) -> websocket.WebSocket:
        return websocket.create_connection(
            f"ws://localhost/api/kernels/{self.id}/channels?session_id={self._session}",
            socket=connect(self.server.path),
            header=[f"Authorization: token {TOKEN}"],
            timeout=_ANSWER_S,
        )

    def reconnect(self) -> None:
        """Open another WebSocket, as front ends do after a restart: the server gives it messages only when it gets the new kernel's.

        Through the one before, what the kernel publishes until the server's subscription has reached it is lost.
        """
        self._socket.close(timeout=1)
        self._socket = self._connect()

    def send(self, code: str) -> Cell:
        """Send a cell."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": "execute_request",
            "session": self._session,
            "username": "tests",
            "date": datetime.now(UTC).isoformat(),
            "version": "5.3",
        }
        cell = self._cells[header["msg_id"]] = Cell(header["msg_id"])
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "buffers": []}
        self._socket.send(json.dumps({"channel": "shell", **message}))
        return cell

    def ok(self, code: str) -> Cell:
        """Run a cell that must succeed."""
        cell = self.finish(self.send(code))
        assert cell.status == "ok", "\n".join([cell.error, *cell.reply.get("traceback", ()), cell.stderr])
        return cell

    def blocked(self, code: str) -> Cell:
        """Begin a cell that is going to block, and return when its code runs."""
        cell = self.send(f"print('the code runs', flush=True)\n{code}")
        self.until(lambda: "the code runs" in cell.stdout)
        return cell

    def finish(self, cell: Cell, timeout_s: float = _ANSWER_S) -> Cell:
        """Wait for a cell's reply and for the end of its output."""
        self.until(lambda: bool(cell.reply) and cell.msg_id in self._idle, timeout_s)
        return cell

    def until(self, condition: Callable[[], bool], timeout_s: float = _ANSWER_S) -> None:
        """Take messages in until a condition holds.

        Raises:
            TimeoutError: it does not hold in time; shows the log.
        """
        until = time.monotonic() + timeout_s
        while not condition():
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            try:
                self._take(json.loads(self._socket.recv()))
            except websocket.WebSocketTimeoutException:
                raise TimeoutError(f"not within {timeout_s} s; the log:\n{self.server.log[-5000:]}") from None

    def _take(self, message: dict[str, Any]) -> None:
        cell = self._cells.get(message["parent_header"].get("msg_id", ""))
        if message["channel"] == "iopub":
            self.messages.append(message)
        if cell is None:
            return
        if message["msg_type"] == "execute_reply":
            cell.reply = message["content"]
        elif message["channel"] == "iopub":
            cell.messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self._idle.add(cell.msg_id)

    def request(self, method: str, action: str = "") -> int:
        """Ask the server to do something with the kernel: ``DELETE``, or ``POST`` of ``interrupt`` or ``restart``. Returns the status."""
        return self.server.request(method, f"/api/kernels/{self.id}{action and '/' + action}")[0]

    @property
    def exists(self) -> bool:
        """Whether the server knows it."""
        return self.request("GET") == 200

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            self._socket.close(timeout=1)
        with contextlib.suppress(OSError):  # the server is gone, and the test knows
            self.request("DELETE")
