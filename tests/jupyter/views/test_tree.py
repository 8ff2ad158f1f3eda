"""`rlm_kernel.jupyter.views.tree`."""

from __future__ import annotations

from rlm_kernel.jupyter.views.tree import tree_view
from rlm_kernel.values import ChildState, ChildStatus, Usage
from tests.support.displays import HOSTILE, status


def family() -> list[ChildStatus]:
    """Return children in start order: the second one's own came between those of the root."""
    done = ChildState.COMPLETED
    return [
        status(id="c1", name="c1", state=done, result="one", usage=Usage(1, 100, 10)),
        status(id="c2", name="index", usage=Usage(2, 1000, 200), model="big", started_at=1.0, elapsed_s=75.0),
        status(id="c3", name="c3", depth=2, parent_id="c2", usage=Usage(1, 20, 3)),
        status(id="c4", name="c4", state=ChildState.FAILED, error=HOSTILE),
        status(id="c5", name="c5", depth=3, parent_id="c3", state=done, usage=Usage(1, 4, 0)),
        status(id="c6", name="c6", depth=2, parent_id="c2", state=ChildState.QUEUED),
    ]


def test_the_root_is_on_top_and_each_child_below_its_parent_with_the_sum_of_all_below_it() -> None:
    lines = repr(tree_view(family(), title="the root")).splitlines()
    assert lines[0] == "the root"
    assert [line[: len(start)] for line, start in zip(lines[2:], STARTS, strict=True)] == list(STARTS)
    for line, words in zip(lines[2:], WORDS, strict=True):
        assert all(word in line for word in words), line
    assert "with all below" in lines[1]


STARTS = ("├─ c1", "├─ c2 index", "│  ├─ c3", "│  │  └─ c5", "│  └─ c6", "└─ c4")
WORDS = (
    ("✓ completed", "110", "one"),
    ("● running", "75.0 s", "1,200", "1,227", "big"),
    ("23", "27"),
    ("✓ completed", " 4"),
    ("○ queued",),
    ("✗ failed", "script"),
)


def test_without_children_of_children_no_column_says_what_they_took() -> None:
    assert "with all below" not in repr(tree_view(family()[:2], title="t"))
    assert repr(tree_view([], title="nobody")) == "nobody"


def test_a_part_of_the_tree_is_a_tree() -> None:
    lines = repr(tree_view(family()[2:3], title="t")).splitlines()
    assert lines[2].startswith("└─ c3")


def test_the_html_says_the_same_and_nothing_from_outside_becomes_markup() -> None:
    page = tree_view(family(), title=HOSTILE).html()
    assert "<script>" not in page
    for word in ("c2 index", "running", "1,227", "│  │  └─ "):
        assert word in page
