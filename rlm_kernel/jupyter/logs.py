"""``%rlm logs ID``: what a child has printed, and what it goes on printing.

Options of the magic: ``ID`` (an id or a name; ``EPISODE/ID`` for a run of an earlier episode), ``-n/--lines N``, ``-f/--follow`` and
``--for SECONDS`` (which follows, and ends after so long).

A child's standard output and error go to one file beside its trajectory, written by the supervisor as they come. The file has the first
5 MB; the last 4 KB of everything are in the child's status, and are appended to a file that was full when the child ends.

Who runs it: the thread that runs the cell. To follow, it waits for the supervisor's stir, shows all that has come since as one piece, and
lets `INTERVAL_S` pass before the next: however much a child prints, a page gets at most four messages a second, of at most
`PIECE_BYTES` each (a server drops what comes faster). It owns one descriptor, of the file, while it follows.

An interrupt while following is an interrupt like any other: it stops the children. ``--for`` is the way to look for a while.

How each step can fail: there is no such child (an error that lists those there are); the file is gone, or was never written (the end that
the status has is shown, and a line says so); the file cannot be read (the same, with the reason).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlm_kernel.children.rawlog import CAP_BYTES, TAIL_BYTES
from rlm_kernel.errors import ConfigurationError, StaleHandleError, UnknownHandleError
from rlm_kernel.jupyter.terminal_text import TerminalText
from rlm_kernel.values import ChildStatus

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from rlm_kernel.session.session import RLMSession

LINES = 40
"""Lines that are shown if nobody says how many."""

INTERVAL_S = 0.25
PIECE_BYTES = 100_000
_LINE_LENGTH = 5_000
"""Characters of one line that are shown; pages become slow with longer ones."""

_SHOWN_LENGTH = 200_000
"""Characters that are shown at once, however many lines are asked for."""


@dataclass(frozen=True, slots=True)
class _Log:
    """Where a run's log is, and what is known of the run. ``status`` is None for a run of an earlier episode."""

    run_id: str
    path: Path | None
    status: ChildStatus | None = None
    note: str = ""


def show_log(
    session: RLMSession,
    shell: InteractiveShell | None,
    child_id: str,
    *,
    follow: bool = False,
    lines: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Print what a child has written to its standard output and error.

    Args:
        session: whose child it is.
        shell: the shell that asks (everything goes to its ``sys.stdout``).
        child_id: the child; also ``EPISODE/ID`` for a run of an earlier episode.
        follow: go on with what it writes until it has ended.
        lines: how many of the last lines to begin with, None for `LINES`.
        timeout_s: seconds after which to end following; giving them means to follow.

    Raises:
        UnknownHandleError, StaleHandleError: there is no such child; the message lists those that there are.
        ConfigurationError: ``lines`` or ``timeout_s`` is no such number.
        KeyboardInterrupt: it was interrupted.
    """
    count = _checked_lines(lines)
    until = _checked_deadline(timeout_s)
    log = _find(session, child_id)
    if (follow or timeout_s is not None) and log.status is not None and not log.status.done:
        _follow(session, log, count, until)
        return
    with _opened(log) as file:
        _show_end(log, file, count)
    if follow and log.status is not None:
        _say(_how_it_stands(log.status))


def _checked_lines(lines: int | None) -> int:
    if lines is None:
        return LINES
    if isinstance(lines, bool) or not isinstance(lines, int) or lines < 1:
        raise ConfigurationError("--lines", lines, "must be a whole number of at least 1")
    return lines


def _checked_deadline(timeout_s: float | None) -> float:
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
        raise ConfigurationError("--for", timeout_s, "must be a number of seconds, not less than 0")
    return time.monotonic() + timeout_s


# ------------------------------------------------------------------------------------------------------ which log


def _find(session: RLMSession, child_id: str) -> _Log:
    try:
        [status] = session.supervisor.status([(child_id, None)])
    except (StaleHandleError, UnknownHandleError) as error:
        if "/" not in child_id and not isinstance(error, StaleHandleError):
            raise
        return _find_stored(session, child_id)
    path = Path(status.trajectory_path).with_suffix(".log") if status.trajectory_path else None
    return _Log(status.id, path, status)


def _find_stored(session: RLMSession, wanted: str) -> _Log:
    """Find a run of an earlier episode, of this kernel or another.

    Raises:
        ConfigurationError: there is none, or several; the message lists them.
    """
    from rlm_kernel.stored_runs import find_run

    run = find_run(session.runs_root, wanted, current=session.run_folder)
    path = run.folder / f"{run.run_id}.log"
    return _Log(run.run_id, path, note=f"{run.run_id} is of the earlier episode {run.episode_id}: {run.state}")


@contextlib.contextmanager
def _opened(log: _Log) -> Iterator[int]:
    """Open the file, if there is one (else -1)."""
    fd = _try_open(log.path)
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _try_open(path: Path | None) -> int:
    if path is not None:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    return -1


# -------------------------------------------------------------------------------------------------------- showing


def _show_end(log: _Log, fd: int, count: int) -> None:
    """Show the last lines of what is there now."""
    if log.note:
        _say(log.note)
    if fd < 0:
        _show_without_file(log, count)
        return
    size = os.fstat(fd).st_size
    text = TerminalText().add(_read_all(fd, size), last=True)
    if not text:
        _say(f"{log.run_id} has printed nothing{_so_far(log)}")
    else:
        _print_last(text, count, f"({size:,} bytes in all): {log.path}")
        if size >= CAP_BYTES and log.status is not None and not log.status.done:
            _say("the log is full; this is the end of what was printed since:")
            _print_last(_as_text(log.status.log_tail), count, "")


def _read_all(fd: int, size: int) -> bytes:
    pieces = []
    at = 0
    while at < size and (piece := os.pread(fd, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def _show_without_file(log: _Log, count: int) -> None:
    """Show what the status has kept of a log that is not there."""
    if log.status is None:
        _say(f"it has printed nothing, or its log is gone: there is no {log.path}")
    elif not log.status.log_tail:
        _say(f"{log.run_id} has printed nothing{_so_far(log)}")
    else:
        why = "its output was not written to a file" if log.path is None else f"its log is gone: there is no {log.path}"
        _say(f"{why}; the last {TAIL_BYTES >> 10} KB are kept, which end like this:")
        _print_last(_as_text(log.status.log_tail), count, "")


def _so_far(log: _Log) -> str:
    return "" if log.status is None or log.status.done else f" so far ({log.status.state})"


def _as_text(tail: str) -> str:
    return TerminalText().add(tail.encode("utf-8", "replace"), last=True)


def _print_last(text: str, count: int, where: str) -> None:
    """Print the last lines of a text, below a line that says how many there are before them."""
    lines = text.removesuffix("\n").split("\n")
    shown = [_cut(line) for line in lines[-count:]]
    while sum(map(len, shown)) > _SHOWN_LENGTH:
        del shown[: max(1, len(shown) // 10)]
    left_out = len(lines) - len(shown)
    if left_out:
        _say(f"{left_out:,} earlier line{'s' if left_out > 1 else ''} {where}".rstrip())
    print("\n".join(shown), flush=True)


def _cut(line: str) -> str:
    if len(line) <= _LINE_LENGTH:
        return line
    half = _LINE_LENGTH // 2
    return f"{line[:half]} [… {len(line) - 2 * half:,} characters …] {line[-half:]}"


def _say(text: str) -> None:
    """Print a line of ours, which is to look unlike a child's."""
    print(f"── {text}", flush=True)


def _how_it_stands(status: ChildStatus) -> str:
    name = status.id if status.name in ("", status.id) else f"{status.id} ({status.name})"
    if not status.done:
        return f"{name} is {status.state}; `%rlm logs {status.id} --follow` goes on"
    error = "" if status.error is None else f": {status.error}"
    exit_ = "" if status.exited else "; its exit is NOT confirmed"
    return f"{name} has ended: {status.state} after {status.elapsed_s:.1f} s{exit_}{error}"


# ------------------------------------------------------------------------------------------------------- following


class _Tail:
    """What is shown of a file that grows."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._text = TerminalText()
        self._ends_line = True
        self._full_said = False
        self.at = 0

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def fd(self) -> int:
        """The file's descriptor; -1 while there is no file."""
        if self._fd < 0:
            self._fd = _try_open(self._path)
        return self._fd

    def begin(self, count: int, log: _Log) -> None:
        """Show the last lines of what is there by now."""
        if self.fd < 0:
            return
        size = os.fstat(self.fd).st_size
        text = self._text.add(_read_all(self.fd, size))
        self.at = size
        if text:
            lines = text.split("\n")
            before = len(lines) - 1 - count
            if before > 0:
                _say(f"{before:,} earlier line{'s' if before > 1 else ''} ({size:,} bytes by now): {log.path}")
                text = "\n".join(lines[-count - 1 :])
            self._print(text[-_SHOWN_LENGTH:])

    def show_more(self) -> bool:
        """Show what has come since, or the first piece of it. Returns whether there was something."""
        if self.fd < 0:
            return False
        data = os.pread(self.fd, PIECE_BYTES, self.at)
        self.at += len(data)
        self._print(self._text.add(data))
        return bool(data)

    def say_if_full(self) -> None:
        """Say once that no more will come before the end."""
        if self.at >= CAP_BYTES and not self._full_said:
            self._full_said = True
            self.end_line()
            _say(
                f"the log is full ({CAP_BYTES >> 20} MB); the last {TAIL_BYTES >> 10} KB follow when the child has ended"
            )

    def finish(self) -> None:
        """Show what was held back, and end the line."""
        self._print(self._text.add(b"", last=True))
        self.end_line()

    def end_line(self) -> None:
        """Go to the beginning of a line."""
        if not self._ends_line:
            self._print("\n")

    def _print(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
            self._ends_line = text.endswith("\n")


def _follow(session: RLMSession, log: _Log, count: int, until: float) -> None:
    status = log.status
    assert status is not None
    with session.supervisor.stirs() as stirs, _Tail(log.path) as tail:
        tail.begin(count, log)
        while True:
            # Asked before the file is read: all that a child has printed is in the file before it counts as ended.
            latest = _status_now(session, status)
            is_over = latest is None or latest.done
            status = latest or status
            came = tail.show_more()
            now = time.monotonic()
            if (is_over and not came) or now >= until:
                break
            if not is_over:
                tail.say_if_full()
            if not came:
                stirs.wait(until - now)
            stirs.pause(min(now + INTERVAL_S, until) - time.monotonic())
        tail.finish()
    if tail.at == 0:
        _show_without_file(replace(log, status=status), count)
    _say(_how_it_stands(status) if latest is not None else f"the episode of {log.run_id} has been reset")


def _status_now(session: RLMSession, status: ChildStatus) -> ChildStatus | None:
    """Return how it is with the child now; None if a reset has ended its episode."""
    try:
        return session.supervisor.status([(status.id, None)])[0]
    except StaleHandleError:
        return None
