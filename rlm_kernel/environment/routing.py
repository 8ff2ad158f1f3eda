"""Route what threads print: one router stands at ``sys.stdout`` and one at ``sys.stderr`` while anything is captured.

Who runs it: any thread. Two kinds of capture meet here. A *process* capture (a notebook's own shell, a child) takes all
writing of the process. A *scope* takes the writing of the code of one in-process environment, and nobody else's. Whose
code a thread runs is told by a context variable; so tasks, ``asyncio.to_thread`` and copied contexts belong to it, and so
does every thread that this code starts (while a capture is active, ``threading.Thread.start`` hands the scope on; our own
"rlm-…" threads are left out). Such a thread prints into whatever its environment captures at that moment; between two
blocks it prints to the process's own stream, never into another environment.

The routers are put at ``sys.stdout`` and ``sys.stderr`` by the first capture and taken away by the last. Code that puts a stream of
its own there (``contextlib.redirect_stdout``) does that for the whole process, as always in Python; when the block ends, or
another one begins, the router is put back. A router that somebody kept (a logging handler) goes on to work.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from rlm_kernel.environment.capture import CapturingStream


class Scope:
    """Whose code a thread runs: one for each in-process environment.

    Attributes:
        stdout, stderr: where its writing goes; None between two blocks.
        shell: the shell that its code finds as ``get_ipython()``; None after the environment was closed.
    """

    def __init__(self, shell: Any) -> None:
        self.stdout: CapturingStream | None = None
        self.stderr: CapturingStream | None = None
        self.shell: Any = shell


_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("rlm_environment_scope", default=None)


def current_scope() -> Scope | None:
    """Return the scope whose code the calling thread (or task) runs, None outside of all."""
    return _current.get()


class Router(io.TextIOBase):
    """Stands at ``sys.stdout`` or ``sys.stderr`` and passes each use on to the stream that the calling thread means.

    Args:
        name: ``"stdout"`` or ``"stderr"``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: TextIO | None = None
        self.below: TextIO | None = None
        self.process: CapturingStream | None = None

    def install(self) -> None:
        """Take the place of the stream that is there now."""
        there = getattr(sys, self._name)
        self.below = self._last if there is self else there
        self.put_back()

    def put_back(self) -> None:
        setattr(sys, self._name, self)

    def remove(self) -> None:
        """Give the place back."""
        setattr(sys, self._name, self.below)
        self._last, self.below = self.below, None

    def target(self) -> TextIO:
        """Return the stream that the calling thread writes to."""
        scope = _current.get()
        stream = getattr(scope, self._name) if scope is not None else None
        stream = stream or self.process or self.below
        if stream is None:
            there = getattr(sys, self._name)
            stream = there if there is not self else self._last or getattr(sys, f"__{self._name}__")
        return cast(TextIO, stream if stream is not None else io.StringIO())

    @property
    def write(self) -> Callable[[str], int]:
        """The method of the stream that is meant: who patches it, as IPython does, patches that stream and not the router."""
        return self.target().write

    @write.setter
    def write(self, function: Callable[[str], int]) -> None:
        self.target().write = function  # type: ignore[method-assign]

    @write.deleter
    def write(self) -> None:
        del self.target().write

    def flush(self) -> None:
        self.target().flush()

    def fileno(self) -> int:
        return self.target().fileno()

    def isatty(self) -> bool:
        return self.target().isatty()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: it serves others, too."""

    @property
    def closed(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.target().encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.target().errors

    @property
    def newlines(self) -> Any:  # type: ignore[override]
        return self.target().newlines

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target(), name)


class SharedHook:
    """Something process-wide that stands while at least one user of it is active. Thread-safe.

    Args:
        install: called for the first user.
        remove: called after the last one.
        refresh: called whenever one comes or goes and others stay.
    """

    def __init__(
        self, install: Callable[[], None], remove: Callable[[], None], refresh: Callable[[], None] | None = None
    ) -> None:
        self._install, self._remove, self._refresh = install, remove, refresh
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._install()
            elif self._refresh is not None:
                self._refresh()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()
            elif self._refresh is not None:
                self._refresh()


class _ThreadStart:
    """`threading.Thread.start` that hands the scope of the starting thread on."""

    def __init__(self) -> None:
        self._original: Any = None
        self._hook: Any = None

    def install(self) -> None:
        if self._hook is not None:
            return  # somebody wrapped ours, which could therefore not be taken away
        original: Any = threading.Thread.start

        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            scope = _current.get()
            if scope is not None and not thread.name.startswith("rlm-"):
                thread.run = functools.partial(_run_in, scope, thread.run)  # type: ignore[method-assign]
            original(thread)

        self._original, self._hook = original, start
        threading.Thread.start = start  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        if self._hook is not None and threading.Thread.start is self._hook:
            threading.Thread.start = self._original  # type: ignore[method-assign]
            self._original = self._hook = None


def _run_in(scope: Scope, run: Callable[[], None]) -> None:
    _current.set(scope)
    run()


_routers = {name: Router(name) for name in ("stdout", "stderr")}
_thread_start = _ThreadStart()


def _install() -> None:
    for router in _routers.values():
        router.install()
    _thread_start.install()


def _remove() -> None:
    for router in _routers.values():
        router.remove()
    _thread_start.remove()


def _put_back() -> None:
    for router in _routers.values():
        router.put_back()


_hook = SharedHook(_install, _remove, _put_back)


def stream_of_caller(name: str) -> TextIO:
    """Return the stream that the calling thread writes to now, whether or not a router stands there."""
    there = getattr(sys, name)
    return _routers[name].target() if there is _routers[name] else cast(TextIO, there)


@contextlib.contextmanager
def capture_scope(scope: Scope, out: CapturingStream, err: CapturingStream) -> Iterator[None]:
    """Send what the code of a scope writes to these streams; the calling thread runs that code."""
    with _hook:
        token = _current.set(scope)
        scope.stdout, scope.stderr = out, err
        try:
            yield
        finally:
            scope.stdout = scope.stderr = None
            _current.reset(token)


@contextlib.contextmanager
def capture_process(out: CapturingStream, err: CapturingStream) -> Iterator[None]:
    """Send all that the process writes to these streams, except what scopes capture."""
    with _hook:
        pairs = ((_routers["stdout"], out), (_routers["stderr"], err))
        before = [router.process for router, _ in pairs]
        for router, stream in pairs:
            router.process = stream
        try:
            yield
        finally:
            for (router, _), stream_before in zip(pairs, before, strict=True):
                router.process = stream_before
