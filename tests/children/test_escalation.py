"""The schedule of a stop: ask, SIGTERM, SIGKILL, each once, each after its grace, and never put off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.children.escalation import Escalation, Step
from rlm_kernel.values import Graces

seconds = st.floats(0, 10)
graces = st.builds(Graces, seconds, seconds, seconds)


def test_each_step_comes_after_the_grace_of_the_one_before() -> None:
    stop = Escalation.begin(100.0, Graces(1.0, 2.0, 9.0))
    assert [stop.pop_due(t) for t in (100.0, 100.9, 101.0, 102.9, 103.0, 999.0)] == [
        Step.ASK,
        None,
        Step.TERMINATE,
        None,
        Step.KILL,
        None,
    ]


def test_with_no_graces_the_kill_is_the_only_step() -> None:
    stop = Escalation.begin(5.0, Graces(0.0, 0.0, 1.0))
    assert stop.pop_due(5.0) is Step.KILL
    assert stop.next_due() is None


def test_a_second_stop_never_puts_a_step_off() -> None:
    stop = Escalation.begin(0.0, Graces(1.0, 1.0, 1.0))
    stop.hasten(0.9, Graces(100.0, 100.0, 1.0))
    assert stop.due == [0.0, 1.0, 2.0]


def test_hastening_skips_to_the_kill() -> None:
    stop = Escalation.begin(0.0, Graces(5.0, 5.0, 1.0))
    assert stop.pop_due(0.0) is Step.ASK
    stop.hasten(0.1, Graces(5.0, 5.0, 1.0).from_kill())
    assert stop.pop_due(0.1) is Step.KILL
    assert stop.pop_due(99.0) is None


@given(graces, st.lists(st.tuples(seconds, graces), max_size=4), st.lists(seconds, max_size=12))
def test_steps_only_get_stronger_each_is_taken_once_and_the_kill_is_never_late(
    first: Graces, hastenings: list[tuple[float, Graces]], looks: list[float]
) -> None:
    stop = Escalation.begin(0.0, first)
    latest_kill = first.shutdown_s + first.terminate_s
    taken: list[Step] = []
    moments = sorted([(t, g) for t, g in hastenings] + [(t, None) for t in [*looks, 1000.0]], key=lambda pair: pair[0])
    for now, more in moments:
        if more is not None:
            stop.hasten(now, more)
            latest_kill = min(latest_kill, now + more.shutdown_s + more.terminate_s)
        while (step := stop.pop_due(now)) is not None:
            taken.append(step)
        assert (Step.KILL in taken) or now < latest_kill
        assert stop.next_due() is None or stop.next_due() > now  # type: ignore[operator]
    assert taken == sorted(set(taken))
    assert taken[-1] is Step.KILL
