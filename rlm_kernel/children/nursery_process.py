"""The root's side of the nursery: start it, hold its channel, and end it.

Who runs it: the supervisor's reactor thread starts it and talks to it; any thread may `kill` it. It owns the ``Popen``
object, the root's end of the control channel and a pidfd of the nursery.

How each step can fail: the exec fails (`NurseryError` with the reason); the nursery dies while it warms up (its pidfd
becomes readable; the tail of its log says why); it does not read (messages queue up in the channel); it does not exit
(`kill`: it is our own child and not reaped, so the signal cannot hit another process).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlm_kernel.children import posix
from rlm_kernel.children.worker import MARKER_VARIABLE
from rlm_kernel.credentials import without_secrets
from rlm_kernel.errors import NurseryError
from rlm_kernel.wire import messages as m
from rlm_kernel.wire.channel import Channel, close_fds

_PROGRAM = "import sys; sys.path.append({path!r}); from rlm_kernel.children.nursery import main; main(sys.argv[1:])"
_LOG_TAIL = 2000


class NurseryProcess:
    """A running nursery. Make one with `start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel[Any],
        pidfd: int | None,
        marker: str,
        log_path: str,
        warm_up: str = "",
    ) -> None:
        self._process = process
        self.warm_up = warm_up
        self.channel = channel
        self.pidfd = pidfd
        self.marker = marker
        self._log_path = log_path
        self.ready = False
        self.active_at = time.monotonic()
        self._pidfd_lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def start(
        cls, *, warm_up: str = "", preload: Sequence[str] = (), keep_secrets: Sequence[str] = (), log_path: str = ""
    ) -> NurseryProcess:
        """Exec a fresh nursery. Returns at once; it sends `NurseryReady` when it is warm, and queues spawns until then.

        Args:
            warm_up: ``"module:callable"`` that loads what children need.
            preload: further modules to import.
            keep_secrets: environment variables to pass on although they look like secrets.
            log_path: file for the nursery's own output, empty for none.

        Raises:
            NurseryError: the process could not be started.
        """
        marker_value = secrets.token_hex(8)
        environ = without_secrets(os.environ, keep_secrets)
        environ[MARKER_VARIABLE] = marker_value
        # numpy's BLAS starts threads at import otherwise, and a process with threads must not fork.
        environ["OPENBLAS_NUM_THREADS"] = "1"
        ours, theirs = socket.socketpair()
        own_pidfd = posix.open_pidfd(os.getpid())
        passed = [theirs.fileno()] + ([] if own_pidfd is None else [own_pidfd])
        options = {
            "control_fd": theirs.fileno(),
            "kernel_pid": os.getpid(),
            "kernel_pidfd": own_pidfd,
            "warm_up": warm_up,
            "preload": list(preload),
        }
        program = _PROGRAM.format(path=str(Path(__file__).resolve().parents[2]))
        try:
            output = _open_log(log_path)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", program, json.dumps(options)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    cwd="/",
                    pass_fds=passed,
                    start_new_session=True,
                )
            finally:
                if output != subprocess.DEVNULL:
                    os.close(output)
        except OSError as error:
            ours.close()
            raise NurseryError(f"cannot start the nursery process: {error}") from error
        finally:
            theirs.close()
            if own_pidfd is not None:
                os.close(own_pidfd)
        marker = f"{MARKER_VARIABLE}={marker_value}"
        return cls(process, Channel(ours, m.FromNursery), posix.open_pidfd(process.pid), marker, log_path, warm_up)

    @property
    def has_exited(self) -> bool:
        """Whether the process is gone; reaps it if so."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL; harmless if it is gone. Its children follow by their parent-death signal."""
        # Any thread may call this while another closes: a pidfd's number, once closed, may name another process.
        with self._pidfd_lock:
            if self.pidfd is not None:
                posix.signal_pidfd(self.pidfd, signal.SIGKILL)
            else:
                self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its exit and reap it. Returns whether it is gone."""
        if self.pidfd is not None:
            if not posix.pidfd_has_exited(self.pidfd, timeout_s):
                return False
            self._process.wait()
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def describe_exit(self) -> str:
        """Say how it ended, with the last lines that it wrote."""
        code = self._process.returncode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        try:
            tail = Path(self._log_path).read_text("utf-8", "replace")[-_LOG_TAIL:].strip() if self._log_path else ""
        except OSError:
            tail = ""
        return f"the nursery process ended ({how})" + (f"; it wrote:\n{tail}" if tail else "")

    def close(self) -> None:
        """Close the channel and the pidfd. May be called twice."""
        self.channel.close()
        with self._pidfd_lock:
            if self.pidfd is not None:
                pidfd, self.pidfd = self.pidfd, None
                close_fds([pidfd])


def _open_log(path: str) -> int:
    if not path:
        return subprocess.DEVNULL
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
