"""Real kernels for tests: started through jupyter_client, watched through pidfds.

A kernel and all that comes from it (nursery, children, what they started) carry a variable of their own in their environment, so that a
test can find every process of its kernel, however far it has daemonized itself away.
"""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

import rlm_kernel
from rlm_kernel.jupyter.install import kernel_spec

MARK = "RLM_TEST_KERNEL"
"""The variable by which the processes of one kernel are found."""

GONE_S = 2.5
"""Seconds within which every process is gone after a lifecycle request: half of what a Jupyter server waits before it kills."""


STOCK = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "stock"}
"""The kernelspec of a stock ipykernel, as `ipykernel install` writes it."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return an environment for processes of ours: this package importable, nothing of the user's configuration.

    Args:
        home: a directory for what IPython, Jupyter and the runs keep.
        more: further variables.
    """
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("RLM_", "OPENAI_", "JPY_"))}
    package_parent = str(Path(rlm_kernel.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")]))
    own = {
        "PYTHONPATH": path,
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "jupyter-config"),
        "JUPYTER_DATA_DIR": str(home / "jupyter-data"),
        "JUPYTER_RUNTIME_DIR": str(home / "jupyter-runtime"),
        "RLM_RUN_DIR": str(home / "runs"),
    }
    return {**inherited, **own, **more}


def marked(mark: str) -> set[int]:
    """Return the pids of all processes that carry a kernel's mark. Zombies have no environment left: they do not count."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
    return found


class Processes:
    """Processes that are watched through pidfds, so that "gone" can be asked at one exact moment. Use as a context manager."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._fds = {pid: os.pidfd_open(pid) for pid in pids}

    @property
    def left(self) -> list[int]:
        """The pids that have not exited, now."""
        poller = select.poll()
        for fd in self._fds.values():
            poller.register(fd, select.POLLIN)
        exited = {fd for fd, _ in poller.poll(0)}
        return [pid for pid, fd in self._fds.items() if fd not in exited]

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until all have exited, or the time is up. Returns the pids that are left."""
        until = time.monotonic() + timeout_s
        for fd in self._fds.values():
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0.0, until - time.monotonic()) * 1000)
        return self.left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def kill_marked(mark: str, reap: Callable[[], object]) -> None:
    """Kill every process that carries a mark, and wait until they are gone.

    Args:
        mark: the mark.
        reap: waits for the one among them that is a child of this process.
    """
    for _ in range(100):  # killing a kernel lets the nursery, and that lets the children end: so look again
        left = marked(mark)
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        with contextlib.suppress(ProcessLookupError), Processes(sorted(marked(mark))) as processes:
            processes.wait(1)


class Fifo:
    """A named pipe into which code of other processes writes lines, so that a test can wait for the moment that it runs."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""

    def write_code(self, expression: str) -> str:
        """Return an expression of Python that writes the value of an expression.

        It closes the file itself: an interrupt that came while a destructor does so would be swallowed there.
        """
        return f"__import__('pathlib').Path({self.path!r}).write_text(str({expression}) + '\\n')"

    def lines(self, count: int, timeout_s: float = 15.0) -> list[str]:
        """Wait for the next lines.

        Raises:
            TimeoutError: they did not come.
        """
        until = time.monotonic() + timeout_s
        while self._rest.count(b"\n") < count:
            if not select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"{count} lines not within {timeout_s} s; so far: {self._rest!r}")
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n", count)
        return [line.decode() for line in lines]

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Cell:
    """What one execute_request led to.

    Attributes:
        reply: the content of the execute_reply.
        messages: the iopub messages of the request, in order.
    """

    msg_id: str
    reply: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> str:
        return str(self.reply["status"])

    @property
    def error(self) -> str:
        """``Name: text`` of the reply's error, empty if there is none."""
        return f"{self.reply['ename']}: {self.reply['evalue']}" if self.status == "error" else ""

    def _streams(self, name: str) -> str:
        contents = (m["content"] for m in self.messages if m["msg_type"] == "stream")
        return "".join(c["text"] for c in contents if c["name"] == name)

    @property
    def stdout(self) -> str:
        return self._streams("stdout")

    @property
    def stderr(self) -> str:
        return self._streams("stderr")

    @property
    def result(self) -> dict[str, Any]:
        """The mimebundle of the execute_result, empty if there is none."""
        found = [m["content"]["data"] for m in self.messages if m["msg_type"] == "execute_result"]
        return found[-1] if found else {}

    @property
    def text(self) -> str:
        return str(self.result.get("text/plain", ""))


class Kernel:
    """One kernel and a client of it. Use as a context manager; on leaving, nothing of it runs any more.

    Args:
        home: a directory for what it keeps.
        spec: the kernelspec; ours by default.
        variables: more environment variables.
    """

    def __init__(self, home: Path, *, spec: Mapping[str, Any] | None = None, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.environment = environment(home, **{MARK: self.mark, **variables})
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._context = zmq.Context()
        connection = tempfile.mkdtemp(prefix="rlm-test-")
        self.manager = KernelManager(context=self._context, connection_file=os.path.join(connection, "kernel.json"))
        self.manager._kernel_spec = KernelSpec(**(spec or kernel_spec()))
        self._connection = Path(connection)
        self._is_ours = spec is None
        self.client: BlockingKernelClient
        self.pid = 0
        self._replies: dict[str, dict[str, Any]] = {}
        self._cells: dict[str, Cell] = {}
        self._idle: set[str] = set()

    # -- starting and ending

    def start(self) -> Self:
        try:
            self.manager.start_kernel(env=self.environment, stderr=self._log, stdout=self._log)
            self._connect()
        except BaseException as error:
            log = self.log
            self.stop()
            raise RuntimeError(f"the kernel did not start:\n{log}") from error
        return self

    def _connect(self) -> None:
        self.pid = self.manager.provisioner.pid  # type: ignore[union-attr]
        self.client = self.manager.client()
        self.client.start_channels(hb=False)
        self.client.wait_for_ready(timeout=30)

    def reconnect(self) -> None:
        """Take the process that the manager has started in place of the one before."""
        self.client.stop_channels()
        self._connect()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The kernel's process. It stays known after the manager has forgotten it."""
        process: Any = self.manager.provisioner.process  # type: ignore[union-attr]
        return process

    @property
    def log(self) -> str:
        """What the kernel wrote to its real stdout and stderr."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def stop(self) -> None:
        """Kill whatever of the kernel still runs, and release everything."""
        with contextlib.suppress(AttributeError):
            self.client.stop_channels()
        process = getattr(self.manager.provisioner, "process", None)
        kill_marked(self.mark, lambda: None if process is None else process.wait(10))
        if process is not None:
            process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.manager.cleanup_resources()
        self._context.destroy(linger=0)
        self._log.close()
        for path in self._connection.iterdir():
            path.unlink()
        self._connection.rmdir()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- cells

    def begin(self, code: str, **options: Any) -> Cell:
        """Send a cell, and return when the kernel has taken it up (not when it has ended)."""
        cell = self.send(code, **options)
        self.until(lambda: any(m["msg_type"] == "execute_input" for m in cell.messages))
        return cell

    def send(self, code: str, *, metadata: Mapping[str, Any] | None = None, **options: Any) -> Cell:
        """Send a cell. It is queued behind those that were sent before."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
            **options,
        }
        message = self.client.session.msg("execute_request", content, metadata=dict(metadata or {}))
        cell = self._cells[message["header"]["msg_id"]] = Cell(message["header"]["msg_id"])
        self.client.shell_channel.send(message)
        return cell

    def blocked(self, code: str) -> Cell:
        """Begin a cell that is going to block, and return when its code runs."""
        cell = self.begin(f"print('the code runs', flush=True)\n{code}")
        self.until(lambda: "the code runs" in cell.stdout)
        return cell

    def finish(self, cell: Cell, timeout_s: float = 20.0) -> Cell:
        """Wait for a cell's reply and for the end of its output."""
        self.until(lambda: bool(cell.reply) and cell.msg_id in self._idle, timeout_s)
        return cell

    def run(self, code: str, timeout_s: float = 20.0, **options: Any) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.send(code, **options), timeout_s)

    def ok(self, code: str, timeout_s: float = 20.0) -> Cell:
        """Run a cell that must succeed."""
        cell = self.run(code, timeout_s)
        assert cell.status == "ok", "\n".join([cell.error, *cell.reply.get("traceback", ()), cell.stderr])
        return cell

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the kernel; its value must be a literal."""
        return ast.literal_eval(self.ok(expression).text)

    # -- messages

    def until(self, condition: Any, timeout_s: float = 20.0) -> None:
        """Take messages in until a condition holds.

        Raises:
            TimeoutError: it does not hold in time; shows the kernel's log.
        """
        until = time.monotonic() + timeout_s
        while not condition():
            if not self._take(until - time.monotonic()):
                raise TimeoutError(f"not within {timeout_s} s; the kernel's log:\n{self.log[-3000:]}")

    def _take(self, timeout_s: float) -> bool:
        """Take in what has come on any channel, waiting for it. Returns False if the time is up."""
        channels = (self.client.iopub_channel, self.client.shell_channel, self.client.control_channel)
        poller = zmq.Poller()
        for channel in channels:
            poller.register(channel.socket, zmq.POLLIN)
        if timeout_s <= 0 or not poller.poll(int(timeout_s * 1000) + 1):
            return False
        for channel in channels:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._sort(channel.get_msg(timeout=0))
        return True

    def _sort(self, message: dict[str, Any]) -> None:
        parent = message["parent_header"].get("msg_id", "")
        cell = self._cells.get(parent)
        if message["msg_type"] == "execute_reply" and cell is not None:
            assert not cell.reply, f"a second reply: {message['content']}"
            cell.reply = message["content"]
            if self._is_ours:  # whatever has become of the cell
                assert message["metadata"]["rlm"].keys() >= {
                    "episode_id",
                    "done",
                    "final_answer",
                    "variables",
                    "children",
                }
        elif message["msg_type"].endswith("_reply") and message["header"].get("msg_type") != "execute_reply":
            self._replies.setdefault(parent, message["content"])
        elif cell is not None:
            cell.messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self._idle.add(parent)

    def ask(self, kind: str, content: Mapping[str, Any] | None = None, *, channel: str = "control") -> str:
        """Send a request without waiting. Returns its id."""
        message = self.client.session.msg(kind, dict(content or {}))
        (self.client.control_channel if channel == "control" else self.client.shell_channel).send(message)
        return str(message["header"]["msg_id"])

    def answer(self, msg_id: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait for the reply to a request."""
        self.until(lambda: msg_id in self._replies, timeout_s)
        return self._replies[msg_id]

    def answer_at_once(
        self, msg_id: str, processes: Processes, timeout_s: float = 20.0
    ) -> tuple[dict[str, Any], list[int]]:
        """Wait for the reply to a control request, reading nothing else before it.

        Returns:
            the reply, and the processes that had not exited at the moment at which it came.
        """
        until = time.monotonic() + timeout_s
        while True:
            message = self.client.control_channel.get_msg(timeout=until - time.monotonic())
            left = processes.left
            self._sort(message)
            if message["parent_header"].get("msg_id") == msg_id:
                return message["content"], left

    def reply_at_once(self, cell: Cell, processes: Processes, timeout_s: float = 20.0) -> list[int]:
        """Wait for a cell's execute_reply, reading nothing else. Returns the processes left at the moment at which it came."""
        until = time.monotonic() + timeout_s
        while not cell.reply:
            message = self.client.shell_channel.get_msg(timeout=until - time.monotonic())
            left = processes.left
            self._sort(message)
        return left

    def interrupt(self) -> dict[str, Any]:
        """Press the stop button, and wait for the reply."""
        return self.answer(self.ask("interrupt_request"))

    def wait_exit(self, timeout_s: float = 10.0) -> int:
        """Wait for the end of the kernel's process. Returns its exit code."""
        return self.process.wait(timeout_s)

    @property
    def processes(self) -> set[int]:
        """All live processes of this kernel, itself excepted."""
        return marked(self.mark) - {self.pid}


@contextlib.contextmanager
def command(arguments: Sequence[str], home: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command ``rlm-kernel``; on leaving, nothing of it runs any more.

    Yields:
        the process, whose stdout and stderr are pipes, and the mark of all its processes.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "rlm_kernel.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home, **{MARK: mark, **variables}),
    )
    try:
        yield process, mark
    finally:
        kill_marked(mark, lambda: process.wait(10))
        process.wait(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
