"""Views of children: one per row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlm_kernel.children.history import ChildHistory
from rlm_kernel.jupyter.views.base import MUTED, Table, View, escaped, html_table, seconds, shorten, text_rows
from rlm_kernel.values import ChildState, ChildStatus

_PREVIEW = 48
"""Characters of an answer, an error or a task in a row of text."""

_PREVIEW_HTML = 80

_MORE_OF_AN_ERROR = 2
"""Times as much is shown of an error: what is wrong comes behind where it was met."""

_COLUMNS = {
    "state": False,
    "child": False,
    "steps": True,
    "elapsed": True,
    "last activity": True,
    "tokens": True,
    "about": False,
}
"""The columns of a live table, and whether they hold numbers."""

MAX_ROWS = 25
"""Rows of a live table. It is sent again and again, and is to be seen as a whole."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How a state is shown: by a glyph and a word, and in a colour that is readable on light and dark grounds."""

    glyph: str
    word: str
    colour: str

    def text(self) -> str:
        return f"{self.glyph} {self.word}"

    def html(self) -> str:
        return f"<span style='white-space:nowrap'>{self.html_glyph()} {self.word}</span>"

    def html_glyph(self) -> str:
        return f"<span style='color:{self.colour}'>{self.glyph}</span>"


MARKS: Mapping[ChildState, Mark] = {
    ChildState.QUEUED: Mark("○", "queued", "#8a8a8a"),
    ChildState.RUNNING: Mark("●", "running", "#3d8ee6"),
    ChildState.WAITING: Mark("◐", "waiting", "#b58a24"),
    ChildState.COMPLETED: Mark("✓", "completed", "#2f9e62"),
    ChildState.FAILED: Mark("✗", "failed", "#e0524d"),
    ChildState.TIMED_OUT: Mark("◷", "timed out", "#e0524d"),
    ChildState.CANCELLED: Mark("⊘", "cancelled", "#8a8a8a"),
}

_WORTH_A_ROW = (
    (ChildState.RUNNING, ChildState.WAITING),
    (ChildState.FAILED, ChildState.TIMED_OUT),
    (ChildState.QUEUED,),
    (ChildState.CANCELLED,),
    (ChildState.COMPLETED,),
)
"""Which children are shown first, where not all of them have a row."""

_RANK_OF = {state: rank for rank, states in enumerate(_WORTH_A_ROW) for state in states}


def status_table(statuses: Sequence[ChildStatus], title: str) -> Table:
    """Show children, one per row, with all that there is to know in numbers."""
    return Table(
        title,
        ("id", "name", "state", "elapsed", "last activity", "steps", "calls", "tokens", "pid", "about"),
        tuple(_row(status) for status in statuses),
    )


def _row(status: ChildStatus) -> tuple[str, ...]:
    usage = status.usage
    return (
        ("  " * (status.depth - 1)) + status.id,
        status.name if status.name != status.id else "",
        str(status.state),
        f"{status.elapsed_s:.1f} s",
        activity(status),
        str(status.iterations),
        str(usage.calls),
        str(usage.total_tokens),
        f"{status.pid or ''}{' (gone)' if status.exited and status.pid else ''}",
        about(status, _PREVIEW),
    )


@dataclass(frozen=True, slots=True, repr=False)
class LiveTable(View):
    """Children as somebody who waits for them wants to see them: how many are done, and what the others do.

    Attributes:
        title: what the line above the table says.
        done, total: for the progress.
        rows: the children, in the order of the call tree.
        rest: what is said about those that have no row, empty if all have.
    """

    title: str
    done: int
    total: int
    rows: tuple[ChildStatus, ...]
    rest: str = ""

    def text(self) -> str:
        cells = [tuple(self._columns()), *(tuple(self._cells(status, _PREVIEW).values()) for status in self.rows)]
        rest = [self.rest] if self.rest else []
        return "\n".join([self.title, *text_rows(cells, right=self._numbers()), *rest])

    def html(self) -> str:
        rows = []
        for status in self.rows:
            cells = {name: escaped(text) for name, text in self._cells(status, _PREVIEW_HTML).items()}
            rows.append([*{**cells, "state": MARKS[status.state].html(), "child": _name_html(status)}.values()])
        table = html_table([escaped(name) for name in self._columns()], rows, right=self._numbers())
        rest = f"<div style='{MUTED}'>{escaped(self.rest)}</div>" if self.rest else ""
        return f"<div>{self._bar()}{escaped(self.title)}</div>{table}{rest}"

    def _columns(self) -> list[str]:
        # What has ended is no longer active: the column would be empty.
        return [name for name in _COLUMNS if name != "last activity" or self.done < self.total]

    def _numbers(self) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self._columns()) if _COLUMNS[name])

    def _bar(self) -> str:
        """A picture of the progress. Where its style is taken out it is not to be seen: the title says the same."""
        if self.total < 2:
            return ""
        percent = 100 * self.done // self.total
        part = f"<span style='display:inline-block;height:100%;width:{percent}%;background-color:#3d8ee6'></span>"
        return (
            "<span style='display:inline-block;width:8em;height:.6em;margin-right:.8em;line-height:0;"
            f"background-color:rgba(128,128,128,.3)'>{part}</span>"
        )

    def _cells(self, status: ChildStatus, width: int) -> dict[str, str]:
        cells = {
            "state": MARKS[status.state].text(),
            "child": "  " * (status.depth - 1) + label(status),
            "steps": str(status.iterations) if status.iterations else "",
            "elapsed": seconds(status.elapsed_s) if status.started_at else "",
            "last activity": activity(status),
            "tokens": f"{status.usage.total_tokens:,}" if status.usage.calls else "",
            "about": about(status, width),
        }
        return {name: cells[name] for name in self._columns()}


def live_table(statuses: Sequence[ChildStatus], title: str = "") -> LiveTable:
    """Show children to somebody who waits for them.

    Args:
        statuses: the children, and those of theirs that are to be seen, too.
        title: what the title begins with.
    """
    counts = Counter(status.state for status in statuses)
    done = sum(number for state, number in counts.items() if state.done)
    whom = "child" if len(statuses) == 1 else "children"
    unlike = [state for states in _WORTH_A_ROW[:-1] for state in states]
    words = [f"{done} of {len(statuses)} {whom} done", *_counted(counts, unlike)]
    ordered = in_tree_order(statuses)
    chosen = ordered
    rest = ""
    if len(ordered) > MAX_ROWS:
        ranked = sorted(range(len(ordered)), key=lambda i: _RANK_OF[ordered[i].state])[:MAX_ROWS]
        chosen = [ordered[i] for i in sorted(ranked)]
        others = counts - Counter(status.state for status in chosen)
        rest = f"… and {len(ordered) - MAX_ROWS} more: {', '.join(_counted(others, reversed(list(MARKS))))}"
    head = f"{shorten(title, 80)}: " if title else ""
    return LiveTable(head + " · ".join(words), done, len(statuses), tuple(chosen), rest)


def _counted(counts: Mapping[ChildState, int], states: Iterable[ChildState]) -> list[str]:
    return [f"{counts[state]} {MARKS[state].word}" for state in states if counts.get(state)]


def in_tree_order(statuses: Sequence[ChildStatus]) -> list[ChildStatus]:
    """Return children so that those of each follow it, in start order otherwise."""
    ids = {status.id for status in statuses}
    below: dict[str | None, list[ChildStatus]] = {}
    for status in statuses:
        below.setdefault(status.parent_id if status.parent_id in ids else None, []).append(status)
    ordered: list[ChildStatus] = []
    stack = below.get(None, [])[::-1]
    while stack:
        status = stack.pop()
        ordered.append(status)
        stack.extend(reversed(below.get(status.id, ())))
    return ordered


def with_levels(histories: Sequence[ChildHistory]) -> list[tuple[int, ChildHistory]]:
    """Return histories of children as `in_tree_order` does, each with the number of those above it that are among them."""
    by_id = {each.status.id: each for each in histories}
    levels: dict[str | None, int] = {}
    for status in in_tree_order([each.status for each in histories]):
        levels[status.id] = levels.get(status.parent_id, -1) + 1
    return [(level, by_id[child_id]) for child_id, level in levels.items() if child_id is not None]


def families(statuses: Sequence[ChildStatus], ids: Iterable[str]) -> list[ChildStatus]:
    """Return the children with these ids, and all below them.

    Args:
        statuses: in start order, so that parents come first.
        ids: the ids.
    """
    wanted = set(ids)
    found = []
    for status in statuses:
        if status.id in wanted or status.parent_id in wanted:
            wanted.add(status.id)
            found.append(status)
    return found


def label(status: ChildStatus, width: int = 32) -> str:
    """Return the id of a child, with its name if it has one."""
    return status.id if status.name in ("", status.id) else f"{status.id} {shorten(status.name, width)}"


def activity(status: ChildStatus) -> str:
    """Return when a child was last seen to do something; empty if it has ended."""
    return "" if status.done or status.last_activity_s is None else f"{seconds(status.last_activity_s)} ago"


def about(status: ChildStatus, width: int) -> str:
    """Return a line on a child: what it ended with, else its task."""
    if status.done and status.error:
        return shorten(status.error, _MORE_OF_AN_ERROR * width)
    return shorten((status.done and status.result) or status.prompt_preview, width)


def _name_html(status: ChildStatus) -> str:
    indent = f"padding-left:{1.2 * (status.depth - 1):g}em;" if status.depth > 1 else ""
    return f"<span style='{indent}white-space:nowrap'>{escaped(label(status))}</span>"
