"""Promises of steering: cancelling, sending, taking children as they end, awaiting; in the root and in children."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from rlm_kernel.errors import UnknownHandleError, UsageMistake, WaitTimedOut
from rlm_kernel.values import ChildState
from tests.session.conftest import Root, block, final, held, task
from tests.support.model_server import ModelServer

STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        llm_query('[[block never]] it ignores every request')
    except BaseException:
        pass
"""


def test_a_child_that_ignores_every_signal_is_cancelled_within_its_graces_and_its_sibling_is_unharmed(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    stubborn = root.rlm_query(task(STUBBORN), blocking=False)
    sibling = root.rlm_query(held("FINAL('unharmed')", gate="sibling"), blocking=False)
    server.wait_for_request("it ignores every request")
    began = time.monotonic()
    status = root.rlm_cancel(stubborn)
    took = time.monotonic() - began
    assert (status.state, status.exited) == (ChildState.CANCELLED, True)
    graces = root.session.settings.bounds().graces
    assert took < graces.total_s
    assert not sibling.status().done
    server.release("sibling")
    assert sibling.wait(10).result == "unharmed"


def test_the_grace_of_a_cancel_can_be_given(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    root.served(server, monkeypatch)
    root.session.configure("shutdown_grace_s", "30")
    root.session.configure("terminate_grace_s", "0.1")
    stubborn = root.rlm_query(task(STUBBORN), blocking=False)
    server.wait_for_request("it ignores every request")
    assert stubborn.cancel(grace_s=0.05).state is ChildState.CANCELLED
    with pytest.raises(UsageMistake, match="grace_s=-1"):
        stubborn.cancel(grace_s=-1)


def test_cancelling_what_has_ended_changes_nothing(root: Root) -> None:
    root.scripted(final("done"))
    handle = root.rlm_query("x", blocking=False)
    handle.wait()
    assert root.rlm_cancel(handle).state is ChildState.COMPLETED
    assert root.rlm_result(handle) == "done"


def test_a_cancel_at_the_instant_of_finishing_leaves_one_terminal_state_and_keeps_the_answer_that_won(
    root: Root,
) -> None:
    """A slice of the 200 that the soak runs: the cancel is sent at varied moments around the end of the child."""
    root.scripted(final("won"))
    root.session.configure("max_children_total", "1000")
    outcomes: Counter[str] = Counter()
    for i in range(40):
        handle = root.rlm_query("x", blocking=False)
        root.rlm_wait(handle, timeout_s=0.001 * (i % 20))
        status = root.rlm_cancel(handle)
        assert status.state in (ChildState.COMPLETED, ChildState.CANCELLED)
        assert status.exited
        assert root.rlm_status(handle).state is status.state
        if status.state is ChildState.COMPLETED:
            assert root.rlm_result(handle) == "won"
        outcomes[status.state] += 1
    assert sum(outcomes.values()) == 40


def test_a_message_is_seen_before_the_next_model_call_and_its_receipt_is_in_the_status(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("x = 1", "FINAL('end')", gate="first"), blocking=False)
    server.wait_for_request(lambda request: request.body["messages"][0]["role"] == "system")
    root.rlm_send(handle, "hurry: look at chapter 3")
    assert (handle.status().messages_sent, handle.status().messages_seen) == (1, 0)
    server.release("first")
    assert handle.wait(10).state is ChildState.COMPLETED
    assert handle.status().messages_seen == 1
    last = server.requests[-1].body["messages"]
    assert "hurry: look at chapter 3" in last[-1]["content"]
    assert last[-1]["role"] == "user"


def test_a_message_to_a_queued_child_waits_for_it(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_concurrent_children", "1")
    first = root.rlm_query(held("FINAL(1)", gate="first"), blocking=False)
    second = root.rlm_query(task("FINAL(2)"), blocking=False)
    second.send("early word")
    assert second.status().state is ChildState.QUEUED
    server.release("first")
    assert [s.state for s in root.rlm_wait([first, second], 10)] == [ChildState.COMPLETED] * 2
    assert second.status().messages_seen == 1
    assert "early word" in server.requests[-1].text


def test_a_message_to_a_child_that_has_ended_is_an_error_and_never_an_epipe(root: Root) -> None:
    root.scripted(final("done"))
    handle = root.rlm_query("x", blocking=False)
    handle.wait()
    with pytest.raises(UsageMistake, match=r"completed.*nothing was sent"):
        root.rlm_send(handle, "hello")
    with pytest.raises(UsageMistake, match="non-empty string, got int"):
        root.rlm_send(handle, 3)


def test_children_are_given_as_they_end(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    root.served(server, monkeypatch)
    handles = [root.rlm_query(held(f"FINAL({i})", gate=f"g{i}"), blocking=False) for i in range(3)]
    ended = []
    iterator = root.rlm_as_completed(handles, timeout_s=20)
    for i in (2, 0, 1):
        server.release(f"g{i}")
        status = next(iterator)
        assert status.done
        ended.append(status.id)
    assert ended == [handles[i].id for i in (2, 0, 1)]
    assert list(iterator) == []


def test_as_completed_runs_into_its_timeout_without_cancelling_anything(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('later')"), blocking=False)
    with pytest.raises(WaitTimedOut, match=handle.id):
        list(root.rlm_as_completed([handle], timeout_s=0.01))
    with pytest.raises(TimeoutError):
        list(root.rlm_as_completed(handle, timeout_s=0))
    server.release("held")
    assert [status.result for status in root.rlm_as_completed([handle])] == ["later"]
    assert list(root.rlm_as_completed([])) == []


def test_unknown_handles_are_an_error_at_the_call_that_lists_the_ids(root: Root) -> None:
    root.scripted(final("done"))
    known = root.rlm_query("x", blocking=False)
    known.wait()
    for call in (
        lambda: root.rlm_as_completed(["c9999"]),
        lambda: root.rlm_cancel("c9999"),
        lambda: root.rlm_send("c9999", "hello"),
    ):
        with pytest.raises(UnknownHandleError, match=known.id):
            call()


def test_two_threads_and_a_coroutine_see_the_one_result(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('one')"), blocking=False)
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(handle.wait(10).result)) for _ in range(2)]
    for thread in threads:
        thread.start()

    async def both() -> list[str]:
        server.release("held")
        return list(await asyncio.gather(_await(handle), _await(handle)))

    assert asyncio.run(both()) == ["one", "one"]
    for thread in threads:
        thread.join(10)
    assert seen == ["one", "one"]


async def _await(handle: Any) -> str:
    answer: str = await handle
    return answer


def test_an_await_that_is_given_up_leaves_nothing_behind(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('x')"), blocking=False)

    async def give_up() -> None:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_await(handle), 0.001)

    asyncio.run(give_up())
    assert root.session.supervisor._core.registry._waiters == {}
    server.release("held")
    assert handle.wait(10).result == "x"


def test_waits_in_other_threads_can_be_interrupted(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('x')"), blocking=False)
    outcome: list[str] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            handle.wait(30)
        except KeyboardInterrupt:
            outcome.append("interrupted")

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(5)
    while thread.is_alive():
        root.session.supervisor.interrupt_waits()
        thread.join(0.01)
    assert outcome == ["interrupted"]
    assert not handle.status().done


def test_a_child_steers_its_own_children(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_depth", "3")
    stuck = "[[block never]] stuck grandchild"
    python = f"""
h = rlm_query({stuck!r}, blocking=False)
quick = rlm_query("[[script]][[reply: FINAL(quick)]]", blocking=False)
first = next(rlm_as_completed([h, quick], timeout_s=20))
rlm_send(h, 'never seen')
sent = h.status().messages_sent
status = rlm_cancel(h, grace_s=0.2)
FINAL([first.result, sent, str(status.state), status.exited, [str(s.state) for s in rlm_status()]])
"""
    answer = root.rlm_query(task(python))
    assert answer == "['quick', 1, 'cancelled', True, ['cancelled', 'completed']]"


def test_observers_are_told_of_each_subcall_and_neither_a_raising_nor_a_blocked_one_changes_anything(
    root: Root,
) -> None:
    root.scripted(final("done"))
    seen: list[tuple[Any, ...]] = []
    blocked = threading.Event()

    def start(*arguments: Any) -> None:
        seen.append(("start", *arguments))
        raise RuntimeError("an observer that raises")

    def complete(depth: int, model: str, duration_s: float, error: str | None) -> None:
        seen.append(("complete", depth, error, duration_s > 0))
        blocked.wait(20)

    root.session.configure_value("on_subcall_start", start)
    root.session.configure_value("on_subcall_complete", complete)
    assert root.rlm_query("first task") == "done"
    began = time.monotonic()
    assert [root.rlm_query(f"task {i}") for i in range(3)] == ["done"] * 3
    assert root.session.close().ok
    assert time.monotonic() - began < 10
    blocked.set()
    assert root.session.supervisor.observers.flush(10)
    assert ("start", 1, "ScriptedFactory", "first task") in seen
    assert seen.count(("complete", 1, None, True)) == 4


def test_a_full_observer_queue_drops_and_counts(root: Root) -> None:
    root.scripted(final("done"), loop=True)
    observers = root.session.supervisor.observers
    gate = threading.Event()
    observers.publish(lambda: assert_opens(gate))
    before = observers.dropped
    for _ in range(1500):
        observers.publish(lambda: None)
    assert observers.dropped - before >= 499
    assert root.rlm_query("x") == "done"
    gate.set()
    assert observers.flush(10)


def assert_opens(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_the_user_is_told_when_most_children_have_been_started(own_root: Root) -> None:
    warnings: list[str] = []
    own_root.session.supervisor._core.on_warning = warnings.append
    own_root.scripted(final("x"))
    own_root.session.configure("max_children_total", "5")
    for _ in range(5):
        own_root.rlm_query("x")
    assert own_root.session.supervisor.observers.flush(10)
    assert len(warnings) == 1
    assert "%rlm config max_children_total=10" in warnings[0]
    assert own_root.rlm_query("x") == "Error: max_children_total exceeded"


def test_a_block_of_the_prompt_helper(root: Root) -> None:
    """`block` writes what a scripted client gives: kept here so that the helpers of this module are known to work."""
    root.scripted(block("FINAL(6 * 7)"))
    assert root.rlm_query("x") == "42"
