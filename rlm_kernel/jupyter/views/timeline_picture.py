"""The picture of a timeline, as a PNG. The only module that imports matplotlib.

It draws with matplotlib's objects on a canvas of its own: no pyplot, no backend is chosen or changed, no setting is made. Everything that a
user's settings could change (fonts, colours, LaTeX, layouts) is said for each object, and there are no axes, which have most settings.
The ground is white, so that it reads the same on a dark page.

Who runs it: whatever thread shows the view. It can fail with anything that a broken matplotlib raises; the view then is text.
"""

from __future__ import annotations

import io
import unicodedata
from typing import TYPE_CHECKING, Any, Literal

from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from rlm_kernel.jupyter.views.base import seconds
from rlm_kernel.jupyter.views.children import MARKS
from rlm_kernel.jupyter.views.timeline import Axis, Row, legend
from rlm_kernel.values import ChildState

if TYPE_CHECKING:
    from rlm_kernel.jupyter.views.timeline import Timeline

WIDTH = 900
"""Width in pixels of a page. The picture has `_SCALE` times as many, for screens that show them."""

_SCALE = 2
_ROW = 24
_BAR = 14
_TOP = 68
_BOTTOM = 46
_NOTE = 16
_MARGIN = 12
_LABEL_WIDTH = 230
_OUTCOME_WIDTH = 240
_INDENT = 14
_FONT = "DejaVu Sans"  # comes with matplotlib
_CJK_FONTS = (
    *(
        "Noto Sans CJK SC",
        "Noto Sans CJK JP",
        "Noto Sans SC",
        "Noto Sans JP",
        "Source Han Sans SC",
        "WenQuanYi Zen Hei",
    ),
    *("PingFang SC", "Hiragino Sans", "Arial Unicode MS", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Unifont"),
)
"""Looked for when a name has characters that the font of ours has not."""

_INK = "#1f2933"
_FAINT = "#66717f"
_GRID = "#e3e7ec"
_STRIPE = "#f6f8fa"
_BLUE = "#3f7fcb"
_FILLS = {ChildState.QUEUED: "#dde2e9", ChildState.RUNNING: _BLUE, ChildState.WAITING: "#e4eefa"}
_EDGES = {ChildState.QUEUED: "#a4adba", ChildState.RUNNING: _BLUE, ChildState.WAITING: _BLUE}
_HATCHES = {ChildState.WAITING: "//////"}
_CALL = "#102a4c"
_ENDS = {
    ChildState.COMPLETED: "#1e7d48",
    ChildState.FAILED: "#c0282d",
    ChildState.TIMED_OUT: "#b35900",
    ChildState.CANCELLED: "#5c6673",
}

Box = tuple[float, float, float, float]


def draw(view: Timeline) -> tuple[bytes, dict[str, Any]]:
    """Draw a timeline that has rows.

    Returns:
        the PNG, and what a front end is to know: width and height in pixels of the page, and a text for those who do not see it.
    """
    picture = _Picture(view)
    picture.draw()
    alt = f"{view.title}; the same as text is in this output's text/plain"
    return picture.png(alt), {"width": WIDTH, "height": picture.height, "alt": alt}


class _Picture:
    """One picture. Places are in pixels of a page, from the top left."""

    def __init__(self, view: Timeline) -> None:
        self._view = view
        self._axis = Axis.over(view.rows)
        self.height = _TOP + _ROW * len(view.rows) + _BOTTOM + _NOTE * len(view.notes)
        self._figure = Figure(
            figsize=(WIDTH / 100, self.height / 100),
            dpi=100 * _SCALE,
            facecolor="white",
            edgecolor="white",
            linewidth=0,
            frameon=True,
        )
        self._figure.set_layout_engine("none")
        self._figure.patch.set_sketch_params(None)
        self._figure.patch.set_path_effects([])
        self._canvas = FigureCanvasAgg(self._figure)
        self._place = Affine2D().scale(1, -1).translate(0, self.height).scale(_SCALE)
        self._fonts = _Fonts(self._canvas)
        labels = [self._fonts.shown(row.label) for row in view.rows]
        widths = [self._fonts.width(text) + _INDENT * row.level for text, row in zip(labels, view.rows, strict=True)]
        outcomes = [self._fonts.width(row.outcome) for row in view.rows]
        self._labels = labels
        self._left = _MARGIN + min(_LABEL_WIDTH, max(widths)) + 12
        self._right = WIDTH - _MARGIN - min(_OUTCOME_WIDTH, max(outcomes)) - 26
        self._bottom = _TOP + _ROW * len(view.rows)

    def draw(self) -> None:
        self._draw_ground()
        boxes: dict[ChildState, list[Box]] = {state: [] for state in _FILLS}
        calls: list[Box] = []
        for number, row in enumerate(self._view.rows):
            middle = _TOP + _ROW * (number + 0.5)
            for state, start, stop in row.spans:
                boxes[state].append(self._box(start, stop, middle - _BAR / 2, middle + _BAR / 2))
            calls += [self._box(start, stop, middle + 2.5, middle + 5.5) for start, stop in row.calls]
            self._draw_words(row, self._labels[number], middle)
        for state, found in boxes.items():
            self._fill(found, _FILLS[state], _EDGES[state], _HATCHES.get(state))
        self._fill(calls, _CALL, "none", zorder=4)
        self._draw_heading(has_calls=bool(calls))
        for number, note in enumerate(self._view.notes):
            self._write(_MARGIN, self._bottom + _BOTTOM + _NOTE * (number + 0.2), note, size=7.5, color=_FAINT)

    def png(self, alt: str) -> bytes:
        """Return it as a file."""
        buffer = io.BytesIO()
        print_png: Any = self._canvas.print_png  # untyped
        print_png(buffer, metadata={"Title": "timeline", "Description": alt})
        return buffer.getvalue()

    # -- parts

    def _draw_ground(self) -> None:
        rows = len(self._view.rows)
        stripes: list[Box] = [(0.0, _TOP + _ROW * n, float(WIDTH), _TOP + _ROW * (n + 1.0)) for n in range(0, rows, 2)]
        self._fill(stripes, _STRIPE, "none", zorder=0)
        for time in self._axis.ticks(8):
            x = self._x(time)
            self._line(x, x, _TOP, self._bottom + 4, _GRID, 0.8)
            self._write(x, self._bottom + 8, f"{time:,.10g}", size=8, color=_FAINT, ha="center", va="top")
        self._write(
            (self._left + self._right) / 2,
            self._bottom + 24,
            "seconds since the first query",
            size=8,
            color=_FAINT,
            ha="center",
            va="top",
        )
        for place, cut in self._axis.cuts():
            x = self._left + (self._right - self._left) * place
            self._line(x, x, _TOP, self._bottom + 4, _FAINT, 1.0, ":")
            self._write(x, _TOP - 5, f"{seconds(cut)} cut", size=7, color=_FAINT, ha="center", va="bottom")
        if self._view.is_live:
            x = self._x(self._view.now)
            self._line(x, x, _TOP - 4, self._bottom, _INK, 1.0, "--", zorder=5)
            self._write(x, _TOP - 5, "now", size=8, ha="center", va="bottom")

    def _draw_words(self, row: Row, label: str, middle: float) -> None:
        indent = _MARGIN + _INDENT * min(row.level, 8)
        fitted = self._fonts.fitted(label, self._left - 10 - indent)
        self._write(indent, middle, fitted, va="center_baseline")
        color = _ENDS.get(row.state, _INK)
        end = self._x(row.stop)
        if row.state.done:
            self._write(end + 4, middle, MARKS[row.state].glyph, size=10, color=color, va="center_baseline", zorder=6)
        outcome = self._fonts.fitted(row.outcome, _OUTCOME_WIDTH)
        self._write(self._right + 24, middle, outcome, size=8.5, color=color, va="center_baseline")

    def _draw_heading(self, *, has_calls: bool) -> None:
        title = self._fonts.fitted(self._fonts.shown(self._view.title), WIDTH - 2 * _MARGIN, size=10)
        self._write(_MARGIN, 16, title, size=10, va="center_baseline")
        x, y = float(_MARGIN), 38.0
        for state in legend(self._view.rows):
            word = MARKS[state].word
            if state.done:
                self._write(x, y, MARKS[state].glyph, size=10, color=_ENDS[state], va="center_baseline")
                x += 17
            else:
                self._fill([(x, y - 6, x + 22, y + 6)], _FILLS[state], _EDGES[state], _HATCHES.get(state))
                x += 28
            self._write(x, y, word, size=8.5, va="center_baseline")
            x += self._fonts.width(word) + 18
        if has_calls:
            self._fill([(x, y - 1.5, x + 22, y + 1.5)], _CALL, "none")
            self._write(x + 28, y, "model call", size=8.5, va="center_baseline")

    # -- what everything is made of

    def _x(self, time: float) -> float:
        return self._left + (self._right - self._left) * self._axis.at(time)

    def _box(self, start: float, stop: float, top: float, bottom: float) -> Box:
        left = self._x(start)
        return left, top, max(self._x(stop), left + 0.6), bottom

    def _fill(self, boxes: list[Box], color: str, edge: str, hatch: str | None = None, *, zorder: float = 3) -> None:
        if boxes:
            corners = [[(a, b), (c, b), (c, d), (a, d)] for a, b, c, d in boxes]
            shape = PolyCollection(
                corners, facecolors=color, edgecolors=edge, linewidths=0.5, linestyles="-", antialiaseds=True
            )
            if hatch is not None:
                shape.set_hatch(hatch)
            self._add(shape, zorder)

    def _line(
        self,
        x: float,
        x2: float,
        y: float,
        y2: float,
        color: str,
        width: float,
        style: Literal["-", "--", ":"] = "-",
        *,
        zorder: float = 1,
    ) -> None:
        line = Line2D([x, x2], [y, y2], color=color, linewidth=width, linestyle=style, marker="", antialiased=True)
        self._add(line, zorder)

    def _write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 9,
        color: str = _INK,
        ha: Literal["left", "center"] = "left",
        va: Literal["top", "bottom", "center_baseline"] = "top",
        zorder: float = 6,
    ) -> None:
        properties = self._fonts.properties(size)
        artist = Text(
            x,
            y,
            self._fonts.shown(text),
            color=color,
            horizontalalignment=ha,
            verticalalignment=va,
            fontproperties=properties,
            parse_math=False,  # a name may have $ in it
            usetex=False,
        )
        self._add(artist, zorder)

    def _add(self, artist: Any, zorder: float) -> None:
        artist.set_transform(self._place)
        artist.set_zorder(zorder)
        artist.set_sketch_params(None)
        artist.set_path_effects([])
        self._figure.add_artist(artist)


class _Fonts:
    """The fonts of one picture, and what can be written with them.

    A character that no font has would be drawn as an empty box, with a warning for each; so it is replaced before.
    """

    def __init__(self, canvas: FigureCanvasAgg) -> None:
        get_renderer: Any = canvas.get_renderer  # untyped
        self._renderer = get_renderer()
        self._families = [_FONT]
        self._has: set[int] = set()
        self._add_font(_FONT)
        self._looked_further = False

    def properties(self, size: float = 9) -> font_manager.FontProperties:
        return font_manager.FontProperties(
            family=self._families,
            size=size,
            style="normal",
            variant="normal",
            weight="normal",
            stretch="normal",
            math_fontfamily="dejavusans",
        )

    def _add_font(self, family: str) -> None:
        path = font_manager.findfont(font_manager.FontProperties(family=family), fallback_to_default=False)
        self._has.update(FT2Font(path).get_charmap())

    def shown(self, text: str) -> str:
        """Return text with what cannot be written replaced by a box."""
        if not self._looked_further and any(ord(c) not in self._has for c in text):
            self._looked_further = True
            installed = {font.name for font in font_manager.fontManager.ttflist}
            for family in _CJK_FONTS:
                if family in installed:
                    self._add_font(family)
                    self._families.append(family)
                    break
        return "".join(c if ord(c) in self._has else _stand_in(c) for c in text)

    def width(self, text: str, size: float = 9) -> float:
        """Return the width of text that can be written, in pixels of a page."""
        width, _, _ = self._renderer.get_text_width_height_descent(text, self.properties(size), False)
        return float(width) / _SCALE

    def fitted(self, text: str, width: float, size: float = 9) -> str:
        """Cut text to a width."""
        if self.width(text, size) <= width:
            return text
        while text and self.width(text + "…", size) > width:
            text = text[:-1]
        return text + "…"


def _stand_in(character: str) -> str:
    return "" if unicodedata.category(character) in ("Mn", "Me", "Cf") else "□"
