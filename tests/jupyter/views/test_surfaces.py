"""`rlm_kernel.jupyter.views.surfaces`: where a view is drawn, and what stays of it there."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher

from rlm_kernel.jupyter.views.surfaces import Printing, Terminal, Updating, follows_updates, surface_of, wants_no_views
from tests.support.displays import Published, Text

LAB_ID = "6ec3a5a1-9f55-4f86-b2c5-d1f2d8a4c111"
CLIENT_ID = "1c27e202-0bf6702704b8a2f0d2f7ad99_19540_168"


def request(msg_id: str, **content: Any) -> dict[str, Any]:
    return {"header": {"msg_id": msg_id}, "content": content, "metadata": {}}


def test_only_programs_in_which_somebody_may_type_through_jupyter_client_do_not_follow_updates() -> None:
    assert follows_updates(request(LAB_ID, allow_stdin=True))
    assert follows_updates(request(CLIENT_ID, allow_stdin=False))  # nbclient
    assert not follows_updates(request(CLIENT_ID, allow_stdin=True))  # jupyter console
    assert follows_updates({})


def test_silent_and_model_driven_cells_want_no_views() -> None:
    assert wants_no_views(request(LAB_ID, silent=True))
    assert wants_no_views({**request(LAB_ID), "metadata": {"rlm": {"model_driven": True}}})
    assert not wants_no_views({**request(LAB_ID, silent=False), "metadata": {"rlm": None}})
    assert not wants_no_views({})


def test_a_kernel_updates_and_what_captures_or_is_no_terminal_prints_the_end(monkeypatch) -> None:
    assert isinstance(surface_of(Published().shell), Updating)
    capturing = CapturingDisplayPublisher()
    assert isinstance(surface_of(SimpleNamespace(display_pub=capturing)), Printing)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(surface_of(SimpleNamespace(display_pub=object())), Printing)


@pytest.mark.parametrize("announce", [True, False])
def test_paper_has_at_most_one_line_and_what_stays(announce) -> None:
    published = Published()
    surface = Printing(published.publisher, announce=announce)
    for number in range(3):
        surface.draw(Text(f"{number} done\nrow"))
    surface.finish(Text("3 done\nrow"), keep=False)
    assert published.texts == ["0 done"] * announce
    surface.finish(Text("4 done\nrow"))
    surface.finish(Text("4 done\nrow"))
    assert published.texts == ["0 done"] * announce + ["4 done\nrow"]
    assert set(published.kinds) == {"display_data"}


class Screen:
    """A pseudo terminal, of which everything that is written to it is kept."""

    def __init__(self) -> None:
        self._outer, inner = pty.openpty()
        self.stream = os.fdopen(inner, "w", encoding="utf-8")

    def read(self) -> str:
        data = b""
        while select.select([self._outer], [], [], 0)[0]:
            data += os.read(self._outer, 65536)
        return data.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._outer)


@pytest.fixture
def screen(monkeypatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    made = Screen()
    yield made
    made.close()


ERASE, SHOW_CURSOR, HIDE_CURSOR = "\x1b[2K", "\x1b[?25h", "\x1b[?25l"


def test_in_a_terminal_states_are_drawn_over_each_other_and_the_last_one_stays(screen) -> None:
    surface = Terminal(screen.stream)
    surface.draw(Text("title\nfirst state"))
    first = screen.read()
    assert "first state" in first
    assert HIDE_CURSOR in first
    surface.draw(Text("title\nsecond state"))
    assert ERASE in screen.read()
    surface.finish(Text("title\nlast state [bold] " + 60 * "x"))
    last = screen.read()
    assert last.rindex(ERASE) < last.rindex("last state [bold]")  # as it is, and not taken for colours
    assert "…" in last
    assert SHOW_CURSOR in last
    assert sys.stdout is not screen.stream


def test_in_a_terminal_what_is_not_to_stay_is_erased_and_can_come_back(screen) -> None:
    surface = Terminal(screen.stream)
    surface.draw(Text("state"))
    surface.finish(Text("state"), keep=False)
    erased = screen.read()
    assert erased.rindex(ERASE) > erased.rindex("state")
    surface.finish(Text("the end"))
    assert "the end" in screen.read()
