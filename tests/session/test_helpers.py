"""Promises of the helpers in the root's namespace: `rlm_kernel.session.helpers`, `handles`, `models`, `ports`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import Any

import pytest

from rlm_kernel.clients.scripted import ScriptedClient
from rlm_kernel.errors import (
    ChildFailedError,
    ChildLimitError,
    EpisodeFinalized,
    ManagedModeRequired,
    ModelCallError,
    ModelNotConfigured,
    PayloadError,
    ResultNotReady,
    StaleHandleError,
    UnknownHandleError,
    UsageMistake,
)
from rlm_kernel.session.handles import ChildHandle
from rlm_kernel.session.ports import WATCHED_FROM_S, unwatched
from rlm_kernel.values import ChildState, ChildStatus, Usage
from tests.session.conftest import HELD, Root, block, final, held, task
from tests.support.model_server import ModelServer

# -- nothing configured


@pytest.mark.parametrize("call", ["llm_query", "rlm_query"])
def test_without_a_model_the_error_shows_the_line_to_type(root: Root, call: str) -> None:
    with pytest.raises(ModelNotConfigured, match="%rlm model openai/gpt-5-mini"):
        getattr(root, call)("x")
    assert root.session.run_folder is None


def test_without_a_model_background_children_need_managed_mode(root: Root) -> None:
    with pytest.raises(ManagedModeRequired, match=r"%rlm model openai/gpt-5-mini.*%rlm config client_factory="):
        root.rlm_query("x", blocking=False)
    with pytest.raises(ManagedModeRequired):
        root.rlm_query_batched(["x", "y"], blocking=False)
    assert root.session.run_folder is None


# -- direct calls


def test_llm_query_is_one_call_with_one_message(root: Root) -> None:
    seen: list[Any] = []

    def chat(messages: list[dict[str, str]], model: str | None = None) -> str:
        seen.append((messages, model))
        return "answer"

    root.session.configure_value("client_factory", lambda: chat)
    assert root.llm_query("question") == "answer"
    assert root.llm_query("question", model="other") == "answer"
    message = [{"role": "user", "content": "question"}]
    assert seen == [(message, None), (message, "other")]
    assert root.session.usage == Usage(calls=2)


def test_a_batch_of_calls_keeps_its_order_and_puts_failures_in_place(root: Root) -> None:
    def chat(messages: list[dict[str, str]]) -> str:
        text = messages[0]["content"]
        if text == "bad":
            raise ModelCallError("no luck")
        return text.upper()

    root.session.configure_value("client_factory", lambda: chat)
    assert root.llm_query_batched(["a", "bad", "c"]) == ["A", "Error: no luck", "C"]
    assert root.llm_query_batched([]) == []


def test_a_failed_direct_call_raises(root: Root) -> None:
    root.scripted(ModelCallError("no luck"))
    with pytest.raises(ModelCallError, match="no luck"):
        root.llm_query("x")


def test_an_edited_key_reaches_the_next_direct_call(root: Root, server: ModelServer, monkeypatch) -> None:
    """After a 401 a user types `%env OPENAI_API_KEY=…` and tries again."""
    root.served(server, monkeypatch, openai=True)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key")
    root.llm_query("first")
    monkeypatch.setenv("OPENAI_API_KEY", "right-key")
    root.llm_query("second")
    assert [r.headers["authorization"] for r in server.requests] == ["Bearer wrong-key", "Bearer right-key"]
    assert root.session.usage.calls == 2


# -- one child


def test_a_blocking_query_returns_the_answer_as_text(root: Root) -> None:
    root.scripted(block("x = 6 * 7\nprint(x)"), final("42"))
    assert root.rlm_query("what?") == "42"
    (status,) = root.rlm_status()
    assert (status.state, status.exited, status.exit_code, status.iterations) == (ChildState.COMPLETED, True, 0, 2)
    assert status.usage.calls == 2
    assert (status.depth, status.parent_id, status.prompt_preview) == (1, None, "what?")


def test_a_nonblocking_query_returns_a_handle_at_once(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch, openai=True)
    handle = root.rlm_query(held("FINAL('done')"), blocking=False, name="mine", model="openai/other")
    server.wait_for_request()
    assert isinstance(handle, ChildHandle)
    assert (handle.name, handle.depth, handle.episode_id) == ("mine", 1, root.session.episode_id)
    assert not handle.status()
    assert handle.status().state is ChildState.RUNNING
    assert "running" in repr(handle)
    assert "'mine'" in repr(handle)
    with pytest.raises(ResultNotReady, match=f"{handle.id} is running; wait for it with rlm_wait"):
        handle.result()
    with pytest.raises(ResultNotReady):
        root.rlm_result(handle)
    assert handle.wait(0) == handle.wait(0) or not handle.wait(0).done
    server.release("held")
    assert handle.wait(20).state is ChildState.COMPLETED
    assert handle.result() == root.rlm_result(handle) == root.rlm_result(handle.id) == "done"
    assert server.requests[0].body["model"] == "other"
    assert "completed" in repr(handle)


def test_a_wait_that_runs_out_cancels_nothing(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('late')"), blocking=False)
    server.wait_for_request()
    status = root.rlm_wait(handle, timeout_s=0.01)
    assert isinstance(status, ChildStatus)
    assert not status.done
    assert not status.exited
    server.release("held")
    assert root.rlm_wait(handle, timeout_s=20).result == "late"


def test_a_wait_gives_one_status_for_one_handle_and_a_list_for_several(root: Root) -> None:
    root.scripted(final("x"))
    handles = [root.rlm_query("p", blocking=False) for _ in range(2)]
    assert isinstance(root.rlm_wait(handles[0]), ChildStatus)
    assert isinstance(root.rlm_wait(handles[0].id), ChildStatus)
    statuses = root.rlm_wait([handles[1], handles[0].id], timeout_s=20)
    assert [s.id for s in statuses] == [handles[1].id, handles[0].id]
    assert all(statuses)
    assert [s.id for s in root.rlm_wait((h for h in handles), timeout_s=20)] == [h.id for h in handles]
    assert [s.id for s in root.rlm_wait([handles[0], handles[0]])] == [handles[0].id] * 2
    assert root.rlm_wait([]) == []
    assert root.rlm_wait([], timeout_s=5, return_when="any") == []


def test_a_wait_for_any_returns_with_the_first(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch)
    slow = root.rlm_query(held("FINAL('slow')"), blocking=False)
    quick = root.rlm_query(task("FINAL('quick')"), blocking=False)
    statuses = root.rlm_wait([slow, quick], timeout_s=20, return_when="any")
    assert [status.done for status in statuses] == [False, True]
    # One child named twice is still one child that has not ended.
    assert [s.done for s in root.rlm_wait([slow, slow], timeout_s=0.05, return_when="any")] == [False, False]


def test_several_threads_may_wait_for_one_child(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch)
    handle = root.rlm_query(held("FINAL('same')"), blocking=False)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(handle.wait(20).result or "")) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.wait_for_request()
    server.release("held")
    for thread in threads:
        thread.join(20)
    assert results == ["same"] * 4


def test_a_handle_can_be_awaited(root: Root) -> None:
    root.scripted(final("awaited"))
    done = root.rlm_query("p", blocking=False)
    done.wait(20)

    async def main() -> list[str]:
        running = root.rlm_query("p", blocking=False)
        return [await running, await done, *await asyncio.gather(*[_answer(running), _answer(done)])]

    async def _answer(handle: ChildHandle) -> str:
        return await handle

    assert asyncio.run(main()) == ["awaited"] * 4


def test_awaiting_a_child_that_fails_raises(root: Root) -> None:
    root.scripted(ModelCallError("no luck"))

    async def main() -> None:
        await root.rlm_query("p", blocking=False)

    with pytest.raises(ChildFailedError, match="no luck"):
        asyncio.run(main())


def test_a_failed_child_raises_with_its_status(root: Root) -> None:
    root.scripted(ModelCallError("no luck"))
    with pytest.raises(ChildFailedError, match=r"^c\d+ failed: ModelCallError: no luck$") as raised:
        root.rlm_query("p")
    assert raised.value.status is not None
    assert raised.value.status.state is ChildState.FAILED
    assert raised.value.status.exited


def test_a_child_that_uses_its_iterations_up_is_no_success_without_an_answer(root: Root) -> None:
    root.session.configure("max_iterations", "2")
    root.scripted(block("1"), block("2"), "")
    with pytest.raises(ChildFailedError, match=r"no answer after 2 iterations; raise max_iterations"):
        root.rlm_query("p")


def test_a_childs_time_may_be_limited_per_call(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch)
    with pytest.raises(ChildFailedError, match=r"timed_out: timed out after 0.4 s"):
        root.rlm_query(HELD, timeout_s=0.4)
    assert root.rlm_status()[0].exited


def test_handles_are_hashable_and_equal_by_child(root: Root) -> None:
    root.scripted(final("x"))
    one, other = root.rlm_query_batched(["p", "q"], blocking=False)
    again = ChildHandle(one._port, one.status(), one.episode_id)
    assert {one, again, other} == {one, other}
    assert one != other
    assert one != one.id


# -- context


@pytest.mark.parametrize(
    ("context", "expression", "answer"),
    [
        (None, "context", "the prompt"),
        ("text", "context", "text"),
        ("x" * 100_000, "len(context)", "100000"),
        ("\ud800", "ascii(context)", "'\\ud800'"),
        (b"bytes", "context", "b'bytes'"),
        ({"a": [1]}, "context['a']", "[1]"),
        (None, "'task' in globals()", "False"),
        ("text", "task", "the prompt"),
    ],
)
def test_a_child_finds_its_context(root: Root, context: object, expression: str, answer: str) -> None:
    root.scripted(block(f"FINAL({expression})"))
    assert root.rlm_query("the prompt", context=context) == answer


def test_a_prompt_with_lone_surrogates_is_whole_in_the_context_and_so_is_such_an_answer(root: Root) -> None:
    root.scripted(block("FINAL(ascii(context) + context)"))
    assert root.rlm_query("p \ud800") == "'p \\ud800'p \\ud800"
    assert root.rlm_status()[0].prompt_preview == "p \\ud800"


def test_a_huge_prompt_is_previewed_to_the_model_and_whole_in_the_context(
    root: Root, server: ModelServer, monkeypatch
) -> None:
    root.served(server, monkeypatch)
    prompt = task("FINAL(len(context))") + "word " * 40_000 + "END-OF-PROMPT"
    assert root.rlm_query(prompt) == str(len(prompt))
    (request,) = server.requests
    assert len(request.text) < 30_000
    assert request.text.count("word ") < 2000


def test_a_shared_context_serves_several_children_and_is_released_by_a_reset(root: Root) -> None:
    shared = root.rlm_share({"numbers": list(range(50_000))})
    assert root.rlm_share(shared) is shared
    root.scripted(block("FINAL(sum(context['numbers']))"))
    assert root.rlm_query_batched(["p"] * 3, context=shared) == [str(sum(range(50_000)))] * 3
    assert root.rlm_query("p", context=shared) == str(sum(range(50_000)))
    root.session.reset()
    with pytest.raises(UsageMistake, match="call rlm_share again"):
        root.rlm_query("p", context=shared)


def test_a_shared_context_that_nobody_holds_is_not_kept_until_the_reset(root: Root) -> None:
    before = len(os.listdir("/proc/self/fd"))
    root.rlm_share("x" * 100_000)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_context_for_a_batch_is_pickled_once(root: Root) -> None:
    pickled = 0

    class Counted:
        def __reduce__(self) -> Any:
            nonlocal pickled
            pickled += 1
            return str, ("from a pickle",)

    root.scripted(block("FINAL(context)"))
    assert root.rlm_query_batched(["p"] * 3, context=Counted()) == ["from a pickle"] * 3
    handles = root.rlm_query_batched(["p"] * 3, context=Counted(), blocking=False)
    assert [h.wait(20).result for h in handles] == ["from a pickle"] * 3
    assert pickled == 2


def test_a_batch_takes_one_context_per_prompt(root: Root) -> None:
    root.scripted(block("FINAL(context)"))
    assert root.rlm_query_batched(["p", "q"], context=["a", None]) == ["a", "q"]
    with pytest.raises(UsageMistake, match="3 entries for 2 prompts"):
        root.rlm_query_batched(["p", "q"], context=["a", "b", "c"])


def test_what_cannot_be_pickled_raises_at_the_call(root: Root) -> None:
    root.scripted(final("x"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PayloadError, match="context= cannot be pickled"):
        root.rlm_query("p", context=threading.Lock(), blocking=False)
    with pytest.raises(PayloadError):
        root.rlm_query_batched(["p", "q"], context=["x" * 100_000, threading.Lock()], blocking=False)
    assert root.rlm_status() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_context_that_cannot_be_pickled_fails_its_own_entry_of_a_blocking_batch(root: Root) -> None:
    root.scripted(block("FINAL(context)"))
    answers = root.rlm_query_batched(["p", "q", "r"], context=["a", threading.Lock(), "c"])
    assert (answers[0], answers[2]) == ("a", "c")
    assert answers[1].startswith("Error: context= cannot be pickled")


# -- batches and limits


def test_a_batch_keeps_its_order_and_a_failure_its_place(root: Root, server: ModelServer, monkeypatch) -> None:
    root.served(server, monkeypatch)
    prompts = [task(f"FINAL({i})") for i in range(3)]
    prompts.insert(1, "[[status 401]]")
    answers = root.rlm_query_batched(prompts, name="part")
    assert [answers[i] for i in (0, 2, 3)] == ["0", "1", "2"]
    assert answers[1].startswith("Error: c")
    assert "401" in answers[1]
    assert [status.name for status in root.rlm_status()] == ["part-1", "part-2", "part-3", "part-4"]


def test_an_empty_batch_starts_nothing(root: Root) -> None:
    root.scripted(final("x"))
    assert root.rlm_query_batched([]) == []
    assert root.rlm_query_batched([], blocking=False) == []
    assert root.rlm_status() == []


def test_surplus_children_of_blocking_calls_are_errors_in_place(root: Root) -> None:
    root.scripted(final("x"))
    root.session.configure("max_children_total", "2")
    surplus = "Error: max_children_total exceeded"
    assert root.rlm_query_batched(["a", "b", "c", "d"]) == ["x", "x", surplus, surplus]
    assert root.rlm_query("e") == surplus
    with pytest.raises(ChildLimitError) as raised:
        root.rlm_query("f", blocking=False)
    assert (raised.value.limit, raised.value.value) == ("max_children_total", 2)
    assert len(root.rlm_status()) == 2


def test_a_nonblocking_batch_starts_all_or_none(root: Root) -> None:
    root.scripted(final("x"))
    root.session.configure("max_children_total", "2")
    with pytest.raises(ChildLimitError):
        root.rlm_query_batched(["a", "b", "c"], blocking=False)
    assert root.rlm_status() == []
    handles = root.rlm_query_batched(["a", "b"], blocking=False)
    assert [h.wait(20).result for h in handles] == ["x", "x"]


def test_a_batch_has_a_limit_of_its_own(root: Root) -> None:
    root.scripted(final("x"))
    root.session.configure("max_children_per_batch", "2")
    assert root.rlm_query_batched(["a", "b", "c"]) == ["x", "x", "Error: max_children_per_batch exceeded"]
    with pytest.raises(ChildLimitError) as raised:
        root.rlm_query_batched(["a", "b", "c"], blocking=False)
    assert (raised.value.limit, raised.value.value) == ("max_children_per_batch", 2)


def test_at_the_depth_limit_a_blocking_query_is_one_direct_call(root: Root) -> None:
    seen: list[str] = []

    def chat(messages: list[dict[str, str]]) -> str:
        seen.append(messages[0]["content"])
        return "direct"

    root.session.configure_value("client_factory", lambda: chat)
    root.session.configure("max_depth", "1")
    assert root.rlm_query("p") == "direct"
    assert root.rlm_query("p", context={"a": 1}) == "direct"
    assert root.rlm_query("p", context=root.rlm_share("shared text")) == "direct"
    assert root.rlm_query_batched(["q", "r"], context="c") == ["direct"] * 2
    assert seen[:3] == ["p", "p\n\nContext:\n{'a': 1}", "p\n\nContext:\nshared text"]
    assert sorted(seen[3:]) == ["q\n\nContext:\nc", "r\n\nContext:\nc"]
    assert root.rlm_status() == []


def test_at_the_depth_limit_a_nonblocking_query_raises_and_looking_is_allowed(root: Root) -> None:
    root.scripted(final("x"))
    handle = root.rlm_query("p", blocking=False)
    root.session.configure("max_depth", "1")
    with pytest.raises(ChildLimitError, match="max_depth") as raised:
        root.rlm_query("p", blocking=False)
    assert (raised.value.limit, raised.value.value) == ("max_depth", 1)
    assert root.rlm_wait(handle).done
    assert root.rlm_result(handle) == "x"


def test_a_long_answer_is_cut_where_configured(root: Root) -> None:
    root.scripted(block("FINAL('x' * 1000)"))
    root.session.configure("result_truncation_limit", "10")
    assert root.rlm_query("p").startswith("xxxxxxxxxx\n[... cut: the answer has 1000 characters")


def test_a_large_answer_arrives_whole(root: Root) -> None:
    root.scripted(block("FINAL('x' * 5_000_000)"))
    assert len(root.rlm_query("p")) == 5_000_000


# -- handles that name nothing


def test_an_unknown_id_is_an_error_that_lists_those_that_exist(root: Root) -> None:
    root.scripted(final("x"))
    handle = root.rlm_query("p", blocking=False)
    for look in (root.rlm_status, root.rlm_wait, root.rlm_result):
        with pytest.raises(UnknownHandleError, match=f"no child 'c999999' here. Children that exist: {handle.id}"):
            look("c999999")
    handle.wait(20)


def test_handles_and_ids_from_before_a_reset_are_stale(root: Root) -> None:
    root.scripted(final("x"))
    handle = root.rlm_query("p", blocking=False)
    handle.wait(20)
    root.session.reset()
    for look in (handle.status, handle.wait, handle.result, lambda: root.rlm_wait(handle.id)):
        with pytest.raises(StaleHandleError, match="a reset has ended"):
            look()
    assert "StaleHandleError" in repr(handle)
    later = root.rlm_query("p", blocking=False)
    assert int(later.id[1:]) > int(handle.id[1:])
    later.wait(20)


def test_handles_of_another_session_are_refused(root: Root, own_root: Root) -> None:
    own_root.scripted(final("x"))
    root.scripted(final("y"))
    foreign = own_root.rlm_query("p", blocking=False)
    root.rlm_query("p")
    with pytest.raises((StaleHandleError, UnknownHandleError)):
        root.rlm_status(foreign)
    foreign.wait(20)


# -- arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.rlm_query(5), "prompt must be a string, got int"),
        (lambda r: r.rlm_query(" "), "prompt is empty"),
        (lambda r: r.llm_query(None), "prompt must be a string, got NoneType"),
        (lambda r: r.rlm_query("p", timeout_s=-1), "timeout_s=-1: must be a number of seconds"),
        (lambda r: r.rlm_query("p", timeout_s="5"), "timeout_s='5'"),
        (lambda r: r.rlm_query("p", timeout_s=True), "timeout_s=True"),
        (lambda r: r.rlm_query("p", timeout_s=0), "timeout_s=0: a child needs some time"),
        (lambda r: r.rlm_query("p", name=5), "name=5: must be a string"),
        (lambda r: r.rlm_query("p", model=5), "model=5: must be the name of a model"),
        (lambda r: r.llm_query("p", model=""), "model='': must be the name of a model"),
        (lambda r: r.rlm_query("p", schema=5), "schema=5"),
        (lambda r: r.rlm_query_batched("one text"), "prompts must be a list of strings, got str"),
        (lambda r: r.rlm_query_batched(["a", 5]), r"prompts\[1\] must be a string, got int"),
        (lambda r: r.llm_query_batched(["a", ""]), r"prompts\[1\] is empty"),
        (lambda r: r.rlm_wait("c1", return_when="first"), "return_when='first'"),
        (lambda r: r.rlm_wait("c1", timeout_s=float("nan")), "timeout_s=nan"),
        (lambda r: r.rlm_wait(5), "expected a handle or an id such as 'c1', got int"),
        (lambda r: r.rlm_wait([None]), "got NoneType"),
        (lambda r: r.rlm_status(5), "got int"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(root: Root, call: Any, message: str) -> None:
    root.scripted(final("x"))
    with pytest.raises(UsageMistake, match=message):
        call(root)
    assert root.rlm_status() == []


def test_blocking_can_only_be_given_by_name(root: Root) -> None:
    with pytest.raises(TypeError):
        root.rlm_query("p", None, False)


# -- the client factory


def test_a_factory_that_closes_over_local_values_travels(root: Root) -> None:
    word = "closure"

    def factory() -> ScriptedClient:
        return ScriptedClient([f"```repl\nFINAL({word!r})\n```"])

    root.session.configure_value("client_factory", factory)
    assert root.rlm_query("p") == "closure"


def test_a_factory_that_cannot_be_pickled_raises_at_the_call(root: Root) -> None:
    lock = threading.Lock()
    root.session.configure_value("client_factory", lambda: lock)
    with pytest.raises(PayloadError, match="Build the client inside the factory"):
        root.rlm_query("p", blocking=False)
    assert root.rlm_status() == []
    assert root.session.run_folder is None


def test_a_factory_in_a_module_is_seen_as_it_is_now(root: Root, tmp_path, monkeypatch) -> None:
    """Each child imports it anew: the nursery never has."""
    module = tmp_path / "edited_factory_module.py"
    source = "from rlm_kernel.clients.scripted import ScriptedClient\n\ndef make():\n    return ScriptedClient('FINAL({})')\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    root.session.configure("client_factory", "edited_factory_module:make")
    module.write_text(source.format("first"))
    assert root.rlm_query("p") == "first"
    module.write_text(source.format("second version"))
    assert root.rlm_query("p") == "second version"


def test_a_factory_that_fails_is_a_readable_failure(root: Root) -> None:
    root.session.configure("client_factory", "no_such_module_at_all:make")
    with pytest.raises(ChildFailedError, match=r"no_such_module_at_all.*cannot be imported"):
        root.rlm_query("p")


# -- after the end


def test_after_the_final_answer_only_a_reset_allows_background_children(root: Root) -> None:
    root.scripted(final("x"))
    earlier = root.rlm_query("p", blocking=False)
    earlier.wait(20)
    root.say_final("answer")
    with pytest.raises(EpisodeFinalized, match="%rlm reset"):
        root.rlm_query("p", blocking=False)
    with pytest.raises(EpisodeFinalized):
        root.rlm_query_batched(["p"], blocking=False)
    assert earlier.result() == "x"
    assert root.rlm_query("p") == "x"
    root.session.reset()
    assert root.session.final_answer is None
    assert root.rlm_query("p", blocking=False).wait(20).result == "x"


# -- being watched


def test_every_wait_of_the_root_that_may_take_long_is_watched(root: Root) -> None:
    """By whoever puts itself in; blocks are left in the order of nesting, and a wait that must be short has none."""
    root.scripted(final("x"))
    watched: list[list[str]] = []
    entered: list[int] = []

    @contextlib.contextmanager
    def watch(refs: Any) -> Any:
        watched.append([child_id for child_id, _ in refs])
        entered.append(len(entered))
        yield
        entered.pop()

    root.session.watch = watch
    a, b, c = root.rlm_query_batched(["a", "b", "c"], blocking=False)
    root.rlm_wait([a, b])
    a.wait()
    assert watched == [[a.id, b.id], [a.id]]
    root.rlm_wait(c, timeout_s=WATCHED_FROM_S)
    root.rlm_wait(c, timeout_s=WATCHED_FROM_S / 2)
    assert watched[2:] == [[c.id]]
    assert len(list(root.rlm_as_completed([a, b]))) == 2
    assert watched[3] == [a.id, b.id]
    del watched[:]
    assert root.rlm_query("d") == "x"
    assert root.rlm_query_batched(["e", "f"]) == ["x", "x"]
    assert [len(ids) for ids in watched] == [1, 2]
    assert entered == []
    root.session.watch = unwatched


def test_a_handle_that_is_awaited_is_watched(root: Root, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    root.served(server, monkeypatch)
    over = []

    @contextlib.contextmanager
    def watch(refs: Any) -> Any:
        server.release("held")
        yield
        over.extend(refs)

    async def answer_of(handle: ChildHandle) -> str:
        return await handle

    root.session.watch = watch
    handle = root.rlm_query(held("FINAL('x')"), blocking=False)
    assert asyncio.run(asyncio.wait_for(answer_of(handle), 20)) == "x"
    assert over == [handle.ref]
    root.session.watch = unwatched
