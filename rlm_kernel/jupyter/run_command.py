"""``rlm-kernel run`` and ``rlm-kernel demo``: one task over one text, in a real kernel, from the command line.

Two processes. The command starts the kernel through jupyter_client and sends it one cell, which calls `serve_run`
there; what happens comes back as display messages of a media type of our own, so any front end could show it. Progress
goes to standard error, the answer to standard output.

How it ends: with the answer (exit code 0); without one, by an error, by a kernel that died (1); by Ctrl-C or SIGTERM
(130, 143). In each case the kernel is shut down first, through the control channel, and that reply comes only after
every child's exit is confirmed. If the command itself is killed, the kernel notices that its parent is gone and ends;
the nursery notices that the kernel is gone and stops the children.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import ChildCleanupError, ConfigurationError, RLMError

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.manager import KernelManager

EVENT_MIME = "application/vnd.rlm-kernel.event+json"
"""Media type of the progress messages."""

_START_TIMEOUT_S = 60.0
_LOOK_S = 0.5
"""Seconds after which a silent kernel is looked at: it may have died."""

_WIDTH = 112
"""Characters of a line of progress."""

_TERMINATED = 128 + signal.SIGTERM


class RunFailed(RLMError):
    """The run ended without an answer."""


# ---------------------------------------------------------------------------------------------------- in the command


def run(args: argparse.Namespace) -> int:
    """Answer one task. Returns the exit code."""
    with _context_file(args.context) as path:
        return _run(path, args.task, args)


def demo(args: argparse.Namespace) -> int:
    """Answer a sample task over a sample text with the embedded model. Returns the exit code."""
    from rlm_kernel.clients.demo import DEMO_NOTICE, SAMPLE_TASK, sample_text

    if args.model == "demo":
        print(DEMO_NOTICE, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rlm-kernel-demo-") as folder:
        path = Path(folder) / "sample.txt"
        path.write_text(sample_text(), "utf-8", newline="")
        return _run(str(path), SAMPLE_TASK, args)


@contextlib.contextmanager
def _context_file(name: str | None) -> Iterator[str | None]:
    """Give the path of the context: a file that exists, standard input put into one, or None."""
    if name is None:
        yield None
    elif name == "-":
        with tempfile.TemporaryDirectory(prefix="rlm-kernel-run-") as folder:
            path = Path(folder) / "stdin.txt"
            path.write_bytes(sys.stdin.buffer.read())
            yield str(path)
    else:
        try:
            with open(name, "rb"):
                pass
        except OSError as error:
            raise ConfigurationError("--context", name, f"cannot be read: {error.strerror}") from None
        yield os.path.abspath(name)


def _run(path: str | None, task: str, args: argparse.Namespace) -> int:
    settings = _settings(args)
    display = _Display()
    began = time.monotonic()
    timeout_s: float | None = getattr(args, "timeout_s", None)
    deadline = None if timeout_s is None else began + timeout_s
    try:
        with _terminable(), _kernel(settings, display) as (manager, client):
            job = json.dumps({"context": path, "task": task, "max_iterations": getattr(args, "max_iterations", None)})
            _follow(manager, client, job, display, deadline)
    except (RunFailed, ChildCleanupError) as error:
        print(f"rlm-kernel: {error}", file=sys.stderr)
        display.show_end(time.monotonic() - began)
        return 1
    except _Terminated:
        return _TERMINATED
    display.show_end(time.monotonic() - began)
    if getattr(args, "json", False):
        print(json.dumps(display.end))
    elif display.end["answer"] is not None:
        print(display.end["answer"])
    return 0 if display.end["answer"] is not None else 1


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Check the options here, where the user sees the error at once, and return them as the kernel's environment."""
    from rlm_kernel.session.config import SETTINGS, Settings

    settings = Settings()
    # Progress is shown here. A live table would become output of the model's code, which the model reads.
    environ = {SETTINGS["live_views"].env or "": "false"}
    for name in ("model", "max_iterations", "max_depth"):
        value = getattr(args, name, None)
        if value is not None:
            settings.set(name, value)
            environ[SETTINGS[name].env or ""] = str(value)
    return environ


class _Terminated(BaseException):
    """SIGTERM: unwind, so that the kernel is shut down."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    def on_sigterm(_signum: int, _frame: object) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _kernel(environ: dict[str, str], display: _Display) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """Start the real kernel, and shut it down whatever happens."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    from rlm_kernel.jupyter.install import kernel_spec

    manager = KernelManager()
    manager._kernel_spec = KernelSpec(**kernel_spec())
    with tempfile.TemporaryFile() as log:
        client: BlockingKernelClient | None = None
        try:
            with _signals_put_off():
                manager.start_kernel(env={**os.environ, **environ}, stderr=log)
            client = manager.client()
            client.start_channels()
            try:
                client.wait_for_ready(timeout=_START_TIMEOUT_S)
            except RuntimeError as error:
                log.seek(0)
                raise RunFailed(f"the kernel did not start: {error}\n{log.read().decode('utf-8', 'replace')}") from None
            display.note(f"kernel started (pid {manager.provisioner.pid})")  # type: ignore[union-attr]
            yield manager, client
        finally:
            began = time.monotonic()
            with _signals_put_off():
                if client is not None:
                    client.stop_channels()
                if manager.has_kernel:
                    manager.shutdown_kernel()
            display.shutdown_s = time.monotonic() - began


@contextlib.contextmanager
def _signals_put_off() -> Iterator[None]:
    """Put Ctrl-C and SIGTERM off until the end of the block: starting or shutting the kernel down must not be left half done."""
    came: list[int] = []
    wanted = (signal.SIGINT, signal.SIGTERM)
    previous = {signum: signal.signal(signum, lambda number, _frame: came.append(number)) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])


def _follow(
    manager: KernelManager, client: BlockingKernelClient, job: str, display: _Display, deadline: float | None
) -> None:
    """Send the cell and show what comes, until it has ended."""
    code = f"from rlm_kernel.jupyter.run_command import serve_run; serve_run({job!r})"
    msg_id = client.execute(code, store_history=False, allow_stdin=False)
    while True:
        if deadline is not None and time.monotonic() >= deadline:
            manager.interrupt_kernel()
            raise RunFailed("the time given by --timeout-s is over; the run was interrupted")
        try:
            message = client.get_iopub_msg(timeout=_LOOK_S)
        except queue.Empty:
            if not manager.is_alive():
                raise RunFailed("the kernel died; its children are being stopped") from None
            continue
        if message["parent_header"].get("msg_id") != msg_id:
            continue
        content = message["content"]
        if message["msg_type"] == "display_data" and EVENT_MIME in content["data"]:
            display.show(content["data"][EVENT_MIME])
        elif message["msg_type"] == "stream":
            display.note(content["text"].rstrip())
        elif message["msg_type"] == "error":
            ours = content["ename"] == RunFailed.__name__
            raise RunFailed(content["evalue"] if ours else f"{content['ename']}: {content['evalue']}")
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return


@dataclass
class _Display:
    """Show the progress of a run, line by line, on standard error."""

    end: dict[str, Any] = field(default_factory=lambda: {"answer": None, "children": []})
    shutdown_s: float = 0.0

    def note(self, text: str) -> None:
        for line in text.splitlines():
            print(f"  {line}", file=sys.stderr, flush=True)

    def show(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "start":
                self.note(f"model: {event['model']}. {event['context']}")
            case "model":
                self._paragraph(f"[{event['iteration']}] ", event["text"])
            case "code":
                self._paragraph("    > ", event["code"], limit=12)
            case "output":
                self._paragraph("    | ", event["text"], limit=12)
            case "child":
                self.note(f"    {event['line']}")
            case "end":
                self.end = event

    def _paragraph(self, mark: str, text: str, limit: int = 20) -> None:
        lines = text.strip().splitlines()
        if mark.startswith("["):
            lines = [part for line in lines for part in textwrap.wrap(line, _WIDTH) or [""]]
        shown = lines if len(lines) <= limit else [*lines[: limit - 1], f"... {len(lines) - limit + 1} more lines"]
        for i, line in enumerate(shown):
            lead = mark if i == 0 or not mark.startswith("[") else " " * len(mark)
            print(f"{lead}{line if len(line) <= _WIDTH else line[: _WIDTH - 1] + '…'}", file=sys.stderr, flush=True)

    def show_end(self, total_s: float) -> None:
        children = self.end["children"]
        gone = sum(child["exited"] for child in children)
        if children:
            counts = Counter(child["state"] for child in children)
            states = ", ".join(f"{count} {state}" for state, count in counts.items())
            self.note(f"children: {states}; {gone} of {len(children)} exits confirmed")
        if self.end.get("trajectory"):
            self.note(f"trajectory: {self.end['trajectory']}")
        self.note(f"kernel shut down in {self.shutdown_s:.1f} s; {total_s:.1f} s in all")


# ----------------------------------------------------------------------------------------------------- in the kernel


def serve_run(job: str) -> None:
    """Run one job in the kernel's own namespace, and publish what happens. Called by the cell that the command sends.

    Args:
        job: JSON with ``context`` (a path or null), ``task`` and ``max_iterations`` (or null).
    """
    from IPython.core.getipython import get_ipython

    from rlm_kernel.loop.prompts import QueryMetadata, describe_context
    from rlm_kernel.session.offthread import run_off_thread, wait_here
    from rlm_kernel.session.root_run import run_in_namespace

    shell: Any = get_ipython()
    session = shell.kernel.rlm
    if not session.is_managed:
        raise RunFailed("no model is configured: add `--model openai/gpt-5-mini`, or `--model demo` to try things out")
    wanted = json.loads(job)
    context = "" if wanted["context"] is None else read_text(wanted["context"])
    publisher = _Publisher(shell.display_pub)
    publisher.publish(
        {"kind": "start", "model": session.model_name, "context": describe_context(QueryMetadata.of(context))}
    )
    with session.listening(publisher.on_child):
        result = run_in_namespace(
            session,
            shell,
            wanted["task"],
            context=context,
            max_iterations=wanted["max_iterations"],
            events=publisher.events(),
            off_thread=lambda verb: wait_here(run_off_thread(verb), session.lifecycle.hasten),
        )
        session.supervisor.observers.flush()
    publisher.publish(
        {
            "kind": "end",
            "answer": result.answer,
            "stop_reason": result.stop_reason,
            "iterations": result.iterations,
            "usage": {"calls": session.usage.calls, "tokens": session.usage.total_tokens},
            "children": [
                {"id": s.id, "name": s.name, "state": str(s.state), "exited": s.exited, "pid": s.pid, "error": s.error}
                for s in result.children
            ],
            "trajectory": result.trajectory_path,
        }
    )
    if result.answer is None:
        raise RunFailed(f"the run ended without an answer ({result.stop_reason} after {result.iterations} iterations)")


def read_text(path: str) -> str:
    """Read a text file as it is: line ends are kept; bytes that are no UTF-8 are shown as replacement characters."""
    return Path(path).read_bytes().decode("utf-8-sig", "replace")


class _Publisher:
    """Publish events as display messages of the cell that runs, from any thread.

    Args:
        display_pub: the shell's publisher, taken before the loop puts its own in its place.
    """

    def __init__(self, display_pub: Any) -> None:
        self._display_pub = display_pub

    def publish(self, event: dict[str, Any]) -> None:
        self._display_pub.publish(data={EVENT_MIME: event, "text/plain": f"rlm: {event['kind']}"})

    def on_child(self, status: Any) -> None:
        about = ""
        if status.done:
            about = f" after {status.elapsed_s:.2f} s: {status.error or _first_line(status.result or '')}"
        process = "" if status.pid is None else f" (pid {status.pid}{', exit confirmed' if status.exited else ''})"
        named = "" if status.name == status.id else f" {status.name}"
        self.publish({"kind": "child", "id": status.id, "line": f"{status.id}{named} {status.state}{process}{about}"})

    def events(self) -> Any:
        from rlm_kernel.loop.runner import RunEvents

        return RunEvents(
            on_model_call_end=lambda iteration, completion, _s: self.publish(
                {"kind": "model", "iteration": iteration, "text": _words(completion.text)}
            ),
            on_block_start=lambda iteration, _i, code: self.publish(
                {"kind": "code", "iteration": iteration, "code": code}
            ),
            on_block_end=lambda iteration, _i, _code, result: self.publish(
                {"kind": "output", "iteration": iteration, "text": result.stdout[-4000:] + (result.exception or "")}
            ),
        )


def _words(reply: str) -> str:
    """Return what a model said around its code."""
    from rlm_kernel.loop.parsing import parse_blocks

    for block in parse_blocks(reply):
        reply = reply.replace(block.code, "", 1)
    lines = [line for line in reply.splitlines() if line.strip() and not line.lstrip().startswith(("```", "~~~"))]
    return "\n".join(lines) or "(code only)"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:99] + "…"
