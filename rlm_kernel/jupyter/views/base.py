"""The base of all views, the plain table, and what all of ours look like.

HTML of ours has no colours of its own for text and ground, so that it fits light and dark themes; it needs no style sheet and no script,
so that it is the same in nbviewer, after nbconvert, and in a notebook that is not trusted. Lines are a grey that shows on both grounds; a
colour only goes with a glyph and a word that say the same. Everything that comes from outside is escaped, and what would act on a terminal
is taken out.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LINE = "1px solid rgba(128,128,128,.35)"
"""How borders look, as a value of CSS."""

MUTED = "opacity:.7"
"""The style of what is less important."""

_ONE_LINE = "white-space:nowrap"
_SHORT = 24
"""Characters of a cell up to which it is not broken into lines."""

_CELL = "text-align:{};padding:.2em .9em .2em 0;vertical-align:top"
_INVISIBLE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # colours and movements of a terminal
    "|\x1b[\\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\\\)"  # its titles, links and the like
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    "|[\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # turns the direction of what follows
)


class View:
    """Something to look at. It says what it is as text and as HTML; front ends take what they can show."""

    def text(self) -> str:
        """Return it as plain text, without an end of line."""
        raise NotImplementedError

    def html(self) -> str:
        """Return it as HTML, escaped."""
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """Return it by media type, for `display` and for updates of it."""
        return {"text/plain": self.text(), "text/html": self.html()}

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()


@dataclass(frozen=True, slots=True, repr=False)
class Table(View):
    """A small table with a title line."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        if not self.rows:
            return visible(self.title)
        return visible("\n".join([self.title, *text_rows([self.header, *self.rows])]))

    def html(self) -> str:
        title = f"<div>{escaped(self.title)}</div>"
        if not self.rows:
            return title
        return title + html_table(
            [escaped(text) for text in self.header], [[escaped(text) for text in row] for row in self.rows]
        )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Return a table.

    Args:
        header: HTML of the cells of the first line; empty ones alone are no line.
        rows: HTML of the cells below it.
        right: numbers of the columns that hold numbers.
    """
    styles = [_CELL.format("right" if i in right else "left") for i in range(len(header))]
    head = "".join(
        f"<th style='{style};{_ONE_LINE};font-weight:normal;{MUTED}'>{cell}</th>"
        for style, cell in zip(styles, header, strict=True)
    )
    first = (
        f"<thead style='border-bottom:{LINE}'><tr style='background:none'>{head}</tr></thead>" if any(header) else ""
    )
    body = "".join(
        "<tr style='background:none'>"
        + "".join(
            f"<td style='{style}{f';{_ONE_LINE}' if len(cell) <= _SHORT else ''}'>{cell}</td>"
            for style, cell in zip(styles, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        "<table style='border-collapse:collapse;border:none;margin:.2em 0;table-layout:auto'>"
        f"{first}<tbody>{body}</tbody></table>"
    )


def text_rows(cells: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Return lines in which the cells of each column stand below each other.

    Args:
        cells: the rows.
        right: numbers of the columns that hold numbers.
    """
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def shorten(text: str, width: int) -> str:
    """Return text on one line, cut to a number of characters."""
    flat = " ".join(visible(text[: 20 * width]).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def visible(text: str) -> str:
    """Return text without what a terminal or a browser would act on rather than show; ends of lines and tabs stay."""
    return _INVISIBLE.sub("", text)


def escaped(text: str) -> str:
    """Return text as HTML that shows it."""
    return html.escape(visible(text))


def seconds(value: float) -> str:
    """Return a length of time, such as ``3.2 s`` or ``2 min 05 s``."""
    if value < 99.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
