"""Promises of `rlm_kernel.session.backends` where children are runs in this process."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlm_kernel.errors import ChildFailedError, ConfigurationError, EpisodeClosing, UsageMistake
from rlm_kernel.session.backends import BackendLimits, DirectLMBackend, LocalChildRLMBackend
from rlm_kernel.values import Usage


def echo(messages: list[dict[str, str]], model: str | None = None) -> str:
    """Answer with the prompt, behind the model's name if one was asked for; a prompt with "fail" fails."""
    prompt = messages[-1]["content"]
    if "fail" in prompt:
        raise RuntimeError(f"cannot do {prompt}")
    return prompt if model is None else f"{model}:{prompt}"


@dataclass
class Runner:
    """A runner of a user's own, with the smallest surface: it does not know about timeouts."""

    chat_fn: Callable[..., str]
    options: dict[str, Any]
    runs: list[tuple[Any, str, str | None]] = field(default_factory=list)

    def run(self, context: Any, task_prompt: str, *, model: str | None = None) -> Any:
        answer = self.chat_fn([{"role": "user", "content": task_prompt}], model)
        return type("Result", (), {"final_answer": None if answer == "nothing" else f"<{answer}>"})()


def local(
    chat_fn: Any = echo,
    *,
    depth: int = 0,
    runner: Any = None,
    on_start: Any = None,
    on_complete: Any = None,
    **limits: Any,
) -> LocalChildRLMBackend:
    return LocalChildRLMBackend(
        chat_fn,
        runner_factory=runner or (lambda chat, **options: Runner(chat, options)),
        depth=depth,
        limits=BackendLimits(**{"max_depth": 3, **limits}),
        on_subcall_start=on_start,
        on_subcall_complete=on_complete,
    )


# -- limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_depth", -1),
        ("max_depth", "2"),
        ("max_batch_workers", 0),
        ("max_children_total", -1),
        ("max_children_per_batch", 0),
        ("result_truncation_limit", 0),
        ("per_child_timeout_s", 0),
        ("per_child_timeout_s", float("nan")),
    ],
)
def test_a_bad_limit_is_refused_with_its_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name) as raised:
        BackendLimits(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(raised.value)


def test_the_limits_have_the_published_order_and_defaults() -> None:
    assert BackendLimits() == BackendLimits(1, 8, None, None, None, None)


# -- direct calls


def test_a_direct_query_passes_prompt_and_model_and_the_failure_comes_through() -> None:
    backend = DirectLMBackend(echo)
    assert backend.query("hello") == "hello"
    assert backend.query("hello", "m") == "m:hello"
    assert backend.recursive_query("hello", "m") == "m:hello"
    with pytest.raises(RuntimeError, match="cannot do fail"):
        backend.query("fail")


def test_a_batch_keeps_the_order_and_a_failure_is_an_error_in_its_place() -> None:
    backend = DirectLMBackend(echo, limits=BackendLimits(max_batch_workers=2))
    prompts = ["a", "fail b", "c", "d"]
    for answers in (backend.query_batched(prompts), backend.recursive_query_batched(prompts)):
        assert [answers[0], answers[2], answers[3]] == ["a", "c", "d"]
        assert answers[1].startswith("Error: ")
        assert "cannot do fail b" in answers[1]
    assert backend.query_batched([]) == []


def test_calls_of_a_batch_run_side_by_side_within_the_bound() -> None:
    meeting = threading.Barrier(3)
    most, now, lock = [0], [0], threading.Lock()

    def chat(messages: list[dict[str, str]]) -> str:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        meeting.wait(10)
        with lock:
            now[0] -= 1
        return "ok"

    assert DirectLMBackend(chat, limits=BackendLimits(max_batch_workers=3)).query_batched(["p"] * 6) == ["ok"] * 6
    assert most == [3]


def test_results_are_cut_and_errors_are_not() -> None:
    backend = DirectLMBackend(echo, 0, BackendLimits(result_truncation_limit=5))
    assert backend.query("abcdefghij") == "abcde"
    answers = backend.query_batched(["abcdefghij", "fail at length"])
    assert answers[0] == "abcde"
    assert "cannot do fail at length" in answers[1]


def test_what_is_no_prompt_is_refused_by_name() -> None:
    backend = local()
    with pytest.raises(UsageMistake, match="prompt must be a string, got int: 3"):
        backend.query(3)  # type: ignore[arg-type]
    with pytest.raises(UsageMistake, match=r"prompts\[1\] must be a string"):
        backend.query_batched(["a", None])  # type: ignore[list-item]
    with pytest.raises(UsageMistake, match="prompts must be a list"):
        backend.recursive_query_batched("a, b")


def test_what_is_no_chat_function_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="chat_fn"):
        DirectLMBackend("openai/gpt")  # type: ignore[arg-type]


def test_a_reply_of_none_is_an_empty_text() -> None:
    assert DirectLMBackend(lambda messages: None).query("p") == ""


def test_a_closed_backend_makes_no_further_call() -> None:
    backend = local()
    backend.close()
    backend.close()
    for call in (backend.query, backend.recursive_query):
        with pytest.raises(EpisodeClosing):
            call("p")
    assert backend.query_batched(["p"])[0].startswith("Error: ")


# -- recursion


def test_a_child_gets_the_prompt_as_task_and_context_unless_a_context_is_given() -> None:
    seen: list[tuple[Any, str, Any]] = []

    class Recorder(Runner):
        def run(self, context: Any, task_prompt: str, *, model: str | None = None) -> Any:
            seen.append((context, task_prompt, model))
            return super().run(context, task_prompt, model=model)

    backend = local(runner=lambda chat, **options: Recorder(chat, options))
    assert backend.recursive_query("task", "m") == "<m:task>"
    assert backend.recursive_query("task", context=[1, 2]) == "<task>"
    assert seen == [("task", "task", "m"), ([1, 2], "task", None)]


def test_a_childs_runner_is_made_like_the_published_one() -> None:
    made: list[dict[str, Any]] = []

    def factory(chat: Any, **options: Any) -> Runner:
        made.append({"chat": chat, **options})
        return Runner(chat, options)

    backend = LocalChildRLMBackend(
        echo,
        runner_factory=factory,
        system_prompt="S",
        max_iterations=7,
        env_max_iterations_multiplier=3,
        limits=BackendLimits(max_depth=3, max_batch_workers=2),
    )
    backend.recursive_query("p")
    [options] = made
    below = options.pop("backend_factory")(
        echo, system_prompt="S", max_iterations=7, depth=1, env_max_iterations_multiplier=3
    )
    assert options == {
        "chat": echo,
        "system_prompt": "S",
        "max_iterations": 7,
        "max_depth": 3,
        "depth": 1,
        "env_max_iterations_multiplier": 3,
        "max_batch_workers": 2,
        "on_subcall_start": None,
        "on_subcall_complete": None,
    }
    assert (below.depth, below.limits) == (1, backend.limits)


@pytest.mark.parametrize(("depth", "max_depth"), [(0, 1), (0, 0), (1, 2), (2, 3)])
def test_at_the_depth_limit_a_recursive_query_is_a_direct_call(depth: int, max_depth: int) -> None:
    backend = local(depth=depth, max_depth=max_depth)
    assert backend.recursive_query("p") == "p"
    assert backend.recursive_query_batched(["a", "b"]) == ["a", "b"]
    assert backend.recursive_query("p", context="ctx") == "p\n\nContext:\nctx"
    assert backend.child_traces == []


def test_children_beyond_the_total_are_an_error_text() -> None:
    backend = local(max_children_total=2)
    assert [backend.recursive_query(p) for p in "abc"] == ["<a>", "<b>", "Error: max_children_total exceeded"]
    backend.begin_episode()
    assert backend.recursive_query("d") == "<d>"
    assert len(backend.child_traces) == 1


def test_the_total_counts_the_whole_tree() -> None:
    def factory(chat: Any, **options: Any) -> Any:
        below = options["backend_factory"](
            chat, system_prompt="", max_iterations=1, depth=options["depth"], env_max_iterations_multiplier=1
        )

        class Nested(Runner):
            def run(self, context: Any, task_prompt: str, *, model: str | None = None) -> Any:
                answer = below.recursive_query(f"{task_prompt}+")
                return type("Result", (), {"final_answer": answer})()

        return Nested(chat, options)

    backend = local(max_children_total=3, max_depth=9, runner=factory)
    assert backend.recursive_query("p") == "Error: max_children_total exceeded"
    assert backend.node.children == 3


def test_a_batch_is_cut_to_the_limit_for_batches() -> None:
    assert local(max_children_per_batch=2).recursive_query_batched(["a", "b", "c"]) == ["<a>", "<b>"]


def test_a_batch_of_children_keeps_the_order_and_the_others() -> None:
    backend = local()
    answers = backend.recursive_query_batched(["a", "fail", "nothing", "d"])
    assert (answers[0], answers[3]) == ("<a>", "<d>")
    assert answers[1] == "Error: RuntimeError: cannot do fail"
    assert answers[2].startswith("Error: the child ended without an answer")
    assert backend.recursive_query_batched(["a", "b"], "m", context=[1, 2]) == ["<m:a>", "<m:b>"]
    with pytest.raises(UsageMistake, match="context has 1 entries for 2 prompts"):
        backend.recursive_query_batched(["a", "b"], context=[1])


def test_a_single_query_raises_what_broke_its_child() -> None:
    backend = local()
    with pytest.raises(RuntimeError, match="cannot do fail"):
        backend.recursive_query("fail")
    with pytest.raises(ChildFailedError, match="without an answer"):
        backend.recursive_query("nothing")


def test_results_of_children_are_cut() -> None:
    assert local(result_truncation_limit=4).recursive_query("abcdef") == "<abc"


def test_context_variables_reach_the_threads_of_a_batch() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="lost")
    variable.set("kept")
    threads = set()

    def chat(messages: list[dict[str, str]], model: str | None = None) -> str:
        threads.add(threading.get_ident())
        return variable.get()

    assert local(chat).recursive_query_batched(["a", "b"]) == ["<kept>", "<kept>"]
    assert DirectLMBackend(chat).query_batched(["a", "b"]) == ["kept", "kept"]
    assert threading.get_ident() not in threads


def test_a_child_that_took_too_long_is_an_error_text_whatever_it_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Runner):
        def run(self, context: Any, task_prompt: str, *, model: str | None = None, timeout_s: float = 0) -> Any:
            clock[0] += 2 * timeout_s
            return super().run(context, task_prompt, model=model)

    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    backend = local(runner=lambda chat, **options: Slow(chat, options), per_child_timeout_s=5)
    assert backend.recursive_query("p") == "Error: child timeout after 5.000s"
    [trace] = backend.child_traces
    assert (trace.duration_s, trace.result_preview, trace.error) == (10.0, None, "child timeout after 5.000s")


def test_a_runner_that_knows_no_timeout_can_be_used_with_one() -> None:
    assert local(per_child_timeout_s=60).recursive_query("p") == "<p>"


# -- traces and callbacks


def test_each_child_leaves_a_trace() -> None:
    backend = local()
    backend.recursive_query("p" * 200)
    with pytest.raises(RuntimeError):
        backend.recursive_query("fail")
    good, bad = backend.child_traces
    assert (good.depth, good.prompt_preview, good.result_preview, good.error) == (1, "p" * 80, "<" + "p" * 79, None)
    assert good.duration_s >= 0
    assert (bad.result_preview, bad.error) == (None, "RuntimeError: cannot do fail")


def test_callbacks_tell_start_and_end_of_each_child() -> None:
    told: list[tuple[Any, ...]] = []
    backend = local(on_start=lambda *args: told.append(args), on_complete=lambda *args: told.append(args))
    backend.recursive_query("p", "m")
    with pytest.raises(RuntimeError):
        backend.recursive_query("fail")
    assert [told[0], told[2]] == [(1, "m", "p"), (1, "default", "fail")]
    assert (told[1][:2], told[1][3]) == ((1, "m"), None)
    assert (told[3][:2], told[3][3]) == ((1, "default"), "RuntimeError: cannot do fail")
    assert told[1][2] >= 0


def test_callbacks_that_raise_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ValueError("mine")

    assert local(on_start=broken, on_complete=broken).recursive_query("p") == "<p>"
    assert caplog.text.count("ValueError: mine") == 2


def test_usage_adds_up_over_the_tree() -> None:
    backend = local()
    backend.query("a")
    backend.query_batched(["b", "fail", "c"])
    below = backend._child_backend(
        1, echo, system_prompt="", max_iterations=1, depth=1, env_max_iterations_multiplier=1
    )
    below.query("d")
    assert below.node.usage == Usage(calls=1)
    assert backend.node.usage == Usage(calls=4)
