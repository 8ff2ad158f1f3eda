"""Capture what code prints, bounded: head and tail with the count of what lies between."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import TextIO

CAPTURE_LIMIT = 200_000
"""Characters that a capture keeps of one stream of one block: ten times what a model is shown of it."""


class BoundedText:
    """Text that keeps its first and last halves. Thread-safe; adding takes constant time on average, however much was
    added.

    Args:
        limit: characters to keep in all.
    """

    def __init__(self, limit: int = CAPTURE_LIMIT) -> None:
        self._half = max(1, limit // 2)
        self._head: list[str] = []
        self._head_length = 0
        self._tail: list[str] = []
        self._tail_length = 0
        self._total = 0
        # Reentrant: a signal handler may print while the main thread is in `add`.
        self._lock = threading.RLock()

    def add(self, text: str) -> None:
        with self._lock:
            self._total += len(text)
            room = self._half - self._head_length
            if room > 0:
                self._head.append(text[:room])
                self._head_length += min(room, len(text))
                text = text[room:]
            if text:
                self._tail.append(text)
                self._tail_length += len(text)
                if self._tail_length > 2 * self._half:
                    self._cut_tail()

    def _cut_tail(self) -> None:
        kept = "".join(self._tail)[-self._half :]
        self._tail, self._tail_length = [kept], len(kept)

    def value(self) -> str:
        """Return what was kept, with a line that says what was left out."""
        with self._lock:
            if self._tail_length > self._half:
                self._cut_tail()
            left_out = self._total - self._head_length - self._tail_length
            return "".join(self._head) + _note(left_out, self._total) + "".join(self._tail)

    @property
    def total(self) -> int:
        """How many characters were added in all."""
        with self._lock:
            return self._total


def _note(left_out: int, total: int) -> str:
    return f"\n[... {left_out} of {total} characters left out ...]\n" if left_out else ""


def shorten(text: str, limit: int, total: int | None = None) -> str:
    """Cut a text to its first and last halves, with a line that says how long it was.

    Args:
        text: may itself be what `BoundedText` kept of a longer one.
        limit: characters to keep in all.
        total: how long the text was before anything was cut; None if it is whole.
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    total = len(text) if total is None else total
    return text[: limit - half] + _note(total - limit, total) + (text[-half:] if half else "")


class CapturingStream(io.TextIOBase):
    """A text stream that keeps what is written, and passes it on.

    Args:
        echo: where to pass it on, None for nowhere.
        original: the stream that this one stands in for; what is not writing (``fileno``, ``buffer``, …) goes there.
        limit: characters to keep.
    """

    def __init__(self, original: TextIO, echo: TextIO | None, limit: int = CAPTURE_LIMIT) -> None:
        self._text = BoundedText(limit)
        self._original = original
        self._echo = echo

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._original, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._text.add(text)
        self._pass_on(lambda echo: echo.write(text))
        return len(text)

    def flush(self) -> None:
        self._pass_on(lambda echo: echo.flush())

    def _pass_on(self, what: Callable[[TextIO], object]) -> None:
        """Do something with the stream below; one that code has closed is done without, since what is kept counts."""
        if self._echo is not None:
            try:
                what(self._echo)
            except (OSError, ValueError):
                self._echo = None

    def fileno(self) -> int:
        return self._original.fileno()

    def isatty(self) -> bool:
        return False

    @property
    def buffer(self) -> object:
        return self._original.buffer

    def value(self) -> str:
        """Return what was written, bounded."""
        return self._text.value()

    @property
    def total(self) -> int:
        """How many characters were written in all."""
        return self._text.total


class Listener:
    """Stands below a `CapturingStream` and hands on what is written.

    Args:
        write: called with each piece, on the thread that writes it.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
