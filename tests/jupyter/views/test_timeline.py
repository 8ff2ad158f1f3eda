"""The timeline is one picture, or the same as text: who was queued, ran and waited, when, and how it ended."""

from __future__ import annotations

import base64
import io
import struct
import sys
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.children.history import ChildHistory, History
from rlm_kernel.jupyter.views.timeline import NO_PICTURE, ROWS, Axis, Timeline, round_step, timeline_of, timeline_view
from rlm_kernel.jupyter.views.timeline_picture import _Picture
from rlm_kernel.values import ChildState, ChildStatus

S = ChildState
NOW = 20.0
HOSTILE = [
    "$x_$",
    "<script>alert(1)</script>",
    "two\nlines\r\tand a tab",
    "数据分析",
    "🎉👩‍👩‍👧",
    "\x1b[31mred",
    "\u202eright to left",
    "a" * 500,
]


def child(
    number: int,
    *changes: tuple[ChildState, float],
    name: str = "",
    parent: int | None = None,
    calls: Sequence[tuple[float, float]] = (),
    gone: bool = True,
    now: float = NOW,
) -> ChildHistory:
    history = History()
    for state, at in changes:
        history.enter(state, at)
    for call in calls:
        history.note_call(*call)
    state = changes[-1][0]
    history.exited = changes[-1][1] if gone and state.done else None
    parent_id = None if parent is None else f"c{parent}"
    status = ChildStatus(f"c{number}", name or f"c{number}", 1 if parent is None else 2, parent_id, state)
    return history.snapshot(status, {}, now, 0.0)


def a_run() -> list[ChildHistory]:
    """Three at once; a pair below the second; one of each end; two that live."""
    return [
        child(1, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 6), name="first", calls=[(2, 3)]),
        child(2, (S.QUEUED, 0), (S.RUNNING, 1), (S.WAITING, 4), (S.RUNNING, 12), (S.COMPLETED, 14), name="planner"),
        child(3, (S.QUEUED, 0), (S.RUNNING, 1), (S.FAILED, 3)),
        child(4, (S.QUEUED, 0), (S.RUNNING, 3), (S.TIMED_OUT, 11)),
        child(5, (S.QUEUED, 0), (S.CANCELLED, 9)),
        child(6, (S.QUEUED, 4), (S.RUNNING, 6), (S.COMPLETED, 10), parent=2),
        child(7, (S.QUEUED, 4), (S.RUNNING, 8), (S.COMPLETED, 12), parent=2),
        child(8, (S.QUEUED, 4), (S.RUNNING, 15)),
        child(9, (S.QUEUED, 5)),
    ]


def view_of(histories: list[ChildHistory], **options: Any) -> Timeline:
    return timeline_of(histories, title="episode e1", **options)


def png_of(view: Timeline) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundle = view.bundle()
    return base64.b64decode(bundle["image/png"])


@pytest.fixture(scope="module", autouse=True)
def open_fonts() -> None:
    """Draw once: matplotlib keeps the files of its fonts open, which would look like a leak of the first test."""
    view_of([child(1, (S.QUEUED, 0), (S.CANCELLED, 1), name=name) for name in ("plain", *HOSTILE)]).bundle()


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


# ---------------------------------------------------------------------------------------------------------------- text


def test_the_text_shows_each_child_below_its_parent_with_its_bar_and_its_end() -> None:
    title, scale, *lines, legend = view_of(a_run()).text().splitlines()
    assert "9 children (1 queued, 1 running, 4 completed, 1 failed, 1 timed out, 1 cancelled), episode e1" in title
    assert scale.split()[0] == "0"
    assert scale.split()[-1] == "s"
    assert [line.split()[0] for line in lines] == ["c1", "c2", "c6", "c7", "c3", "c4", "c5", "c8", "c9"]
    assert lines[2].startswith("  c6")
    bars = {line.split()[0]: line for line in lines}
    assert "░██" in bars["c1"]
    assert "█✓" in bars["c1"]
    assert "█▒" in bars["c2"]
    assert "▒█" in bars["c2"]
    for name, glyph in (("c3", "█✗"), ("c4", "█◷"), ("c5", "░⊘"), ("c8", "█▸"), ("c9", "░▸")):
        assert glyph in bars[name]
    assert "completed 5.0 s" in bars["c1"], "the queue is no part of what it took"
    for word in ("░ queued", "█ running", "▒ waiting", "✓ completed", "✗ failed", "◷ timed out", "⊘ cancelled", "▸"):
        assert word in legend


def test_lengths_are_those_of_the_times() -> None:
    line = view_of([child(1, (S.QUEUED, 0), (S.RUNNING, 5), (S.WAITING, 15), (S.CANCELLED, 20))]).text().splitlines()[2]
    assert (line.count("░"), line.count("█"), line.count("▒")) == (12, 24, 12)


def test_an_exit_that_is_not_confirmed_is_said() -> None:
    sure, unsure = (
        view_of([child(1, (S.QUEUED, 0), (S.RUNNING, 1), (S.CANCELLED, 3), gone=g)]).text() for g in (True, False)
    )
    assert "NOT confirmed" not in sure
    assert "exit NOT confirmed" in unsure


def test_columns_stand_below_each_other_with_wide_characters_and_names_stay_on_their_line() -> None:
    from rich.cells import cell_len

    rows = [child(i, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 2), name=name) for i, name in enumerate(HOSTILE, 1)]
    lines = view_of(rows).text().splitlines()
    assert len(lines) == len(HOSTILE) + 3
    assert len({cell_len(line[: line.index("░")]) for line in lines[2:-1]}) == 1
    assert "\x1b" not in "".join(lines)
    assert "\u202e" not in "".join(lines)
    assert max(map(cell_len, lines)) <= 120


def test_a_long_time_without_children_is_cut_out_and_said() -> None:
    early = child(1, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 10), now=9010.0)
    late = child(2, (S.QUEUED, 9000), (S.RUNNING, 9001), (S.COMPLETED, 9010), now=9010.0)
    view = view_of([early, late])
    text = view.text()
    assert "cut out, without a child: 2 h 29 min" in text
    assert all(line.count("█") > 15 for line in text.splitlines()[2:4])
    axis = Axis.over(view.rows)
    assert axis.at(10) < axis.at(9000) < axis.at(9005) < axis.at(9010) == pytest.approx(1.0)
    assert axis.time_at(axis.at(9005)) == pytest.approx(9005)
    assert axis.time_at((axis.at(10) + axis.at(9000)) / 2) is None


def test_of_very_many_children_those_that_took_longest_are_shown_and_the_rest_is_counted() -> None:
    rows = [child(i, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 1.0 + i / 1000)) for i in range(1, 301)]
    view = view_of(rows)
    assert len(view.rows) == ROWS
    assert view.rows[-1].label == "c300"
    assert f"{300 - ROWS} of 300 children are not shown" in view.text()
    assert _Picture(view).height < 1300


def test_changes_that_were_merged_are_said() -> None:
    changes = [((S.RUNNING, S.WAITING)[i % 2], 1 + i * 0.001) for i in range(5000)]
    assert "changes between running and waiting are merged" in view_of([child(1, (S.QUEUED, 0), *changes)]).text()


def test_a_life_without_a_length_can_be_shown() -> None:
    view = view_of([child(1, (S.QUEUED, 5), (S.CANCELLED, 5))])
    assert "⊘" in view.text()
    size_of(png_of(view))


@pytest.mark.parametrize(("wanted", "step"), [(0.0, 0.001), (0.3, 0.5), (1, 1), (1.1, 2), (7, 10), (3600, 5000)])
def test_times_on_the_axis_are_round(wanted: float, step: float) -> None:
    assert round_step(wanted) == pytest.approx(step)


# ------------------------------------------------------------------------------------------------------------- the picture


def test_the_bundle_is_a_picture_and_text_and_its_size_on_the_page_is_known() -> None:
    view = view_of(a_run())
    data, metadata = view._repr_mimebundle_()
    assert set(data) == {"text/plain", "image/png"}, "with HTML beside it, front ends would show that"
    assert data["text/plain"] == view.text()
    width, height = size_of(base64.b64decode(data["image/png"]))
    known = metadata["image/png"]
    assert (width, height) == (2 * known["width"], 2 * known["height"])
    assert "9 children" in known["alt"]
    assert NO_PICTURE not in data["text/plain"]


def test_its_height_grows_with_the_children() -> None:
    few, many = (size_of(png_of(view_of(a_run()[:count])))[1] for count in (2, 9))
    assert many > few + 200


def test_hostile_names_are_drawn_as_they_are_and_without_a_warning() -> None:
    rows = [child(i, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 2), name=name) for i, name in enumerate(HOSTILE, 1)]
    size_of(png_of(view_of(rows)))


def test_nothing_of_the_users_matplotlib_is_used_or_changed() -> None:
    """A user's settings may want LaTeX, dark grounds, another layout; and pyplot has a backend that is not ours to choose."""
    import matplotlib
    from matplotlib import image

    settings: Any = {"text.usetex": True, "text.color": "white", "text.parse_math": True, "font.size": 40}
    settings |= {"figure.facecolor": "black", "figure.autolayout": True, "figure.dpi": 30, "path.sketch": (1, 100, 2)}
    settings |= {
        "savefig.facecolor": "black",
        "savefig.transparent": True,
        "savefig.bbox": "tight",
        "lines.marker": "o",
    }
    settings |= {"font.family": "none", "patch.facecolor": "red", "lines.linewidth": 9}
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plain = png_of(view_of(a_run()))
    with matplotlib.rc_context(settings):
        before = matplotlib.rcParams.copy()
        assert png_of(view_of(a_run())) == plain
        assert matplotlib.rcParams.copy() == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    pixels = image.imread(io.BytesIO(plain))
    assert (pixels[2, 2] == 1).all(), "the ground is white"
    assert (pixels[..., -1] == 1).all(), "and nothing shines through"


def test_without_matplotlib_it_is_text_and_says_how_to_get_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rlm_kernel.jupyter.views.timeline_picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    view = view_of([child(1, (S.QUEUED, 0), (S.RUNNING, 1), (S.COMPLETED, 2), name="<b>&")])
    data, metadata = view._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"}
    assert data["text/plain"].splitlines()[-1] == NO_PICTURE
    assert "<b>" not in data["text/html"]
    assert "&lt;b&gt;&amp;" in data["text/html"]
    assert data["text/html"].startswith("<pre")
    assert metadata == {}


def test_a_matplotlib_that_does_not_work_is_no_reason_to_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlm_kernel.jupyter.views import timeline_picture

    def broken(_: Any) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(timeline_picture, "draw", broken)
    data = view_of(a_run()).bundle()
    assert "█" in data["text/plain"]
    assert data["text/plain"].endswith("matplotlib could not draw this: RuntimeError: no fonts")


def test_in_a_terminal_no_picture_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython

    shell = SimpleNamespace(display_formatter=SimpleNamespace(active_types=["text/plain"]))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    view = view_of(a_run())
    assert view.bundle()["text/plain"] == view.text() == repr(view)
    assert "image/png" not in view.bundle()


def test_a_picture_can_be_done_without() -> None:
    assert set(view_of(a_run(), with_picture=False).bundle()) == {"text/plain", "text/html"}


def test_an_episode_without_children_says_so() -> None:
    supervisor = SimpleNamespace(histories=lambda refs: [])
    view = timeline_view(SimpleNamespace(supervisor=supervisor, episode_id="e1"))  # type: ignore[arg-type]
    assert view.text() == "No child has been started in episode e1 yet"
    assert "No child" in view.bundle()["text/html"]
