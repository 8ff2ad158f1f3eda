"""The programs that people run notebooks with: what they are given works, and when they have ended nothing of the kernel is left.

Each gets a notebook (or a script) that starts children, waits for them, and ends while others are still live.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import pytest

from rlm_kernel.jupyter.install import kernel_spec
from tests.support import plain_client
from tests.support.families import tag
from tests.support.kernels import GONE_S, MARK, Processes, environment, marked

pytestmark = pytest.mark.slow

CELLS = (
    "hs = rlm_query_batched(['[[reply: FINAL(one)]]', '[[reply: FINAL(two)]]'], blocking=False)\n"
    "print('answers:', [s.result for s in rlm_wait(hs)])",
    "live = [rlm_query('[[block]] {word}', blocking=False) for _ in range(2)]",
    "import time\nuntil = time.monotonic() + 20\n"
    "while any(h.status().pid is None for h in live):\n"
    "    assert time.monotonic() < until\n"
    "print('live:', [str(h.status().state) for h in live])",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory in which Jupyter finds our kernel."""
    kernels = tmp_path / "share" / "kernels" / "rlm"
    kernels.mkdir(parents=True)
    (kernels / "kernel.json").write_text(json.dumps(kernel_spec()))
    return tmp_path


@pytest.fixture
def variables(home, server) -> dict[str, str]:
    return {"JUPYTER_PATH": str(home / "share"), "TERM": "dumb", **plain_client.variables(server)}


@pytest.fixture
def notebook(home) -> Path:
    cells = [nbformat.v4.new_code_cell(text.replace("{word}", tag("live"))) for text in CELLS]
    kernel = {"kernelspec": {"name": "rlm", "display_name": "Python 3 (RLM)", "language": "python"}}
    path = home / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


def program(name: str) -> str:
    """Return the path of a program of this Python's environment."""
    return str(Path(sys.executable).parent / name)


def finish(arguments: list[str], home: Path, variables: dict[str, str], text: str | None = None) -> tuple[str, str]:
    """Run a program to its end. Nothing that it started may be left at that moment.

    Returns:
        what it wrote to stdout and stderr.
    """
    mark = uuid.uuid4().hex
    try:
        done = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            text=True,
            cwd=home,
            timeout=50,
            env=environment(home, **{MARK: mark, **variables}),
        )
        left = marked(mark)
        assert done.returncode == 0, done.stderr
        assert left == set(), done.stderr
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    return done.stdout, done.stderr


def outputs(path: Path) -> str:
    """Return the text of a notebook's streams."""
    cells = nbformat.read(path, nbformat.NO_CONVERT).cells
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


COMMANDS = {
    "nbconvert": ["jupyter-nbconvert", "--execute", "--to", "notebook", "notebook.ipynb", "--output", "done.ipynb"],
    "papermill": ["papermill", "notebook.ipynb", "done.ipynb", "--no-progress-bar", "--log-output"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_programs_that_execute_notebooks(home, notebook, variables, arguments) -> None:
    _, err = finish([program(arguments[0]), *arguments[1:]], home, variables)
    shown = outputs(home / "done.ipynb")
    assert "answers: ['one', 'two']" in shown
    assert "live: ['running', 'running']" in shown
    assert "Traceback" not in err


def test_jupyter_run(home, variables) -> None:
    (home / "script.py").write_text("\n".join(CELLS).replace("{word}", tag("live")))
    out, err = finish([program("jupyter-run"), "--kernel", "rlm", "script.py"], home, variables)
    assert "answers: ['one', 'two']" in out
    assert "live: ['running', 'running']" in out
    assert "Traceback" not in err


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str]) -> None:
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=inner, stdout=inner, stderr=inner, cwd=cwd, env=env, start_new_session=True
        )
        os.close(inner)
        self.shown = ""

    def expect(self, pattern: str, timeout_s: float = 30.0) -> None:
        """Wait until the program has shown something new that matches."""
        until = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown)):
            assert select.select([self._fd], [], [], max(0.0, until - time.monotonic()))[0], self.shown
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # its end of the terminal is closed
                data = b""
            assert data, f"the program has ended: {self.shown}"
            if b"\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
                os.write(self._fd, b"\x1b[1;1R")
            self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
        self.shown = self.shown[found.end() :]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def finish(self, timeout_s: float = 20.0) -> int:
        """Wait for the program's end, reading what it still shows."""
        until = time.monotonic() + timeout_s
        with suppress(OSError):
            while time.monotonic() < until and select.select([self._fd], [], [], until - time.monotonic())[0]:
                if not os.read(self._fd, 65536):
                    break
        return self.process.wait(max(1.0, until - time.monotonic()))

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def terminal(arguments: list[str], home: Path, variables: dict[str, str]) -> Iterator[tuple[Terminal, str]]:
    mark = uuid.uuid4().hex
    running = Terminal(arguments, home, environment(home, **{MARK: mark, **variables}))
    try:
        yield running, mark
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.wait(10)
        running.close()


def test_jupyter_console(home, variables, server) -> None:
    word = tag("console")
    arguments = [program("jupyter-console"), "--kernel", "rlm", "--simple-prompt"]
    with terminal(arguments, home, variables) as (console, mark):
        console.expect(r"In \[1\]: ")
        console.type("rlm_query('[[reply: FINAL(typed)]]')\n")
        console.expect("'typed'")
        console.expect(r"In \[2\]: ")
        console.type(f"h = rlm_query('[[block]] {word}', blocking=False)\n")
        server.wait_for_request(word)
        console.expect(r"In \[3\]: ")
        console.type("print('wai' + 'ting'); rlm_wait(h)\n")
        console.expect("waiting")
        os.kill(console.process.pid, signal.SIGINT)  # Ctrl-C
        console.expect("KeyboardInterrupt")
        console.expect(r"In \[4\]: ")
        console.type(f"h = rlm_query('[[block]] {word} again', blocking=False)\n")
        server.wait_for_request(f"{word} again")
        console.expect(r"In \[5\]: ")
        with Processes(sorted(marked(mark) - {console.process.pid})) as processes:
            assert len(processes.left) >= 3  # kernel, nursery, child
            console.type("exit\n")
            assert console.finish() == 0
            assert processes.wait(GONE_S) == []  # it asks for the shutdown, and leaves
    assert marked(mark) == set()
