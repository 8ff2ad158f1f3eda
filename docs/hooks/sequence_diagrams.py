"""Draw the sequence diagrams of the pages as pictures (SVG) while the site is built: no script is loaded to draw them in the browser.

Where the repository is read, the same blocks of Mermaid are drawn by whoever shows it. The part of the language that is understood:
``participant A as Name``, ``A->>B: text``, ``A-->>B: text``, ``A-xB: text``, ``Note over A: text``.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

_BLOCK = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
_MESSAGE = re.compile(r"(\w+?)(-{1,2})(>>|x)(\w+): (.+)")
_NOTE = re.compile(r"Note over (\w+): (.+)")

_COLUMN, _ROW, _TOP = 190, 44, 56


def on_page_markdown(markdown: str, **_context: Any) -> str:
    """Replace each diagram by its picture."""
    return _BLOCK.sub(lambda match: f'<div class="sequence">{draw(match[1])}</div>', markdown)


def draw(source: str) -> str:
    """Return a diagram as SVG on one line.

    Raises:
        ValueError: a line is in no form that is understood.
    """
    names: dict[str, str] = {}
    rows: list[str] = []
    for line in filter(None, map(str.strip, source.splitlines())):
        if found := _PARTICIPANT.fullmatch(line):
            names[found[1]] = found[2] or found[1]
            continue
        columns = {name: _COLUMN * index + _COLUMN // 2 for index, name in enumerate(names)}
        y = _TOP + 34 + _ROW * len(rows)
        if found := _NOTE.fullmatch(line):
            rows.append(_note(columns[found[1]], y, found[2]))
        elif found := _MESSAGE.fullmatch(line):
            rows.append(
                _arrow(columns[found[1]], columns[found[4]], y, found[5], dashed=found[2] == "--", lost=found[3] == "x")
            )
        else:
            raise ValueError(f"a line of a sequence diagram that is not understood: {line}")
    width, height = _COLUMN * len(names), _TOP + _ROW * (len(rows) + 1)
    heads = "".join(_head(_COLUMN * index + _COLUMN // 2, name, height) for index, name in enumerate(names.values()))
    title = "Sequence: " + ", ".join(names.values())
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {height}" width="{width}" font-size="13" '
        f'fill="none" stroke="currentColor" xmlns="http://www.w3.org/2000/svg">{heads}{"".join(rows)}</svg>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="currentColor" stroke="none">{escape(text)}</text>'


def _head(x: int, name: str, height: int) -> str:
    box = f'<rect x="{x - 85}" y="8" width="170" height="32" rx="5"/>'
    return f'{box}{_text(x, 29, name)}<line x1="{x}" y1="40" x2="{x}" y2="{height - 8}" stroke-opacity=".35"/>'


def _note(x: int, y: int, text: str) -> str:
    half = len(text) * 3.4 + 10
    box = f'<rect x="{x - half}" y="{y - 20}" width="{2 * half}" height="26" rx="3" fill="currentColor" fill-opacity=".08"/>'
    return box + _text(x, y - 3, text)


def _arrow(start: int, end: int, y: int, text: str, *, dashed: bool, lost: bool) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    if start == end:
        loop = f'<path d="M{start} {y - 14} h26 v14 h-24"{dash}/>{_point(start, y, -1, lost)}'
        return f'{loop}<text x="{start + 34}" y="{y - 3}" fill="currentColor" stroke="none">{escape(text)}</text>'
    way = 1 if end > start else -1
    line = f'<line x1="{start}" y1="{y}" x2="{end - 2 * way}" y2="{y}"{dash}/>'
    return f"{line}{_point(end, y, way, lost)}{_text((start + end) / 2, y - 7, text)}"


def _point(x: int, y: int, way: int, lost: bool) -> str:
    if lost:
        return f'<path d="M{x - 5} {y - 5} l10 10 m0 -10 l-10 10" stroke-width="2"/>'
    return f'<path d="M{x} {y} l{-9 * way} -4 v8 z" fill="currentColor"/>'
