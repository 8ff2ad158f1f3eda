"""Timers come due in order, and cancelled ones do not pile up."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.children.timers import Timers


def _run(timers: Timers, now: float) -> None:
    while (work := timers.pop_due(now)) is not None:
        work()


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=300))
def test_what_is_due_runs_once_in_order_and_what_was_cancelled_never(entries: list[tuple[int, bool]]) -> None:
    timers, ran = Timers(), list[int]()
    added = [(when, timers.add(when, partial(ran.append, i)), keep) for i, (when, keep) in enumerate(entries)]
    for _, timer, keep in added:
        if not keep:
            timers.cancel(timer)
            timers.cancel(timer)
    kept = [(when, i) for i, (when, _, keep) in enumerate(added) if keep]
    assert len(timers) == len(kept)
    assert timers.next_due() == (min(kept)[0] if kept else None)
    _run(timers, 10)
    assert ran == [i for when, i in sorted(kept) if when <= 10]
    _run(timers, 20)
    assert ran == [i for _, i in sorted(kept)]
    assert timers.next_due() is None


def test_a_hundred_thousand_cancelled_timers_leave_nothing_behind() -> None:
    timers = Timers()
    for when in range(100_000):
        timers.cancel(timers.add(3600.0 + when, lambda: None))
    assert len(timers) == 0
    assert len(timers._heap) < 200


def test_cancelling_one_that_has_fired_is_harmless() -> None:
    timers = Timers()
    timer = timers.add(1, lambda: None)
    _run(timers, 1)
    timers.cancel(timer)
    timers.cancel(None)
    assert len(timers) == 0
