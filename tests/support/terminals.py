"""IPython in a terminal, for tests: a real process on a pseudo terminal, whose processes are found by a mark."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pexpect  # type: ignore[import-untyped]  # comes with IPython

from tests.support.kernels import MARK, environment, kill_marked

_TIMEOUT_S = 20.0

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal:
    """One IPython on a pseudo terminal. Use as a context manager; on leaving, nothing of it runs any more.

    Args:
        home: a directory for what it keeps.
        options: further arguments of ``ipython``.
        variables: more environment variables.
    """

    def __init__(self, home: Path, *options: str, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        home.mkdir(parents=True, exist_ok=True)
        arguments = ["-m", "IPython", "--no-banner", "--no-confirm-exit", "--colors=nocolor", *options]
        self._process = pexpect.spawn(
            sys.executable,
            arguments,
            env={**environment(home, **{MARK: self.mark, "TERM": "dumb", **variables})},
            dimensions=(50, 400),
            timeout=_TIMEOUT_S,
            encoding="utf-8",
        )
        self._process.delaybeforesend = None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def prompt(self) -> str:
        """Wait for the next prompt. Returns what was shown before it."""
        self._process.expect(r"In \[\d+\]: ")
        return _ANSI.sub("", str(self._process.before))

    def run(self, line: str) -> str:
        """Run one line. Returns what was shown until the next prompt."""
        self.enter(line)
        return self.prompt()

    def enter(self, line: str) -> None:
        """Type a line and return; it is taken up when the terminal comes to it."""
        self._process.send(f"{line}\r")

    def until(self, text: str) -> None:
        """Wait until a text is shown."""
        self._process.expect_exact(text)

    def press(self, letter: str) -> None:
        """Press Ctrl and a letter."""
        self._process.sendcontrol(letter)

    def press_at_prompt(self, letter: str) -> None:
        """Press Ctrl and a letter when the prompt reads keys; before that, the terminal would take it."""
        assert self._process.waitnoecho(_TIMEOUT_S)
        self.press(letter)

    def wait_exit(self, timeout_s: float = 10.0) -> int:
        """Wait for the end of the process. Returns its exit code, or the signal's number, negative."""
        self._process.expect(pexpect.EOF, timeout=timeout_s)
        self._process.wait()
        code: Any = self._process.exitstatus
        return -int(self._process.signalstatus) if code is None else int(code)

    def stop(self) -> None:
        """Kill whatever of it still runs."""
        kill_marked(self.mark, lambda: self._process.isalive() and self._process.wait())
        self._process.close(force=True)

    def __enter__(self) -> Self:
        self.prompt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
