"""`rlm_kernel.jupyter.views.waiting`: one table in a cell, of everything it waits for. With real children: end_to_end/test_views.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlm_kernel.jupyter.views import waiting
from rlm_kernel.jupyter.views.surfaces import Printing
from rlm_kernel.jupyter.views.waiting import WaitTables
from rlm_kernel.values import ChildState, ChildStatus
from tests.support.displays import Published


class Scene(Published):
    """A shell, and a session whose children are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[str, ChildState] = dict.fromkeys(("c1", "c2", "c3"), ChildState.RUNNING)
        self.listeners: list[Callable[[], None]] = []
        self.settings: dict[str, Any] = {"live_views": True}
        self.shell.get_parent = lambda: {"header": self.publisher.parent_header}
        session: Any = SimpleNamespace(settings=self.settings, supervisor=self)
        self.tables = WaitTables(self.shell, session)
        self.begin_cell("cell")

    def status(self) -> list[ChildStatus]:
        return [ChildStatus(name, name, 1, None, state) for name, state in self.children.items()]

    def call_on_stir(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def change(self, child: str, state: ChildState) -> None:
        self.children[child] = state
        for listener in self.listeners:
            listener()

    def wait(self, *ids: str) -> Any:
        return self.tables.watch([(child_id, None) for child_id in ids])


@pytest.fixture
def scene(monkeypatch) -> Scene:
    monkeypatch.setattr(waiting, "DELAY_S", 0.05)
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.0)
    return Scene()


def view_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rlm-view"]


def test_later_waits_of_a_cell_come_into_its_table_and_the_last_state_comes_with_its_end(scene) -> None:
    with scene.wait("c1"):
        scene.wait_for(1)
        scene.change("c1", ChildState.COMPLETED)
    assert "1 of 1 child done" in scene.texts[-1]
    with scene.wait("c3"):
        with scene.wait("c2"):  # at once, as with `asyncio.gather`
            scene.change("c2", ChildState.FAILED)
        assert len(view_threads()) == 1
    assert "2 of 3 children done" in scene.texts[-1]
    assert scene.listeners == []
    scene.children["c3"] = ChildState.CANCELLED
    scene.tables.end_cell()
    assert "3 of 3 children done · 1 failed · 1 cancelled" in scene.texts[-1]
    assert scene.kinds.count("display_data") == 1
    scene.begin_cell("next")
    with scene.wait("c1"):
        scene.wait_for(len(scene.messages) + 1)
    assert scene.kinds.count("display_data") == 2
    assert scene.cells == {"cell", "next"}
    scene.tables.end_cell()


def test_short_waits_of_one_cell_add_up(scene) -> None:
    for _ in range(1000):
        with scene.wait("c1"):
            threading.Event().wait(0.005)
        if scene.messages:
            break
    assert scene.kinds == ["display_data"] or "update_display_data" in scene.kinds
    scene.begin_cell("next")
    with scene.wait("c2"):
        pass
    scene.tables.end_cell()
    assert scene.cells == {"cell"}


def test_a_wait_that_was_never_left_ends_with_its_cell(scene) -> None:
    """An iterator that is kept, or an interrupt in the first instruction of leaving."""
    abandoned = scene.wait("c1")
    abandoned.__enter__()
    scene.wait_for(1)
    scene.tables.end_cell()
    assert (view_threads(), scene.listeners) == ([], [])
    abandoned.__exit__(None, None, None)


def test_a_reset_while_somebody_waits_keeps_what_was_seen(scene) -> None:
    with scene.wait("c1"):
        scene.wait_for(1)
        scene.children.clear()
    scene.tables.end_cell()
    assert all("0 of 1 child done · 1 running" in text for text in scene.texts)


def test_where_nothing_can_be_drawn_over_a_table_stays_when_all_in_it_have_ended(scene, monkeypatch) -> None:
    monkeypatch.setattr(waiting, "surface_of", lambda _: Printing(scene.publisher, announce=False))
    with scene.wait("c1"):
        threading.Event().wait(0.1)
    assert scene.texts == []
    with scene.wait("c1"):
        scene.change("c1", ChildState.COMPLETED)
    assert len(scene.texts) == 1
    assert "c1" in scene.texts[0]
    with scene.wait("c2"):
        scene.change("c2", ChildState.COMPLETED)
    assert "c1" not in scene.texts[1]
    with scene.wait("c3"):
        threading.Event().wait(0.01)
    assert len(scene.texts) == 2
    scene.tables.end_cell()
    assert "c3" in scene.texts[2]
    assert "1 running" in scene.texts[2]


@pytest.mark.parametrize("unwanted", ["setting", "request", "broken"])
def test_a_wait_that_is_not_to_be_shown_or_cannot_be_is_only_a_wait(scene, unwanted) -> None:
    if unwanted == "setting":
        scene.settings["live_views"] = False
    elif unwanted == "request":
        scene.shell.get_parent = lambda: {"content": {"silent": True}}
    else:
        del scene.shell.display_pub
    with scene.wait("c1"):
        assert view_threads() == []
    scene.tables.end_cell()
    assert scene.messages == []
