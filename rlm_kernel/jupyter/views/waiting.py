"""One live table in each cell that waits for children for more than about a second.

What a cell waits for comes into one table, however often it waits: a loop that polls, or that takes one handle after the other, does not
pile tables up. The time that counts is what the cell has spent waiting in all. Between two waits the table stands still, and with the end
of the cell, when every stop that the cell led to is confirmed, it shows the last state. Where nothing can be drawn over later (the lines of
a terminal or a console) a table stays when all that it shows has ended; else it is shown with the end of the cell.

Who runs it: `WaitTables.watch` and what it returns run on any thread that waits (those of one cell share its table), `end_cell` on the
thread that runs the cell. Drawing is in `live`. It owns the tables of the cells that run; a lock guards them, and is not held while
anything is drawn or waited for.

How each step can fail: what is to be shown cannot be had (the episode was reset: the last known state stays); anything of ours raises (it
is logged, and the wait goes on without a view).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlm_kernel.children.core import Ref
from rlm_kernel.jupyter.views.base import View
from rlm_kernel.jupyter.views.children import families, live_table
from rlm_kernel.jupyter.views.live import DELAY_S, INTERVAL_S, LiveView, close_left_open
from rlm_kernel.jupyter.views.surfaces import Surface, Updating, request_of, surface_of, wants_no_views
from rlm_kernel.values import ChildStatus

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

_log = logging.getLogger(__name__)

_MAX_CELLS = 16
"""Cells whose tables are kept: more than can run at once. A thread of the user's may wait in the name of one that has ended."""


@dataclass(slots=True, eq=False)
class _CellTable:
    """The table of one cell.

    Attributes:
        ids: the children that are or were waited for, in that order.
        waits: those that are under way.
        since: when the first of them began.
        waited_s: seconds that were waited before that.
        view: what is drawn meanwhile.
        statuses: what was drawn last.
    """

    surface: Surface
    ids: dict[str, None] = field(default_factory=dict)
    waits: set[object] = field(default_factory=set)
    since: float = 0.0
    waited_s: float = 0.0
    view: LiveView | None = None
    withdraw: Callable[[], None] = lambda: None
    statuses: list[ChildStatus] = field(default_factory=list)

    @property
    def all_done(self) -> bool:
        return all(status.done for status in self.statuses)


class WaitTables:
    """See the module's docstring.

    Args:
        shell: the shell whose cells wait.
        session: whose children they wait for.
    """

    def __init__(self, shell: Any, session: RLMSession) -> None:
        self._shell = shell
        self._session = session
        self._lock = threading.Lock()
        self._cells: dict[str, _CellTable] = {}

    def watch(self, refs: Sequence[Ref]) -> AbstractContextManager[object]:
        """Return a block within which these children are waited for. It is what `RLMSession.watch` is in a shell."""
        try:
            request = request_of(self._shell)
            if not self._session.settings["live_views"] or wants_no_views(request):
                return nullcontext()
            return self._watching(self._table_of(request), refs)
        except Exception:
            _log.debug("a wait is not shown", exc_info=True)
            return nullcontext()

    def _table_of(self, request: dict[str, Any]) -> _CellTable:
        key = _key(request)
        table = self._cells.get(key)
        if table is None:
            surface = surface_of(self._shell)
            with self._lock:
                table = self._cells.setdefault(key, _CellTable(surface))
                while len(self._cells) > _MAX_CELLS:
                    del self._cells[next(iter(self._cells))]
        return table

    @contextlib.contextmanager
    def _watching(self, table: _CellTable, refs: Sequence[Ref]) -> Iterator[None]:
        wait = object()
        try:
            self._begin(table, wait, refs)
            yield
        finally:
            self._end(table, wait)

    def _begin(self, table: _CellTable, wait: object, refs: Sequence[Ref]) -> None:
        with self._lock:
            table.ids.update(dict.fromkeys(child_id for child_id, _ in refs))
            table.waits.add(wait)
            joins = table.view
            if joins is None:
                table.since = time.monotonic()
                view = table.view = self._view_of(table)
        if joins is None:
            table.withdraw = self._session.supervisor.call_on_stir(view.stir)
            view.__enter__()
        else:
            joins.stir()

    def _view_of(self, table: _CellTable) -> LiveView:
        # Twice, since each wait that draws at all draws its end as well.
        delay_s = max(DELAY_S - table.waited_s, table.surface.rest_s(2 * INTERVAL_S))
        is_drawn_over = isinstance(table.surface, Updating)
        return LiveView(
            self._shell,
            lambda: self._render(table),
            delay_s=delay_s,
            surface=table.surface,
            keep=lambda: is_drawn_over or self._keeps(table),
        )

    def _end(self, table: _CellTable, wait: object) -> None:
        with self._lock:
            table.waits.discard(wait)
            if table.waits:
                return
        self._stop(table)

    def _stop(self, table: _CellTable) -> None:
        with self._lock:
            view, table.view = table.view, None
            if view is None:
                return
            table.waited_s += time.monotonic() - table.since
            withdraw = table.withdraw
        try:
            withdraw()
        finally:
            view.close()

    def _keeps(self, table: _CellTable) -> bool:
        """Decide whether a table that cannot be drawn over later stays. If so, the next one begins anew."""
        if not table.all_done:
            return False
        with self._lock:
            table.ids.clear()
        return True

    def _render(self, table: _CellTable) -> View | None:
        with self._lock:
            ids = list(table.ids)
        statuses = families(self._session.supervisor.status(), ids)
        if statuses:  # else the episode is another one
            table.statuses = statuses
        return live_table(table.statuses) if table.statuses and ids else None

    def end_cell(self) -> None:
        """The cell of this thread has ended, with all that followed from it: show the last state of its table."""
        with self._lock:
            table = self._cells.pop(_key(request_of(self._shell)), None)
        try:
            if table is not None:
                self._stop(table)
        finally:
            close_left_open()
        if table is None or not table.surface.is_shown:
            return
        try:
            view = self._render(table)
            if view is not None:
                table.surface.finish(view)
        except Exception:
            _log.debug("the last state is not shown", exc_info=True)


def _key(request: dict[str, Any]) -> str:
    return str(request.get("header", {}).get("msg_id", ""))
