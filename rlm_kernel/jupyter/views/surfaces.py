"""Where a view that changes is drawn: a display that is updated, a terminal, or paper, on which only the end is worth a line.

Who runs it: the thread "rlm-view" of `live` draws and finishes; `Surface.finish` is also called by the thread that ends a cell, after that.
Both go through one lock, which is held while a view is sent, so that an older state never follows a newer one.

What it owns: the display id, the message's parent header and the display publisher, as they were when the surface was made; in a terminal,
rich's live display while it is drawn. `sys.stdout` is never replaced: code that runs meanwhile may do so itself.

How each step can fail: the publisher raises, as the process is ending or code of the user's stands in for it (the caller's to handle: see
`live`); the front end does not follow updates (`Printing` is for those that are known for it; others show the first state).
"""

from __future__ import annotations

import contextvars
import re
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, TextIO

from rlm_kernel.jupyter.model_driven import is_model_driven
from rlm_kernel.jupyter.views.base import View

if TYPE_CHECKING:
    from rich.live import Live

_OF_JUPYTER_CLIENT = re.compile(r"_\d+_\d+$")
"""How the ids of messages end that Python's jupyter_client makes: with its pid and a count."""


class Surface:
    """One place for one view.

    Attributes:
        is_live: whether it shows states that are not the last one.
        is_shown: whether anything has been drawn.
    """

    is_live = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_text: str | None = None
        self._is_finished = False
        self._sent_at = float("-inf")
        self.is_shown = False

    def rest_s(self, interval_s: float) -> float:
        """Return the seconds that are left of an interval since something was drawn; 0 if it is over."""
        return max(0.0, self._sent_at + interval_s - time.monotonic())

    def draw(self, view: View) -> None:
        """Show a state, unless it is the one that is shown."""
        with self._lock:
            text = view.text()
            if text == self._last_text and not self._is_finished:
                return
            self._note(text, finished=False)
            self._draw(view)

    def finish(self, view: View, *, keep: bool = True) -> None:
        """Show the last state for now.

        Args:
            view: the state.
            keep: whether it is to stay. If not, a later `finish` is going to be called with what stays; where what was drawn
                cannot be changed later, it is taken away.
        """
        with self._lock:
            text = view.text()
            if self._is_finished and text == self._last_text:
                return
            changed = text != self._last_text
            self._note(text, finished=keep)
            self._finish(view, keep, changed=changed)

    def _note(self, text: str, *, finished: bool) -> None:
        self._last_text, self._is_finished, self.is_shown = text, finished, True
        self._sent_at = time.monotonic()

    def _draw(self, view: View) -> None:
        """Show a state that is not the last one. Under the lock."""

    def _finish(self, view: View, keep: bool, *, changed: bool) -> None:
        """Show the last state. Under the lock."""
        raise NotImplementedError


class Updating(Surface):
    """A display with an id, in front ends that follow updates of it.

    Args:
        publisher: ipykernel's.
    """

    def __init__(self, publisher: Any) -> None:
        super().__init__()
        self._publish = _bound_to_cell(publisher)
        self._transient = {"display_id": uuid.uuid4().hex}
        self._is_there = False

    def _draw(self, view: View) -> None:
        self._publish(view.bundle(), transient=self._transient, update=self._is_there)
        self._is_there = True

    def _finish(self, view: View, keep: bool, *, changed: bool) -> None:
        if changed:
            self._draw(view)


class Printing(Surface):
    """Displays that cannot be changed: at most a line when the view comes, and its last state.

    Args:
        publisher: any display publisher.
        announce: whether there is that line.
    """

    is_live = False

    def __init__(self, publisher: Any, *, announce: bool) -> None:
        super().__init__()
        self._publish = _bound_to_cell(publisher)
        self._to_announce = announce

    def _draw(self, view: View) -> None:
        if self._to_announce:
            self._to_announce = False
            self._publish({"text/plain": view.text().partition("\n")[0]})

    def _finish(self, view: View, keep: bool, *, changed: bool) -> None:
        if keep:
            self._publish(view.bundle())


class Terminal(Surface):
    """A terminal: what is drawn is drawn over.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._live: Live | None = None

    def _draw(self, view: View) -> None:
        from rich.live import Live

        if self._live is None:
            console = _console(self._stream)
            self._live = Live(
                _lines(view), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start(refresh=True)
        else:
            self._live.update(_lines(view), refresh=True)

    def _finish(self, view: View, keep: bool, *, changed: bool) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.transient = not keep
            try:
                live.update(_lines(view), refresh=keep)
            finally:
                live.stop()
        elif keep:
            _console(self._stream).print(_lines(view))


def _console(stream: TextIO) -> Any:
    from rich.console import Console

    return Console(file=stream, force_jupyter=False, highlight=False, markup=False, emoji=False)


def _lines(view: View) -> Any:
    from rich.text import Text

    return Text(view.text(), no_wrap=True, overflow="ellipsis")


def surface_of(shell: Any) -> Surface:
    """Make the surface for a view of the cell that runs in this thread."""
    publisher = shell.display_pub
    if hasattr(publisher, "set_thread_parent"):
        return Updating(publisher) if follows_updates(request_of(shell)) else Printing(publisher, announce=True)
    stream = sys.stdout
    is_captured = hasattr(publisher, "outputs")
    if not is_captured and stream is not None and stream.isatty():
        return Terminal(stream)
    return Printing(publisher, announce=False)


def request_of(shell: Any) -> dict[str, Any]:
    """Return the request whose cell runs in this thread; empty in a shell without a kernel."""
    get_parent = getattr(shell, "get_parent", None)
    request = None if get_parent is None else get_parent()
    return request if isinstance(request, dict) else {}


def follows_updates(request: dict[str, Any]) -> bool:
    """Tell whether the front end that sent a request follows ``update_display_data``.

    ``jupyter console`` and qtconsole do not. They do not say who they are; but their requests come from Python's jupyter_client, and
    somebody sits there who may be asked for input. What executes notebooks allows no input.
    """
    msg_id = str(request.get("header", {}).get("msg_id", ""))
    return not (request.get("content", {}).get("allow_stdin") and _OF_JUPYTER_CLIENT.search(msg_id))


def wants_no_views(request: dict[str, Any]) -> bool:
    """Tell whether a request's cell is to show nothing but what its code shows: it is silent, or a model wrote it."""
    return bool(request.get("content", {}).get("silent")) or is_model_driven(request.get("metadata"))


def _bound_to_cell(publisher: Any) -> Any:
    """Return ``publisher.publish`` for the cell that runs in this thread, to be called from any thread."""
    context = contextvars.copy_context()
    header = getattr(publisher, "parent_header", None)
    if header is not None and hasattr(publisher, "set_thread_parent"):
        # A thread of the user's has no header of its own: it would be that of whatever cell runs when a message is sent.
        context.run(publisher.set_thread_parent, {"header": header})

    def publish(data: dict[str, Any], **options: Any) -> None:
        context.copy().run(publisher.publish, data, **options)

    return publish
