"""A pairwise part of the fault matrix (``python -m tests.children.fault_matrix`` runs the whole), and promises about the table itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.children.fault_matrix import CELLS, ENDINGS, STEPS, Driver, expected, impossible, pairwise, run_cell


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with Driver(tmp_path_factory.mktemp("faults")) as driver:
        assert driver.works()
        yield driver


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Each cell looks after this itself, and knows that the nursery of the next is another one."""


@pytest.mark.parametrize(("step", "ending"), pairwise())
def test_however_a_child_ends_its_state_is_clear_and_nothing_is_left(shared: Driver, step: str, ending: str) -> None:
    run_cell(shared, step, ending)


def test_every_step_and_every_ending_comes_at_least_twice() -> None:
    cells = pairwise()
    assert len(set(cells)) == len(cells)
    assert set(cells) <= set(CELLS)
    assert min(Counter(step for step, _ in cells)[step] for step in STEPS) >= 2
    assert min(Counter(ending for _, ending in cells)[ending] for ending in ENDINGS) >= 2


def test_what_cannot_be_says_why_and_everything_else_ends_in_a_terminal_state() -> None:
    for step in STEPS:
        for ending in ENDINGS:
            why = impossible(step, ending)
            assert bool(why) != ((step, ending) in CELLS)
            assert why or expected(step, ending).done
