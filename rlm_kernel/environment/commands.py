"""Run a command of the system and hand on what it prints as it comes.

Not IPython's way, a pseudo-terminal, which would fork a process that has threads.

Who runs it: `run`, the thread whose code asked for the command; `kill`, any thread or a signal handler. It owns the process
until it is reaped. How each step can fail: the command cannot be started (OSError); the waiting thread is
interrupted (the command is killed with what it started, in its own session); something that the command left behind keeps its
output open (waited for, until `kill`).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable


def start_process(command: str) -> subprocess.Popen[bytes]:
    """Start a command. An exception from outside in mid-start would leave it running, so a timeout waits until this is over."""
    posix = os.name == "posix"
    return subprocess.Popen(
        command,
        shell=True,
        executable=os.environ.get("SHELL") if posix else None,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=posix,
    )


class Commands:
    """The commands of one shell, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # Held while the process is killed or forgotten: it is not reaped before. Reentrant, for a signal handler.
        self._lock = threading.RLock()

    def run(self, command: str, write: Callable[[str], object]) -> int:
        """Run a command to its end.

        Args:
            command: for the user's shell.
            write: is given the output, stdout and stderr together.

        Returns:
            its exit code, or minus the number of the signal that killed it.
        """
        process = start_process(command)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            with self._lock:
                self._process = process
            assert process.stdout is not None
            with process.stdout as pipe:
                while chunk := pipe.read1(65536):  # type: ignore[attr-defined]
                    write(decoder.decode(chunk))
                write(decoder.decode(b"", final=True))
            _await_exit(process)
        except BaseException:
            _kill(process)
            raise
        finally:
            with self._lock:
                self._process = None
            process.wait()
        return process.returncode

    def kill(self) -> None:
        """Kill the command that is running, if one is, with what it started."""
        with self._lock:
            if self._process is not None:
                _kill(self._process)


def _await_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, without reaping it, so that it can be killed meanwhile."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that has not been reaped, and its group."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
