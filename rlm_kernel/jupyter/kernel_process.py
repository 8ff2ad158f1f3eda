"""One kernel on this machine that belongs to this process: start it, talk to it, notice when it dies, and see it gone.

Who runs it: the caller's threads, one at a time (`abandon` excepted, which uses signals only). It starts no thread and no event loop.
It owns the kernel's process (a session and process group of its own), a private directory with the connection file and the sockets, a
temporary file for what the kernel writes to its real stdout and stderr, a pidfd, and the client's sockets.

The channels are Unix sockets in the private directory, so that kernels which start side by side cannot take each other's ports. Everything
that comes from the kernel carries a marker in its environment. So when `stop` returns, not only the kernel is gone but also its nursery,
its children, and whatever the cells' code has started.

How each step can fail. The kernel does not start: `KernelDied`, with the end of what it wrote. It dies: the pidfd says so at once,
whatever we wait for (without pidfds it is looked at four times a second): `KernelDied`, after what it had sent before has been taken in.
It does not end in time when asked: it is killed. Something marked cannot be killed: `stop` names it. This process is killed: the kernel
sees that its parent is gone, and ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.launcher import launch_kernel

from rlm_kernel.children import posix, sweep
from rlm_kernel.errors import KernelDied

MARKER_VARIABLE = "RLM_KERNEL_OWNER"
"""Carried by everything that comes from a kernel of ours."""

_LOOK_S = 0.25
"""Seconds between two looks at a process that cannot be watched."""

_ASK_AGAIN_S = 0.5
"""Seconds after which a kernel that is starting is asked again: what was published before it was subscribed to is lost."""

_AT_ONCE = 1000
"""Messages of one channel that are taken in at once: the others have their turn, too."""

_NURSERY_S = 4.0
"""Seconds for a nursery whose kernel is gone to stop the children, by their graces, and to end."""

_KILL_S = 2.0
"""Seconds for what has been sent SIGKILL."""

_TAIL = 4000
"""Characters of the kernel's log that an error shows."""

Received = tuple[str, dict[str, Any]]
"""Channel, message."""


class KernelProcess:
    """See the module's docstring.

    Args:
        argv: the kernelspec's command, with ``{connection_file}`` in it.
        arguments: more arguments.
        env: the whole environment.
        cwd: working directory, None for this process's.
        wake_fd: a descriptor that ends a wait when it becomes readable, None for none.
    """

    def __init__(
        self,
        argv: Sequence[str],
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        wake_fd: int | None = None,
    ) -> None:
        self._marker = uuid.uuid4().hex
        self._owner = os.getpid()
        self._log = tempfile.TemporaryFile(mode="ab+")  # noqa: SIM115  (closed by `_release`)
        self._folder = Path(tempfile.mkdtemp(prefix="rlm-kernel-"))
        self._pidfd: int | None = None
        self._client: BlockingKernelClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._wake_fd = wake_fd
        try:
            self._launch(argv, arguments, {**env, MARKER_VARIABLE: self._marker}, cwd)
        except BaseException:
            self.stop(0.0)
            raise

    def _launch(self, argv: Sequence[str], arguments: Sequence[str], env: dict[str, str], cwd: str | None) -> None:
        file = str(self._folder / "kernel.json")
        where = {} if sys.platform == "win32" else {"transport": "ipc", "ip": str(self._folder / "channel")}
        write_connection_file(file, key=uuid.uuid4().hex.encode(), **where)  # type: ignore[arg-type]
        command = [part.replace("{connection_file}", file) for part in argv]
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        try:
            self._process = launch_kernel(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._log.fileno(),
                stderr=self._log.fileno(),
                env=env,
                cwd=cwd,
            )
        except OSError as error:
            raise KernelDied(f"the kernel cannot be started: {error}. The command was: {' '.join(command)}") from error
        self._pidfd = posix.open_pidfd(self._process.pid)
        self._client = client = BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels(stdin=False, hb=False)
        self._poller = zmq.Poller()
        self._channels = {
            "iopub": client.iopub_channel,
            "shell": client.shell_channel,
            "control": client.control_channel,
        }
        for channel in self._channels.values():
            self._poller.register(channel.socket, zmq.POLLIN)
        if self._pidfd is not None:
            self._poller.register(self._pidfd, zmq.POLLIN)

    # -- talking

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def folder(self) -> Path:
        """A directory that only this user can look into; it goes with the kernel."""
        return self._folder

    @property
    def has_died(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.poll() is not None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the kernel answers, and its output reaches us.

        Raises:
            KernelDied: it ended, or did not answer in time.
        """
        give_up_at = time.monotonic() + timeout_s
        answered = published = False
        ask_at = 0.0
        while not (answered and published):
            now = time.monotonic()
            if now >= give_up_at:
                raise KernelDied(f"the kernel did not answer within {timeout_s:g} s of its start{self.log_tail()}")
            if now >= ask_at:
                self.send("shell", "kernel_info_request", {})
                ask_at = now + _ASK_AGAIN_S
            for channel, message in self.receive(min(ask_at, give_up_at)):
                answered |= message["msg_type"] == "kernel_info_reply"
                published |= channel == "iopub"

    def send(
        self, channel: str, kind: str, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> str:
        """Send a request. Returns its id."""
        message = self.message(kind, content, metadata)
        self.send_message(channel, message)
        return str(message["header"]["msg_id"])

    def message(
        self, kind: str, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make a request, which has its id before it is sent."""
        assert self._client is not None
        message: dict[str, Any] = self._client.session.msg(kind, dict(content), metadata=dict(metadata or {}))
        return message

    def send_message(self, channel: str, message: dict[str, Any]) -> None:
        """Send a request that `message` has made."""
        self._channels[channel].send(message)

    def receive(self, until: float | None = None, *, wakes: bool = False) -> list[Received]:
        """Wait for messages, and return what has come on all channels, for each channel in order.

        Args:
            until: ``time.monotonic()`` at which to return in any case; None for never.
            wakes: whether the descriptor to wake us ends the wait.

        Returns:
            nothing if the time is up, or if the descriptor to wake us is readable.

        Raises:
            KernelDied: the process has ended, and everything that it had sent has been returned before.
        """
        if wakes and self._wake_fd is not None:
            self._poller.register(self._wake_fd, zmq.POLLIN)
            try:
                self._poll(until)
            finally:
                self._poller.unregister(self._wake_fd)
        else:
            self._poll(until)
        found = list(self._waiting())
        if not found and self.has_died:
            # It may have died between the two looks.
            found = list(self._waiting())
            if not found:
                raise KernelDied(self._obituary())
        return found

    def _poll(self, until: float | None) -> None:
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            wait = left if self._pidfd is not None else _LOOK_S if left is None else min(left, _LOOK_S)
            if self._poller.poll(None if wait is None else math.ceil(wait * 1000)) or wait == left or self.has_died:
                return

    def _waiting(self) -> Iterator[Received]:
        for name, channel in self._channels.items():
            for _ in range(_AT_ONCE):
                if not channel.msg_ready():
                    break
                yield name, channel.get_msg(timeout=0)

    def log_tail(self) -> str:
        """Return the end of what the kernel wrote to its real stdout and stderr, as a paragraph for an error."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace").strip()
        return f". The end of its log:\n{text}" if text else ""

    def empty_log(self) -> None:
        """Forget what the kernel has written so far: a kernel may live for many episodes."""
        os.ftruncate(self._log.fileno(), 0)

    def _obituary(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"the kernel (pid {self.pid}) {how}{self.log_tail()}"

    # -- ending

    def stop(self, timeout_s: float) -> tuple[int, ...]:
        """End the kernel and everything that came from it, and release what belongs to it. May be called twice.

        Args:
            timeout_s: seconds that the kernel is given to stop its children and end by itself.

        Returns:
            pids that could not be confirmed gone.
        """
        if os.getpid() != self._owner or self._log.closed:
            return ()
        survivors: tuple[int, ...] = ()
        try:
            if self._process is not None:
                survivors = self._end(timeout_s)
        finally:
            self._release()
        return survivors

    def _end(self, timeout_s: float) -> tuple[int, ...]:
        assert self._process is not None
        confirmed = False
        named: tuple[int, ...] = ()
        if timeout_s > 0 and not self.has_died:
            confirmed, named = self._ask_to_end(time.monotonic() + timeout_s)
        if not self.has_died:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # ours and unreaped, and the leader of its group
        self._process.wait()
        if not confirmed:
            self._wait_for_the_rest(time.monotonic() + _NURSERY_S)
        marker = f"{MARKER_VARIABLE}={self._marker}"
        left = sweep.kill_marked(marker, time.monotonic() + _KILL_S)
        return left if posix.IS_LINUX else named

    def _ask_to_end(self, give_up_at: float) -> tuple[bool, tuple[int, ...]]:
        """Send a shutdown request. Returns whether the kernel has ended of it, and whom it named as survivors."""
        named: tuple[int, ...] = ()
        asked = self.send("control", "shutdown_request", {"restart": False})
        try:
            while time.monotonic() < give_up_at:
                for _channel, message in self.receive(give_up_at):
                    if message["parent_header"].get("msg_id") == asked and message["msg_type"] == "shutdown_reply":
                        named = tuple(message["content"].get("survivors", ()))
        except KernelDied:
            assert self._process is not None
            return self._process.returncode == 0, named
        return False, named

    def _wait_for_the_rest(self, give_up_at: float) -> None:
        """Give the nursery of a kernel that did not end by itself the time to clean up: it knows more than a marker tells."""
        marker = f"{MARKER_VARIABLE}={self._marker}".encode()
        for pid in posix.all_pids():
            pidfd = posix.open_pidfd(pid) if pid != os.getpid() and posix.environ_has(pid, marker) else None
            if pidfd is not None:
                posix.pidfd_has_exited(pidfd, give_up_at - time.monotonic())
                os.close(pidfd)

    def _release(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._pidfd is not None:
            pidfd, self._pidfd = self._pidfd, None
            os.close(pidfd)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
