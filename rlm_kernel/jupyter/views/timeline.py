"""``%rlm timeline``: who ran, waited and was queued, when. A picture where matplotlib is installed, else text.

Options of the magic: ``ID ...`` (these children only) and ``--text`` (the text, also where there could be a picture).

The text is part of the view in any case, for terminals. With a picture there is no HTML: front ends, nbviewer and nbconvert prefer HTML
to a picture, and the picture has its own title and legend. Without one the HTML is the text.

Times run from the first query that is shown. Long stretches in which no child lived are cut out of the axis, and marked.
"""

from __future__ import annotations

import base64
import html
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlm_kernel.children.history import ChildHistory, StateSpan
from rlm_kernel.jupyter.views.base import View, seconds
from rlm_kernel.jupyter.views.children import MARKS, label, with_levels
from rlm_kernel.values import ChildState

if TYPE_CHECKING:
    from rlm_kernel.session.session import RLMSession

ROWS = 40
"""Children that are shown; of more, those that took longest."""

NO_PICTURE = 'pip install "rlm-kernel[plot]" gives this as a picture'

_BLOCKS = {ChildState.QUEUED: "░", ChildState.RUNNING: "█", ChildState.WAITING: "▒"}
_TEXT_WIDTH = 48
"""Cells of a bar of the text form: with a label and an end it fits a terminal of 100 columns."""

_LABEL_WIDTH = 26
_GAP_FACTOR = 0.5
"""A stretch without any child is cut out if it is longer than this part of all the time with children."""

_GAP_WIDTH = 0.04
"""Part of the axis that is left of a stretch that was cut out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One child of the timeline. Times are seconds from the beginning of the picture.

    Attributes:
        level: how deep it stands below what is shown.
        label: its id and name.
        spans: (state, start, end) of its life; an end that is not there yet is the time of the picture.
        end: when it ended, None while it lives.
        calls: (start, end) of its model calls.
    """

    level: int
    label: str
    state: ChildState
    spans: tuple[tuple[ChildState, float, float], ...]
    end: float | None
    calls: tuple[tuple[float, float], ...]
    is_gone: bool

    @property
    def start(self) -> float:
        return self.spans[0][1]

    @property
    def stop(self) -> float:
        return self.spans[-1][2]

    @property
    def outcome(self) -> str:
        """Say how it stands with it, and how long it has run (without the queue)."""
        began = next((start for state, start, _ in self.spans if state is not ChildState.QUEUED), None)
        took = "" if began is None else f" {seconds(self.stop - began)}"
        unsure = ", exit NOT confirmed" if self.state.done and not self.is_gone else ""
        return f"{MARKS[self.state].word}{took}{unsure}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Where each time is: pieces of (from, to, left, right), the last two as parts of the width."""

    pieces: tuple[tuple[float, float, float, float], ...]

    @classmethod
    def over(cls, rows: Sequence[Row]) -> Axis:
        """Make the axis for some rows, leaving out long stretches in which no child lived."""
        busy: list[tuple[float, float]] = []
        for start, stop in sorted((row.start, row.stop) for row in rows):
            if busy and start <= busy[-1][1]:
                busy[-1] = (busy[-1][0], max(busy[-1][1], stop))
            else:
                busy.append((start, stop))
        longest = _GAP_FACTOR * max(sum(stop - start for start, stop in busy), 1e-3)
        stretches = [busy[0]]
        for start, stop in busy[1:]:
            if start - stretches[-1][1] > longest:
                stretches.append((start, stop))
            else:
                stretches[-1] = (stretches[-1][0], stop)
        gap = min(_GAP_WIDTH, 0.5 / len(stretches))
        room = 1.0 - gap * (len(stretches) - 1)
        total = max(sum(stop - start for start, stop in stretches), 1e-9)
        pieces, left = [], 0.0
        for start, stop in stretches:
            right = left + room * (stop - start) / total
            pieces.append((start, stop, left, right))
            left = right + gap
        return cls(tuple(pieces))

    def at(self, time: float) -> float:
        """Return where a time is, from 0 to 1."""
        for start, stop, left, right in self.pieces:
            if time <= stop:
                return left if time <= start else left + (right - left) * (time - start) / (stop - start)
        return self.pieces[-1][3]

    def time_at(self, place: float) -> float | None:
        """Return the time at a place from 0 to 1; None in a stretch that is cut out."""
        for start, stop, left, right in self.pieces:
            if left <= place <= right:
                return start + (stop - start) * (place - left) / (right - left) if right > left else start
        return None

    @property
    def seconds(self) -> float:
        """How many seconds are shown."""
        return sum(stop - start for start, stop, _, _ in self.pieces)

    def cuts(self) -> list[tuple[float, float]]:
        """Return where something is cut out, and how many seconds."""
        pairs = zip(self.pieces, self.pieces[1:], strict=False)
        return [((before[3] + after[2]) / 2, after[0] - before[1]) for before, after in pairs]

    def ticks(self, count: int) -> list[float]:
        """Return about so many round times."""
        step = round_step(self.seconds / max(count, 1))
        found = []
        for start, stop, _, _ in self.pieces:
            first = math.ceil(start / step - 1e-9)
            found += [number * step for number in range(first, math.floor(stop / step + 1e-9) + 1)]
        return found


def round_step(wanted: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not less than what is wanted."""
    power = 10.0 ** math.floor(math.log10(max(wanted, 1e-3)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(View):
    """The view. See the module's docstring.

    Attributes:
        title: says what it is of.
        rows: parents above their children; empty if there is nothing to show.
        now: seconds from the beginning to when this was taken.
        notes: lines on what is not shown.
        with_picture: whether to make a picture if that can be done.
    """

    title: str
    rows: tuple[Row, ...]
    now: float
    notes: tuple[str, ...] = ()
    with_picture: bool = True

    @property
    def is_live(self) -> bool:
        """Whether one of the children has not ended."""
        return any(row.end is None for row in self.rows)

    def text(self) -> str:
        return "\n".join([self.title, *(_text_lines(self) if self.rows else []), *self.notes])

    def html(self) -> str:
        return _preformatted(self.text())

    def bundle(self) -> dict[str, Any]:
        return self._repr_mimebundle_()[0]

    def _repr_mimebundle_(  # type: ignore[override]  # IPython takes either
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return it by media type, and what is to be known about the picture."""
        text = self.text()
        if not (self.rows and self.with_picture) or _shows_only_text():
            return {"text/plain": text, "text/html": _preformatted(text)}, {}
        try:
            from rlm_kernel.jupyter.views.timeline_picture import draw

            png, metadata = draw(self)
        except ImportError:
            text = f"{text}\n{NO_PICTURE}"
        except Exception as error:  # a matplotlib that is installed and does not work is no reason to show nothing
            text = f"{text}\nmatplotlib could not draw this: {type(error).__name__}: {error}"
        else:
            return {"text/plain": text, "image/png": base64.b64encode(png).decode()}, {"image/png": metadata}
        return {"text/plain": text, "text/html": _preformatted(text)}, {}


def _preformatted(text: str) -> str:
    return f"<pre style='line-height:1.25;overflow-x:auto'>{html.escape(text)}</pre>"


def _shows_only_text() -> bool:
    """Tell whether we are in a terminal, where a picture would be drawn for nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    formatter = getattr(shell, "display_formatter", None)
    return list(getattr(formatter, "active_types", ())) == ["text/plain"]


def timeline_view(session: RLMSession, ids: Sequence[str] = (), *, text_only: bool = False) -> Timeline:
    """Show when children were queued, ran and waited.

    Args:
        session: whose children they are.
        ids: these children only; none for all of the episode.
        text_only: whether to do without a picture.

    Raises:
        UnknownHandleError, StaleHandleError: there is no such child; the message lists those that there are.
    """
    wanted = list(dict.fromkeys(ids))
    histories = session.supervisor.histories([(child_id, None) for child_id in wanted] if wanted else None)
    if not histories:
        return Timeline(f"No child has been started in episode {session.episode_id} yet", (), 0.0)
    return timeline_of(histories, title=f"episode {session.episode_id}", with_picture=not text_only)


def timeline_of(histories: Sequence[ChildHistory], *, title: str, with_picture: bool = True) -> Timeline:
    """Make the view of some children, at least one.

    Args:
        histories: snapshots of the same moment.
        title: what they belong to.
        with_picture: whether to make a picture if that can be done.
    """
    in_order = sorted(histories, key=lambda each: (each.asked_at, len(each.status.id), each.status.id))
    longest = sorted(in_order, key=lambda each: each.asked_at - (each.ended_at or each.taken_at))[:ROWS]
    ids = {each.status.id for each in longest}
    shown = [each for each in in_order if each.status.id in ids]
    beginning = min(each.asked_at for each in shown)
    now = shown[0].taken_at - beginning
    rows = tuple(_row(level, each, beginning) for level, each in with_levels(shown))
    states = Counter(each.status.state for each in in_order)
    counts = ", ".join(f"{states[state]} {MARKS[state].word}" for state in ChildState if states[state])
    children = "1 child" if len(in_order) == 1 else f"{len(in_order):,} children"
    notes = []
    if len(in_order) > len(shown):
        notes.append(
            f"{len(in_order) - len(shown):,} of {children} are not shown: these are the {ROWS} that took longest; "
            "`%rlm timeline ID ...` shows others"
        )
    merged = sum(each.merged for each in shown)
    if merged:
        notes.append(f"{merged:,} changes between running and waiting are merged: there were too many to keep")
    return Timeline(f"Timeline of {children} ({counts}), {title}", rows, now, tuple(notes), with_picture)


def _row(level: int, history: ChildHistory, beginning: float) -> Row:
    now = history.taken_at
    living = [span for span in history.spans if not span.state.done]
    return Row(
        level=level,
        label=label(history.status),
        state=history.status.state,
        spans=tuple(_relative(span, beginning, now) for span in living),
        end=None if history.ended_at is None else history.ended_at - beginning,
        calls=tuple((start - beginning, end - beginning) for start, end in history.calls),
        is_gone=history.exited_at is not None,
    )


def _relative(span: StateSpan, beginning: float, now: float) -> tuple[ChildState, float, float]:
    return span.state, span.start - beginning, (now if span.end is None else span.end) - beginning


# ------------------------------------------------------------------------------------------------------ as text


def legend(rows: Iterable[Row]) -> list[ChildState]:
    """Return the states that occur, in the order of a life."""
    found = {state for row in rows for state, _, _ in row.spans} | {row.state for row in rows}
    return [state for state in ChildState if state in found]


def _text_lines(view: Timeline) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    axis = Axis.over(view.rows)
    labels = ["  " * row.level + row.label for row in view.rows]
    width = min(_LABEL_WIDTH, max(map(cell_len, labels)))
    lines = [" " * (width + 2) + _text_scale(axis)]
    for row, name in zip(view.rows, labels, strict=True):
        fitted = name if cell_len(name) <= width else set_cell_size(name, width - 1) + "…"
        lines.append(f"{set_cell_size(fitted, width)}  {_text_bar(row, axis)}  {row.outcome}")
    marks = {state: _BLOCKS.get(state) or MARKS[state].glyph for state in legend(view.rows)}
    parts = [f"{mark} {MARKS[state].word}" for state, mark in marks.items()]
    if view.is_live:
        parts.append(f"▸ lives now, at {seconds(view.now)}")
    cuts = [seconds(length) for _, length in axis.cuts()]
    if cuts:
        parts.append(f"┊ cut out, without a child: {', '.join(cuts)}")
    return [*lines, "   ".join(parts)]


def _text_scale(axis: Axis) -> str:
    """Write round times above the places where they are."""
    cells = [" "] * (_TEXT_WIDTH + 12)
    free = 0
    for time in axis.ticks(6):
        place, text = round(axis.at(time) * _TEXT_WIDTH), f"{time:,.10g}"
        if place >= free:
            cells[place : place + len(text)] = text
            free = place + len(text) + 2
    return f"{''.join(cells).rstrip()} s"


def _text_bar(row: Row, axis: Axis) -> str:
    covered: list[dict[ChildState, float]] = [{} for _ in range(_TEXT_WIDTH)]
    for state, start, stop in row.spans:
        left, right = axis.at(start) * _TEXT_WIDTH, axis.at(stop) * _TEXT_WIDTH
        for cell in range(int(left), min(_TEXT_WIDTH, math.ceil(right))):
            overlap = min(right, cell + 1) - max(left, cell)
            covered[cell][state] = covered[cell].get(state, 0.0) + overlap
    cells = [_BLOCKS[max(states, key=lambda each: states[each])] if states else " " for states in covered] + [" "]
    for place, _ in axis.cuts():
        cut = int(place * _TEXT_WIDTH)
        cells[cut] = "┊" if cells[cut] == " " else cells[cut]
    stop = axis.at(row.stop) * _TEXT_WIDTH
    cells[min(_TEXT_WIDTH, math.ceil(stop))] = MARKS[row.state].glyph if row.state.done else "▸"
    return "".join(cells)
