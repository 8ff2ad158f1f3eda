"""Tell the user's observers when a recursive call starts and ends.

Who runs it: the observer thread, off the lifecycle path; a callback that blocks or raises delays and breaks nothing but
later notifications, which are dropped and counted (see `rlm_kernel.children.observers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlm_kernel.values import ChildState, ChildStatus

_BEGUN = (ChildState.RUNNING, ChildState.WAITING)


class SubcallObserver:
    """Turn changes of children into ``on_subcall_start`` and ``on_subcall_complete``.

    Args:
        callback: gives the configured callback of that name, None if there is none.
    """

    def __init__(self, callback: Callable[[str], Callable[..., Any] | None]) -> None:
        self._callback = callback
        self._begun: set[str] = set()

    def on_change(self, status: ChildStatus) -> None:
        """Take one change in."""
        if status.state in _BEGUN and status.id not in self._begun:
            self._begun.add(status.id)
            start = self._callback("on_subcall_start")
            if start is not None:
                start(status.depth, status.model, status.prompt_preview)
        elif status.done and status.id in self._begun:
            self._begun.discard(status.id)
            complete = self._callback("on_subcall_complete")
            if complete is not None:
                error = None if status.state is ChildState.COMPLETED else status.error or str(status.state)
                complete(status.depth, status.model, status.elapsed_s, error)
