"""The gate for model calls: how many at once, and how many tokens."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.children.callgate import CallGate, Permission
from rlm_kernel.values import Usage


def _never() -> None:
    raise AssertionError("this callback must not be called")


def _cost(tokens: int) -> Usage:
    return Usage(1, tokens, 0)


def test_without_bounds_every_call_is_let_through() -> None:
    gate = CallGate()
    assert not gate.is_needed
    assert [gate.ask("c1", _never, _never) for _ in range(100)] == [Permission.GRANTED] * 100


def test_calls_above_the_bound_wait_and_are_served_in_order() -> None:
    gate, served = CallGate(max_concurrent=2), list[str]()
    for who in ("c1", "c2"):
        assert gate.ask(who, _never, _never) is Permission.GRANTED
    for who in ("c3", "c4"):
        assert gate.ask(who, partial(served.append, who), _never) is Permission.QUEUED
    for callback in gate.ended("c1", _cost(1)):
        callback()
    assert served == ["c3"]
    for callback in gate.ended("c2", _cost(1)):
        callback()
    assert served == ["c3", "c4"]


def test_a_run_that_dies_in_mid_call_gives_its_permission_back_and_its_questions_are_dropped() -> None:
    gate, served = CallGate(max_concurrent=1), []
    assert gate.ask("c1", _never, _never) is Permission.GRANTED
    assert gate.ask("c1", _never, _never) is Permission.QUEUED
    assert gate.ask("c2", lambda: served.append("c2"), _never) is Permission.QUEUED
    for callback in gate.gone("c1"):
        callback()
    assert served == ["c2"]
    assert gate.under_way == {"c2": 1}


def test_a_spent_budget_refuses_those_who_ask_and_those_who_wait() -> None:
    gate, refused = CallGate(max_concurrent=1, max_tokens=10), []
    assert gate.ask("c1", _never, _never) is Permission.GRANTED
    assert gate.ask("c2", _never, lambda: refused.append("c2")) is Permission.QUEUED
    for callback in gate.ended("c1", _cost(10)):
        callback()
    assert refused == ["c2"]
    assert gate.ask("c3", _never, _never) is Permission.REFUSED


def test_a_withdrawn_question_is_never_answered() -> None:
    gate = CallGate(max_concurrent=1)
    gate.ask("c1", _never, _never)
    granted = _never
    assert gate.ask("c2", granted, _never) is Permission.QUEUED
    assert gate.withdraw(granted)
    assert gate.ended("c1", _cost(1)) == []
    assert not gate.withdraw(granted)


@given(st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=60), st.integers(1, 400))
def test_calls_of_like_cost_overshoot_a_budget_by_less_than_one_call(order: list[int], budget: int) -> None:
    """Once one call's cost is known, eight runs that always ask again overshoot by less than that cost."""
    cost = 20
    gate = CallGate(max_tokens=budget)
    assert gate.ask("first", _never, _never) is Permission.GRANTED
    gate.ended("first", _cost(cost))
    waiting: list[str] = []
    for turn in order:
        who = f"c{turn % 8}"
        if who not in gate.under_way and who not in waiting:
            answer = gate.ask(who, partial(waiting.remove, who), partial(waiting.remove, who))
            if answer is Permission.QUEUED:
                waiting.append(who)
        for running in list(gate.under_way)[:1] if turn % 2 else []:
            for callback in gate.ended(running, _cost(cost)):
                callback()
    for running in list(gate.under_way):
        for callback in gate.ended(running, _cost(cost)):
            callback()
    assert gate.spent < max(budget, cost) + cost
