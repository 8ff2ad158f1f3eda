"""Views show the same in plain text and in HTML, where everything that comes from outside is escaped."""

from __future__ import annotations

from rlm_kernel.jupyter.displays import Table, status_table
from rlm_kernel.values import ChildState, ChildStatus, Usage

HOSTILE = "</td><script>alert(1)</script>"


def test_a_table_is_aligned_text_and_a_table_in_html() -> None:
    table = Table("Title", ("a", "long header"), (("x", "1"), ("longer cell", "2")))
    lines = repr(table).splitlines()
    assert lines[0] == "Title"
    assert lines[1].index("long header") == lines[2].index("1") == lines[3].index("2")
    bundle = table._repr_mimebundle_()
    assert bundle["text/plain"] == repr(table)
    assert bundle["text/html"].count("<tr>") == 3


def test_a_table_without_rows_is_its_title() -> None:
    assert repr(Table("nothing", ("a",), ())) == "nothing"
    assert Table("nothing", ("a",), ())._repr_mimebundle_()["text/html"] == "<div>nothing</div>"


def test_nothing_from_outside_becomes_markup() -> None:
    page = Table(HOSTILE, (HOSTILE,), ((HOSTILE,),))._repr_mimebundle_()["text/html"]
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 3


def status(**changes: object) -> ChildStatus:
    given = {"id": "c1", "name": "c1", "depth": 1, "parent_id": None, "state": ChildState.RUNNING, **changes}
    return ChildStatus(**given)  # type: ignore[arg-type]


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
