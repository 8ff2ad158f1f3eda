"""Views show the same in plain text and in HTML, where everything that comes from outside is escaped."""

from __future__ import annotations

import time

from rlm_kernel.jupyter.views.base import Table, seconds
from rlm_kernel.jupyter.views.children import MAX_ROWS, families, live_table, status_table
from rlm_kernel.values import ChildState, ChildStatus, Usage
from tests.support.displays import HOSTILE, status


def test_a_table_is_aligned_text_and_a_table_in_html() -> None:
    table = Table("Title", ("a", "long header"), (("x", "1"), ("longer cell", "2")))
    lines = repr(table).splitlines()
    assert lines[0] == "Title"
    assert lines[1].index("long header") == lines[2].index("1") == lines[3].index("2")
    bundle = table._repr_mimebundle_()
    assert bundle["text/plain"] == repr(table)
    assert bundle["text/html"].count("<tr ") == 3


def test_a_table_without_rows_is_its_title() -> None:
    assert repr(Table("nothing", ("a",), ())) == "nothing"
    assert Table("nothing", ("a",), ())._repr_mimebundle_()["text/html"] == "<div>nothing</div>"


def test_nothing_from_outside_becomes_markup() -> None:
    page = Table(HOSTILE, (HOSTILE,), ((HOSTILE,),))._repr_mimebundle_()["text/html"]
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3


def test_a_row_shows_state_work_and_process() -> None:
    row = status(
        pid=77, elapsed_s=1.25, last_activity_s=0.5, iterations=3, usage=Usage(2, 100, 20), prompt_preview="count"
    )
    text = repr(status_table([row], "one"))
    for word in ("c1", "running", "1.2 s", "0.5 s ago", "3", "2", "120", "77", "count"):
        assert word in text
    assert "gone" not in text


def test_an_exit_is_called_gone_only_when_it_was_confirmed() -> None:
    ended = status(state=ChildState.CANCELLED, pid=77, exited=False)
    assert "gone" not in repr(status_table([ended], "t"))
    assert "77 (gone)" in repr(status_table([status(state=ChildState.CANCELLED, pid=77, exited=True)], "t"))


def test_what_a_child_ended_with_takes_the_place_of_its_prompt() -> None:
    failed = status(state=ChildState.FAILED, error="it broke", prompt_preview="count")
    assert "it broke" in repr(status_table([failed], "t"))
    completed = status(state=ChildState.COMPLETED, result="42", prompt_preview="count")
    assert "42" in repr(status_table([completed], "t"))


def test_long_and_many_lined_texts_are_one_short_line() -> None:
    text = repr(status_table([status(prompt_preview="word\n" * 200)], "t"))
    assert len(text.splitlines()) == 3
    assert "…" in text
    assert max(map(len, text.splitlines())) < 200


def test_grandchildren_are_indented_below_their_parent() -> None:
    rows = [status(), status(id="c2", name="c2", depth=2, parent_id="c1")]
    lines = repr(status_table(rows, "t")).splitlines()
    assert lines[2].startswith("c1")
    assert lines[3].startswith("  c2")


def many(completed: int, running: int, queued: int, failed: int = 0) -> list[ChildStatus]:
    states = [ChildState.COMPLETED] * completed + [ChildState.FAILED] * failed
    states += [ChildState.RUNNING] * running + [ChildState.QUEUED] * queued
    return [status(id=f"c{i}", name=f"c{i}", state=state) for i, state in enumerate(states)]


def test_a_live_table_says_how_many_are_done_and_what_the_others_do() -> None:
    table = live_table([*many(2, 1, 1), status(id="x", name="named", state=ChildState.CANCELLED)], "batch")
    lines = repr(table).splitlines()
    assert lines[0] == "batch: 3 of 5 children done · 1 running · 1 queued · 1 cancelled"
    assert len(lines) == 7
    assert "x named" in lines[-1]
    assert "● running" in repr(table)
    assert repr(live_table(many(1, 0, 0))).startswith("1 of 1 child done\n")


def test_of_many_children_those_that_live_or_failed_have_rows_and_the_rest_is_counted() -> None:
    table = live_table(many(203, 8, 53, failed=1))
    assert len(table.rows) == MAX_ROWS
    shown = [each.state for each in table.rows]
    assert (shown.count(ChildState.RUNNING), shown.count(ChildState.FAILED)) == (8, 1)
    assert repr(table).splitlines()[-1] == "… and 240 more: 203 completed, 37 queued"
    assert "… and 240 more" in table.html()


def test_a_live_table_of_a_thousand_children_is_cheap() -> None:
    statuses = many(500, 300, 200)
    began = time.process_time()
    for _ in range(10):
        live_table(families(statuses, [each.id for each in statuses])).bundle()
    assert (time.process_time() - began) / 10 < 0.05


def test_a_familys_rows_are_in_the_order_of_the_tree_and_others_are_left_out() -> None:
    statuses = [
        status(),
        status(id="c2", name="c2"),
        status(id="c3", name="c3", depth=2, parent_id="c1"),
        status(id="c4", name="c4"),
        status(id="c5", name="c5", depth=3, parent_id="c3"),
    ]
    rows = live_table(families(statuses, ["c1", "c4"])).rows
    assert [row.id for row in rows] == ["c1", "c3", "c5", "c4"]


def test_what_a_terminal_would_act_on_is_not_in_any_text() -> None:
    nasty = "red \x1b[31mtext\x1b[0m \x1b]0;title\x07 back\x08 \u202eturned"
    for shown in (live_table([status(name=nasty, prompt_preview=nasty)]), Table(nasty, (nasty,), ((nasty,),))):
        for text in shown.bundle().values():
            assert not set(text) & {"\x1b", "\x07", "\x08", "\u202e"}
            assert "red text" in text


def test_lengths_of_time_are_readable() -> None:
    assert [seconds(value) for value in (0.04, 99.94, 125, 3723)] == ["0.0 s", "99.9 s", "2 min 05 s", "1 h 02 min"]
