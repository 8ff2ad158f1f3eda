"""`rlm_kernel.jupyter.views.cards`: with a shell's real formatters. Handles are in end_to_end/test_views.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.environment.interpreter import make_shell
from rlm_kernel.jupyter.views.cards import Cards
from rlm_kernel.values import ChildState, Usage
from tests.support.displays import HOSTILE, status


@pytest.fixture
def formatted() -> Iterator[Any]:
    """Formats an object as at the end of a cell, with our cards."""
    formatter: Any = make_shell().display_formatter
    before = {name: dict(each.type_printers) for name, each in formatter.formatters.items()}
    cards = Cards(make_shell())
    yield lambda value: formatter.format(value)[0]
    cards.remove()
    assert {name: dict(each.type_printers) for name, each in formatter.formatters.items()} == before


def test_a_status_is_a_line_of_text_and_a_card_in_html(formatted) -> None:
    shown = formatted(
        status(name="part", state=ChildState.COMPLETED, result=HOSTILE, iterations=2, usage=Usage(1, 1000, 5))
    )
    assert (
        shown["text/plain"] == f"<ChildStatus c1 part: completed, 2 steps, 1,005 tokens in 1 call; answer: {HOSTILE}>"
    )
    assert "<script>" not in shown["text/html"]
    assert "&lt;script&gt;" in shown["text/html"]
    assert "2 steps" in shown["text/html"]


def test_what_failed_says_why_and_what_runs_says_what_it_does(formatted) -> None:
    failed = formatted(status(state=ChildState.FAILED, error="it broke", prompt_preview="count"))
    assert "error: it broke" in failed["text/plain"]
    assert "count" in failed["text/html"]
    running = formatted(status(started_at=1.0, elapsed_s=75.5, last_activity_s=2, prompt_preview="count"))
    assert "75.5 s, active 2.0 s ago; task: count" in running["text/plain"]


def test_an_exit_that_is_not_confirmed_is_said(formatted) -> None:
    assert "exit of pid 7 not confirmed" in formatted(status(state=ChildState.CANCELLED, pid=7))["text/plain"]
    assert "not confirmed" not in formatted(status(state=ChildState.CANCELLED, pid=7, exited=True))["text/plain"]


def test_a_list_of_statuses_is_a_table_and_other_lists_are_as_they_were(formatted) -> None:
    shown = formatted([status(), status(id="c2", name="c2")])
    assert shown["text/html"].count("<tr ") == 3
    assert shown["text/plain"].count("<ChildStatus") == 2
    for other in ([], [1], [status(), 1], [[status()]]):
        assert list(formatted(other)) == ["text/plain"]


def test_a_list_of_the_users_own_class_is_shown_by_that_class(formatted) -> None:
    class Mine(list):
        def _repr_html_(self) -> str:
            return "<i>mine</i>"

    assert formatted(Mine([status()]))["text/html"] == "<i>mine</i>"


def test_a_formatter_of_the_users_for_lists_keeps_its_lists_and_comes_back() -> None:
    shell: Any = make_shell()
    html = shell.display_formatter.formatters["text/html"]
    html.for_type(list, lambda values: f"<p>{len(values)}</p>")
    cards = Cards(make_shell())
    assert html([1, 2]) == "<p>2</p>"
    assert "<table" in html([status()])
    cards.remove()
    assert html([status()]) == "<p>1</p>"
    html.pop(list)


def test_one_that_was_registered_later_stays() -> None:
    shell: Any = make_shell()
    html = shell.display_formatter.formatters["text/html"]
    cards = Cards(make_shell())
    html.for_type(list, lambda _: "<p>later</p>")
    cards.remove()
    assert html([1]) == "<p>later</p>"
    html.pop(list)
