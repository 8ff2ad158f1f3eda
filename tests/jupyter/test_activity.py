"""`rlm_kernel.jupyter.activity`; with a real server in ``tests/end_to_end/test_server.py``."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from rlm_kernel.jupyter.activity import Activity

INTERVAL_S = 0.05
SOON_S = 5.0
QUIET_S = 0.2
"""Seconds in which several messages would have come."""


class Scene:
    """Something that lives or not, and the messages about it."""

    def __init__(self) -> None:
        self.alive = 0
        self.interval_s: float | None = INTERVAL_S
        self.told: queue.Queue[int] = queue.Queue()
        self.broken = False
        self.asked = 0
        self.activity = Activity(self._count, self._tell, lambda: self.interval_s)
        self.activity.start()

    def _count(self) -> int:
        self.asked += 1
        return self.alive

    def _tell(self, number: int) -> None:
        self.told.put(number)
        if self.broken:
            raise OSError("broken")

    def set(self, alive: int) -> None:
        self.alive = alive
        self.activity.stir()

    def is_quiet(self) -> bool:
        """Whether no message comes, once those that were under way have."""
        while not self.told.empty():
            self.told.get()
        try:
            self.told.get(timeout=QUIET_S)
        except queue.Empty:
            return True
        return False


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.activity.close()


def test_nothing_is_told_and_nobody_is_asked_while_nothing_stirs(scene) -> None:
    assert scene.is_quiet()
    assert scene.asked == 0


def test_it_is_told_at_once_and_in_each_interval_while_something_lives(scene) -> None:
    began = time.monotonic()
    scene.set(2)
    assert [scene.told.get(timeout=SOON_S) for _ in range(4)] == [2, 2, 2, 2]
    assert time.monotonic() - began >= 3 * INTERVAL_S


def test_nothing_is_told_any_more_when_nothing_lives(scene) -> None:
    scene.set(1)
    scene.told.get(timeout=SOON_S)
    scene.alive = 0  # without a word: it is looked at when the next message is due
    give_up_at = time.monotonic() + SOON_S
    while not scene.is_quiet():
        assert time.monotonic() < give_up_at
    asked = scene.asked
    assert scene.is_quiet()
    assert scene.asked == asked
    scene.set(1)
    assert scene.told.get(timeout=SOON_S) == 1


def test_however_much_stirs_there_is_one_message_in_an_interval(scene) -> None:
    scene.interval_s = 60.0
    for number in range(1, 200):
        scene.set(number)
    scene.told.get(timeout=SOON_S)
    assert scene.is_quiet()


def test_what_lives_again_within_the_interval_is_told_when_that_is_over(scene) -> None:
    """Children that follow each other closely keep the kernel alive, though each is seen as the first."""
    for _ in range(5):
        scene.set(1)
        scene.set(0)
    scene.set(1)
    assert [scene.told.get(timeout=SOON_S) for _ in range(3)]


def test_it_can_be_switched_off_and_on(scene) -> None:
    scene.interval_s = None
    scene.set(1)
    assert scene.is_quiet()
    scene.interval_s = INTERVAL_S
    scene.activity.stir()
    assert scene.told.get(timeout=SOON_S) == 1


def test_a_message_that_cannot_be_sent_is_not_the_last_one(scene) -> None:
    scene.broken = True
    scene.set(1)
    assert [scene.told.get(timeout=SOON_S) for _ in range(3)] == [1, 1, 1]


def test_it_can_be_closed_twice_and_without_a_start() -> None:
    activity = Activity(lambda: 1, lambda _: None, lambda: 1.0)
    activity.close()
    activity.close()
