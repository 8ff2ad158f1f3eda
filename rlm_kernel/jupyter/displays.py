"""Views: plain text for terminals and escaped HTML for notebooks, in one bundle."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlm_kernel.values import ChildStatus

_PREVIEW = 48


@dataclass(frozen=True, slots=True)
class Table:
    """A small table with a title line."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        if not self.rows:
            return self.title
        cells = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([self.title, *lines])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._html()}

    def _html(self) -> str:
        title = f"<div>{html.escape(self.title)}</div>"
        if not self.rows:
            return title
        head = "".join(f"<th style='text-align:left'>{html.escape(text)}</th>" for text in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self.rows
        )
        return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def status_table(statuses: Sequence[ChildStatus], title: str) -> Table:
    """Show children, one per row."""
    return Table(
        title,
        ("id", "name", "state", "elapsed", "last activity", "steps", "calls", "tokens", "pid", "about"),
        tuple(_row(status) for status in statuses),
    )


def _row(status: ChildStatus) -> tuple[str, ...]:
    usage = status.usage
    about = status.error or status.result if status.done else status.prompt_preview
    return (
        ("  " * (status.depth - 1)) + status.id,
        status.name if status.name != status.id else "",
        str(status.state),
        f"{status.elapsed_s:.1f} s",
        "" if status.done or status.last_activity_s is None else f"{status.last_activity_s:.1f} s ago",
        str(status.iterations),
        str(usage.calls),
        str(usage.total_tokens),
        f"{status.pid or ''}{' (gone)' if status.exited and status.pid else ''}",
        _short(about or status.prompt_preview),
    )


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _PREVIEW else flat[: _PREVIEW - 1] + "…"
