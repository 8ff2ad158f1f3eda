"""Views of one run of the loop: what runs, what the model said, the code, what came of it, how it ended.

Words and code are Markdown, which front ends typeset and highlight (no HTML form beside it: they would prefer that one); the rest is HTML.
The text forms are set in from the margin, so that nothing in them stands where a final answer would be looked for.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlm_kernel.environment.capture import shorten as cut
from rlm_kernel.jupyter.views.base import View
from rlm_kernel.jupyter.views.markdown import clean, fenced, plain, safe_markdown
from rlm_kernel.values import CodeResult

SHOWN_WORDS = 20_000
"""Characters of a model's words, and of an answer, that are shown."""

SHOWN_CODE = 50_000
SHOWN_OUTPUT = 5_000
"""Characters of each stream of one block that are shown."""

TAIL_LINES = 12
"""Lines of output that are shown while a block runs."""

_MARGIN = "    "
_GUTTER = "    │ "
_NOTE = "opacity:.7"
_CODE = re.compile(r"`([^`]+)`")
_BAR = (
    "margin:.2em 0 .7em;padding:0 0 0 .8em;border-left:3px solid {};white-space:pre-wrap;overflow-wrap:anywhere;"
    "font-family:var(--jp-code-font-family,monospace);max-height:36em;overflow:auto"
)
_OUT, _ERR = "rgba(128,128,128,.4)", "rgba(204,102,102,.8)"


class Markdown(View):
    """A view whose rich form is Markdown."""

    def markdown(self) -> str:
        """Return it as Markdown in which nothing can act on the page."""
        raise NotImplementedError

    def html(self) -> str:
        return f"<pre style='white-space:pre-wrap'>{html.escape(self.text())}</pre>"

    def bundle(self) -> dict[str, Any]:
        return {"text/plain": self.text(), "text/markdown": self.markdown()}


@dataclass(frozen=True, slots=True, repr=False)
class Note(View):
    """One line about what goes on, or how it went."""

    line: str
    strong: bool = False

    def text(self) -> str:
        return clean(self.line)

    def html(self) -> str:
        words = _CODE.sub(r"<code>\1</code>", _words(self.line))
        return f"<div>{words}</div>" if self.strong else f"<div style='{_NOTE}'>{words}</div>"


@dataclass(frozen=True, slots=True, repr=False)
class Reply(Markdown):
    """The head of an iteration, and the model's words up to its first block.

    Attributes:
        head: such as ``Iteration 1 of 30``.
        facts: what stands beside it.
        words: Markdown of the model's.
        note: what else is to be said, in our words.
    """

    head: str
    facts: tuple[str, ...] = ()
    words: str = ""
    note: str = ""

    def text(self) -> str:
        lines = [" · ".join((self.head, *self.facts))]
        if self.words:
            lines.append(_set_in(_cut_words(self.words), _MARGIN))
        if self.note:
            lines.append(f"{_MARGIN}({self.note})")
        return "\n".join(clean(line) for line in lines)

    def markdown(self) -> str:
        parts = [" · ".join((f"**{plain(self.head)}**", *map(plain, self.facts)))]
        if self.words:
            parts.append(safe_markdown(_cut_words(self.words)))
        if self.note:
            parts.append(f"*{plain(self.note)}*")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class Code(Markdown):
    """A block of code, with the words that lead to it.

    Attributes:
        code: the code; empty for words alone.
        words: Markdown of the model's.
        note: why it did not run, if it did not.
    """

    code: str
    words: str = ""
    note: str = ""

    def text(self) -> str:
        lines = []
        if self.words:
            lines.append(_set_in(_cut_words(self.words), _MARGIN))
        if self.code:
            lines.append(_set_in(cut(self.code, SHOWN_CODE), _MARGIN + "> "))
        if self.note:
            lines.append(f"{_MARGIN}({self.note})")
        return clean("\n".join(lines))

    def markdown(self) -> str:
        parts = []
        if self.words:
            parts.append(safe_markdown(_cut_words(self.words)))
        if self.code:
            parts.append(fenced(cut(self.code, SHOWN_CODE), "python"))
        if self.note:
            parts.append(f"*{plain(self.note)}*")
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class Running(View):
    """A block that runs: how long it has, and the end of what it has written so far."""

    line: str
    tail: str = ""

    def text(self) -> str:
        shown = _tail(self.tail)
        return "\n".join(filter(None, [_set_in(shown, _GUTTER) if shown else "", f"{_MARGIN}{clean(self.line)}"]))

    def html(self) -> str:
        shown = _tail(self.tail)
        return (_pre(shown, _OUT) if shown else "") + f"<div style='{_NOTE}'>{_words(self.line)}</div>"


@dataclass(frozen=True, slots=True, repr=False)
class Output(View):
    """What a block has written.

    Attributes:
        stdout, stderr: the texts, a traceback in the second.
        note: what is to be said about it, such as how long it took.
    """

    stdout: str = ""
    stderr: str = ""
    note: str = ""

    @classmethod
    def of(cls, result: CodeResult, note: str = "") -> Output:
        """Show a result: of long output the beginning and the end, with its length and where more of it is."""
        texts = (
            _cut_output(result.stdout, result.stdout_length),
            _cut_output(result.stderr, result.stderr_length),
        )
        return cls(*texts, note)

    @property
    def is_empty(self) -> bool:
        return not (self.stdout or self.stderr or self.note)

    def text(self) -> str:
        parts = [_set_in(_as_terminal(text), _GUTTER) for text in (self.stdout, self.stderr) if text.strip("\n")]
        if self.note:
            parts.append(f"{_MARGIN}({clean(self.note)})")
        return "\n".join(parts)

    def html(self) -> str:
        parts = [
            _pre(_as_terminal(text), colour)
            for text, colour in ((self.stdout, _OUT), (self.stderr, _ERR))
            if text.strip("\n")
        ]
        if self.note:
            parts.append(f"<div style='{_NOTE}'>{_words(self.note)}</div>")
        return "".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class Closing(View):
    """How a run ended.

    Attributes:
        head: how it ended.
        facts: figures, in one line.
        lines: name and text of what else is to be said: names that were bound, the trajectory.
    """

    head: str
    facts: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]

    def text(self) -> str:
        rows = [" · ".join((self.head, *self.facts)), *(f"{name}: {text}" for name, text in self.lines)]
        return "\n".join(clean(row) for row in rows)

    def html(self) -> str:
        head = " · ".join((f"<b>{_words(self.head)}</b>", *map(_words, self.facts)))
        rest = "".join(f"<div style='{_NOTE}'>{_words(name)}: {_words(text)}</div>" for name, text in self.lines)
        return (
            "<div style='border-top:1px solid rgba(128,128,128,.4);margin-top:.6em;padding-top:.3em;"
            f"overflow-wrap:anywhere'>{head}{rest}</div>"
        )


class Answer(str):
    """An answer: a text like any other, which front ends show as Markdown. What ``_`` is after a cell with ``%%rlm``."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown = cut(str(self), SHOWN_WORDS)
        return {"text/plain": clean(shown), "text/markdown": safe_markdown(shown) or "*(an empty text)*"}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the text itself as a cell's value; a literal within something else. (For texts this comes before the bundle.)"""
        is_value = len(getattr(printer, "stack", ())) <= 1
        printer.text(clean(cut(str(self), SHOWN_WORDS)) if is_value else repr(str(self)))


def _cut_words(words: str) -> str:
    return cut(words.strip("\n"), SHOWN_WORDS)


def _cut_output(text: str, total: int | None) -> str:
    shown = cut(text, SHOWN_OUTPUT, total)
    if shown is text:
        return text
    return f"{shown.rstrip()}\n[{total or len(text):,} characters in all; the trajectory keeps more of them]\n"


def _tail(text: str) -> str:
    return "\n".join(_as_terminal(text[-4 * SHOWN_OUTPUT :]).split("\n")[-TAIL_LINES:])[-SHOWN_OUTPUT:]


def _as_terminal(text: str) -> str:
    """Return output as a terminal would leave it: of a line that was written over and over (a progress bar) the last form."""
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    return clean("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def _set_in(text: str, margin: str) -> str:
    lines: Sequence[str] = text.replace("\r", "\n").split("\n")
    return "\n".join(f"{margin}{line}".rstrip() for line in lines)


def _pre(text: str, colour: str) -> str:
    return f"<pre style='{_BAR.format(colour)}'>{html.escape(text)}</pre>"


def _words(text: str) -> str:
    return html.escape(clean(text))
