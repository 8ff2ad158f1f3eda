"""Model-driven cells: requests whose code a model wrote, so that lines of their output may be the final answer.

A request says so in its own metadata, ``{"rlm": {"model_driven": true}}``. What such a cell shows goes to the front end as usual and is
scanned on its way, as it is for a child: what is written to ``sys.stdout``, the text of ``display(...)``, and the text of a trailing
expression. Not scanned: ``sys.stderr``; what the code captures or redirects itself; what bypasses Python's ``sys.stdout`` (a
subprocess that writes to the descriptor), since when that arrives is a matter of chance.

Who runs it: the thread that runs the cell makes, enters, finishes and leaves a `ModelDrivenCell`; output comes in on any thread. Cells of
subshells run at the same time on threads of their own, so neither ``sys.stdout`` nor anything else that all cells share is replaced:
the stream, the display hook and the display publisher are tapped, and each piece goes to the cell under whose parent header ipykernel
publishes it. What is shown as a cell's output is that cell's output, also when a thread that the cell started writes it.

What it owns: the taps, while at least one model-driven cell runs. How each step can fail: the code rebinds ``sys.stdout`` (what goes
there is not shown, and not scanned); the tap itself raises (logged; the output is shown all the same); the cell is interrupted (leaving
removes the tap; nothing counts); two cells end in the order in which they began (taps are counted, not stacked).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from IPython.core.getipython import get_ipython

from rlm_kernel.final_text import FinalOutput
from rlm_kernel.values import FinalAnswer

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

_log = logging.getLogger(__name__)


def is_model_driven(parent_metadata: Mapping[str, Any] | None) -> bool:
    """Tell whether a request's metadata makes its cell model-driven. Anything but the exact ``true`` does not."""
    ours = parent_metadata.get("rlm") if isinstance(parent_metadata, Mapping) else None
    return isinstance(ours, Mapping) and ours.get("model_driven") is True


class ModelDrivenCell:
    """One cell whose output is scanned. Use as a context manager around the cell; enter it where no interrupt can hit.

    Args:
        session: whose finalization records the answer.
        shell: the shell that runs the cell; by default the one of this process, if there is one.
    """

    def __init__(self, session: RLMSession, shell: Any = None) -> None:
        self._session = session
        self._shell = get_ipython() if shell is None else shell
        self._output = FinalOutput()
        # Reentrant: a signal handler may print while its thread is in `_add`.
        self._lock = threading.RLock()
        self._taps = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as taps:
            for target, method, text_of in (
                (sys.stdout, "write", _written),
                (getattr(self._shell, "displayhook", None), "write_format_data", _shown),
                (getattr(self._shell, "display_pub", None), "publish", _shown),
            ):
                if hasattr(target, "parent_header"):
                    taps.enter_context(_tapped(target, method, text_of, self._add))
            self._taps = taps.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taps.close()

    def _add(self, text: str) -> None:
        with self._lock:
            self._output.add(text)

    def finish(self, success: bool) -> FinalAnswer | None:
        """The cell has ended: record its final answer, or drop it. Takes the place of ``finalization.end_cell``.

        Args:
            success: whether the cell ran to its end.

        Returns:
            the final answer that this cell gave, None if it gave none.

        Raises:
            UnknownVariable: a line ``FINAL_VAR(name)`` names no variable; the message names those that exist. It is
                the cell's error.
        """
        with self._lock:
            output = self._output.text
        return self._session.finalization.end_cell(success=success, output=output)


class _Tap:
    """Stands in for a method of an object that all cells share, and passes everything on.

    Args:
        target: the object; it has a ``parent_header``.
        method: name of the method.
        text_of: gives the text that a call of the method shows.
    """

    installing = threading.Lock()

    def __init__(self, target: Any, method: str, text_of: Callable[..., str]) -> None:
        self._target = target
        self._method = method
        self._text_of = text_of
        self._had = vars(target).get(method)
        self._pass_on = getattr(target, method)
        self.listeners: dict[str | None, Callable[[str], None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            listener = self.listeners.get(_message(self._target))
            if listener is not None:
                listener(self._text_of(self._target, *args, **kwargs))
        except Exception:
            _log.exception("output was not scanned")
        return self._pass_on(*args, **kwargs)

    def remove(self) -> None:
        """Take the tap off, unless somebody has put something else in its place; it then only passes on."""
        attributes = vars(self._target)
        if attributes.get(self._method) is not self:
            return
        if self._had is None:
            del attributes[self._method]
        else:
            attributes[self._method] = self._had


@contextlib.contextmanager
def _tapped(target: Any, method: str, text_of: Callable[..., str], listener: Callable[[str], None]) -> Iterator[None]:
    """Have a listener told what the method shows for the cell that this thread runs, for the length of the block."""
    message = _message(target)
    with _Tap.installing:
        tap = vars(target).get(method)
        if not isinstance(tap, _Tap):
            tap = vars(target)[method] = _Tap(target, method, text_of)
        tap.listeners[message] = listener
    try:
        yield
    finally:
        with _Tap.installing:
            tap.listeners.pop(message, None)
            if not tap.listeners:
                tap.remove()


def _message(target: Any) -> str | None:
    """Return the id of the request under which this thread's output is published."""
    message: str | None = target.parent_header.get("msg_id")
    return message


def _written(stream: Any, text: Any, *_: object) -> str:
    from_descriptor = threading.current_thread() is getattr(stream, "watch_fd_thread", None)
    return text if isinstance(text, str) and not from_descriptor else ""


def _shown(_target: Any, data: Mapping[str, Any], *_: object, **__: object) -> str:
    text = data.get("text/plain")
    return f"{text}\n" if isinstance(text, str) else ""
