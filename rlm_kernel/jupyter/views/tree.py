"""The call tree: who started whom, what has become of each, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlm_kernel.jupyter.views.base import View, escaped, html_table, seconds, text_rows, visible
from rlm_kernel.jupyter.views.children import MARKS, about, in_tree_order, label
from rlm_kernel.values import ChildStatus, Usage

_ABOUT = 40

_COLUMNS = {
    "child": False,
    "state": False,
    "elapsed": True,
    "tokens": True,
    "with all below": True,
    "model": False,
    "about": False,
}
"""The columns, and whether they hold numbers."""


@dataclass(frozen=True, slots=True, repr=False)
class Tree(View):
    """A call tree.

    Attributes:
        title: the line of the root, on top.
        statuses: in the order of the tree.
        branches: for each of them, what is drawn before its name.
        sums: the usage of each with all below it.
    """

    title: str
    statuses: tuple[ChildStatus, ...]
    branches: tuple[str, ...]
    sums: Mapping[str, Usage]

    def text(self) -> str:
        title = visible(self.title)
        if not self.statuses:
            return title
        rows = [tuple(self._cells(*each).values()) for each in zip(self.statuses, self.branches, strict=True)]
        return "\n".join([title, *text_rows([tuple(self._columns()), *rows], right=self._numbers())])

    def html(self) -> str:
        title = f"<div>{escaped(self.title)}</div>"
        if not self.statuses:
            return title
        rows = []
        for status, branch in zip(self.statuses, self.branches, strict=True):
            drawn = f"<span style='white-space:pre;font-family:monospace;opacity:.6'>{branch}</span>"
            name = f"<span style='white-space:nowrap'>{drawn}{escaped(label(status))}</span>"
            cells = {column: escaped(text) for column, text in self._cells(status, branch).items()}
            rows.append([*{**cells, "child": name, "state": MARKS[status.state].html()}.values()])
        return title + html_table([escaped(name) for name in self._columns()], rows, right=self._numbers())

    def _columns(self) -> list[str]:
        is_nested = any(status.parent_id in self.sums for status in self.statuses)
        return [name for name in _COLUMNS if name != "with all below" or is_nested]

    def _numbers(self) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self._columns()) if _COLUMNS[name])

    def _cells(self, status: ChildStatus, branch: str) -> dict[str, str]:
        own, sums = status.usage, self.sums[status.id]
        cells = {
            "child": branch + label(status),
            "state": MARKS[status.state].text(),
            "elapsed": seconds(status.elapsed_s) if status.started_at else "",
            "tokens": f"{own.total_tokens:,}" if own.calls else "",
            "with all below": f"{sums.total_tokens:,}" if sums != own else "",
            "model": status.model or "",
            "about": about(status, _ABOUT),
        }
        return {name: cells[name] for name in self._columns()}


def tree_view(statuses: Sequence[ChildStatus], *, title: str) -> View:
    """Show the call tree below the root.

    Args:
        statuses: all children, ended ones too, in start order.
        title: the line of the root: the episode, its model, its final answer.
    """
    ordered = in_tree_order(statuses)
    return Tree(title, tuple(ordered), tuple(_branches(ordered)), _sums(ordered))


def _sums(ordered: Sequence[ChildStatus]) -> dict[str, Usage]:
    sums = {status.id: status.usage for status in ordered}
    for status in reversed(ordered):  # whatever is below a child comes after it
        if status.parent_id in sums:
            sums[status.parent_id] += sums[status.id]
    return sums


def _branches(ordered: Sequence[ChildStatus]) -> list[str]:
    ids = {status.id for status in ordered}
    parents = {status.id: status.parent_id if status.parent_id in ids else None for status in ordered}
    last_of = {parents[status.id]: status.id for status in ordered}
    stems: dict[str | None, str] = {None: ""}
    branches = []
    for status in ordered:
        stem, is_last = stems[parents[status.id]], last_of[parents[status.id]] == status.id
        branches.append(stem + ("└─ " if is_last else "├─ "))
        stems[status.id] = stem + ("   " if is_last else "│  ")
    return branches
