"""A view that follows what it shows while somebody waits, and ends in the final state before the wait does.

Who runs it: `LiveView.__enter__` and `close` run on the thread that waits (the main one, a subshell's, one of the user's). Between them a
daemon thread "rlm-view" draws: nothing for ``delay_s``, then whenever something stirs, and once in a second for the times that pass, but at
most once in ``interval_s``, and only if the text is another one. When the block is left, the thread draws the last state and ends; `close`
waits for that. So an interrupt, or a second one, at whatever point of the waiting thread, hits nothing that is half done: it only ends the
wait for the thread, which ends by itself. Threads whose block was left without `close` (an interrupt in its first instruction) are ended
with their cell, by `close_left_open`.

What it owns: the thread, and the surface while it is drawn. How each step can fail: no thread can be started (nothing is shown); ``render``
raises (that state is left out; the error is logged); a view cannot be sent (nothing more is drawn: the wait goes on as if there were no
view); sending blocks, as ipykernel's own output thread is stuck (leaving the block gives up after two seconds, and the thread is left
behind in it); native code holds the interpreter lock (the view stands still as long).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rlm_kernel.children.observers import hide_from_debugger
from rlm_kernel.jupyter.views.base import View
from rlm_kernel.jupyter.views.children import live_table
from rlm_kernel.jupyter.views.surfaces import Surface, surface_of
from rlm_kernel.values import ChildStatus

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

_log = logging.getLogger(__name__)

Render = Callable[[], View | None]

DELAY_S = 1.0
"""Seconds of waiting after which it is worth a view."""

INTERVAL_S = 0.25
"""Seconds between two states, however much happens."""

_TICK_S = 1.0
"""Seconds between two states when nothing stirs: the times that are shown go on."""

_JOIN_S = 2.0
"""Seconds that leaving the block waits for the last state."""


class LiveView:
    """A view that is drawn again and again for the length of a ``with`` block.

    Args:
        shell: whose display is used.
        render: gives what is to be seen now, None for nothing yet. Called on the thread "rlm-view".
        delay_s: seconds before it is shown at all.
        interval_s: the least seconds between two updates.
        surface: where it is drawn, None for a new display of the cell that enters the block.
        keep: asked at the end (on our thread) whether the last state is to stay where it was drawn; see `Surface.finish`.
    """

    def __init__(
        self,
        shell: Any,
        render: Render,
        *,
        delay_s: float = DELAY_S,
        interval_s: float = INTERVAL_S,
        surface: Surface | None = None,
        keep: Callable[[], bool] = lambda: True,
    ) -> None:
        self._shell = shell
        self._surface = surface
        self._render = render
        self._delay_s = delay_s
        self._interval_s = interval_s
        self._keep = keep
        self._drawer: _Drawer | None = None

    def __enter__(self) -> Self:
        try:
            surface = self._surface or surface_of(self._shell)
        except Exception:
            _log.debug("there is nothing to draw on", exc_info=True)
            return self
        drawer = _Drawer(surface, self._render, self._delay_s, self._interval_s, self._keep)
        try:
            drawer.start()
        except RuntimeError as error:
            _log.warning("no thread for a live view: %s", error)
        except BaseException:  # an interrupt in mid-start: nobody would leave the block
            drawer.end()
            raise
        else:
            self._drawer = drawer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stir(self) -> None:
        """Say that something has changed. Any thread may call this, also a signal handler; it does not block."""
        if self._drawer is not None:
            self._drawer.ring()

    def close(self) -> None:
        """Have the last state drawn, if anything was, and return when it is. May be called twice."""
        if self._drawer is not None:
            self._drawer.end_and_wait()


class _Drawer(threading.Thread):
    """The thread of one view; see the module's docstring."""

    def __init__(
        self, surface: Surface, render: Render, delay_s: float, interval_s: float, keep: Callable[[], bool]
    ) -> None:
        super().__init__(name="rlm-view", daemon=True)
        hide_from_debugger(self)
        self.owner = threading.get_ident()
        self._surface = surface
        self._render = render
        self._delay_s = delay_s
        self._interval_s = interval_s
        self._keep = keep
        # Locks, since releasing one is a single step of C code, which no signal handler can cut in two.
        self._over = threading.Lock()
        self._over.acquire()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._drawn = threading.Event()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has rung, and nobody has come yet
            self._bell.release()

    def end(self) -> None:
        """Have the last state drawn. Does not wait for it."""
        with contextlib.suppress(RuntimeError):
            self._over.release()
        self.ring()

    def end_and_wait(self) -> None:
        """Have the last state drawn, and wait until it is."""
        self.end()
        # Not by `join` alone: before Python 3.13 an interrupt of it marks a thread as stopped that runs.
        if self._drawn.wait(_JOIN_S):
            self.join(_JOIN_S)

    def run(self) -> None:
        try:
            if not self._over.acquire(timeout=max(0.0, self._delay_s)):
                self._draw_until_over()
            elif not self._surface.is_shown or self._surface.rest_s(self._interval_s):
                return  # it was over soon: what another wait has drawn there is right, or soon drawn over
            view = self._next_view()
            if view is not None:
                self._surface.finish(view, keep=self._keep())
        except Exception:
            _log.debug("a view cannot be shown any more", exc_info=True)
        finally:
            self._drawn.set()

    def _draw_until_over(self) -> None:
        while True:
            view = self._next_view()
            if view is not None:
                self._surface.draw(view)
                if not self._surface.is_live:
                    self._over.acquire()
                    return
            if self._over.acquire(timeout=self._interval_s):
                return
            self._bell.acquire(timeout=max(0.0, _TICK_S - self._interval_s))
            if self._over.acquire(blocking=False):
                return

    def _next_view(self) -> View | None:
        try:
            return self._render()
        except Exception:
            _log.debug("a state could not be rendered", exc_info=True)
            return None


def close_left_open() -> None:
    """End the views that this thread has entered and not left: its cell has ended."""
    for thread in threading.enumerate():
        # Without an ident is one whose start an interrupt has cut off: `threading` lists it for good, but it will not run.
        if isinstance(thread, _Drawer) and thread.owner == threading.get_ident() and thread.ident is not None:
            thread.end_and_wait()


@contextlib.contextmanager
def watching(
    session: RLMSession,
    shell: Any,
    which: Callable[[], Sequence[ChildStatus]],
    *,
    title: str = "",
    delay_s: float = DELAY_S,
) -> Iterator[LiveView]:
    """Show children in a live table of their own for the length of the block.

    Args:
        session: whose children they are: what happens to any of them stirs the view.
        shell: whose display is used.
        which: gives the children to be shown, descendants included. Called on the thread "rlm-view". No children: nothing is shown.
        title: what the line above the table begins with.
        delay_s: seconds before it is shown at all.
    """

    def render() -> View | None:
        statuses = which()
        return live_table(statuses, title) if statuses else None

    view = LiveView(shell, render, delay_s=delay_s)
    withdraw = session.supervisor.call_on_stir(view.stir)
    try:
        with view:
            yield view
    finally:
        withdraw()
