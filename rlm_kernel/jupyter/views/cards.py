"""What a bare handle, a status, or a list of them at the end of a cell looks like.

They are values of layers that know nothing of Jupyter, so a shell's formatters are told about them, and forget them again when the
extension is unloaded. Lists that hold anything else are left to whoever showed them before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlm_kernel.errors import RLMError
from rlm_kernel.jupyter.views.base import MUTED, View, escaped, seconds, shorten
from rlm_kernel.jupyter.views.children import MARKS, activity, label, live_table
from rlm_kernel.session.handles import ChildHandle
from rlm_kernel.values import ChildState, ChildStatus

_ANSWER = 400
"""Characters of an answer, an error or a task that a card shows."""

_LINE = 60
"""The same in one line of text."""

_MAX_IN_A_TABLE = 1000


@dataclass(frozen=True, slots=True, repr=False)
class StatusCard(View):
    """One child.

    Attributes:
        status: its status.
        hint: what may be typed next, if anything.
    """

    status: ChildStatus
    hint: str = ""

    def text(self) -> str:
        status = self.status
        facts = ", ".join([MARKS[status.state].word, *_facts(status)])
        what, text = _said(status)
        return f"<ChildStatus {label(status)}: {facts}{f'; {what}: {shorten(text, _LINE)}' if text else ''}>"

    def html(self) -> str:
        status = self.status
        facts = " · ".join(_facts(status))
        head = (
            f"<div>{MARKS[status.state].html()} &nbsp;<b>{escaped(label(status))}</b>"
            f"{f' &nbsp;<span style={chr(39)}{MUTED}{chr(39)}>{escaped(facts)}</span>' if facts else ''}</div>"
        )
        what, text = _said(status)
        lines = [(what, shorten(text, _ANSWER))] if text else []
        if what != "task":
            lines.append(("task", shorten(status.prompt_preview, _ANSWER)))
        if self.hint:
            lines.append(("next", self.hint))
        body = "".join(
            f"<div><span style='{MUTED}'>{word}:</span> {escaped(line)}</div>" for word, line in lines if line
        )
        return f"<div style='padding-left:.8em;border-left:3px solid {MARKS[status.state].colour}'>{head}{body}</div>"


def _facts(status: ChildStatus) -> list[str]:
    facts = []
    if status.iterations:
        facts.append(_number(status.iterations, "step"))
    if status.started_at:
        facts.append(seconds(status.elapsed_s))
    if activity(status):
        facts.append(f"active {activity(status)}")
    if status.usage.calls:
        facts.append(f"{_number(status.usage.total_tokens, 'token')} in {_number(status.usage.calls, 'call')}")
    if status.model:
        facts.append(status.model)
    if status.done and status.pid and not status.exited:
        facts.append(f"exit of pid {status.pid} not confirmed")
    return facts


def _number(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _said(status: ChildStatus) -> tuple[str, str]:
    if status.state is ChildState.COMPLETED:
        return "answer", status.result or "(empty)"
    if status.error and status.done:
        return "error", status.error
    return "task", status.prompt_preview


def card_of_handle(handle: ChildHandle) -> View | None:
    """Return the card of a handle, None if its child cannot be looked at: its repr says why."""
    try:
        status = handle.status()
    except RLMError:
        return None
    return StatusCard(status, "" if status.done else f"rlm_wait({handle.id!r}), or go on and look later")


def table_of(values: Sequence[Any]) -> View | None:
    """Return a table of statuses or handles; None for anything else."""
    if not 0 < len(values) <= _MAX_IN_A_TABLE:
        return None
    if all(isinstance(value, ChildStatus) for value in values):
        return live_table(values)
    if all(isinstance(value, ChildHandle) for value in values):
        try:
            return live_table([handle.status() for handle in values])
        except RLMError:
            return None
    return None


class Cards:
    """The cards in one shell, from when this is made to `remove`.

    Args:
        shell: the shell.
    """

    def __init__(self, shell: Any) -> None:
        formatters = shell.display_formatter.formatters
        self._html, self._plain = formatters["text/html"], formatters["text/plain"]
        self._list_before: Any = self._html.type_printers.get(list)
        self._ours: list[tuple[Any, type, Callable[..., Any], Any]] = []
        self._add(self._html, ChildHandle, lambda handle: _html_of(card_of_handle(handle)))
        self._add(self._html, ChildStatus, lambda status: StatusCard(status).html())
        self._add(self._html, list, self._html_of_list)
        self._add(self._plain, ChildStatus, lambda status, printer, _cycle: printer.text(StatusCard(status).text()))

    def _add(self, formatter: Any, kind: type, show: Callable[..., Any]) -> None:
        self._ours.append((formatter, kind, show, formatter.type_printers.get(kind)))
        formatter.for_type(kind, show)

    def _html_of_list(self, values: list[Any]) -> str | None:
        if type(values) is list:
            table = table_of(values)
            if table is not None:
                return table.html()
        if self._list_before is not None:
            shown: str | None = self._list_before(values)
            return shown
        # A class of the user's that is a list, too: IPython takes us for its formatter and no longer asks the class.
        own = None if type(values) is list else getattr(values, "_repr_html_", None)
        return own() if callable(own) else None

    def remove(self) -> None:
        """Take out what is still ours."""
        for formatter, kind, show, before in self._ours:
            if formatter.type_printers.get(kind) is not show:
                continue
            if before is None:
                del formatter.type_printers[kind]
            else:
                formatter.type_printers[kind] = before
        self._ours.clear()


def _html_of(view: View | None) -> str | None:
    return None if view is None else view.html()
