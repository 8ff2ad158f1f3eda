"""Promises of the limits over the whole tree: nesting, concurrency, memory, tokens, model calls, time, shared contexts."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.children import posix
from rlm_kernel.errors import ChildLimitError
from rlm_kernel.jupyter.views.costs import cost_view
from rlm_kernel.session.holding import HOLD_FROM
from rlm_kernel.values import ChildState, Usage
from tests.session.conftest import Root, block, held, task
from tests.support.model_server import ModelServer

PARENT = """
hs = [rlm_query(f'leaf {i}', blocking=False) for i in range(2)]
rlm_wait(hs)
FINAL('+'.join(rlm_result(h) for h in hs))
"""


def _last(request: Any) -> str:
    text: str = request.body["messages"][-1]["content"]
    return text


def _rules(root: Root, **rules: str) -> None:
    root.scripted(rules=rules, usage=Usage(1, 5, 5))


def test_at_a_limit_of_two_four_parents_that_each_wait_for_two_children_finish(root: Root) -> None:
    _rules(root, leaf=block("FINAL('L')"), parent=block(PARENT))
    root.session.configure("max_depth", "3")
    root.session.configure("max_concurrent_children", "2")
    handles = [root.rlm_query(f"parent {i}", blocking=False) for i in range(4)]
    statuses = root.rlm_wait(handles, timeout_s=30)
    assert [status.result for status in statuses] == ["L+L"] * 4
    assert [s.depth for s in root.rlm_status()] == [1] * 4 + [2] * 8


def test_at_a_limit_of_one_a_parent_that_polls_does_not_starve_its_child(root: Root) -> None:
    polling = """
h = rlm_query('leaf', blocking=False)
import time
deadline = time.monotonic() + 20
while not rlm_status(h) and time.monotonic() < deadline:
    rlm_wait(h, timeout_s=0.01)
FINAL(rlm_result(h))
"""
    _rules(root, leaf=block("FINAL('fed')"), parent=block(polling))
    root.session.configure("max_depth", "3")
    root.session.configure("max_concurrent_children", "1")
    assert root.rlm_query("parent") == "fed"


def test_a_parent_killed_in_the_middle_of_a_wait_takes_its_descendants_along(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_depth", "4")
    inner = "rlm_query('[[block never]] deepest', blocking=True)"
    parent = root.rlm_query(task(f"rlm_query({task(inner)!r})"), blocking=False)
    server.wait_for_request("<task>\n[[block never]] deepest")
    pids = [status.pid for status in root.rlm_status()]
    assert len(pids) == 3
    os.kill(pids[0], 9)
    status = parent.wait(10)
    assert (status.state, status.exit_code) == (ChildState.FAILED, -9)
    assert "SIGKILL" in status.error
    assert [(s.state, s.exited) for s in root.rlm_status()[1:]] == [(ChildState.CANCELLED, True)] * 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_depths_end_where_the_limit_says(root: Root) -> None:
    deeper = """
try:
    rlm_query('leaf', blocking=False)
except Exception as error:
    FINAL(f'{type(error).__name__} {error.limit} {error.value} {rlm_query("leaf")}')
"""
    _rules(root, leaf="a direct call", parent=block(deeper))
    assert root.rlm_query("parent") == "ChildLimitError max_depth 2 a direct call"


def test_a_child_over_its_memory_limit_fails_with_that_reason(root: Root) -> None:
    _rules(
        root,
        growing=block("x = bytearray(130_000_000)\nx[::4096] = b'1' * len(x[::4096])\nwhile True: pass"),
        leap=block("x = bytearray(10_000_000_000)"),
        modest=block("x = bytearray(10_000_000)\nFINAL(len(x))"),
    )
    root.session.configure("memory_limit_bytes", "100_000_000")
    growing, leap, modest = (root.rlm_query(name, blocking=False) for name in ("growing", "leap", "modest"))
    statuses = root.rlm_wait([growing, leap, modest], 30)
    assert [status.state for status in statuses] == [ChildState.FAILED, ChildState.FAILED, ChildState.COMPLETED]
    assert statuses[0].error.startswith("memory limit: it used ")
    assert "memory limit" in statuses[1].error
    assert statuses[2].result == "10000000"


def test_a_spent_token_budget_stops_admission_everywhere(root: Root) -> None:
    _rules(root, leaf=block("FINAL('L')"))
    root.session.configure("max_total_tokens", "25")
    for _ in range(3):  # 10 tokens each; the third call is let through while 5 are left
        assert root.rlm_query("leaf") == "L"
    with pytest.raises(ChildLimitError, match="budget of 25 tokens") as caught:
        root.rlm_query("leaf", blocking=False)
    assert (caught.value.limit, caught.value.value) == ("max_total_tokens", 25)
    assert root.rlm_query("leaf") == "Error: max_total_tokens exceeded"
    with pytest.raises(ChildLimitError):
        root.llm_query("leaf")
    assert root.session.usage == Usage(3, 15, 15)


def test_children_that_run_when_the_budget_is_spent_fail_with_that_reason(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_total_tokens", "1")
    handles = [root.rlm_query(held("x = 1", "FINAL('never')", gate="all"), blocking=False) for _ in range(3)]
    server.wait_for_request("FINAL")
    server.release("all")
    statuses = root.rlm_wait(handles, 20)
    assert [status.state for status in statuses] == [ChildState.FAILED] * 3
    assert all("max_total_tokens exceeded" in status.error for status in statuses)


def test_model_calls_of_the_whole_tree_are_bounded(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    both, under_way, most, calls, lock = threading.Barrier(2), 0, 0, 0, threading.Lock()

    def reply(body: dict[str, Any]) -> str:
        """Count the calls under way; the first two wait for each other, so that there are two at once."""
        nonlocal under_way, most, calls
        with lock:
            under_way, calls = under_way + 1, calls + 1
            most, early = max(most, under_way), calls <= 2
        if early:
            both.wait(20)
        with lock:
            under_way -= 1
        loop = body["messages"][0]["role"] == "system"
        return block("FINAL(','.join(llm_query_batched(['one', 'two', 'three'])))") if loop else "ok"

    with ModelServer(reply=reply) as server:
        root.served(server, monkeypatch)
        root.session.configure("max_concurrent_model_calls", "2")
        handles = [root.rlm_query(f"child {i}", blocking=False) for i in range(4)]
        assert root.llm_query_batched([f"root {i}" for i in range(4)]) == ["ok"] * 4
        assert [status.result for status in root.rlm_wait(handles, 30)] == ["ok,ok,ok"] * 4
    assert most == 2
    assert root.session.usage.calls == 4 * 4 + 4


def test_a_child_killed_in_mid_call_gives_its_permission_back(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_concurrent_model_calls", "1")
    stuck = root.rlm_query("[[block never]] stuck", blocking=False)
    server.wait_for_request("stuck")
    waiting = root.rlm_query(task("FINAL('served')"), blocking=False)
    root.rlm_cancel(stuck)
    assert waiting.wait(20).result == "served"


def test_a_child_is_timed_out_in_the_middle_of_a_model_call(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query("[[block never]] slow", blocking=False, timeout_s=0.5)
    status = handle.wait(10)
    assert (status.state, status.exited) == (ChildState.TIMED_OUT, True)
    assert status.error == "timed out after 0.5 s"


def test_long_answers_are_cut_where_a_limit_says(root: Root) -> None:
    _rules(root, leaf=block("FINAL('x' * 1000)"))
    root.session.configure("result_truncation_limit", "100")
    answer = root.rlm_query("leaf")
    assert answer.startswith("x" * 100 + "\n[... cut: the answer has 1000 characters")


# -- shared contexts


def test_a_large_text_is_handed_over_once_and_inherited_by_every_later_child(root: Root) -> None:
    text = "Zürich \N{SNOWMAN} " * (8 * HOLD_FROM // 9)
    inspect = "import hashlib\nFINAL([len(context), hashlib.md5(context.encode()).hexdigest()])"
    _rules(root, leaf=block(inspect))
    first = root.rlm_query("leaf", context=text)
    held_bytes = root.session.held.total_bytes
    assert held_bytes == len(text.encode())
    assert [root.rlm_query("leaf", context=text) for _ in range(3)] == [first] * 3
    assert root.session.held.total_bytes == held_bytes
    assert first.startswith(f"[{len(text)}, ")
    root.session.reset()
    assert root.session.held.total_bytes == 0


def test_children_over_one_large_context_do_not_hold_copies_of_it(
    root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.served(server, monkeypatch)
    root.session.configure("max_concurrent_children", "16")
    data = bytes(100_000_000)
    python = "n = context.count(b'1') + len(context)\nllm_query('[[block looking]] counted')\nFINAL(n)"
    handles = [root.rlm_query(task(python), context=data, blocking=False) for _ in range(16)]
    server.wait_for_request(lambda r: _last(r).startswith("[[block looking]]"), count=16, timeout_s=30)
    private = [posix.private_bytes(h.status().pid) for h in handles]
    assert all(value is not None and value < 40_000_000 for value in private), private
    server.release("looking")
    assert {status.result for status in root.rlm_wait(handles, 20)} == {"100000000"}


def test_a_new_nursery_holds_what_the_one_before_held(own_root: Root) -> None:
    root = own_root
    text = "x" * (2 * HOLD_FROM)
    _rules(root, leaf=block("FINAL(len(context))"))
    assert root.rlm_query("leaf", context=text) == str(len(text))
    before = root.session.supervisor.nursery_pid
    assert before is not None
    os.kill(before, 9)
    deadline = time.monotonic() + 20
    while root.session.supervisor.nursery_pid == before and time.monotonic() < deadline:
        root.rlm_wait(root.rlm_query("leaf", blocking=False))
    assert root.rlm_query("leaf", context=text) == str(len(text))


def test_a_child_passes_its_inherited_context_on_without_a_copy(root: Root) -> None:
    text = "y" * (2 * HOLD_FROM)
    pass_on = """
from rlm_kernel.session.contexts import encode
e, fds = encode(context)
FINAL([bool(e.held), fds, rlm_query('leaf', context=context)])
"""
    _rules(root, leaf=block("FINAL(len(context))"), parent=block(pass_on))
    root.session.configure("max_depth", "3")
    assert root.rlm_query("parent", context=text) == f"[True, (), '{len(text)}']"


def test_what_does_not_fit_any_more_travels_by_file(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root.session.held, "_limit", 3 * HOLD_FROM)
    _rules(root, leaf=block("FINAL(len(context))"))
    texts = ["a" * (2 * HOLD_FROM), "b" * (2 * HOLD_FROM)]
    assert [root.rlm_query("leaf", context=text) for text in texts] == [str(2 * HOLD_FROM)] * 2
    assert len(root.session.held) == 1


@pytest.mark.parametrize("kind", [str, bytes])
def test_shared_plain_objects_are_held(root: Root, kind: Any) -> None:
    shared = root.rlm_share("z" * (2 * HOLD_FROM) if kind is str else b"z" * (2 * HOLD_FROM))
    _rules(root, leaf=block("FINAL([type(context).__name__, len(context)])"))
    answers = root.rlm_query_batched(["leaf"] * 3, context=shared)
    assert answers == [f"['{kind.__name__}', {2 * HOLD_FROM}]"] * 3
    assert len(root.session.held) == 1


def test_usage_by_model_adds_up_to_the_episodes_to_the_token(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in cells, of children and of grandchildren, with models of their own; of one that failed, and of one that was killed."""
    rules = {
        "PARENT": "```repl\na = llm_query('x', model='other')\nFINAL(rlm_query('LEAF', model='leaf model'))\n```",
        "LEAF": "```repl\nFINAL('leaf')\n```",
        "DIES": "```repl\nimport os; llm_query('x'); os.kill(os.getpid(), 9)\n```",
        "FAILS": RuntimeError("no"),
        "x": "an answer",
    }
    session = root.session
    session.configure("max_depth", "3")
    root.scripted(rules=rules, usage=Usage(1, 7, 3))
    children = [root.rlm_query(prompt, blocking=False, name=prompt) for prompt in ("PARENT", "DIES", "FAILS")]
    root.llm_query("x", model="of the notebook")
    root.llm_query_batched(["x", "x"])
    monkeypatch.setenv("RLM_TEST_HOST", "1")  # an address has changed: a new client
    root.llm_query("x")
    assert all(root.rlm_wait(children, timeout_s=20))
    histories = session.supervisor.histories()
    parts = [session.root_usage_by_model, *(each.usage_by_model for each in histories)]
    assert sum((used for part in parts for used in part.values()), Usage()) == session.usage == Usage(9, 63, 27)
    assert [sum(each.usage_by_model.values(), Usage()) for each in histories] == [h.status.usage for h in histories]
    parent = next(each for each in histories if each.status.name == "PARENT")
    assert parent.usage_by_model["other"] == Usage(1, 7, 3)
    assert len(parent.calls) == 2
    assert all(parent.asked_at < start < end < (parent.ended_at or 0) for start, end in parent.calls)
    by_model, by_run = cost_view(session).tables
    assert by_model[-1] == ("all models", "9", "63", "27")
    assert by_run[-1][:4] == ("all runs", "9", "63", "27")
    assert ("of the notebook", "1", "7", "3") in by_model
    assert ("leaf model", "1", "7", "3") in by_model
    assert session.reset().ok
    assert session.root_usage_by_model == {}
